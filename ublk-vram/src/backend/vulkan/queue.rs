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
use std::time::{Duration, Instant};

use super::device::Device;
use super::engine::{Batch, CopyLane, Ended, GatherLane, MOST_PIECES, Part, Waker};
use super::host::HostSide;
use super::memory::Allocation;
use crate::backend::{BackendQueue, ChunkMemory, Completion, Copy, DRIVER_LOST, Direction, GONE};
use crate::copy::CopyRoutines;
use crate::copy::planner::{Costs, Group, Path, Paths, Planner, Seen};
use crate::device::PathCounters;
use crate::safety::bus_error;

/// Nanoseconds of copies by the CPU in one poll: what has ended meanwhile should not wait longer.
const CPU_BUDGET: f64 = 30e3;
/// Nanoseconds to look again and again for the end of an engine's work before sleeping. The end of
/// a copy of a megabyte is inside; being woken costs as much again.
const LOOK_NS: f64 = 60e3;
/// So long after the end that the waker waited for this thread runs at the latest: what it was woken for
/// had not ended before. On a machine too busy for that a shader in time passes for one that was late, and
/// rests for a moment.
const WAKE: Duration = Duration::from_micros(500);
/// A batch for a copy engine is closed at so many bytes: what is done should be known. Between two
/// batches the engine pauses (8 us on an H200), so they should not be small either.
const BATCH_BYTES: u64 = 4 << 20;
/// Batches of one queue thread that an engine has at once. One runs and the next is there when it
/// ends; what arrives meanwhile becomes one larger batch, which costs less than several.
const COPY_FLYING: usize = 3;
const GATHER_FLYING: usize = 2;
/// Copies in a batch for a copy engine.
pub(super) const BATCH_COPIES: usize = 32;
/// What the planner believes is shown once in so many polls: that takes as long as a small write.
const SHOW_EVERY: u32 = 256;
/// No request is shorter.
const SECTOR: u32 = 512;
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

/// The copies of a batch, by direction.
#[derive(Default)]
struct Sum {
    reads: (u32, u64),
    writes: (u32, u64),
}

impl Sum {
    fn add(&mut self, copy: &Copy) {
        let side = match copy.direction {
            Direction::Read => &mut self.reads,
            Direction::Write | Direction::Zero => &mut self.writes,
        };
        *side = (side.0 + 1, side.1 + u64::from(copy.len));
    }

    fn bytes(&self) -> u64 {
        self.reads.1 + self.writes.1
    }

    /// That of most copies.
    fn direction(&self) -> Direction {
        if self.reads.0 >= self.writes.0 {
            Direction::Read
        } else {
            Direction::Write
        }
    }

    /// Nanoseconds that the costs say; the start is paid once.
    fn cost(&self, costs: &Costs, path: Path) -> f64 {
        let main = self.direction();
        [
            (Direction::Read, self.reads),
            (Direction::Write, self.writes),
        ]
        .into_iter()
        .filter_map(|(direction, (copies, bytes))| {
            let cost = costs.of(path, direction)?;
            let start = if direction == main { 0.0 } else { cost.start };
            (copies > 0).then(|| cost.time(copies, bytes) - start)
        })
        .sum()
    }
}

/// The lanes and the memory that the engines need; none of it without engines.
pub(super) struct Engines {
    pub(super) copy: CopyLane,
    pub(super) gather: Option<GatherLane>,
    pub(super) host: Vec<HostSide>,
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
    counters: PathCounters,
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
    polls: u32,
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
    pub(super) epoch: Instant,
    pub(super) copies: usize,
}

/// Adds to the cell of a table by direction and path.
fn count(table: &mut [[u64; 3]; 2], path: Path, direction: Direction, more: u64) {
    let row = usize::from(direction != Direction::Read);
    let column = Path::ALL.iter().position(|each| *each == path);
    let cell = table
        .get_mut(row)
        .and_then(|row| row.get_mut(column.unwrap_or(0)));
    if let Some(cell) = cell {
        *cell += more;
    }
}

