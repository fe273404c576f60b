//! The PCI devices a guest can have, and where each of them sits.
//!
//! Every device gets its slot from its place in the list, so its PCI address is known before the
//! guest runs. Under emulation a BAR is ordinary memory: these devices test logic, never speed,
//! ordering or write combining.

use std::{fs::OpenOptions, path::PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// Slot of the virtio-serial controller.
pub(crate) const SERIAL_SLOT: u8 = 0x02;
/// Slot of the first device of the caller.
const FIRST_SLOT: u8 = 0x04;
/// Slot of the first root port.
const FIRST_PORT: u8 = 0x10;
/// The first slot that the chipset uses itself, less the root ports.
const MAX_DEVICES: usize = (FIRST_PORT - FIRST_SLOT) as usize;
/// Root ports of one machine.
pub(crate) const MAX_PORTS: usize = 8;

/// A device of the guest.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Device {
    /// A display controller (class 0x038000, vendor 1b36) whose BAR 4 is `vram_mib` MiB of memory,
    /// 64-bit prefetchable.
    Qxl {
        /// Size of BAR 4 in MiB, a power of two.
        vram_mib: u64,
    },
    /// A memory controller (class 0x050000, vendor 1af4) whose BAR 2 is a file of the host: the
    /// host sees and may change every byte.
    Ivshmem {
        /// Size of BAR 2 in MiB, a power of two.
        size_mib: u64,
        /// The file; it is made, and given that size, if need be.
        file: PathBuf,
    },
    /// A VGA display controller (class 0x030000) with `vram_mib` MiB in its 32-bit BAR 0, which the
    /// kernel may use as its console.
    Vga {
        /// Size of BAR 0 in MiB, a power of two up to 256.
        vram_mib: u64,
    },
    /// A disk, `/dev/vda` and so on in order; the module is loaded by itself.
    VirtioBlk {
        /// A raw image or block device of the host.
        file: PathBuf,
    },
}

impl Device {
    /// The module a guest needs for it, if any.
    pub(crate) fn module(&self) -> Option<&str> {
        matches!(self, Self::VirtioBlk { .. }).then_some("virtio_blk")
    }

    /// The objects behind the device and the device itself, as QMP arguments (and, as JSON, QEMU
    /// options).
    pub(crate) fn describe(&self, id: &str, bus: &str, slot: u8) -> Result<Description> {
        let mut device = json!({ "id": id, "bus": bus, "addr": format!("{slot:#x}") });
        let mut object = None;
        let mut blockdev = None;
        match self {
            Self::Qxl { vram_mib } => {
                power_of_two("qxl vram_mib", *vram_mib)?;
                device["driver"] = json!("qxl");
                device["vram64_size_mb"] = json!(vram_mib);
                device["vram_size_mb"] = json!(64.min(*vram_mib));
            }
            Self::Vga { vram_mib } => {
                power_of_two("VGA vram_mib", *vram_mib)?;
                if *vram_mib > 256 {
                    bail!("VGA vram_mib is {vram_mib}: the machine has room for 256 at most");
                }
                device["driver"] = json!("VGA");
                device["vgamem_mb"] = json!(vram_mib);
            }
            Self::Ivshmem { size_mib, file } => {
                power_of_two("ivshmem size_mib", *size_mib)?;
                let bytes = size_mib << 20;
                OpenOptions::new()
                    .create(true)
                    .truncate(false)
                    .write(true)
                    .open(file)
                    .and_then(|handle| handle.set_len(bytes))
                    .with_context(|| {
                        format!("cannot make {} {bytes} bytes long", file.display())
                    })?;
                let memory = format!("{id}-memory");
                object = Some(json!({
                    "qom-type": "memory-backend-file",
                    "id": memory,
                    "mem-path": file,
                    "size": bytes,
                    "share": true,
                }));
                device["driver"] = json!("ivshmem-plain");
                device["memdev"] = json!(memory);
            }
            Self::VirtioBlk { file } => {
                let node = format!("{id}-disk");
                let driver = if file.is_file() {
                    "file"
                } else {
                    "host_device"
                };
                blockdev = Some(json!({
                    "driver": "raw",
                    "node-name": node,
                    "file": { "driver": driver, "filename": file, "discard": "unmap" },
                    "discard": "unmap",
                }));
                device["driver"] = json!("virtio-blk-pci");
                device["drive"] = json!(node);
            }
        }
        Ok(Description {
            object,
            blockdev,
            device,
        })
    }
}

/// A device in the words of QMP.
#[derive(Debug)]
pub(crate) struct Description {
    pub(crate) object: Option<Value>,
    pub(crate) blockdev: Option<Value>,
    pub(crate) device: Value,
}

/// Slot of the device with that place in the list.
pub(crate) fn slot(index: usize) -> Result<u8> {
    if index >= MAX_DEVICES {
        bail!("a machine has room for {MAX_DEVICES} devices");
    }
    Ok(FIRST_SLOT + index as u8)
}

/// Slot of the root port with that number.
pub(crate) fn port_slot(port: usize) -> Result<u8> {
    if port >= MAX_PORTS {
        bail!("a machine has room for {MAX_PORTS} hotplug ports");
    }
    Ok(FIRST_PORT + port as u8)
}

/// Address of a device that is there from the start.
pub(crate) fn address(index: usize) -> String {
    format!("0000:00:{:02x}.0", usize::from(FIRST_SLOT) + index)
}

/// Address of a device in a root port: the firmware numbers the buses behind the ports in slot
/// order.
pub(crate) fn port_address(port: usize) -> String {
    format!("0000:{:02x}:00.0", port + 1)
}

fn power_of_two(what: &str, mib: u64) -> Result<()> {
    if !mib.is_power_of_two() {
        bail!("{what} is {mib}: a PCI BAR is a power of two of MiB");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_follow_the_list() {
        assert_eq!(address(0), "0000:00:04.0");
        assert_eq!(slot(0).unwrap(), 4);
        assert_eq!(address(11), "0000:00:0f.0");
        assert!(slot(12).is_err());
        assert_eq!(port_address(0), "0000:01:00.0");
        assert!(port_slot(8).is_err());
    }

    #[test]
    fn odd_sizes_are_refused() {
        let error = Device::Qxl { vram_mib: 100 }
            .describe("d0", "pcie.0", 4)
            .unwrap_err();
        assert!(error.to_string().contains("power of two"));
        assert!(
            Device::Vga { vram_mib: 512 }
                .describe("d0", "pcie.0", 4)
                .is_err()
        );
    }

    #[test]
    fn ivshmem_makes_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("bar");
        let device = Device::Ivshmem {
            size_mib: 2,
            file: file.clone(),
        };
        let description = device.describe("d0", "pcie.0", 4).unwrap();
        assert_eq!(description.device["memdev"], "d0-memory");
        assert_eq!(std::fs::metadata(file).unwrap().len(), 2 << 20);
    }
}
