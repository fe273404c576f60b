//! A line in four 128-bit registers.

use std::arch::x86_64::*;

type Line = [__m128i; 4];

/// # Safety
/// `src` is a multiple of 64 and readable for a line.
#[inline]
#[target_feature(enable = "sse4.1")]
pub(super) unsafe fn stream_load(src: *const u8) -> Line {
    let src = src.cast::<__m128i>();
    // SAFETY: the caller's: four registers are a line.
    unsafe {
        [
            _mm_stream_load_si128(src),
            _mm_stream_load_si128(src.add(1)),
            _mm_stream_load_si128(src.add(2)),
            _mm_stream_load_si128(src.add(3)),
        ]
    }
}

/// # Safety
/// `dst` is a multiple of 64 and writable for a line.
#[inline]
#[target_feature(enable = "sse4.1")]
pub(super) unsafe fn stream_store(dst: *mut u8, [a, b, c, d]: Line) {
    let dst = dst.cast::<__m128i>();
    // SAFETY: the caller's: four registers are a line.
    unsafe {
        _mm_stream_si128(dst, a);
        _mm_stream_si128(dst.add(1), b);
        _mm_stream_si128(dst.add(2), c);
        _mm_stream_si128(dst.add(3), d);
    }
}

/// # Safety
/// `src` is readable for a line.
#[inline]
#[target_feature(enable = "sse4.1")]
pub(super) unsafe fn read(src: *const u8) -> Line {
    let src = src.cast::<__m128i>();
    // SAFETY: the caller's: four registers are a line.
    unsafe {
        [
            _mm_loadu_si128(src),
            _mm_loadu_si128(src.add(1)),
            _mm_loadu_si128(src.add(2)),
            _mm_loadu_si128(src.add(3)),
        ]
    }
}

/// # Safety
/// `dst` is writable for a line.
#[inline]
#[target_feature(enable = "sse4.1")]
pub(super) unsafe fn write(dst: *mut u8, [a, b, c, d]: Line) {
    let dst = dst.cast::<__m128i>();
    // SAFETY: the caller's: four registers are a line.
    unsafe {
        _mm_storeu_si128(dst, a);
        _mm_storeu_si128(dst.add(1), b);
        _mm_storeu_si128(dst.add(2), c);
        _mm_storeu_si128(dst.add(3), d);
    }
}

#[inline]
#[target_feature(enable = "sse4.1")]
pub(super) fn zero() -> Line {
    [_mm_setzero_si128(); 4]
}

#[inline]
#[target_feature(enable = "sse4.1")]
pub(super) fn or([a0, a1, a2, a3]: Line, [b0, b1, b2, b3]: Line) -> Line {
    [
        _mm_or_si128(a0, b0),
        _mm_or_si128(a1, b1),
        _mm_or_si128(a2, b2),
        _mm_or_si128(a3, b3),
    ]
}

#[inline]
#[target_feature(enable = "sse4.1")]
pub(super) fn is_zero([a, b, c, d]: Line) -> bool {
    let any = _mm_or_si128(_mm_or_si128(a, b), _mm_or_si128(c, d));
    _mm_testz_si128(any, any) == 1
}
