//! GPU memory through Vulkan: mapped for the CPU, moved by the GPU's engines, or both.
//!
//! Why Vulkan: it is the one interface that every maker's driver has, it needs nothing but the driver
//! to run, and it tells what memory there is before any is taken. Memory that is both device-local and
//! host-visible is the GPU's own memory in its PCI aperture (Resizable BAR); the driver maps it
//! write-combined, and the CPU's streaming copies are the fastest way to it for writes and for small
//! reads. Copy engines and, for deep queues, a compute shader are faster for the rest, and reach the
//! memory that the aperture does not show. `queue` asks the planner for each batch.
//!
//! What it promises:
//! - The GPU that the user names is used, or refused with the reason ([`list`] gives it beforehand).
//! - All memory is allocated before the device is shown, mapped as far as the driver maps it; what
//!   cannot be had in full is given back in full.
//! - On a card, memory that is really system memory is found by its speed and refused. A CPU device's
//!   memory is system memory by nature: it is not looked at, and needs `--allow-cpu-device`.
//! - A driver without timeline semaphores (before Vulkan 1.2) is used for its mapped memory alone.
//! - A lost GPU (VK_ERROR_DEVICE_LOST) is a state: every copy ends with EIO, nothing is retried.
//!
//! Memory is exportable (OPAQUE_FD) where the driver can, so that it can outlive its maker.

mod calibrate;
mod cold;
mod device;
mod engine;
mod host;
mod inventory;
mod loader;
mod memory;
mod queue;
mod select;
mod shown;
mod speed;
#[cfg(test)]
mod tests;
mod types;

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

pub use inventory::{Gpu, GpuKind, Residency, list};
pub use loader::keep_layers_out;
pub use select::{AUTO, is_uuid};

use self::device::Device;
use self::engine::{CopyLane, GatherLane, Pipeline, Waker};
use self::host::HostSide;
use self::memory::{Allocation, Chunk};
use self::queue::{BATCH_COPIES, Engines, Parts, VulkanQueue};
use super::host as system_memory;
use super::{Backend, BackendQueue, ChunkMemory, Direction, Mapping, PathQueue, QueueId};
use crate::copy::CopyRoutines;
use crate::copy::planner::{Cost, Costs, Path, Paths, Planner};
use crate::device::{CopyPath, PathsInfo, VulkanSpec};
use crate::error::{Error, ErrorKind, Result};
use crate::safety;
use crate::size::human;
use crate::store::Layout;

/// Command buffers of one queue thread for the copy engine: those in flight, one that waits for its
/// turn in the ring, and one that is recorded.
const COPY_SLOTS: usize = 5;
/// And for the shader, with one for a probe.
const GATHER_SLOTS: usize = 5;
/// What is left to others on a GPU, at least.
const LEAST_RESERVE: u64 = 1 << 30;
/// The same where a display is on it.
const DISPLAY_RESERVE: u64 = 2 << 30;
/// And this part of its memory.
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

/// Bytes a device may take from the GPU that `spec` names: what is free of the memory that can be
/// used, less a reserve for others.
///
/// # Errors
/// As for [`find`].
pub fn available(spec: &VulkanSpec) -> Result<u64> {
    bounded(&find(&spec.gpu, spec.allow_cpu_device)?, spec.reserve)
}

/// What is takeable; of a CPU device, as far as the system memory that its memory is goes.
fn bounded(gpu: &Gpu, reserve: Option<u64>) -> Result<u64> {
    let most = takeable(gpu, reserve);
    match gpu.residency {
        Residency::System => Ok(most.min(system_memory::available()?)),
        Residency::Pinned | Residency::Evictable => Ok(most),
    }
}

/// All of the GPU's memory if its engines can move it, else what the CPU can map.
fn takeable(gpu: &Gpu, reserve: Option<u64>) -> u64 {
    let free = match gpu.free {
        Some(free) if gpu.engines => free,
        _ => gpu.host_visible_free,
    };
    free.saturating_sub(reserve.unwrap_or_else(|| default_reserve(gpu)))
}

