//! Counters of a queue, written by its thread alone, read by anybody.
//!
//! They live in the session's state memfd, so that they outlive the worker. Each queue has cache
//! lines of its own, and every access is relaxed: a reader may see one counter a moment older than
//! another, never a torn one.

use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use super::{Op, Request};
use crate::backend::QueueId;
use crate::device::{PathCounters, QueueInfo};
use crate::error::Result;
use crate::store::shared::SharedMapping;

/// Counters of one queue. All-zero bytes are a valid value, so fresh memfd pages are one.
#[repr(C, align(128))]
#[derive(Default)]
pub struct QueueStats {
    tid: AtomicI32,
    reads: AtomicU64,
    writes: AtomicU64,
    zeroes: AtomicU64,
    read_bytes: AtomicU64,
    write_bytes: AtomicU64,
    zero_bytes: AtomicU64,
    errors: AtomicU64,
    batches: AtomicU64,
    largest_batch: AtomicU64,
    in_flight: AtomicU64,
    most_in_flight: AtomicU64,
    swap_writes: AtomicU64,
    path_copies: [[AtomicU64; 3]; 2],
    path_bytes: [[AtomicU64; 3]; 2],
    path_slowdown: [[AtomicU64; 3]; 2],
    gather_is_late: AtomicU64,
    bad_blocks: AtomicU64,
    reread_blocks: AtomicU64,
    unchecked_blocks: AtomicU64,
    canary_reads: AtomicU64,
    reissued: AtomicU64,
}

/// Adds to a counter that only this thread writes: no locked instruction is needed.
fn add(counter: &AtomicU64, n: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(n),
        Ordering::Relaxed,
    );
}

fn raise(counter: &AtomicU64, value: u64) {
    if counter.load(Ordering::Relaxed) < value {
        counter.store(value, Ordering::Relaxed);
    }
}

impl QueueStats {
    /// Notes which thread serves the queue.
    pub fn set_tid(&self, tid: i32) {
        self.tid.store(tid, Ordering::Relaxed);
    }

    /// Notes a batch of `requests` taken from the kernel.
    pub fn batch(&self, requests: u64) {
        add(&self.batches, 1);
        raise(&self.largest_batch, requests);
    }

    /// Notes a request that an earlier worker had in hand when it died.
    pub fn reissued(&self) {
        add(&self.reissued, 1);
    }

    /// Requests that have ended, whichever way.
    pub fn ended(&self) -> u64 {
        [&self.reads, &self.writes, &self.zeroes, &self.errors]
            .iter()
            .fold(0, |sum: u64, counter| {
                sum.wrapping_add(counter.load(Ordering::Relaxed))
            })
    }

    /// Notes how many copies were in flight at the most and are now.
    pub(super) fn copies(&self, most: u64, now: u64) {
        self.in_flight.store(now, Ordering::Relaxed);
        raise(&self.most_in_flight, most);
    }

    /// Notes a block that is not what was written to it.
    pub(super) fn bad_block(&self) {
        add(&self.bad_blocks, 1);
    }

    /// Notes a block that was read again because its checksum did not fit.
    pub(super) fn reread_block(&self) {
        add(&self.reread_blocks, 1);
    }

    /// Notes blocks that were handed out although they have no checksum.
    pub(super) fn unchecked_blocks(&self, count: u64) {
        if count > 0 {
            add(&self.unchecked_blocks, count);
        }
    }

    /// Notes a read of a canary.
    pub(super) fn canary_read(&self) {
        add(&self.canary_reads, 1);
    }

    /// Notes the end of a request.
    pub(super) fn request(&self, request: &Option<Request>, result: i32) {
        let Some(request) = request else { return };
        if result < 0 {
            add(&self.errors, 1);
            return;
        }
        let (count, bytes) = match request.op {
            Op::Read => (&self.reads, &self.read_bytes),
            Op::Write => (&self.writes, &self.write_bytes),
            Op::Zero => (&self.zeroes, &self.zero_bytes),
            Op::Flush | Op::Refuse(_) => return,
        };
        add(count, 1);
        add(bytes, request.len);
        if request.swap {
            add(&self.swap_writes, 1);
        }
    }

