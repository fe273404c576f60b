//! The kernel module's node, `/dev/ublk-vram`, seen from user space.
//!
//! The module is optional. Where it is loaded it keeps GPU memory in regions that belong to no
//! process, maps them write-combined under kernel lockdown too, and takes them away exactly
//! (docs/kmod.md). This room speaks its ioctls and maps its regions; it does not decide when to.

pub mod abi;
mod region;
#[cfg(test)]
mod tests;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use abi::calls;

pub use region::RegionMapping;

/// The node's path.
pub const NODE: &str = "/dev/ublk-vram";
/// The driver that a function is bound to so that regions can be made of its BARs.
pub const DRIVER: &str = "ublk-vram";

/// An open file of the node. What it makes goes with it, unless it is sticky; so does its attachment.
#[derive(Debug)]
pub struct Node {
    file: File,
}

/// Errors are those of the ioctls, as the kernel gave them (docs/kmod.md has the table): callers know
/// what they asked for and say it.
impl Node {
    /// Whether the module is loaded.
    pub fn is_there() -> bool {
        Path::new(NODE).exists()
    }

    /// Opens the node.
    ///
    /// # Errors
    /// `ENOENT` without the module, `EACCES` or `EPERM` without CAP_SYS_ADMIN.
    pub fn open() -> io::Result<Node> {
        Node::open_at(Path::new(NODE))
    }

    /// Opens the node under another path.
    ///
    /// # Errors
    /// As [`Node::open`].
    pub fn open_at(path: &Path) -> io::Result<Node> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Node { file })
    }

    /// What module and kernel can do.
    ///
    /// # Errors
    /// `ENOTTY` if this is not our node.
    pub fn info(&self) -> io::Result<abi::Info> {
        let mut info = abi::Info::default();
        // SAFETY: the kernel writes one structure of that size.
        unsafe { calls::get_info(self.file.as_raw_fd(), &mut info) }?;
        Ok(info)
    }

    /// Makes a region of a part of a BAR; its id.
    ///
    /// # Errors
    /// `ENODEV` if the function is not bound to [`DRIVER`], `EINVAL` for a range that is not inside the
    /// BAR or not of whole pages, `ENXIO` for a BAR that is not there or not of memory, `EOPNOTSUPP`
    /// for one of registers, `EBUSY` if somebody has a part of the range.
    pub fn create_bar(&self, mut create: abi::CreateBar) -> io::Result<u32> {
        // SAFETY: the kernel reads and writes one structure of that size.
        unsafe { calls::create_bar(self.file.as_raw_fd(), &mut create) }?;
        Ok(create.id)
    }

    /// Pins a range of this process's GPU memory and makes a region of it; its id.
    ///
    /// # Errors
    /// `EOPNOTSUPP` without an NVIDIA driver that can be used, `EINVAL` for a range that is not CUDA
    /// memory of this process or not of whole 64 KiB pages, and for GPUs whose driver refuses to pin.
    pub fn create_nvidia(&self, mut create: abi::CreateNvidia) -> io::Result<u32> {
        // SAFETY: the kernel reads and writes one structure of that size.
        unsafe { calls::create_nvidia(self.file.as_raw_fd(), &mut create) }?;
        Ok(create.id)
    }

    /// Attaches this file to a region.
    ///
    /// # Errors
    /// `ENOENT` if there is none, `ENODEV` if its memory is gone, `EBUSY` if another file's attachment
    /// excludes this one, `EISCONN` if this file is attached already.
    pub fn attach(&self, id: u32, exclusive: bool) -> io::Result<()> {
        let flags = if exclusive { abi::ATTACH_EXCLUSIVE } else { 0 };
        // SAFETY: the kernel reads one structure of that size.
        unsafe { calls::attach(self.file.as_raw_fd(), &abi::Attach { id, flags }) }?;
        Ok(())
    }

    /// Detaches this file.
    ///
    /// # Errors
    /// `ENOTCONN` if it is not attached, `EBUSY` while the region is mapped through it.
    pub fn detach(&self) -> io::Result<()> {
        // SAFETY: the call has no argument.
        unsafe { calls::detach(self.file.as_raw_fd()) }?;
        Ok(())
    }

    /// Ends a region, sticky or not.
    ///
    /// # Errors
    /// `ENOENT` if there is none, `EBUSY` while a file is attached to it.
    pub fn destroy(&self, id: u32) -> io::Result<()> {
        let destroy = abi::Destroy { id, reserved: 0 };
        // SAFETY: the kernel reads one structure of that size.
        unsafe { calls::destroy(self.file.as_raw_fd(), &destroy) }?;
        Ok(())
    }

    /// Describes one region.
    ///
    /// # Errors
    /// `ENOENT` if there is none.
    pub fn stat(&self, id: u32) -> io::Result<abi::Region> {
        let mut region = abi::Region {
            id,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes one structure of that size.
        unsafe { calls::stat(self.file.as_raw_fd(), &mut region) }?;
        Ok(region)
    }

    /// Describes all regions.
    ///
    /// # Errors
    /// As the system has them.
    pub fn list(&self) -> io::Result<Vec<abi::Region>> {
        let mut room = self.info()?.regions as usize + 8;
        loop {
            let mut regions = vec![abi::Region::default(); room];
            let mut list = abi::List {
                count: u32::try_from(room).unwrap_or(u32::MAX),
                size: size_of::<abi::Region>() as u32,
                regions: regions.as_mut_ptr() as u64,
            };
            // SAFETY: the kernel writes at most `count` structures of `size` bytes at `regions`, which
            // has room for them, and the list itself.
            unsafe { calls::list(self.file.as_raw_fd(), &mut list) }?;
            let count = list.count as usize;
            if count <= room {
                regions.truncate(count);
                return Ok(regions);
            }
            room = count + 8;
        }
    }

    /// What the page table of this process holds at an address in a mapping of a region.
    ///
    /// # Errors
    /// `EFAULT` or `EINVAL` if the address is in no such mapping.
    pub fn page_table(&self, address: *const u8) -> io::Result<abi::PageTable> {
        let mut query = abi::PageTable {
            address: address as u64,
            ..Default::default()
        };
        // SAFETY: the kernel reads and writes one structure of that size.
        unsafe { calls::mapping(self.file.as_raw_fd(), &mut query) }?;
        Ok(query)
    }
}

/// A file of the node that another process opened and attached: the attachment is the file's.
impl From<OwnedFd> for Node {
    fn from(fd: OwnedFd) -> Node {
        Node { file: fd.into() }
    }
}

impl AsFd for Node {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
