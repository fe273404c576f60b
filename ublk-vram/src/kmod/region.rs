//! A mapping of a region: aligned for huge pages, and populated.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;

use super::Node;
use crate::kmod::abi;
use crate::store::shared::SharedMapping;

/// What one touch populates at least; the alignment that huge pages of the first size need.
const STEP: usize = 2 << 20;
/// The alignment that huge pages of the second size need.
const LARGE: usize = 1 << 30;

/// A mapping of a region, or of a part of it. It unmaps itself.
///
/// When the region's memory goes away an access ends in SIGBUS.
#[derive(Debug)]
pub struct RegionMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range of the process, valid on every thread until it is dropped.
unsafe impl Send for RegionMapping {}
// SAFETY: the handle gives out raw addresses only; it has no state of its own to race on.
unsafe impl Sync for RegionMapping {}

impl RegionMapping {
    /// Maps `len` bytes of the region that `node` is attached to, from byte `offset` on, readable and
    /// writable, at an address that is as far off a huge page as the offset is.
    ///
    /// # Errors
    /// `ENOTCONN` or `ENXIO` if the file is not attached to it, `EINVAL` for a range that is not inside
    /// it or not of whole pages, `EIO` if its memory is gone.
    pub fn new(
        node: &Node,
        region: &abi::Region,
        offset: u64,
        len: usize,
    ) -> io::Result<RegionMapping> {
        let align = if len >= LARGE { LARGE } else { STEP };
        let room = len
            .checked_add(2 * align)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: a new reservation at an address of the kernel's choice touches no existing memory.
        let reserved = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                room,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if reserved == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let skew = usize::try_from(offset % align as u64).unwrap_or(0);
        let start = (reserved as usize).next_multiple_of(align) + skew;
        let file_offset = i64::try_from(region.mmap_offset.saturating_add(offset))
            .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?;
        // SAFETY: the range lies inside the reservation, which is ours and holds nothing.
        let base = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_FIXED,
                node.as_fd().as_raw_fd(),
                file_offset,
            )
        };
        let error = io::Error::last_os_error();
        let end = reserved as usize + room;
        let mapped = if base == libc::MAP_FAILED { 0 } else { len };
        // MAP_FIXED rounds the length up to whole pages.
        let after = start + mapped.next_multiple_of(4096);
        for (from, to) in [(reserved as usize, start), (after, end)] {
            if from < to {
                // SAFETY: what is left of the reservation on this side of the mapping.
                unsafe { libc::munmap(from as *mut libc::c_void, to - from) };
            }
        }
        match NonNull::new(base.cast::<u8>()) {
            Some(base) if mapped > 0 => Ok(RegionMapping { base, len }),
            _ => Err(error),
        }
    }

    /// Touches every 2 MiB: from then on no access faults, until the memory goes away.
    pub fn populate(&self) {
        let first = self.base.as_ptr() as usize;
        let mut offset = 0;
        while offset < self.len {
            // SAFETY: inside the mapping; a volatile read of memory has no effect but the fault.
            unsafe { self.base.as_ptr().add(offset).read_volatile() };
            // The next block begins on a multiple of its size, wherever the mapping does.
            offset = (first + offset + 1).next_multiple_of(STEP) - first;
        }
    }

    /// The same mapping as one of device memory.
    pub fn into_shared(self) -> SharedMapping {
        let this = std::mem::ManuallyDrop::new(self);
        // SAFETY: the range is mapped, and `this` no longer unmaps it.
        unsafe { SharedMapping::from_raw(this.base, this.len) }
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for RegionMapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and nobody may use it after the owner is gone.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
