//! The planner on measurements: those of an H200 (docs/performance.md), and changes to them.

use proptest::prelude::*;

use super::*;
use Direction::{Read, Write};

const KIB: u64 = 1 << 10;
const MS: f64 = 1e6;

fn cost(start: f64, copy: f64, byte: f64) -> Option<Cost> {
    Some(Cost { start, copy, byte })
}

/// Near what an H200 gives.
fn h200() -> Costs {
    let mut costs = Costs::default();
    costs.set(Path::Bar, Write, cost(40.0, 10.0, 0.054));
    costs.set(Path::Bar, Read, cost(100.0, 500.0, 1.0));
    costs.set(Path::Dma, Read, cost(10_000.0, 1_500.0, 0.019));
    costs.set(Path::Dma, Write, cost(10_000.0, 1_500.0, 0.019));
    costs.set(Path::Gather, Read, cost(15_000.0, 40.0, 0.02));
    costs.set(Path::Gather, Write, cost(15_000.0, 40.0, 0.02));
    costs
}

fn group(direction: Direction, copies: u32, size: u64) -> Group {
    Group {
        direction,
        copies,
        bytes: u64::from(copies) * size,
        able: Paths::ALL,
    }
}

fn choose(planner: &mut Planner, direction: Direction, copies: u32, size: u64, now: f64) -> Path {
    planner
        .choose(&group(direction, copies, size), now)
        .unwrap()
}

#[test]
fn each_path_has_its_place() {
    let mut planner = Planner::new(h200(), 0.0);
    for (direction, copies, size, path) in [
        (Write, 1, 4 * KIB, Path::Bar),
        (Write, 32, 4 * KIB, Path::Bar),
        (Write, 1, 64 * KIB, Path::Bar),
        (Write, 16, 1024 * KIB, Path::Dma),
        (Read, 1, 4 * KIB, Path::Bar),
        (Read, 2, 4 * KIB, Path::Bar),
        (Read, 1, 64 * KIB, Path::Dma),
        (Read, 1, 1024 * KIB, Path::Dma),
        (Read, 32, 4 * KIB, Path::Gather),
        (Read, 256, 4 * KIB, Path::Gather),
    ] {
        assert_eq!(
            choose(&mut planner, direction, copies, size, 1.0),
            path,
            "{direction:?} {copies} x {size}"
        );
    }
}

#[test]
fn only_what_is_able_and_has_a_cost_is_taken() {
    let mut planner = Planner::new(h200(), 0.0);
    let mut one = group(Read, 1, 4 * KIB);
    one.able = Paths::only(Path::Dma).with(Path::Gather);
    assert_eq!(planner.choose(&one, 0.0), Some(Path::Dma));
    one.able = Paths::only(Path::Gather);
    assert_eq!(planner.choose(&one, 0.0), Some(Path::Gather));
    one.able = Paths::default();
    assert_eq!(planner.choose(&one, 0.0), None);
    let mut costs = h200();
    costs.set(Path::Gather, Read, None);
    let mut planner = Planner::new(costs, 0.0);
    assert_ne!(choose(&mut planner, Read, 256, 4 * KIB, 0.0), Path::Gather);
    one.able = Paths::only(Path::Gather);
    assert_eq!(planner.choose(&one, 0.0), None);
}

#[test]
fn a_late_shader_is_dropped_at_once_and_proves_itself_by_probes() {
    let mut planner = Planner::new(h200(), 0.0);
    let gather = h200().of(Path::Gather, Read).unwrap();
    let mut now = 1.0 * MS;
    assert_eq!(choose(&mut planner, Read, 64, 4 * KIB, now), Path::Gather);
    let plain = gather.time(64, 256 * KIB);
    now += 2.1 * MS;
    planner.observe(Path::Gather, Read, plain, Seen::exactly(2.1 * MS), now);
    // One late batch is enough.
    assert_eq!(choose(&mut planner, Read, 64, 4 * KIB, now), Path::Dma);
    assert!(!planner.probe_due(now), "it has just been late");
    now += 60.0 * MS;
    assert!(planner.probe_due(now));
    planner.probe_sent();
    assert!(!planner.probe_due(now), "one probe at a time");
    now += 2.0 * MS;
    planner.probed(Seen::exactly(2.0 * MS), now);
    // Late again: the pause has doubled.
    assert!(!planner.probe_due(now + 60.0 * MS));
    now += 101.0 * MS;
    for proof in 1..=3 {
        assert!(planner.probe_due(now), "proof {proof}");
        planner.probe_sent();
        now += 0.02 * MS;
        planner.probed(Seen::exactly(20e3), now);
        assert_eq!(planner.gather_in_time(now), proof == 3);
    }
    // The slowdown that was seen is forgotten with time.
    now += 3000.0 * MS;
    assert!(planner.slowdown(Path::Gather, Read, now) < 1.2);
}

