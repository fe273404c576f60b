//! Finding PCI functions with memory on them, and saying which of them may be used.
//!
//! Everything comes from `/sys/bus/pci/devices/ADDRESS/` (Documentation/ABI/testing/sysfs-bus-pci):
//! `class`, `vendor`, `device`, `resource`, `driver`, `boot_vga`. All of it can be read without root.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::PciAddress;
use super::obstacles::{self, text};
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;

/// Bits of the third column of `resource` (include/linux/ioport.h).
const IORESOURCE_MEM: u64 = 0x200;
const IORESOURCE_PREFETCH: u64 = 0x2000;
const IORESOURCE_MEM_64: u64 = 0x10_0000;
const IORESOURCE_UNSET: u64 = 0x2000_0000;

const VENDOR_NVIDIA: u16 = 0x10de;
const VENDOR_INTEL: u16 = 0x8086;

/// A type 0 function has six base address registers; what follows in `resource` is the ROM and more.
const BARS: u8 = 6;

/// A PCI function of the display or memory class, and what is known of its use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PciFunction {
    /// Where it is.
    pub address: PciAddress,
    /// Class code, 24 bits: `0x030000` is a VGA adapter, `0x038000` another display controller,
    /// `0x050000` memory.
    pub class: u32,
    /// Vendor id.
    pub vendor: u16,
    /// Device id.
    pub device: u16,
    /// The driver bound to it.
    pub driver: Option<String>,
    /// The firmware used it as the primary display.
    pub boot_vga: bool,
    /// Its base address registers that are implemented; an upper half of a 64-bit BAR is none.
    pub bars: Vec<Bar>,
    /// The console that shows its picture from this function's memory, in words.
    pub console: Option<String>,
    /// The kernel's lockdown mode, if one is in force.
    pub lockdown: Option<String>,
    /// Its directory in sysfs.
    #[serde(skip)]
    pub(super) dir: PathBuf,
}

/// One base address register.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bar {
    /// Its number, 0 to 5.
    pub index: u8,
    /// First byte on the bus; 0 if the firmware and the kernel gave it no place.
    pub start: u64,
    /// Bytes.
    pub size: u64,
    /// Reads have no side effects.
    pub prefetchable: bool,
    /// It is memory, not I/O ports.
    pub is_memory: bool,
    /// It takes two registers, and may lie above 4 GiB.
    pub is_64bit: bool,
    /// The kernel offers a write-combining mapping of it (`resourceN_wc`).
    pub has_wc: bool,
    /// Bytes it can be resized to while no driver is bound (`resourceN_resize`), if that is more.
    pub resizable_to: Option<u64>,
    /// Who has claimed a part of it, by the name in `/proc/iomem` (readable by root only).
    pub claimed_by: Option<String>,
}

/// All functions of the display class (0x03) and the memory class (0x05), in the order of the bus.
///
/// # Errors
/// [`ErrorKind::Io`] and its kin if sysfs cannot be read; a machine without PCI has none.
pub fn list() -> Result<Vec<PciFunction>> {
    list_at(Path::new("/"))
}

/// [`list`] on another root directory, which has `sys/bus/pci/devices` and may have the other files of
/// `/sys` and `/proc` that [`PciFunction::usable`] goes by.
///
/// # Errors
/// As [`list`].
pub fn list_at(root: &Path) -> Result<Vec<PciFunction>> {
    let dir = root.join("sys/bus/pci/devices");
    let entries = match fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::os(format!("cannot read {}", dir.display()), error)),
    };
    let mut functions: Vec<PciFunction> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        // A function may vanish between the two looks: then it is not in the list.
        .filter_map(|address| PciFunction::read(root, address))
        .filter(PciFunction::has_memory_class)
        .collect();
    functions.sort_by_key(|function| function.address);
    Ok(functions)
}

