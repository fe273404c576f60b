//! The command line: the one place that knows its words. `xtask` includes it for man pages.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, Subcommand, ValueEnum};
use ublk_vram::control::FaultAction;
use ublk_vram::device::{CopyPath, CrashPoint, DeviceName, LabCrash};
use ublk_vram::size::{SizeSpec, parse_bytes};

/// The priority of our swap unless told otherwise: before any disk (the kernel gives those negative
/// ones), after zram as its generator sets it up (100).
pub const DEFAULT_SWAP_PRIORITY: u16 = 50;

const EXAMPLES: &str = "\
EXAMPLES
  vramctl gpus                             what there is to make a device of
  vramctl add fast --size 8G --gpu 0       prints /dev/ublkb0 once it is usable
  vramctl add swap0 --size 50% --swap      and swaps to it
  vramctl list -o NAME,SWAP -b             how much is swapped, in bytes
  vramctl remove swap0 --swapoff           swaps off first, then removes
  vramctl check                            whether this machine can do it

EXIT STATUS
  0 done   1 failed   2 wrong usage   3 no such device or GPU, or not active";

const ADD_EXAMPLES: &str = "\
EXAMPLES
  vramctl add fast --size 8G --gpu 0000:03:00.0
  vramctl add swap0 --size max --gpu 1 --swap=100
  vramctl add test --size 256M --backend host";

const REMOVE_EXAMPLES: &str = "\
EXAMPLES
  vramctl remove fast
  vramctl remove swap0 --swapoff
  vramctl remove fast --force              when it failed, or all of its server was killed";

const LIST_EXAMPLES: &str = "\
EXAMPLES
  vramctl list
  vramctl list -n -o DEVICE                for scripts
  vramctl list --json | jq '.devices[].swap.used'";

/// Block devices whose storage is GPU memory: adds, removes and shows them.
#[derive(Debug, Parser)]
#[command(name = "vramctl", version, about, after_help = EXAMPLES, max_term_width = 100)]
#[command(disable_help_subcommand = true)]
pub struct Args {
    /// What to do; `list` when it is left out.
    #[command(subcommand)]
    pub verb: Option<Verb>,
}

/// What `vramctl` can do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// List the devices that memory could come from
    Gpus(GpusArgs),
    /// Make a device, print its path once it is usable
    #[command(after_help = ADD_EXAMPLES)]
    Add(Box<AddArgs>),
    /// Remove a device that nobody uses, wipe its memory and give it back
    #[command(visible_aliases = ["del", "rm"], after_help = REMOVE_EXAMPLES)]
    Remove(RemoveArgs),
    /// List the devices
    #[command(visible_alias = "ls", after_help = LIST_EXAMPLES)]
    List(ListArgs),
    /// Show everything about one device
    Show(ShowArgs),
    /// Replace the process that does a device's I/O by a fresh one, for an upgrade: nothing fails
    Restart(RestartArgs),
    /// Bring a device back that failed, or whose server died
    Recover(RecoverArgs),
    /// Use a device as swap, or no longer
    #[command(subcommand)]
    Swap(SwapVerb),
    /// Tell whether this machine can have devices, and what is missing
    Check(CheckArgs),
    /// Measure on this machine what a device would do
    #[command(subcommand)]
    Bench(BenchVerb),
    /// Print the completion script of a shell
    Completion(CompletionArgs),
    /// Fail, shorten, hold or delay copies of a device added with --lab-fault
    #[command(hide = true)]
    Fault(FaultArgs),
    /// Remove all fault rules and let held copies go
    #[command(hide = true)]
    Release(ReleaseArgs),
}

/// `vramctl gpus`
#[derive(Debug, clap::Args)]
pub struct GpusArgs {
    /// Print JSON
    #[arg(long, short = 'J')]
    pub json: bool,
}

/// Where a device's memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackendName {
    /// System memory: for tests
    Host,
    /// The BAR of a display or memory device that no driver owns
    Pci,
    /// Memory of an NVIDIA GPU, pinned by the kernel module
    Cuda,
    /// Memory of a GPU through its Vulkan driver
    Vulkan,
}

