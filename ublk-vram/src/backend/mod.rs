//! Where a device's memory comes from, and who moves bytes to and from it.
//!
//! Two handles, so that control and I/O never share a lock:
//!
//! ```text
//!   MemoryHandles          what outlives a worker: descriptors, claims        (session)
//!        | open()
//!   Backend                chunks of memory, one for each device              (control thread)
//!        | open_queue()
//!   BackendQueue           submit / poll, one for each queue thread           (I/O threads)
//! ```
//!
//! A copy may complete inside [`BackendQueue::submit`] (a CPU copy does) or much later (an engine's
//! does): the caller learns of both by [`BackendQueue::poll`], looks again while
//! [`BackendQueue::should_poll`] says so, and otherwise sleeps on [`BackendQueue::completion_fd`]
//! while copies are in flight. Every copy completes exactly once.
//! Every backend passes the one suite in [`conformance`].

use std::fs::File;
use std::os::fd::{OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use serde::{Deserialize, Serialize};

use crate::device::{BackendSpec, DeviceSpec, PathCounters, PathsInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::health::Presence;
use crate::kmod::Node;
use crate::size::SizeSpec;
use crate::store::Layout;
use registered::Transfer;

pub mod access;
pub mod bench;
pub mod conformance;
pub mod cuda;
pub mod fault;
pub mod footprint;
pub mod host;
mod layer;
pub mod mapped;
pub mod pci;
pub mod registered;
pub mod vulkan;

/// The errno of a copy that failed because the memory itself is gone (its mapping was taken away): the
/// device is lost with it. The request ends with EIO.
pub const GONE: i32 = libc::ENODEV;

/// The errno of a copy that failed because the driver lost the GPU (VK_ERROR_DEVICE_LOST): this process
/// reaches the memory no more, and another one may find it as it was
/// ([`Health::driver_lost`](crate::health::Health::driver_lost)).
pub const DRIVER_LOST: i32 = libc::EREMOTEIO;

/// The number of a queue, and of the thread that serves it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct QueueId(pub u16);

impl QueueId {
    /// The number of one of control's own queues, which no I/O thread has.
    pub const fn control(number: u16) -> QueueId {
        QueueId(u16::MAX - number)
    }

    /// Whether it is one of control's own queues.
    pub const fn is_control(self) -> bool {
        self.0 > u16::MAX / 2
    }
}

/// Which way bytes go, seen from the user of the block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the chunk to memory.
    Read,
    /// From memory to the chunk.
    Write,
    /// Zeroes to the chunk; there is no memory.
    Zero,
}

/// One copy between a chunk and memory. It never crosses a chunk.
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    /// Comes back in the [`Completion`]; unique among the queue's copies in flight.
    pub id: u32,
    /// Which way.
    pub direction: Direction,
    /// Index of the chunk.
    pub chunk: u32,
    /// First byte, counted from the chunk's start.
    pub offset: u64,
    /// Bytes to move.
    pub len: u32,
    /// The memory end; null for [`Direction::Zero`].
    pub memory: *mut u8,
    /// First byte, counted from the device's start: for rules and messages, not for addressing.
    pub device_offset: u64,
}

/// The end of one copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The copy's id.
    pub id: u32,
    /// Bytes moved, or a positive errno ([`GONE`] and [`DRIVER_LOST`] say the most). Fewer bytes than asked
    /// for is an error to the caller.
    pub result: std::result::Result<u32, i32>,
}

/// Memory mapped into this process: a chunk's (write-combined where the hardware offers it), or the
/// I/O memory that copies go to and come from.
#[derive(Clone)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// Keeps the mapping alive; unmaps when the last clone goes.
    _owner: Arc<dyn Send + Sync>,
}

