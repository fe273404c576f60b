//! Which requests a worker has: marks in a region, so that the next worker knows which of its first
//! requests the last one had in hand when it died.
//!
//! It is for counting and for tests. The kernel issues every such request again by itself, and
//! whether a mark is seen or not changes nothing in how it is served.

use std::sync::atomic::{AtomicU64, Ordering};

use super::Regions;
use crate::backend::QueueId;
use crate::error::Result;
use crate::store::shared::SharedMapping;
use crate::ublk::Shape;

/// What tells one request from another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TagMark {
    /// Operation and sectors.
    what: u64,
    /// First sector.
    sector: u64,
}

/// Set in `what` of every mark, so that none is all zeroes.
const PRESENT: u64 = 1 << 63;

impl TagMark {
    /// The mark of a request with this descriptor (`struct ublksrv_io_desc`).
    pub fn new(op: u32, sectors: u32, sector: u64) -> TagMark {
        TagMark {
            what: PRESENT | u64::from(op & 0xff) << 32 | u64::from(sectors),
            sector,
        }
    }
}

#[repr(C)]
struct Entry {
    what: AtomicU64,
    sector: AtomicU64,
}

/// One entry for each tag of each queue. An entry is written by its queue's thread alone.
pub struct TagBoard {
    memory: SharedMapping,
    shape: Shape,
}

impl TagBoard {
    /// Maps the marks of a device.
    ///
    /// # Errors
    /// As [`super::Session::shared_region`].
    pub fn map(regions: &Regions, shape: Shape) -> Result<TagBoard> {
        let entries = usize::from(shape.queues) * usize::from(shape.depth);
        let memory = regions.map("tags", entries * size_of::<Entry>())?;
        Ok(TagBoard { memory, shape })
    }

    fn entry(&self, queue: QueueId, tag: u16) -> Option<&Entry> {
        if queue.0 >= self.shape.queues || tag >= self.shape.depth {
            return None;
        }
        let index = usize::from(queue.0) * usize::from(self.shape.depth) + usize::from(tag);
        let base = self.memory.as_ptr().cast::<Entry>();
        // SAFETY: the index is inside the entries that `map` asked for; the mapping is page
        // aligned, every bit pattern is a valid entry, and all access is through atomics.
        Some(unsafe { &*base.add(index) })
    }

    /// Notes that the worker has a request.
    pub fn set(&self, queue: QueueId, tag: u16, mark: TagMark) {
        if let Some(entry) = self.entry(queue, tag) {
            entry.sector.store(mark.sector, Ordering::Relaxed);
            entry.what.store(mark.what, Ordering::Release);
        }
    }

    /// Notes that the worker gives the request back.
    pub fn clear(&self, queue: QueueId, tag: u16) {
        if let Some(entry) = self.entry(queue, tag) {
            entry.what.store(0, Ordering::Release);
        }
    }

    /// Takes the marks that the last worker left in a queue's entries, within the capacity of `to`.
    pub fn take_left(&self, queue: QueueId, to: &mut Vec<TagMark>) {
        for tag in 0..self.shape.depth {
            let Some(entry) = self.entry(queue, tag) else {
                continue;
            };
            let what = entry.what.swap(0, Ordering::AcqRel);
            let sector = entry.sector.load(Ordering::Relaxed);
            if what != 0 && to.len() < to.capacity() {
                to.push(TagMark { what, sector });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_set_and_not_cleared_is_found_once() {
        let shape = Shape {
            queues: 1,
            depth: 4,
            max_io: 4096,
            zero_copy: false,
        };
        let board = TagBoard::map(&Regions::default(), shape).unwrap();
        let (queue, mark) = (QueueId(0), TagMark::new(1, 8, 4096));
        board.set(queue, 2, mark);
        board.set(queue, 3, TagMark::new(0, 8, 0));
        board.clear(queue, 3);
        board.set(queue, 9, mark);
        board.set(QueueId(7), 0, mark);
        let mut left = Vec::with_capacity(4);
        board.take_left(queue, &mut left);
        assert_eq!(left, [mark]);
        left.clear();
        board.take_left(queue, &mut left);
        assert!(left.is_empty());
    }
}
