//! The server's own memory: all of it in RAM, and none of it met for the first time while a request
//! is in flight.
//!
//! mlockall(2) is called after the GPU is open, because drivers reserve address space that would
//! not fit a limit, and before the device can be used. There is no MCL_ONFAULT: it would leave the
//! faults to the I/O path. What mlockall does not reach: mappings of device memory (VM_IO,
//! VM_PFNMAP; the backends touch theirs), stacks that have not grown yet ([`prefault_stack`]), and
//! what malloc gives back to the kernel and takes again ([`settle_allocator`]).

use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};

use super::privileges::Privileges;
use super::root::Root;
use super::task_stat;
use crate::device::MemoryInfo;
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;

/// Locks all memory of this process, present and future, into RAM.
///
/// # Errors
/// [`ErrorKind::Unsafe`], with the limit and the capability that are in the way, or because this
/// is WSL2, whose GPU driver crashes the kernel on locked memory.
pub fn lock_memory() -> Result<()> {
    let root = Root::default();
    refuse_wsl2(&root)?;
    raise_memlock_limit();
    mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE)
        .map_err(|e| lock_failure(e, memlock_limit(), has_ipc_lock(&root)))?;
    if read_status(&root)?.locked == 0 {
        return Err(Error::new(
            ErrorKind::Unsafe,
            "mlockall says that the server's memory is locked but VmLck is 0: \
             this kernel does not lock memory, so the device cannot be safe as swap",
        ));
    }
    Ok(())
}

/// Whether [`lock_memory`] may be expected to work: asked before the GPU is opened.
///
/// # Errors
/// As [`lock_memory`].
pub fn can_lock_memory() -> Result<()> {
    let root = Root::default();
    refuse_wsl2(&root)?;
    raise_memlock_limit();
    let limit = memlock_limit();
    if has_ipc_lock(&root) || limit == RLIM_INFINITY {
        return Ok(());
    }
    Err(lock_failure(nix::Error::EPERM, limit, false))
}

fn refuse_wsl2(root: &Root) -> Result<()> {
    if !root.path("/dev/dxg").exists() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsafe,
        "cannot lock the server's memory: /dev/dxg says that this is WSL2, whose GPU driver \
         (dxgkrnl) crashes the kernel when a process locks its future memory",
    ))
}

/// As far as the privileges go: the limit also guards against MCL_FUTURE failing later mappings.
fn raise_memlock_limit() {
    if setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY).is_err()
        && let Ok((_, hard)) = getrlimit(Resource::RLIMIT_MEMLOCK)
    {
        // What is lost if this fails too is found by whoever needs the limit.
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, hard, hard);
    }
}

fn memlock_limit() -> u64 {
    getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(soft, _)| soft)
}

fn has_ipc_lock(root: &Root) -> bool {
    Privileges::read(root).is_ok_and(|p| p.ipc_lock)
}

fn lock_failure(errno: nix::Error, limit: u64, ipc_lock: bool) -> Error {
    let limit = match limit {
        RLIM_INFINITY => "unlimited".to_owned(),
        bytes => format!("{bytes} bytes ({})", human(bytes)),
    };
    let (capability, remedy) = if ipc_lock {
        (
            "is present",
            "look for a seccomp filter or a security module that forbids it",
        )
    } else {
        (
            "is missing",
            "run as root, or give CAP_IPC_LOCK or LimitMEMLOCK=infinity",
        )
    };
    Error::new(
        ErrorKind::Unsafe,
        format!(
            "cannot lock the server's memory (mlockall): {}; RLIMIT_MEMLOCK is {limit} and \
             CAP_IPC_LOCK {capability}: {remedy}",
            std::io::Error::from(errno)
        ),
    )
}