// SAFETY: the address is valid for as long as `_owner` lives, on every thread; who may access which
// bytes when is decided by the store's in-flight counters and the block layer, not by this handle.
unsafe impl Send for Mapping {}
// SAFETY: as above; the handle itself is never written.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// A mapping of `len` bytes at `base` that `owner` keeps alive.
    ///
    /// # Safety
    /// `base..base + len` must be mapped readable and writable until `owner` is dropped.
    pub unsafe fn new(base: NonNull<u8>, len: usize, owner: Arc<dyn Send + Sync>) -> Mapping {
        Mapping {
            base,
            len,
            _owner: owner,
        }
    }

    /// Fresh zeroed memory of `len` bytes (rounded up to whole pages), every page present.
    ///
    /// # Errors
    /// If the kernel gives none.
    pub fn anonymous(len: usize) -> Result<Mapping> {
        struct Pages(NonNull<u8>, usize);
        // SAFETY: an address range, valid on every thread.
        unsafe impl Send for Pages {}
        // SAFETY: as above; it has no state.
        unsafe impl Sync for Pages {}
        impl Drop for Pages {
            fn drop(&mut self) {
                // SAFETY: mapped below, with this length, and all users of the owner are gone.
                unsafe { libc::munmap(self.0.as_ptr().cast(), self.1) };
            }
        }
        let len = len.max(1).next_multiple_of(4096);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        match NonNull::new(base.cast::<u8>()) {
            Some(at) if base != libc::MAP_FAILED => {
                // SAFETY: just mapped, and unmapped only when the owner is dropped.
                Ok(unsafe { Mapping::new(at, len, Arc::new(Pages(at, len))) })
            }
            _ => Err(Error::os(
                format!("no {} of memory", crate::size::human(len as u64)),
                std::io::Error::last_os_error(),
            )),
        }
    }

    /// Where in the mapping `len` bytes at `address` are, if they are inside it.
    pub fn offset_of(&self, address: *const u8, len: usize) -> Option<usize> {
        let offset = address.addr().checked_sub(self.base.as_ptr().addr())?;
        (offset.checked_add(len)? <= self.len).then_some(offset)
    }

    /// The address of byte `offset`, if `len` bytes from there are inside the mapping.
    pub fn at(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        if offset.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: `offset <= self.len`, so the result is in or one past the mapped range.
        Some(unsafe { self.base.as_ptr().add(offset) })
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The memory of one chunk. A backend with a copy engine knows the engine's way in by the chunk's
/// index.
#[derive(Clone)]
pub struct ChunkMemory {
    /// Bytes, the header's 4 KiB included.
    pub size: u64,
    /// One for all clones: queue threads have theirs.
    mapping: Arc<OnceLock<Mapping>>,
}

impl ChunkMemory {
    /// `size` bytes, with the CPU's way in where there is one.
    pub fn new(size: u64, mapping: Option<Mapping>) -> ChunkMemory {
        let mapping = mapping.map(OnceLock::from).unwrap_or_default();
        ChunkMemory {
            size,
            mapping: Arc::new(mapping),
        }
    }

    /// The CPU's way in; `None` while only the GPU's engines reach it.
    pub fn mapping(&self) -> Option<&Mapping> {
        self.mapping.get()
    }

    /// From now on the CPU reaches it, too, for whoever has a clone of this. The first mapping stays.
    pub fn set_mapping(&self, mapping: Mapping) {
        let _ = self.mapping.set(mapping);
    }

    /// The address of byte `offset`, if the CPU reaches `len` bytes from there.
    pub fn at(&self, offset: u64, len: usize) -> Option<*mut u8> {
        self.mapping()?.at(offset, len)
    }
}

/// A queue that moves bytes one way only, and the way's name.
pub type PathQueue = (&'static str, Box<dyn BackendQueue>);

/// The control handle: the chunks of one device.
pub trait Backend: Send + Sync {
    /// Its name in `list`: `host`, `pci`, `cuda`, `vulkan`.
    fn kind(&self) -> &'static str;

    /// The GPU's PCI address, else its name, where there is one.
    fn gpu(&self) -> Option<String> {
        None
    }

    /// Whether a driver may move the memory away: `pinned`, `evictable`, or `system` for memory that
    /// is system memory. `None` where there is no driver to do so.
    fn residency(&self) -> Option<&'static str> {
        None
    }

    /// The copy path in words, for `show`: `avx512`.
    fn copy_path(&self) -> String;

    /// The chunks, in the order of the device's addresses, as the layout asked for them.
    fn chunks(&self) -> &[ChunkMemory];

    /// The data handle for one queue thread that keeps up to `copies` copies in flight, whose memory
    /// ends all lie in one of `memory`. All memory it will ever need is allocated here.
    ///
    /// # Errors
    /// That something it needs cannot be had.
    fn open_queue(
        &self,
        queue: QueueId,
        copies: usize,
        memory: &[Mapping],
    ) -> Result<Box<dyn BackendQueue>>;

    /// One queue for each copy path that is there, with its name, for a check that the paths see each
    /// other's writes; empty where there is one path only.
    ///
    /// # Errors
    /// As [`Backend::open_queue`].
    fn open_paths(&self, _copies: usize, _memory: &[Mapping]) -> Result<Vec<PathQueue>> {
        Ok(Vec::new())
    }

    /// Files that are mapped and that no copy needs once the queues are open, by the beginnings of their
    /// names: their pages need no lock.
    fn cold_files(&self) -> Vec<&'static str> {
        Vec::new()
    }

    /// What was measured of the copy paths; `None` where there is one path only.
    fn paths(&self) -> Option<PathsInfo> {
        None
    }
}

