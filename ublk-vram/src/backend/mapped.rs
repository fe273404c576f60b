//! The copy path of every backend whose chunks the CPU can reach: streaming stores to write,
//! streaming loads to read, done at once in `submit`.
//!
//! Stores to write-combined memory are posted: they are ordered before anything later only by a
//! fence. One `sfence` covers a whole batch, so it is issued in `poll`, before the first completion
//! of the batch is handed out.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{BackendQueue, ChunkMemory, Completion, Copy, Direction, GONE, Mapping};
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};
use crate::safety::bus_error;
use crate::store::Layout;
use crate::store::shared::SharedMapping;

/// A queue that copies with the CPU.
pub struct MappedQueue {
    routines: CopyRoutines,
    done: VecDeque<Completion>,
    unfenced: bool,
}

impl MappedQueue {
    /// A queue for up to `copies` copies in flight.
    pub fn new(routines: CopyRoutines, copies: usize) -> MappedQueue {
        MappedQueue {
            routines,
            done: VecDeque::with_capacity(copies),
            unfenced: false,
        }
    }

    /// # Safety
    /// As [`BackendQueue::submit`].
    unsafe fn copy(&mut self, copy: &Copy, chunk: &ChunkMemory) -> std::result::Result<u32, i32> {
        let len = copy.len as usize;
        let Some(device) = chunk.at(copy.offset, len) else {
            return Err(libc::EIO);
        };
        let (routines, memory, direction) = (self.routines, copy.memory, copy.direction);
        self.unfenced |= direction != Direction::Read;
        // SAFETY: `device` is mapped for `len` bytes (`at`), `memory` by the caller's promise; zeroes have
        // no memory end. That a mapping can be taken away all the same is what the guard is for.
        bus_error::guarded(|| unsafe {
            match direction {
                Direction::Read => routines.load(memory, device, len),
                Direction::Write => routines.store(device, memory, len),
                Direction::Zero => routines.fill_zero(device, len),
            }
        })
        .map_err(|_| GONE)?;
        Ok(copy.len)
    }
}

impl BackendQueue for MappedQueue {
    unsafe fn submit(&mut self, copy: &Copy, chunk: &ChunkMemory) {
        // SAFETY: the caller's promise is passed on.
        let result = unsafe { self.copy(copy, chunk) };
        self.done.push_back(Completion {
            id: copy.id,
            result,
        });
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        if self.unfenced {
            self.routines.store_fence();
            self.unfenced = false;
        }
        while done.len() < done.capacity() {
            match self.done.pop_front() {
                Some(completion) => done.push(completion),
                None => break,
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.done.len()
    }
}

/// Cuts the mapping into the chunks of `layout`; the last of them unmaps it.
pub(super) fn carve(mapping: SharedMapping, layout: &Layout) -> Result<Vec<ChunkMemory>> {
    let (base, len) = (NonNull::new(mapping.as_ptr()), mapping.len());
    let base =
        base.ok_or_else(|| Error::new(ErrorKind::Io, "device memory was mapped at address 0"))?;
    let owner = Arc::new(mapping);
    // SAFETY: the owner keeps `len` bytes at `base` mapped until it is dropped.
    let whole = unsafe { Mapping::new(base, len, Arc::<SharedMapping>::clone(&owner)) };
    let mut offset = 0;
    (0..layout.chunks())
        .map(|index| {
            let size = layout.chunk_bytes(index);
            let start = usize::try_from(size)
                .ok()
                .and_then(|len| NonNull::new(whole.at(offset, len)?))
                .ok_or_else(|| Error::new(ErrorKind::Io, format!("chunk {index} is not mapped")))?;
            offset += size;
            // SAFETY: `at` has shown that the range is inside what the owner keeps mapped.
            let mapping =
                unsafe { Mapping::new(start, size as usize, Arc::<SharedMapping>::clone(&owner)) };
            Ok(ChunkMemory::new(size, Some(mapping)))
        })
        .collect()
}
