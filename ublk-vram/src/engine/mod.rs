//! From requests to copies and back: the part of the I/O path that knows no kernel interface.
//!
//! One [`Engine`] belongs to one queue thread. [`Engine::submit`] takes a request apart into copies,
//! [`Engine::advance`] collects what has completed. A tag is in flight from `submit` until its
//! result is handed out, exactly once; a request that cannot be carried out whole ends with `-EIO`,
//! never with fewer bytes. Zeroing goes slice by slice, one slice a call of `advance`, so that a
//! small read that arrives meanwhile waits for one slice and not for the whole discard.
//!
//! Nothing here allocates, blocks, logs or takes a lock after [`Engine::new`]. `ublk` drives it with
//! the kernel's requests; a bench can drive it with its own.

pub mod bench;
mod stats;
mod tag;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;

pub use stats::{QueueStats, StatsTable};
pub use tag::{Op, Request};
use tag::{Slot, Tag};

use crate::backend::{BackendQueue, Completion, Copy, Direction, QueueId};
use crate::store::{ChunkTable, Layout};

/// Bytes zeroed at once: 14 us at the 18 GB/s a CPU writes to a PCIe 5 BAR, a few times a 4 KiB read.
const ZERO_SLICE: u32 = 256 << 10;
/// Under load, the copy paths' counters are shown once in so many turns.
const SHOW_EVERY: u32 = 64;
/// Copies of one tag at the same time: a request is smaller than a chunk, so it touches at most two.
const SLOTS: usize = tag::SLOTS;

/// A finished request: its tag, and its bytes (0 for zeroing and flush) or a negative errno, as
/// ublk wants it in `ublksrv_io_cmd.result`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Finished {
    /// The request's tag.
    pub tag: u16,
    /// Bytes or negative errno.
    pub result: i32,
}

/// The requests of one queue.
pub struct Engine {
    queue: QueueId,
    layout: Layout,
    table: Arc<ChunkTable>,
    backend: Box<dyn BackendQueue>,
    stats: Arc<StatsTable>,
    tags: Box<[Tag]>,
    /// Tags whose next slice of zeroes is due, first in first out.
    zeroing: VecDeque<u16>,
    /// Tags that ended without waiting for a copy.
    ended: VecDeque<u16>,
    completions: Vec<Completion>,
    advances: u32,
}

impl Engine {
    /// Copies a backend queue must be able to keep in flight for `depth` tags.
    pub fn copies(depth: u16) -> usize {
        usize::from(depth) * SLOTS
    }

    /// An engine for `depth` tags. All memory it ever uses is allocated here.
    pub fn new(
        queue: QueueId,
        depth: u16,
        layout: Layout,
        table: Arc<ChunkTable>,
        backend: Box<dyn BackendQueue>,
        stats: Arc<StatsTable>,
    ) -> Engine {
        Engine {
            queue,
            layout,
            table,
            backend,
            stats,
            tags: (0..depth).map(|_| Tag::default()).collect(),
            zeroing: VecDeque::with_capacity(usize::from(depth)),
            ended: VecDeque::with_capacity(usize::from(depth)),
            completions: Vec::with_capacity(Engine::copies(depth)),
            advances: 0,
        }
    }

    /// Takes a request. It ends in a later [`Engine::advance`].
    ///
    /// # Safety
    /// `request.memory` must be valid for `request.len` bytes, and touched by nobody else, until the
    /// request was handed out as [`Finished`]. The tag must not be in flight.
    pub unsafe fn submit(&mut self, request: Request) {
        let Some(tag) = self.tags.get_mut(usize::from(request.tag)) else {
            return;
        };
        tag.begin(&request);
        if self
            .layout
            .device_bytes()
            .checked_sub(request.offset)
            .is_none_or(|room| request.len > room)
        {
            tag.fail(libc::EIO);
        }
        match request.op {
            _ if tag.failed() => {}
            Op::Read | Op::Write => {
                let direction = if request.op == Op::Read {
                    Direction::Read
                } else {
                    Direction::Write
                };
                for slot in 0..SLOTS {
                    if !self.copy_next(request.tag, slot, direction, u32::MAX) {
                        break;
                    }
                }
                // Anything left would need a third chunk: no request is that large.
                if let Some(tag) = self
                    .tags
                    .get_mut(usize::from(request.tag))
                    .filter(|tag| tag.left() > 0)
                {
                    tag.fail(libc::EIO);
                }
            }
            Op::Zero => {
                self.zeroing.push_back(request.tag);
                return;
            }
            Op::Flush => {}
            Op::Refuse(errno) => tag.fail(errno),
        }
        if self
            .tags
            .get(usize::from(request.tag))
            .is_some_and(|tag| tag.pending() == 0)
        {
            self.ended.push_back(request.tag);
        }
    }

