//! A shared, populated mapping of a memfd (or of a BAR's sysfs file).

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::backend::Mapping;
use crate::error::{Error, Result};

/// A shared mapping that unmaps itself.
pub struct SharedMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range of the process, valid on every thread until it is dropped.
unsafe impl Send for SharedMapping {}
// SAFETY: the handle gives out raw addresses only; it has no state of its own to race on.
unsafe impl Sync for SharedMapping {}

impl SharedMapping {
    /// Maps the first `len` bytes of `fd`, readable and writable, every page present.
    pub fn new(fd: BorrowedFd<'_>, len: usize) -> Result<SharedMapping> {
        SharedMapping::at(fd, 0, len)
    }

    /// Maps `len` bytes of `fd` from `offset` (a multiple of the page size).
    pub fn at(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<SharedMapping> {
        use std::os::fd::AsRawFd;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                fd.as_raw_fd(),
                i64::try_from(offset).unwrap_or(i64::MAX),
            )
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => {
                Ok(SharedMapping { base, len })
            }
            _ => Err(Error::os(
                format!("cannot map {}", crate::size::human(len as u64)),
                std::io::Error::last_os_error(),
            )),
        }
    }

    /// Takes over a mapping that somebody made.
    ///
    /// # Safety
    /// `len` bytes at `base` are mapped, shared, readable and writable, and are the caller's to unmap.
    pub unsafe fn from_raw(base: NonNull<u8>, len: usize) -> SharedMapping {
        SharedMapping { base, len }
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

    /// The whole mapping, kept alive by the handle given out.
    pub fn as_mapping(self: &Arc<Self>) -> Mapping {
        // SAFETY: the range is unmapped when the last handle, of which the owner is one, is dropped.
        unsafe { Mapping::new(self.base, self.len, Arc::<SharedMapping>::clone(self)) }
    }

    /// The whole mapping as device memory.
    pub fn into_mapping(self) -> Mapping {
        let (base, len) = (self.base, self.len);
        // SAFETY: `self` moves into the owner and unmaps the range only when that is dropped.
        unsafe { Mapping::new(base, len, Arc::new(self)) }
    }
}

impl Drop for SharedMapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `at`, and nobody may use it after the owner is gone.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
