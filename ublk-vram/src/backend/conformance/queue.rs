//! What a queue promises: how many copies it takes, and when and how it tells that they are done.

use std::time::{Duration, Instant};

use super::checks::{COPIES, PAGE, first_chunk_with};
use super::harness::{Job, Verdict, Watched, ensure, fail, wake};
use crate::backend::{Backend, Completion, Direction};
use crate::store::Layout;

/// `COPIES` writes of a page each, that many different places where the chunk has them.
fn page_writes(layout: &Layout) -> impl Iterator<Item = Job> {
    let pages = layout.payload_of(0) / u64::from(PAGE);
    (0..COPIES).map(move |n| Job {
        direction: Direction::Write,
        chunk: 0,
        offset: (n as u64 % pages.max(1)) * u64::from(PAGE),
        len: PAGE,
        at: n * PAGE as usize,
    })
}

pub(super) fn a_queue_takes_all_its_copies(backend: &dyn Backend, layout: &Layout) -> Verdict {
    for copies in [1, 2, COPIES] {
        let mut queue = Watched::open(backend, 0, copies, COPIES * PAGE as usize)?;
        // More than once: what a queue gave back it can take again.
        for _ in 0..3 {
            let jobs: Vec<Job> = page_writes(layout).take(copies).collect();
            queue.run(&jobs)?;
            let extra = queue.poll(COPIES)?;
            ensure(extra.is_empty(), || {
                format!("{} completions too many", extra.len())
            })?;
        }
    }
    Ok(())
}

pub(super) fn poll_keeps_what_does_not_fit(backend: &dyn Backend, layout: &Layout) -> Verdict {
    let mut queue = Watched::open(backend, 0, COPIES, COPIES * PAGE as usize)?;
    for job in page_writes(layout) {
        queue.submit(job)?;
    }
    // No room: nothing may come, and nothing may be lost.
    ensure(queue.poll(0)?.is_empty(), || {
        "poll gave something without room".to_owned()
    })?;
    let end = Instant::now() + Duration::from_secs(30);
    let mut left = COPIES;
    while left > 0 {
        let done = queue.poll(3)?;
        left = left.saturating_sub(done.len());
        ensure(Instant::now() < end, || {
            format!("{left} of {COPIES} completions never came")
        })?;
    }
    // What the vector holds already stays, and counts against its room.
    if let Some(job) = page_writes(layout).next() {
        let id = queue.submit(job)?;
        let before = Completion {
            id: u32::MAX,
            result: Ok(7),
        };
        let mut done = Vec::with_capacity(1);
        done.push(before);
        queue.queue.poll(&mut done);
        ensure(done == [before], || "poll changed a full vector".to_owned())?;
        let last = queue.wait(1)?;
        ensure(last.iter().all(|done| done.id == id), || {
            format!("{last:?} is not copy {id}")
        })?;
    }
    Ok(())
}

pub(super) fn in_flight_is_counted(backend: &dyn Backend, layout: &Layout) -> Verdict {
    let mut queue = Watched::open(backend, 0, COPIES, COPIES * PAGE as usize)?;
    let counted = |queue: &Watched<'_>, wanted: usize, when: &str| {
        let count = queue.queue.in_flight();
        ensure(count == wanted, || {
            format!("{count} in flight {when}, not {wanted}")
        })
    };
    counted(&queue, 0, "in a new queue")?;
    for (job, n) in page_writes(layout).zip(1..) {
        queue.submit(job)?;
        counted(&queue, n, "before the first poll")?;
    }
    let end = Instant::now() + Duration::from_secs(30);
    let mut left = COPIES;
    while left > 0 {
        left = left.saturating_sub(queue.poll(5)?.len());
        counted(&queue, left, "after a poll")?;
        ensure(Instant::now() < end, || {
            format!("{left} of {COPIES} completions never came")
        })?;
    }
    Ok(())
}

pub(super) fn a_sleeper_is_woken(backend: &dyn Backend, layout: &Layout) -> Verdict {
    let mut queue = Watched::open(backend, 0, COPIES, COPIES * PAGE as usize)?;
    let Some(fd) = queue.queue.completion_fd() else {
        // Then nothing is late: every copy is done when the queue no longer asks to be polled.
        for job in page_writes(layout) {
            queue.submit(job)?;
        }
        let mut done = queue.poll(COPIES)?.len();
        while queue.queue.should_poll() {
            done += queue.poll(COPIES)?.len();
        }
        return ensure(done == COPIES, || {
            format!(
                "{} copies are late, and there is no descriptor to sleep on",
                COPIES - done
            )
        });
    };
    for job in page_writes(layout) {
        queue.submit(job)?;
    }
    let end = Instant::now() + Duration::from_secs(30);
    let mut left = COPIES;
    loop {
        // As a queue thread does it: poll first, sleep if nothing came.
        let done = queue.poll(COPIES)?.len();
        left = left.saturating_sub(done);
        if left == 0 {
            return Ok(());
        }
        if done == 0 && !queue.queue.should_poll() {
            while !wake(fd)? {
                ensure(Instant::now() < end, || {
                    format!("not woken for {left} completions")
                })?;
            }
        }
    }
}

/// Two threads, each with a queue, write and read every other page of one stretch; then each reads
/// what the other one wrote.
pub(super) fn two_queues(backend: &dyn Backend, layout: &Layout) -> Verdict {
    const ROUNDS: u64 = 200;
    let own = COPIES as u64;
    let page = u64::from(PAGE);
    first_chunk_with(layout, 2 * own * page)?;
    let bytes = 2 * COPIES * PAGE as usize;
    let jobs = |queue: u64, direction: Direction, at: usize| -> Vec<Job> {
        (0..own)
            .map(|n| Job {
                direction,
                chunk: 0,
                offset: (2 * n + queue) * page,
                len: PAGE,
                at: at + (n * page) as usize,
            })
            .collect()
    };
    let half = bytes / 2;
    let thread = |number: u16| -> Verdict<Watched<'_>> {
        let mut queue = Watched::open(backend, number, COPIES, bytes)?;
        for round in 0..ROUNDS {
            let seed = 10_000 * (u64::from(number) + 1) + round;
            queue.arena()?.fill(0, half, seed)?;
            queue.arena()?.fill(half, half, 0)?;
            queue.run(&jobs(u64::from(number), Direction::Write, 0))?;
            queue.run(&jobs(u64::from(number), Direction::Read, half))?;
            queue
                .arena()?
                .check(half, half, Some(seed), 0)
                .map_err(|stop| stop.within(format!("queue {number}, round {round}")))?;
        }
        Ok(queue)
    };
    let (mut first, mut second) = std::thread::scope(|scope| {
        let second = scope.spawn(|| thread(1));
        let first = thread(0);
        let second = second
            .join()
            .unwrap_or_else(|_| fail("the thread of queue 1 panicked"));
        Ok((first?, second?))
    })?;
    for (queue, other) in [(&mut first, 1), (&mut second, 0)] {
        queue.run(&jobs(other, Direction::Read, half))?;
        queue
            .arena()?
            .check(half, half, Some(10_000 * (other + 1) + ROUNDS - 1), 0)
            .map_err(|stop| {
                stop.within(format!("what queue {other} wrote, seen by the other one"))
            })?;
    }
    Ok(())
}
