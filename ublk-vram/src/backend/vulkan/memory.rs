//! Allocations of a GPU's memory: the chunks of a device.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use ash::vk;

use super::device::Device;
use super::inventory::Gpu;
use super::loader::failed;
use super::types::MemoryType;
use crate::backend::{ChunkMemory, Mapping};
use crate::copy::LINE;
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;
use crate::store::Layout;

/// One allocation with the one buffer that covers it. Freed when this is dropped; freeing unmaps it.
pub(super) struct Allocation {
    pub(super) buffer: vk::Buffer,
    /// Where the shader finds it; 0 without device addresses.
    pub(super) address: u64,
    memory: vk::DeviceMemory,
    device: Arc<Device>,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.device.is_abandoned() {
            return;
        }
        // SAFETY: the handles are of this device and freed nowhere else; who used the mapping or sent
        // copies is gone. Null handles are ignored. Freeing memory that is mapped unmaps it (Vulkan,
        // vkFreeMemory), so a failed map needs no case.
        unsafe {
            self.device.api.destroy_buffer(self.buffer, None);
            self.device.api.free_memory(self.memory, None);
        }
    }
}

/// The memory of one chunk: what the store sees, and what the engines use.
pub(super) struct Chunk {
    pub(super) memory: ChunkMemory,
    pub(super) allocation: Arc<Allocation>,
}

