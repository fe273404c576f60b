//! The data handle of one queue thread: every batch is looked at whole, and each copy of it goes the
//! way that the planner finds fastest.
//!
//! ```text
//!   submit: note the copy down
//!   poll:   1. plan what has arrived
//!           2. start what goes by the engines          they work while ...
//!           3. copy by the CPU, for a bounded time     ... this goes on
//!           4. collect what has ended
//!           5. nothing in flight: done. Otherwise look again for a while, then ask to be woken.
//! ```

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Instant;

use super::board::Row;
use super::device::Device;
use super::engine::{Batch, CopyLane, Ended, GatherLane, MOST_PIECES, Part, Waker};
use super::host::HostSide;
use super::memory::Allocation;
use crate::backend::{BackendQueue, ChunkMemory, Completion, Copy, Direction};
use crate::copy::CopyRoutines;
use crate::copy::planner::{Group, Path, Paths, Planner, Seen};

/// Nanoseconds of copies by the CPU in one poll: what has ended meanwhile should not wait longer.
const CPU_BUDGET: f64 = 30e3;
/// Nanoseconds to look again and again for the end of an engine's work before sleeping. The end of
/// a copy of a megabyte is inside; being woken costs as much again.
const LOOK_NS: f64 = 60e3;
/// A batch for a copy engine is closed at so many bytes: what is done should be known.
const BATCH_BYTES: u64 = 1 << 20;
/// Copies in a batch for a copy engine.
pub(super) const BATCH_COPIES: usize = 32;
/// Smaller copies than this, and larger ones, are planned apart.
const SMALL: u32 = 16 << 10;

/// A copy with the address of its chunk's bytes, where the CPU reaches them.
#[derive(Clone, Copy)]
struct Pending {
    copy: Copy,
    /// Null where the CPU does not reach them.
    device: *mut u8,
    able: Paths,
}

impl Pending {
    /// What copies of one group have in common.
    fn key(&self) -> (Direction, bool, Paths) {
        (self.copy.direction, self.copy.len <= SMALL, self.able)
    }
}

/// The lanes and the memory that the engines need; none of it without engines.
pub(super) struct Engines {
    pub(super) copy: CopyLane,
    pub(super) gather: Option<GatherLane>,
    pub(super) host: HostSide,
    /// Dropped before the lanes, whose semaphores its thread waits for.
    pub(super) waker: Waker,
}

/// See the module.
pub(super) struct VulkanQueue {
    device: Arc<Device>,
    /// Declared before the chunks: the engines' work ends before the memory goes.
    engines: Option<Engines>,
    chunks: Arc<[Arc<Allocation>]>,
    routines: CopyRoutines,
    paths: Paths,
    planner: Planner,
    row: Arc<Row>,
    epoch: Instant,
    arrived: Vec<Pending>,
    by_cpu: VecDeque<Pending>,
    by_copy: VecDeque<Pending>,
    by_gather: VecDeque<Pending>,
    parts: Vec<Part>,
    done: VecDeque<Completion>,
    in_flight: usize,
    unfenced: bool,
    /// Until when to look again, on the planner's clock; asleep after that.
    look_until: f64,
    asleep: bool,
}

// SAFETY: the raw addresses in pending copies are valid on every thread (`BackendQueue::submit`), and
// the queue is used by one thread at a time.
unsafe impl Send for VulkanQueue {}

impl Drop for VulkanQueue {
    fn drop(&mut self) {
        // The waker's thread must have ended before the semaphores it waits for are destroyed.
        if let Some(Engines {
            waker,
            copy,
            gather,
            host,
        }) = self.engines.take()
        {
            drop(waker);
            drop((copy, gather));
            drop(host);
        }
    }
}

/// What a queue is made of.
pub(super) struct Parts {
    pub(super) device: Arc<Device>,
    pub(super) engines: Option<Engines>,
    pub(super) chunks: Arc<[Arc<Allocation>]>,
    pub(super) routines: CopyRoutines,
    pub(super) paths: Paths,
    pub(super) planner: Planner,
    pub(super) row: Arc<Row>,
    pub(super) epoch: Instant,
    pub(super) copies: usize,
}