/// Where the engines find the memory end of a copy.
fn find_host<'a>(sides: &'a [HostSide], copy: &Copy) -> Option<(&'a HostSide, usize)> {
    sides.iter().find_map(|side| {
        let offset = side.offset_of(copy.memory, copy.len as usize)?;
        Some((side, offset))
    })
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
            counters: PathCounters::default(),
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
            polls: 0,
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
        if is_mapped && copy.len < SECTOR {
            // Only canaries are so short, and they are to go the way on which a dead bus shows: what an
            // engine cannot read does not end.
            return able;
        }
        if copy.direction == Direction::Zero {
            // vkCmdFillBuffer writes words; the CPU is as fast where it can.
            let is_filled = copy.offset.is_multiple_of(4) && copy.len.is_multiple_of(4);
            return if is_filled && !is_mapped {
                able.with(Path::Dma)
            } else {
                able
            };
        }
        let Some((_, offset)) = find_host(&engines.host, copy) else {
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

    /// Sorts what has arrived into the three ways, together with what still waits for the CPU: a thread
    /// that is given a few requests for the few that it ended would else never see that all of them
    /// together are better carried by the shader.
    fn plan(&mut self, now: f64) {
        if self.engines.is_some() && !self.arrived.is_empty() && !self.by_cpu.is_empty() {
            // The older first.
            self.by_cpu.extend(self.arrived.drain(..));
            self.arrived.extend(self.by_cpu.drain(..));
        }
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
            // What the CPU carries is counted when it has: until then it may be planned again.
            if let Some(path @ (Path::Dma | Path::Gather)) = path {
                let (direction, copies) = (group.direction, u64::from(group.copies));
                count(&mut self.counters.copies, path, direction, copies);
                count(&mut self.counters.bytes, path, direction, group.bytes);
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
    fn start_engines(&mut self, now: f64) -> bool {
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
                own: 0.0,
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
            let most_flying = match path {
                Path::Gather => GATHER_FLYING,
                _ => COPY_FLYING,
            };
            while !waiting.is_empty() {
                let flying = match (path, &engines.gather) {
                    (Path::Gather, Some(gather)) => gather.flying(),
                    _ => engines.copy.flying(),
                };
                if flying >= most_flying {
                    break;
                }
                self.parts.clear();
                let mut pieces = 0;
                let mut sum = Sum::default();
                for pending in waiting.iter() {
                    let copy = &pending.copy;
                    let more = match path {
                        Path::Gather => GatherLane::pieces(copy.len, 0).unwrap_or(MOST_PIECES),
                        _ => MOST_PIECES / BATCH_COPIES,
                    };
                    let is_full = pieces + more > MOST_PIECES
                        || (path == Path::Dma && sum.bytes() >= BATCH_BYTES);
                    if is_full && !self.parts.is_empty() {
                        break;
                    }
                    pieces += more;
                    sum.add(copy);
                    let chunk = self.chunks.get(copy.chunk as usize);
                    let host = find_host(&engines.host, copy);
                    if copy.direction == Direction::Write
                        && let Some((side, offset)) = host
                    {
                        // SAFETY: the copy's memory is its alone until it has ended.
                        unsafe { side.before_write(offset, copy.len as usize) };
                    }
                    self.parts.push(Part {
                        id: copy.id,
                        direction: copy.direction,
                        len: copy.len,
                        chunk: chunk.map_or_else(Default::default, |chunk| chunk.buffer),
                        chunk_address: chunk.map_or(0, |chunk| chunk.address),
                        chunk_offset: copy.offset,
                        host: host.map_or_else(Default::default, |(side, _)| side.buffer()),
                        host_address: host.map_or(0, |(side, _)| side.address()),
                        host_offset: host.map_or(0, |(_, offset)| offset as u64),
                    });
                }
                let (direction, own) = (sum.direction(), sum.cost(self.planner.costs(), path));
                let backlog = match (path, &engines.gather) {
                    (Path::Gather, Some(gather)) => gather.backlog(),
                    _ => engines.copy.backlog(),
                };
                let batch = Batch {
                    direction,
                    plain: backlog + own,
                    own,
                };
                let outcome = match (path, &mut engines.gather) {
                    (Path::Gather, Some(gather)) => Ok(gather.start(&self.parts, batch)),
                    _ => engines.copy.start(&self.parts, batch),
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
        if self.by_cpu.is_empty() {
            return false;
        }
        let begin = self.now();
        let mut now = begin;
        while now - begin < CPU_BUDGET
            && let Some(pending) = self.by_cpu.pop_front()
        {
            let Pending { copy, device, .. } = pending;
            let len = copy.len as usize;
            let counters = &mut self.counters;
            count(&mut counters.copies, Path::Bar, copy.direction, 1);
            count(
                &mut counters.bytes,
                Path::Bar,
                copy.direction,
                u64::from(copy.len),
            );
            let routines = self.routines;
            // SAFETY: `device` is the address of `len` mapped bytes of the chunk (`submit`), which stays
            // mapped until the copy's end; `memory` by the caller's promise. That the driver can take the
            // mapping away all the same is what the guard is for.
            let copied = bus_error::guarded(|| unsafe {
                match copy.direction {
                    Direction::Read => routines.load(copy.memory, device, len),
                    Direction::Write => routines.store(device, copy.memory, len),
                    Direction::Zero => routines.fill_zero(device, len),
                }
            });
            let time = self.now() - now;
            now += time;
            self.unfenced |= copy.direction != Direction::Read;
            if copy.direction != Direction::Zero
                && let Some(cost) = self.planner.costs().of(Path::Bar, copy.direction)
            {
                let plain = cost.time(1, u64::from(copy.len));
                self.planner
                    .observe(Path::Bar, copy.direction, plain, Seen::exactly(time), now);
            }
            // After a lost GPU nothing that its memory holds is true.
            let result = match copied {
                Err(_) => Err(GONE),
                Ok(()) if self.device.is_lost() => Err(DRIVER_LOST),
                Ok(()) => Ok(copy.len),
            };
            self.end(&copy, result);
        }
        true
    }

    /// Takes what the engines have ended. True if there was something.
    fn collect(&mut self) -> bool {
        if self.flying() == 0 {
            return false;
        }
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
                // Zeroes cross no bus: they say nothing of writes.
                (Ok(()), false) if parts.iter().any(|part| part.direction == Direction::Zero) => {}
                (Ok(()), false) => {
                    planner.observe(path, direction, ended.batch.plain, ended.seen, now);
                }
                (Err(_), true) => planner.probe_failed(now),
                (Err(_), false) => {}
            }
            for part in parts {
                let is_read = part.direction == Direction::Read;
                let side = host
                    .iter()
                    .find(|side| side.is_staged() && side.buffer() == part.host);
                if ended.result.is_ok()
                    && is_read
                    && let Some(side) = side
                {
                    // SAFETY: the engine's copy has ended, and its memory is its alone until the
                    // completion was polled.
                    unsafe { side.after_read(part.host_offset as usize, part.len as usize) };
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

    /// A thread that slept has not looked, and what it was woken for may have taken long: without this
    /// nobody would know that it was late.
    fn note_wake(&mut self) {
        if self.asleep
            && let Some(engines) = &mut self.engines
            && !engines.waker.is_armed()
            && let Some(at) = Instant::now().checked_sub(WAKE)
        {
            engines.copy.unfinished_at(at);
            if let Some(gather) = &mut engines.gather {
                gather.unfinished_at(at);
            }
        }
    }

    /// Notes what the planner believes.
    fn show(&mut self, now: f64) {
        let rows = self.counters.slowdown.iter_mut();
        for (row, direction) in rows.zip([Direction::Read, Direction::Write]) {
            for (cell, path) in row.iter_mut().zip(Path::ALL) {
                *cell = (self.planner.slowdown(path, direction, now) * 1e3) as u64;
            }
        }
        self.counters.gather_is_late = self.planner.gather_is_late();
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
            let errno = if inside { DRIVER_LOST } else { libc::EIO };
            self.end(copy, Err(errno));
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
        self.note_wake();
        let now = self.now();
        self.plan(now);
        let started = self.start_engines(now);
        let copied = self.copy_by_cpu();
        let ended = self.collect();
        if ended {
            // What waited for its turn can start now.
            self.start_engines(now);
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
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(SHOW_EVERY) {
            self.show(now);
        }
        if self.flying() == 0 {
            self.asleep = false;
            return;
        }
        if started || copied || ended {
            self.look_until = self.now() + LOOK_NS;
            self.asleep = false;
        }
        let Some(engines) = &self.engines else {
            return;
        };
        if self.asleep && !engines.waker.is_armed() {
            // It has answered: look, and ask again if that was for something else.
            self.asleep = false;
        }
        if !self.asleep && now >= self.look_until {
            let gather = engines.gather.as_ref().and_then(GatherLane::next_end);
            engines.waker.arm([engines.copy.next_end(), gather]);
            self.asleep = true;
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn path_counters(&self) -> Option<PathCounters> {
        Some(self.counters)
    }

    fn should_poll(&self) -> bool {
        let is_ready = !self.done.is_empty() || !self.by_cpu.is_empty() || !self.arrived.is_empty();
        // An answered waker is a reason to look: perhaps for a probe, which no copy waits for.
        let engines = self.engines.as_ref();
        let is_answered = engines.is_some_and(|engines| !engines.waker.is_armed());
        is_ready || (self.flying() > 0 && (!self.asleep || is_answered))
    }

    fn completion_fd(&self) -> Option<RawFd> {
        self.engines
            .as_ref()
            .map(|engines| engines.waker.descriptor())
    }
}