/// Which memory a device or a measurement is made of.
#[derive(Debug, Default, clap::Args)]
pub struct MemoryArgs {
    /// Where the memory comes from [default: the first usable PCI device]
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        value_name = "host|pci|cuda|vulkan"
    )]
    pub backend: Option<BackendName>,
    /// The GPU: its PCI address, or its index in `vramctl gpus`; with Vulkan its UUID, or auto
    #[arg(long, value_name = "ADDRESS|INDEX|UUID|auto")]
    pub gpu: Option<String>,
    /// Which BAR of it [default: the largest prefetchable one]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=5))]
    pub bar: Option<u8>,
    /// GPU memory to leave to others [default: 1G, 2G with a display, or a twentieth if more]
    #[arg(long, value_name = "SIZE", value_parser = offset, allow_hyphen_values = true)]
    pub gpu_reserve: Option<u64>,
    /// Map this much for the CPU at most; the GPU's engines reach the rest
    #[arg(long, value_name = "SIZE", value_parser = offset, allow_hyphen_values = true)]
    pub gpu_mapped: Option<u64>,
    /// How bytes move: what was measured to be fastest, or one way: bar, dma, gather
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        value_name = "auto|bar|dma|gather"
    )]
    pub copy_path: Option<CopyPathName>,
    /// Take a Vulkan device that is software on the CPU: for tests
    #[arg(long)]
    pub allow_cpu_device: bool,
}

/// How bytes move between system memory and a GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CopyPathName {
    /// What was measured to be the fastest, for each batch
    Auto,
    /// The CPU, through the BAR
    Bar,
    /// The GPU's copy engine
    Dma,
    /// A compute shader
    Gather,
}

impl From<CopyPathName> for CopyPath {
    fn from(name: CopyPathName) -> CopyPath {
        match name {
            CopyPathName::Auto => CopyPath::Auto,
            CopyPathName::Bar => CopyPath::Bar,
            CopyPathName::Dma => CopyPath::Dma,
            CopyPathName::Gather => CopyPath::Gather,
        }
    }
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    /// On
    On,
    /// Off
    Off,
}

/// `vramctl add`
#[derive(Debug, clap::Args)]
pub struct AddArgs {
    /// Name of the device: letters, digits, '_', '.', '-'; at most 32
    pub name: DeviceName,
    /// Size of the whole device: 512M, 8G, 8GB (1000-based), 50%, max
    #[arg(long, short, allow_hyphen_values = true)]
    pub size: SizeSpec,
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// The N of /dev/ublkbN [default: the first free one]
    #[arg(long, value_name = "N")]
    pub id: Option<u32>,
    /// Hardware queues, a thread each [default: one a CPU, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub queues: Option<u16>,
    /// Requests in flight for each queue
    #[arg(long, value_name = "N", default_value_t = 64,
          value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub depth: u16,
    /// Locked memory for I/O buffers [default: size/16, at most 32M]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, allow_hyphen_values = true)]
    pub io_memory: Option<u64>,
    /// Size of one piece of memory [default: 1G, or 64M below 4G]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, allow_hyphen_values = true)]
    pub chunk: Option<u64>,
    /// Check every read against a checksum of each 4 KiB block [default: on for GPU memory]
    #[arg(long, value_enum, value_name = "on|off", num_args = 0..=1, require_equals = true,
          default_missing_value = "on", hide_possible_values = true)]
    pub checksum: Option<Switch>,
    /// Let the kernel copy, straight between requests and memory that the kernel module holds: no
    /// checksums, no I/O buffers, no swap
    #[arg(long)]
    pub zero_copy: bool,
    /// Make it swap and use it, before all swap of lower priority
    #[arg(long, value_name = "PRIORITY", num_args = 0..=1, require_equals = true,
          default_missing_value = "50", value_parser = clap::value_parser!(u16).range(0..=32767))]
    pub swap: Option<u16>,
    /// Swap to memory that the GPU's driver may move away: it can hang the machine
    #[arg(long, requires = "swap")]
    pub allow_evictable: bool,
    /// Start although a protection that swap needs is missing
    #[arg(long)]
    pub allow_unsafe: bool,
    /// When no worker can serve the device any more, wait so many seconds, then end it with EIO for
    /// what waits [default: wait for somebody to decide]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub fail_after: Option<Duration>,
    /// Say what would happen, print the specification, do nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Give up after so many seconds [default: 120, and one for each GiB]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
    /// Do not lock the server's memory
    #[arg(long, hide = true)]
    pub lab_no_memory_lock: bool,
    /// Put the fault layer over the memory
    #[arg(long, hide = true)]
    pub lab_fault: bool,
    /// Stop the disk as on kernels without SAFE_STOP_DEV
    #[arg(long, hide = true)]
    pub lab_no_safe_stop: bool,
    /// Seconds after which a copy that does not complete is the loss of the device
    #[arg(long, hide = true, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    pub lab_copy_limit: Option<u64>,
    /// Let the disk die with its worker
    #[arg(long, hide = true)]
    pub lab_no_recovery: bool,
    /// Kill so many workers that take over: half-fetched, before-end or after-end, and a number
    #[arg(long, hide = true, value_name = "WHERE:N", value_parser = lab_crash)]
    pub lab_crash: Option<LabCrash>,
    /// Write the server's log to a file
    #[arg(long, hide = true, value_name = "FILE")]
    pub lab_log: Option<PathBuf>,
}

