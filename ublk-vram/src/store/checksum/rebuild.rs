//! Checksums for blocks that have none, from what is in the memory now.
//!
//! For memory that was found without its table: its headers say that it is the device's, nothing says
//! that its bytes are. From then on it is checked again.

use std::sync::atomic::{AtomicBool, Ordering, fence};

use super::entry::Entry;
use super::{BLOCK_BYTES, ChecksumTable, block_crc};
use crate::backend::ChunkMemory;
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};
use crate::safety::bus_error;
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
    chunks: &[ChunkMemory],
    routines: &CopyRoutines,
    stop: &AtomicBool,
) -> Result<u64> {
    let mut page = Box::new([0u8; BLOCK_BYTES as usize]);
    let mut rebuilt = 0;
    for block in 0..table.blocks() {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let Some(slot) = table.entry(block) else {
            break;
        };
        let before = slot.load(Ordering::SeqCst);
        if Entry(before).crc().is_some() || Entry(before).is_writing() {
            continue;
        }
        let offset = block * u64::from(BLOCK_BYTES);
        let at = layout
            .first_piece(offset, BLOCK_BYTES)
            .and_then(|piece| {
                let chunk = chunks.get(piece.chunk as usize)?;
                chunk.mapping.at(piece.offset, page.len())
            })
            .ok_or_else(|| Error::new(ErrorKind::Io, format!("block {block} is not mapped")))?;
        let to = page.as_mut_ptr();
        // SAFETY: `at` is mapped for a page, which is ours to read; what writes change meanwhile is
        // found below.
        bus_error::guarded(|| unsafe { routines.load(to, at, BLOCK_BYTES as usize) })?;
        let crc = block_crc(&*page);
        fence(Ordering::SeqCst);
        let new = Entry(before).rebuild(crc);
        if slot
            .compare_exchange(before, new.0, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
        {
            rebuilt += 1;
            if Entry(before).is_left() {
                table.left.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
    Ok(rebuilt)
}
