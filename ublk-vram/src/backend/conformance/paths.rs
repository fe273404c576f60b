//! What the copy paths of one backend promise each other: a completed write by one is seen by all.

use super::checks::{PAGE, first_chunk_with};
use super::harness::{Verdict, Watched, skip};
use crate::backend::{Backend, Direction};
use crate::store::Layout;

/// Rounds for each pair of paths and size.
const ROUNDS: u64 = 300;

/// Writes by every path and at once reads by every path, at two sizes, always the same few places: the
/// bytes that a round leaves behind are wrong ones for the next.
pub(super) fn paths_see_each_other(backend: &dyn Backend, layout: &Layout) -> Verdict {
    const SIZES: [u32; 2] = [PAGE, 16 * PAGE];
    let half = SIZES[1] as usize;
    first_chunk_with(layout, 2 * half as u64)?;
    let mut paths = Watched::open_paths(backend, 1, 2 * half)?;
    if paths.len() < 2 {
        return skip("there is one way to copy");
    }
    let mut seed = 0;
    for writer in 0..paths.len() {
        for reader in 0..paths.len() {
            for len in SIZES {
                for round in 0..ROUNDS {
                    seed += 1;
                    let place = (
                        0,
                        (round % 3) * u64::from(len) / 2 / u64::from(PAGE) * u64::from(PAGE),
                    );
                    let names = (name(&paths, writer), name(&paths, reader));
                    let wrong = |why: super::harness::Stop| {
                        let (wrote, read) = names;
                        why.within(format!(
                            "{wrote} wrote {len} bytes, {read} read, round {round}"
                        ))
                    };
                    if let Some((_, queue)) = paths.get_mut(writer) {
                        queue.arena()?.fill(0, len as usize, seed)?;
                        queue.one(Direction::Write, place, len, 0).map_err(wrong)?;
                    }
                    if let Some((_, queue)) = paths.get_mut(reader) {
                        queue.arena()?.fill(half, len as usize, 0)?;
                        queue
                            .one(Direction::Read, place, len, half)
                            .and_then(|()| queue.arena()?.check(half, len as usize, Some(seed), 0))
                            .map_err(wrong)?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn name(paths: &[(&'static str, Watched<'_>)], index: usize) -> &'static str {
    paths.get(index).map_or("", |(name, _)| name)
}
