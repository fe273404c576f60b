//! A GPU, opened: its logical device, what its driver can do, and its queues.
//!
//! Who keeps whom alive: a chunk's mapping owns its allocation, that the [`Device`], that the
//! [`Instance`]. So memory is unmapped and freed before the device ends, the device before the
//! instance, in whatever order the holders let go.

use std::ffi::{CStr, c_char};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ash::{ext, khr, vk};

use super::engine::EngineQueue;
use super::inventory::{Extensions, Gpu, GpuKind, inventory};
use super::loader::{Instance, failed};
use super::select::select;
use super::types::{Memory, MemoryType};
use crate::error::{Error, ErrorKind, Result};

/// More copy queues than this make nothing faster: the engines behind them are fewer (two on an H200).
const COPY_QUEUES: u32 = 4;
/// Several compute queues are several contexts, between which the GPU switches: on an H200 eight
/// threads gather twice as many pages through one queue as through four.
const COMPUTE_QUEUES: u32 = 1;

/// A GPU, opened.
pub(super) struct Device {
    pub(super) gpu: Gpu,
    pub(super) api: ash::Device,
    pub(super) types: Types,
    pub(super) can: Abilities,
    /// Where copy commands go; empty if the driver lacks what they need.
    pub(super) copy_queues: Vec<Arc<EngineQueue>>,
    /// Where the shader goes; empty as above.
    pub(super) compute_queues: Vec<Arc<EngineQueue>>,
    /// The families of both, each once: who may touch a buffer.
    pub(super) families: Vec<u32>,
    pub(super) import: Option<ext::external_memory_host::Device>,
    pub(super) descriptors: Option<khr::external_memory_fd::Device>,
    lost: AtomicBool,
    abandoned: AtomicBool,
    _instance: Instance,
}

/// The memory types that chunks and buffers are made of.
#[derive(Clone)]
pub(super) struct Types {
    /// The GPU's own memory, mapped for the CPU; `None` without a BAR that shows it.
    pub(super) mapped: Option<MemoryType>,
    /// The GPU's own memory, for its engines alone.
    pub(super) local: Option<MemoryType>,
    /// System memory, coherent and cached where there is such a type.
    pub(super) system: Option<MemoryType>,
}

/// What the driver can do beyond mapping memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Abilities {
    /// Timeline semaphores: without them no engine is used.
    pub(super) timeline: bool,
    /// Buffer device addresses: without them there is no shader path.
    pub(super) address: bool,
    /// Host memory can be imported, at multiples of this.
    pub(super) import_alignment: Option<u64>,
    /// VK_EXT_memory_priority.
    pub(super) priority: bool,
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: every object made from the device keeps it alive, and each ends its own work first.
        unsafe { self.api.destroy_device(None) };
    }
}

impl Device {
    /// Whether its engines reach memory that the CPU does not map.
    pub(super) fn has_engines(&self) -> bool {
        self.can.timeline && !self.copy_queues.is_empty()
    }

