//! Lines by the streaming loads and stores of x86: `movntdqa` and `movntdq`.
//!
//! The loops are written once, by a macro, over a few one-instruction functions that each of the
//! files below gives for its registers: `#[target_feature]` functions inline into each other
//! only where the features are spelled out, which rules generics out.
//!
//! A block is what the loops move in one turn: as many lines as fit the registers, 512 bytes
//! with AVX-512 (8 of 32 registers) and AVX2 (16 of 16), 256 with SSE4.1 (16 of 16). All loads
//! of a block are issued before its first store, and those of one line side by side, so that a line
//! is fetched once. The CPU looks ahead across blocks: 4 KiB from an H200 in 4.0 us, where one load
//! takes 1.2 us, is some 20 lines in flight, all the CPU has buffers for.
//!
//! `std::arch` writes these instructions as inline assembly. The loads are "pure" there: the
//! compiler may drop one whose result is not used and merge two of the same address between fences,
//! neither of which hurts here; it may not move them over [`load_fence`] or over stores.

use std::arch::x86_64::{_mm_lfence, _mm_mfence, _mm_sfence};

use super::LINE;
use super::frame::Lines;

mod avx2;
mod avx512;
mod sse41;

/// Implements [`Lines`] as a type `$isa`, over the functions of module `$module`:
/// `stream_load`, `stream_store`, `read`, `write`, `zero`, `or`, `is_zero`, each of one line.
/// `$line` names a variable for each line of a block, `$index` counts them from 0.
macro_rules! streaming_lines {
    ($isa:ident, $module:ident, $feature:literal, [$($line:ident = $index:literal),+]) => {
        /// The routines of one instruction set.
        pub(super) enum $isa {}

        impl $isa {
            const BLOCK: usize = [$($index),+].len();
        }

        // SAFETY: each function goes through exactly `lines` lines, in blocks and then singly:
        // a turn takes off `lines` what it adds to the pointers, and begins only if that much is
        // left. The fences are those that the SDM names for WC memory.
        unsafe impl Lines for $isa {
            #[target_feature(enable = $feature)]
            unsafe fn load_lines(mut dst: *mut u8, mut src: *const u8, mut lines: usize) {
                // SAFETY: every access is to one of the caller's lines, `src` stays aligned.
                unsafe {
                    while lines >= Self::BLOCK {
                        $(let $line = $module::stream_load(src.add($index * LINE));)+
                        $($module::write(dst.add($index * LINE), $line);)+
                        src = src.add(Self::BLOCK * LINE);
                        dst = dst.add(Self::BLOCK * LINE);
                        lines -= Self::BLOCK;
                    }
                    while lines > 0 {
                        $module::write(dst, $module::stream_load(src));
                        src = src.add(LINE);
                        dst = dst.add(LINE);
                        lines -= 1;
                    }
                }
            }

            #[target_feature(enable = $feature)]
            unsafe fn store_lines(mut dst: *mut u8, mut src: *const u8, mut lines: usize) {
                // SAFETY: every access is to one of the caller's lines, `dst` stays aligned.
                unsafe {
                    while lines >= Self::BLOCK {
                        $(let $line = $module::read(src.add($index * LINE));)+
                        $($module::stream_store(dst.add($index * LINE), $line);)+
                        src = src.add(Self::BLOCK * LINE);
                        dst = dst.add(Self::BLOCK * LINE);
                        lines -= Self::BLOCK;
                    }
                    while lines > 0 {
                        $module::stream_store(dst, $module::read(src));
                        src = src.add(LINE);
                        dst = dst.add(LINE);
                        lines -= 1;
                    }
                }
            }

            #[target_feature(enable = $feature)]
            unsafe fn zero_lines(mut dst: *mut u8, mut lines: usize) {
                let zero = $module::zero();
                // SAFETY: every access is to one of the caller's lines, `dst` stays aligned.
                unsafe {
                    while lines >= Self::BLOCK {
                        $($module::stream_store(dst.add($index * LINE), zero);)+
                        dst = dst.add(Self::BLOCK * LINE);
                        lines -= Self::BLOCK;
                    }
                    while lines > 0 {
                        $module::stream_store(dst, zero);
                        dst = dst.add(LINE);
                        lines -= 1;
                    }
                }
            }

            #[target_feature(enable = $feature)]
            unsafe fn lines_are_zero(mut src: *const u8, mut lines: usize) -> bool {
                // SAFETY: every access is to one of the caller's lines, `src` stays aligned.
                unsafe {
                    while lines >= Self::BLOCK {
                        $(let $line = $module::stream_load(src.add($index * LINE));)+
                        let any = $module::zero();
                        $(let any = $module::or(any, $line);)+
                        if !$module::is_zero(any) {
                            return false;
                        }
                        src = src.add(Self::BLOCK * LINE);
                        lines -= Self::BLOCK;
                    }
                    while lines > 0 {
                        if !$module::is_zero($module::stream_load(src)) {
                            return false;
                        }
                        src = src.add(LINE);
                        lines -= 1;
                    }
                }
                true
            }

            #[inline]
            fn load_fence() {
                load_fence();
            }

            #[inline]
            fn store_fence() {
                store_fence();
            }
        }
    };
}

streaming_lines!(
    Avx512,
    avx512,
    "avx512f",
    [a = 0, b = 1, c = 2, d = 3, e = 4, f = 5, g = 6, h = 7]
);
streaming_lines!(
    Avx2,
    avx2,
    "avx2",
    [a = 0, b = 1, c = 2, d = 3, e = 4, f = 5, g = 6, h = 7]
);
streaming_lines!(Sse41, sse41, "sse4.1", [a = 0, b = 1, c = 2, d = 3]);

/// `mfence` is the fence that the SDM names for streaming loads. The `lfence` after it is for the
/// Skylake family, where `movntdqa` from WC memory may pass an earlier `mfence` (a listed
/// erratum, fixed by microcode that makes `mfence` wait as this pair does). The pair takes 19 ns on
/// an Emerald Rapids Xeon and keeps a call from overlapping the one before it; one load from a BAR
/// takes a microsecond.
#[inline]
fn load_fence() {
    // SAFETY: SSE2 is part of x86-64.
    unsafe {
        _mm_mfence();
        _mm_lfence();
    }
}

#[inline]
fn store_fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { _mm_sfence() }
}
