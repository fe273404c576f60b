//! The whole BAR of a display- or memory-class PCI function that no driver owns.
//!
//! Why: it needs no kernel module, no GPU library and no GPU API: root maps `resourceN_wc` in sysfs and
//! has the card's memory, write-combined. With no driver there is nobody who would move, evict or
//! reset it.
//!
//! What it promises:
//! - A function is used only if nothing else can be using its memory ([`PciFunction::usable`]), and
//!   one server at a time has a BAR ([`PciMemory`]).
//! - No driver binds itself to the function, and it does not sleep, for as long as the claim lasts.
//! - The memory was seen to hold what is written to it before anything is built on it.
//! - Every change to the function is set back when the claim ends.
//!
//! What it may not do: touch the function's registers, or any BAR but the one claimed.
//!
//! Where the kernel module is loaded everything goes through it instead of sysfs: the
//! memory is then taken away, with SIGBUS, the moment the function goes.
//!
//! Without it, a function that is removed in sysfs, or whose link fails, leaves the mapping in place: reads of it
//! give all ones and writes go nowhere, without a signal. `health` looks for that.

mod address;
mod claim;
mod export;
#[cfg(test)]
mod fixture;
mod function;
mod lock;
mod module;
mod obstacles;
mod orphan;
mod probe;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use address::PciAddress;
pub use claim::{PciMemory, available};
pub use export::PciDescription;
pub use function::{Bar, PciFunction, list, list_at};
pub(super) use module::detach;
pub use orphan::wipe_orphan;

use super::mapped::MappedQueue;
use super::{Backend, BackendQueue, ChunkMemory, Mapping, QueueId};
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;
use crate::store::Layout;
use crate::store::shared::SharedMapping;

impl PciMemory {
    /// Maps the chunks of `layout`, which lie one after the other from the BAR's first byte.
    ///
    /// The kernel fills the page tables at once (`remap_pfn_range`), in 4 KiB entries: 2 MiB of system
    /// memory for each GiB. Nothing is read from or written to the memory.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if the function is gone, [`ErrorKind::NoSpace`] if `layout` does not fit,
    /// [`ErrorKind::Busy`] or [`ErrorKind::Permission`] if the kernel refuses.
    pub fn open(&self, layout: &Layout) -> Result<PciBackend> {
        self.check_present()?;
        self.check_size(layout)?;
        let total = usize::try_from(layout.total_bytes()).map_err(|_| {
            Error::new(
                ErrorKind::NoSpace,
                format!(
                    "{} do not fit an address space",
                    human(layout.total_bytes())
                ),
            )
        })?;
        let mapping = match self.region() {
            Some(region) => region.map(total)?.into_shared(),
            None => SharedMapping::at(self.resource(), 0, total)
                .map_err(|error| self.map_refused(&error))?,
        };
        Ok(PciBackend {
            chunks: carve(mapping, layout)?,
            routines: CopyRoutines::best(),
            address: self.address(),
            write_combined: self.is_write_combined(),
            through_module: self.region().is_some(),
        })
    }
}

/// Cuts the mapping into the chunks of `layout`; the last of them unmaps it.
fn carve(mapping: SharedMapping, layout: &Layout) -> Result<Vec<ChunkMemory>> {
    let (base, len) = (std::ptr::NonNull::new(mapping.as_ptr()), mapping.len());
    let base = base.ok_or_else(|| Error::new(ErrorKind::Io, "a BAR was mapped at address 0"))?;
    let owner = Arc::new(mapping);
    // SAFETY: the owner keeps `len` bytes at `base` mapped until it is dropped.
    let whole = unsafe { Mapping::new(base, len, Arc::<SharedMapping>::clone(&owner)) };
    let mut offset = 0;
    (0..layout.chunks())
        .map(|index| {
            let size = layout.chunk_bytes(index);
            let start = usize::try_from(size)
                .ok()
                .and_then(|len| std::ptr::NonNull::new(whole.at(offset, len)?))
                .ok_or_else(|| Error::new(ErrorKind::Io, format!("chunk {index} is not mapped")))?;
            offset += size;
            // SAFETY: `at` has shown that the range is inside what the owner keeps mapped.
            let mapping =
                unsafe { Mapping::new(start, size as usize, Arc::<SharedMapping>::clone(&owner)) };
            Ok(ChunkMemory {
                size,
                mapping: Some(mapping),
            })
        })
        .collect()
}

/// The mapped BAR.
pub struct PciBackend {
    chunks: Vec<ChunkMemory>,
    routines: CopyRoutines,
    address: PciAddress,
    write_combined: bool,
    through_module: bool,
}

impl Backend for PciBackend {
    fn kind(&self) -> &'static str {
        "pci"
    }

    fn gpu(&self) -> Option<String> {
        Some(self.address.to_string())
    }

    fn copy_path(&self) -> String {
        let kind = if self.write_combined {
            "write-combined"
        } else {
            "uncached: slow"
        };
        let way = if self.through_module {
            ", kernel module"
        } else {
            ""
        };
        format!("{}, {kind}{way}", self.routines.isa())
    }

    fn chunks(&self) -> &[ChunkMemory] {
        &self.chunks
    }

    fn open_queue(
        &self,
        _queue: QueueId,
        copies: usize,
        _memory: &[Mapping],
    ) -> Result<Box<dyn BackendQueue>> {
        Ok(Box::new(MappedQueue::new(self.routines, copies)))
    }
}