/// The data handle of one queue thread.
pub trait BackendQueue: Send {
    /// Takes a copy; it starts at the next [`BackendQueue::poll`] at the latest, so that a backend
    /// can look at a whole batch. It never blocks and never fails: a failure is a completion.
    ///
    /// # Safety
    /// `copy.memory` must be valid for `copy.len` bytes and untouched by others until the copy's
    /// completion was polled; `chunk` must be the memory of `copy.chunk`.
    unsafe fn submit(&mut self, copy: &Copy, chunk: &ChunkMemory);

    /// Appends the copies that have completed since the last call, within the capacity of `done`;
    /// what does not fit stays for the next call. The bytes of a completed write are ordered before
    /// any later access by any path.
    fn poll(&mut self, done: &mut Vec<Completion>);

    /// Copies submitted and not yet polled as complete.
    fn in_flight(&self) -> usize;

    /// Whether to poll again at once, because nobody will announce what comes next: copies wait for
    /// the CPU, or an engine is about to finish. It is false at the latest after a bounded time
    /// without progress.
    fn should_poll(&self) -> bool {
        false
    }

    /// What the copies took so far; `None` where there is one path only.
    fn path_counters(&self) -> Option<PathCounters> {
        None
    }

    /// A non-blocking eventfd or timerfd that becomes readable when a copy completes while nobody
    /// polls; `None` for a backend whose copies complete in `submit`. Whoever waited on it reads its
    /// eight bytes before the next [`BackendQueue::poll`], and waits again after it, unless
    /// [`BackendQueue::should_poll`].
    fn completion_fd(&self) -> Option<RawFd> {
        None
    }

    /// The next copy that the kernel is to make, through the queue's ring, in place of this backend;
    /// each is handed out once. Only [`registered`] has any.
    fn next_transfer(&mut self) -> Option<Transfer> {
        None
    }

    /// The end of one that was handed out, told once: its bytes, or a negative errno, as the ring has it.
    fn transferred(&mut self, _id: u32, _result: i32) {}

    /// Copies that the kernel has in hand: their ends wake the thread that waits for its ring.
    fn in_kernel(&self) -> usize {
        0
    }
}

/// How memory that another process holds is mapped again; its descriptors go beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum MemoryDescription {
    /// One memfd for each chunk.
    Host {
        /// How many.
        chunks: u32,
    },
    /// The BAR's sysfs file, and the lock of the BAR.
    Pci(pci::PciDescription),
    /// The kernel module's node, attached to the region.
    Cuda(cuda::CudaDescription),
    /// One OPAQUE_FD for each chunk.
    Vulkan(Box<vulkan::VulkanDescription>),
}

impl MemoryDescription {
    /// How many descriptors go with it.
    pub fn fds(&self) -> usize {
        match self {
            MemoryDescription::Host { chunks } => *chunks as usize,
            MemoryDescription::Pci(_) => pci::PciDescription::FDS,
            MemoryDescription::Cuda(_) => 1,
            MemoryDescription::Vulkan(description) => description.chunks as usize,
        }
    }
}

/// Memory to be handed to another process.
pub struct Exported {
    /// How it is mapped again.
    pub description: MemoryDescription,
    /// What keeps it: [`MemoryDescription::fds`] of them.
    pub fds: Vec<OwnedFd>,
}

/// What must outlive a worker so that another one can map the same memory again.
pub enum MemoryHandles {
    /// One memfd for each chunk.
    Host(host::HostMemory),
    /// The claim on a PCI function's BAR.
    Pci(pci::PciMemory),
    /// Pinned memory of an NVIDIA GPU.
    Cuda(cuda::CudaMemory),
    /// The opened GPU.
    Vulkan(Box<vulkan::VulkanMemory>),
}

impl MemoryHandles {
    /// Bytes a device may take (chunk headers included) from what `spec` names.
    ///
    /// # Errors
    /// The reason why that memory cannot be used at all.
    pub fn available(spec: &BackendSpec) -> Result<u64> {
        match spec {
            BackendSpec::Host => host::available(),
            BackendSpec::Pci { address, bar } => pci::available(address, *bar),
            BackendSpec::Cuda { gpu } => cuda::available(gpu.as_deref()),
            BackendSpec::Vulkan(spec) => vulkan::available(spec),
        }
    }