impl VulkanQueue {
    pub(super) fn new(parts: Parts) -> VulkanQueue {
        let copies = parts.copies;
        VulkanQueue {
            device: parts.device,
            engines: parts.engines,
            chunks: parts.chunks,
            routines: parts.routines,
            paths: parts.paths,
            planner: parts.planner,
            row: parts.row,
            epoch: parts.epoch,
            arrived: Vec::with_capacity(copies),
            by_cpu: VecDeque::with_capacity(copies),
            by_copy: VecDeque::with_capacity(copies),
            by_gather: VecDeque::with_capacity(copies),
            parts: Vec::with_capacity(MOST_PIECES.max(BATCH_COPIES)),
            done: VecDeque::with_capacity(copies),
            in_flight: 0,
            unfenced: false,
            look_until: 0.0,
            asleep: false,
        }
    }

    fn now(&self) -> f64 {
        self.epoch.elapsed().as_nanos() as f64
    }

    fn end(&mut self, copy: &Copy, result: Result<u32, i32>) {
        self.done.push_back(Completion {
            id: copy.id,
            result,
        });
    }

    /// The paths that can carry a copy at all.
    fn able(&self, copy: &Copy, is_mapped: bool) -> Paths {
        let mut able = Paths::default();
        if is_mapped {
            able = able.with(Path::Bar);
        }
        let Some(engines) = &self.engines else {
            return able;
        };
        if copy.direction == Direction::Zero {
            // vkCmdFillBuffer writes words; the CPU is as fast where it can.
            let is_filled = copy.offset.is_multiple_of(4) && copy.len.is_multiple_of(4);
            return if is_filled && !is_mapped {
                able.with(Path::Dma)
            } else {
                able
            };
        }
        let Some(offset) = engines.host.offset_of(copy.memory, copy.len as usize) else {
            return able;
        };
        able = able.with(Path::Dma);
        let pieces = GatherLane::pieces(copy.len, copy.offset | offset as u64);
        if engines.gather.is_some() && pieces.is_some() {
            able = able.with(Path::Gather);
        }
        // What the user rules out still carries what nothing else can.
        let wanted = able.and(self.paths);
        if wanted == Paths::default() {
            able
        } else {
            wanted
        }
    }

    /// Sorts what has arrived into the three ways.
    fn plan(&mut self) {
        let now = if self.arrived.is_empty() {
            return;
        } else {
            self.now()
        };
        while let Some(first) = self.arrived.first() {
            let key = first.key();
            let mut group = Group {
                direction: first.copy.direction,
                copies: 0,
                bytes: 0,
                able: first.able,
            };
            for pending in self.arrived.iter().filter(|pending| pending.key() == key) {
                group.copies += 1;
                group.bytes += u64::from(pending.copy.len);
            }
            let path = self.planner.choose(&group, now);
            if let Some(path) = path {
                self.row
                    .count(path, group.direction, group.copies, group.bytes);
            }
            let (by_cpu, by_copy) = (&mut self.by_cpu, &mut self.by_copy);
            let (by_gather, done) = (&mut self.by_gather, &mut self.done);
            self.arrived.retain(|pending| {
                if pending.key() != key {
                    return true;
                }
                match path {
                    Some(Path::Bar) => by_cpu.push_back(*pending),
                    Some(Path::Dma) => by_copy.push_back(*pending),
                    Some(Path::Gather) => by_gather.push_back(*pending),
                    None => done.push_back(Completion {
                        id: pending.copy.id,
                        result: Err(libc::EIO),
                    }),
                }
                false
            });
        }
    }

