//! The I/O memory as the engines see it.

use std::ptr::NonNull;
use std::sync::Arc;

use ash::vk;

use super::device::Device;
use super::loader::failed;
use super::memory::{Allocation, Source};
use crate::backend::Mapping;
use crate::error::{Error, ErrorKind, Result};

/// The I/O memory of a queue, for the engines: itself, imported (VK_EXT_external_memory_host), or where
/// the driver cannot do that, a copy of it in memory of the driver's own.
pub(super) struct HostSide {
    /// What copies name. Kept for as long as the engines may use it: dropped after the buffer.
    allocation: Arc<Allocation>,
    memory: Mapping,
    /// The driver's own memory, byte for byte beside the I/O memory.
    staging: Option<Mapping>,
}

impl Drop for HostSide {
    fn drop(&mut self) {
        if self.allocation.is_abandoned() {
            // An engine may still write there.
            std::mem::forget(self.memory.clone());
        }
    }
}

impl HostSide {
    /// Shows `memory` to the engines; `is_imported` false asks for staging.
    ///
    /// # Errors
    /// If the driver takes it neither way.
    pub(super) fn new(
        device: &Arc<Device>,
        memory: &Mapping,
        is_imported: bool,
    ) -> Result<HostSide> {
        if is_imported && let Some(side) = HostSide::import(device, memory) {
            return Ok(side);
        }
        let Some(kind) = device.types.system else {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!("{} has no memory for staging", device.gpu.label()),
            ));
        };
        let size = memory.len() as u64;
        let allocation = Arc::new(Allocation::new(device, size, kind.index, Source::Own)?);
        Ok(HostSide {
            staging: Some(allocation.map(size)?),
            allocation,
            memory: memory.clone(),
        })
    }

    /// `None` if the driver does not take this memory: that is no error, there is another way.
    fn import(device: &Arc<Device>, memory: &Mapping) -> Option<HostSide> {
        let (import, alignment) = (device.import.as_ref()?, device.can.import_alignment?);
        let base = NonNull::new(memory.at(0, memory.len())?)?;
        let size = memory.len() as u64;
        if !size.is_multiple_of(alignment) || !(base.addr().get() as u64).is_multiple_of(alignment)
        {
            return None;
        }
        let handle = vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;
        let mut properties = vk::MemoryHostPointerPropertiesEXT::default();
        // SAFETY: the range is mapped and stays so: the value returned owns a clone of the mapping.
        unsafe {
            (import.fp().get_memory_host_pointer_properties_ext)(
                device.api.handle(),
                handle,
                base.as_ptr().cast(),
                &mut properties,
            )
            .result()
        }
        .map_err(|result| failed("host memory cannot be imported", result))
        .inspect_err(|error| tracing::debug!("{error}"))
        .ok()?;
        let bits = properties.memory_type_bits;
        let kind = (0..u32::BITS).find(|kind| bits & 1 << kind != 0)?;
        let allocation = Allocation::new(device, size, kind, Source::Host(base))
            .inspect_err(|error| tracing::debug!("{error}"))
            .ok()?;
        Some(HostSide {
            allocation: Arc::new(allocation),
            memory: memory.clone(),
            staging: None,
        })
    }

    pub(super) fn buffer(&self) -> vk::Buffer {
        self.allocation.buffer
    }

    /// Its device address.
    pub(super) fn address(&self) -> u64 {
        self.allocation.address
    }

    pub(super) fn is_staged(&self) -> bool {
        self.staging.is_some()
    }

    /// Where in the I/O memory a copy's bytes are.
    pub(super) fn offset_of(&self, address: *const u8, len: usize) -> Option<usize> {
        self.memory.offset_of(address, len)
    }

    /// Brings `len` bytes at `offset` to where the engine reads them.
    ///
    /// # Safety
    /// Nobody writes to these bytes of the I/O memory now.
    pub(super) unsafe fn before_write(&self, offset: usize, len: usize) {
        if let Some((memory, staging)) = self.both(offset, len) {
            // SAFETY: both ranges are mapped (`both`) and apart; no copy uses this part of the staging
            // memory, because none uses the same part of the I/O memory.
            unsafe { staging.copy_from_nonoverlapping(memory, len) };
        }
    }

    /// Brings what the engine wrote for `len` bytes at `offset` to the I/O memory.
    ///
    /// # Safety
    /// Nobody else uses these bytes of the I/O memory now, and the engine's copy has ended.
    pub(super) unsafe fn after_read(&self, offset: usize, len: usize) {
        if let Some((memory, staging)) = self.both(offset, len) {
            // SAFETY: as in `before_write`.
            unsafe { memory.copy_from_nonoverlapping(staging, len) };
        }
    }

    fn both(&self, offset: usize, len: usize) -> Option<(*mut u8, *mut u8)> {
        let staging = self.staging.as_ref()?.at(offset as u64, len)?;
        Some((self.memory.at(offset as u64, len)?, staging))
    }
}
