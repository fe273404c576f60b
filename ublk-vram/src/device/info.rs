//! What a server tells of its device: the data behind `list` and `show`.

use serde::{Deserialize, Serialize};

use super::{DeviceName, DeviceState};

/// What does not change while a device lives. The server also leaves it in
/// `/run/ublk-vram/NAME.json` (0644), so that `list` says something without root; nothing but
/// `list` and `remove --force` reads that file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StaticInfo {
    /// The device's name.
    pub name: DeviceName,
    /// `/dev/ublkbN`.
    pub device: String,
    /// The N of it.
    pub id: u32,
    /// Major number of the block device.
    pub major: u32,
    /// Minor number of the block device.
    pub minor: u32,
    /// Bytes of the block device.
    pub size: u64,
    /// `host`, `pci`, `vulkan`, ...
    pub backend: String,
    /// PCI address of the GPU, else its name, where there is one.
    pub gpu: Option<String>,
    /// Whether the GPU's driver may move the memory away: `pinned`, `evictable`, `system`; absent
    /// where no driver has it.
    #[serde(default)]
    pub residency: Option<String>,
    /// Random identity of this device's contents, as hexadecimal groups (RFC 9562 text form).
    pub uuid: String,
    /// Hardware queues.
    pub queues: u16,
    /// Requests in flight for each queue.
    pub depth: u16,
    /// Largest request in bytes.
    pub max_io: u32,
    /// Bytes of one chunk.
    pub chunk_size: u64,
    /// How many chunks.
    pub chunks: u32,
    /// ublk features in use, by name (include/uapi/linux/ublk_cmd.h).
    pub features: Vec<String>,
    /// How bytes move: the copy routines in use (`avx512`, ...).
    pub copy: String,
    /// Whether the kernel copies, between the pages of requests and the memory (zero copy).
    #[serde(default)]
    pub zero_copy: bool,
    /// The copy paths and what they cost, where there is more than one; nothing carried yet.
    #[serde(default)]
    pub paths: Option<PathsInfo>,
    /// Process id of the server: its supervisor, the one that SIGTERM is sent to.
    pub pid: i32,
    /// Process id of the worker when this was written: the process that the driver knows.
    #[serde(default)]
    pub worker: i32,
    /// Why the disk does not survive its worker; absent where it does.
    #[serde(default)]
    pub mortal: Option<String>,
    /// When the device went live, in seconds since 1970.
    pub since: u64,
}

/// Everything `show` prints.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceInfo {
    /// What does not change.
    #[serde(flatten)]
    pub fixed: StaticInfo,
    /// The state now.
    pub state: DeviceState,
    /// What the state waits for, or why the last drain failed.
    pub reason: Option<String>,
    /// The processes of the server, and what they have lived through.
    #[serde(default)]
    pub server: ServerInfo,
    /// The server's memory.
    pub memory: MemoryInfo,
    /// What is known of the checksums; absent if the device has none.
    #[serde(default)]
    pub checksum: Option<ChecksumInfo>,
    /// Counters of each queue.
    pub queue: Vec<QueueInfo>,
    /// The copy paths with what they have carried, where there is more than one.
    #[serde(default)]
    pub carried: Option<PathsInfo>,
}

/// The copy paths of a device that has more than one: what they cost, what is chosen, what was taken.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct PathsInfo {
    /// Every path that was measured.
    pub costs: Vec<PathCost>,
    /// What is chosen for batches of some sizes, by the measurements of the start.
    pub choices: Vec<PathChoice>,
}

impl PathsInfo {
    /// The same with what the queues have carried so far.
    #[must_use]
    pub fn with(mut self, queues: &[QueueInfo]) -> PathsInfo {
        let is_late = queues.iter().any(|queue| queue.paths.gather_is_late);
        for cost in &mut self.costs {
            let direction = usize::from(cost.direction != "read");
            let path = match cost.path.as_str() {
                "dma" => 1,
                "gather" => 2,
                _ => 0,
            };
            let of = |table: &[[u64; 3]; 2]| {
                let row = table.get(direction);
                row.and_then(|row| row.get(path)).copied().unwrap_or(0)
            };
            let sum = |part: fn(&PathCounters) -> &[[u64; 3]; 2]| {
                queues.iter().map(|queue| of(part(&queue.paths))).sum()
            };
            cost.copies = sum(|paths| &paths.copies);
            cost.bytes = sum(|paths| &paths.bytes);
            let slowdowns = queues.iter().map(|queue| of(&queue.paths.slowdown));
            cost.slowdown = slowdowns.max().filter(|most| *most > 0).unwrap_or(1000) as f64 / 1e3;
            if cost.avoided.is_none() && is_late && path == 2 {
                cost.avoided = Some("others compute on the GPU".to_owned());
            }
        }
        self
    }
}

