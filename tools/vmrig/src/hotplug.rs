//! Devices that come and go while the guest runs.

use std::{
    sync::{
        PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::anyhow;
use serde_json::json;

use crate::{Device, Result, Vm, devices};

/// How long the firmware, the kernel and its drivers may take to notice a change of hardware.
const PLUG_LIMIT: Duration = Duration::from_secs(30);

impl Vm {
    /// Plugs a device into a free port and returns its PCI address once the guest has it. Qxl and
    /// Vga cannot be plugged.
    ///
    /// # Errors
    /// [`Error::Host`](crate::Error::Host) when no port is free or QEMU refuses;
    /// [`Error::Command`](crate::Error::Command) when the guest does not take it within 30 s.
    pub fn plug(&self, device: &Device) -> Result<String> {
        let mut ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        let free = ports.iter_mut().enumerate().find(|(_, id)| id.is_none());
        let (port, taken) = free.ok_or_else(|| anyhow!("no hotplug port is free"))?;
        let address = devices::port_address(port);
        // An id is never used again: what it named may live on in QEMU for a while.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = format!("plugged{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let description = device.describe(&id, &format!("port{port}"), 0)?;
        if let Some(object) = description.object {
            self.qmp("object-add", object)?;
        }
        if let Some(blockdev) = description.blockdev {
            self.qmp("blockdev-add", blockdev)?;
        }
        self.qmp("device_add", description.device)?;
        *taken = Some(id);
        drop(ports);
        self.sh_timeout(
            &format!("until [ -e /sys/bus/pci/devices/{address} ]; do sleep 0.1; done"),
            PLUG_LIMIT,
        )?
        .ok()?;
        Ok(address)
    }

    /// Unplugs the device at an address that [`plug`](Self::plug) returned, and waits until the
    /// guest let it go.
    ///
    /// # Errors
    /// [`Error::Host`](crate::Error::Host) when there is none, or the guest does not let it go.
    pub fn unplug(&self, address: &str) -> Result<()> {
        let mut ports = self.ports.lock().unwrap_or_else(PoisonError::into_inner);
        let place = (0..ports.len()).find(|port| devices::port_address(*port) == address);
        let taken = place
            .and_then(|port| ports.get_mut(port))
            .filter(|id| id.is_some());
        let taken = taken.ok_or_else(|| anyhow!("no plugged device is at {address}"))?;
        self.qmp("device_del", json!({ "id": taken }))?;
        loop {
            let event = self
                .machine
                .qmp
                .event("DEVICE_DELETED", self.machine.patient(PLUG_LIMIT))?;
            if event["data"]["device"].as_str() == taken.as_deref() {
                let id = taken.take().unwrap_or_default();
                // A device has one of them or none.
                let _ = self.qmp("object-del", json!({ "id": format!("{id}-memory") }));
                let _ = self.qmp("blockdev-del", json!({ "node-name": format!("{id}-disk") }));
                return Ok(());
            }
        }
    }
}
