//! GPU memory through Vulkan, mapped for the CPU.
//!
//! Why Vulkan: it is the one interface that every maker's driver has, it needs nothing but the driver
//! to run, and it tells what memory there is before any is taken. Memory that is both device-local and
//! host-visible is the GPU's own memory in its PCI aperture (Resizable BAR); the driver maps it
//! write-combined, and the copy routines of every mapped backend do the rest.
//!
//! What it promises:
//! - The GPU that the user names is used, or refused with the reason ([`list`] gives it beforehand).
//! - All memory is allocated and mapped before the device is shown; what cannot be had in full is given
//!   back in full.
//! - On a card, memory that is really system memory is found by its speed and refused. A CPU device's
//!   memory is system memory by nature: it is not looked at, and needs `--allow-cpu-device`.
//! - Once open, no Vulkan function is called until the memory is freed: no driver code runs on the I/O
//!   path.
//!
//! What it may not do: submit work to the GPU, or change its settings.
//!
//! Memory is exportable (OPAQUE_FD) where the driver can, so that it can outlive its maker.

mod inventory;
mod loader;
mod memory;
mod select;
mod speed;
#[cfg(test)]
mod tests;
mod types;

use std::sync::Arc;

pub use inventory::{Gpu, GpuKind, Residency, list};
pub use select::{AUTO, is_uuid};

use self::memory::Device;
use super::mapped::MappedQueue;
use super::{Backend, BackendQueue, ChunkMemory, QueueId};
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;
use crate::store::Layout;

/// What is left to others on a GPU, at least.
const LEAST_RESERVE: u64 = 1 << 30;
/// And this part of what the process may use.
const RESERVE_SHARE: u64 = 20;

/// The GPU that `name` means: an index in [`list`], a PCI address, a UUID, or [`AUTO`].
///
/// # Errors
/// There is no Vulkan, no such GPU, or it cannot be used.
pub fn find(name: &str, allow_cpu_device: bool) -> Result<Gpu> {
    let gpus = list()?;
    let chosen = select::select(&gpus, name, allow_cpu_device)?;
    let gpu = gpus.into_iter().nth(chosen);
    gpu.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("the GPU '{name}' is gone")))
}

/// Bytes a device may take from the GPU that `name` means: what is free of the memory that the CPU can
/// map, less a reserve for others. Some drivers give less: a card may run out of PCI aperture first.
///
/// # Errors
/// As for [`find`].
pub fn available(name: &str, allow_cpu_device: bool) -> Result<u64> {
    find(name, allow_cpu_device).map(|gpu| takeable(&gpu))
}

fn takeable(gpu: &Gpu) -> u64 {
    gpu.host_visible_free.saturating_sub(reserve(gpu))
}

/// Bytes left to others: a desktop, and the driver itself. A CPU device has no others.
fn reserve(gpu: &Gpu) -> u64 {
    match gpu.kind {
        GpuKind::Cpu => 0,
        _ => LEAST_RESERVE.max(gpu.host_visible_budget / RESERVE_SHARE),
    }
}

/// An opened GPU, of which one device will be made.
pub struct VulkanMemory {
    device: Arc<Device>,
}

impl VulkanMemory {
    /// Opens the GPU that `name` means and checks that `layout` fits it. Nothing is allocated.
    ///
    /// # Errors
    /// As for [`find`]; [`ErrorKind::Usage`] if its driver makes no such chunks,
    /// [`ErrorKind::NoSpace`] if there is less memory.
    pub fn create(name: &str, allow_cpu_device: bool, layout: &Layout) -> Result<VulkanMemory> {
        let device = Device::open(name, allow_cpu_device)?;
        memory::check(&device.gpu, layout)?;
        let most = takeable(&device.gpu);
        if layout.total_bytes() > most {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a device of {} needs {} of {}, and {} may be taken: make it smaller",
                    human(layout.device_bytes()),
                    human(layout.total_bytes()),
                    device.gpu.label(),
                    human(most)
                ),
            ));
        }
        Ok(VulkanMemory { device })
    }

    /// Allocates and maps the chunks. They are freed when the backend and all mappings are gone.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if the driver gives less, [`ErrorKind::Unsupported`] if what it gives is
    /// system memory, [`ErrorKind::Io`] if it fails.
    pub fn open(&self, layout: &Layout) -> Result<VulkanBackend> {
        let chunks = self.device.chunks(layout)?;
        let routines = CopyRoutines::best();
        if self.device.gpu.kind == GpuKind::Discrete {
            speed::check(&chunks, &routines, &self.device.gpu.label())?;
        }
        Ok(VulkanBackend {
            chunks,
            routines,
            device: Arc::clone(&self.device),
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.device.gpu
    }
}

/// The mapped chunks.
pub struct VulkanBackend {
    chunks: Vec<ChunkMemory>,
    routines: CopyRoutines,
    device: Arc<Device>,
}

impl Backend for VulkanBackend {
    fn kind(&self) -> &'static str {
        "vulkan"
    }

    fn gpu(&self) -> Option<String> {
        Some(self.device.gpu.label())
    }

    fn residency(&self) -> Option<&'static str> {
        Some(self.device.gpu.residency.as_str())
    }

    fn copy_path(&self) -> String {
        let kind = if self.device.gpu.kind == GpuKind::Cpu {
            "system memory of a CPU device"
        } else if self.device.memory_type.is_cached() {
            "cached"
        } else {
            "write-combined"
        };
        format!("{}, {kind}", self.routines.isa())
    }

    fn chunks(&self) -> &[ChunkMemory] {
        &self.chunks
    }

    fn open_queue(&self, _queue: QueueId, copies: usize) -> Result<Box<dyn BackendQueue>> {
        Ok(Box::new(MappedQueue::new(self.routines, copies)))
    }
}
