//! Checksums for blocks that have none, from what is in the memory now.
//!
//! For memory that was found without its table: its headers say that it is the device's, nothing says
//! that its bytes are. From then on it is checked again.

use std::sync::atomic::{AtomicBool, Ordering, fence};

use super::entry::Entry;
use super::{BLOCK_BYTES, ChecksumTable, crc32c};
use crate::backend::access::Access;
use crate::error::{Error, ErrorKind, Result};
use crate::store::Layout;

/// Gives every block a checksum that has none and is not being written, while I/O runs or before. An
/// entry is set only if it did not change while its block was read. Ends early when `stop` is set.
/// The count of blocks that were given one.
///
/// # Errors
/// [`ErrorKind::Io`] if the memory is gone.
pub fn rebuild(
    table: &ChecksumTable,
    layout: &Layout,
    access: &mut Access,
    stop: &AtomicBool,
) -> Result<u64> {
    let mut rebuilt = 0;
    for block in 0..table.blocks() {
        if stop.load(Ordering::Relaxed) {
            return Ok(rebuilt);
        }
        let Some(slot) = table.entry(block) else {
            break;
        };
        let before = slot.load(Ordering::SeqCst);
        if Entry(before).crc().is_some() || Entry(before).is_writing() {
            continue;
        }
        let new = Entry(before).rebuild(crc(layout, access, block)?);
        if slot
            .compare_exchange(before, new.0, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
        {
            rebuilt += 1;
            if Entry(before).is_left() {
                table.tail().left.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
    table.tail().unverified.store(0, Ordering::Relaxed);
    Ok(rebuilt)
}

/// What a look at some of the blocks has shown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sample {
    /// Blocks that have a checksum and were read.
    pub checked: u64,
    /// Those of them that do not fit it.
    pub bad: u64,
}

/// Checks up to `most` blocks, spread over the whole device, against their checksums: whether memory that
/// was found again is the device's memory. Before there is I/O.
///
/// # Errors
/// [`ErrorKind::Io`] if the memory is gone.
pub fn sample(
    table: &ChecksumTable,
    layout: &Layout,
    access: &mut Access,
    most: u64,
) -> Result<Sample> {
    let stride = usize::try_from(table.blocks().div_ceil(most.max(1))).unwrap_or(usize::MAX);
    let mut sample = Sample::default();
    for block in (0..table.blocks()).step_by(stride.max(1)) {
        let entry = table
            .entry(block)
            .map(|slot| Entry(slot.load(Ordering::SeqCst)));
        if let Some(expected) = entry.and_then(Entry::crc) {
            sample.checked += 1;
            sample.bad += u64::from(crc(layout, access, block)? != expected);
        }
    }
    Ok(sample)
}

/// CRC32C of a block as it is now.
fn crc(layout: &Layout, access: &mut Access, block: u64) -> Result<u32> {
    let piece = layout
        .first_piece(block * u64::from(BLOCK_BYTES), BLOCK_BYTES)
        .ok_or_else(|| Error::new(ErrorKind::Io, format!("there is no block {block}")))?;
    // What writes change meanwhile is found by the entry, which is looked at after.
    let bytes = access.read(piece.chunk, piece.offset, BLOCK_BYTES as usize)?;
    let crc = crc32c(bytes);
    // Streaming loads are weakly ordered: the entry must not be looked at before they are done.
    fence(Ordering::SeqCst);
    Ok(crc)
}