#[test]
fn a_shader_that_is_late_again_and_again_returns_ever_more_rarely() {
    let mut planner = Planner::new(h200(), 0.0);
    let plain = h200().of(Path::Gather, Read).unwrap().time(64, 256 * KIB);
    let mut now = 0.0;
    let mut pauses = Vec::new();
    for _ in 0..9 {
        now += 2.0 * MS;
        planner.observe(Path::Gather, Read, plain, Seen::exactly(2.0 * MS), now);
        let late_at = now;
        while planner.choose(&group(Read, 64, 4 * KIB), now) != Some(Path::Gather) {
            now += 1.0 * MS;
            if planner.probe_due(now) {
                planner.probe_sent();
                planner.probed(Seen::exactly(20e3), now);
            }
        }
        pauses.push(now - late_at);
        // One batch in time does not make up for it.
        planner.observe(Path::Gather, Read, plain, Seen::exactly(plain), now);
    }
    assert!(pauses.is_sorted(), "{pauses:?}");
    assert!(
        pauses[0] < 60.0 * MS && pauses[8] > 4000.0 * MS,
        "{pauses:?}"
    );
}

#[test]
fn a_shader_nobody_used_for_long_is_probed_before_it_is_used() {
    let mut planner = Planner::new(h200(), 0.0);
    let now = 10_000.0 * MS;
    assert!(!planner.probe_due(now), "nobody wants it");
    assert_eq!(choose(&mut planner, Read, 64, 4 * KIB, now), Path::Dma);
    assert!(planner.probe_due(now));
    planner.probe_sent();
    // Seen late, but nobody had looked before: that proves nothing.
    planner.probed(
        Seen {
            after: 1e3,
            by: 5.0 * MS,
        },
        now,
    );
    assert!(!planner.gather_in_time(now) && planner.probe_due(now));
    planner.probe_sent();
    planner.probed(Seen::exactly(15e3), now);
    assert_eq!(choose(&mut planner, Read, 64, 4 * KIB, now), Path::Gather);
}

#[test]
fn what_only_the_shader_reaches_is_copied_even_if_it_is_late() {
    let mut planner = Planner::new(h200(), 0.0);
    planner.observe(Path::Gather, Read, 20e3, Seen::exactly(3.0 * MS), 1.0);
    let mut one = group(Read, 8, 4 * KIB);
    one.able = Paths::only(Path::Gather);
    assert_eq!(planner.choose(&one, 2.0), Some(Path::Gather));
}

#[test]
fn a_busy_engine_is_left_for_a_while() {
    let mut planner = Planner::new(h200(), 0.0);
    let plain = h200().of(Path::Dma, Read).unwrap().time(1, 16 * KIB);
    assert_eq!(choose(&mut planner, Read, 1, 16 * KIB, 0.0), Path::Dma);
    let seen = Seen::exactly(plain * 50.0);
    planner.observe(Path::Dma, Read, plain, seen, 0.0);
    // Once is no trend.
    assert_eq!(choose(&mut planner, Read, 1, 16 * KIB, 0.0), Path::Dma);
    for n in 0..40 {
        let seen = Seen::exactly(plain * 6.0);
        planner.observe(Path::Dma, Read, plain, seen, f64::from(n) * MS);
    }
    assert_eq!(
        choose(&mut planner, Read, 1, 16 * KIB, 40.0 * MS),
        Path::Bar
    );
    // A megabyte is still its own: the BAR is worse.
    let mut large = group(Read, 1, 1024 * KIB);
    large.able = Paths::ALL.without(Path::Gather);
    let large = planner.choose(&large, 40.0 * MS).unwrap();
    assert_eq!(large, Path::Dma);
    assert_eq!(
        choose(&mut planner, Read, 1, 16 * KIB, 4000.0 * MS),
        Path::Dma
    );
}