/// Bytes left to others: programs, a desktop, and the driver itself. A CPU device has no others.
fn default_reserve(gpu: &Gpu) -> u64 {
    let least = match gpu.kind {
        GpuKind::Cpu => return 0,
        _ if gpu.display => DISPLAY_RESERVE,
        _ => LEAST_RESERVE,
    };
    least.max(gpu.device_local / RESERVE_SHARE)
}

/// An opened GPU, of which one device will be made, or whose memory another process has handed over.
pub struct VulkanMemory {
    device: Arc<Device>,
    spec: VulkanSpec,
    /// What is to be mapped instead of fresh memory.
    imported: Mutex<Option<Kept>>,
    /// What [`VulkanMemory::export`] gives: it is there once the memory is.
    exported: Mutex<Option<Kept>>,
}

fn copies(fds: &[OwnedFd]) -> Result<Vec<OwnedFd>> {
    fds.iter()
        .map(|fd| {
            fd.try_clone()
                .map_err(|error| Error::os("dup of a descriptor of GPU memory", error))
        })
        .collect()
}

/// Memory of a GPU as one process hands it to another.
type Kept = (VulkanDescription, Vec<OwnedFd>);

/// How memory is found again by its descriptors, one (OPAQUE_FD) for each chunk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VulkanDescription {
    /// The GPU, by its UUID, and how to use it.
    pub spec: VulkanSpec,
    /// How many chunks.
    pub chunks: u32,
    /// So many of them, the first ones, are mapped for the CPU.
    pub mapped: u32,
    /// What was measured of the copy paths: measuring again would write to the memory.
    pub costs: Costs,
}

impl VulkanDescription {
    /// Those of `chunks` that were mapped where they were made and are not here, with their numbers.
    fn rest<'a>(
        &self,
        chunks: &'a [ChunkMemory],
    ) -> impl Iterator<Item = (usize, &'a ChunkMemory)> + use<'a> {
        let mapped = chunks.iter().enumerate().take(self.mapped as usize);
        mapped.filter(|(_, chunk)| chunk.mapping().is_none())
    }
}

impl VulkanMemory {
    /// Opens the GPU that `spec` names and checks that `layout` fits it. Nothing is allocated.
    ///
    /// # Errors
    /// As for [`find`]; [`ErrorKind::Usage`] if its driver makes no such chunks,
    /// [`ErrorKind::NoSpace`] if there is less memory.
    pub fn create(spec: &VulkanSpec, layout: &Layout) -> Result<VulkanMemory> {
        let device = Device::open(&spec.gpu, spec.allow_cpu_device)?;
        memory::check(&device.gpu, layout)?;
        if device.gpu.exportable {
            safety::check_open_files(layout.chunks())?;
        }
        let most = bounded(&device.gpu, spec.reserve)?;
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
        Ok(VulkanMemory::of(device, spec.clone(), None))
    }

    fn of(device: Arc<Device>, spec: VulkanSpec, imported: Option<Kept>) -> VulkanMemory {
        VulkanMemory {
            device,
            spec,
            imported: Mutex::new(imported),
            exported: Mutex::new(None),
        }
    }

    /// Memory that another process has exported; nothing is written to it.
    ///
    /// # Errors
    /// The GPU cannot be opened, or there are not as many descriptors as chunks.
    pub fn import(description: VulkanDescription, fds: Vec<OwnedFd>) -> Result<VulkanMemory> {
        if fds.len() != description.chunks as usize {
            return Err(Error::new(
                ErrorKind::Io,
                format!(
                    "{} descriptors came for {} chunks",
                    fds.len(),
                    description.chunks
                ),
            ));
        }
        let spec = description.spec.clone();
        let device = Device::open(&spec.gpu, spec.allow_cpu_device)?;
        Ok(VulkanMemory::of(device, spec, Some((description, fds))))
    }

