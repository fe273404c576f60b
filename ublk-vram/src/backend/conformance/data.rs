//! What the chunks promise: the bytes that were written, where they were written, and nowhere else.

use std::sync::atomic::{Ordering, fence};

use super::checks::{COPIES, MIB, PAGE, first_chunk_with, visited};
use super::harness::{Job, Verdict, Watched, ensure, fail, pattern, skip};
use crate::backend::{Backend, Direction};
use crate::store::{HEADER_BYTES, Layout};

pub(super) fn chunks_match_the_layout(backend: &dyn Backend, layout: &Layout) -> Verdict {
    let chunks = backend.chunks();
    ensure(chunks.len() == layout.chunks() as usize, || {
        format!(
            "{} chunks, and the layout has {}",
            chunks.len(),
            layout.chunks()
        )
    })?;
    for (chunk, index) in chunks.iter().zip(0..) {
        let wanted = layout.chunk_bytes(index);
        let mapped = chunk.mapping().map(|mapping| mapping.len() as u64);
        ensure(
            chunk.size == wanted && mapped.is_none_or(|mapped| mapped == wanted),
            || {
                format!(
                    "chunk {index} has {} of {wanted} bytes, {mapped:?} mapped",
                    chunk.size
                )
            },
        )?;
        let aligned = chunk
            .mapping()
            .and_then(|mapping| mapping.at(0, 1))
            .is_none_or(|base| base.addr() % PAGE as usize == 0);
        ensure(aligned, || {
            format!("chunk {index} is not mapped at a multiple of {PAGE}")
        })?;
    }
    Ok(())
}

/// Offsets and lengths worth trying in a chunk that carries `payload` bytes.
fn places(payload: u64) -> Vec<(u64, u32)> {
    let page = u64::from(PAGE);
    let mut places = Vec::new();
    for len in [
        PAGE,
        2 * PAGE,
        3 * PAGE,
        17 * PAGE,
        64 << 10,
        256 << 10,
        MIB - PAGE,
        MIB,
    ] {
        let Some(last) = payload.checked_sub(u64::from(len)) else {
            continue;
        };
        for offset in [
            0,
            page,
            7 * page,
            (payload / 2) & !(page - 1),
            last.saturating_sub(page),
            last,
        ] {
            if offset <= last {
                places.push((offset, len));
            }
        }
    }
    places.sort_unstable();
    places.dedup();
    places
}

pub(super) fn written_is_read(backend: &dyn Backend, layout: &Layout) -> Verdict {
    let half = MIB as usize;
    let mut queue = Watched::open(backend, 0, COPIES, 2 * half)?;
    let mut seed = 1;
    for chunk in visited(layout) {
        for (offset, len) in places(layout.payload_of(chunk)) {
            seed += 1;
            queue.arena()?.fill(0, len as usize, seed)?;
            // What a read leaves out must not look right.
            queue.arena()?.fill(half, len as usize, 0)?;
            queue.one(Direction::Write, (chunk, offset), len, 0)?;
            queue.one(Direction::Read, (chunk, offset), len, half)?;
            queue
                .arena()?
                .check(half, len as usize, Some(seed), 0)
                .map_err(|stop| stop.within(format!("{len} bytes at {offset} of chunk {chunk}")))?;
            queue
                .arena()?
                .check(0, len as usize, Some(seed), 0)
                .map_err(|stop| stop.within("the source of a write was changed".to_owned()))?;
        }
    }
    Ok(())
}

