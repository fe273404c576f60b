//! Lines by plain 8-byte accesses, for a CPU without streaming loads and for comparison.
//!
//! The WC side is accessed by aligned volatile accesses and nothing else: the compiler may neither
//! widen, split or repeat them nor make a `memcpy` of the loop. On WC memory each such read is a
//! round trip on the bus: a device that is read through these routines works, and is slow.
//!
//! The fence is that of the Rust memory model. On x86 it is an `mfence`, which orders WC memory
//! also towards the bus. Elsewhere it is only promised among CPUs (on Arm `dmb ish`): a port that
//! hands memory to a copy engine brings its own fence.

use std::sync::atomic::{Ordering, fence};

use super::LINE;
use super::frame::Lines;

/// The routines that every CPU can run.
pub(super) enum Portable {}

const WORD: usize = size_of::<u64>();

// SAFETY: each function walks exactly `lines * LINE` bytes, WORD by WORD (a LINE is whole words);
// a sequentially consistent fence orders everything before it before everything after it.
unsafe impl Lines for Portable {
    unsafe fn load_lines(dst: *mut u8, src: *const u8, lines: usize) {
        for at in (0..lines * LINE).step_by(WORD) {
            // SAFETY: at + WORD <= lines * LINE, and `src + at` is a multiple of WORD as `src` is.
            unsafe {
                let word = src.add(at).cast::<u64>().read_volatile();
                dst.add(at).cast::<u64>().write_unaligned(word);
            }
        }
    }

    unsafe fn store_lines(dst: *mut u8, src: *const u8, lines: usize) {
        for at in (0..lines * LINE).step_by(WORD) {
            // SAFETY: at + WORD <= lines * LINE, and `dst + at` is a multiple of WORD as `dst` is.
            unsafe {
                let word = src.add(at).cast::<u64>().read_unaligned();
                dst.add(at).cast::<u64>().write_volatile(word);
            }
        }
    }

    unsafe fn zero_lines(dst: *mut u8, lines: usize) {
        for at in (0..lines * LINE).step_by(WORD) {
            // SAFETY: as for `store_lines`.
            unsafe { dst.add(at).cast::<u64>().write_volatile(0) };
        }
    }

    unsafe fn lines_are_zero(src: *const u8, lines: usize) -> bool {
        // SAFETY: as for `load_lines`.
        (0..lines * LINE)
            .step_by(WORD)
            .all(|at| unsafe { src.add(at).cast::<u64>().read_volatile() } == 0)
    }

    #[inline]
    fn load_fence() {
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn store_fence() {
        fence(Ordering::SeqCst);
    }
}
