//! What is told of the copy paths: their costs, and what the planner makes of them.

use crate::backend::Direction;
use crate::copy::planner::{Costs, Group, Path, Paths, Planner};
use crate::device::{PathChoice, PathCost, PathsInfo};

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

/// Costs and choices, with nothing carried yet. `able` is what the user allows.
pub(super) fn paths(costs: &Costs, able: Paths) -> PathsInfo {
    let word = |direction| match direction {
        Direction::Read => "read".to_owned(),
        _ => "write".to_owned(),
    };
    let mut info = PathsInfo::default();
    for direction in DIRECTIONS {
        for path in Path::ALL {
            let Some(cost) = costs.of(path, direction) else {
                continue;
            };
            info.costs.push(PathCost {
                direction: word(direction),
                path: path.name(direction).to_owned(),
                start: cost.start,
                copy: cost.copy,
                byte: cost.byte,
                copies: 0,
                bytes: 0,
                slowdown: 1.0,
                avoided: (!able.has(path)).then(|| "ruled out by --copy-path".to_owned()),
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
