//! Is memory that the driver calls device-local really in the GPU?
//!
//! A driver under pressure may give system memory in its place, and nothing in Vulkan tells. Time
//! does: reads of a card's memory cross the bus, line by line, below 3 GB/s on any link there is
//! (1 GB/s on PCIe 5 x16, docs/performance.md), and system memory is several times faster.

use std::time::Instant;

use crate::backend::ChunkMemory;
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};

/// Bytes read at once.
const SAMPLE_BYTES: usize = 64 << 10;
/// The fastest of so many counts: interruptions make a read slower, never faster.
const SAMPLES: usize = 5;
/// Bytes in a nanosecond (GB/s) above which memory cannot be behind a bus.
const TOO_FAST: f64 = 8.0;

/// Refuses chunks of a card that are read as fast as only system memory is.
///
/// # Errors
/// [`ErrorKind::Unsupported`] that names the first such chunk.
pub(super) fn check(chunks: &[ChunkMemory], routines: &CopyRoutines, label: &str) -> Result<()> {
    let mut buffer = vec![0u8; SAMPLE_BYTES];
    for (index, chunk) in chunks.iter().enumerate() {
        let Some(rate) = read_rate(chunk, routines, &mut buffer) else {
            continue;
        };
        if is_system_memory(rate) {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the driver of {label} put chunk {index} into system memory, which reads at \
                     {rate:.0} GB/s as no card does: make the device smaller, or free memory of the GPU"
                ),
            ));
        }
    }
    Ok(())
}

pub(super) fn is_system_memory(rate: f64) -> bool {
    rate > TOO_FAST
}

/// The best rate (bytes in a nanosecond) of reads of the chunk's first bytes; `None` for a chunk that
/// is smaller than one read.
pub(super) fn read_rate(
    chunk: &ChunkMemory,
    routines: &CopyRoutines,
    buffer: &mut [u8],
) -> Option<f64> {
    let at = chunk.at(0, buffer.len())?;
    let fastest = (0..SAMPLES)
        .map(|_| {
            let start = Instant::now();
            // SAFETY: `at` is mapped for the buffer's length, and the buffer is ours.
            unsafe { routines.load(buffer.as_mut_ptr(), at, buffer.len()) };
            start.elapsed()
        })
        .min()?;
    Some(buffer.len() as f64 / (fastest.as_nanos().max(1)) as f64)
}