/// Writes `direction` into the middle of three stretches and looks at all of them.
fn middle(backend: &dyn Backend, layout: &Layout, direction: Direction) -> Verdict {
    let whole = 3 * 16 * PAGE as usize;
    first_chunk_with(layout, whole as u64)?;
    let mut queue = Watched::open(backend, 0, COPIES, 3 * whole)?;
    let span = layout.payload_of(0) - whole as u64;
    for base in [0, u64::from(PAGE).min(span), span] {
        for (from, len) in [(16, 16), (1, 1), (15, 3), (46, 1), (9, 31)] {
            let (from, len) = (from * PAGE as usize, len * PAGE as usize);
            queue.arena()?.fill(0, whole, 3)?;
            queue.arena()?.fill(whole, len, 4)?;
            queue.arena()?.fill(2 * whole, whole, 0)?;
            queue.one(Direction::Write, (0, base), whole as u32, 0)?;
            queue.one(direction, (0, base + from as u64), len as u32, whole)?;
            queue.one(Direction::Read, (0, base), whole as u32, 2 * whole)?;
            let arena = queue.arena()?;
            let (end, out) = (from + len, 2 * whole);
            arena
                .check(out, from, Some(3), 0)
                .map_err(|stop| stop.within("before".to_owned()))?;
            let seed = (direction == Direction::Write).then_some(4);
            arena
                .check(out + from, len, seed, 0)
                .map_err(|stop| stop.within("inside".to_owned()))?;
            arena
                .check(out + end, whole - end, Some(3), end)
                .map_err(|stop| stop.within("after".to_owned()))?;
        }
    }
    Ok(())
}

pub(super) fn neighbours_are_left_alone(backend: &dyn Backend, layout: &Layout) -> Verdict {
    middle(backend, layout, Direction::Write)
}

pub(super) fn zeroes_are_written(backend: &dyn Backend, layout: &Layout) -> Verdict {
    middle(backend, layout, Direction::Zero)
}

pub(super) fn the_last_write_stays(backend: &dyn Backend, layout: &Layout) -> Verdict {
    let len = 8 * PAGE;
    first_chunk_with(layout, u64::from(len))?;
    let (first, second, out) = (0, len as usize, 2 * len as usize);
    let mut queue = Watched::open(backend, 0, COPIES, 3 * len as usize)?;
    for round in 0..100 {
        let place = (0, (round % 3) * u64::from(PAGE));
        let place = if layout.payload_of(0) < place.1 + u64::from(len) {
            (0, 0)
        } else {
            place
        };
        queue.arena()?.fill(first, len as usize, 1000 + round)?;
        queue.arena()?.fill(second, len as usize, 2000 + round)?;
        queue.one(Direction::Write, place, len, first)?;
        queue.one(Direction::Write, place, len, second)?;
        queue.one(Direction::Read, place, len, out)?;
        queue
            .arena()?
            .check(out, len as usize, Some(2000 + round), 0)
            .map_err(|stop| stop.within(format!("round {round}")))?;
    }
    Ok(())
}

pub(super) fn mixed_batches(backend: &dyn Backend, layout: &Layout) -> Verdict {
    let half = (COPIES / 2) as u64;
    let page = u64::from(PAGE);
    first_chunk_with(layout, 2 * half * page)?;
    let mut queue = Watched::open(backend, 0, COPIES, 2 * COPIES * PAGE as usize)?;
    let all = half as u32 * PAGE;
    queue.arena()?.fill(0, all as usize, 5)?;
    queue.arena()?.fill(all as usize, all as usize, 6)?;
    queue.one(Direction::Write, (0, 0), all, 0)?;
    // Reads of the lower half among writes to the upper half, then the upper half in one read.
    let jobs: Vec<Job> = (0..half)
        .flat_map(|n| {
            let (at, len) = ((n * page) as usize, PAGE);
            let out = 2 * all as usize + at;
            let from = all as usize + at;
            [
                Job {
                    direction: Direction::Read,
                    chunk: 0,
                    offset: n * page,
                    len,
                    at: out,
                },
                Job {
                    direction: Direction::Write,
                    chunk: 0,
                    offset: (half + n) * page,
                    len,
                    at: from,
                },
            ]
        })
        .collect();
    queue.run(&jobs)?;
    queue
        .arena()?
        .check(2 * all as usize, all as usize, Some(5), 0)?;
    queue.one(Direction::Read, (0, half * page), all, 3 * all as usize)?;
    queue
        .arena()?
        .check(3 * all as usize, all as usize, Some(6), 0)
}

