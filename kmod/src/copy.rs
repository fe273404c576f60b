// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Streaming loads.
//!
//! A plain load of write-combined memory is a bus transaction of 8 bytes; `movntdqa` fetches a whole
//! line into a fill buffer, and the three loads that follow take the rest from there. Stores need
//! nothing of the kind: write-combining gathers whatever stores come (`shim.c` uses `movnti`).

use crate::{shim, uapi};
use core::arch::asm;

/// Addresses and lengths of [`load`] are multiples of this: one cache line.
pub(crate) const LINE: usize = 64;

/// Orders all earlier stores, those to write-combined memory included, before all later ones.
pub(crate) fn store_fence() {
    // SAFETY: The instruction touches no register and no memory.
    unsafe { asm!("sfence", options(nostack, preserves_flags)) };
}

/// Copies `len` bytes from device memory.
///
/// # Safety
///
/// - `from` is mapped device memory, a multiple of [`LINE`], `to` valid for writes; both for `len`
///   bytes, which is a multiple of [`LINE`] and at most a few KiB: the CPU is not given up meanwhile.
/// - The caller is in task context.
pub(crate) unsafe fn load(to: *mut u8, from: *const u8, len: usize) {
    if len == 0 {
        return;
    }
    if shim::uvram_caps() & uapi::CAP_STREAM == 0 {
        for at in (0..len).step_by(8) {
            // SAFETY: In bounds by the caller's promise; `to` may be unaligned, `from` is aligned.
            unsafe {
                let word = from.add(at).cast::<u64>().read_volatile();
                to.add(at).cast::<u64>().write_unaligned(word);
            }
        }
        return;
    }
    // SAFETY: Task context may use the FPU; the section ends below and holds nothing that sleeps.
    unsafe { shim::kernel_fpu_begin_mask(shim::KFPU_MXCSR) };
    // SAFETY: The loop reads and writes `len` bytes, a positive multiple of 64, at the two addresses,
    // which the caller promises. The vector registers belong to this section, and the compiler of a
    // kernel, having no FPU, keeps nothing in them: they need no clobbers. The CPU has SSE4.1.
    unsafe {
        asm!(
            "2:",
            "movntdqa xmm0, [{from}]",
            "movntdqa xmm1, [{from} + 16]",
            "movntdqa xmm2, [{from} + 32]",
            "movntdqa xmm3, [{from} + 48]",
            "movdqu [{to}], xmm0",
            "movdqu [{to} + 16], xmm1",
            "movdqu [{to} + 32], xmm2",
            "movdqu [{to} + 48], xmm3",
            "add {from}, 64",
            "add {to}, 64",
            "sub {len}, 64",
            "jnz 2b",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            len = inout(reg) len => _,
            options(nostack),
        );
    }
    // SAFETY: It ends the section begun above.
    unsafe { shim::kernel_fpu_end() };
}

/// Writes `len` bytes from memory, in plain 8-byte stores.
///
/// # Safety
///
/// `to` is mapped device memory, a multiple of 8, `from` valid for reads; both for `len` bytes, a
/// multiple of 8.
pub(crate) unsafe fn store(to: *mut u8, from: *const u8, len: usize) {
    for at in (0..len).step_by(8) {
        // SAFETY: In bounds by the caller's promise; `from` may be unaligned, `to` is aligned.
        unsafe {
            let word = from.add(at).cast::<u64>().read_unaligned();
            to.add(at).cast::<u64>().write_volatile(word);
        }
    }
    store_fence();
}
