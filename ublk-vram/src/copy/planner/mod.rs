//! Which way the copies of a batch go: by the CPU through the BAR, by a copy engine, or by a compute
//! shader.
//!
//! Which is fastest is a matter of the machine and of the moment, so nothing here is a rule of thumb:
//! a [`Planner`] compares what was measured when the device started ([`Costs`]), corrected by what
//! the copies of late have really taken. It is plain arithmetic on measurements that it is handed,
//! time included; the same measurements give the same choices.
//!
//! A shader is different from the rest: while somebody else computes on the GPU, it waits for that
//! one's whole time slice (2 ms on an H200, a hundred times its own cost). So it has to prove itself
//! ([`Trial`]): it is taken only while it was seen to be in time a moment ago, dropped the first time
//! it is not, and tried again by copies that nobody waits for.

mod cost;
#[cfg(test)]
mod tests;
mod trial;

pub use cost::{Cost, Costs, Sample};
pub use trial::Trial;

use crate::backend::Direction;

/// How bytes move between a chunk and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Path {
    /// The CPU copies through its mapping: streaming stores to write, streaming loads to read.
    Bar,
    /// A copy engine of the GPU.
    Dma,
    /// A compute shader that moves many pieces in one dispatch.
    Gather,
}

impl Path {
    /// Every path, the one that is preferred among equals first.
    pub const ALL: [Path; 3] = [Path::Bar, Path::Dma, Path::Gather];

    /// Its word in `show`.
    pub fn name(self, direction: Direction) -> &'static str {
        match (self, direction) {
            (Path::Bar, Direction::Read) => "bar-load",
            (Path::Bar, _) => "bar-store",
            (Path::Dma, _) => "dma",
            (Path::Gather, _) => "gather",
        }
    }

    const fn index(self) -> usize {
        match self {
            Path::Bar => 0,
            Path::Dma => 1,
            Path::Gather => 2,
        }
    }
}

/// Copies of one batch that are alike enough to go the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Which way the bytes go; zeroing counts as a write.
    pub direction: Direction,
    /// How many copies.
    pub copies: u32,
    /// Their bytes in all.
    pub bytes: u64,
    /// Which paths can carry them at all.
    pub able: Paths,
}

/// A set of paths.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Paths(u8);

impl Paths {
    /// Every path.
    pub const ALL: Paths = Paths(0b111);

    /// The set of one.
    pub const fn only(path: Path) -> Paths {
        Paths(1 << path.index())
    }

    /// The set with `path` in it.
    #[must_use]
    pub const fn with(self, path: Path) -> Paths {
        Paths(self.0 | 1 << path.index())
    }

    /// The set with `path` not in it.
    #[must_use]
    pub const fn without(self, path: Path) -> Paths {
        Paths(self.0 & !(1 << path.index()))
    }

    /// The paths in both.
    #[must_use]
    pub const fn and(self, other: Paths) -> Paths {
        Paths(self.0 & other.0)
    }

    /// Whether `path` is in it.
    pub const fn has(self, path: Path) -> bool {
        self.0 & 1 << path.index() != 0
    }
}

/// How long something took, as its watcher knows it: it was not over `after` nanoseconds from its
/// start, and it was `by`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Seen {
    /// When it was last seen unfinished.
    pub after: f64,
    /// When it was first seen finished.
    pub by: f64,
}

impl Seen {
    /// A time that is known exactly.
    pub const fn exactly(nanoseconds: f64) -> Seen {
        Seen {
            after: nanoseconds,
            by: nanoseconds,
        }
    }

    /// The time within what is known that is nearest to `expected`: a late look at something that was
    /// in time is no evidence that it was late.
    pub fn nearest(self, expected: f64) -> f64 {
        expected.max(self.after).min(self.by.max(self.after))
    }
}

/// How fast what was measured wins over what was expected.
const WEIGHT: f64 = 1.0 / 16.0;
/// One copy counts as at most so many times slower or faster than those before it: an interruption is
/// no trend.
const MOST_STEP: f64 = 2.0;
/// A path that is not taken is not measured: after so many nanoseconds half of its bad record is
/// forgotten, so that it is tried again.
const HALF_LIFE: f64 = 100e6;
/// The shader takes compute units from others: it must be clearly better.
const GATHER_MARGIN: f64 = 1.25;
/// A copy is never believed to be more than this many times slower or faster than at the start.
const MOST_DRIFT: f64 = 64.0;
const LEAST_DRIFT: f64 = 0.2;

/// How the times of a path of late compare with its [`Cost`].
#[derive(Debug, Clone, Copy, PartialEq)]
struct Drift {
    factor: f64,
    /// Nanoseconds, as all times here, on the clock of the caller.
    at: f64,
}

impl Drift {
    fn now(&self, now: f64) -> f64 {
        let age = (now - self.at).max(0.0);
        1.0 + (self.factor - 1.0) * (-age / HALF_LIFE).exp2()
    }
}