/// What the copies of one queue took. Tables are by direction (read, write) and path (bar, dma,
/// gather).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PathCounters {
    /// Copies.
    pub copies: [[u64; 3]; 2],
    /// Their bytes.
    pub bytes: [[u64; 3]; 2],
    /// Thousandths of the time that was measured at the start.
    pub slowdown: [[u64; 3]; 2],
    /// The shader was late, and has not proved itself since.
    pub gather_is_late: bool,
}

/// One path in one direction.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathCost {
    /// `read` or `write`.
    pub direction: String,
    /// `bar-store`, `bar-load`, `dma`, `gather`.
    pub path: String,
    /// Nanoseconds once a batch.
    pub start: f64,
    /// Nanoseconds for each copy.
    pub copy: f64,
    /// Nanoseconds for each byte.
    pub byte: f64,
    /// Copies that took it.
    pub copies: u64,
    /// Their bytes.
    pub bytes: u64,
    /// How many times slower than at the start it is now, in the queue where it is slowest.
    pub slowdown: f64,
    /// Why it carries nothing now.
    pub avoided: Option<String>,
}

/// The path for one sort of batch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathChoice {
    /// `read` or `write`.
    pub direction: String,
    /// Bytes of each copy.
    pub size: u64,
    /// Copies in the batch.
    pub copies: u32,
    /// The path.
    pub path: String,
    /// Nanoseconds it is expected to take.
    pub expected: f64,
}

/// The checksums of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChecksumInfo {
    /// Bytes of locked system memory that they take.
    pub bytes: u64,
    /// Blocks (4 KiB) that a worker left half written when it died, and that nobody has rewritten: they
    /// are read unchecked.
    pub left_writing: u64,
    /// The table did not outlive its worker, and is being made again from what is in the memory.
    pub unverified: bool,
}

/// The processes of a server. A process that is not there has the id 0.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerInfo {
    /// Process id of the supervisor.
    pub supervisor: i32,
    /// Process id of the worker.
    pub worker: i32,
    /// Process id of the standby that is ready to take over.
    pub standby: i32,
    /// Which worker this is, counted from 1.
    pub generation: u64,
    /// How often a worker took over from one that died or was replaced.
    pub takeovers: u64,
    /// Microseconds from the sight of the last worker's death to the disk being served again.
    pub last_pause_us: u64,
    /// The longest of these.
    pub longest_pause_us: u64,
    /// How often a supervisor took over from one that died.
    pub supervisors: u64,
    /// How often a worker ended because its driver lost the GPU, for another one to look at the memory.
    pub driver_losses: u64,
}

/// The memory of the server's processes together, from /proc/PID/status, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryInfo {
    /// Memory this device costs the host: locked and resident, without device memory it maps.
    pub cost: u64,
    /// VmLck.
    pub locked: u64,
    /// VmRSS.
    pub resident: u64,
    /// VmSwap: must be 0.
    pub swapped: u64,
    /// Bytes of the I/O buffers within `locked`.
    pub arena: u64,
}

/// Counters of one queue since the device went live. All are totals; bytes and requests are of
/// completed requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueInfo {
    /// Thread id of the queue's thread.
    pub tid: i32,
    /// Completed reads.
    pub reads: u64,
    /// Completed writes.
    pub writes: u64,
    /// Completed discards and write-zeroes.
    pub zeroes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Bytes zeroed by discards and write-zeroes.
    pub zero_bytes: u64,
    /// Requests that ended with an error.
    pub errors: u64,
    /// Batches taken from the kernel.
    pub batches: u64,
    /// The largest number of requests taken in one batch.
    pub largest_batch: u64,
    /// Copies in flight now.
    pub in_flight: u64,
    /// The largest number of copies ever in flight at once.
    pub most_in_flight: u64,
    /// Write requests the kernel marked as swap (UBLK_IO_F_SWAP).
    pub swap_writes: u64,
    /// Which paths its copies took; shown with the paths' costs.
    #[serde(skip)]
    pub paths: PathCounters,
    /// Blocks (4 KiB) that read as something else than was written: their reads ended with EIO.
    #[serde(default)]
    pub bad_blocks: u64,
    /// Blocks that were read again because their checksum did not fit.
    #[serde(default)]
    pub reread_blocks: u64,
    /// Blocks handed out without a check although the device has checksums: being written at that
    /// moment, or not known since two writes met or a server died.
    #[serde(default)]
    pub unchecked_blocks: u64,
    /// Reads of a chunk's header that a suspicious read was held back for.
    #[serde(default)]
    pub canary_reads: u64,
    /// Requests that a worker had in hand when it died and that came again to the next one.
    #[serde(default)]
    pub reissued: u64,
}