/// Allocates every chunk of the layout: mapped for the CPU as far as the driver goes, and up to
/// `most_mapped` bytes, beyond that (if there are engines) for the GPU alone. On an error all are given back.
///
/// # Errors
/// Why a chunk cannot be had, and how much could.
pub(super) fn allocate(
    device: &Arc<Device>,
    layout: &Layout,
    most_mapped: u64,
) -> Result<Vec<Chunk>> {
    let mut mapped = device.types.mapped;
    let local = device.types.local.filter(|_| device.has_engines());
    let mut got = 0;
    let mut refused = None;
    let chunks = (0..layout.chunks())
        .map(|index| {
            let size = layout.chunk_bytes(index);
            if local.is_some() && got + size > most_mapped {
                mapped = None;
            }
            let mut outcome = match mapped {
                Some(kind) => Chunk::new(device, size, kind, true, Source::Storage),
                None => Err(Error::new(
                    ErrorKind::Unsupported,
                    format!("the CPU cannot map the memory of {}", device.gpu.label()),
                )),
            };
            if let (Err(error), Some(kind)) = (&outcome, local) {
                // The aperture is used up (or there is none): what follows is for the engines.
                if mapped.take().is_some() {
                    refused = Some((got, error.clone()));
                }
                outcome = Chunk::new(device, size, kind, false, Source::Storage);
            }
            let chunk = outcome.map_err(|error| {
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
            Ok(chunk)
        })
        .collect::<Result<Vec<_>>>()?;
    if let Some((mapped, error)) = refused {
        tracing::info!(
            "{} of {} are mapped for the CPU, the rest is left to the GPU's engines: {error}",
            human(mapped),
            human(layout.total_bytes())
        );
    }
    Ok(chunks)
}

/// Opens the chunks of the layout that another process has made and exported as `fds`. The first `mapped`
/// of them were mapped for the CPU there; here as many as the driver maps again, and the others are left to
/// the engines: a device can do without the one and not without a successor.
///
/// NVIDIA's driver (580) maps memory of the card only while more of it is free than is mapped in all
/// (docs/performance.md, "Memory that outlives its maker").
///
/// # Errors
/// If the driver does not take them: another GPU, another driver, another size.
pub(super) fn import(
    device: &Arc<Device>,
    layout: &Layout,
    mapped: u32,
    fds: Vec<OwnedFd>,
) -> Result<Vec<Chunk>> {
    let mut most_mapped = mapped;
    let chunks = (0..).zip(fds).map(|(index, fd)| {
        let size = layout.chunk_bytes(index);
        if index < most_mapped {
            let copy = fd
                .try_clone()
                .map_err(|error| Error::os("dup of a descriptor of GPU memory", error))?;
            match Chunk::import(device, size, device.types.mapped, true, copy) {
                Err(error) if device.has_engines() => {
                    most_mapped = index;
                    tracing::info!(
                        "{index} of the {mapped} chunks that were mapped for the CPU are mapped again, the \
                         others are left to the GPU's engines: {error}"
                    );
                }
                outcome => return outcome,
            }
        }
        Chunk::import(device, size, device.types.local, false, fd).map_err(|error| {
            let count = layout.chunks();
            Error::new(
                error.kind,
                format!("chunk {index} of {count}, which another process made, cannot be had: {error}"),
            )
        })
    });
    chunks.collect()
}

/// Maps a chunk of `size` bytes that this process has by another allocation already. The mapping owns its
/// own.
///
/// # Errors
/// As [`import`], and that the driver has no room.
pub(super) fn map_again(device: &Arc<Device>, size: u64, fd: OwnedFd) -> Result<Mapping> {
    let chunk = Chunk::import(device, size, device.types.mapped, true, fd)?;
    let mapping = chunk.memory.mapping().cloned();
    mapping.ok_or_else(|| Error::new(ErrorKind::Unsupported, "the chunk was not mapped"))
}

impl Chunk {
    /// Allocates `size` bytes of a type, and maps them if the CPU is to reach them.
    fn new(
        device: &Arc<Device>,
        size: u64,
        kind: MemoryType,
        is_mapped: bool,
        source: Source,
    ) -> Result<Chunk> {
        let allocation = Arc::new(Allocation::new(device, size, kind.index, source)?);
        let mapping = if is_mapped {
            Some(allocation.map(size)?)
        } else {
            None
        };
        Ok(Chunk {
            memory: ChunkMemory::new(size, mapping),
            allocation,
        })
    }
}

/// Where the memory of an allocation comes from.
pub(super) enum Source {
    /// Fresh, for the engine's own tables and for staging.
    Own,
    /// Fresh, for storage: exportable where the driver can.
    Storage,
    /// Another process's ([`Allocation::export`]).
    Import(OwnedFd),
    /// Memory of this process at this address, which must outlive the allocation.
    Host(NonNull<u8>),
}

impl Allocation {
    /// Allocates memory of type `kind` and binds a buffer of `size` bytes to it.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if there is no more of it.
    pub(super) fn new(
        device: &Arc<Device>,
        size: u64,
        kind: u32,
        source: Source,
    ) -> Result<Allocation> {
        use vk::ExternalMemoryHandleTypeFlags as Handles;
        let handles = match &source {
            Source::Storage if device.gpu.exportable => Handles::OPAQUE_FD,
            Source::Import(_) => Handles::OPAQUE_FD,
            Source::Host(_) => Handles::HOST_ALLOCATION_EXT,
            Source::Storage | Source::Own => Handles::empty(),
        };
        let (label, wanted) = (device.gpu.label(), human(size));
        let fail = |what: &str, result| {
            device.note(result);
            failed(format!("{label} {what} {wanted} of memory"), result)
        };
        // What is made from here on is freed by the drop, whatever fails.
        let mut allocation = Allocation {
            buffer: vk::Buffer::null(),
            address: 0,
            memory: vk::DeviceMemory::null(),
            device: Arc::clone(device),
        };
        let mut usage = vk::BufferUsageFlags::TRANSFER_SRC | vk::BufferUsageFlags::TRANSFER_DST;
        if device.can.address {
            usage |= vk::BufferUsageFlags::STORAGE_BUFFER
                | vk::BufferUsageFlags::INDIRECT_BUFFER
                | vk::BufferUsageFlags::SHADER_DEVICE_ADDRESS;
        }
        let mut create = vk::BufferCreateInfo::default().size(size).usage(usage);
        if device.families.len() > 1 {
            create = create
                .sharing_mode(vk::SharingMode::CONCURRENT)
                .queue_family_indices(&device.families);
        }
        let mut needs = vk::MemoryRequirements::default();
        for is_declared in [true, false] {
            let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(handles);
            let mut create = create;
            if is_declared && !handles.is_empty() {
                create = create.push_next(&mut external);
            }
            // SAFETY: the device is alive, and `create` with its chain outlives the call.
            let buffer = unsafe { device.api.create_buffer(&create, None) }
                .map_err(|result| fail("makes no buffer for", result))?;
            let before = std::mem::replace(&mut allocation.buffer, buffer);
            // SAFETY: both were made from this device; the earlier one was never bound. Null is ignored.
            needs = unsafe {
                device.api.destroy_buffer(before, None);
                device.api.get_buffer_memory_requirements(buffer)
            };
            // NVIDIA's driver (580) exports mapped memory of the card, and another process finds all of it
            // again, but it offers that memory only to buffers that do not declare it. The specification
            // wants the declaration (VUID-vkBindBufferMemory-memory-02726); what counts is that it was seen
            // to work, by `ublk-vram handover` and the conformance suite (docs/performance.md).
            if needs.memory_type_bits & 1 << kind != 0 {
                break;
            }
        }
        // Imported memory is exactly as large as it is.
        if (matches!(source, Source::Host(_)) && needs.size != size)
            || needs.memory_type_bits & 1 << kind == 0
            || needs.size > size.next_multiple_of(needs.alignment)
        {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{label} makes no buffer of {wanted} in memory of type {kind}"),
            ));
        }
        let mut flags = vk::MemoryAllocateFlagsInfo::default();
        let mut priority = vk::MemoryPriorityAllocateInfoEXT::default().priority(1.0);
        let mut export = vk::ExportMemoryAllocateInfo::default().handle_types(handles);
        let mut import = vk::ImportMemoryFdInfoKHR::default().handle_type(handles);
        let mut host = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(handles);
        let mut info = vk::MemoryAllocateInfo::default()
            .allocation_size(needs.size)
            .memory_type_index(kind);
        match &source {
            Source::Storage if !handles.is_empty() => info = info.push_next(&mut export),
            Source::Import(fd) => {
                import = import.fd(fd.as_raw_fd());
                info = info.push_next(&mut import);
            }
            Source::Host(address) => {
                host.p_host_pointer = address.as_ptr().cast();
                info = info.push_next(&mut host);
            }
            Source::Storage | Source::Own => {}
        }
        if device.can.address {
            flags = flags.flags(vk::MemoryAllocateFlags::DEVICE_ADDRESS);
            info = info.push_next(&mut flags);
        }
        if device.can.priority {
            info = info.push_next(&mut priority);
        }
        // SAFETY: the device is alive, and `info` with its chain outlives the call.
        allocation.memory = unsafe { device.api.allocate_memory(&info, None) }
            .map_err(|result| fail("gives no", result))?;
        if let Source::Import(fd) = source {
            // A driver that took it owns it (Vulkan, VkImportMemoryFdInfoKHR).
            let _ = fd.into_raw_fd();
        }
        // SAFETY: both were just made from this device, fit each other, and are bound to nothing.
        unsafe {
            device
                .api
                .bind_buffer_memory(allocation.buffer, allocation.memory, 0)
        }
        .map_err(|result| fail("cannot bind", result))?;
        if device.can.address {
            let info = vk::BufferDeviceAddressInfo::default().buffer(allocation.buffer);
            // SAFETY: the buffer is bound, and was made for this.
            allocation.address = unsafe { device.api.get_buffer_device_address(&info) };
        }
        Ok(allocation)
    }

    /// Whether an engine may still use it, whatever becomes of this process's handles.
    pub(super) fn is_abandoned(&self) -> bool {
        self.device.is_abandoned()
    }

    /// Maps `size` bytes for as long as the mapping lives. To be called once, on a host-visible type.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if the driver has no room to map it.
    pub(super) fn map(self: &Arc<Self>, size: u64) -> Result<Mapping> {
        let (label, wanted) = (self.device.gpu.label(), human(size));
        let range = (0, vk::WHOLE_SIZE, vk::MemoryMapFlags::empty());
        // SAFETY: the memory is host-visible, not mapped yet, and nobody else has its handle.
        let base = unsafe {
            self.device
                .api
                .map_memory(self.memory, range.0, range.1, range.2)
        }
        .map_err(|result| failed(format!("{wanted} of {label} cannot be mapped"), result))?;
        let base = NonNull::new(base.cast::<u8>())
            .filter(|base| base.as_ptr().addr().is_multiple_of(LINE));
        match (base, usize::try_from(size)) {
            (Some(base), Ok(len)) => {
                // SAFETY: the driver has mapped all of the allocation, which is at least so large, for
                // reading and writing; it stays mapped until the allocation is dropped.
                Ok(unsafe { Mapping::new(base, len, Arc::<Allocation>::clone(self)) })
            }
            _ => Err(Error::new(
                ErrorKind::Io,
                format!("the driver mapped {wanted} of {label} at an impossible address"),
            )),
        }
    }

    /// A descriptor that keeps the memory alive when this process is gone, and by which another one
    /// finds it again ([`import`]).
    ///
    /// # Errors
    /// If the driver makes none.
    pub(super) fn export(&self) -> Result<OwnedFd> {
        let label = self.device.gpu.label();
        let Some(descriptors) = &self.device.descriptors else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("the driver of {label} hands no memory to other processes"),
            ));
        };
        let info = vk::MemoryGetFdInfoKHR::default()
            .memory(self.memory)
            .handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
        // SAFETY: the memory was allocated to be exported so.
        let fd = unsafe { descriptors.get_memory_fd(&info) }.map_err(|result| {
            failed(
                format!("no descriptor of memory of {label} can be had"),
                result,
            )
        })?;
        // SAFETY: the driver has just made the descriptor for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Chunk {
    /// The chunk of `size` bytes that [`Allocation::export`] gave `fd` for, in this process or another.
    ///
    /// A chunk that was mapped and is not to be is imported as another type than it was made as. The
    /// specification wants the same (VUID-VkMemoryAllocateInfo-allocationSize-01742); it is done where the
    /// driver has refused that, on what was seen of NVIDIA's (`ublk-vram handover` reads every byte).
    ///
    /// # Errors
    /// If the driver does not take it: another GPU, another driver, another size.
    fn import(
        device: &Arc<Device>,
        size: u64,
        kind: Option<MemoryType>,
        is_mapped: bool,
        fd: OwnedFd,
    ) -> Result<Chunk> {
        let Some(kind) = kind.filter(|_| device.descriptors.is_some()) else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{} takes no memory of another process", device.gpu.label()),
            ));
        };
        Chunk::new(device, size, kind, is_mapped, Source::Import(fd))
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
