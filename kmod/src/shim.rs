// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The functions of `shim.c` and exports that the bindings leave out.

use kernel::{bindings, ffi::c_void, prelude::*};

/// `KFPU_MXCSR` (arch/x86/include/asm/fpu/api.h): what `kernel_fpu_begin()` asks for on 64 bits.
pub(crate) const KFPU_MXCSR: c_uint = 1 << 1;

#[allow(improper_ctypes)]
unsafe extern "C" {
    pub(crate) fn uvram_space_open() -> *mut bindings::inode;
    pub(crate) fn uvram_space_close(inode: *mut bindings::inode);
    pub(crate) fn uvram_pci_domain(pdev: *const bindings::pci_dev) -> u32;
    pub(crate) fn uvram_pci_flags(pdev: *const bindings::pci_dev, bar: c_int) -> u64;
    pub(crate) fn uvram_claim(start: u64, len: u64) -> c_int;
    pub(crate) fn uvram_unclaim(start: u64, len: u64);
    pub(crate) fn uvram_kernel_mode(address: *const c_void) -> u32;
    pub(crate) fn uvram_user_mode(
        vma: *mut bindings::vm_area_struct,
        address: usize,
        size: *mut u64,
        mode: *mut u32,
    ) -> c_int;
    pub(crate) fn uvram_file_open(file: *mut bindings::file, space: *mut bindings::inode);
    pub(crate) fn uvram_set_pfnmap(vma: *mut bindings::vm_area_struct);
    pub(crate) safe fn uvram_caps() -> u32;
    pub(crate) fn uvram_copy_from_iter(
        to: *mut c_void,
        len: usize,
        from: *mut bindings::iov_iter,
    ) -> usize;

    pub(crate) fn kernel_fpu_begin_mask(mask: c_uint);
    pub(crate) fn kernel_fpu_end();
}