    /// Starts what waits for an engine, as far as there are slots. True if something was started.
    fn start_engines(&mut self) -> bool {
        let now = self.now();
        let wants_probe = self.planner.probe_due(now);
        let Some(engines) = &mut self.engines else {
            return false;
        };
        if self.by_copy.is_empty() && self.by_gather.is_empty() && !wants_probe {
            return false;
        }
        if self.unfenced {
            // The engines see what the CPU has written before.
            self.routines.store_fence();
            self.unfenced = false;
        }
        let mut started = false;
        if wants_probe
            && let (Some(gather), Some(chunk)) = (&mut engines.gather, self.chunks.first())
        {
            let batch = Batch {
                direction: Direction::Read,
                plain: 0.0,
            };
            if gather.probe(chunk.address, batch) {
                self.planner.probe_sent();
            }
        }
        for path in [Path::Gather, Path::Dma] {
            let waiting = match path {
                Path::Gather => &mut self.by_gather,
                _ => &mut self.by_copy,
            };
            while let Some(first) = waiting.front() {
                let direction = first.copy.direction;
                self.parts.clear();
                let (mut bytes, mut pieces) = (0u64, 0);
                for pending in waiting.iter() {
                    let copy = &pending.copy;
                    let more = match path {
                        Path::Gather => GatherLane::pieces(copy.len, 0).unwrap_or(MOST_PIECES),
                        _ => MOST_PIECES / BATCH_COPIES,
                    };
                    let is_full = match path {
                        Path::Gather => pieces + more > MOST_PIECES,
                        _ => pieces + more > MOST_PIECES || bytes >= BATCH_BYTES,
                    };
                    if copy.direction != direction || (is_full && !self.parts.is_empty()) {
                        break;
                    }
                    (bytes, pieces) = (bytes + u64::from(copy.len), pieces + more);
                    let chunk = self.chunks.get(copy.chunk as usize);
                    let offset = engines.host.offset_of(copy.memory, copy.len as usize);
                    if direction == Direction::Write
                        && let Some(offset) = offset
                    {
                        // SAFETY: the copy's memory is its alone until it has ended.
                        unsafe { engines.host.before_write(offset, copy.len as usize) };
                    }
                    self.parts.push(Part {
                        id: copy.id,
                        len: copy.len,
                        chunk: chunk.map_or_else(Default::default, |chunk| chunk.buffer),
                        chunk_address: chunk.map_or(0, |chunk| chunk.address),
                        chunk_offset: copy.offset,
                        host_offset: offset.unwrap_or(0) as u64,
                    });
                }
                let copies = u32::try_from(self.parts.len()).unwrap_or(u32::MAX);
                let own = self
                    .planner
                    .costs()
                    .of(path, direction)
                    .map_or(0.0, |cost| cost.time(copies, bytes));
                let outcome = match (path, &mut engines.gather) {
                    (Path::Gather, Some(gather)) => {
                        let plain = gather.backlog() + own;
                        let batch = Batch { direction, plain };
                        Ok(gather.start(&self.parts, engines.host.address(), batch))
                    }
                    _ => {
                        let plain = engines.copy.backlog() + own;
                        let batch = Batch { direction, plain };
                        engines
                            .copy
                            .start(&self.parts, engines.host.buffer(), batch)
                    }
                };
                match outcome {
                    Ok(false) => break,
                    Ok(true) => {}
                    Err(errno) => {
                        for part in &self.parts {
                            self.done.push_back(Completion {
                                id: part.id,
                                result: Err(errno),
                            });
                        }
                    }
                }
                started = true;
                waiting.drain(..self.parts.len());
            }
        }
        started
    }

    /// Copies by the CPU until its time is up. True if something was copied.
    fn copy_by_cpu(&mut self) -> bool {
        let mut spent = 0.0;
        let mut copied = false;
        while spent < CPU_BUDGET
            && let Some(pending) = self.by_cpu.pop_front()
        {
            copied = true;
            let Pending { copy, device, .. } = pending;
            let len = copy.len as usize;
            let start = Instant::now();
            // SAFETY: `device` is the address of `len` mapped bytes of the chunk (`submit`), which stays
            // mapped until the copy's end; `memory` by the caller's promise.
            unsafe {
                match copy.direction {
                    Direction::Read => self.routines.load(copy.memory, device, len),
                    Direction::Write => self.routines.store(device, copy.memory, len),
                    Direction::Zero => self.routines.fill_zero(device, len),
                }
            }
            let time = start.elapsed().as_nanos() as f64;
            spent += time;
            self.unfenced |= copy.direction != Direction::Read;
            if copy.direction != Direction::Zero
                && let Some(cost) = self.planner.costs().of(Path::Bar, copy.direction)
            {
                let plain = cost.time(1, u64::from(copy.len));
                let now = start.duration_since(self.epoch).as_nanos() as f64 + time;
                self.planner
                    .observe(Path::Bar, copy.direction, plain, Seen::exactly(time), now);
            }
            // After a lost GPU nothing that its memory holds is true.
            let result = if self.device.is_lost() {
                Err(libc::EIO)
            } else {
                Ok(copy.len)
            };
            self.end(&copy, result);
        }
        copied
    }