    /// Opens the GPU that `name` means.
    ///
    /// # Errors
    /// There is no Vulkan, no such GPU, it cannot be used, or its driver fails.
    pub(super) fn open(name: &str, allow_cpu_device: bool) -> Result<Arc<Device>> {
        let instance = Instance::new()?;
        let (gpus, handles): (Vec<_>, Vec<_>) = inventory(&instance)?.into_iter().unzip();
        let chosen = select(&gpus, name, allow_cpu_device)?;
        let found = gpus.into_iter().zip(handles).nth(chosen);
        let Some((gpu, handle)) = found else {
            return Err(Error::new(ErrorKind::NotFound, "the GPU is gone"));
        };
        let memory = Memory::of(&instance, handle, false);
        let types = Types {
            mapped: memory.mappable(gpu.kind == GpuKind::Discrete),
            local: memory.local_only(),
            system: memory.system(),
        };
        let extensions = Extensions::of(&instance, handle)?;
        let can = Abilities::of(&instance, handle, &extensions);
        let plan = QueuePlan::of(&instance, handle, can.timeline, &gpu)?;
        let api = create(&instance, handle, &gpu, &extensions, &can, &plan)?;
        let engine = |&(family, index): &(u32, u32)| {
            // SAFETY: `create` has asked for this queue of this family.
            let queue = unsafe { api.get_device_queue(family, index) };
            Arc::new(EngineQueue::new(queue, family))
        };
        let copy_queues: Vec<_> = plan.copy.iter().map(engine).collect();
        // A queue that serves both has one owner, so it is one engine.
        let compute_queues = plan
            .compute
            .iter()
            .map(|at| match plan.copy.iter().position(|copy| copy == at) {
                Some(same) => copy_queues.get(same).map_or_else(|| engine(at), Arc::clone),
                None => engine(at),
            })
            .collect();
        Ok(Arc::new(Device {
            import: can
                .import_alignment
                .map(|_| ext::external_memory_host::Device::new(&instance.api, &api)),
            descriptors: gpu
                .exportable
                .then(|| khr::external_memory_fd::Device::new(&instance.api, &api)),
            families: plan.families(),
            gpu,
            api,
            types,
            can,
            copy_queues,
            compute_queues,
            lost: AtomicBool::new(false),
            abandoned: AtomicBool::new(false),
            _instance: instance,
        }))
    }

    /// Whether the GPU was lost (VK_ERROR_DEVICE_LOST): nothing is asked of it any more.
    pub(super) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Keeps everything for ever: an engine has not ended its work in time, and may still use it.
    pub(super) fn abandon(self: &Arc<Self>) {
        self.abandoned.store(true, Ordering::Relaxed);
        std::mem::forget(Arc::clone(self));
    }

    /// Whether nothing of this device may be freed any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::Relaxed)
    }

    /// Takes note of a failed call: a lost GPU stays lost.
    pub(super) fn note(&self, result: vk::Result) {
        if result == vk::Result::ERROR_DEVICE_LOST {
            self.lost.store(true, Ordering::Relaxed);
        }
    }
}

impl Abilities {
    pub(super) fn of(
        instance: &Instance,
        device: vk::PhysicalDevice,
        extensions: &Extensions,
    ) -> Abilities {
        // SAFETY: the handle is of this instance.
        let version = unsafe { instance.api.get_physical_device_properties(device) }.api_version;
        let is_new = version >= vk::API_VERSION_1_2;
        let mut new = vk::PhysicalDeviceVulkan12Features::default();
        let mut features = vk::PhysicalDeviceFeatures2::default();
        if is_new {
            features = features.push_next(&mut new);
        }
        let has_import = extensions.has(ext::external_memory_host::NAME);
        let mut import = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceProperties2::default();
        if has_import {
            properties = properties.push_next(&mut import);
        }
        // SAFETY: the handle is of this instance, and the driver knows every structure in the chains.
        unsafe {
            instance
                .api
                .get_physical_device_features2(device, &mut features);
            instance
                .api
                .get_physical_device_properties2(device, &mut properties);
        }
        Abilities {
            timeline: new.timeline_semaphore == vk::TRUE,
            address: new.buffer_device_address == vk::TRUE,
            import_alignment: has_import
                .then_some(import.min_imported_host_pointer_alignment)
                .filter(|alignment| *alignment > 0),
            priority: extensions.has(ext::memory_priority::NAME),
        }
    }
}

/// Which queues are made: pairs of family and index.
struct QueuePlan {
    copy: Vec<(u32, u32)>,
    compute: Vec<(u32, u32)>,
}

