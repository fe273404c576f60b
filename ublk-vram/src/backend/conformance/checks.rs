//! The list of checks, and what several of them need.

use super::harness::{Verdict, skip};
use super::{data, paths, queue};
use crate::backend::Backend;
use crate::store::Layout;

type CheckFn = fn(&dyn Backend, &Layout) -> Verdict;

/// Every check; the cheap ones that explain the failures of others first.
pub(super) const ALL: [(&str, CheckFn); 15] = [
    (
        "chunks are as many and as large as the layout says",
        data::chunks_match_the_layout,
    ),
    (
        "a queue takes all its copies before a poll",
        queue::a_queue_takes_all_its_copies,
    ),
    (
        "poll gives no more than there is room for",
        queue::poll_keeps_what_does_not_fit,
    ),
    ("copies in flight are counted", queue::in_flight_is_counted),
    (
        "a sleeper is woken by a completion",
        queue::a_sleeper_is_woken,
    ),
    ("what is written is read, everywhere", data::written_is_read),
    ("neighbours are left alone", data::neighbours_are_left_alone),
    ("zeroes are written", data::zeroes_are_written),
    ("the last of two writes stays", data::the_last_write_stays),
    (
        "a write and a read of other bytes together",
        data::mixed_batches,
    ),
    ("a copy outside its chunk fails", data::outside_fails),
    (
        "data does not reach the header",
        data::data_does_not_reach_the_header,
    ),
    (
        "the mapping and the copies show the same bytes",
        data::mapping_and_copies_agree,
    ),
    ("two queues do not disturb each other", queue::two_queues),
    (
        "what one copy path wrote, every other one reads",
        paths::paths_see_each_other,
    ),
];

/// The block device's block.
pub(super) const PAGE: u32 = 4096;
/// The largest copy that is tried.
pub(super) const MIB: u32 = 1 << 20;
/// Copies in flight that every backend must take.
pub(super) const COPIES: usize = 64;
/// Chunks looked at in each check that visits chunks: the first, the last and some between.
const VISITED: u32 = 5;

/// The chunks that are visited.
pub(super) fn visited(layout: &Layout) -> Vec<u32> {
    let last = layout.chunks().saturating_sub(1);
    let mut chunks: Vec<u32> = (0..VISITED)
        .map(|n| u64::from(last) * u64::from(n) / u64::from(VISITED - 1))
        .map(|chunk| chunk as u32)
        .collect();
    chunks.dedup();
    chunks
}

/// The first chunk, if it carries `bytes`.
pub(super) fn first_chunk_with(layout: &Layout, bytes: u64) -> Verdict {
    let payload = layout.payload_of(0);
    if payload < bytes {
        skip(format!("a chunk carries only {payload} bytes"))
    } else {
        Ok(())
    }
}
