//! Everything that outlives a worker.
//!
//! A worker can die at any time; what it worked on must not die with it. So all of it is here, as
//! descriptors and plain data that another process could be handed: the device memory's handles, the
//! I/O buffers and the counters as memfds, and what the device is. There is one process today; the
//! supervisor that comes in front of it will own this.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::backend::MemoryHandles;
use crate::control::RunDir;
use crate::device::DeviceSpec;
use crate::engine::StatsTable;
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;
use crate::store::shared::SharedMapping;
use crate::store::{ChecksumTable, Layout};
use crate::ublk::Shape;

/// `vramctl list` takes a name's lock, shared, for a moment to see whether its server lives.
const LOOKERS: Duration = Duration::from_millis(500);
/// One queue for each CPU, up to this many, unless told otherwise: each costs a locked stack and
/// buffers, and four threads saturate the stores of a PCIe 5 x16 link (docs/performance.md).
const MAX_DEFAULT_QUEUES: usize = 4;
/// The smallest share of a device that its I/O buffers may take by default.
const ARENA_SHARE: u64 = 16;
/// What a server costs beside its I/O buffers (measured, docs/performance.md "Memory").
pub const BASE_COST_BYTES: u64 = 12 << 20;
/// More than this part of the device in locked memory is refused unless told otherwise.
const COST_SHARE: u64 = 4;

/// A device, independent of the process that serves it.
pub struct Session {
    /// What the user asked for.
    pub spec: DeviceSpec,
    /// Identity of the contents.
    pub uuid: [u8; 16],
    /// Grows by one with each worker.
    pub generation: u64,
    /// How the device lies in chunks.
    pub layout: Layout,
    /// How queues and I/O buffers are cut.
    pub shape: Shape,
    /// The device memory's handles.
    pub memory: MemoryHandles,
    /// The counters (memfd).
    state: OwnedFd,
    /// The I/O buffers (memfd).
    arena: OwnedFd,
    /// The checksums (memfd), if the device has them.
    checksums: Option<OwnedFd>,
    /// Where sockets and notes are.
    pub run_dir: RunDir,
    /// Held for the session's life: the name is taken. The last field, so the last to be dropped.
    _name: NameLock,
}

/// The lock of a device's name; its file goes with it.
struct NameLock {
    _lock: Flock<File>,
    path: PathBuf,
}

impl Drop for NameLock {
    fn drop(&mut self) {
        // While the lock is still held: nobody can have taken the name in between.
        let _ = fs::remove_file(&self.path);
    }
}

impl Session {
    /// Takes the name and the memory, and decides every size.
    ///
    /// # Errors
    /// One sentence for whatever cannot be had; nothing is left behind.
    pub fn create(spec: DeviceSpec) -> Result<Session> {
        let run_dir = RunDir::system();
        let name = take_name(&run_dir, &spec)?;
        let (layout, shape) = plan(&spec)?;
        let memory = MemoryHandles::create(&spec, &layout)?;
        Ok(Session {
            uuid: random_uuid()?,
            generation: 1,
            state: sized_memfd(c"ublk-vram-state", StatsTable::bytes(shape.queues))?,
            arena: sized_memfd(c"ublk-vram-io", shape.arena_bytes())?,
            checksums: match checksum_bytes(&spec, &layout) {
                0 => None,
                bytes => Some(sized_memfd(c"ublk-vram-checksums", bytes as usize)?),
            },
            layout,
            shape,
            memory,
            run_dir,
            spec,
            _name: name,
        })
    }

    /// Maps the counters.
    pub fn map_state(&self) -> Result<StatsTable> {
        let bytes = StatsTable::bytes(self.shape.queues);
        StatsTable::new(
            SharedMapping::new(self.state.as_fd(), bytes)?,
            self.shape.queues,
        )
    }

    /// Maps the checksums, if the device has them.
    pub fn map_checksums(&self) -> Result<Option<ChecksumTable>> {
        let Some(memory) = &self.checksums else {
            return Ok(None);
        };
        let device = self.layout.device_bytes();
        let bytes = ChecksumTable::bytes(device) as usize;
        ChecksumTable::new(SharedMapping::new(memory.as_fd(), bytes)?, device).map(Some)
    }

    /// Maps the I/O buffers.
    pub fn map_arena(&self) -> Result<SharedMapping> {
        SharedMapping::new(self.arena.as_fd(), self.shape.arena_bytes())
    }

    /// The UUID in its text form (RFC 9562, section 4).
    pub fn uuid_text(&self) -> String {
        let hex: String = self.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        let group = |from: usize, to: usize| hex.get(from..to).unwrap_or_default();
        [
            group(0, 8),
            group(8, 12),
            group(12, 16),
            group(16, 20),
            group(20, 32),
        ]
        .join("-")
    }
}