impl QueuePlan {
    /// A family for copies alone where there is one: its engine works beside whatever computes or
    /// draws. For the shader, one that does not draw.
    fn of(
        instance: &Instance,
        device: vk::PhysicalDevice,
        wanted: bool,
        gpu: &Gpu,
    ) -> Result<QueuePlan> {
        use vk::QueueFlags as Flags;
        // SAFETY: the handle is of this instance.
        let families = unsafe {
            instance
                .api
                .get_physical_device_queue_family_properties(device)
        };
        let video = Flags::VIDEO_DECODE_KHR | Flags::VIDEO_ENCODE_KHR;
        let first = |wanted: Flags, unwanted: Flags, most: u32| {
            families
                .iter()
                .zip(0u32..)
                .find(|(family, _)| {
                    let flags = family.queue_flags;
                    family.queue_count > 0
                        && flags.contains(wanted)
                        && !flags.intersects(unwanted | video)
                })
                .map(|(family, index)| (index, family.queue_count.min(most)))
        };
        let compute = first(Flags::COMPUTE, Flags::GRAPHICS, COMPUTE_QUEUES)
            .or_else(|| first(Flags::COMPUTE, Flags::empty(), COMPUTE_QUEUES));
        let copy = first(
            Flags::TRANSFER,
            Flags::COMPUTE | Flags::GRAPHICS,
            COPY_QUEUES,
        )
        .or(compute)
        .or_else(|| first(Flags::GRAPHICS, Flags::empty(), 1));
        let all = |found: Option<(u32, u32)>| -> Vec<(u32, u32)> {
            found.map_or_else(Vec::new, |(family, count)| {
                (0..count).map(|index| (family, index)).collect()
            })
        };
        if !wanted {
            // Vulkan makes no device without a queue, used or not.
            let least = copy.or_else(|| first(Flags::empty(), Flags::empty(), 1));
            let Some((family, _)) = least else {
                return Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("the driver of {} has no queue at all", gpu.label()),
                ));
            };
            return Ok(QueuePlan {
                copy: vec![(family, 0)],
                compute: Vec::new(),
            });
        }
        Ok(QueuePlan {
            copy: all(copy),
            compute: all(compute),
        })
    }

    fn families(&self) -> Vec<u32> {
        let mut families: Vec<u32> = self.queues().iter().map(|(family, _)| *family).collect();
        families.dedup();
        families
    }

    /// Every queue once, in order.
    fn queues(&self) -> Vec<(u32, u32)> {
        let mut queues = [self.copy.as_slice(), self.compute.as_slice()].concat();
        queues.sort_unstable();
        queues.dedup();
        queues
    }
}

fn create(
    instance: &Instance,
    device: vk::PhysicalDevice,
    gpu: &Gpu,
    extensions: &Extensions,
    can: &Abilities,
    plan: &QueuePlan,
) -> Result<ash::Device> {
    let queues = plan.queues();
    let priorities = vec![1.0f32; queues.len()];
    let infos: Vec<vk::DeviceQueueCreateInfo<'_>> = plan
        .families()
        .iter()
        .map(|&family| {
            let count = queues.iter().filter(|queue| queue.0 == family).count();
            vk::DeviceQueueCreateInfo::default()
                .queue_family_index(family)
                .queue_priorities(priorities.get(..count).unwrap_or(&priorities))
        })
        .collect();
    let names: Vec<*const c_char> = [
        (gpu.exportable, khr::external_memory_fd::NAME),
        (
            can.import_alignment.is_some(),
            ext::external_memory_host::NAME,
        ),
        (can.priority, ext::memory_priority::NAME),
    ]
    .into_iter()
    .filter(|(wanted, name)| *wanted && extensions.has(name))
    .map(|(_, name)| CStr::as_ptr(name))
    .collect();
    let mut new = vk::PhysicalDeviceVulkan12Features::default()
        .timeline_semaphore(can.timeline)
        .buffer_device_address(can.address);
    let mut priority =
        vk::PhysicalDeviceMemoryPriorityFeaturesEXT::default().memory_priority(can.priority);
    let mut info = vk::DeviceCreateInfo::default()
        .queue_create_infos(&infos)
        .enabled_extension_names(&names);
    if can.timeline || can.address {
        info = info.push_next(&mut new);
    }
    if can.priority {
        info = info.push_next(&mut priority);
    }
    // SAFETY: the handle is of this instance; `info` and what it points to outlive the call.
    unsafe { instance.api.create_device(device, &info, None) }
        .map_err(|result| failed(format!("cannot open {}", gpu.label()), result))
}
