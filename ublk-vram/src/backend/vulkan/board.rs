//! What the queues do with the paths, for control to look at while they run.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crossbeam_utils::CachePadded;

use crate::backend::Direction;
use crate::copy::planner::{Costs, Group, Path, Paths, Planner};
use crate::device::{PathChoice, PathCost, PathsInfo};

/// The counters of one queue, written by its thread alone.
#[derive(Default)]
pub(super) struct Row {
    paths: CachePadded<[[Counters; 3]; 2]>,
    gather_late: AtomicBool,
}

#[derive(Default)]
struct Counters {
    copies: AtomicU64,
    bytes: AtomicU64,
    /// Thousandths.
    slowdown: AtomicU64,
}

const DIRECTIONS: [Direction; 2] = [Direction::Read, Direction::Write];
/// Sizes and numbers of copies that `show` tells the choice for.
const SHOWN: [(u64, u32); 6] = [
    (4 << 10, 1),
    (4 << 10, 8),
    (4 << 10, 32),
    (64 << 10, 1),
    (1 << 20, 1),
    (1 << 20, 16),
];

fn add(counter: &AtomicU64, n: u64) {
    let sum = counter.load(Ordering::Relaxed).wrapping_add(n);
    counter.store(sum, Ordering::Relaxed);
}

impl Row {
    fn of(&self, path: Path, direction: Direction) -> Option<&Counters> {
        let [read, write] = &*self.paths;
        let row = match direction {
            Direction::Read => read,
            Direction::Write | Direction::Zero => write,
        };
        let at = Path::ALL.iter().position(|each| *each == path)?;
        row.get(at)
    }

    pub(super) fn count(&self, path: Path, direction: Direction, copies: u32, bytes: u64) {
        if let Some(counters) = self.of(path, direction) {
            add(&counters.copies, u64::from(copies));
            add(&counters.bytes, bytes);
        }
    }

    /// Shows what the planner believes now.
    pub(super) fn update(&self, planner: &Planner, now: f64) {
        for direction in DIRECTIONS {
            for path in Path::ALL {
                if let Some(counters) = self.of(path, direction) {
                    let slowdown = planner.slowdown(path, direction, now) * 1000.0;
                    counters.slowdown.store(slowdown as u64, Ordering::Relaxed);
                }
            }
        }
        self.gather_late
            .store(planner.gather_is_late(), Ordering::Relaxed);
    }
}

/// The rows of all queues.
#[derive(Default)]
pub(super) struct Board {
    rows: Mutex<Vec<Arc<Row>>>,
}

impl Board {
    /// A row for one more queue; one of control's own is not shown.
    pub(super) fn row(&self, is_shown: bool) -> Arc<Row> {
        let row = Arc::new(Row::default());
        if is_shown {
            let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
            rows.push(Arc::clone(&row));
        }
        row
    }

    /// What `show` prints. `able` is what carries copies of the first chunk.
    pub(super) fn info(&self, costs: &Costs, able: Paths) -> PathsInfo {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let word = |direction| match direction {
            Direction::Read => "read".to_owned(),
            _ => "write".to_owned(),
        };
        let total = |path, direction, of: fn(&Counters) -> &AtomicU64| -> Vec<u64> {
            let counters = rows.iter().filter_map(|row| row.of(path, direction));
            counters
                .map(|row| of(row).load(Ordering::Relaxed))
                .collect()
        };
        let is_late = rows
            .iter()
            .any(|row| row.gather_late.load(Ordering::Relaxed));
        let mut info = PathsInfo::default();
        for direction in DIRECTIONS {
            for path in Path::ALL {
                let Some(cost) = costs.of(path, direction) else {
                    continue;
                };
                let slowdowns = total(path, direction, |row| &row.slowdown);
                let slowest = slowdowns.into_iter().max().unwrap_or(0).max(1);
                info.costs.push(PathCost {
                    direction: word(direction),
                    path: path.name(direction).to_owned(),
                    start: cost.start,
                    copy: cost.copy,
                    byte: cost.byte,
                    copies: total(path, direction, |row| &row.copies).iter().sum(),
                    bytes: total(path, direction, |row| &row.bytes).iter().sum(),
                    slowdown: slowest as f64 / 1000.0,
                    avoided: if !able.has(path) {
                        Some("ruled out by --copy-path".to_owned())
                    } else {
                        (path == Path::Gather && is_late)
                            .then(|| "others compute on the GPU".to_owned())
                    },
                });
            }
            let mut planner = Planner::new(*costs, 0.0);
            for (size, copies) in SHOWN {
                let group = Group {
                    direction,
                    copies,
                    bytes: size * u64::from(copies),
                    able,
                };
                let Some(path) = planner.choose(&group, 0.0) else {
                    continue;
                };
                let expected = planner.expect(path, direction, copies, group.bytes, 0.0);
                info.choices.push(PathChoice {
                    direction: word(direction),
                    size,
                    copies,
                    path: path.name(direction).to_owned(),
                    expected: expected.unwrap_or(0.0),
                });
            }
        }
        info
    }
}
