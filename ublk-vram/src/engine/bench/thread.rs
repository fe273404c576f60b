//! One thread of the bench: it keeps its requests in flight, stamps what it writes and checks what it reads.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Bench, PAGE, Workload};
use crate::backend::Mapping;
use crate::engine::{Engine, Finished, Op, Request};
use crate::error::{Error, ErrorKind, Result};

const WORDS: usize = PAGE as usize / 8;
/// Words of a page that are no pattern: number, version, seed, and at the end their sum.
const STAMPS: usize = 3;
/// A thread that waits looks at the clock so often.
const NAP_MS: u8 = 50;
/// Requests that do not end in so long are lost.
const HANG: Duration = Duration::from_secs(30);

/// What one thread found.
pub(super) struct Tally {
    pub(super) read: Histogram<u64>,
    pub(super) write: Histogram<u64>,
    pub(super) requests: u64,
    pub(super) errors: u64,
    pub(super) wrong: u64,
}

impl Workload {
    /// Pages of a request.
    pub(super) fn pages(&self) -> u64 {
        u64::from(self.size) / PAGE
    }
}

impl Tally {
    pub(super) fn new() -> Result<Tally> {
        // A nanosecond to a minute, to a hundredth.
        let histogram = || {
            Histogram::new_with_bounds(1, 60_000_000_000, 2)
                .map_err(|error| Error::new(ErrorKind::Io, format!("a histogram: {error}")))
        };
        Ok(Tally {
            read: histogram()?,
            write: histogram()?,
            requests: 0,
            errors: 0,
            wrong: 0,
        })
    }

    pub(super) fn add(&mut self, other: &Tally) -> Result<()> {
        let failed = |error| Error::new(ErrorKind::Io, format!("a histogram: {error}"));
        self.read.add(&other.read).map_err(failed)?;
        self.write.add(&other.write).map_err(failed)?;
        self.requests += other.requests;
        self.errors += other.errors;
        self.wrong += other.wrong;
        Ok(())
    }
}

/// A request in flight.
#[derive(Clone, Copy)]
struct Open {
    is_read: bool,
    /// First page, counted from the device's start.
    page: u64,
    sent: Instant,
}

/// A thread with its engine and its part of the device.
pub(super) struct Thread<'a> {
    versions: &'a [AtomicU32],
    load: Workload,
    engine: Engine,
    memory: Mapping,
    first: u64,
    blocks: u64,
    next: u64,
    random: u64,
    open: Vec<Option<Open>>,
    idle: Vec<u16>,
    tally: Tally,
    whole_check: bool,
}

