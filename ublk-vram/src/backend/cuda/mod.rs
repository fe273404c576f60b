//! Memory of an NVIDIA GPU, allocated with CUDA and pinned by the kernel module.
//!
//! Why: beyond what Vulkan maps (half of an H200), as far as BAR1 reaches; write-combined, pinned, and
//! nobody's: the server links no GPU library, and the memory outlives every process. It needs the kernel
//! module and NVIDIA's open driver.
//!
//! A short-lived process allocates, makes a sticky region, and exits. From then on the region is like
//! that of a BAR: [`CudaMemory`] has it attached exclusively, and whoever has the descriptor maps it.

mod driver;
mod maker;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use maker::{GPU_PAGE, Order};
pub use maker::{SUBCOMMAND, main as maker_main};
use serde::{Deserialize, Serialize};

use super::access::Access;
use super::mapped::{MappedQueue, carve};
use super::pci::{PciAddress, detach};
use super::{Backend, BackendQueue, ChunkMemory, Exported, Mapping, MemoryDescription, QueueId};
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};
use crate::kmod::{NODE, Node, RegionMapping, abi};
use crate::store::{HEADER_BYTES, HeaderError, Layout, read_header, uuid_text, zero_and_check};

/// Of the free memory, so much is left to others: contexts and page tables of the next program.
const RESERVE: u64 = 1 << 30;

/// A region of pinned GPU memory. It ends when this is dropped; the backend that it opened must be gone
/// by then.
#[derive(Debug)]
pub struct CudaMemory {
    node: Node,
    region: abi::Region,
    gpu: String,
    /// Whether it is for this process to end the region.
    owner: bool,
}

/// A region as another process is told of it; the descriptor of the node that goes with it is attached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct CudaDescription {
    region: u32,
    gpu: String,
}

fn node() -> Result<Node> {
    Node::open().map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT) => Error::new(
            ErrorKind::Unsupported,
            "the cuda backend needs the kernel module ublk_vram, which is not loaded: `modprobe \
             ublk_vram`, or use --backend vulkan",
        ),
        _ => Error::os(format!("cannot open {NODE}"), error),
    })
}

/// Bytes a device may take on the GPU at that PCI address, or on the only one; how much of it BAR1
/// reaches only pinning shows.
///
/// # Errors
/// Why there is none: no module, no driver, no such GPU.
pub fn available(gpu: Option<&str>) -> Result<u64> {
    node()?;
    let order = Order {
        gpu: gpu.map(str::to_owned),
        bytes: 0,
    };
    let free = maker::order(&order)?.free;
    // A small GPU keeps an eighth: a reserve of all it has would be no use.
    Ok(free - RESERVE.min(free / 8))
}

impl CudaMemory {
    /// Allocates and pins the memory of a device of `layout`.
    ///
    /// # Errors
    /// As [`available`], and [`ErrorKind::NoSpace`] if GPU or BAR1 have no room for it.
    pub fn create(gpu: Option<&str>, layout: &Layout) -> Result<CudaMemory> {
        let node = node()?;
        let order = Order {
            gpu: gpu.map(str::to_owned),
            bytes: layout.total_bytes().next_multiple_of(GPU_PAGE),
        };
        let made = maker::order(&order)?;
        CudaMemory::attach(node, made.id, made.gpu)
    }

    fn attach(node: Node, id: u32, gpu: String) -> Result<CudaMemory> {
        let region = node.attach(id, true).and_then(|()| node.stat(id));
        let region = region.map_err(|error| {
            let _ = node.destroy(id);
            Error::os(
                format!("cannot attach region {id} of the kernel module"),
                error,
            )
        })?;
        Ok(CudaMemory {
            node,
            region,
            gpu,
            owner: true,
        })
    }

    /// The region that a device used until all of its processes were gone: a sticky one of the size of
    /// `layout` whose first header carries the device's `uuid`. `gpu` is where it was. Nothing is written to
    /// it, and it stays when this is dropped.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none.
    pub fn find_again(gpu: &str, layout: &Layout, uuid: &[u8; 16]) -> Result<CudaMemory> {
        for left in left_behind(layout)? {
            let (mut memory, header) = left?;
            if header == Some(*uuid) {
                gpu.clone_into(&mut memory.gpu);
                return Ok(memory);
            }
        }
        Err(Error::new(
            ErrorKind::NotFound,
            format!("no region of the kernel module holds its memory on the NVIDIA GPU {gpu}"),
        ))
    }

