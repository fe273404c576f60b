//! The way through the kernel module, taken wherever it is loaded.
//!
//! The function is bound to the module's driver, and the BAR becomes a sticky region that this claim
//! has attached exclusively: nobody else, sysfs included, can map it; it is write-combined under
//! kernel lockdown too; and it stays, with its bytes, when every process of ours is killed. The next
//! claim finds such a region and takes it over.

use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use super::claim::write_attribute;
use super::function::driver_of;
use super::{Bar, PciAddress};
use crate::error::{Error, ErrorKind, Result};
use crate::kmod::{DRIVER, NODE, Node, RegionMapping, abi};

/// A process that was told to end has let its mappings go by then.
const STILL_MAPPED: Duration = Duration::from_secs(5);

/// A region that belongs to a claim.
#[derive(Debug)]
pub(super) struct ModuleRegion {
    node: Node,
    region: abi::Region,
}

/// Whether the module is loaded, and the root directory is the machine's own.
pub(super) fn is_there(root: &Path) -> bool {
    root == Path::new("/") && Node::is_there()
}

/// Binds the function in `dir`, whose `driver_override` names the module, to it.
///
/// # Errors
/// [`ErrorKind::Busy`] if another driver has it, or the module did not take it.
pub(super) fn bind(dir: &Path, address: PciAddress) -> Result<()> {
    if driver_of(dir).as_deref() == Some(DRIVER) {
        return Ok(());
    }
    write_attribute(
        Path::new("/sys/bus/pci/drivers_probe"),
        &address.to_string(),
    )?;
    match driver_of(dir) {
        Some(driver) if driver == DRIVER => Ok(()),
        Some(driver) => Err(Error::new(
            ErrorKind::Busy,
            format!("the driver {driver} has just bound itself to PCI function {address}"),
        )),
        None => Err(Error::new(
            ErrorKind::Io,
            format!(
                "the kernel module {DRIVER} did not take PCI function {address}: the kernel's log \
                 says why"
            ),
        )),
    }
}

impl ModuleRegion {
    /// Takes over the BAR's region that a killed server left, or makes one.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if somebody has a part of the BAR, [`ErrorKind::Permission`] without
    /// CAP_SYS_ADMIN, [`ErrorKind::Unsupported`] if the module is of another version.
    pub(super) fn claim(address: PciAddress, bar: &Bar) -> Result<ModuleRegion> {
        let node = Node::open().map_err(|error| Error::os(format!("cannot open {NODE}"), error))?;
        let info = node
            .info()
            .map_err(|error| Error::os(format!("{NODE} does not answer"), error))?;
        if info.abi != abi::ABI {
            return Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the loaded kernel module ublk_vram speaks version {} and this program {}: load \
                     the module that came with it, or unload it to go through sysfs",
                    info.abi,
                    abi::ABI
                ),
            ));
        }
        let failed = |error: std::io::Error| {
            let why = match error.raw_os_error() {
                Some(libc::EBUSY) => {
                    "somebody has claimed a part of it, and /proc/iomem says who".to_owned()
                }
                _ => error.to_string(),
            };
            Error::os(
                format!(
                    "the kernel module makes no region of BAR {} of PCI function {address} ({why})",
                    bar.index
                ),
                error,
            )
        };
        let create = create(address, bar);
        let left = node.list().map_err(failed)?;
        let left = left.into_iter().find(|region| is_of(region, &create, bar));
        let (id, made) = match left {
            Some(region) => (region.id, false),
            None => (node.create_bar(create).map_err(failed)?, true),
        };
        let attached = node.attach(id, true).and_then(|()| node.stat(id));
        let region = attached.map_err(|error| {
            if made {
                let _ = node.destroy(id);
            }
            failed(error)
        })?;
        Ok(ModuleRegion { node, region })
    }

    /// The region that another process has attached with this descriptor of the node: the attachment
    /// belongs to the open file, so whoever has a descriptor of it has the region.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no such region any more.
    pub(super) fn inherited(node: OwnedFd, id: u32) -> Result<ModuleRegion> {
        let node = Node::from(node);
        let region = node
            .stat(id)
            .map_err(|error| Error::os(format!("region {id} of the kernel module"), error))?;
        Ok(ModuleRegion { node, region })
    }

    /// Its number in the module.
    pub(super) fn id(&self) -> u32 {
        self.region.id
    }

    /// A descriptor of the attached file, for whoever maps the region.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(super) fn file(&self) -> Result<File> {
        let fd: std::io::Result<OwnedFd> = self.node.as_fd().try_clone_to_owned();
        fd.map(File::from)
            .map_err(|error| Error::os(format!("cannot duplicate a descriptor of {NODE}"), error))
    }

    /// Whether a mapping is write-combined, from the page table's own entry.
    pub(super) fn is_write_combined(&self) -> bool {
        self.region.mode == abi::MODE_WC
    }

    /// Maps the first `len` bytes in the largest steps that there are, every page present.
    ///
    /// # Errors
    /// As the kernel has them: the memory is gone, or there is no memory for page tables.
    pub(super) fn map(&self, len: usize) -> Result<RegionMapping> {
        let mapping = RegionMapping::new(&self.node, &self.region, 0, len)
            .map_err(|error| Error::os("cannot map a region of the kernel module", error))?;
        mapping.populate();
        Ok(mapping)
    }

    /// Where the region begins for mmap of [`ModuleRegion::file`].
    pub(super) fn offset(&self) -> u64 {
        self.region.mmap_offset
    }

    /// Ends the region, as soon as no process maps it any more: a standby that was told to end may take
    /// a moment.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] while it is mapped.
    pub(super) fn release(&self) -> Result<()> {
        let failed = |error| Error::os("cannot end a region of the kernel module", error);
        match detach(&self.node) {
            Ok(()) => {}
            // The function was unbound or unplugged, and the region went with the last mapping.
            Err(error) if error.raw_os_error() == Some(libc::ENOTCONN) => {}
            Err(error) => return Err(failed(error)),
        }
        match self.node.destroy(self.region.id) {
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(failed(error)),
            _ => Ok(()),
        }
    }
}

