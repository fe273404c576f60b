//! The checksums of a device: CRC32C of each 4 KiB block, in locked system memory.
//!
//! GPU memory without ECC flips bits, and a bus that is gone answers anything. With this table a
//! read gives back what was written, or an error; never something else.
//!
//! ```text
//!   unset --begin--> writing --end, alone and whole--> valid --begin--> writing
//!     ^                 |  end, failed or met another write
//!     +-----------------+
//! ```
//!
//! The rules, and why there is no false alarm:
//! - An entry says `writing` before the first byte of a write is stored ([`ChecksumTable::begin`] is
//!   a locked instruction, which no store passes, streaming or not), and is `valid` only after all
//!   bytes are ordered ([`ChecksumTable::end`] comes after the completion of the copy was polled).
//! - Two writes of one block that are in flight at the same time may leave any mixture: the entry is
//!   unset after them, until the block is written alone.
//! - A read that does not fit its entry is repeated. It is an error only if the entry was valid, and
//!   the same word, before and after the second read ([`ChecksumTable::judge`]): then no write was in
//!   flight meanwhile. Otherwise a write was, and a block device promises nothing about a read that
//!   meets a write.
//! - What a worker left `writing` when it died is read unchecked until it is rewritten, and counted.
//!
//! Nothing here allocates, blocks or takes a lock. The memory is given: it outlives a worker.

mod entry;
mod rebuild;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering, fence};

use entry::Entry;
pub use rebuild::{Sample, rebuild, sample};

use super::shared::SharedMapping;
use crate::error::{Error, ErrorKind, Result};

/// Bytes that one checksum covers: the device's logical block.
pub const BLOCK_BYTES: u32 = 4096;
/// CRC32C of a block of zeroes.
pub const ZERO_BLOCK_CRC: u32 = 0x98f9_4189;
/// Bytes of the table for one block.
const ENTRY_BYTES: u64 = size_of::<AtomicU64>() as u64;

/// CRC32C (Castagnoli, as in iSCSI, RFC 3720) of some bytes, by the widest carry-less multiplication that
/// the CPU has. It neither allocates nor locks; what it finds out about the CPU it keeps from its first
/// call, which a header's is.
#[inline]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// What a read block's checksum says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is the block that was written.
    Good,
    /// The block has no checksum now: never written alone, or being written.
    Unchecked,
    /// It is not the one of the table: read it again, and [`ChecksumTable::judge`] with this.
    Doubtful(Doubt),
    /// Read twice, never written meanwhile, and not what was written.
    Bad {
        /// CRC32C of what was written.
        expected: u32,
        /// CRC32C of what was read.
        found: u32,
    },
}

/// An entry as it was before a second read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Doubt(u64);

/// The checksums of one device.
pub struct ChecksumTable {
    memory: SharedMapping,
    blocks: u64,
}

/// What lies behind the entries: every process of a server reads it. All-zero bytes are a valid value.
#[repr(C)]
struct Tail {
    /// Blocks that a dead worker left half written and that were not rewritten since.
    left: AtomicU64,
    /// 1 while a table that was lost is being rebuilt.
    unverified: AtomicU64,
}

/// What a worker that takes over finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// Blocks that were being written: they are read unchecked until they are written again.
    pub left: u64,
    /// The table is a new one: the memory outlived it.
    pub is_new: bool,
}

impl ChecksumTable {
    /// Bytes of shared memory for a device of `device_bytes`: 2 MiB for each GiB.
    pub fn bytes(device_bytes: u64) -> u64 {
        device_bytes.div_ceil(u64::from(BLOCK_BYTES)) * ENTRY_BYTES + size_of::<Tail>() as u64
    }

    /// The table in `memory`, which must be zeroed or hold the table of an earlier worker.
    ///
    /// # Errors
    /// If the memory is too small.
    pub fn new(memory: SharedMapping, device_bytes: u64) -> Result<ChecksumTable> {
        if (memory.len() as u64) < ChecksumTable::bytes(device_bytes) {
            return Err(Error::new(
                ErrorKind::Io,
                format!(
                    "the checksum memory of {} bytes is too small for a device of {device_bytes} bytes",
                    memory.len()
                ),
            ));
        }
        Ok(ChecksumTable {
            memory,
            blocks: device_bytes.div_ceil(u64::from(BLOCK_BYTES)),
        })
    }

    /// Bytes of memory that the table takes.
    pub fn len_bytes(&self) -> u64 {
        self.blocks * ENTRY_BYTES
    }

    fn tail(&self) -> &Tail {
        let at = (self.blocks * ENTRY_BYTES) as usize;
        // SAFETY: the mapping is page aligned and holds `blocks` words and the tail behind them (`new`);
        // every bit pattern is a valid tail, and all access is through atomics.
        unsafe { &*self.memory.as_ptr().add(at).cast::<Tail>() }
    }