    /// The layout of `size` of the memory that `spec` names, for whoever uses it without a device.
    ///
    /// # Errors
    /// As [`MemoryHandles::available`] and [`Layout::new`].
    pub fn layout(spec: &BackendSpec, size: &SizeSpec, chunk: Option<u64>) -> Result<Layout> {
        let largest = Layout::largest_device(MemoryHandles::available(spec)?, chunk);
        Layout::new(size.resolve(largest)?, chunk)
    }

    /// Takes the memory for `layout`.
    ///
    /// # Errors
    /// Why it cannot be had: taken, too small, owned by a driver.
    pub fn create(spec: &BackendSpec, layout: &Layout) -> Result<MemoryHandles> {
        match spec {
            BackendSpec::Host => host::HostMemory::create(layout).map(MemoryHandles::Host),
            BackendSpec::Pci { address, bar } => {
                pci::PciMemory::claim(address, *bar, layout).map(MemoryHandles::Pci)
            }
            BackendSpec::Cuda { gpu } => {
                cuda::CudaMemory::create(gpu.as_deref(), layout).map(MemoryHandles::Cuda)
            }
            BackendSpec::Vulkan(spec) => {
                let memory = vulkan::VulkanMemory::create(spec, layout)?;
                Ok(MemoryHandles::Vulkan(Box::new(memory)))
            }
        }
    }

    /// Whether the memory is made by the first worker, because making it needs a GPU's library. A
    /// supervisor makes the rest, and every worker gets it in the same way.
    pub fn needs_gpu_library(spec: &BackendSpec) -> bool {
        matches!(spec, BackendSpec::Vulkan(_))
    }

    /// Bytes of `chunks` that are not mapped and were, in the process that made this memory: a driver may
    /// have had no room for it while that one lived.
    pub fn unmapped_rest(&self, chunks: &[ChunkMemory]) -> u64 {
        match self {
            MemoryHandles::Vulkan(memory) => memory.unmapped_rest(chunks),
            MemoryHandles::Host(_) | MemoryHandles::Pci(_) | MemoryHandles::Cuda(_) => 0,
        }
    }

