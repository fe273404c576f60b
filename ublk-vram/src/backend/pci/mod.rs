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

pub use address::PciAddress;
pub use claim::{PciMemory, available};
pub use export::PciDescription;
pub use function::{Bar, PciFunction, list, list_at};
pub(super) use module::detach;
pub use orphan::wipe_orphan;

use super::mapped::{MappedQueue, carve};
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
