//! From requests to copies and back: the part of the I/O path that knows no kernel interface.
//!
//! One [`Engine`] belongs to one queue thread. [`Engine::submit`] takes a request apart into copies,
//! [`Engine::advance`] collects what has completed. A tag is in flight from `submit` until its
//! result is handed out, exactly once; a request that cannot be carried out whole ends with `-EIO`,
//! never with fewer bytes. Zeroing goes slice by slice, one slice a call of `advance`, so that a
//! small read that arrives meanwhile waits for one slice and not for the whole discard.
//!
//! A read ends only when its bytes are believed (`integrity`): they fit their checksums, or the chunk's
//! canary was read after them by the same path. When the device's memory is lost every request ends
//! with `-EIO`, those in flight too, whether their copies ever come back or not.
//!
//! Nothing here allocates, blocks, logs or takes a lock after [`Engine::new`]. `ublk` drives it with
//! the kernel's requests; a bench can drive it with its own.

pub mod bench;
mod blind;
mod integrity;
mod stats;
mod tag;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::os::fd::RawFd;
use std::sync::Arc;

use blind::Blind;
pub use integrity::Integrity;
pub use stats::{QueueStats, StatsTable};
pub use tag::{Op, Request};
use tag::{Slot, Step, Tag};

use crate::backend::registered::Transfer;
use crate::backend::{BackendQueue, Completion, Direction, QueueId};
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
    /// Not dropped while copies are in flight that may still write to a buffer.
    backend: ManuallyDrop<Box<dyn BackendQueue>>,
    stats: Arc<StatsTable>,
    integrity: Integrity,
    blind: Blind,
    /// The memory was lost, and everything in flight was ended.
    is_abandoned: bool,
    /// One for each request that can be in flight.
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
        integrity: Integrity,
    ) -> Engine {
        Engine {
            queue,
            layout,
            table,
            backend: ManuallyDrop::new(backend),
            stats,
            integrity,
            blind: Blind::new(Engine::copies(depth)),
            is_abandoned: false,
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
    /// request was handed out as [`Finished`]; or stand for the request itself
    /// ([`crate::backend::registered::address_of`]), if [`Integrity::is_blind`]. The tag must not be in
    /// flight.
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
        if self.integrity.health.is_lost() {
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
        let slot_state = Slot {
            direction,
            chunk: piece.chunk,
            offset: piece.offset,
            device_offset: tag.next_offset(),
            len: piece.len,
            memory: tag.next_memory(),
            step: Step::Move,
            is_suspicious: false,
        };
        let copy = slot_state.copy(id_of(index, slot), 0, piece.len);
        tag.start(slot, slot_state);
        if direction != Direction::Read {
            self.integrity.begin_write(&slot_state);
        }
        self.integrity.health.started(self.queue, index);
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
        if (in_flight > 0 || self.backend.should_poll()) && !self.is_abandoned {
            let mut completions = std::mem::take(&mut self.completions);
            completions.clear();
            self.backend.poll(&mut completions);
            self.blind.begin();
            for completion in &completions {
                self.complete(completion);
            }
            self.completions = completions;
        }
        if self.integrity.health.is_lost() && !self.is_abandoned {
            self.abandon();
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
            if self.is_abandoned {
                // It may have been read before the loss, or after: nobody can tell.
                tag.fail(libc::EIO);
            }
            let (request, result) = tag.end();
            self.integrity.health.ended(self.queue, index);
            self.stats.of(self.queue).request(&request, result);
            finished.push(Finished { tag: index, result });
        }
    }

    fn complete(&mut self, completion: &Completion) {
        let (index, slot) = (completion.id / SLOTS as u32, completion.id as usize % SLOTS);
        let index = index as u16;
        let Some(piece) = self
            .tags
            .get_mut(usize::from(index))
            .and_then(|tag| tag.finish(slot))
        else {
            return;
        };
        if let Some(more) = self.judge(index, slot, piece, completion.result) {
            if self.go_on(index, slot, more) {
                return;
            }
            self.fail(index, libc::EIO);
        }
        let tag = self.tags.get(usize::from(index));
        let is_believed = tag.is_some_and(|tag| !tag.failed());
        self.end_piece(index, piece.chunk);
        // After it: they may be pieces of the same request, which ends with the last of them.
        if let Step::Canary { .. } = piece.step {
            self.end_waiting(completion.id, is_believed);
        }
    }

    /// A piece needs no more copies: its request goes on, or ends.
    fn end_piece(&mut self, index: u16, chunk: u32) {
        self.table.leave(self.queue, chunk);
        let Some(tag) = self.tags.get_mut(usize::from(index)) else {
            return;
        };
        if tag.pending() > 0 {
            return;
        }
        if tag.is_zeroing() && !tag.failed() && tag.left() > 0 {
            self.zeroing.push_back(index);
        } else {
            self.ended.push_back(index);
        }
    }

    /// The memory is lost: ends every request, whatever its copies do.
    fn abandon(&mut self) {
        self.is_abandoned = true;
        self.zeroing.clear();
        for (tag, index) in self.tags.iter_mut().zip(0..) {
            // One that waits for its next slice of zeroes has no copy in flight.
            if tag.abandon() || (tag.is_zeroing() && !self.ended.contains(&index)) {
                tag.fail(libc::EIO);
                self.ended.push_back(index);
            }
        }
    }

    /// Whether copies were left behind that may still write to the memory of requests: it must stay what
    /// and where it is for as long as the process lives.
    pub fn has_abandoned_copies(&self) -> bool {
        self.is_abandoned && self.backend.in_flight() > 0
    }

    /// Whether `advance` has something to do without any outside event.
    pub fn has_work(&self) -> bool {
        !self.zeroing.is_empty()
            || !self.ended.is_empty()
            || (!self.is_abandoned
                && (self.backend.should_poll()
                    || (self.backend.in_flight() > self.backend.in_kernel()
                        && self.backend.completion_fd().is_none())))
    }

    /// The next copy that the kernel is to make, of a backend whose copies are the kernel's: it is to be
    /// put into the queue's ring now, and its end to be told to [`Engine::transferred`].
    pub fn next_transfer(&mut self) -> Option<Transfer> {
        match self.is_abandoned {
            true => None,
            false => self.backend.next_transfer(),
        }
    }

    /// A copy that was handed out has ended, as the ring tells it.
    pub fn transferred(&mut self, id: u32, result: i32) {
        self.backend.transferred(id, result);
    }

    /// What becomes readable, once and for good, when the device's memory is lost.
    pub fn loss_fd(&self) -> Option<RawFd> {
        self.integrity.health.wake_fd(self.queue)
    }

    /// What becomes readable when a copy completes on its own.
    pub fn completion_fd(&self) -> Option<RawFd> {
        self.backend.completion_fd()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.backend.in_flight() == 0 {
            // SAFETY: dropped here and nowhere else, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.backend) };
        }
    }
}

fn id_of(index: u16, slot: usize) -> u32 {
    u32::from(index) * SLOTS as u32 + slot as u32
}