#[test]
fn a_late_look_is_no_evidence() {
    let mut planner = Planner::new(h200(), 0.0);
    for n in 0..100 {
        let seen = Seen {
            after: 0.0,
            by: 50.0 * MS,
        };
        planner.observe(Path::Dma, Read, 12e3, seen, f64::from(n));
    }
    assert_eq!(planner.slowdown(Path::Dma, Read, 100.0), 1.0);
}

#[test]
fn a_shader_that_was_late_when_measured_is_guessed_and_proves_itself() {
    let mut costs = h200();
    let dma = costs.of(Path::Dma, Read);
    costs.set(Path::Gather, Read, cost(2.5 * MS, 1.0, 0.0));
    costs.guess_late_gather();
    assert!(costs.gather_was_late);
    assert_eq!(costs.of(Path::Dma, Read), dma);
    assert!(costs.of(Path::Gather, Read).unwrap().start < 20e3);
    let mut planner = Planner::new(costs, 0.0);
    assert_eq!(choose(&mut planner, Read, 64, 4 * KIB, 0.0), Path::Dma);
    for _ in 0..3 {
        assert!(planner.probe_due(1.0));
        planner.probe_sent();
        planner.probed(Seen::exactly(20e3), 1.0);
    }
    assert_eq!(choose(&mut planner, Read, 64, 4 * KIB, 2.0), Path::Gather);
    let mut costs = h200();
    costs.guess_late_gather();
    assert_eq!(costs, h200());
}

#[test]
fn costs_go_through_their_measurements() {
    let sample = |copies: u32, bytes: u64, time: f64| Sample {
        copies,
        bytes,
        time,
    };
    let exact = Cost {
        start: 9_000.0,
        copy: 1_200.0,
        byte: 0.02,
    };
    let at = |copies, bytes| sample(copies, bytes, exact.time(copies, bytes));
    let fitted = Cost::fit(at(1, 4 * KIB), at(32, 128 * KIB), at(1, 1024 * KIB));
    assert!((fitted.start - exact.start).abs() < 1.0, "{fitted:?}");
    assert!((fitted.copy - exact.copy).abs() < 1.0, "{fitted:?}");
    assert!((fitted.byte - exact.byte).abs() < 1e-4, "{fitted:?}");
    // Noise: the large copy was faster than the small one.
    let fitted = Cost::fit(
        sample(1, 4096, 900.0),
        sample(32, 32 * 4096, 500.0),
        sample(1, 1 << 20, 100.0),
    );
    assert_eq!((fitted.copy, fitted.byte), (0.0, 0.0));
    assert_eq!(fitted.start, 900.0);
}

proptest! {
    /// The same measurements give the same choice, and it is one that can carry the group.
    #[test]
    fn choices_are_deterministic_and_able(
        copies in 1u32..512,
        size in 1u64..(1 << 20),
        able in 1u8..8,
        is_read: bool,
        times in proptest::collection::vec((0usize..3, 1e2..1e8f64), 0..40),
    ) {
        let run = || {
            let mut planner = Planner::new(h200(), 0.0);
            let mut now = 0.0;
            for &(path, time) in &times {
                now += time;
                planner.observe(Path::ALL[path], Read, 1e4, Seen::exactly(time), now);
            }
            let mut group = group(if is_read { Read } else { Write }, copies, size);
            group.able = Paths(able);
            (planner.choose(&group, now), planner)
        };
        let (first, mut planner) = run();
        prop_assert_eq!(first, run().0);
        let path = first.unwrap();
        prop_assert!(Paths(able).has(path));
        let drift = planner.slowdown(path, Read, 0.0);
        prop_assert!((LEAST_DRIFT..=MOST_DRIFT).contains(&drift));
        planner.probe_sent();
    }
}