    /// What another process needs to find this memory again, its contents untouched. The memory lives as
    /// long as these descriptors, whatever becomes of this process. To be asked for when the memory is there.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the driver hands no memory to other processes.
    pub fn export(&self) -> Result<super::Exported> {
        let exported = self.exported.lock().unwrap_or_else(PoisonError::into_inner);
        let (description, fds) = exported.as_ref().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the driver of {} hands no memory to other processes",
                    self.device.gpu.label()
                ),
            )
        })?;
        Ok(super::Exported {
            description: super::MemoryDescription::Vulkan(Box::new(description.clone())),
            fds: copies(fds)?,
        })
    }

    /// Allocates the chunks, maps those that can be, and measures the copy paths; of imported memory those
    /// are mapped that its maker has mapped, as far as the driver maps them twice. All is freed when the
    /// backend, all mappings and all descriptors are gone.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if the driver gives less, [`ErrorKind::Unsupported`] if what it gives is
    /// system memory, [`ErrorKind::Io`] if it fails.
    pub fn open(&self, layout: &Layout) -> Result<VulkanBackend> {
        let mut imported = self.imported.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((description, fds)) = imported.take() {
            // What the driver is given it keeps: copies go on to whoever asks this process.
            let kept = copies(&fds)?;
            let backend = self.open_imported(layout, &description, fds)?;
            let mut exported = self.exported.lock().unwrap_or_else(PoisonError::into_inner);
            *exported = Some((description, kept));
            return Ok(backend);
        }
        let most_mapped = self.spec.mapped.unwrap_or(u64::MAX);
        let chunks = memory::allocate(&self.device, layout, most_mapped)?;
        let mut backend = self.with_chunks(chunks)?;
        if self.device.gpu.kind == GpuKind::Discrete {
            let label = self.device.gpu.label();
            speed::check(&backend.chunks, &backend.routines, &label)?;
        }
        backend.calibrate()?;
        if self.device.gpu.exportable {
            let mut exported = self.exported.lock().unwrap_or_else(PoisonError::into_inner);
            *exported = Some(backend.export(&self.spec)?);
        }
        Ok(backend)
    }

    fn open_imported(
        &self,
        layout: &Layout,
        description: &VulkanDescription,
        fds: Vec<OwnedFd>,
    ) -> Result<VulkanBackend> {
        let (wanted, got) = (layout.chunks(), description.chunks);
        if wanted != got {
            return Err(Error::new(
                ErrorKind::Io,
                format!("{got} chunks were handed over, and the device has {wanted}"),
            ));
        }
        let chunks = memory::import(&self.device, layout, description.mapped, fds)?;
        let mut backend = self.with_chunks(chunks)?;
        backend.costs = description.costs;
        Ok(backend)
    }

    /// Bytes of the chunks that their maker had mapped and [`VulkanMemory::open`] could not.
    pub fn unmapped_rest(&self, chunks: &[ChunkMemory]) -> u64 {
        let exported = self.exported.lock().unwrap_or_else(PoisonError::into_inner);
        let made = exported.as_ref();
        made.map_or(0, |(made, _)| {
            made.rest(chunks).map(|(_, chunk)| chunk.size).sum()
        })
    }

    /// Maps those, in order and as far as the driver goes, or until `stop`: there may be room now that the
    /// maker is gone.
    pub fn map_rest<'a>(
        &self,
        chunks: &'a [ChunkMemory],
        stop: &AtomicBool,
    ) -> Vec<(&'a ChunkMemory, Mapping)> {
        // Each is one more allocation.
        let most = (self.device.gpu.max_allocations as usize).saturating_sub(chunks.len());
        let rest: Vec<_> = {
            let exported = self.exported.lock().unwrap_or_else(PoisonError::into_inner);
            let Some((made, fds)) = exported.as_ref() else {
                return Vec::new();
            };
            made.rest(chunks)
                .map_while(|(index, chunk)| Some((chunk, fds.get(index)?.try_clone().ok()?)))
                .take(most)
                .collect()
        };
        rest.into_iter()
            .take_while(|_| !stop.load(Ordering::Relaxed))
            .map_while(|(chunk, fd)| {
                let mapping = memory::map_again(&self.device, chunk.size, fd);
                let mapping =
                    mapping.inspect_err(|error| tracing::info!("the rest stays: {error}"));
                Some((chunk, mapping.ok()?))
            })
            .collect()
    }

    fn with_chunks(&self, chunks: Vec<Chunk>) -> Result<VulkanBackend> {
        let has_shader = self.device.can.address && !self.device.compute_queues.is_empty();
        // It is never the only way: a GPU that does not run it does without.
        let shader = has_shader.then(|| Pipeline::new(&self.device));
        let shader = shader.and_then(|made| {
            made.inspect_err(|error| tracing::warn!("{error}: copies go without it"))
                .ok()
                .map(Arc::new)
        });
        let (memory, allocations): (Vec<_>, Vec<_>) = chunks
            .into_iter()
            .map(|chunk| (chunk.memory, chunk.allocation))
            .unzip();
        Ok(VulkanBackend {
            shader,
            chunks: memory,
            allocations: allocations.into(),
            routines: CopyRoutines::best(),
            paths: match self.spec.copy_path {
                CopyPath::Auto => Paths::ALL,
                CopyPath::Bar => Paths::only(Path::Bar),
                CopyPath::Dma => Paths::only(Path::Dma),
                CopyPath::Gather => Paths::only(Path::Gather),
            },
            is_imported: true,
            costs: Costs::default(),
            epoch: Instant::now(),
            device: Arc::clone(&self.device),
        })
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.device.gpu
    }
}

