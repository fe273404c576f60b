//! A line in two 256-bit registers.

use std::arch::x86_64::*;

type Line = [__m256i; 2];

/// # Safety
/// `src` is a multiple of 64 and readable for a line.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn stream_load(src: *const u8) -> Line {
    let src = src.cast::<__m256i>();
    // SAFETY: the caller's: two registers are a line.
    unsafe {
        [
            _mm256_stream_load_si256(src),
            _mm256_stream_load_si256(src.add(1)),
        ]
    }
}

/// # Safety
/// `dst` is a multiple of 64 and writable for a line.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn stream_store(dst: *mut u8, [a, b]: Line) {
    let dst = dst.cast::<__m256i>();
    // SAFETY: the caller's: two registers are a line.
    unsafe {
        _mm256_stream_si256(dst, a);
        _mm256_stream_si256(dst.add(1), b);
    }
}

/// # Safety
/// `src` is readable for a line.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn read(src: *const u8) -> Line {
    let src = src.cast::<__m256i>();
    // SAFETY: the caller's: two registers are a line.
    unsafe { [_mm256_loadu_si256(src), _mm256_loadu_si256(src.add(1))] }
}

/// # Safety
/// `dst` is writable for a line.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn write(dst: *mut u8, [a, b]: Line) {
    let dst = dst.cast::<__m256i>();
    // SAFETY: the caller's: two registers are a line.
    unsafe {
        _mm256_storeu_si256(dst, a);
        _mm256_storeu_si256(dst.add(1), b);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn zero() -> Line {
    [_mm256_setzero_si256(); 2]
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn or([a0, a1]: Line, [b0, b1]: Line) -> Line {
    [_mm256_or_si256(a0, b0), _mm256_or_si256(a1, b1)]
}

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn is_zero([a, b]: Line) -> bool {
    let any = _mm256_or_si256(a, b);
    _mm256_testz_si256(any, any) == 1
}