/// The memory lines of /proc/PID/status, in bytes (the kernel writes KiB).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessStatus {
    /// VmLck: the length of all locked mappings, resident or not. A reservation without access
    /// (a GPU driver's, a second malloc arena's) counts here and costs nothing.
    pub locked: u64,
    /// VmRSS: resident pages. Mappings of device memory are not among them.
    pub resident: u64,
    /// RssAnon: heap, stacks, private data.
    pub anonymous: u64,
    /// RssFile: the program and its libraries, rings of io_uring.
    pub file: u64,
    /// RssShmem: memfds, so I/O buffers, and with the host backend the device's contents.
    pub shared: u64,
    /// VmPTE: page tables.
    pub page_tables: u64,
    /// VmSwap: anonymous pages that were swapped out.
    pub swapped: u64,
    /// Threads.
    pub threads: u64,
}

impl ProcessStatus {
    /// Bytes of RAM the host cannot use for anything else because of this process.
    ///
    /// RssAnon + RssShmem + VmPTE, and RssFile once memory is locked: a file page nobody locks can
    /// be dropped when memory is short, a locked one cannot. Pages that are shared with others (libc,
    /// a memfd the supervisor maps too) count in full, so the sum over several processes is an upper
    /// bound. VmLck is no part of it: it counts reservations. Device memory is no part of it either:
    /// VM_IO and VM_PFNMAP mappings count neither in RSS nor in VmLck (mm/mlock.c, mlock_fixup). What
    /// a GPU driver pins inside the kernel shows in no process at all.
    pub fn cost(&self) -> u64 {
        let file = if self.locked > 0 { self.file } else { 0 };
        self.anonymous + self.shared + self.page_tables + file
    }
}

/// Reads the text of /proc/PID/status.
///
/// # Errors
/// [`ErrorKind::Io`] naming the line that is missing: a value that must be 0 is not assumed to be.
pub fn parse_status(text: &str) -> Result<ProcessStatus> {
    let number = |key: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'))
            .and_then(|value| value.split_ascii_whitespace().next()?.parse::<u64>().ok())
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Io,
                    format!("/proc/PID/status has no usable line '{key}'"),
                )
            })
    };
    let bytes = |key: &str| number(key).map(|kib| kib.saturating_mul(1024));
    Ok(ProcessStatus {
        locked: bytes("VmLck")?,
        resident: bytes("VmRSS")?,
        anonymous: bytes("RssAnon")?,
        file: bytes("RssFile")?,
        shared: bytes("RssShmem")?,
        page_tables: bytes("VmPTE")?,
        swapped: bytes("VmSwap")?,
        threads: number("Threads")?,
    })
}

/// The memory lines of this process.
///
/// # Errors
/// If /proc does not have them.
pub fn read_status(root: &Root) -> Result<ProcessStatus> {
    parse_status(&root.read_text("/proc/self/status")?)
}

/// What the memory of a server's processes is, for `show`; `arena` is the size of its I/O buffers in
/// bytes. Processes share their program, their I/O buffers and their counters: those are counted once.
/// One that is gone counts nothing.
///
/// # Errors
/// None of the processes' status can be read or understood.
pub fn memory_info(processes: &[i32], arena: u64) -> Result<MemoryInfo> {
    let root = Root::default();
    let read = |pid: &i32| parse_status(&root.read_text(format!("/proc/{pid}/status"))?);
    let (known, failed): (Vec<_>, Vec<_>) = processes.iter().map(read).partition(Result::is_ok);
    let known: Vec<ProcessStatus> = known.into_iter().flatten().collect();
    if known.is_empty() {
        return Err(failed
            .into_iter()
            .find_map(Result::err)
            .unwrap_or_else(|| Error::new(ErrorKind::NotFound, "the server has no process")));
    }
    let sum = |of: fn(&ProcessStatus) -> u64| known.iter().map(of).sum::<u64>();
    let most = |of: fn(&ProcessStatus) -> u64| known.iter().map(of).max().unwrap_or(0);
    // The same pages of one program in all of them; a supervisor has them mapped twice (pin_programs).
    let locked = known.iter().filter(|status| status.locked > 0);
    let file = locked.map(|status| status.file).min().unwrap_or(0);
    Ok(MemoryInfo {
        cost: sum(|s| s.anonymous + s.page_tables) + most(|s| s.shared) + file,
        locked: most(|s| s.locked),
        resident: most(|s| s.resident),
        swapped: sum(|s| s.swapped),
        arena,
    })
}

