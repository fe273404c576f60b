// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Mappings of a region in user space.
//!
//! Nothing is mapped by mmap itself: page faults insert pages, in steps of 1 GiB or 2 MiB where
//! addresses on both sides allow it, else 4 KiB pages for the whole 2 MiB around the fault. One touch
//! in every 2 MiB populates a mapping for good: pages of device memory are never reclaimed.

use crate::{
    file::{Attachment, UvramFile},
    region::{Region, MAX_SIZE, SPACE_SHIFT},
    shim, uapi,
    window::extent_at,
};
use kernel::{
    bindings,
    mm::virt::{flags, VmaNew},
    page::{PAGE_SHIFT, PAGE_SIZE},
    prelude::*,
    sync::{atomic::Relaxed, Arc, ArcBorrow},
    types::ForeignOwnable,
};

const PMD_ORDER: u32 = 9;
const PUD_ORDER: u32 = 18;
const PMD_SIZE: usize = PAGE_SIZE << PMD_ORDER;

/// The operations, which C only reads.
struct Operations(bindings::vm_operations_struct);

// SAFETY: It is never written, and its functions may be called on any CPU.
unsafe impl Sync for Operations {}

static OPERATIONS: Operations = {
    let mut operations: bindings::vm_operations_struct = pin_init::zeroed();
    operations.open = Some(open);
    operations.close = Some(close);
    operations.fault = Some(fault);
    operations.huge_fault = Some(huge_fault);
    Operations(operations)
};

/// The region of a mapping and the offset in it of file page `pgoff`; the id is checked by mmap.
fn offset_of(pgoff: usize) -> u64 {
    ((pgoff as u64) << PAGE_SHIFT) & (MAX_SIZE - 1)
}

/// Maps a part of the attached region.
pub(crate) fn mmap(file: &UvramFile, vma: &VmaNew) -> Result {
    if vma.flags() & flags::SHARED == 0 {
        return Err(EINVAL);
    }
    vma.try_clear_mayexec().map_err(|_| EACCES)?;
    let attachment = file.attached_for_mapping().ok_or(ENOTCONN)?;
    let count = CountGuard(&attachment);
    let raw = vma.as_ptr();
    // SAFETY: The mapping is being set up by this thread.
    let pgoff = unsafe { (*raw).vm_pgoff };
    let len = (vma.end() - vma.start()) as u64;
    let region = &attachment.region;
    if (pgoff as u64) >> (SPACE_SHIFT - PAGE_SHIFT as u32) != u64::from(region.id) {
        return Err(ENXIO);
    }
    match offset_of(pgoff).checked_add(len) {
        Some(end) if end <= region.size => {}
        _ => return Err(EINVAL),
    }
    if region.is_dead() {
        return Err(EIO);
    }
    vma.set_io();
    vma.set_dontexpand();
    vma.set_dontdump();
    vma.set_dontcopy();
    // SAFETY: The mapping is being set up by this thread. Its private data is a reference of its own,
    // which `close` drops; `OPERATIONS` is static.
    unsafe {
        shim::uvram_set_pfnmap(raw);
        (*raw).vm_ops = &OPERATIONS.0;
        (*raw).vm_private_data = attachment.clone().into_foreign();
    }
    core::mem::forget(count);
    Ok(())
}

/// Takes back the count of a mapping that is not made after all.
struct CountGuard<'a>(&'a Attachment);

impl Drop for CountGuard<'_> {
    fn drop(&mut self) {
        self.0.mappings.fetch_sub(1, Relaxed);
    }
}

/// The attachment of a mapping.
///
/// # Safety
///
/// `vma` is a valid mapping whose operations are [`OPERATIONS`], and stays so for `'a`.
unsafe fn attachment<'a>(vma: *mut bindings::vm_area_struct) -> ArcBorrow<'a, Attachment> {
    // SAFETY: `mmap` or `open` put a reference there, and `close` has not been called.
    unsafe { <Arc<Attachment> as ForeignOwnable>::borrow((*vma).vm_private_data) }
}

