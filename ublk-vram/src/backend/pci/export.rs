//! A claim that several processes share: who maps the BAR need not be who claimed it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::claim::Setting;
use super::lock::BarLock;
use super::module::ModuleRegion;
use super::{Bar, PciAddress, PciMemory};
use crate::backend::{Exported, MemoryDescription};
use crate::error::{Error, ErrorKind, Result};

/// A claim as another process is told of it. With it go the descriptors of the BAR's sysfs file and
/// of the lock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PciDescription {
    address: String,
    bar: Bar,
    vendor: u16,
    dir: PathBuf,
    write_combined: bool,
    changed: Vec<Setting>,
    lock: PathBuf,
    lock_prefix: String,
    /// The BAR's region in the kernel module, where the claim goes through it: the descriptor is then of
    /// the module's node, attached to that region.
    #[serde(default)]
    region: Option<u32>,
}

impl PciDescription {
    /// How many descriptors go with it.
    pub const FDS: usize = 2;
}

impl PciMemory {
    /// The claim for another process. It shares the lock; what was changed stays this one's to set
    /// back.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn export(&self) -> Result<Exported> {
        let copy = |file: &File| {
            let copy = file.try_clone().map(OwnedFd::from);
            copy.map_err(|error| Error::os("dup of a BAR's descriptor", error))
        };
        let description = PciDescription {
            address: self.address.to_string(),
            bar: self.bar.clone(),
            vendor: self.vendor,
            dir: self.dir.clone(),
            write_combined: self.write_combined,
            changed: self.changed.clone(),
            lock: self.lock.path.clone(),
            lock_prefix: self.lock.prefix.clone(),
            region: self.region.as_ref().map(|region| region.id()),
        };
        Ok(Exported {
            description: MemoryDescription::Pci(description),
            fds: vec![copy(&self.resource)?, copy(&self.lock.file)?],
        })
    }

    /// The claim that another process exported. What was changed is that one's to set back.
    ///
    /// # Errors
    /// Descriptors are missing, or the address is none.
    pub fn import(description: PciDescription, fds: Vec<OwnedFd>) -> Result<PciMemory> {
        let Ok([resource, lock]) = <[OwnedFd; PciDescription::FDS]>::try_from(fds) else {
            return Err(Error::new(
                ErrorKind::Io,
                "the claim on a BAR came without its descriptors",
            ));
        };
        let address: PciAddress = description.address.parse()?;
        let region = match description.region {
            Some(id) => {
                let node = resource
                    .try_clone()
                    .map_err(|error| Error::os("dup of a BAR's descriptor", error))?;
                Some(Box::new(ModuleRegion::inherited(node, id)?))
            }
            None => None,
        };
        Ok(PciMemory {
            region,
            address,
            bar: description.bar,
            vendor: description.vendor,
            dir: description.dir,
            resource: resource.into(),
            write_combined: description.write_combined,
            changed: description.changed,
            lock: BarLock {
                file: lock.into(),
                path: description.lock,
                prefix: description.lock_prefix,
                owner: false,
            },
            owner: false,
        })
    }

    /// The BAR's region in the kernel module as a file, where the claim goes through the module.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn region_file(&self) -> Result<Option<File>> {
        self.region.as_ref().map(|region| region.file()).transpose()
    }

    /// Whether it is for this process to set back what was changed when the claim ends.
    pub fn set_owner(&mut self, owner: bool) {
        self.owner = owner;
        self.lock.owner = owner;
    }
}
