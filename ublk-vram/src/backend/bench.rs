//! How fast the copy routines are on the memory of a backend: a table for people.
//!
//! It measures single copies at random offsets, as a block device makes them, and fences each store.

use std::fmt::Write;
use std::time::{Duration, Instant};

use super::ChunkMemory;
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};

/// Bytes of one copy.
const SIZES: [usize; 3] = [4 << 10, 64 << 10, 1 << 20];
/// Copies of each row.
const COPIES: usize = 4000;
/// A row ends early after so long, but not before [`LEAST_COPIES`]: plain reads of 1 MiB from a card
/// take 18 ms each.
const ROW_LIMIT: Duration = Duration::from_secs(4);
const LEAST_COPIES: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Store,
    Load,
    Fill,
}

/// Measures on `chunk`, **whose contents are lost**, and writes the table.
///
/// # Errors
/// [`ErrorKind::Usage`] if the chunk is smaller than the largest copy.
pub fn copy_table(chunk: &ChunkMemory) -> Result<String> {
    let mut table = format!(
        "{:<6} {:<9} {:>8} {:>7} {:>10} {:>10} {:>7}\n",
        "WHAT", "HOW", "BYTES", "COPIES", "P50-US", "P99-US", "GB/S"
    );
    let mut buffer = vec![0xa5u8; 1 << 20];
    for operation in [Operation::Store, Operation::Load, Operation::Fill] {
        for size in SIZES {
            if operation == Operation::Store {
                let times = measure(chunk, size, |at| {
                    // SAFETY: `at` is mapped for `size` bytes, which the buffer has.
                    unsafe { at.copy_from_nonoverlapping(buffer.as_ptr(), size) };
                })?;
                row(&mut table, "store", "memcpy", size, times);
            }
            for (isa, routines) in CopyRoutines::all_supported() {
                let memory = buffer.as_mut_ptr();
                let times = measure(chunk, size, |at| {
                    // SAFETY: `at` is mapped for `size` bytes, which the buffer has.
                    unsafe { run(operation, &routines, at, memory, size) };
                })?;
                let what = match operation {
                    Operation::Store => "store",
                    Operation::Load => "load",
                    Operation::Fill => "fill",
                };
                row(&mut table, what, &isa.to_string(), size, times);
            }
        }
    }
    Ok(table)
}

/// # Safety
/// `at` and `memory` are valid for reads and writes of `size` bytes.
unsafe fn run(
    operation: Operation,
    routines: &CopyRoutines,
    at: *mut u8,
    memory: *mut u8,
    size: usize,
) {
    match operation {
        Operation::Store => {
            // SAFETY: the caller's.
            unsafe { routines.store(at, memory, size) };
            routines.store_fence();
        }
        // SAFETY: the caller's.
        Operation::Load => unsafe { routines.load(memory, at, size) },
        Operation::Fill => {
            // SAFETY: the caller's.
            unsafe { routines.fill_zero(at, size) };
            routines.store_fence();
        }
    }
}

/// The times of many copies of `size` bytes, each at an offset of its own, the shortest first.
fn measure(chunk: &ChunkMemory, size: usize, copy: impl Fn(*mut u8)) -> Result<Vec<Duration>> {
    let places = chunk.size / size as u64;
    let mut random = 0x9e37_79b9_7f4a_7c15u64;
    let mut times = Vec::with_capacity(COPIES);
    let begin = Instant::now();
    while times.len() < COPIES && (times.len() < LEAST_COPIES || begin.elapsed() < ROW_LIMIT) {
        // xorshift64: which pages is of no matter, that they differ is.
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let place = random.checked_rem(places).unwrap_or(0);
        let at = chunk.at(place * size as u64, size).ok_or_else(|| {
            Error::new(
                ErrorKind::Usage,
                format!("a chunk of {} bytes is too small to measure", chunk.size),
            )
        })?;
        let start = Instant::now();
        copy(at);
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times)
}

fn row(table: &mut String, what: &str, how: &str, size: usize, times: Vec<Duration>) {
    let at = |percent: usize| {
        let time = times.get((times.len() * percent / 100).min(times.len().saturating_sub(1)));
        time.copied().unwrap_or_default().as_secs_f64() * 1e6
    };
    let total: Duration = times.iter().sum();
    let rate = (size * times.len()) as f64 / total.as_secs_f64().max(1e-9) / 1e9;
    // Writing to a string does not fail.
    let _ = writeln!(
        table,
        "{what:<6} {how:<9} {size:>8} {:>7} {:>10.2} {:>10.2} {rate:>7.2}",
        times.len(),
        at(50),
        at(99)
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::host::HostMemory;
    use crate::store::Layout;

    #[test]
    fn a_chunk_that_is_too_small_is_refused() {
        let layout = Layout::new(64 << 10, None).unwrap();
        let host = HostMemory::create(&layout).unwrap().open(&layout).unwrap();
        let chunk = crate::backend::Backend::chunks(&host).first().unwrap();
        assert_eq!(copy_table(chunk).unwrap_err().kind, ErrorKind::Usage);
    }
}
