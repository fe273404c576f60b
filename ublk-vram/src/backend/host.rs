//! System memory as device memory: for tests, and for machines without a GPU.
//!
//! Each chunk is a memfd, because a memfd outlives the process that made it for as long as anybody
//! holds the descriptor, just as an exported GPU allocation does. memfd pages are swappable: whoever
//! maps them locks them.

use std::os::fd::{AsFd, OwnedFd};

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::mapped::MappedQueue;
use super::{Backend, BackendQueue, ChunkMemory, Exported, Mapping, MemoryDescription, QueueId};
use crate::copy::CopyRoutines;
use crate::error::{Error, ErrorKind, Result};
use crate::store::Layout;
use crate::store::shared::SharedMapping;

/// Of the available system memory, so much may become a device: the rest keeps the host alive.
const USABLE_PERCENT: u64 = 75;

/// The memfds of one device.
pub struct HostMemory {
    chunks: Vec<OwnedFd>,
}

/// Bytes of system memory a device may take now.
///
/// # Errors
/// As [`crate::safety::available_memory`].
pub fn available() -> Result<u64> {
    Ok(crate::safety::available_memory(&crate::safety::Root::default())? / 100 * USABLE_PERCENT)
}

impl HostMemory {
    /// Makes one memfd of the right size for each chunk.
    pub fn create(layout: &Layout) -> Result<HostMemory> {
        crate::safety::check_open_files(layout.chunks())?;
        let available = available()?;
        if layout.total_bytes() > available {
            return Err(Error::new(
                ErrorKind::NoSpace,
                format!(
                    "a host device of {} needs {} of system memory, and {} may be taken: make it smaller",
                    crate::size::human(layout.device_bytes()),
                    crate::size::human(layout.total_bytes()),
                    crate::size::human(available)
                ),
            ));
        }
        let chunks = (0..layout.chunks())
            .map(|index| {
                let fd = memfd_create(c"ublk-vram-chunk", MFdFlags::MFD_CLOEXEC)
                    .map_err(|errno| Error::os("memfd_create for a chunk", errno))?;
                let size = i64::try_from(layout.chunk_bytes(index)).unwrap_or(i64::MAX);
                nix::unistd::ftruncate(&fd, size).map_err(|errno| {
                    Error::os(format!("ftruncate of a chunk to {size} bytes"), errno)
                })?;
                Ok(fd)
            })
            .collect::<Result<_>>()?;
        Ok(HostMemory { chunks })
    }

    /// Copies of the memfds, for another process.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn export(&self) -> Result<Exported> {
        let copy = |fd: &OwnedFd| fd.try_clone();
        let fds = self.chunks.iter().map(copy).collect::<Result<Vec<_>, _>>();
        let fds = fds.map_err(|error| Error::os("dup of a chunk's descriptor", error))?;
        let chunks = u32::try_from(fds.len()).unwrap_or(u32::MAX);
        Ok(Exported {
            description: MemoryDescription::Host { chunks },
            fds,
        })
    }

    /// The memfds that another process exported.
    pub fn import(chunks: Vec<OwnedFd>) -> HostMemory {
        HostMemory { chunks }
    }

    /// Maps and populates every chunk.
    pub fn open(&self, layout: &Layout) -> Result<HostBackend> {
        let chunks = self
            .chunks
            .iter()
            .zip(0..)
            .map(|(fd, index)| {
                let size = layout.chunk_bytes(index);
                let mapping = SharedMapping::new(fd.as_fd(), size as usize)?;
                Ok(ChunkMemory::new(size, Some(mapping.into_mapping())))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(HostBackend {
            chunks,
            routines: CopyRoutines::best(),
        })
    }
}

/// The mapped memfds.
pub struct HostBackend {
    chunks: Vec<ChunkMemory>,
    routines: CopyRoutines,
}

impl Backend for HostBackend {
    fn kind(&self) -> &'static str {
        "host"
    }

    fn copy_path(&self) -> String {
        self.routines.isa().to_string()
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
