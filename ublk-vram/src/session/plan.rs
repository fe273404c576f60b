//! What a device is, as plain data, and how its sizes are decided.

use serde::{Deserialize, Serialize};

use crate::backend::MemoryHandles;
use crate::device::{BackendSpec, DeviceSpec};
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;
use crate::store::{ChecksumTable, Layout, uuid_text};
use crate::ublk::{Shape, features};

/// One queue for each CPU, up to this many, unless told otherwise: each costs a locked stack and
/// buffers, and four threads saturate the stores of a PCIe 5 x16 link (docs/performance.md).
const MAX_DEFAULT_QUEUES: usize = 4;
/// The smallest share of a device that its I/O buffers may take by default.
const ARENA_SHARE: u64 = 16;
/// What a server costs beside its I/O buffers (measured, docs/performance.md "Memory").
pub const BASE_COST_BYTES: u64 = 16 << 20;
/// What a GPU's Vulkan driver costs beside that in worker and standby together: 77 MiB of their own each, and 40 MiB of
/// libraries that they share (NVIDIA's 580, docs/performance.md, "What a server takes").
const DRIVER_COST_BYTES: u64 = 200 << 20;
/// More than this part of the device in locked memory is refused unless told otherwise.
const COST_SHARE: u64 = 4;

/// What a device is: enough, with its memory, to serve it again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Identity {
    /// What the user asked for.
    pub spec: DeviceSpec,
    /// Identity of the contents.
    pub uuid: [u8; 16],
    /// Bytes of the block device.
    pub device_bytes: u64,
    /// Bytes of a chunk that is not the last.
    pub chunk_bytes: u64,
    /// How queues and I/O buffers are cut.
    pub shape: Shape,
}

impl Identity {
    /// A new device of these sizes.
    ///
    /// # Errors
    /// The kernel gives no random bytes.
    pub fn new(spec: DeviceSpec, layout: &Layout, shape: Shape) -> Result<Identity> {
        Ok(Identity {
            spec,
            uuid: random_uuid()?,
            device_bytes: layout.device_bytes(),
            chunk_bytes: layout.chunk_size(),
            shape,
        })
    }

    /// How the device lies in chunks.
    ///
    /// # Errors
    /// The sizes make no layout: the identity was not written by this program.
    pub fn layout(&self) -> Result<Layout> {
        Layout::new(self.device_bytes, Some(self.chunk_bytes))
    }

    /// The UUID in its text form (RFC 9562, section 4).
    pub fn uuid_text(&self) -> String {
        uuid_text(&self.uuid)
    }
}

/// Decides every size of a device, as `add` and its `--dry-run` need them; nothing is taken yet.
///
/// # Errors
/// That the memory cannot be used, the device does not fit, a number is out of its range, or the
/// device would cost too much of the host's memory.
pub fn plan(spec: &DeviceSpec) -> Result<(Layout, Shape)> {
    if spec.zero_copy {
        check_zero_copy(spec)?;
    }
    let layout = decide_layout(spec)?;
    let shape = decide_shape(spec, &layout)?;
    refuse_high_cost(spec, &layout, &shape)?;
    Ok((layout, shape))
}

/// Refuses zero copy where it cannot be, or where what else is asked for cannot be with it.
fn check_zero_copy(spec: &DeviceSpec) -> Result<()> {
    if spec.checksum == Some(true) {
        return Err(Error::usage(
            "--zero-copy and --checksum=on exclude each other: with zero copy the server never sees the \
             bytes that it would have to check; leave out one of them",
        ));
    }
    if spec.arena.is_some() {
        return Err(Error::usage(
            "--zero-copy needs no I/O buffers: leave out --io-memory",
        ));
    }
    MemoryHandles::check_region(&spec.backend)?;
    features::probe()?.check_zero_copy()
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
    if spec.zero_copy {
        return Shape::zero_copy(queues, spec.depth);
    }
    let one_page_each = u64::from(queues) * u64::from(spec.depth) * 4096;
    let arena = spec.arena.unwrap_or_else(|| {
        (layout.device_bytes() / ARENA_SHARE).clamp(
            one_page_each,
            DeviceSpec::MAX_DEFAULT_ARENA.max(one_page_each),
        )
    });
    Shape::new(queues, spec.depth, arena)
}

/// What the processes of a server cost beside buffers and checksums: worker and standby have the GPU's
/// driver in them.
fn base_cost(backend: &BackendSpec) -> u64 {
    match backend {
        BackendSpec::Vulkan(_) => BASE_COST_BYTES + DRIVER_COST_BYTES,
        _ => BASE_COST_BYTES,
    }
}

/// Bytes of locked system memory that a device is expected to cost.
pub fn cost_bytes(spec: &DeviceSpec, layout: &Layout, shape: &Shape) -> u64 {
    let checksums = match has_checksums(spec) {
        true => ChecksumTable::bytes(layout.device_bytes()),
        false => 0,
    };
    base_cost(&spec.backend) + shape.arena_bytes() as u64 + checksums
}

/// Whether a device has checksums: as its user said, else as its memory needs them, and never with zero
/// copy.
pub(crate) fn has_checksums(spec: &DeviceSpec) -> bool {
    spec.checksum
        .unwrap_or_else(|| !spec.zero_copy && MemoryHandles::wants_checksums(&spec.backend))
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