    /// Starts the copy of the next piece of a tag, at most `most` bytes of it. False when there is
    /// no more to start.
    fn copy_next(&mut self, index: u16, slot: usize, direction: Direction, most: u32) -> bool {
        let Some(tag) = self.tags.get_mut(usize::from(index)) else {
            return false;
        };
        if tag.failed() || tag.left() == 0 {
            return false;
        }
        let want = u32::try_from(tag.left()).unwrap_or(u32::MAX).min(most);
        let Some(piece) = self.layout.first_piece(tag.next_offset(), want) else {
            tag.fail(libc::EIO);
            return false;
        };
        let Some(chunk) = self.table.enter(self.queue, piece.chunk) else {
            tag.fail(libc::EIO);
            return false;
        };
        let copy = Copy {
            id: u32::from(index) * SLOTS as u32 + slot as u32,
            direction,
            chunk: piece.chunk,
            offset: piece.offset,
            len: piece.len,
            memory: tag.next_memory(),
            device_offset: tag.next_offset(),
        };
        tag.start(
            slot,
            Slot {
                chunk: piece.chunk,
                len: piece.len,
            },
        );
        // SAFETY: `memory` is the request's memory advanced by what earlier copies of the tag cover,
        // so `len` bytes from there are inside it (or it is null for zeroes); it stays untouched
        // until the tag is handed out, which waits for this copy. `chunk` was looked up by index.
        unsafe { self.backend.submit(&copy, chunk) };
        true
    }

    /// Collects completed copies, starts one slice of zeroes, and appends the requests that have
    /// ended, within the capacity of `finished`.
    pub fn advance(&mut self, finished: &mut Vec<Finished>) {
        if let Some(index) = self.zeroing.pop_front()
            && !self.copy_next(index, 0, Direction::Zero, ZERO_SLICE)
        {
            self.ended.push_back(index);
        }
        let in_flight = self.backend.in_flight() as u64;
        if in_flight > 0 {
            let mut completions = std::mem::take(&mut self.completions);
            completions.clear();
            self.backend.poll(&mut completions);
            for completion in &completions {
                self.complete(completion);
            }
            self.completions = completions;
        }
        let left = self.backend.in_flight();
        self.stats.of(self.queue).copies(in_flight, left as u64);
        self.advances = self.advances.wrapping_add(1);
        // At rest what is shown is exact; under load it is a moment old.
        if ((left == 0 && in_flight > 0) || self.advances.is_multiple_of(SHOW_EVERY))
            && let Some(counters) = self.backend.path_counters()
        {
            self.stats.of(self.queue).paths(&counters);
        }
        while finished.len() < finished.capacity() {
            let Some(index) = self.ended.pop_front() else {
                break;
            };
            let Some(tag) = self.tags.get_mut(usize::from(index)) else {
                continue;
            };
            let (request, result) = tag.end();
            self.stats.of(self.queue).request(&request, result);
            finished.push(Finished { tag: index, result });
        }
    }

    fn complete(&mut self, completion: &Completion) {
        let (index, slot) = (completion.id / SLOTS as u32, completion.id as usize % SLOTS);
        let Some(tag) = self.tags.get_mut(index as usize) else {
            return;
        };
        let Some(Slot { chunk, len }) = tag.finish(slot) else {
            return;
        };
        self.table.leave(self.queue, chunk);
        match completion.result {
            Ok(moved) if moved == len => {}
            Ok(_short) => tag.fail(libc::EIO),
            Err(errno) => tag.fail(errno),
        }
        if tag.pending() > 0 {
            return;
        }
        let index = index as u16;
        if tag.is_zeroing() && !tag.failed() && tag.left() > 0 {
            self.zeroing.push_back(index);
        } else {
            self.ended.push_back(index);
        }
    }

    /// Whether `advance` has something to do without any outside event.
    pub fn has_work(&self) -> bool {
        !self.zeroing.is_empty()
            || !self.ended.is_empty()
            || self.backend.should_poll()
            || (self.backend.in_flight() > 0 && self.backend.completion_fd().is_none())
    }

    /// What becomes readable when a copy completes on its own.
    pub fn completion_fd(&self) -> Option<RawFd> {
        self.backend.completion_fd()
    }
}
