//! The table of chunks that queue threads look up and control can take entries out of.
//!
//! One counter for each queue and chunk says how many of that queue's copies use the chunk. A queue
//! thread raises its counter first and looks at the descriptor after; control takes the descriptor
//! out first and looks at the counters after. Both use sequentially consistent order, so one of the
//! two always sees the other (Dekker's argument): a chunk whose descriptor is out and whose counters
//! are all zero has no user and gets none. No lock, and no cache line shared between two queues.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crossbeam_utils::CachePadded;

use crate::backend::{ChunkMemory, QueueId};
use crate::error::{Error, ErrorKind, Result};

/// The chunks of one device.
pub struct ChunkTable {
    chunks: Box<[Slot]>,
    /// One row a queue, made of whole cache lines.
    in_flight: Box<[Box<[Line]>]>,
}

/// Counters of neighbouring chunks, for one queue: 128 bytes, which is what two CPUs fight over.
type Line = CachePadded<[AtomicU32; LINE]>;
const LINE: usize = 32;

struct Slot {
    memory: ChunkMemory,
    present: AtomicBool,
}

impl ChunkTable {
    /// A table in which every chunk is present.
    pub fn new(chunks: &[ChunkMemory], queues: u16) -> ChunkTable {
        let lines = chunks.len().div_ceil(LINE);
        let row = || (0..lines).map(|_| Line::default()).collect();
        ChunkTable {
            chunks: chunks
                .iter()
                .map(|memory| Slot {
                    memory: memory.clone(),
                    present: AtomicBool::new(true),
                })
                .collect(),
            in_flight: (0..queues).map(|_| row()).collect(),
        }
    }

    /// Begins one use of `chunk` by `queue`; `None` when there is no such chunk, or it was taken
    /// out. Each `Some` must be followed by one [`ChunkTable::leave`].
    #[inline]
    pub fn enter(&self, queue: QueueId, chunk: u32) -> Option<&ChunkMemory> {
        let slot = self.chunks.get(chunk as usize)?;
        let counter = self.counter(queue, chunk)?;
        counter.fetch_add(1, Ordering::SeqCst);
        if slot.present.load(Ordering::SeqCst) {
            return Some(&slot.memory);
        }
        counter.fetch_sub(1, Ordering::SeqCst);
        None
    }

    /// The memory of a chunk that the caller has entered and not left.
    #[inline]
    pub fn entered(&self, chunk: u32) -> Option<&ChunkMemory> {
        self.chunks.get(chunk as usize).map(|slot| &slot.memory)
    }

    /// Ends one use.
    #[inline]
    pub fn leave(&self, queue: QueueId, chunk: u32) {
        if let Some(counter) = self.counter(queue, chunk) {
            counter.fetch_sub(1, Ordering::SeqCst);
        }
    }

    #[inline]
    fn counter(&self, queue: QueueId, chunk: u32) -> Option<&AtomicU32> {
        let row = self.in_flight.get(usize::from(queue.0))?;
        row.get(chunk as usize / LINE)?.get(chunk as usize % LINE)
    }

    /// Takes every chunk out and waits until nobody uses one any more.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] if a copy is still in flight after `limit`: the memory must not be freed.
    pub fn retire_all(&self, limit: Duration) -> Result<()> {
        for slot in &self.chunks {
            slot.present.store(false, Ordering::SeqCst);
        }
        let end = Instant::now() + limit;
        loop {
            let users: u32 = self
                .in_flight
                .iter()
                .flat_map(|row| row.iter().flat_map(|line| line.iter()))
                .map(|n| n.load(Ordering::SeqCst))
                .sum();
            if users == 0 {
                return Ok(());
            }
            if Instant::now() >= end {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{users} copies are still in flight after {} s: the memory is kept",
                        limit.as_secs()
                    ),
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryHandles;
    use crate::store::Layout;

    fn table() -> ChunkTable {
        let layout = Layout::new(4 << 20, Some(2 << 20)).unwrap();
        let memory = crate::backend::host::HostMemory::create(&layout).unwrap();
        let backend = MemoryHandles::Host(memory).open(&layout).unwrap();
        ChunkTable::new(backend.chunks(), 2)
    }

    #[test]
    fn a_retired_chunk_lets_nobody_in() {
        let table = table();
        assert!(table.enter(QueueId(1), 0).is_some());
        assert!(
            table.retire_all(Duration::from_millis(5)).is_err(),
            "one user is inside"
        );
        table.leave(QueueId(1), 0);
        assert!(table.retire_all(Duration::from_millis(5)).is_ok());
        assert!(table.enter(QueueId(0), 0).is_none());
        assert!(
            table.retire_all(Duration::ZERO).is_ok(),
            "a refused entry leaves no count behind"
        );
    }

    #[test]
    fn what_is_not_there_is_refused() {
        let table = table();
        assert!(table.enter(QueueId(0), 99).is_none());
        assert!(table.enter(QueueId(9), 0).is_none());
    }

    #[test]
    fn retiring_races_with_users() {
        let table = table();
        std::thread::scope(|scope| {
            for queue in 0..2 {
                let table = &table;
                scope.spawn(move || {
                    while let Some(_chunk) = table.enter(QueueId(queue), 1) {
                        table.leave(QueueId(queue), 1);
                    }
                });
            }
            std::thread::sleep(Duration::from_millis(10));
            table.retire_all(Duration::from_secs(5)).unwrap();
        });
        assert!(table.retire_all(Duration::ZERO).is_ok());
    }
}
