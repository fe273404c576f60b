//! Checksums for blocks that have none, from what is in the memory now.
//!
//! For memory that was found without its table: its headers say that it is the device's, nothing says
//! that its bytes are. From then on it is checked again.

use std::sync::atomic::{AtomicBool, Ordering, fence};

use super::entry::Entry;
use super::{BLOCK_BYTES, ChecksumTable, crc32c};
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
    let mut reader = Reader::new(layout, chunks, routines);
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
        let new = Entry(before).rebuild(reader.crc(block)?);
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
    chunks: &[ChunkMemory],
    routines: &CopyRoutines,
    most: u64,
) -> Result<Sample> {
    let mut reader = Reader::new(layout, chunks, routines);
    let stride = usize::try_from(table.blocks().div_ceil(most.max(1))).unwrap_or(usize::MAX);
    let mut sample = Sample::default();
    for block in (0..table.blocks()).step_by(stride.max(1)) {
        let entry = table
            .entry(block)
            .map(|slot| Entry(slot.load(Ordering::SeqCst)));
        if let Some(crc) = entry.and_then(Entry::crc) {
            sample.checked += 1;
            sample.bad += u64::from(reader.crc(block)? != crc);
        }
    }
    Ok(sample)
}

/// Reads blocks by the CPU.
struct Reader<'a> {
    layout: &'a Layout,
    chunks: &'a [ChunkMemory],
    routines: &'a CopyRoutines,
    page: Box<[u8; BLOCK_BYTES as usize]>,
}

impl<'a> Reader<'a> {
    fn new(
        layout: &'a Layout,
        chunks: &'a [ChunkMemory],
        routines: &'a CopyRoutines,
    ) -> Reader<'a> {
        Reader {
            layout,
            chunks,
            routines,
            page: Box::new([0; BLOCK_BYTES as usize]),
        }
    }

    /// CRC32C of a block as it is now.
    fn crc(&mut self, block: u64) -> Result<u32> {
        let (len, to) = (self.page.len(), self.page.as_mut_ptr());
        let at = self
            .layout
            .first_piece(block * u64::from(BLOCK_BYTES), BLOCK_BYTES)
            .and_then(|piece| {
                let chunk = self.chunks.get(piece.chunk as usize)?;
                chunk.mapping.at(piece.offset, len)
            })
            .ok_or_else(|| Error::new(ErrorKind::Io, format!("block {block} is not mapped")))?;
        let routines = *self.routines;
        // SAFETY: `at` is mapped for a page, which is ours to read; what writes change meanwhile is
        // found by the entry, which is looked at after.
        bus_error::guarded(|| unsafe { routines.load(to, at, len) })?;
        let crc = crc32c(&*self.page);
        // Streaming loads are weakly ordered: the entry must not be looked at before they are done.
        fence(Ordering::SeqCst);
        Ok(crc)
    }
}