/// `vramctl remove`
#[derive(Debug, clap::Args)]
pub struct RemoveArgs {
    /// Name of the device
    pub name: DeviceName,
    /// Swap off first, if the device is swap
    #[arg(long)]
    pub swapoff: bool,
    /// End a device that failed or whose server died: what waits for it gets EIO
    #[arg(long)]
    pub force: bool,
    /// Give up after so many seconds [default: 120, and one for each GiB]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub timeout: Option<Duration>,
}

/// `vramctl list`
#[derive(Debug, Default, clap::Args)]
pub struct ListArgs {
    /// Which columns, in which order (`-o help` lists them)
    #[arg(long, short, value_name = "COLUMNS", value_delimiter = ',')]
    pub output: Vec<String>,
    /// Print no headings
    #[arg(long, short)]
    pub noheadings: bool,
    /// Print sizes in bytes
    #[arg(long, short)]
    pub bytes: bool,
    /// Print JSON (all columns, sizes in bytes)
    #[arg(long, short = 'J', conflicts_with_all = ["output", "noheadings"])]
    pub json: bool,
}

/// `vramctl show`
#[derive(Debug, clap::Args)]
pub struct ShowArgs {
    /// Name of the device
    pub name: DeviceName,
    /// Print JSON
    #[arg(long, short = 'J')]
    pub json: bool,
}

/// `vramctl restart`
#[derive(Debug, clap::Args)]
pub struct RestartArgs {
    /// Name of the device
    pub name: DeviceName,
    /// Give up after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "150")]
    pub timeout: Duration,
}

/// `vramctl recover`
#[derive(Debug, clap::Args)]
pub struct RecoverArgs {
    /// Name of the device
    pub name: DeviceName,
    /// Give up after so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "150")]
    pub timeout: Duration,
}

/// `vramctl swap`
#[derive(Debug, Subcommand)]
pub enum SwapVerb {
    /// Swap to a device; makes the swap signature if there is none
    On(SwapOnArgs),
    /// Move everything back that is swapped to a device, and no longer swap to it
    Off(SwapOffArgs),
}

/// `vramctl swap on`
#[derive(Debug, clap::Args)]
pub struct SwapOnArgs {
    /// Name of the device
    pub name: DeviceName,
    /// 0 to 32767; the highest is used first
    #[arg(long, short, value_name = "N", default_value_t = DEFAULT_SWAP_PRIORITY,
          value_parser = clap::value_parser!(u16).range(0..=32767))]
    pub priority: u16,
    /// Tell the device which blocks are no longer used
    #[arg(long)]
    pub discard: bool,
    /// Overwrite a file system or another signature that is on the device
    #[arg(long)]
    pub force: bool,
    /// Swap to memory that the GPU's driver may move away: it can hang the machine
    #[arg(long)]
    pub allow_evictable: bool,
}

/// `vramctl swap off`
#[derive(Debug, clap::Args)]
pub struct SwapOffArgs {
    /// Name of the device
    pub name: DeviceName,
}

/// `vramctl check`
#[derive(Debug, clap::Args)]
pub struct CheckArgs {
    /// Print JSON
    #[arg(long, short = 'J')]
    pub json: bool,
}

/// `vramctl bench`
#[derive(Debug, Subcommand)]
pub enum BenchVerb {
    /// The whole path but the kernel's: queue engine, planner and memory, without a block device
    ///
    /// Takes the memory as `add` does, fills it, runs every combination of the lists, and reads
    /// everything back. Every byte is checked. Neither root nor ublk is needed.
    Engine(Box<BenchEngineArgs>),
}