/// A mapping was split or moved: both halves have a reference.
///
/// # Safety
///
/// Called by the kernel with a valid copy of a mapping of ours.
unsafe extern "C" fn open(vma: *mut bindings::vm_area_struct) {
    // SAFETY: By the caller's promise.
    let attachment: Arc<Attachment> = unsafe { attachment(vma) }.into();
    attachment.mappings.fetch_add(1, Relaxed);
    // The same pointer again: the copy's own reference.
    let _ = attachment.into_foreign();
}

/// A mapping is gone.
///
/// # Safety
///
/// Called by the kernel once for every mapping that [`mmap`] or [`open`] saw, last of all.
unsafe extern "C" fn close(vma: *mut bindings::vm_area_struct) {
    // SAFETY: By the caller's promise the reference is there and not used again.
    let attachment =
        unsafe { <Arc<Attachment> as ForeignOwnable>::from_foreign((*vma).vm_private_data) };
    attachment.mappings.fetch_sub(1, Relaxed);
}

/// # Safety
///
/// As [`handle`].
unsafe extern "C" fn fault(vmf: *mut bindings::vm_fault) -> bindings::vm_fault_t {
    // SAFETY: By the caller's promise.
    unsafe { handle(vmf, 0) }
}

/// # Safety
///
/// As [`handle`].
unsafe extern "C" fn huge_fault(
    vmf: *mut bindings::vm_fault,
    order: c_uint,
) -> bindings::vm_fault_t {
    // SAFETY: By the caller's promise.
    unsafe { handle(vmf, order) }
}

/// # Safety
///
/// `vmf` is a fault that is being handled, of a mapping whose operations are [`OPERATIONS`].
unsafe fn handle(vmf: *mut bindings::vm_fault, order: u32) -> bindings::vm_fault_t {
    // SAFETY: The mapping is valid during the fault, by the caller's promise.
    let (vma, attachment) = unsafe {
        let vma = (*vmf).__bindgen_anon_1.vma;
        (vma, attachment(vma))
    };
    attachment
        .region
        .while_alive(|region| match order {
            // SAFETY: By the caller's promise.
            0 => unsafe { insert_small(vmf, vma, region) },
            // SAFETY: By the caller's promise.
            PMD_ORDER | PUD_ORDER => unsafe { insert_huge(vmf, vma, region, order) },
            _ => bindings::vm_fault_reason_VM_FAULT_FALLBACK,
        })
        .unwrap_or(bindings::vm_fault_reason_VM_FAULT_SIGBUS)
}

/// Inserts the 4 KiB pages of the mapping in the 2 MiB around the fault.
///
/// # Safety
///
/// As [`handle`]; the region is alive for the duration of the call.
unsafe fn insert_small(
    vmf: *mut bindings::vm_fault,
    vma: *mut bindings::vm_area_struct,
    region: &Region,
) -> bindings::vm_fault_t {
    // SAFETY: Both are valid during the fault.
    let (hit, start, end, pgoff, prot) = unsafe {
        (
            (*vmf).__bindgen_anon_1.address & !(PAGE_SIZE - 1),
            (*vma).__bindgen_anon_1.__bindgen_anon_1.vm_start,
            (*vma).__bindgen_anon_1.__bindgen_anon_1.vm_end,
            (*vma).vm_pgoff,
            (*vma).vm_page_prot,
        )
    };
    let insert = |address: usize| {
        let offset = offset_of(pgoff) + (address - start) as u64;
        let Some(extent) = extent_at(&region.extents, offset) else {
            return bindings::vm_fault_reason_VM_FAULT_SIGBUS;
        };
        let pfn = (extent.phys + (offset - extent.start)) >> PAGE_SHIFT;
        // SAFETY: The address is in the mapping, which is a shared PFN mapping; the frame is device
        // memory of the region, which is alive, and has no struct page.
        unsafe { bindings::vmf_insert_pfn_prot(vma, address, pfn as usize, prot) }
    };
    let result = insert(hit);
    if result != bindings::vm_fault_reason_VM_FAULT_NOPAGE {
        return result;
    }
    let block = hit & !(PMD_SIZE - 1);
    for address in (block.max(start)..(block + PMD_SIZE).min(end)).step_by(PAGE_SIZE) {
        // A neighbour that cannot be inserted now has its own fault.
        if address != hit && insert(address) != bindings::vm_fault_reason_VM_FAULT_NOPAGE {
            break;
        }
    }
    result
}