    /// Maps those, as far as there is room and until `stop`: the chunks that are now to have these mappings
    /// ([`ChunkMemory::set_mapping`]).
    pub fn map_rest<'a>(
        &self,
        chunks: &'a [ChunkMemory],
        stop: &AtomicBool,
    ) -> Vec<(&'a ChunkMemory, Mapping)> {
        match self {
            MemoryHandles::Vulkan(memory) => memory.map_rest(chunks, stop),
            MemoryHandles::Host(_) | MemoryHandles::Pci(_) | MemoryHandles::Cuda(_) => Vec::new(),
        }
    }

    /// The memory as another process can be handed it.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if this memory ends with the process that made it.
    pub fn export(&self) -> Result<Exported> {
        match self {
            MemoryHandles::Host(memory) => memory.export(),
            MemoryHandles::Pci(memory) => memory.export(),
            MemoryHandles::Cuda(memory) => memory.export(),
            MemoryHandles::Vulkan(memory) => memory.export(),
        }
    }

    /// The memory that another process exported. What was changed for it (a claim) stays the
    /// exporter's to set back.
    ///
    /// # Errors
    /// Descriptors and description do not fit.
    pub fn import(description: MemoryDescription, fds: Vec<OwnedFd>) -> Result<MemoryHandles> {
        match description {
            MemoryDescription::Host { .. } => {
                Ok(MemoryHandles::Host(host::HostMemory::import(fds)))
            }
            MemoryDescription::Pci(description) => {
                pci::PciMemory::import(description, fds).map(MemoryHandles::Pci)
            }
            MemoryDescription::Cuda(description) => {
                cuda::CudaMemory::import(description, fds).map(MemoryHandles::Cuda)
            }
            MemoryDescription::Vulkan(description) => {
                let memory = vulkan::VulkanMemory::import(*description, fds)?;
                Ok(MemoryHandles::Vulkan(Box::new(memory)))
            }
        }
    }

    /// Takes the place of an exporter that is gone: what was changed for imported memory is set back
    /// when this is dropped.
    pub fn own(&mut self) {
        self.set_owner(true);
    }

    /// Leaves everything as it is when this is dropped.
    pub fn disown(&mut self) {
        self.set_owner(false);
    }

    fn set_owner(&mut self, owner: bool) {
        match self {
            MemoryHandles::Pci(memory) => memory.set_owner(owner),
            MemoryHandles::Cuda(memory) => memory.set_owner(owner),
            MemoryHandles::Host(_) | MemoryHandles::Vulkan(_) => {}
        }
    }

    /// Takes memory again that the device `uuid`, on `gpu`, used until all of its processes were gone.
    /// Nothing is written to it; whether it still holds the device's contents is for its headers to say.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if such memory goes with its processes.
    pub fn find_again(
        spec: &DeviceSpec,
        layout: &Layout,
        uuid: &[u8; 16],
        gpu: Option<&str>,
    ) -> Result<MemoryHandles> {
        match &spec.backend {
            BackendSpec::Pci { address, bar } => {
                pci::PciMemory::claim_again(address, *bar, layout).map(MemoryHandles::Pci)
            }
            BackendSpec::Cuda { .. } => {
                let found = cuda::CudaMemory::find_again(gpu.unwrap_or_default(), layout, uuid);
                let what_to_do = |error: Error| {
                    let name = &spec.name;
                    let text = format!(
                        "'{name}' cannot be recovered: {error}: end it with `vramctl remove {name} --force`"
                    );
                    Error::new(error.kind, text)
                };
                found.map(MemoryHandles::Cuda).map_err(what_to_do)
            }
            BackendSpec::Host | BackendSpec::Vulkan(_) => Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "the memory of '{}' went with its last process, and its contents with it: end it \
                     with `vramctl remove {} --force`",
                    spec.name, spec.name
                ),
            )),
        }
    }

    /// Maps the memory for a worker.
    pub fn open(&self, layout: &Layout) -> Result<Box<dyn Backend>> {
        match self {
            MemoryHandles::Host(memory) => Ok(Box::new(memory.open(layout)?)),
            MemoryHandles::Pci(memory) => Ok(Box::new(memory.open(layout)?)),
            MemoryHandles::Cuda(memory) => Ok(Box::new(memory.open(layout)?)),
            MemoryHandles::Vulkan(memory) => Ok(Box::new(memory.open(layout)?)),
        }
    }

    /// The region of the kernel module that the memory is, as a file whose offsets are those of the
    /// chunks, one after the other; `None` if it is none.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn region_file(&self) -> Result<Option<File>> {
        match self {
            MemoryHandles::Pci(memory) => memory.region_file(),
            MemoryHandles::Cuda(memory) => memory.region_file().map(Some),
            MemoryHandles::Host(_) | MemoryHandles::Vulkan(_) => Ok(None),
        }
    }

    /// Whether memory as `spec` names it is a region of the kernel module; else why not.
    ///
    /// # Errors
    /// The reason, with what to do.
    pub fn check_region(spec: &BackendSpec) -> Result<()> {
        match spec {
            BackendSpec::Pci { .. } if Node::is_there() => Ok(()),
            // It needs the module in any case, and says so.
            BackendSpec::Cuda { .. } => Ok(()),
            BackendSpec::Pci { .. } => Err(Error::new(
                ErrorKind::Unsupported,
                "--zero-copy goes through the kernel module ublk_vram, which is not loaded: `modprobe \
                 ublk_vram`, or leave out --zero-copy",
            )),
            BackendSpec::Host | BackendSpec::Vulkan(_) => Err(Error::usage(
                "--zero-copy needs memory that the kernel module holds: it is of --backend pci and of \
                 --backend cuda",
            )),
        }
    }

    /// Where the memory is on the PCI bus, to see whether it is still there; `None` if it is on none.
    ///
    /// # Errors
    /// That it is not there now.
    pub fn presence(&self) -> Result<Option<Presence>> {
        let address = match self {
            MemoryHandles::Host(_) => None,
            MemoryHandles::Pci(memory) => Some(memory.address()),
            MemoryHandles::Cuda(memory) => memory.address(),
            MemoryHandles::Vulkan(memory) => memory.gpu().address,
        };
        address.map(Presence::of).transpose()
    }

    /// Whether a device has checksums if nobody says: where the memory may flip bits. Neither sysfs nor
    /// Vulkan tells whether a GPU's memory has ECC, so memory of a GPU counts as memory without. System
    /// memory does not: its checksums would lie in the same memory.
    pub fn wants_checksums(spec: &BackendSpec) -> bool {
        match spec {
            BackendSpec::Host => false,
            BackendSpec::Pci { .. } => true,
            BackendSpec::Cuda { .. } => true,
            BackendSpec::Vulkan(spec) => !spec.allow_cpu_device,
        }
    }

    /// Bytes of system memory that the device's own storage takes.
    pub fn system_bytes(&self, layout: &Layout) -> u64 {
        match self {
            MemoryHandles::Host(_) => layout.total_bytes(),
            MemoryHandles::Pci(_) | MemoryHandles::Cuda(_) => 0,
            MemoryHandles::Vulkan(memory) => match memory.gpu().kind {
                vulkan::GpuKind::Cpu => layout.total_bytes(),
                _ => 0,
            },
        }
    }
}