/// Detaches from a region as soon as no process maps it any more.
///
/// # Errors
/// As the kernel has them; EBUSY if it is still mapped after a while.
pub(in crate::backend) fn detach(node: &Node) -> std::io::Result<()> {
    let end = Instant::now() + STILL_MAPPED;
    loop {
        match node.detach() {
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(10));
            }
            outcome => return outcome,
        }
    }
}

/// Gives the function at `address` back to no driver.
///
/// # Errors
/// When it cannot be unbound; a function that is gone is not bound.
pub(super) fn unbind(dir: &Path, address: PciAddress) -> Result<()> {
    if driver_of(dir).as_deref() != Some(DRIVER) {
        return Ok(());
    }
    let path = fs::canonicalize(dir.join("driver"))
        .map_err(|error| Error::os(format!("cannot read the driver of {address}"), error))?;
    write_attribute(&path.join("unbind"), &address.to_string())
}

fn create(address: PciAddress, bar: &Bar) -> abi::CreateBar {
    abi::CreateBar {
        flags: abi::CREATE_STICKY,
        domain: address.domain(),
        bus: address.bus(),
        devfn: address.devfn(),
        bar: bar.index,
        ..Default::default()
    }
}

/// Whether the region is the whole of that BAR, and nobody's.
fn is_of(region: &abi::Region, create: &abi::CreateBar, bar: &Bar) -> bool {
    region.kind == abi::KIND_BAR
        && region.flags & (abi::REGION_DEAD | abi::REGION_STICKY) == abi::REGION_STICKY
        && region.attached == 0
        && region.start == 0
        && region.size == bar.size
        && (region.domain, region.bus, region.devfn, region.bar)
            == (create.domain, create.bus, create.devfn, create.bar)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_sticky_region_of_the_whole_bar_that_nobody_has_is_taken_over() {
        let address: PciAddress = "0001:03:1f.2".parse().unwrap();
        let bar = Bar {
            index: 2,
            start: 1 << 32,
            size: 1 << 20,
            prefetchable: true,
            is_memory: true,
            is_64bit: true,
            has_wc: true,
            resizable_to: None,
            claimed_by: None,
        };
        let wanted = create(address, &bar);
        assert_eq!((wanted.domain, wanted.bus, wanted.devfn), (1, 3, 0xfa));
        let left = abi::Region {
            flags: abi::REGION_STICKY,
            kind: abi::KIND_BAR,
            size: bar.size,
            domain: 1,
            bus: 3,
            devfn: 0xfa,
            bar: 2,
            ..Default::default()
        };
        assert!(is_of(&left, &wanted, &bar));
        let others: [fn(&mut abi::Region); 7] = [
            |region| region.flags = 0,
            |region| region.flags |= abi::REGION_DEAD,
            |region| region.attached = 1,
            |region| region.kind = abi::KIND_NVIDIA,
            |region| region.start = 4096,
            |region| region.size -= 4096,
            |region| region.devfn -= 1,
        ];
        for change in others {
            let mut other = left;
            change(&mut other);
            assert!(!is_of(&other, &wanted, &bar), "{other:?}");
        }
    }
}