    /// The region for another process; ending it stays this one's.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn export(&self) -> Result<Exported> {
        let fd = self.region_file()?.into();
        Ok(Exported {
            description: MemoryDescription::Cuda(CudaDescription {
                region: self.region.id,
                gpu: self.gpu.clone(),
            }),
            fds: vec![fd],
        })
    }

    /// The region that another process exported: the attachment belongs to the open file.
    ///
    /// # Errors
    /// The descriptor is missing, or there is no such region any more.
    pub fn import(description: CudaDescription, fds: Vec<OwnedFd>) -> Result<CudaMemory> {
        let id = description.region;
        let Ok([node]) = <[OwnedFd; 1]>::try_from(fds) else {
            return Err(Error::new(
                ErrorKind::Io,
                "a region of the kernel module came without its descriptor",
            ));
        };
        let node = Node::from(node);
        let region = node
            .stat(id)
            .map_err(|error| Error::os(format!("region {id} of the kernel module"), error))?;
        Ok(CudaMemory {
            node,
            region,
            gpu: description.gpu,
            owner: false,
        })
    }

    /// The region as a file.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn region_file(&self) -> Result<File> {
        let fd = self.node.as_fd().try_clone_to_owned();
        fd.map(File::from)
            .map_err(|error| Error::os(format!("dup of {NODE}"), error))
    }

    /// Whether it is for this process to end the region.
    pub fn set_owner(&mut self, owner: bool) {
        self.owner = owner;
    }

    /// Where the GPU is.
    pub fn address(&self) -> Option<PciAddress> {
        self.gpu.parse().ok()
    }

    /// Maps the chunks of `layout`, one after the other from the region's first byte.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if `layout` does not fit; else as the kernel has them.
    pub fn open(&self, layout: &Layout) -> Result<CudaBackend> {
        let total = layout.total_bytes();
        if total > self.region.size {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a device of {total} bytes does not fit a region of {}",
                    self.region.size
                ),
            ));
        }
        let len = usize::try_from(total).unwrap_or(usize::MAX);
        let mapping = RegionMapping::new(&self.node, &self.region, 0, len)
            .map_err(|error| Error::os("cannot map a region of the kernel module", error))?;
        mapping.populate();
        Ok(CudaBackend {
            chunks: carve(mapping.into_shared(), layout)?,
            routines: CopyRoutines::best(),
            gpu: self.gpu.clone(),
            write_combined: self.region.mode == abi::MODE_WC,
        })
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if !self.owner {
            return;
        }
        // There is nobody to tell; a region that stays is listed, and `wipe_orphan` finds it.
        let _ = detach(&self.node);
        let _ = self.node.destroy(self.region.id);
    }
}

/// A region that nobody has, and the device of its first chunk's header, if it has a header.
type Left = (CudaMemory, Option<[u8; 16]>);

/// Sticky regions of pinned memory that nobody is attached to, of the size of `layout`, one after the other:
/// each is attached while it is looked at, and stays when it is dropped.
fn left_behind(layout: &Layout) -> Result<impl Iterator<Item = Result<Left>>> {
    let size = layout.total_bytes().next_multiple_of(GPU_PAGE);
    let list = node()?
        .list()
        .map_err(|error| Error::os(format!("cannot list the regions of {NODE}"), error))?;
    let wanted = abi::REGION_STICKY | abi::REGION_PERSISTENT;
    let is_left = move |region: &abi::Region| {
        region.kind == abi::KIND_NVIDIA
            && region.flags & wanted == wanted
            && region.attached == 0
            && region.size == size
    };
    let layout = *layout;
    let left = list.into_iter().filter(is_left);
    Ok(left.filter_map(move |region| look_at(region.id, &layout).transpose()))
}

fn look_at(id: u32, layout: &Layout) -> Result<Option<Left>> {
    let node = node()?;
    // Somebody was faster, or its memory is gone.
    let Ok(region) = node.attach(id, true).and_then(|()| node.stat(id)) else {
        return Ok(None);
    };
    let memory = CudaMemory {
        node,
        region,
        gpu: String::new(),
        owner: false,
    };
    let backend = memory.open(layout)?;
    let mut access = Access::open(&backend, 0, HEADER_BYTES as usize)?;
    let header = read_header(&mut access, 0);
    drop((access, backend));
    Ok(match header {
        Ok(header) => Some((memory, Some(header.uuid))),
        Err(HeaderError::NoMagic) => Some((memory, None)),
        // Somebody's, of another version, or damaged.
        Err(_) => None,
    })
}

/// Wipes and ends the region that the dead server of the device `uuid`, of `layout`, left. A server that
/// died before it wrote a header left one without: those of that size are wiped if there is none with it.
/// What is another device's stays.
///
/// # Errors
/// When one cannot be mapped or wiped; it stays.
pub fn wipe_orphans(layout: &Layout, uuid: &str) -> Result<()> {
    let mut left = left_behind(layout)?.collect::<Result<Vec<_>>>()?;
    let is_its = |header: &Option<[u8; 16]>| header.is_some_and(|found| uuid_text(&found) == uuid);
    let is_labelled = left.iter().any(|(_, header)| is_its(header));
    // The others are let go before anything that takes long: their devices may be looking for them.
    left.retain(|(_, header)| is_its(header) || (header.is_none() && !is_labelled));
    for (mut memory, _) in left {
        let backend = memory.open(layout)?;
        zero_and_check(&backend)?;
        drop(backend);
        memory.owner = true;
    }
    Ok(())
}

/// The mapped region.
pub struct CudaBackend {
    chunks: Vec<ChunkMemory>,
    routines: CopyRoutines,
    gpu: String,
    write_combined: bool,
}

impl Backend for CudaBackend {
    fn kind(&self) -> &'static str {
        "cuda"
    }

    fn gpu(&self) -> Option<String> {
        Some(self.gpu.clone())
    }

    fn residency(&self) -> Option<&'static str> {
        Some("pinned")
    }

    fn copy_path(&self) -> String {
        let kind = if self.write_combined {
            "write-combined"
        } else {
            "uncached: slow"
        };
        format!("{}, {kind}, kernel module", self.routines.isa())
    }

    fn chunks(&self) -> &[ChunkMemory] {
        &self.chunks
    }

    fn open_queue(
        &self,
        _queue: QueueId,
        copies: usize,
        _memory: &[Mapping],
    ) -> Result<Box<dyn BackendQueue>> {
        Ok(Box::new(MappedQueue::new(self.routines, copies)))
    }
}
