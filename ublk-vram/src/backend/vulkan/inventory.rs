//! Which GPUs Vulkan knows, what they have, and which of them a name means.

use std::fmt;

use ash::{ext, khr, vk};
use serde::Serialize;

use super::device::Abilities;
use super::loader::{Instance, failed};
use super::types;
use crate::backend::pci::PciAddress;
use crate::error::{Error, ErrorKind, Result};

/// What sort of device it is (VkPhysicalDeviceType).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuKind {
    /// A card with memory of its own.
    Discrete,
    /// Part of the processor: its memory is system memory, or a part set aside of it.
    Integrated,
    /// A GPU as a virtual machine sees it.
    Virtual,
    /// Software on the CPU: its memory is system memory.
    Cpu,
    /// Anything else.
    Other,
}

impl From<vk::PhysicalDeviceType> for GpuKind {
    fn from(kind: vk::PhysicalDeviceType) -> GpuKind {
        match kind {
            vk::PhysicalDeviceType::DISCRETE_GPU => GpuKind::Discrete,
            vk::PhysicalDeviceType::INTEGRATED_GPU => GpuKind::Integrated,
            vk::PhysicalDeviceType::VIRTUAL_GPU => GpuKind::Virtual,
            vk::PhysicalDeviceType::CPU => GpuKind::Cpu,
            _ => GpuKind::Other,
        }
    }
}

/// Whether the driver leaves memory where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Residency {
    /// It stays in the GPU (NVIDIA's driver moves nothing that is mapped for the CPU).
    Pinned,
    /// Under pressure, and when the machine sleeps, the driver moves it to system memory, and takes
    /// memory to do so: not for swap (amdgpu and xe, amdgpu_evict_flags in amdgpu_ttm.c).
    Evictable,
    /// It is system memory already.
    System,
}

impl Residency {
    pub(super) fn of(kind: GpuKind, driver: vk::DriverId) -> Residency {
        match (kind, driver) {
            (GpuKind::Cpu, _) => Residency::System,
            (_, vk::DriverId::NVIDIA_PROPRIETARY) => Residency::Pinned,
            _ => Residency::Evictable,
        }
    }

    /// Its word in `gpus` and in what a server tells of its device.
    pub fn as_str(self) -> &'static str {
        match self {
            Residency::Pinned => "pinned",
            Residency::Evictable => "evictable",
            Residency::System => "system",
        }
    }
}

impl fmt::Display for Residency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// One GPU as one Vulkan driver shows it. Sizes are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Gpu {
    /// Its name, by the driver.
    pub name: String,
    /// Where it is; unknown without VK_EXT_pci_bus_info.
    pub address: Option<PciAddress>,
    /// deviceUUID in groups (RFC 9562 text form); the same in every API of the driver.
    pub uuid: String,
    /// PCI vendor.
    pub vendor: u32,
    /// PCI device.
    pub device: u32,
    /// The driver.
    pub driver: String,
    /// Its version, as its maker writes it.
    pub driver_version: String,
    /// What sort of device.
    pub kind: GpuKind,
    /// Memory of the GPU: all its device-local heaps.
    pub device_local: u64,
    /// Of it, what nobody uses now; unknown without VK_EXT_memory_budget.
    pub free: Option<u64>,
    /// The heap of the memory that the CPU can map; 0 if there is none.
    pub host_visible: u64,
    /// Of that heap, what this process may use in all, by the driver's estimate; without an estimate
    /// the whole heap.
    pub host_visible_budget: u64,
    /// Of that, what is not yet used.
    pub host_visible_free: u64,
    /// The largest single allocation.
    pub max_allocation: u64,
    /// The most allocations at once.
    pub max_allocations: u32,
    /// Whether memory can be handed to another process (OPAQUE_FD).
    pub exportable: bool,
    /// Whether its engines can move memory that the CPU does not map (Vulkan 1.2, timeline semaphores).
    pub engines: bool,
    /// Whether a display is on it.
    pub display: bool,
    /// Whether memory stays where it is.
    pub residency: Residency,
    /// Why it cannot be used; `None` if it can.
    pub reason: Option<String>,
}

impl Gpu {
    /// `GPU-UUID`, as NVIDIA's tools write it.
    pub fn gpu_uuid(&self) -> String {
        format!("GPU-{}", self.uuid)
    }

    /// Its PCI address, else its name.
    pub fn label(&self) -> String {
        self.address
            .map_or_else(|| self.name.clone(), |address| address.to_string())
    }