/// Chooses the paths of one queue thread's copies.
#[derive(Debug, Clone)]
pub struct Planner {
    costs: Costs,
    drift: [[Drift; 3]; 2],
    gather: Trial,
}

impl Planner {
    /// A planner that starts from `costs`, which were measured at `now` or before.
    pub fn new(costs: Costs, now: f64) -> Planner {
        let fresh = Drift {
            factor: 1.0,
            at: now,
        };
        Planner {
            costs,
            drift: [[fresh; 3]; 2],
            gather: Trial::new(costs.gather_was_late, now),
        }
    }

    /// The measurements it started from.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// The path for a group: of those that can carry it and have a cost, the one that is expected to
    /// end first. `None` if none can.
    ///
    /// Work that is in flight does not count. To wait for one's own earlier copies costs nothing:
    /// the engine moves bytes meanwhile, and what others do shows in how late copies end.
    pub fn choose(&mut self, group: &Group, now: f64) -> Option<Path> {
        let best = self.fastest(group, now)?;
        if best != Path::Gather || self.gather.may_carry(now) {
            return Some(best);
        }
        self.gather.want();
        let others = Group {
            able: group.able.without(Path::Gather),
            ..*group
        };
        // Memory that nothing else reaches must still be copied.
        self.fastest(&others, now).or(Some(Path::Gather))
    }

    fn fastest(&self, group: &Group, now: f64) -> Option<Path> {
        let mut best: Option<(Path, f64)> = None;
        for path in Path::ALL {
            if !group.able.has(path) {
                continue;
            }
            let Some(time) = self.expect(path, group.direction, group.copies, group.bytes, now)
            else {
                continue;
            };
            let time = if path == Path::Gather {
                time * GATHER_MARGIN
            } else {
                time
            };
            // The first of equals stays.
            if best.is_none_or(|(_, least)| time < least) {
                best = Some((path, time));
            }
        }
        best.map(|(path, _)| path)
    }

    /// Nanoseconds that `copies` copies of `bytes` bytes in all should take by `path` now; `None` if it
    /// has no cost.
    pub fn expect(
        &self,
        path: Path,
        direction: Direction,
        copies: u32,
        bytes: u64,
        now: f64,
    ) -> Option<f64> {
        let cost = self.costs.of(path, direction)?;
        let drift = self.drift(path, direction).now(now);
        Some(cost.time(copies, bytes) * drift)
    }

    /// Takes note of how long copies took by `path`. `plain` is what their cost says of them, together
    /// with what was in flight before them on the same engine ([`Costs::of`], [`Cost::time`]).
    pub fn observe(&mut self, path: Path, direction: Direction, plain: f64, seen: Seen, now: f64) {
        if plain <= 0.0 {
            return;
        }
        if path == Path::Gather && !self.gather.carried(plain, seen, now) {
            // That it was late says nothing of how fast it is when it is in time.
            return;
        }
        let expected = plain * self.drift(path, direction).now(now);
        let before = self.drift(path, direction).now(now);
        let factor = (seen.nearest(expected) / plain)
            .clamp(before / MOST_STEP, before * MOST_STEP)
            .clamp(LEAST_DRIFT, MOST_DRIFT);
        let [read, write] = &mut self.drift;
        let row = if direction == Direction::Read {
            read
        } else {
            write
        };
        if let Some(drift) = row.get_mut(path.index()) {
            *drift = Drift {
                factor: before + (factor - before) * WEIGHT,
                at: now,
            };
        }
    }

    /// Whether to send a copy that nobody waits for through the shader now, to see whether it is in
    /// time again.
    pub fn probe_due(&self, now: f64) -> bool {
        self.costs.of(Path::Gather, Direction::Read).is_some() && self.gather.probe_due(now)
    }

    /// Takes note that a probe was sent.
    pub fn probe_sent(&mut self) {
        self.gather.probe_sent();
    }

    /// Takes note of how a probe of one page ended.
    pub fn probed(&mut self, seen: Seen, now: f64) {
        if let Some(cost) = self.costs.of(Path::Gather, Direction::Read) {
            self.gather.probed(cost.time(1, 4096), seen, now);
        }
    }

    /// Takes note that a probe could not be made, or failed.
    pub fn probe_failed(&mut self, now: f64) {
        self.gather.probe_failed(now);
    }

    /// How much slower than at the start `path` is believed to be.
    pub fn slowdown(&self, path: Path, direction: Direction, now: f64) -> f64 {
        self.drift(path, direction).now(now)
    }

    /// Whether the shader carries copies now.
    pub fn gather_in_time(&self, now: f64) -> bool {
        self.gather.may_carry(now)
    }

    /// Whether the shader was late, and has not proved itself since.
    pub fn gather_is_late(&self) -> bool {
        self.gather.is_late()
    }

    fn drift(&self, path: Path, direction: Direction) -> Drift {
        let [read, write] = &self.drift;
        let row = if direction == Direction::Read {
            read
        } else {
            write
        };
        row.get(path.index()).copied().unwrap_or(Drift {
            factor: 1.0,
            at: 0.0,
        })
    }
}
