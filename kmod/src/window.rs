// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The kernel's own mapping of a region, write-combined, and what was measured of it.
//!
//! It does two things beside serving read and write. `ioremap_wc()` reserves the memory type of the
//! range, without which the x86 page table code makes every page of device memory that is inserted
//! later uncached, whatever was asked for. And its page table entry shows what type the range really
//! has: a reservation that somebody else made before wins silently.

use crate::{copy, shim, uapi};
use kernel::{
    bindings,
    ffi::c_void,
    page::PAGE_SIZE,
    prelude::*,
    time::{Instant, Monotonic},
};

/// A physically contiguous run of a region.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    /// Offset of its first byte in the region.
    pub(crate) start: u64,
    /// Physical address of its first byte.
    pub(crate) phys: u64,
    /// Bytes.
    pub(crate) len: u64,
}

/// The extent that holds byte `offset`.
pub(crate) fn extent_at(extents: &[Extent], offset: u64) -> Option<&Extent> {
    let after = extents.partition_point(|extent| extent.start <= offset);
    let extent = extents.get(after.checked_sub(1)?)?;
    (offset - extent.start < extent.len).then_some(extent)
}

/// One run of I/O memory in the kernel's address space.
///
/// # Invariants
///
/// `base` is what an `ioremap` function returned, and is unmapped when this is dropped.
struct Part {
    start: u64,
    len: u64,
    base: *mut c_void,
}

// SAFETY: A mapping of the kernel's address space is the same on every CPU; who may access the memory
// when is up to the users of the device.
unsafe impl Send for Part {}
// SAFETY: As above; the fields are never written.
unsafe impl Sync for Part {}

impl Part {
    fn map(extent: &Extent, combine: bool) -> Result<Self> {
        let len = usize::try_from(extent.len)?;
        // SAFETY: The range is device memory that is claimed for the region.
        let base = unsafe {
            if combine {
                bindings::ioremap_wc(extent.phys, len)
            } else {
                bindings::ioremap(extent.phys, len)
            }
        };
        if base.is_null() {
            return Err(ENOMEM);
        }
        // INVARIANT: It was just returned.
        Ok(Part {
            start: extent.start,
            len: extent.len,
            base,
        })
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // SAFETY: By the invariant it is mapped and this is the last user.
        unsafe { bindings::iounmap(self.base) };
    }
}

/// Speeds in 10^6 bytes a second; 0: not measured.
#[derive(Default, Clone, Copy)]
pub(crate) struct Speed {
    pub(crate) uncached_write: u32,
    pub(crate) write: u32,
    pub(crate) read: u32,
}

/// A region's memory in the kernel's address space.
pub(crate) struct Window {
    parts: KVVec<Part>,
}

impl Window {
    /// Maps `extents` write-combined.
    pub(crate) fn map(extents: &[Extent]) -> Result<Self> {
        let mut parts = KVVec::with_capacity(extents.len(), GFP_KERNEL)?;
        for extent in extents {
            parts.push(Part::map(extent, true)?, GFP_KERNEL)?;
        }
        Ok(Window { parts })
    }

    /// The address of byte `offset` and how many bytes follow it there.
    pub(crate) fn at(&self, offset: u64) -> Option<(*mut u8, usize)> {
        let after = self.parts.partition_point(|part| part.start <= offset);
        let part = self.parts.get(after.checked_sub(1)?)?;
        let inside = offset - part.start;
        let left = part.len.checked_sub(inside).filter(|left| *left > 0)?;
        // SAFETY: `inside` is less than the length of the mapping.
        let address = unsafe { part.base.cast::<u8>().add(inside as usize) };
        Some((address, left as usize))
    }

    /// The memory type of all parts, one of `UVRAM_MODE_*`; unknown if they differ.
    pub(crate) fn mode(&self) -> u32 {
        let mut modes = self.parts.iter().map(|part| {
            // SAFETY: The address is mapped.
            unsafe { shim::uvram_kernel_mode(part.base) }
        });
        let first = modes.next().unwrap_or(uapi::MODE_UNKNOWN);
        if modes.all(|mode| mode == first) {
            first
        } else {
            uapi::MODE_UNKNOWN
        }
    }
}

/// How often the first page is written and read for each figure.
const ROUNDS: usize = 16;

/// Measures the first page of a region that nobody uses yet: uncached stores, stores as they will be,
/// streaming loads. The page is written back as it was read. Between uncached and write-combined
/// stores to a real bus lies a factor of ten or more; in an emulator there is none.
pub(crate) fn measure(first: &Extent) -> Result<Speed> {
    let page = Extent {
        len: PAGE_SIZE as u64,
        ..*first
    };
    let mut buffer = KVec::from_elem(0u8, PAGE_SIZE, GFP_KERNEL)?;
    // Dropped before the second mapping: two of different types at once are not allowed.
    let uncached_write = {
        let part = Part::map(&page, false)?;
        // SAFETY: Both are a page long.
        unsafe { copy::load(buffer.as_mut_ptr(), part.base.cast(), PAGE_SIZE) };
        timed(1, || {
            // SAFETY: As above.
            unsafe { copy::store(part.base.cast(), buffer.as_ptr(), PAGE_SIZE) };
            settle(&part);
        })
    };
    let part = Part::map(&page, true)?;
    let write = timed(ROUNDS, || {
        // SAFETY: As above.
        unsafe { copy::store(part.base.cast(), buffer.as_ptr(), PAGE_SIZE) };
    });
    settle(&part);
    let read = timed(ROUNDS, || {
        // SAFETY: As above.
        unsafe { copy::load(buffer.as_mut_ptr(), part.base.cast(), PAGE_SIZE) };
    });
    Ok(Speed {
        uncached_write,
        write,
        read,
    })
}

/// Waits for posted writes: a read comes back behind them.
fn settle(part: &Part) {
    // SAFETY: The mapping is at least a page long.
    let _ = unsafe { part.base.cast::<u64>().read_volatile() };
}

/// Megabytes a second of `rounds` calls that move a page each.
fn timed(rounds: usize, mut page: impl FnMut()) -> u32 {
    let begin = Instant::<Monotonic>::now();
    for _ in 0..rounds {
        page();
    }
    let nanoseconds = u64::try_from(begin.elapsed().as_nanos())
        .unwrap_or(0)
        .max(1);
    u32::try_from((rounds * PAGE_SIZE) as u64 * 1000 / nanoseconds).unwrap_or(u32::MAX)
}