/// `vramctl bench engine`
#[derive(Debug, clap::Args)]
pub struct BenchEngineArgs {
    /// Size of the memory: 512M, 8G, 50%, max
    #[arg(long, short, allow_hyphen_values = true)]
    pub size: SizeSpec,
    #[command(flatten)]
    pub memory: MemoryArgs,
    /// Size of one piece of memory [default: 1G, or 64M below 4G]
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes, allow_hyphen_values = true)]
    pub chunk: Option<u64>,
    /// What to do: read, write (one after the other), randread, randwrite, randrw (half and half)
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        value_delimiter = ',',
        value_name = "LIST",
        default_value = "randwrite,randread"
    )]
    pub rw: Vec<BenchPattern>,
    /// Bytes of a request, multiples of 4K
    #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = parse_bytes,
          default_value = "4K")]
    pub block_size: Vec<u64>,
    /// Requests in flight for each thread
    #[arg(long, value_delimiter = ',', value_name = "LIST", default_value = "1,32",
          value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub depth: Vec<u16>,
    /// Threads, each with a queue
    #[arg(long, value_delimiter = ',', value_name = "LIST", default_value = "1",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Vec<u16>,
    /// Seconds for each combination
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "2")]
    pub time: Duration,
    /// Only the memory that the CPU reaches (mapped), or only the rest (unmapped)
    #[arg(
        long,
        value_enum,
        hide_possible_values = true,
        value_name = "all|mapped|unmapped",
        default_value = "all"
    )]
    pub part: BenchPart,
    /// Print JSON
    #[arg(long, short = 'J')]
    pub json: bool,
}

/// What a measurement does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchPattern {
    Read,
    Write,
    #[value(name = "randread")]
    RandRead,
    #[value(name = "randwrite")]
    RandWrite,
    #[value(name = "randrw")]
    RandRw,
}

/// Which memory a measurement uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BenchPart {
    All,
    Mapped,
    Unmapped,
}

/// `vramctl completion`
#[derive(Debug, clap::Args)]
pub struct CompletionArgs {
    /// Which shell: bash, zsh, fish, elvish or powershell
    #[arg(value_enum, hide_possible_values = true)]
    pub shell: clap_complete::Shell,
}

/// `vramctl fault`
#[derive(Debug, clap::Args)]
pub struct FaultArgs {
    /// Name of the device
    pub name: DeviceName,
    /// What happens to the copies: fail, short, hold, delay, hold-half, hold-done, panic, driver-lost
    #[arg(value_parser = fault_action)]
    pub action: FaultAction,
    /// Only reads
    #[arg(long, conflicts_with = "writes")]
    pub reads: bool,
    /// Only writes
    #[arg(long)]
    pub writes: bool,
    /// Only copies that touch bytes from here ...
    #[arg(long, value_name = "SIZE", value_parser = offset, default_value = "0")]
    pub from: u64,
    /// ... to before here
    #[arg(long, value_name = "SIZE", value_parser = offset)]
    pub to: Option<u64>,
    /// Only so many copies
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub count: Option<u32>,
    /// Milliseconds of a delay
    #[arg(long, value_name = "MS", default_value_t = 0)]
    pub delay_ms: u32,
}

/// `vramctl release`
#[derive(Debug, clap::Args)]
pub struct ReleaseArgs {
    /// Name of the device
    pub name: DeviceName,
    /// Newest first
    #[arg(long)]
    pub reverse: bool,
}

/// Seconds, fractions allowed, from a millisecond to a year.
fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.001..=31_536_000.0).contains(&seconds) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => Err(format!("'{text}' is not a number of seconds over 0")),
    }
}

/// A place on the device: a size that may be zero.
fn offset(text: &str) -> ublk_vram::Result<u64> {
    if text == "0" {
        Ok(0)
    } else {
        parse_bytes(text)
    }
}

fn lab_crash(text: &str) -> Result<LabCrash, String> {
    let (place, count) = text.split_once(':').unwrap_or((text, "1"));
    let at = match place {
        "half-fetched" => CrashPoint::HalfFetched,
        "before-end" => CrashPoint::BeforeEnd,
        "after-end" => CrashPoint::AfterEnd,
        _ => {
            return Err(format!(
                "'{place}' is none of half-fetched, before-end, after-end"
            ));
        }
    };
    let count = count
        .parse()
        .map_err(|_| format!("'{count}' is not a number"))?;
    Ok(LabCrash { at, count })
}

fn fault_action(text: &str) -> Result<FaultAction, String> {
    match text {
        "fail" => Ok(FaultAction::Fail),
        "short" => Ok(FaultAction::Short),
        "hold" => Ok(FaultAction::Hold),
        "delay" => Ok(FaultAction::Delay),
        "hold-half" => Ok(FaultAction::HoldHalf),
        "hold-done" => Ok(FaultAction::HoldDone),
        "panic" => Ok(FaultAction::Panic),
        "driver-lost" => Ok(FaultAction::DriverLost),
        _ => Err(format!(
            "'{text}' is none of fail, short, hold, delay, hold-half, hold-done, panic, driver-lost"
        )),
    }
}

#[cfg(test)]
mod tests;
