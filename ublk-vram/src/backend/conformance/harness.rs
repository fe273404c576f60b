//! What a check is written with: memory for copies, patterns, and a queue that is watched.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::backend::{
    Backend, BackendQueue, ChunkMemory, Completion, Copy, Direction, Mapping, QueueId,
};

/// A batch of copies that takes longer than this is lost.
const LIMIT: Duration = Duration::from_secs(30);
/// How long one sleep on the completion descriptor lasts at most.
const NAP_MS: u8 = 50;

/// The end of a check before its end.
pub(super) enum Stop {
    /// It cannot be tried.
    Skip(String),
    /// The promise is broken.
    Fail(String),
}

impl Stop {
    /// The same, with `place` said first.
    pub(super) fn within(self, place: String) -> Stop {
        match self {
            Stop::Fail(why) => Stop::Fail(format!("{place}: {why}")),
            Stop::Skip(why) => Stop::Skip(why),
        }
    }
}

pub(super) type Verdict<T = ()> = Result<T, Stop>;

pub(super) fn fail<T>(why: impl Into<String>) -> Verdict<T> {
    Err(Stop::Fail(why.into()))
}

pub(super) fn skip<T>(why: impl Into<String>) -> Verdict<T> {
    Err(Stop::Skip(why.into()))
}

/// Fails with `why` unless `holds`.
pub(super) fn ensure(holds: bool, why: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { fail(why()) }
}

/// Page-aligned memory that copies go to and come from.
pub(super) struct Arena {
    memory: Mapping,
}

impl Arena {
    pub(super) fn new(len: usize) -> Verdict<Arena> {
        match Mapping::anonymous(len) {
            Ok(memory) => Ok(Arena { memory }),
            Err(error) => skip(error.to_string()),
        }
    }

    /// The address of `len` bytes at `at`.
    fn address(&self, at: usize, len: usize) -> Verdict<*mut u8> {
        self.memory.at(at as u64, len).ok_or_else(|| {
            Stop::Fail(format!(
                "the suite asked for bytes {at}+{len} of an arena of {}",
                self.memory.len()
            ))
        })
    }

    /// Fills `len` bytes at `at` with the pattern of `seed`. No copy may be using them.
    pub(super) fn fill(&mut self, at: usize, len: usize, seed: u64) -> Verdict {
        let base = self.address(at, len)?;
        // SAFETY: inside the allocation, and no copy uses these bytes.
        let bytes = unsafe { std::slice::from_raw_parts_mut(base, len) };
        // Every length the suite uses is a multiple of a word.
        for (word, n) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(0..) {
            *word = pattern(seed, n);
        }
        Ok(())
    }

    /// Whether `len` bytes at `at` are bytes `skipped..` of the pattern of `seed` (`None`: zeroes).
    pub(super) fn check(
        &self,
        at: usize,
        len: usize,
        seed: Option<u64>,
        skipped: usize,
    ) -> Verdict {
        let base = self.address(at, len)?;
        // SAFETY: inside the allocation, and no copy uses these bytes.
        let bytes = unsafe { std::slice::from_raw_parts(base.cast_const(), len) };
        for (word, n) in bytes.as_chunks::<8>().0.iter().zip(skipped as u64 / 8..) {
            let wanted = seed.map_or([0; 8], |seed| pattern(seed, n));
            if *word != wanted {
                let byte = n * 8 - skipped as u64;
                return fail(format!(
                    "byte {byte} of {len}: {word:02x?} was read, not {wanted:02x?}"
                ));
            }
        }
        Ok(())
    }
}

/// Word `n` of the pattern of `seed` (splitmix64): no two words of a check are alike.
pub(super) fn pattern(seed: u64, n: u64) -> [u8; 8] {
    let mut z = (seed << 40)
        .wrapping_add(n)
        .wrapping_add(1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (z ^ (z >> 31)).to_le_bytes()
}

/// A copy as a check writes it down: between `chunk` at `offset` and the arena at `at`.
#[derive(Debug, Clone, std::marker::Copy)]
pub(super) struct Job {
    pub(super) direction: Direction,
    pub(super) chunk: u32,
    pub(super) offset: u64,
    pub(super) len: u32,
    pub(super) at: usize,
}

/// A queue whose completions are counted.
pub(super) struct Watched<'a> {
    chunks: &'a [ChunkMemory],
    pub(super) queue: Box<dyn BackendQueue>,
    /// `None` only while it is dropped.
    arena: Option<Arena>,
    copies: usize,
    next_id: u32,
    /// Copies that have not completed: id and length.
    open: HashMap<u32, u32>,
}