impl PciFunction {
    /// The function at `address`, of whatever class; `None` if it is not there.
    pub(super) fn read(root: &Path, address: PciAddress) -> Option<PciFunction> {
        let dir = root.join("sys/bus/pci/devices").join(address.to_string());
        let boot_vga = text(dir.join("boot_vga")).as_deref() == Some("1");
        let iomem = text(root.join("proc/iomem")).unwrap_or_default();
        let mut bars = parse_resource(&fs::read_to_string(dir.join("resource")).ok()?);
        for bar in &mut bars {
            bar.has_wc = dir.join(format!("resource{}_wc", bar.index)).exists();
            bar.resizable_to = largest_size(&dir, bar.index).filter(|&size| size > bar.size);
            bar.claimed_by = obstacles::claimant(&iomem, address, bar);
        }
        Some(PciFunction {
            address,
            class: hex(&text(dir.join("class"))?)?.try_into().ok()?,
            vendor: hex(&text(dir.join("vendor"))?)?.try_into().ok()?,
            device: hex(&text(dir.join("device"))?)?.try_into().ok()?,
            driver: driver_of(&dir),
            boot_vga,
            bars,
            console: obstacles::console(root, &dir, address, boot_vga),
            lockdown: obstacles::lockdown(root),
            dir,
        })
    }

    fn has_memory_class(&self) -> bool {
        matches!(self.class >> 16, 0x03 | 0x05)
    }

    /// The BAR that a device would be made of: the one named, else the largest prefetchable memory
    /// BAR.
    ///
    /// # Errors
    /// Why it may not be used, and what to do. Each obstacle is told alone, the first in the order of:
    /// hardware that cannot, the driver, the BAR, the console, the kernel's refusals.
    pub fn usable(&self, bar: Option<u8>) -> std::result::Result<&Bar, Error> {
        let address = self.address;
        self.check_hardware()?;
        if let Some(driver) = &self.driver {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "PCI function {address} is owned by the driver {driver}: free it with \
                     `echo {address} > /sys/bus/pci/drivers/{driver}/unbind`"
                ),
            ));
        }
        let bar = match bar {
            Some(index) => self.named_bar(index)?,
            None => self.largest_bar()?,
        };
        if let Some(console) = &self.console {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "the memory of PCI function {address} is shown on the screen by {console}: make \
                     another display adapter the primary one in the firmware's setup, or take the \
                     console away"
                ),
            ));
        }
        if let Some(mode) = &self.lockdown {
            return Err(Error::new(
                ErrorKind::Permission,
                format!(
                    "kernel lockdown ({mode}) forbids the mapping of PCI memory: switch Secure Boot \
                     off, or use a backend that goes through a driver"
                ),
            ));
        }
        if let Some(name) = &bar.claimed_by {
            return Err(claimed(bar.index, address, name));
        }
        Ok(bar)
    }

    /// What no setting can change.
    fn check_hardware(&self) -> Result<()> {
        let address = self.address;
        let unsupported = |why: String| Err(Error::new(ErrorKind::Unsupported, why));
        if !self.has_memory_class() {
            return unsupported(format!(
                "PCI function {address} has class {:06x}, which is neither a display controller (03xxxx) \
                 nor memory (05xxxx)",
                self.class
            ));
        }
        if self.class >> 16 != 0x03 {
            return Ok(());
        }
        match self.vendor {
            VENDOR_NVIDIA => unsupported(format!(
                "the BARs of the NVIDIA GPU {address} lead to its memory only through tables that its \
                 driver sets up: use a backend that goes through the driver"
            )),
            VENDOR_INTEL if address.is_on_root_bus() => unsupported(format!(
                "the Intel GPU {address} is built into the processor and has no memory of its own"
            )),
            _ => Ok(()),
        }
    }

    fn named_bar(&self, index: u8) -> Result<&Bar> {
        let address = self.address;
        if index >= BARS {
            return Err(Error::usage(format!(
                "there is no BAR {index}: they are numbered 0 to 5"
            )));
        }
        let Some(bar) = self.bars.iter().find(|bar| bar.index == index) else {
            let half = self
                .bars
                .iter()
                .find(|bar| bar.is_64bit && bar.index + 1 == index);
            let why = match half {
                Some(bar) => format!("it is the upper half of the 64-bit BAR {}", bar.index),
                None => "it is not implemented".to_owned(),
            };
            return Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "PCI function {address} has no BAR {index}: {why}{}",
                    self.bars_in_words()
                ),
            ));
        };
        let why = if !bar.is_memory {
            "is a range of I/O ports, not memory"
        } else if !bar.prefetchable {
            "is not prefetchable, so it may hold registers and not memory"
        } else if bar.start == 0 {
            "was given no place on the bus: look for \"Above 4G decoding\" in the firmware's setup"
        } else {
            return Ok(bar);
        };
        Err(Error::new(
            ErrorKind::Unsupported,
            format!("BAR {index} of PCI function {address} {why}"),
        ))
    }

    fn largest_bar(&self) -> Result<&Bar> {
        let memory = || {
            self.bars
                .iter()
                .filter(|bar| bar.is_memory && bar.prefetchable)
        };
        memory()
            .filter(|bar| bar.start != 0)
            // Of two with one size the 64-bit one: the other is the same memory for 32-bit systems.
            .max_by_key(|bar| (bar.size, bar.is_64bit))
            .ok_or_else(|| {
                let why = match memory().next() {
                    Some(bar) => format!(
                        "its BAR {} was given no place on the bus: look for \"Above 4G decoding\" in the \
                         firmware's setup",
                        bar.index
                    ),
                    None => "none of its BARs is prefetchable memory".to_owned(),
                };
                Error::new(
                    ErrorKind::Unsupported,
                    format!("PCI function {} cannot be used: {why}", self.address),
                )
            })
    }

    /// `; it has BAR 0 (64M), BAR 4 (1G)`, of those that could be used.
    fn bars_in_words(&self) -> String {
        let bars: Vec<String> = self
            .bars
            .iter()
            .filter(|bar| bar.is_memory && bar.prefetchable)
            .map(|bar| format!("BAR {} ({})", bar.index, human(bar.size)))
            .collect();
        if bars.is_empty() {
            String::new()
        } else {
            format!("; it has {}", bars.join(", "))
        }
    }
}