    /// Blocks of the device.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Notes that the whole device was zeroed and checked: every block has a checksum. Before there
    /// are queues.
    pub fn set_all_zero(&self) {
        for block in 0..self.blocks {
            if let Some(entry) = self.entry(block) {
                entry.store(Entry::valid(ZERO_BLOCK_CRC).0, Ordering::Relaxed);
            }
        }
        self.tail().left.store(0, Ordering::Relaxed);
    }

    /// Takes over the table of a worker that died: what it was writing is read unchecked until it is
    /// written again. Before there are queues, and after the last of the other worker's.
    pub fn adopt(&self) -> Found {
        let (mut left, mut is_new) = (0, true);
        for block in 0..self.blocks {
            let Some(slot) = self.entry(block) else { break };
            let before = slot.load(Ordering::Relaxed);
            let entry = Entry(before).adopt();
            slot.store(entry.0, Ordering::Relaxed);
            left += u64::from(entry.is_left());
            is_new &= before == 0;
        }
        self.tail().left.store(left, Ordering::SeqCst);
        Found { left, is_new }
    }

    /// Notes that the memory was found without its table: nothing says that its bytes are what was
    /// written, until [`rebuild()`] has been through.
    pub fn set_unverified(&self) {
        self.tail().unverified.store(1, Ordering::Relaxed);
    }

    /// Whether the memory was found without its table, and not all of it has a checksum again.
    pub fn is_unverified(&self) -> bool {
        self.tail().unverified.load(Ordering::Relaxed) != 0
    }

    /// Blocks that a dead worker left half written and nobody has rewritten.
    pub fn left_writing(&self) -> u64 {
        self.tail().left.load(Ordering::Relaxed)
    }

    /// Blocks without a checksum now; it looks at the whole table.
    pub fn count_unset(&self) -> u64 {
        (0..self.blocks)
            .filter_map(|block| self.entry(block))
            .filter(|slot| Entry(slot.load(Ordering::Relaxed)).crc().is_none())
            .count() as u64
    }

    #[inline]
    fn entry(&self, block: u64) -> Option<&AtomicU64> {
        if block >= self.blocks {
            return None;
        }
        let base = self.memory.as_ptr().cast::<AtomicU64>();
        // SAFETY: the mapping is page aligned and holds `blocks` words (`new`); every bit pattern is a
        // valid word, and all access is through atomics.
        Some(unsafe { &*base.add(block as usize) })
    }

    fn change(&self, block: u64, change: impl Fn(Entry) -> Entry) {
        let Some(slot) = self.entry(block) else {
            return;
        };
        let mut old = slot.load(Ordering::Relaxed);
        loop {
            let new = change(Entry(old));
            match slot.compare_exchange_weak(old, new.0, Ordering::SeqCst, Ordering::Relaxed) {
                Ok(_) if Entry(old).is_left() && !new.is_left() => {
                    self.tail().left.fetch_sub(1, Ordering::Relaxed);
                    return;
                }
                Ok(_) => return,
                Err(now) => old = now,
            }
        }
    }

    /// Before the first byte of a write to `block` is stored. Each is followed by one
    /// [`ChecksumTable::end`].
    #[inline]
    pub fn begin(&self, block: u64) {
        self.change(block, Entry::begin);
    }

    /// After a write to `block` has completed and its bytes are ordered; `crc` is that of the whole
    /// block, `None` if the write failed or covered only a part of it.
    #[inline]
    pub fn end(&self, block: u64, crc: Option<u32>) {
        self.change(block, |entry| entry.end(crc));
    }

    /// The first look at a block that was read.
    #[inline]
    pub fn check(&self, block: u64, read: &[u8]) -> Verdict {
        let Some(slot) = self.entry(block) else {
            return Verdict::Unchecked;
        };
        match Entry(slot.load(Ordering::SeqCst)).crc() {
            None => Verdict::Unchecked,
            Some(crc) if crc == crc32c(read) => Verdict::Good,
            // A write may have ended between the read and the look: this word may be newer than the
            // bytes. It is what the second read, which begins now, is judged by.
            Some(_) => Verdict::Doubtful(Doubt(slot.load(Ordering::SeqCst))),
        }
    }

    /// The look at a block that was read again, in doubt.
    pub fn judge(&self, block: u64, read: &[u8], doubt: Doubt) -> Verdict {
        let found = crc32c(read);
        // Streaming loads are weakly ordered: the entry must not be looked at before they are done.
        fence(Ordering::SeqCst);
        let Some(slot) = self.entry(block) else {
            return Verdict::Unchecked;
        };
        let now = slot.load(Ordering::SeqCst);
        match Entry(now).crc() {
            None => Verdict::Unchecked,
            Some(crc) if crc == found => Verdict::Good,
            Some(expected) if now == doubt.0 => Verdict::Bad { expected, found },
            Some(_) => Verdict::Doubtful(Doubt(now)),
        }
    }
}
