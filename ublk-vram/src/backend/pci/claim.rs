//! The claim on a BAR: nobody else takes it, and the function stays awake, until it is released.
//!
//! What a claim changes, and sets back when it ends:
//!
//! | attribute | set to | why |
//! | --- | --- | --- |
//! | `driver_override` | a name that no driver has, or that of our kernel module | a driver that bound itself later would reset the memory; and as soon as any driver claims the region, even if it then gives up, the kernel takes our mapping away (`revoke_iomem`), and the next copy ends in SIGBUS |
//! | `power/control` | `on` | a function without a driver that may sleep loses its memory when the bridge above it powers down |
//! | `enable` | `1`, if it was 0 | address decoding of the function and of all bridges above it |
//!
//! Where the kernel module is loaded the function is bound to it, which enables it, and the BAR becomes
//! a region of the module's (`module.rs`).
//!
//! A server that is killed leaves them as they are. The next claim of the function takes them over;
//! by hand, `echo > driver_override` lets drivers in again.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::function::driver_of;
use super::lock::BarLock;
use super::module::{self, ModuleRegion};
use super::obstacles::text;
use super::{Bar, PciAddress, PciFunction, probe};
use crate::control::RunDir;
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;
use crate::store::Layout;

/// What stands in `driver_override` while a claim lasts: the kernel module's driver, or nobody's.
const OVERRIDE: &str = crate::kmod::DRIVER;
/// How `driver_override` shows that nothing is set.
const NO_OVERRIDE: &str = "(null)";
/// Bit 1 of the command register: the function answers to memory addresses (PCI 3.0, 6.2.2).
const COMMAND_MEMORY: u16 = 1 << 1;

/// The claim on one BAR. It ends with [`PciMemory::release`], or when it is dropped; the backend that
/// it opened must be gone by then.
#[derive(Debug)]
pub struct PciMemory {
    pub(super) address: PciAddress,
    pub(super) bar: Bar,
    pub(super) vendor: u16,
    pub(super) dir: PathBuf,
    /// `resourceN_wc` or `resourceN`, or the kernel module's node: whoever has the descriptor can map
    /// the BAR.
    pub(super) resource: File,
    /// The BAR's region in the kernel module, where that is loaded.
    pub(super) region: Option<Box<ModuleRegion>>,
    pub(super) write_combined: bool,
    /// What to set back, in the order it was changed.
    pub(super) changed: Vec<Setting>,
    pub(super) lock: BarLock,
    /// Whether it is for this process to set anything back; else another one that shares the claim
    /// does it.
    pub(super) owner: bool,
}

/// An attribute and what it held.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    pub(super) path: PathBuf,
    pub(super) before: String,
}

/// Bytes of the BAR that a device would be made of.
///
/// # Errors
/// Why it cannot be used; see [`PciFunction::usable`].
pub fn available(address: &str, bar: Option<u8>) -> Result<u64> {
    Ok(find(Path::new("/"), address.parse()?)?.usable(bar)?.size)
}

fn find(root: &Path, address: PciAddress) -> Result<PciFunction> {
    PciFunction::read(root, address).ok_or_else(|| {
        Error::new(
            ErrorKind::NotFound,
            format!("no PCI function {address}: `lspci -D` lists those that are there"),
        )
    })
}

impl PciMemory {
    /// Claims the named BAR, or the largest prefetchable one, of the function at `address` for a
    /// device of `layout`, wakes the function up and checks that its memory holds what is written.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such function, [`ErrorKind::NoSpace`] if the BAR is too
    /// small, [`ErrorKind::Busy`] if somebody has it, [`ErrorKind::Io`] if the memory does not answer;
    /// else as [`PciFunction::usable`].
    pub fn claim(address: &str, bar: Option<u8>, layout: &Layout) -> Result<PciMemory> {
        PciMemory::claim_at(
            Path::new("/"),
            RunDir::system().path(),
            address,
            bar,
            layout,
        )
    }

    /// As [`PciMemory::claim`], for memory whose contents are wanted: nothing is written to it.
    ///
    /// # Errors
    /// As [`PciMemory::claim`].
    pub fn claim_again(address: &str, bar: Option<u8>, layout: &Layout) -> Result<PciMemory> {
        let root = Path::new("/");
        PciMemory::take(root, RunDir::system().path(), address, bar, layout)
    }

    /// [`PciMemory::claim`] in the files of another root directory, with the lock in `run_dir`.
    pub(super) fn claim_at(
        root: &Path,
        run_dir: &Path,
        address: &str,
        bar: Option<u8>,
        layout: &Layout,
    ) -> Result<PciMemory> {
        let memory = PciMemory::take(root, run_dir, address, bar, layout)?;
        probe::check(&memory, layout.total_bytes())?;
        Ok(memory)
    }

