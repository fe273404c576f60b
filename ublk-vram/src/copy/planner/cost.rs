//! What copies cost by each path, fitted to measurements.

use serde::{Deserialize, Serialize};

use super::Path;
use super::trial::LATE;
use crate::backend::Direction;

/// One measurement: the median time of `copies` copies of `bytes` bytes in all, made together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Copies in one batch.
    pub copies: u32,
    /// Their bytes in all.
    pub bytes: u64,
    /// Nanoseconds from the first submission to the last completion.
    pub time: f64,
}

/// The time of a batch: `start` once, `copy` for each copy, `byte` for each byte; nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cost {
    /// Once a batch: submission, and seeing the end.
    pub start: f64,
    /// Each copy.
    pub copy: f64,
    /// Each byte.
    pub byte: f64,
}

impl Cost {
    /// The line through three measurements: one small copy, many copies of that size together, and
    /// one large copy. Noise may bend it, but never below zero.
    pub fn fit(small: Sample, many: Sample, large: Sample) -> Cost {
        let span = large.bytes.saturating_sub(small.bytes).max(1) as f64;
        let byte = ((large.time - small.time) / span).max(0.0);
        let extra = many.copies.saturating_sub(small.copies).max(1);
        let each = ((many.time - small.time) / f64::from(extra)).max(0.0);
        let size = small.bytes as f64 / f64::from(small.copies.max(1));
        // Small copies that overlap may move their bytes faster than one large copy does.
        let copy = (each - size * byte).max(0.0);
        let start = (small.time - copy - small.bytes as f64 * byte).max(0.0);
        Cost { start, copy, byte }
    }

    /// Nanoseconds for a batch.
    pub fn time(&self, copies: u32, bytes: u64) -> f64 {
        self.start + self.copy * f64::from(copies) + self.byte * bytes as f64
    }
}

/// The costs of every path there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Costs {
    read: [Option<Cost>; 3],
    write: [Option<Cost>; 3],
    /// Somebody else computed on the GPU when the shader was measured: its costs are a guess, and it has
    /// to prove itself first.
    pub gather_was_late: bool,
}

impl Costs {
    /// The cost of a path; `None` if it is not there. Zeroing is a write.
    pub fn of(&self, path: Path, direction: Direction) -> Option<Cost> {
        let row = match direction {
            Direction::Read => &self.read,
            Direction::Write | Direction::Zero => &self.write,
        };
        row.get(path.index()).copied().flatten()
    }

    /// Replaces the costs of a shader that was measured while somebody else computed by a guess: a little
    /// more than the copy engine takes to start, next to nothing for a page, the same for a byte. What
    /// was measured is the time slice of that somebody.
    pub fn guess_late_gather(&mut self) {
        for direction in [Direction::Read, Direction::Write] {
            let (Some(gather), Some(dma)) = (
                self.of(Path::Gather, direction),
                self.of(Path::Dma, direction),
            ) else {
                continue;
            };
            if gather.time(1, 4096) > LATE {
                self.gather_was_late = true;
                let guess = Cost {
                    start: dma.start * 1.25,
                    copy: dma.copy * 0.05,
                    byte: dma.byte,
                };
                self.set(Path::Gather, direction, Some(guess));
            }
        }
    }

    /// Sets the cost of a path.
    pub fn set(&mut self, path: Path, direction: Direction, cost: Option<Cost>) {
        let row = match direction {
            Direction::Read => &mut self.read,
            Direction::Write | Direction::Zero => &mut self.write,
        };
        if let Some(place) = row.get_mut(path.index()) {
            *place = cost;
        }
    }
}