/// The chunks, and the ways to them.
pub struct VulkanBackend {
    chunks: Vec<ChunkMemory>,
    allocations: Arc<[Arc<Allocation>]>,
    routines: CopyRoutines,
    /// What the user allows; memory that it does not reach takes what there is.
    paths: Paths,
    /// Whether to import I/O memory; tests turn it off to see staging.
    is_imported: bool,
    costs: Costs,
    /// `None` without a compute queue or device addresses.
    shader: Option<Arc<Pipeline>>,
    epoch: Instant,
    device: Arc<Device>,
}

impl VulkanBackend {
    /// Measures every path on the first chunk.
    fn calibrate(&mut self) -> Result<()> {
        let memory = Mapping::anonymous(calibrate::MEMORY_BYTES)?;
        let Some(chunk) = self.chunks.first() else {
            return Ok(());
        };
        // Any cost does while there is one path to take.
        let mut equal = Costs::default();
        let cost = Cost {
            start: 1.0,
            copy: 1.0,
            byte: 1.0,
        };
        for path in Path::ALL {
            equal.set(path, Direction::Read, Some(cost));
            equal.set(path, Direction::Write, Some(cost));
        }
        self.costs = calibrate::measure(0, chunk, &memory, |path| {
            let is_there = match path {
                Path::Bar => chunk.mapping().is_some(),
                Path::Dma => self.device.has_engines(),
                Path::Gather => self.device.has_engines() && self.shader.is_some(),
            };
            if !is_there {
                return Ok(None);
            }
            let (queue, copies) = (QueueId::control(0), 64);
            let only = Paths::only(path);
            self.queue(queue, copies, std::slice::from_ref(&memory), only, equal)
                .map(Some)
        })?;
        if self.costs.of(Path::Bar, Direction::Read).is_none()
            && self.chunks.iter().any(|chunk| chunk.mapping().is_some())
        {
            return Err(Error::new(
                ErrorKind::Io,
                "mapped chunks come after ones that are not",
            ));
        }
        Ok(())
    }

    fn queue(
        &self,
        queue: QueueId,
        copies: usize,
        memory: &[Mapping],
        paths: Paths,
        costs: Costs,
    ) -> Result<Box<dyn BackendQueue>> {
        let needs_engines = paths != Paths::only(Path::Bar)
            || self.chunks.iter().any(|chunk| chunk.mapping().is_none());
        let engines = if self.device.has_engines() && needs_engines {
            Some(self.engines(queue, copies, memory)?)
        } else {
            None
        };
        let now = self.epoch.elapsed().as_nanos() as f64;
        Ok(Box::new(VulkanQueue::new(Parts {
            device: Arc::clone(&self.device),
            engines,
            chunks: Arc::clone(&self.allocations),
            routines: self.routines,
            paths,
            planner: Planner::new(costs, now),
            epoch: self.epoch,
            copies,
        })))
    }