impl<'a> Thread<'a> {
    pub(super) fn new(
        bench: &'a Bench<'_>,
        load: &Workload,
        engine: Engine,
        memory: Mapping,
        first: u64,
        blocks: u64,
    ) -> Result<Thread<'a>> {
        let thread = Thread {
            versions: &bench.versions,
            load: *load,
            engine,
            memory,
            first,
            blocks,
            next: 0,
            random: first.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            open: vec![None; usize::from(load.depth)],
            idle: (0..load.depth).rev().collect(),
            tally: Tally::new()?,
            whole_check: load.time.is_none(),
        };
        for tag in 0..load.depth {
            for page in 0..load.pages() {
                let words = thread.page(tag, page);
                for (word, n) in words.iter_mut().zip(0..) {
                    *word = pattern(seed(tag, page), n);
                }
            }
        }
        Ok(thread)
    }

    /// The words of page `page` of a tag's buffer.
    #[allow(clippy::mut_from_ref, reason = "the memory is shared with the engine")]
    fn page(&self, tag: u16, page: u64) -> &mut [u64] {
        let offset = u64::from(tag) * u64::from(self.load.size) + page * PAGE;
        match self.memory.at(offset, PAGE as usize) {
            // SAFETY: mapped for as long as `self`, aligned to a page; the tag is not in flight, and
            // only one slice is looked at at a time.
            Some(at) => unsafe { std::slice::from_raw_parts_mut(at.cast::<u64>(), WORDS) },
            None => &mut [],
        }
    }

    /// Carries out its part of the workload.
    pub(super) fn run(mut self) -> Result<Tally> {
        let begin = Instant::now();
        let mut finished: Vec<Finished> = Vec::with_capacity(usize::from(self.load.depth));
        let mut progress = begin;
        loop {
            let is_over = match self.load.time {
                Some(time) => begin.elapsed() >= time,
                None => self.next >= self.blocks,
            };
            if is_over && self.idle.len() == usize::from(self.load.depth) {
                return Ok(self.tally);
            }
            if !is_over {
                self.send();
            }
            self.engine.advance(&mut finished);
            if finished.is_empty() {
                if progress.elapsed() > HANG {
                    // An engine may still write to the memory: it stays for ever.
                    let in_flight = usize::from(self.load.depth) - self.idle.len();
                    std::mem::forget((self.engine, self.memory));
                    return Err(Error::new(
                        ErrorKind::Io,
                        format!("{in_flight} requests do not end"),
                    ));
                }
                if !self.engine.has_work() {
                    self.sleep()?;
                }
                continue;
            }
            progress = Instant::now();
            for done in finished.drain(..) {
                self.end(&done, progress);
            }
        }
    }

    /// Keeps every tag in flight.
    fn send(&mut self) {
        while let Some(tag) = self.idle.pop() {
            let Some(page) = self.choose() else {
                self.idle.push(tag);
                return;
            };
            let is_read = self.load.reads >= 100
                || (self.load.reads > 0 && self.draw() % 100 < u64::from(self.load.reads));
            if !is_read {
                self.stamp(tag, page);
            }
            let buffer = u64::from(tag) * u64::from(self.load.size);
            let Some(memory) = self.memory.at(buffer, self.load.size as usize) else {
                return;
            };
            if let Some(open) = self.open.get_mut(usize::from(tag)) {
                *open = Some(Open {
                    is_read,
                    page,
                    sent: Instant::now(),
                });
            }
            let request = Request {
                tag,
                op: if is_read { Op::Read } else { Op::Write },
                swap: false,
                offset: page * PAGE,
                len: u64::from(self.load.size),
                memory,
            };
            // SAFETY: the buffer is this tag's alone, which is idle, and the thread touches it again only
            // when the request was handed out.
            unsafe { self.engine.submit(request) };
        }
    }

    /// The first page of a block that no request in flight touches; `None` when all were touched once.
    fn choose(&mut self) -> Option<u64> {
        loop {
            let block = if self.load.sequential {
                if self.load.time.is_none() && self.next >= self.blocks {
                    return None;
                }
                self.next += 1;
                (self.next - 1) % self.blocks
            } else {
                self.draw() % self.blocks
            };
            let page = self.first + block * self.load.pages();
            let mut open = self.open.iter().flatten();
            if !open.any(|open| open.page == page) {
                return Some(page);
            }
        }
    }

    fn draw(&mut self) -> u64 {
        // xorshift64: which blocks is of no matter, that they differ is.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn version(&self, page: u64) -> Option<&AtomicU32> {
        self.versions.get(usize::try_from(page).ok()?)
    }

    /// Makes a buffer the next version of its pages.
    fn stamp(&mut self, tag: u16, first: u64) {
        for page in 0..self.load.pages() {
            let Some(version) = self.version(first + page) else {
                continue;
            };
            // This thread alone writes to its part.
            let next = version.load(Ordering::Relaxed) + 1;
            version.store(next, Ordering::Relaxed);
            if let [number, version, from, .., sum] = self.page(tag, page) {
                *number = first + page;
                // A read has left another page here: the pattern of that one is as good.
                *version = u64::from(next);
                if *from == 0 {
                    *from = seed(tag, page);
                }
                *sum = mix(first + page, u64::from(next), *from);
            }
        }
    }

    fn end(&mut self, done: &Finished, now: Instant) {
        let Some(open) = self
            .open
            .get_mut(usize::from(done.tag))
            .and_then(Option::take)
        else {
            return;
        };
        self.idle.push(done.tag);
        self.tally.requests += 1;
        if done.result != i32::try_from(self.load.size).unwrap_or(i32::MAX) {
            self.tally.errors += 1;
            return;
        }
        let time = u64::try_from(now.duration_since(open.sent).as_nanos()).unwrap_or(u64::MAX);
        let histogram = if open.is_read {
            &mut self.tally.read
        } else {
            &mut self.tally.write
        };
        histogram.saturating_record(time);
        if !open.is_read {
            return;
        }
        for page in 0..self.load.pages() {
            let number = open.page + page;
            let version = self
                .version(number)
                .map_or(0, |v| v.load(Ordering::Relaxed));
            let words = self.page(done.tag, page);
            let is_right = match words {
                _ if version == 0 => words.iter().all(|word| *word == 0),
                [at, stamped, from, .., sum] => {
                    let (at, stamped, from, sum) = (*at, *stamped, *from, *sum);
                    at == number
                        && stamped == u64::from(version)
                        && sum == mix(number, stamped, from)
                        && (!self.whole_check || is_pattern(words, from))
                }
                _ => false,
            };
            self.tally.wrong += u64::from(!is_right);
            if !is_right || version == 0 {
                // Such a page is no pattern to write again.
                let fresh = seed(done.tag, page);
                for (word, n) in self.page(done.tag, page).iter_mut().zip(0..) {
                    *word = pattern(fresh, n);
                }
            }
        }
    }

    /// Waits for the engine's descriptor, as a queue thread does.
    fn sleep(&self) -> Result<()> {
        use std::os::fd::BorrowedFd;
        let Some(fd) = self.engine.completion_fd() else {
            return Ok(());
        };
        // SAFETY: the descriptor belongs to the engine, which lives longer than this call.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        let mut fds = [PollFd::new(borrowed, PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(NAP_MS)) {
            Ok(0) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Ok(_) => {
                let mut count = [0u8; 8];
                // Somebody else may have read it: then there is nothing to read.
                let _ = nix::unistd::read(borrowed, &mut count);
                Ok(())
            }
            Err(errno) => Err(Error::os("poll", errno)),
        }
    }
}

/// What the words of a page between its stamps are made from.
fn seed(tag: u16, page: u64) -> u64 {
    u64::from(tag) << 32 | (page + 1)
}

/// Word `n` of a page (a multiplicative hash: cheap, and no two words of a page are alike).
fn pattern(seed: u64, n: u64) -> u64 {
    if n == 2 {
        return seed;
    }
    (seed << 10 | n).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn mix(number: u64, version: u64, seed: u64) -> u64 {
    number
        .wrapping_mul(0xbf58_476d_1ce4_e5b9)
        .wrapping_add(version.wrapping_mul(0x94d0_49bb_1331_11eb))
        ^ seed
}

fn is_pattern(words: &[u64], seed: u64) -> bool {
    let body = words.iter().zip(0..).take(WORDS - 1).skip(STAMPS);
    body.into_iter().all(|(word, n)| *word == pattern(seed, n))
}