    /// # Errors
    /// [`ErrorKind::Unsupported`] with the reason why no device can be made of it.
    pub fn usable(&self, allow_cpu_device: bool) -> Result<()> {
        if let Some(reason) = &self.reason {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{} cannot be used: {reason}", self.label()),
            ));
        }
        if self.kind == GpuKind::Cpu && !allow_cpu_device {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "{} is software on the CPU and its memory is system memory: name it by --gpu and \
                     say --allow-cpu-device to use it for tests",
                    self.label()
                ),
            ));
        }
        Ok(())
    }
}

/// The GPUs that Vulkan knows, in the order of the bus, those without an address last.
///
/// # Errors
/// There is no Vulkan here, or it fails.
pub fn list() -> Result<Vec<Gpu>> {
    let found = inventory(&Instance::new()?)?;
    Ok(found.into_iter().map(|(gpu, _)| gpu).collect())
}

/// [`list`], with the handles.
pub(super) fn inventory(instance: &Instance) -> Result<Vec<(Gpu, vk::PhysicalDevice)>> {
    // SAFETY: the instance is alive.
    let devices = unsafe { instance.api.enumerate_physical_devices() }
        .map_err(|result| failed("cannot list the GPUs that Vulkan knows", result))?;
    let mut found = devices
        .into_iter()
        .map(|device| Ok((describe(instance, device)?, device)))
        .collect::<Result<Vec<_>>>()?;
    // The sort is stable: the driver's order decides among those without an address.
    found.sort_by_key(|(gpu, _)| (gpu.address.is_none(), gpu.address));
    Ok(found)
}

/// The extensions of a device.
pub(super) struct Extensions(Vec<vk::ExtensionProperties>);

impl Extensions {
    pub(super) fn of(instance: &Instance, device: vk::PhysicalDevice) -> Result<Extensions> {
        // SAFETY: the handle is of this instance.
        unsafe { instance.api.enumerate_device_extension_properties(device) }
            .map(Extensions)
            .map_err(|result| failed("cannot list the extensions of a GPU's driver", result))
    }

    pub(super) fn has(&self, name: &std::ffi::CStr) -> bool {
        let mut names = self.0.iter();
        names.any(|extension| extension.extension_name_as_c_str() == Ok(name))
    }
}

fn describe(instance: &Instance, device: vk::PhysicalDevice) -> Result<Gpu> {
    // SAFETY: the handle is of this instance.
    let basic = unsafe { instance.api.get_physical_device_properties(device) };
    if basic.api_version < vk::API_VERSION_1_1 {
        return Ok(too_old(&basic));
    }
    let extensions = Extensions::of(instance, device)?;
    let has_driver =
        basic.api_version >= vk::API_VERSION_1_2 || extensions.has(khr::driver_properties::NAME);
    let has_bus = extensions.has(ext::pci_bus_info::NAME);

    let mut identity = vk::PhysicalDeviceIDProperties::default();
    let mut limits = vk::PhysicalDeviceMaintenance3Properties::default();
    let mut driver = vk::PhysicalDeviceDriverProperties::default();
    let mut bus = vk::PhysicalDevicePCIBusInfoPropertiesEXT::default();
    let mut properties = vk::PhysicalDeviceProperties2::default()
        .push_next(&mut identity)
        .push_next(&mut limits);
    if has_driver {
        properties = properties.push_next(&mut driver);
    }
    if has_bus {
        properties = properties.push_next(&mut bus);
    }
    // SAFETY: the handle is of this instance, and the driver knows every structure in the chain.
    unsafe {
        instance
            .api
            .get_physical_device_properties2(device, &mut properties);
    }
    let basic = properties.properties;

    let kind = GpuKind::from(basic.device_type);
    let memory = types::Memory::of(instance, device, extensions.has(ext::memory_budget::NAME));
    let mappable = memory.mappable(kind == GpuKind::Discrete);
    let heap = mappable.and_then(|chosen| memory.heap(chosen.heap));
    let address = has_bus.then(|| address(&bus)).flatten();
    let engines = Abilities::of(instance, device, &extensions).timeline;
    Ok(Gpu {
        name: text(basic.device_name_as_c_str()),
        address,
        uuid: groups(&identity.device_uuid),
        vendor: basic.vendor_id,
        device: basic.device_id,
        driver: text(driver.driver_name_as_c_str()),
        driver_version: Some(text(driver.driver_info_as_c_str()))
            .filter(|text| !text.is_empty())
            .unwrap_or_else(|| version(basic.driver_version)),
        kind,
        device_local: memory.device_local(),
        free: memory.device_local_free(),
        host_visible: heap.map_or(0, |heap| heap.size),
        host_visible_budget: heap.map_or(0, |heap| heap.budget()),
        host_visible_free: heap.map_or(0, |heap| heap.free()),
        max_allocation: limits.max_memory_allocation_size,
        max_allocations: basic.limits.max_memory_allocation_count,
        exportable: is_exportable(instance, device, &extensions),
        engines,
        display: address.is_some_and(has_display),
        residency: Residency::of(kind, driver.driver_id),
        reason: (mappable.is_none() && !engines).then(|| {
            "the CPU cannot map its memory (is Resizable BAR off in the firmware?), and its driver has \
             no timeline semaphores to move it by the GPU's engines"
                .to_owned()
        }),
    })
}