    /// Takes what the engines have ended. True if there was something.
    fn collect(&mut self) -> bool {
        let now = self.now();
        let Some(engines) = &mut self.engines else {
            return false;
        };
        let before = self.done.len();
        let (planner, done, host) = (&mut self.planner, &mut self.done, &engines.host);
        let mut end = |path: Path, ended: &Ended, parts: &[Part]| {
            let direction = ended.batch.direction;
            match (ended.result, parts.is_empty()) {
                // A probe is the one batch without copies.
                (Ok(()), true) => planner.probed(ended.seen, now),
                (Ok(()), false) => {
                    planner.observe(path, direction, ended.batch.plain, ended.seen, now);
                }
                (Err(_), _) => {}
            }
            for part in parts {
                if ended.result.is_ok() && direction == Direction::Read && host.is_staged() {
                    // SAFETY: the engine's copy has ended, and its memory is its alone until the
                    // completion was polled.
                    unsafe { host.after_read(part.host_offset as usize, part.len as usize) };
                }
                done.push_back(Completion {
                    id: part.id,
                    result: ended.result.map(|()| part.len),
                });
            }
        };
        engines
            .copy
            .collect(|ended, parts| end(Path::Dma, ended, parts));
        if let Some(gather) = &mut engines.gather {
            gather.collect(|ended, parts| end(Path::Gather, ended, parts));
        }
        self.done.len() > before
    }

    /// Batches that an engine works on.
    fn flying(&self) -> usize {
        self.engines.as_ref().map_or(0, |engines| {
            let gather = engines.gather.as_ref().map_or(0, GatherLane::flying);
            engines.copy.flying() + gather
        })
    }
}

impl BackendQueue for VulkanQueue {
    unsafe fn submit(&mut self, copy: &Copy, chunk: &ChunkMemory) {
        self.in_flight += 1;
        let inside = copy
            .offset
            .checked_add(u64::from(copy.len))
            .is_some_and(|end| end <= chunk.size);
        if !inside || self.device.is_lost() {
            self.end(copy, Err(libc::EIO));
            return;
        }
        if copy.len == 0 {
            self.end(copy, Ok(0));
            return;
        }
        let device = chunk.at(copy.offset, copy.len as usize);
        self.arrived.push(Pending {
            copy: *copy,
            device: device.unwrap_or(std::ptr::null_mut()),
            able: self.able(copy, device.is_some()),
        });
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.plan();
        let started = self.start_engines();
        let copied = self.copy_by_cpu();
        let ended = self.collect();
        if ended {
            // What waited for a slot can start now.
            self.start_engines();
        }
        if self.unfenced && !self.done.is_empty() {
            self.routines.store_fence();
            self.unfenced = false;
        }
        while done.len() < done.capacity() {
            match self.done.pop_front() {
                Some(completion) => {
                    self.in_flight -= 1;
                    done.push(completion);
                }
                None => break,
            }
        }
        if started || copied || ended {
            self.look_until = self.now() + LOOK_NS;
            self.asleep = false;
        }
        self.row.update(&self.planner, self.epoch);
        if self.flying() == 0 {
            self.asleep = false;
            return;
        }
        let Some(engines) = &self.engines else {
            return;
        };
        if self.asleep && !engines.waker.is_armed() {
            // It has answered: look, and ask again if that was for something else.
            self.asleep = false;
        }
        if !self.asleep && self.now() >= self.look_until {
            let gather = engines.gather.as_ref().and_then(GatherLane::next_end);
            engines.waker.arm([engines.copy.next_end(), gather]);
            self.asleep = true;
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn should_poll(&self) -> bool {
        let is_ready = !self.done.is_empty() || !self.by_cpu.is_empty() || !self.arrived.is_empty();
        is_ready || (self.flying() > 0 && !self.asleep)
    }

    fn completion_fd(&self) -> Option<RawFd> {
        self.engines
            .as_ref()
            .map(|engines| engines.waker.descriptor())
    }
}