/// Makes the heap larger by `bytes`, touched, so that what is allocated later needs no new memory. It
/// works after [`settle_allocator`], which keeps malloc from giving memory back.
pub fn reserve_heap(bytes: usize) {
    // In blocks below malloc's largest class, so that no one of them is taken from elsewhere.
    const BLOCK: usize = 64 << 10;
    let blocks: Vec<Vec<u8>> = (0..bytes.div_ceil(BLOCK)).map(|_| vec![1; BLOCK]).collect();
    drop(std::hint::black_box(blocks));
}

/// Maps every part of a file that this process has mapped as a program or library once more, shared
/// and read-only: with [`lock_memory`], starting the program again needs no disk. The mappings stay.
///
/// # Errors
/// /proc/self/maps cannot be read. A file that cannot be opened or mapped is left out.
pub fn pin_programs() -> Result<()> {
    use std::os::fd::AsRawFd;
    let maps = Root::default().read_text("/proc/self/maps")?;
    for line in maps.lines() {
        // address perms offset dev inode path (proc_pid_maps(5))
        let mut fields = line.split_ascii_whitespace();
        let (Some(range), Some(permissions), Some(offset), Some(path)) =
            (fields.next(), fields.next(), fields.next(), fields.nth(2))
        else {
            continue;
        };
        let span = range.split_once('-').and_then(|(from, to)| {
            let number = |hex| usize::from_str_radix(hex, 16).ok();
            number(to)?.checked_sub(number(from)?)
        });
        let (Some(span), Ok(offset)) = (span, i64::from_str_radix(offset, 16)) else {
            continue;
        };
        if !permissions.ends_with('p') || !path.starts_with('/') || path.starts_with("/dev/") {
            continue;
        }
        let Ok(file) = std::fs::File::open(path) else {
            continue;
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory, and
        // nobody reads it.
        unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                span,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                offset,
            )
        };
    }
    Ok(())
}

/// Bytes of the stack of a thread whose maker asks for none. A driver makes some (NVIDIA's six), each with
/// the 8 MiB that are usual; all of a stack is locked, used or not.
const THREAD_STACK: usize = 1 << 20;

/// Gives threads whose maker asks for no size (those of a GPU's driver) a stack of 1 MiB: to be called before
/// there are such threads. Whether the C library did it (glibc does; others give small stacks anyway).
pub fn limit_thread_stacks() -> bool {
    #[cfg(target_env = "gnu")]
    {
        unsafe extern "C" {
            /// pthread_setattr_default_np(3), which the libc crate does not have.
            fn pthread_setattr_default_np(attributes: *const libc::pthread_attr_t) -> libc::c_int;
        }
        let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
        // SAFETY: `attributes` is used only if pthread_attr_init gave 0, which initialises it, and is
        // destroyed once; the default is copied from it.
        unsafe {
            if libc::pthread_attr_init(attributes.as_mut_ptr()) != 0 {
                return false;
            }
            let is_set = libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), THREAD_STACK)
                == 0
                && pthread_setattr_default_np(attributes.as_ptr()) == 0;
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
            is_set
        }
    }
    #[cfg(not(target_env = "gnu"))]
    false
}

/// Touches the next `bytes` of the calling thread's stack, so that no later call is the first to.
/// Gives back how many bytes were touched: less where the stack is shorter (64 KiB are left alone).
pub fn prefault_stack(bytes: usize) -> usize {
    const MARGIN: usize = 64 << 10;
    let bytes = bytes.min(stack_left().unwrap_or(256 << 10).saturating_sub(MARGIN));
    touch_frames(stack_pointer().saturating_sub(bytes));
    bytes
}

