//! A logical device, and the allocations made from it.
//!
//! Who keeps whom alive: a chunk's mapping owns its [`Allocation`], that the [`Device`], that the
//! [`Instance`]. So memory is unmapped and freed before the device ends, the device before the
//! instance, in whatever order the holders let go.

use std::ffi::CStr;
use std::ptr::NonNull;
use std::sync::Arc;

use ash::{khr, vk};

use super::inventory::{Extensions, Gpu, GpuKind, inventory};
use super::loader::{Instance, failed};
use super::select::select;
use super::types::{Memory, MemoryType};
use crate::backend::{ChunkMemory, Mapping};
use crate::copy::LINE;
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;
use crate::store::Layout;

/// A GPU, opened.
pub(super) struct Device {
    pub(super) gpu: Gpu,
    pub(super) memory_type: MemoryType,
    api: ash::Device,
    _instance: Instance,
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: every allocation keeps the device alive, and nothing was ever submitted to its queue.
        unsafe { self.api.destroy_device(None) };
    }
}

impl Device {
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
        let Some(memory_type) = memory.mappable(gpu.kind == GpuKind::Discrete) else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the CPU cannot map the memory of {}", gpu.label()),
            ));
        };
        let api = logical_device(&instance, handle, &gpu)?;
        Ok(Arc::new(Device {
            gpu,
            memory_type,
            api,
            _instance: instance,
        }))
    }

    /// Allocates and maps every chunk of the layout. On an error all of them are given back.
    ///
    /// # Errors
    /// Why a chunk cannot be had, and how much could.
    pub(super) fn chunks(self: &Arc<Self>, layout: &Layout) -> Result<Vec<ChunkMemory>> {
        let mut got = 0;
        (0..layout.chunks())
            .map(|index| {
                let size = layout.chunk_bytes(index);
                let mapping = self.allocate(size).map_err(|error| {
                    Error::new(
                        error.kind,
                        format!(
                            "{error}; {} of the {} wanted were got and are given back: make the device \
                             smaller",
                            human(got),
                            human(layout.total_bytes())
                        ),
                    )
                })?;
                got += size;
                Ok(ChunkMemory { size, mapping })
            })
            .collect()
    }

    /// One allocation, mapped whole for as long as the mapping lives.
    fn allocate(self: &Arc<Self>, size: u64) -> Result<Mapping> {
        let (label, wanted) = (self.gpu.label(), human(size));
        let mut export = vk::ExportMemoryAllocateInfo::default()
            .handle_types(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
        let mut info = vk::MemoryAllocateInfo::default()
            .allocation_size(size)
            .memory_type_index(self.memory_type.index);
        if self.gpu.exportable {
            info = info.push_next(&mut export);
        }
        // SAFETY: the device is alive, and `info` with its chain outlives the call.
        let memory = unsafe { self.api.allocate_memory(&info, None) }
            .map_err(|result| failed(format!("{label} gives no {wanted} of memory"), result))?;
        let allocation = Allocation {
            memory,
            device: Arc::clone(self),
        };
        let range = (0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty());
        // SAFETY: the memory is host-visible, not mapped yet, and nobody else has its handle.
        let base = unsafe { self.api.map_memory(memory, range.0, range.1, range.2) }
            .map_err(|result| failed(format!("{wanted} of {label} cannot be mapped"), result))?;
        let base = NonNull::new(base.cast::<u8>())
            .filter(|base| base.as_ptr().addr().is_multiple_of(LINE));
        match (base, usize::try_from(size)) {
            // SAFETY: the driver has mapped all of the allocation, whose size this is, for reading and
            // writing; it stays mapped until the allocation is dropped.
            (Some(base), Ok(len)) => Ok(unsafe { Mapping::new(base, len, Arc::new(allocation)) }),
            _ => Err(Error::new(
                ErrorKind::Io,
                format!("the driver mapped {wanted} of {label} at an impossible address"),
            )),
        }
    }
}

/// Refuses a layout whose chunks the GPU's driver would not make, before anything is allocated.
///
/// # Errors
/// [`ErrorKind::Usage`] with the chunk size that would do.
pub(super) fn check(gpu: &Gpu, layout: &Layout) -> Result<()> {
    let (label, largest) = (gpu.label(), gpu.max_allocation);
    let chunk = layout.chunk_bytes(0);
    if chunk > largest {
        let fits = 1u64 << largest.max(1).ilog2();
        return Err(Error::usage(format!(
            "a chunk of {} is more than {label} allocates at once ({largest} bytes): use a smaller \
             --chunk, {} or less",
            human(chunk),
            human(fits)
        )));
    }
    if layout.chunks() > gpu.max_allocations {
        return Err(Error::usage(format!(
            "{} chunks are more than the {} allocations that {label} keeps at once: use a larger \
             --chunk",
            layout.chunks(),
            gpu.max_allocations
        )));
    }
    Ok(())
}

/// Memory of the GPU. Freed when this is dropped; freeing unmaps it first.
struct Allocation {
    memory: vk::DeviceMemory,
    device: Arc<Device>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the handle is of this device and freed nowhere else; who used the mapping is gone.
        // Freeing memory that is mapped unmaps it (Vulkan, vkFreeMemory), so a failed map needs no case.
        unsafe { self.device.api.free_memory(self.memory, None) };
    }
}

/// Vulkan makes no device without a queue; the transfer-only one, where there is one, costs least.
fn logical_device(
    instance: &Instance,
    device: vk::PhysicalDevice,
    gpu: &Gpu,
) -> Result<ash::Device> {
    // SAFETY: the handle is of this instance.
    let families = unsafe {
        instance
            .api
            .get_physical_device_queue_family_properties(device)
    };
    let heavy = vk::QueueFlags::GRAPHICS | vk::QueueFlags::COMPUTE;
    let light = families.iter().position(|family| {
        let flags = family.queue_flags;
        family.queue_count > 0
            && flags.contains(vk::QueueFlags::TRANSFER)
            && !flags.intersects(heavy)
    });
    let any = || families.iter().position(|family| family.queue_count > 0);
    let family = light
        .or_else(any)
        .and_then(|index| u32::try_from(index).ok());
    let Some(family) = family else {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("the driver of {} has no queue at all", gpu.label()),
        ));
    };
    let queues = [vk::DeviceQueueCreateInfo::default()
        .queue_family_index(family)
        .queue_priorities(&[1.0])];
    let extensions = Extensions::of(instance, device)?;
    let names: Vec<*const std::ffi::c_char> = [khr::external_memory_fd::NAME]
        .into_iter()
        .filter(|name| gpu.exportable && extensions.has(name))
        .map(CStr::as_ptr)
        .collect();
    let info = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queues)
        .enabled_extension_names(&names);
    // SAFETY: the handle is of this instance; `info` and what it points to outlive the call.
    unsafe { instance.api.create_device(device, &info, None) }
        .map_err(|result| failed(format!("cannot open {}", gpu.label()), result))
}