/// Takes the lock of the device's name.
fn take_name(run_dir: &RunDir, spec: &DeviceSpec) -> Result<NameLock> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o755)
        .create(run_dir.path())
        .map_err(|error| Error::os(format!("cannot make {}", run_dir.path().display()), error))?;
    let path = run_dir.lock(&spec.name);
    let end = Instant::now() + LOOKERS;
    loop {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o644)
            .open(&path)
            .map_err(|error| Error::os(format!("cannot make {}", path.display()), error))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            // A server that ends removes the file it holds: the lock counts only on the one that
            // is still there.
            Ok(lock) if RunDir::is_still(&lock, &path) => {
                return Ok(NameLock { _lock: lock, path });
            }
            Ok(_) => {}
            Err((_, Errno::EWOULDBLOCK)) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err((_, Errno::EWOULDBLOCK)) => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    format!(
                        "a device named '{}' exists already: see `vramctl list`",
                        spec.name
                    ),
                ));
            }
            Err((_, errno)) => {
                return Err(Error::os(format!("cannot lock {}", path.display()), errno));
            }
        }
    }
}

/// Decides every size of a device, as `add` and its `--dry-run` need them; nothing is taken yet.
///
/// # Errors
/// That the memory cannot be used, the device does not fit, a number is out of its range, or the
/// device would cost too much of the host's memory.
pub fn plan(spec: &DeviceSpec) -> Result<(Layout, Shape)> {
    let layout = decide_layout(spec)?;
    let shape = decide_shape(spec, &layout)?;
    refuse_high_cost(spec, &layout, &shape)?;
    Ok((layout, shape))
}

fn decide_layout(spec: &DeviceSpec) -> Result<Layout> {
    let available = MemoryHandles::available(&spec.backend)?;
    let largest = Layout::largest_device(available, spec.chunk);
    let size = spec.size.resolve(largest)?;
    if size == 0 || size > largest {
        return Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "a device of {} does not fit: at most {} ({largest} bytes) can be had here",
                human(size),
                human(largest)
            ),
        ));
    }
    Layout::new(size, spec.chunk)
}

fn decide_shape(spec: &DeviceSpec, layout: &Layout) -> Result<Shape> {
    let cpus = std::thread::available_parallelism().map_or(1, |n| n.get());
    let queues = spec
        .queues
        .unwrap_or_else(|| u16::try_from(cpus.min(MAX_DEFAULT_QUEUES)).unwrap_or(1));
    let one_page_each = u64::from(queues) * u64::from(spec.depth) * 4096;
    let arena = spec.arena.unwrap_or_else(|| {
        (layout.device_bytes() / ARENA_SHARE).clamp(
            one_page_each,
            DeviceSpec::MAX_DEFAULT_ARENA.max(one_page_each),
        )
    });
    Shape::new(queues, spec.depth, arena)
}

/// Bytes of locked system memory that a device is expected to cost.
pub fn cost_bytes(spec: &DeviceSpec, layout: &Layout, shape: &Shape) -> u64 {
    BASE_COST_BYTES + shape.arena_bytes() as u64 + checksum_bytes(spec, layout)
}

/// Bytes of the checksums; 0 for a device without.
fn checksum_bytes(spec: &DeviceSpec, layout: &Layout) -> u64 {
    let wanted = spec
        .checksum
        .unwrap_or_else(|| MemoryHandles::wants_checksums(&spec.backend));
    if wanted {
        ChecksumTable::bytes(layout.device_bytes())
    } else {
        0
    }
}

fn refuse_high_cost(spec: &DeviceSpec, layout: &Layout, shape: &Shape) -> Result<()> {
    let cost = cost_bytes(spec, layout, shape);
    let most = layout.device_bytes() / COST_SHARE;
    if cost <= most || spec.allow_unsafe {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::NoSpace,
        format!(
            "a device of {} would cost about {} of locked system memory, over a quarter of what it gives: \
             make it larger, or its I/O memory smaller (--io-memory), or say --allow-unsafe",
            human(layout.device_bytes()),
            human(cost)
        ),
    ))
}

fn sized_memfd(name: &std::ffi::CStr, bytes: usize) -> Result<OwnedFd> {
    let fd = memfd_create(name, MFdFlags::MFD_CLOEXEC)
        .map_err(|errno| Error::os("memfd_create", errno))?;
    let size = i64::try_from(bytes).unwrap_or(i64::MAX);
    nix::unistd::ftruncate(&fd, size)
        .map_err(|errno| Error::os(format!("memfd of {bytes} bytes"), errno))?;
    Ok(fd)
}

/// A random (version 4) UUID from the kernel.
fn random_uuid() -> Result<[u8; 16]> {
    let mut uuid = [0u8; 16];
    // SAFETY: 16 bytes of our own stack; up to 256 bytes are never given short (getrandom(2)).
    let got = unsafe { libc::getrandom(uuid.as_mut_ptr().cast(), uuid.len(), 0) };
    if usize::try_from(got) != Ok(uuid.len()) {
        return Err(Error::os("getrandom", std::io::Error::last_os_error()));
    }
    let [.., version, _, variant, _, _, _, _, _, _, _] = &mut uuid;
    *version = *version & 0x0f | 0x40;
    *variant = *variant & 0x3f | 0x80;
    Ok(uuid)
}
