//! A line in one 512-bit register.

use std::arch::x86_64::*;

/// # Safety
/// `src` is a multiple of 64 and readable for a line.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn stream_load(src: *const u8) -> __m512i {
    // SAFETY: the caller's.
    unsafe { _mm512_stream_load_si512(src.cast()) }
}

/// # Safety
/// `dst` is a multiple of 64 and writable for a line.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn stream_store(dst: *mut u8, line: __m512i) {
    // SAFETY: the caller's.
    unsafe { _mm512_stream_si512(dst.cast(), line) }
}

/// # Safety
/// `src` is readable for a line.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn read(src: *const u8) -> __m512i {
    // SAFETY: the caller's.
    unsafe { _mm512_loadu_si512(src.cast()) }
}

/// # Safety
/// `dst` is writable for a line.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn write(dst: *mut u8, line: __m512i) {
    // SAFETY: the caller's.
    unsafe { _mm512_storeu_si512(dst.cast(), line) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn zero() -> __m512i {
    _mm512_setzero_si512()
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn or(a: __m512i, b: __m512i) -> __m512i {
    _mm512_or_si512(a, b)
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn is_zero(line: __m512i) -> bool {
    _mm512_test_epi64_mask(line, line) == 0
}