    /// Notes which paths this worker's copies took.
    pub(super) fn paths(&self, counters: &PathCounters) {
        for (to, from) in [
            (&self.path_copies, &counters.copies),
            (&self.path_bytes, &counters.bytes),
            (&self.path_slowdown, &counters.slowdown),
        ] {
            for (to, from) in to.iter().flatten().zip(from.iter().flatten()) {
                to.store(*from, Ordering::Relaxed);
            }
        }
        let is_late = u64::from(counters.gather_is_late);
        self.gather_is_late.store(is_late, Ordering::Relaxed);
    }

    fn read_paths(&self) -> PathCounters {
        let table = |from: &[[AtomicU64; 3]; 2]| {
            let mut table = [[0; 3]; 2];
            for (to, from) in table.iter_mut().flatten().zip(from.iter().flatten()) {
                *to = from.load(Ordering::Relaxed);
            }
            table
        };
        PathCounters {
            copies: table(&self.path_copies),
            bytes: table(&self.path_bytes),
            slowdown: table(&self.path_slowdown),
            gather_is_late: self.gather_is_late.load(Ordering::Relaxed) != 0,
        }
    }

    /// A copy of the counters.
    pub fn read(&self) -> QueueInfo {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        QueueInfo {
            tid: self.tid.load(Ordering::Relaxed),
            reads: load(&self.reads),
            writes: load(&self.writes),
            zeroes: load(&self.zeroes),
            read_bytes: load(&self.read_bytes),
            write_bytes: load(&self.write_bytes),
            zero_bytes: load(&self.zero_bytes),
            errors: load(&self.errors),
            batches: load(&self.batches),
            largest_batch: load(&self.largest_batch),
            in_flight: load(&self.in_flight),
            most_in_flight: load(&self.most_in_flight),
            swap_writes: load(&self.swap_writes),
            paths: self.read_paths(),
            bad_blocks: load(&self.bad_blocks),
            reread_blocks: load(&self.reread_blocks),
            unchecked_blocks: load(&self.unchecked_blocks),
            canary_reads: load(&self.canary_reads),
            reissued: load(&self.reissued),
        }
    }
}

/// The counters of every queue, in shared memory.
pub struct StatsTable {
    memory: SharedMapping,
    queues: u16,
    /// Where counters of a queue that is not there go.
    nobody: QueueStats,
}

impl StatsTable {
    /// Bytes of shared memory for so many queues.
    pub fn bytes(queues: u16) -> usize {
        usize::from(queues.max(1)) * size_of::<QueueStats>()
    }

    /// The table in `memory`, which must be zeroed (or hold an earlier table).
    ///
    /// # Errors
    /// If the memory is too small.
    pub fn new(memory: SharedMapping, queues: u16) -> Result<StatsTable> {
        if memory.len() < StatsTable::bytes(queues) {
            return Err(crate::Error::new(
                crate::ErrorKind::Io,
                format!(
                    "the state memory of {} bytes is too small for {queues} queues",
                    memory.len()
                ),
            ));
        }
        Ok(StatsTable {
            memory,
            queues,
            nobody: QueueStats::default(),
        })
    }

    /// The counters of one queue.
    pub fn of(&self, queue: QueueId) -> &QueueStats {
        if queue.0 >= self.queues {
            return &self.nobody;
        }
        let base = self.memory.as_ptr().cast::<QueueStats>();
        // SAFETY: the mapping is page aligned and large enough for `queues` entries (`new`), every
        // bit pattern is a valid `QueueStats`, and all access is through atomics.
        unsafe { &*base.add(usize::from(queue.0)) }
    }

    /// Requests of all queues that have ended.
    pub fn ended(&self) -> u64 {
        (0..self.queues)
            .map(|queue| self.of(QueueId(queue)).ended())
            .fold(0, u64::wrapping_add)
    }

    /// A copy of every queue's counters.
    pub fn read(&self) -> Vec<QueueInfo> {
        (0..self.queues)
            .map(|queue| self.of(QueueId(queue)).read())
            .collect()
    }
}