    fn take(
        root: &Path,
        run_dir: &Path,
        address: &str,
        bar: Option<u8>,
        layout: &Layout,
    ) -> Result<PciMemory> {
        let function = find(root, address.parse()?)?;
        let bar = function.usable(bar)?.clone();
        check_size(function.address, &bar, layout)?;
        let lock = BarLock::take(run_dir, function.address, bar.index)?;
        let through_module = module::is_there(root);
        // The standard library opens every file with O_CLOEXEC. Under the module's hands this one is
        // replaced before anything is mapped.
        let suffix = if bar.has_wc { "_wc" } else { "" };
        let (path, write) = if through_module {
            (function.dir.join("config"), false)
        } else {
            (
                function.dir.join(format!("resource{}{suffix}", bar.index)),
                true,
            )
        };
        let resource = OpenOptions::new()
            .read(true)
            .write(write)
            .open(&path)
            .map_err(|error| Error::os(format!("cannot open {}", path.display()), error))?;
        let mut memory = PciMemory {
            address: function.address,
            write_combined: bar.has_wc,
            bar,
            vendor: function.vendor,
            dir: function.dir,
            resource,
            region: None,
            changed: Vec::new(),
            lock,
            owner: true,
        };
        // An error from here on drops `memory`, which sets everything back.
        memory.take_over(through_module)?;
        if through_module {
            let region = ModuleRegion::claim(memory.address, &memory.bar)?;
            memory.write_combined = region.is_write_combined();
            memory.resource = region.file()?;
            memory.region = Some(Box::new(region));
        }
        memory.check_present()?;
        Ok(memory)
    }