/// Inserts one huge page around the fault, where virtual and physical addresses allow it.
///
/// # Safety
///
/// As [`insert_small`].
unsafe fn insert_huge(
    vmf: *mut bindings::vm_fault,
    vma: *mut bindings::vm_area_struct,
    region: &Region,
    order: u32,
) -> bindings::vm_fault_t {
    let size = PAGE_SIZE << order;
    // SAFETY: Both are valid during the fault.
    let (hit, start, end, pgoff, write) = unsafe {
        (
            (*vmf).__bindgen_anon_1.address,
            (*vma).__bindgen_anon_1.__bindgen_anon_1.vm_start,
            (*vma).__bindgen_anon_1.__bindgen_anon_1.vm_end,
            (*vma).vm_pgoff,
            (*vmf).flags & bindings::fault_flag_FAULT_FLAG_WRITE != 0,
        )
    };
    let block = hit & !(size - 1);
    if block < start || end - block < size {
        return bindings::vm_fault_reason_VM_FAULT_FALLBACK;
    }
    let offset = offset_of(pgoff) + (block - start) as u64;
    let Some(extent) = extent_at(&region.extents, offset) else {
        return bindings::vm_fault_reason_VM_FAULT_FALLBACK;
    };
    let phys = extent.phys + (offset - extent.start);
    let left = extent.start + extent.len - offset;
    if phys % size as u64 != 0 || left < size as u64 {
        return bindings::vm_fault_reason_VM_FAULT_FALLBACK;
    }
    let pfn = (phys >> PAGE_SHIFT) as usize;
    // SAFETY: The whole block lies in the mapping and in one extent of the region, which is alive, and
    // is aligned on both sides; the kernel asked for this order at the level that `vmf` stands at.
    unsafe {
        if order == PMD_ORDER {
            bindings::vmf_insert_pfn_pmd(vmf, pfn, write)
        } else {
            bindings::vmf_insert_pfn_pud(vmf, pfn, write)
        }
    }
}

/// Says what the page table of this process holds at an address in a mapping of a region.
pub(crate) fn query(query: &mut uapi::Mapping) -> Result {
    let address = usize::try_from(query.address)?;
    let current = current!();
    let mm = current.mm().ok_or(EFAULT)?;
    let guard = mm.mmap_read_lock();
    let vma = guard.vma_lookup(address).ok_or(EFAULT)?.as_ptr();
    // SAFETY: The mapping is valid while the lock is held; `vm_ops` and `vm_pgoff` do not change.
    let (ops, pgoff) = unsafe { ((*vma).vm_ops, (*vma).vm_pgoff) };
    if !core::ptr::eq(ops, &OPERATIONS.0) {
        return Err(EINVAL);
    }
    query.id = (pgoff as u64 >> (SPACE_SHIFT - PAGE_SHIFT as u32)) as u32;
    query.page_size = 0;
    query.mode = uapi::MODE_UNKNOWN;
    // SAFETY: The mapping is a valid PFN mapping and the lock is held; the outputs are ours. An error
    // says that no page is there.
    let _ = unsafe { shim::uvram_user_mode(vma, address, &mut query.page_size, &mut query.mode) };
    Ok(())
}