impl<'a> Watched<'a> {
    /// Opens queue `number` for `copies` copies, with `bytes` of memory.
    pub(super) fn open(
        backend: &'a dyn Backend,
        number: u16,
        copies: usize,
        bytes: usize,
    ) -> Verdict<Watched<'a>> {
        let arena = Arena::new(bytes)?;
        match backend.open_queue(QueueId(number), copies, std::slice::from_ref(&arena.memory)) {
            Ok(queue) => Ok(Watched::new(backend, queue, arena, copies)),
            Err(error) => fail(format!(
                "queue {number} for {copies} copies does not open: {error}"
            )),
        }
    }

    /// One queue for each copy path, each with `bytes` of memory of its own.
    pub(super) fn open_paths(
        backend: &'a dyn Backend,
        copies: usize,
        bytes: usize,
    ) -> Verdict<Vec<(&'static str, Watched<'a>)>> {
        let open = |memory: &Mapping| {
            backend
                .open_paths(copies, std::slice::from_ref(memory))
                .map_err(|error| Stop::Fail(format!("the paths do not open: {error}")))
        };
        let names = open(&Arena::new(bytes)?.memory)?;
        let mut watched = Vec::new();
        for (index, (name, _)) in names.iter().enumerate() {
            let arena = Arena::new(bytes)?;
            let Some((_, queue)) = open(&arena.memory)?.into_iter().nth(index) else {
                return fail(format!("the path {name} opens once only"));
            };
            watched.push((*name, Watched::new(backend, queue, arena, copies)));
        }
        Ok(watched)
    }

    fn new(
        backend: &'a dyn Backend,
        queue: Box<dyn BackendQueue>,
        arena: Arena,
        copies: usize,
    ) -> Watched<'a> {
        Watched {
            chunks: backend.chunks(),
            queue,
            arena: Some(arena),
            copies,
            next_id: 0,
            open: HashMap::new(),
        }
    }

    pub(super) fn arena(&mut self) -> Verdict<&mut Arena> {
        self.arena
            .as_mut()
            .ok_or_else(|| Stop::Fail("the arena is gone".to_owned()))
    }

    pub(super) fn submit(&mut self, job: Job) -> Verdict<u32> {
        let Some(chunk) = self.chunks.get(job.chunk as usize) else {
            return fail(format!("there is no chunk {}", job.chunk));
        };
        let memory = match job.direction {
            Direction::Zero => std::ptr::null_mut(),
            _ => self.arena()?.address(job.at, job.len as usize)?,
        };
        let id = self.next_id;
        self.next_id = self.next_id.wrapping_add(1);
        self.open.insert(id, job.len);
        let Job {
            direction,
            chunk: index,
            offset,
            len,
            ..
        } = job;
        // Nobody addresses by it, but it is always inside some device.
        let device_offset = offset % (1 << 40);
        let copy = Copy {
            id,
            direction,
            chunk: index,
            offset,
            len,
            memory,
            device_offset,
        };
        // SAFETY: `memory` is inside the arena, which lives until the copy has completed (see the drop
        // below) and which no check touches before; `chunk` is the memory of chunk `index`.
        unsafe { self.queue.submit(&copy, chunk) };
        Ok(id)
    }

    /// One poll into a vector of exactly `capacity`; completions are checked to be expected ones.
    pub(super) fn poll(&mut self, capacity: usize) -> Verdict<Vec<Completion>> {
        let mut done = Vec::with_capacity(capacity);
        let room = done.capacity();
        self.queue.poll(&mut done);
        ensure(done.capacity() == room && done.len() <= room, || {
            format!(
                "poll gave {} completions to a vector with room for {room}",
                done.len()
            )
        })?;
        for completion in &done {
            if self.open.remove(&completion.id).is_none() {
                return fail(format!(
                    "copy {} completed twice, or was never submitted",
                    completion.id
                ));
            }
        }
        Ok(done)
    }

    /// Polls until `count` copies have completed, asleep in between where the backend allows it.
    pub(super) fn wait(&mut self, count: usize) -> Verdict<Vec<Completion>> {
        let end = Instant::now() + LIMIT;
        let mut all = Vec::with_capacity(count);
        loop {
            let done = self.poll(self.copies.max(1))?;
            let idle = done.is_empty();
            all.extend(done);
            if all.len() >= count {
                return Ok(all);
            }
            if Instant::now() >= end {
                return fail(format!(
                    "{} of {count} copies did not complete in {} s",
                    count - all.len(),
                    LIMIT.as_secs()
                ));
            }
            if idle && !self.queue.should_poll() {
                match self.queue.completion_fd() {
                    Some(fd) => drop(wake(fd)?),
                    None => std::thread::sleep(Duration::from_micros(50)),
                }
            }
        }
    }

    /// Runs the jobs together and waits for all; every one must move all of its bytes.
    pub(super) fn run(&mut self, jobs: &[Job]) -> Verdict {
        let mut lengths = HashMap::new();
        for job in jobs {
            lengths.insert(self.submit(*job)?, *job);
        }
        for Completion { id, result } in self.wait(jobs.len())? {
            match lengths.get(&id) {
                Some(job) if result == Ok(job.len) => {}
                Some(job) => return fail(format!("{job:?} ended with {result:?}")),
                None => return fail(format!("copy {id} completed in the wrong batch")),
            }
        }
        Ok(())
    }

    /// One job, in the middle of which no other is in flight.
    pub(super) fn one(
        &mut self,
        direction: Direction,
        (chunk, offset): (u32, u64),
        len: u32,
        at: usize,
    ) -> Verdict {
        self.run(&[Job {
            direction,
            chunk,
            offset,
            len,
            at,
        }])
    }
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        // A copy that never completed may still come: its memory must stay.
        if !self.open.is_empty() {
            std::mem::forget(self.arena.take());
        }
    }
}

/// Sleeps until the completion descriptor is readable, and resets it; false if the time is up.
pub(super) fn wake(fd: RawFd) -> Verdict<bool> {
    // SAFETY: the queue that gave the descriptor is alive, and the descriptor is not kept.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut fds = [PollFd::new(borrowed, PollFlags::POLLIN)];
    match poll(&mut fds, PollTimeout::from(NAP_MS)) {
        Ok(0) => return Ok(false),
        Ok(_) => {}
        Err(nix::errno::Errno::EINTR) => return Ok(false),
        Err(errno) => return fail(format!("poll on the completion descriptor: {errno}")),
    }
    // An eventfd and a timerfd are both read as one word; it is readable, so this does not block.
    let mut count = [0u8; 8];
    match nix::unistd::read(borrowed, &mut count) {
        Ok(_) | Err(nix::errno::Errno::EAGAIN) => Ok(true),
        Err(errno) => fail(format!("read of the completion descriptor: {errno}")),
    }
}