pub(super) fn outside_fails(backend: &dyn Backend, layout: &Layout) -> Verdict {
    let mut queue = Watched::open(backend, 0, COPIES, 2 * MIB as usize)?;
    for chunk in visited(layout) {
        let size = layout.chunk_bytes(chunk);
        let page = u64::from(PAGE);
        queue.arena()?.fill(0, MIB as usize, 7)?;
        let places = [
            (size, PAGE),
            (size - page, 2 * PAGE),
            (size - page / 2, PAGE),
            (size + (1 << 40), PAGE),
            (u64::MAX - page + 1, PAGE),
            (u64::MAX, MIB),
        ];
        for (offset, len) in places {
            for direction in [Direction::Read, Direction::Write, Direction::Zero] {
                queue.submit(Job {
                    direction,
                    chunk,
                    offset,
                    len,
                    at: 0,
                })?;
                for done in queue.wait(1)? {
                    ensure(done.result.is_err_and(|errno| errno > 0), || {
                        format!(
                            "{direction:?} of {len} at {offset} in {size}: {:?}",
                            done.result
                        )
                    })?;
                }
            }
        }
        queue.arena()?.check(0, MIB as usize, Some(7), 0)?;
    }
    Ok(())
}

pub(super) fn data_does_not_reach_the_header(backend: &dyn Backend, layout: &Layout) -> Verdict {
    let header = HEADER_BYTES as u32;
    let (saved, ours, data, out) = (0, header as usize, 2 * header as usize, 2 * MIB as usize);
    let mut queue = Watched::open(backend, 0, COPIES, 3 * MIB as usize)?;
    for chunk in visited(layout) {
        let payload = layout.payload_of(chunk);
        queue.arena()?.fill(ours, header as usize, 8)?;
        queue.one(Direction::Read, (chunk, payload), header, saved)?;
        queue.one(Direction::Write, (chunk, payload), header, ours)?;
        for len in [PAGE, 3 * PAGE, 64 << 10, MIB] {
            let Some(offset) = payload.checked_sub(u64::from(len)) else {
                continue;
            };
            queue.arena()?.fill(data, len as usize, 9)?;
            queue.one(Direction::Write, (chunk, offset), len, data)?;
            queue.one(Direction::Zero, (chunk, offset), len, data)?;
            queue.one(Direction::Read, (chunk, payload), header, out)?;
            queue
                .arena()?
                .check(out, header as usize, Some(8), 0)
                .map_err(|stop| {
                    stop.within(format!("chunk {chunk} after {len} bytes before the header"))
                })?;
        }
        queue.one(Direction::Write, (chunk, payload), header, saved)?;
    }
    Ok(())
}

pub(super) fn mapping_and_copies_agree(backend: &dyn Backend, layout: &Layout) -> Verdict {
    if backend
        .chunks()
        .iter()
        .all(|chunk| chunk.mapping().is_none())
    {
        return skip("the CPU reaches none of the memory");
    }
    let mut queue = Watched::open(backend, 0, COPIES, 2 * PAGE as usize)?;
    for (chunk, index) in backend
        .chunks()
        .iter()
        .zip(0..)
        .filter(|(chunk, n)| chunk.mapping().is_some() && visited(layout).contains(n))
    {
        let offset = layout.payload_of(index) - u64::from(PAGE);
        let Some(base) = chunk.at(offset, PAGE as usize) else {
            return fail(format!("chunk {index} is not mapped at {offset}"));
        };
        let words = u64::from(PAGE) / 8;
        queue.arena()?.fill(0, PAGE as usize, 10)?;
        queue.one(Direction::Write, (index, offset), PAGE, 0)?;
        for n in 0..words {
            // SAFETY: `at` has shown a page to be mapped at `base`, and no copy is in flight.
            let word = unsafe { base.cast::<u64>().add(n as usize).read_volatile() };
            ensure(word.to_ne_bytes() == pattern(10, n), || {
                format!(
                    "word {n} at {offset} of chunk {index} was copied and is not in the mapping"
                )
            })?;
        }
        for n in 0..words {
            let word = u64::from_ne_bytes(pattern(11, n));
            // SAFETY: as above.
            unsafe { base.cast::<u64>().add(n as usize).write_volatile(word) };
        }
        // Empties this CPU's write-combining buffers.
        fence(Ordering::SeqCst);
        queue.one(Direction::Read, (index, offset), PAGE, PAGE as usize)?;
        queue
            .arena()?
            .check(PAGE as usize, PAGE as usize, Some(11), 0)?;
    }
    Ok(())
}
