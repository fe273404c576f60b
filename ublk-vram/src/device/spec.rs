//! What the user asked for.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::DeviceName;
use crate::size::SizeSpec;

/// Everything `ublk-vram serve` needs to know, as the user wrote it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct DeviceSpec {
    /// The device's name.
    pub name: DeviceName,
    /// Its size.
    pub size: SizeSpec,
    /// Where its memory comes from.
    pub backend: BackendSpec,
    /// The N of `/dev/ublkbN`; the driver chooses when it is absent.
    #[serde(default)]
    pub id: Option<u32>,
    /// Hardware queues, each with a thread of its own; absent: one for each CPU, at most 4.
    #[serde(default)]
    pub queues: Option<u16>,
    /// Requests in flight for each queue (1 to 4096).
    #[serde(default = "DeviceSpec::default_depth")]
    pub depth: u16,
    /// Bytes of locked I/O buffers for the whole device; the largest request follows from it.
    /// Absent: a sixteenth of the device, at most [`DeviceSpec::MAX_DEFAULT_ARENA`].
    #[serde(default)]
    pub arena: Option<u64>,
    /// Bytes of one chunk, a power of two; absent: 1 GiB, or 64 MiB below 4 GiB of device.
    #[serde(default)]
    pub chunk: Option<u64>,
    /// Keep a checksum of each 4 KiB block, and check every read against it; absent: where the memory is
    /// a GPU's.
    #[serde(default)]
    pub checksum: Option<bool>,
    /// The kernel copies between the pages of requests and the memory, which must be a region of the
    /// kernel module; the server sees no bytes and has no I/O buffers.
    #[serde(default)]
    pub zero_copy: bool,
    /// Start although a protection that swap needs is missing, or the device costs more than a
    /// quarter of its size in locked memory.
    #[serde(default)]
    pub allow_unsafe: bool,
    /// Seconds after which a device that failed ends by itself, and what waits for it gets EIO;
    /// absent: it waits for somebody to decide.
    #[serde(default)]
    pub fail_after: Option<u64>,
    /// Switches that only a laboratory needs.
    #[serde(default)]
    pub lab: LabSpec,
}

impl DeviceSpec {
    /// 64 requests a queue: what one CPU's plug list fills.
    pub const fn default_depth() -> u16 {
        64
    }

    /// 32 MiB: it is memory the user loses, so it does not grow with the device.
    pub const MAX_DEFAULT_ARENA: u64 = 32 << 20;
}

/// Where a device's memory comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum BackendSpec {
    /// System memory (a memfd): for tests and for machines without a GPU.
    Host,
    /// The whole BAR of a PCI function that no driver owns.
    Pci {
        /// `0000:03:00.0`; the domain may be left out.
        address: String,
        /// Which BAR; absent: the largest prefetchable memory BAR.
        bar: Option<u8>,
    },
    /// Memory of an NVIDIA GPU, allocated with CUDA and pinned by the kernel module.
    Cuda {
        /// `0000:03:00.0`; absent: the only GPU that CUDA knows.
        gpu: Option<String>,
    },
    /// Memory of a GPU through its Vulkan driver.
    Vulkan(VulkanSpec),
}

/// A GPU, and how to use it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VulkanSpec {
    /// Index among the GPUs that Vulkan knows, PCI address, UUID, or `auto`.
    pub gpu: String,
    /// Take a device that is software on the CPU, for tests.
    #[serde(default)]
    pub allow_cpu_device: bool,
    /// Bytes of the GPU's memory left to others; absent: 1 GiB (2 GiB with a display on it), or a
    /// twentieth of the memory if that is more.
    #[serde(default)]
    pub reserve: Option<u64>,
    /// Bytes mapped for the CPU at most, which leaves the rest of the PCI aperture to others; the
    /// GPU's engines reach what is not mapped.
    #[serde(default)]
    pub mapped: Option<u64>,
    /// The copy path, if the planner is not to choose.
    #[serde(default)]
    pub copy_path: CopyPath,
}

/// Which way bytes go. Memory that the path does not reach takes another one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CopyPath {
    /// What was measured to be the fastest, for each batch.
    #[default]
    Auto,
    /// The CPU, through the BAR.
    Bar,
    /// The GPU's copy engine.
    Dma,
    /// A compute shader.
    Gather,
}

/// Switches that take a protection away or inject faults. Never for a device anybody relies on.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct LabSpec {
    /// Neither lock the server's memory nor keep it out of swap by a cgroup of its own: under swap
    /// this must hang, and a test relies on it.
    pub no_memory_lock: bool,
    /// Wrap the backend in the fault layer; it is driven over the control socket.
    pub fault: bool,
    /// Pretend that the driver has no SAFE_STOP_DEV, to test the way older kernels are stopped.
    pub no_safe_stop: bool,
    /// Seconds after which a copy that does not complete is the loss of the device, in place of
    /// [`LabSpec::COPY_LIMIT`].
    pub copy_limit: Option<u64>,
    /// Make a device that dies with its worker, as every device did before there was recovery.
    pub no_recovery: bool,
    /// Kill workers that take over.
    pub crash: Option<LabCrash>,
    /// Where the server's own log goes as well, for a run without a journal.
    pub log_file: Option<PathBuf>,
}

impl LabSpec {
    /// 60 s: a GPU's driver resets one that hangs after 2 to 10 s, and then fails the copy itself.
    pub const COPY_LIMIT: u64 = 60;
}

/// Where a worker that takes over is killed, and how many of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct LabCrash {
    /// Where.
    pub at: CrashPoint,
    /// How many.
    pub count: u64,
}

/// A moment of a takeover.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CrashPoint {
    /// Half of the tags of a queue are fetched.
    HalfFetched,
    /// All are fetched, between START_USER_RECOVERY and END_USER_RECOVERY.
    BeforeEnd,
    /// The disk is live, and the supervisor has not been told yet.
    AfterEnd,
}