/// What is known of a device whose driver has Vulkan 1.0 only.
fn too_old(basic: &vk::PhysicalDeviceProperties) -> Gpu {
    let kind = GpuKind::from(basic.device_type);
    Gpu {
        name: text(basic.device_name_as_c_str()),
        address: None,
        uuid: groups(&[0; 16]),
        vendor: basic.vendor_id,
        device: basic.device_id,
        driver: String::new(),
        driver_version: version(basic.driver_version),
        kind,
        device_local: 0,
        free: None,
        host_visible: 0,
        host_visible_budget: 0,
        host_visible_free: 0,
        max_allocation: 0,
        max_allocations: 0,
        exportable: false,
        engines: false,
        display: false,
        residency: Residency::of(kind, vk::DriverId::default()),
        reason: Some("its driver has Vulkan 1.0 and 1.1 is needed".to_owned()),
    }
}

/// Whether memory that is not made for one buffer alone can be exported as an OPAQUE_FD.
fn is_exportable(instance: &Instance, device: vk::PhysicalDevice, extensions: &Extensions) -> bool {
    if !extensions.has(khr::external_memory_fd::NAME) {
        return false;
    }
    let buffer = vk::PhysicalDeviceExternalBufferInfo::default()
        .usage(vk::BufferUsageFlags::TRANSFER_SRC | vk::BufferUsageFlags::TRANSFER_DST)
        .handle_type(vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD);
    let mut answer = vk::ExternalBufferProperties::default();
    // SAFETY: the handle is of this instance, both structures outlive the call.
    unsafe {
        instance
            .api
            .get_physical_device_external_buffer_properties(device, &buffer, &mut answer);
    }
    let features = answer.external_memory_properties.external_memory_features;
    features.contains(vk::ExternalMemoryFeatureFlags::EXPORTABLE)
        && !features.contains(vk::ExternalMemoryFeatureFlags::DEDICATED_ONLY)
}

/// Whether a display is connected to the GPU at `address`, by the connectors of its DRM driver, or it
/// is the one that the firmware boots with.
fn has_display(address: PciAddress) -> bool {
    let function = format!("/sys/bus/pci/devices/{address}");
    let says = |path: &std::path::Path, word: &str| {
        std::fs::read_to_string(path).is_ok_and(|text| text.trim() == word)
    };
    let folders = |path: &std::path::Path| {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect::<Vec<_>>()
    };
    let function = std::path::Path::new(&function);
    says(&function.join("boot_vga"), "1")
        || folders(&function.join("drm")).iter().any(|card| {
            let connectors = folders(card);
            let mut status = connectors.iter().map(|each| each.join("status"));
            status.any(|status| says(&status, "connected"))
        })
}

fn address(bus: &vk::PhysicalDevicePCIBusInfoPropertiesEXT<'_>) -> Option<PciAddress> {
    format!(
        "{:04x}:{:02x}:{:02x}.{:x}",
        bus.pci_domain, bus.pci_bus, bus.pci_device, bus.pci_function
    )
    .parse()
    .ok()
}

fn text<E>(text: std::result::Result<&std::ffi::CStr, E>) -> String {
    text.map_or_else(
        |_| String::new(),
        |text| text.to_string_lossy().into_owned(),
    )
}

/// driverVersion by Vulkan's own packing, for drivers that do not write it out.
fn version(packed: u32) -> String {
    format!(
        "{}.{}.{}",
        vk::api_version_major(packed),
        vk::api_version_minor(packed),
        vk::api_version_patch(packed)
    )
}

/// Sixteen bytes as hexadecimal groups (RFC 9562, section 4).
fn groups(uuid: &[u8; 16]) -> String {
    let mut text = String::with_capacity(36);
    for (index, byte) in uuid.iter().enumerate() {
        if matches!(index, 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}