/// The refusal of a BAR in which `name` has a claim.
fn claimed(index: u8, address: PciAddress, name: &str) -> Error {
    Error::new(
        ErrorKind::Busy,
        format!(
            "BAR {index} of PCI function {address} is claimed by '{name}' (/proc/iomem), and the kernel \
             refuses to map it: stop whatever made that claim"
        ),
    )
}

/// The name of the driver bound to the function in `dir`.
pub(super) fn driver_of(dir: &Path) -> Option<String> {
    let link = fs::read_link(dir.join("driver")).ok()?;
    Some(link.file_name()?.to_str()?.to_owned())
}

/// The BARs in the text of `resource`: one line each of first byte, last byte and flags, in
/// hexadecimal (drivers/pci/pci-sysfs.c `resource_show`).
fn parse_resource(text: &str) -> Vec<Bar> {
    (0..BARS)
        .zip(text.lines())
        .filter_map(|(index, line)| parse_bar(index, line))
        .collect()
}

fn parse_bar(index: u8, line: &str) -> Option<Bar> {
    let mut columns = line.split_ascii_whitespace().map(hex);
    let (start, end, flags) = (columns.next()??, columns.next()??, columns.next()??);
    if flags == 0 || end < start {
        return None;
    }
    let size = (end - start).checked_add(1)?;
    Some(Bar {
        index,
        start: if flags & IORESOURCE_UNSET != 0 {
            0
        } else {
            start
        },
        size,
        prefetchable: flags & IORESOURCE_PREFETCH != 0,
        is_memory: flags & IORESOURCE_MEM != 0,
        is_64bit: flags & IORESOURCE_MEM_64 != 0,
        has_wc: false,
        resizable_to: None,
        claimed_by: None,
    })
}

/// The largest size in `resourceN_resize`: bit n stands for 2^n MiB, in hexadecimal.
fn largest_size(dir: &Path, index: u8) -> Option<u64> {
    let sizes = hex(&text(dir.join(format!("resource{index}_resize")))?)?;
    1u64.checked_shl(20 + sizes.checked_ilog2()?)
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
}