    fn engines(&self, queue: QueueId, copies: usize, memory: &[Mapping]) -> Result<Engines> {
        let device = &self.device;
        let nth = |queues: &[Arc<engine::EngineQueue>]| {
            let index = usize::from(queue.0).checked_rem(queues.len())?;
            queues.get(index).map(Arc::clone)
        };
        let missing = || {
            Error::new(
                ErrorKind::Unsupported,
                format!("{} has no copy engine", device.gpu.label()),
            )
        };
        let copy_queue = nth(&device.copy_queues).ok_or_else(missing)?;
        let host = memory
            .iter()
            .map(|memory| HostSide::new(device, memory, self.is_imported))
            .collect::<Result<Vec<_>>>()?;
        let gather = match (nth(&device.compute_queues), &self.shader) {
            (Some(queue), Some(shader)) => {
                let slots = copies.clamp(1, GATHER_SLOTS);
                Some(GatherLane::new(device, &queue, shader, slots)?)
            }
            _ => None,
        };
        Ok(Engines {
            copy: CopyLane::new(
                device,
                &copy_queue,
                copies.clamp(1, COPY_SLOTS),
                BATCH_COPIES,
            )?,
            gather,
            host,
            waker: Waker::new(device)?,
        })
    }

    fn export(&self, spec: &VulkanSpec) -> Result<Kept> {
        let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let mapped = self.chunks.iter().filter(|chunk| chunk.mapping().is_some());
        let description = VulkanDescription {
            // An index or `auto` may mean another GPU next time.
            spec: VulkanSpec {
                gpu: self.device.gpu.gpu_uuid(),
                ..spec.clone()
            },
            chunks: count(self.allocations.len()),
            mapped: count(mapped.count()),
            costs: self.costs,
        };
        let fds = self
            .allocations
            .iter()
            .map(|allocation| allocation.export())
            .collect::<Result<_>>()?;
        Ok((description, fds))
    }
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
        let is_cached = self
            .device
            .types
            .mapped
            .is_some_and(|memory| memory.is_cached());
        let kind = if self.device.gpu.kind == GpuKind::Cpu {
            "system memory of a CPU device"
        } else if is_cached {
            "cached"
        } else {
            "write-combined"
        };
        let mut text = format!("{}, {kind}", self.routines.isa());
        let unmapped = self.chunks.iter().filter(|chunk| chunk.mapping().is_none());
        let beyond: u64 = unmapped.map(|chunk| chunk.size).sum();
        if beyond > 0 {
            text.push_str(&format!("; {} by the GPU's engines alone", human(beyond)));
        }
        text
    }

    fn chunks(&self) -> &[ChunkMemory] {
        &self.chunks
    }

    fn open_queue(
        &self,
        queue: QueueId,
        copies: usize,
        memory: &[Mapping],
    ) -> Result<Box<dyn BackendQueue>> {
        self.queue(queue, copies, memory, self.paths, self.costs)
    }

    fn open_paths(&self, copies: usize, memory: &[Mapping]) -> Result<Vec<PathQueue>> {
        let all = Path::ALL.into_iter();
        all.filter(|path| self.costs.of(*path, Direction::Read).is_some())
            .map(|path| {
                let (queue, only) = (QueueId::control(0), Paths::only(path));
                let queue = self.queue(queue, copies, memory, only, self.costs)?;
                Ok((path.name(Direction::Read), queue))
            })
            .collect()
    }

    fn cold_files(&self) -> Vec<&'static str> {
        cold::files(&self.device)
    }

    fn paths(&self) -> Option<PathsInfo> {
        let has_engines = self.device.has_engines();
        has_engines.then(|| shown::paths(&self.costs, self.paths))
    }
}