    /// Keeps drivers away, or all but the kernel module's, and wakes the function up.
    fn take_over(&mut self, through_module: bool) -> Result<()> {
        self.change("driver_override", OVERRIDE, |_| true)?;
        if through_module {
            // It enables the function, and keeps it awake.
            module::bind(&self.dir, self.address)?;
            return self.change("power/control", "on", |_| true);
        }
        // A driver that bound itself before the override stood is the last one that can.
        if let Some(driver) = driver_of(&self.dir) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "the driver {driver} has just bound itself to PCI function {}",
                    self.address
                ),
            ));
        }
        self.change("power/control", "on", |_| true)?;
        // The attribute is a counter: writing 1 to an enabled function would only raise it.
        self.change("enable", "1", |before| before == "0")
    }

    /// Writes `value` to an attribute that does not hold it, where `wanted` says so of what it holds.
    /// An attribute that this kernel does not have is left out.
    fn change(&mut self, attribute: &str, value: &str, wanted: fn(&str) -> bool) -> Result<()> {
        let path = self.dir.join(attribute);
        let before = match fs::read_to_string(&path) {
            Ok(text) => text.trim().to_owned(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(Error::os(format!("cannot read {}", path.display()), error)),
        };
        // Left behind by a server that was killed: there was nothing before.
        let before = if before == OVERRIDE {
            NO_OVERRIDE.to_owned()
        } else {
            before
        };
        if before == value || !wanted(&before) {
            return Ok(());
        }
        write_attribute(&path, value)?;
        self.changed.push(Setting { path, before });
        Ok(())
    }

    /// The function answers, is the one that was claimed, and decodes memory addresses.
    pub(super) fn check_present(&self) -> Result<()> {
        let gone = |why: String| {
            Err(Error::new(
                ErrorKind::Io,
                format!("PCI function {} {why}", self.address),
            ))
        };
        match self.config_word(0) {
            Some(vendor) if vendor == self.vendor => {}
            Some(0xffff) | None => return gone("is gone from the bus".to_owned()),
            Some(vendor) => {
                return gone(format!(
                    "is another one now: vendor {vendor:04x}, and it was {:04x}",
                    self.vendor
                ));
            }
        }
        match self.config_word(4) {
            Some(command) if command & COMMAND_MEMORY != 0 => Ok(()),
            _ => gone(
                "does not decode memory addresses although it was enabled: its memory cannot be reached"
                    .to_owned(),
            ),
        }
    }

    /// Whether the function still answers on the bus with the vendor id it had when it was claimed.
    pub fn present(&self) -> bool {
        self.config_word(0) == Some(self.vendor)
    }

    /// 16 bits of configuration space, which is little-endian; `None` if it cannot be read.
    fn config_word(&self, offset: u64) -> Option<u16> {
        let mut word = [0u8; 2];
        let config = File::open(self.dir.join("config")).ok()?;
        config.read_exact_at(&mut word, offset).ok()?;
        Some(u16::from_le_bytes(word))
    }

    /// Where the function is.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    /// The claimed BAR, as it was when it was claimed.
    pub fn bar(&self) -> &Bar {
        &self.bar
    }

    /// Whether a mapping is write-combined; if not, it is uncached and slow.
    pub fn is_write_combined(&self) -> bool {
        self.write_combined
    }

    /// The file to map the BAR from: it stays usable in any process that gets the descriptor.
    pub fn resource(&self) -> BorrowedFd<'_> {
        self.resource.as_fd()
    }

    /// Where the BAR begins for mmap of [`PciMemory::resource`].
    pub fn map_offset(&self) -> u64 {
        self.region().map_or(0, ModuleRegion::offset)
    }

    /// The way through the kernel module, if that is the way.
    pub(super) fn region(&self) -> Option<&ModuleRegion> {
        self.region.as_deref()
    }

    /// Checks that the BAR holds the chunks of `layout`.
    pub(super) fn check_size(&self, layout: &Layout) -> Result<()> {
        check_size(self.address, &self.bar, layout)
    }

    /// Why the kernel refused to map the BAR, from the error of `mmap`.
    pub(super) fn map_refused(&self, error: &Error) -> Error {
        let (kind, why) = match error.kind {
            ErrorKind::Permission => (
                ErrorKind::Permission,
                "kernel lockdown forbids it, or the server is not root",
            ),
            ErrorKind::NoSpace => (ErrorKind::NoSpace, "there is no memory for page tables"),
            _ => (
                ErrorKind::Busy,
                "somebody has claimed its memory, and /proc/iomem says who",
            ),
        };
        Error::new(
            kind,
            format!(
                "BAR {} of PCI function {}: {error}: {why}",
                self.bar.index, self.address
            ),
        )
    }

    /// Ends the claim: every attribute is set back, and the BAR is free for others.
    ///
    /// # Errors
    /// The first attribute that could not be set back; the rest are all the same.
    pub fn release(mut self) -> Result<()> {
        self.restore()
    }

    fn restore(&mut self) -> Result<()> {
        // Another server that uses another BAR of this function needs it awake: the settings stay.
        let keep = !self.owner || self.lock.function_is_shared();
        let mut result = Ok(());
        // What another process has claimed is that one's to end.
        if let Some(region) = self.region.take().filter(|_| self.owner) {
            result = region.release();
            if !keep && let Err(error) = module::unbind(&self.dir, self.address) {
                result = result.and(Err(error));
            }
        }
        while let Some(Setting { path, before }) = self.changed.pop() {
            if keep {
                continue;
            }
            // An empty line takes an override away.
            let value = if before == NO_OVERRIDE {
                "\n"
            } else {
                before.as_str()
            };
            if let Err(error) = write_attribute(&path, value)
                // A function that was taken out of the machine has nothing to set back.
                && text(self.dir.join("vendor")).is_some()
                && result.is_ok()
            {
                result = Err(error);
            }
        }
        result
    }
}

impl Drop for PciMemory {
    fn drop(&mut self) {
        // There is nobody to tell: `release` is the way to know.
        let _ = self.restore();
    }
}

pub(super) fn write_attribute(path: &Path, value: &str) -> Result<()> {
    fs::write(path, value).map_err(|error| {
        Error::os(
            format!("cannot write '{}' to {}", value.trim(), path.display()),
            error,
        )
    })
}

fn check_size(address: PciAddress, bar: &Bar, layout: &Layout) -> Result<()> {
    let needed = layout.total_bytes();
    if needed <= bar.size {
        return Ok(());
    }
    let chunk = Some(layout.chunk_size());
    let resize = match bar.resizable_to {
        Some(size) if size >= needed => format!(
            "; it can be resized to {} with `echo {} > /sys/bus/pci/devices/{address}/resource{}_resize`",
            human(size),
            (size >> 20).ilog2(),
            bar.index
        ),
        _ => String::new(),
    };
    Err(Error::new(
        ErrorKind::NoSpace,
        format!(
            "a device of {} needs {needed} bytes of memory and BAR {} of PCI function {address} has {} \
             ({}): the largest device that fits is {} bytes{resize}",
            human(layout.device_bytes()),
            bar.index,
            bar.size,
            human(bar.size),
            Layout::largest_device(bar.size, chunk),
        ),
    ))
}
