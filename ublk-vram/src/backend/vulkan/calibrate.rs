//! What each path costs on this machine, measured when the device is made.
//!
//! It takes a fraction of a second, on memory that nothing is in yet: what it writes are zeroes.

use std::time::{Duration, Instant};

use crate::backend::{BackendQueue, ChunkMemory, Completion, Copy, Direction, Mapping};
use crate::copy::planner::{Cost, Costs, Path, Sample};
use crate::error::{Error, ErrorKind, Result};

/// Rounds of each measurement; the median counts.
const ROUNDS: usize = 21;
/// A measurement ends early after so long, but not before it has three rounds.
const LIMIT: Duration = Duration::from_millis(25);
/// A copy that takes longer than this does not work. A driver may compile the shader within the first one,
/// on a machine with other things to do.
const HANG: Duration = Duration::from_secs(30);
const SMALL: u32 = 4 << 10;
const MANY: u32 = 32;
const LARGE: u32 = 1 << 20;
/// Bytes of I/O memory that measuring takes.
pub(super) const MEMORY_BYTES: usize = LARGE as usize;

/// Measures both directions of every path that `open` gives a queue for, on `chunk`, whose index is
/// `index`; `memory` is the queue's. What the chunk held is lost.
///
/// # Errors
/// [`ErrorKind::Io`] if a path does not work, with its name.
pub(super) fn measure(
    index: u32,
    chunk: &ChunkMemory,
    memory: &Mapping,
    mut open: impl FnMut(Path) -> Result<Option<Box<dyn BackendQueue>>>,
) -> Result<Costs> {
    let mut costs = Costs::default();
    for path in Path::ALL {
        let Some(mut queue) = open(path)? else {
            continue;
        };
        for direction in [Direction::Read, Direction::Write] {
            let mut bench = Bench {
                queue: &mut *queue,
                index,
                chunk,
                memory,
                direction,
                place: 0,
            };
            let failed = |error: Error| {
                let name = path.name(direction);
                Error::new(error.kind, format!("the copy path {name} fails: {error}"))
            };
            if direction == Direction::Write {
                bench.clear();
            }
            let small = bench.sample(1, SMALL).map_err(failed)?;
            let many = bench.sample(MANY, SMALL).map_err(failed)?;
            let large = LARGE.min(u32::try_from(chunk.size).unwrap_or(LARGE));
            let large = bench.sample(1, large).map_err(failed)?;
            costs.set(path, direction, Some(Cost::fit(small, many, large)));
        }
    }
    costs.guess_late_gather();
    Ok(costs)
}

struct Bench<'a> {
    queue: &'a mut dyn BackendQueue,
    index: u32,
    chunk: &'a ChunkMemory,
    memory: &'a Mapping,
    direction: Direction,
    place: u64,
}

impl Bench<'_> {
    /// What was read may be somebody's: it must not be written anywhere.
    fn clear(&self) {
        if let Some(at) = self.memory.at(0, self.memory.len()) {
            // SAFETY: mapped for its length, and no copy is in flight.
            unsafe { at.write_bytes(0, self.memory.len()) };
        }
    }

    fn sample(&mut self, copies: u32, len: u32) -> Result<Sample> {
        let begin = Instant::now();
        let mut times = Vec::with_capacity(ROUNDS);
        // The first one warms up.
        self.round(copies, len)?;
        while times.len() < ROUNDS && (times.len() < 3 || begin.elapsed() < LIMIT) {
            times.push(self.round(copies, len)?);
        }
        times.sort_unstable();
        let median = times.get(times.len() / 2).copied().unwrap_or_default();
        Ok(Sample {
            copies,
            bytes: u64::from(copies) * u64::from(len),
            time: median.as_nanos() as f64,
        })
    }

    /// One batch, each copy at another place of the chunk.
    fn round(&mut self, copies: u32, len: u32) -> Result<Duration> {
        let size = u64::from(len);
        let places = (self.chunk.size / size).max(1);
        let start = Instant::now();
        for id in 0..copies {
            // A step that no power of two of places divides.
            self.place = self.place.wrapping_add(7919) % places;
            let at = u64::from(id) * size % self.memory.len() as u64;
            let memory = self.memory.at(at, len as usize).ok_or_else(|| {
                Error::new(ErrorKind::Io, "the memory to measure with is too small")
            })?;
            let copy = Copy {
                id,
                direction: self.direction,
                chunk: self.index,
                offset: self.place * size,
                len,
                memory,
                device_offset: 0,
            };
            // SAFETY: `memory` is mapped for `len` bytes and nobody touches it before every copy has
            // ended; copies of a batch that share bytes of it write the same zeroes.
            unsafe { self.queue.submit(&copy, self.chunk) };
        }
        let mut done: Vec<Completion> = Vec::with_capacity(copies as usize);
        while done.len() < copies as usize {
            self.queue.poll(&mut done);
            if start.elapsed() > HANG {
                return Err(Error::new(ErrorKind::Io, "a copy does not end"));
            }
        }
        let time = start.elapsed();
        match done.iter().find(|done| done.result != Ok(len)) {
            None => Ok(time),
            Some(failed) => Err(Error::new(
                ErrorKind::Io,
                format!("a copy ended with {:?}", failed.result),
            )),
        }
    }
}