/// Touches this thread's stack from here down to the address `low`.
#[inline(never)]
fn touch_frames(low: usize) {
    // One page: frames that lie next to each other leave none out. The compiler must neither drop
    // the array nor reuse one frame for all calls: it is written before the call and used after it.
    let mut frame = [0u8; 4096];
    let here = std::hint::black_box(&mut frame).as_ptr().addr();
    if here > low {
        touch_frames(low);
    }
    std::hint::black_box(&mut frame);
}

/// An address in the calling function's frame, or next to it.
#[inline(always)]
fn stack_pointer() -> usize {
    let local = 0u8;
    std::hint::black_box(&raw const local).addr()
}

/// Bytes between here and the lower end of this thread's stack.
fn stack_left() -> Option<usize> {
    let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut low = std::ptr::null_mut();
    let (mut size, mut guard) = (0usize, 0usize);
    // SAFETY: pthread_self is this thread, which lives; `attributes` is initialised by a
    // pthread_getattr_np that gives 0, read only then, and destroyed once; the out pointers are
    // to locals of the right types.
    let known = unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) != 0 {
            return None;
        }
        let known = libc::pthread_attr_getstack(attributes.as_ptr(), &mut low, &mut size) == 0
            && libc::pthread_attr_getguardsize(attributes.as_ptr(), &mut guard) == 0;
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        known
    };
    known.then(|| {
        stack_pointer()
            .saturating_sub(low.addr())
            .saturating_sub(guard)
    })
}

/// Page faults of thread `tid` of this process since it began: (without, with waiting for a disk).
///
/// # Errors
/// There is no such thread.
pub fn thread_faults(tid: i32) -> Result<(u64, u64)> {
    let stat = task_stat::read(&Root::default(), "self", tid)?;
    Ok((stat.minor_faults, stat.major_faults))
}

/// Bytes of system memory that could be had without swapping: MemAvailable of proc_meminfo(5).
///
/// # Errors
/// /proc/meminfo cannot be read, or has no such line.
pub fn available_memory(root: &Root) -> Result<u64> {
    mem_available(&root.read_text("/proc/meminfo")?)
}

fn mem_available(text: &str) -> Result<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .and_then(|kib| kib.checked_mul(1024))
        .ok_or_else(|| Error::new(ErrorKind::Io, "/proc/meminfo has no MemAvailable"))
}

/// Makes malloc keep what it has: freed memory stays in the process, large blocks come from the same
/// heap as small ones, and all threads share one heap, so that it maps and unmaps nothing after
/// the device is live. To be called first thing, before a second thread exists.
///
/// Gives back whether the C library took every setting (glibc does; others have none of them).
pub fn settle_allocator() -> bool {
    #[cfg(target_env = "gnu")]
    {
        [
            // Never give the top of the heap back.
            (libc::M_TRIM_THRESHOLD, i32::MAX),
            // Grow the heap by 1 MiB at least, so that it grows seldom.
            (libc::M_TOP_PAD, 1 << 20),
            // No block gets a mapping of its own: it would be unmapped when it is freed.
            (libc::M_MMAP_MAX, 0),
            // 32 MiB is the largest value glibc takes; it also ends the threshold's own adjustment.
            (libc::M_MMAP_THRESHOLD, 32 << 20),
            // A heap per thread reserves 64 MiB of address space each, all of it locked.
            (libc::M_ARENA_MAX, 1),
        ]
        // SAFETY: mallopt takes two integers and has no precondition; an unknown one gives 0.
        .map(|(parameter, value)| unsafe { libc::mallopt(parameter, value) } == 1)
        .into_iter()
        .all(|taken| taken)
    }
    #[cfg(not(target_env = "gnu"))]
    false
}

#[cfg(test)]
#[path = "memory_tests.rs"]
mod tests;
