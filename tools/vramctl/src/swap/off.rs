//! swapoff(2): first whether what is swapped fits elsewhere, then the call, with progress.
//!
//! It may run for minutes, and nothing can hurry it; one that moves nothing any more is given up. If it
//! fails the swap is as it was.

use std::ffi::CStr;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::Signal;
use nix::sys::wait::WaitStatus;
use nix::unistd::Pid;
use ublk_vram::safety::{Root, SwapEntry, available_memory, read_swaps};
use ublk_vram::size::human;
use ublk_vram::{Error, ErrorKind, Result};

use super::child;
use super::on::c_path;
use super::progress::Progress;
use crate::output;

const MIB: u64 = 1 << 20;
/// How often progress is shown on a terminal, and looked at.
const TICK: Duration = Duration::from_secs(1);
/// How often it is said where there is no terminal.
const SAY_EVERY: Duration = Duration::from_secs(10);
/// Below this it is over before it is read.
const TOLD_BYTES: u64 = 1 << 20;
/// A swapoff of which no page moves for so long is given up. Its whole time has no limit: it takes what
/// the memory and the disk allow.
const STALL_LIMIT: Duration = Duration::from_secs(120);

/// Moves everything back that is swapped to `swap`, one of `swaps`, and no longer swaps to it.
///
/// # Errors
/// [`ErrorKind::NoSpace`] with the MiB that are missing; [`ErrorKind::Timeout`] if nothing moves any more;
/// or why the kernel could not do it.
pub fn swap_off(swap: &SwapEntry, swaps: &[SwapEntry]) -> Result<()> {
    if swap.deleted {
        return Err(Error::new(
            ErrorKind::Io,
            format!(
                "{} is gone while it was swap: no program can swap it off; {} of what was swapped \
                 to it are lost, and the machine needs a restart",
                swap.path.display(),
                human(swap.used)
            ),
        ));
    }
    let available = available_memory(&Root::default())?;
    let missing = missing_bytes(swap, swaps, available);
    if missing > 0 {
        return Err(too_little(swap, missing));
    }
    let begin = Instant::now();
    let child = start(&c_path(&swap.path)?)?;
    let mut progress = Display::new(swap);
    let mut stall = Stall::new(swap.used);
    loop {
        if let Some(status) = child::wait(child, TICK)? {
            progress.clear();
            outcome(swap, status)?;
            if swap.used >= TOLD_BYTES {
                output::say(&format!(
                    "swapped off {}: {}",
                    swap.path.display(),
                    summary(swap.used, begin.elapsed())
                ));
            }
            return Ok(());
        }
        let left = used_of(&swap.path);
        progress.show(begin.elapsed(), left);
        if let Some(left) = left
            && stall.is_over(left, begin.elapsed())
        {
            progress.clear();
            return Err(stalled(swap, left, child));
        }
    }
}

/// Starts a process that calls swapoff(2) and ends with its errno. It is not this one, because it may
/// have to be left behind: a swapoff that waits for a disk which does not answer cannot be killed.
fn start(path: &CStr) -> Result<Pid> {
    child::start(|| {
        // SAFETY: a system call that reads the NUL-terminated path, which outlives it.
        match unsafe { libc::swapoff(path.as_ptr()) } {
            0 => 0,
            _ => Errno::last_raw(),
        }
    })
}

fn outcome(swap: &SwapEntry, status: WaitStatus) -> Result<()> {
    match status {
        WaitStatus::Exited(_, 0) => Ok(()),
        WaitStatus::Exited(_, errno) => Err(refused(swap, Errno::from_raw(errno))),
        // Its memory counts as that of the swap (mm/swapfile.c): it is the OOM killer's first choice.
        WaitStatus::Signaled(_, Signal::SIGKILL, _) => Err(Error::new(
            ErrorKind::NoSpace,
            format!(
                "the swapoff of {} was killed, by the OOM killer if by nobody else: what is on it does \
                 not fit; it is swap as before",
                swap.path.display()
            ),
        )),
        other => Err(Error::new(
            ErrorKind::Io,
            format!(
                "the swapoff of {} ended with {other:?}; it is swap as before",
                swap.path.display()
            ),
        )),
    }
}

/// Ends a swapoff that makes no progress, as far as it can be ended.
fn stalled(swap: &SwapEntry, left: u64, child: Pid) -> Error {
    let disk = swap.path.display();
    let what = format!(
        "the swapoff of {disk} moved nothing for {} s, with {} left",
        STALL_LIMIT.as_secs(),
        human(left)
    );
    Error::new(
        ErrorKind::Timeout,
        if child::end(child) {
            format!("{what}, and was given up: it is swap as before")
        } else {
            format!(
                "{what}, and cannot be ended: it waits for {disk}, which does not answer (`vramctl list`, \
                 and the kernel's log, may say why)"
            )
        },
    )
}

/// When bytes last moved.
struct Stall {
    least: u64,
    since: Duration,
}

impl Stall {
    fn new(used: u64) -> Stall {
        Stall {
            least: used,
            since: Duration::ZERO,
        }
    }

    /// Whether nothing has moved for [`STALL_LIMIT`], with `left` bytes left `now`.
    fn is_over(&mut self, left: u64, now: Duration) -> bool {
        if left < self.least {
            (self.least, self.since) = (left, now);
        }
        now.saturating_sub(self.since) >= STALL_LIMIT
    }
}

fn refused(swap: &SwapEntry, errno: Errno) -> Error {
    let disk = swap.path.display();
    match errno {
        Errno::EPERM => Error::new(
            ErrorKind::Permission,
            format!("cannot swap off {disk}: that needs root"),
        ),
        Errno::ENOMEM => {
            let root = Root::default();
            let now = read_swaps(&root).ok().zip(available_memory(&root).ok());
            let missing = now.and_then(|(swaps, available)| {
                let swap = swaps.iter().find(|entry| entry.path == swap.path)?;
                Some(missing_bytes(swap, &swaps, available))
            });
            too_little(swap, missing.unwrap_or(0))
        }
        Errno::EINTR => Error::new(
            ErrorKind::Io,
            format!("the swapoff of {disk} was interrupted: it is swap as before"),
        ),
        errno => Error::os(
            format!("cannot swap off {disk}; it is swap as before"),
            errno,
        ),
    }
}

fn too_little(swap: &SwapEntry, missing: u64) -> Error {
    let how_much = match missing.div_ceil(MIB) {
        0 => "some memory".to_owned(),
        mib => format!("{mib} MiB"),
    };
    Error::new(
        ErrorKind::NoSpace,
        format!(
            "cannot swap off {}: the {} in use on it do not fit into memory and other swap; free \
             {how_much}, or add swap",
            swap.path.display(),
            human(swap.used)
        ),
    )
}

/// Bytes that are missing in memory and other swap to take what is on `swap`.
fn missing_bytes(swap: &SwapEntry, swaps: &[SwapEntry], available: u64) -> u64 {
    let others = swaps
        .iter()
        .filter(|other| other.path != swap.path && !other.deleted)
        .map(|other| other.size.saturating_sub(other.used))
        .fold(0u64, u64::saturating_add);
    swap.used.saturating_sub(available.saturating_add(others))
}

/// Shows how much is left: on one line of a terminal, else as a message now and then.
struct Display<'a> {
    swap: &'a SwapEntry,
    progress: Progress,
    is_terminal: bool,
    is_shown: bool,
    said: Duration,
}

impl Display<'_> {
    fn new(swap: &SwapEntry) -> Display<'_> {
        Display {
            swap,
            progress: Progress::new(swap.used),
            is_terminal: std::io::stderr().is_terminal(),
            is_shown: false,
            said: Duration::ZERO,
        }
    }

    fn show(&mut self, now: Duration, left: Option<u64>) {
        if let Some(left) = left {
            self.progress.sample(now, left);
        }
        let disk = self.swap.path.display();
        let line = format!("swapoff {disk}: {}", self.progress.line());
        if self.is_terminal {
            // A terminal that went away is no reason to stop a swapoff.
            let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
            self.is_shown = true;
        } else if now.saturating_sub(self.said) >= SAY_EVERY {
            output::say(&line);
            self.said = now;
        }
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.is_shown) {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

/// `120M in 3.2 s (37.5 MiB/s)`
fn summary(bytes: u64, time: Duration) -> String {
    let seconds = time.as_secs_f64().max(0.001);
    format!(
        "{} in {seconds:.1} s ({:.1} MiB/s)",
        human(bytes),
        bytes as f64 / MIB as f64 / seconds
    )
}

fn used_of(path: &Path) -> Option<u64> {
    let swaps = read_swaps(&Root::default()).ok()?;
    swaps
        .iter()
        .find(|entry| entry.path == path)
        .map(|entry| entry.used)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn swap(path: &str, size: u64, used: u64, deleted: bool) -> SwapEntry {
        let (path, kind) = (path.into(), "partition".into());
        SwapEntry {
            path,
            deleted,
            kind,
            size: size * MIB,
            used: used * MIB,
            priority: 0,
        }
    }

    #[test]
    fn what_is_swapped_must_fit_memory_and_other_swap() {
        let ours = swap("/dev/ublkb0", 4096, 1000, false);
        let other = swap("/dev/sda2", 500, 200, false);
        let ghost = swap("/dev/ublkb1", 9000, 0, true);
        let swaps = [ours.clone(), other, ghost];
        assert_eq!(missing_bytes(&ours, &swaps, 2000 * MIB), 0);
        assert_eq!(
            missing_bytes(&ours, &swaps, 700 * MIB),
            0,
            "with the 300 that are free there"
        );
        assert_eq!(missing_bytes(&ours, &swaps, 600 * MIB), 100 * MIB);
        assert_eq!(missing_bytes(&ours, &swaps[..1], 0), 1000 * MIB);
    }

    #[test]
    fn the_message_says_how_much() {
        let error = too_little(&swap("/dev/ublkb0", 4096, 1000, false), 100 * MIB + 1);
        assert_eq!(
            error.message,
            "cannot swap off /dev/ublkb0: the 1000M in use on it do not fit into memory and other \
             swap; free 101 MiB, or add swap"
        );
        assert_eq!(error.kind.exit_code(), 1);
    }

    #[test]
    fn a_ghost_is_told_from_a_swap() {
        let error = swap_off(&swap("/dev/ublkb0", 1, 1, true), &[]).unwrap_err();
        assert!(error.message.contains("gone while it was swap"), "{error}");
    }

    #[test]
    fn a_swapoff_that_moves_nothing_is_over_after_a_while() {
        let mut stall = Stall::new(100);
        let at = Duration::from_secs;
        assert!(!stall.is_over(90, at(100)));
        assert!(!stall.is_over(90, at(219)));
        assert!(stall.is_over(95, at(220)), "more is no progress");
        assert!(!stall.is_over(89, at(221)));
    }

    #[test]
    fn how_the_process_ended() {
        let swap = swap("/dev/ublkb0", 1, 1, false);
        let pid = Pid::from_raw(1);
        assert!(outcome(&swap, WaitStatus::Exited(pid, 0)).is_ok());
        let eio = outcome(&swap, WaitStatus::Exited(pid, libc::EIO)).unwrap_err();
        assert!(eio.message.contains("it is swap as before"), "{eio}");
        let killed = WaitStatus::Signaled(pid, Signal::SIGKILL, false);
        assert_eq!(outcome(&swap, killed).unwrap_err().kind, ErrorKind::NoSpace);
        assert_eq!(
            summary(120 * MIB, at_secs(3.2)),
            "120M in 3.2 s (37.5 MiB/s)"
        );
    }

    fn at_secs(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn the_kernel_refuses_what_is_no_swap() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = c_path(file.path()).unwrap();
        let child = start(&path).unwrap();
        let status = child::wait(child, Duration::from_secs(20))
            .unwrap()
            .unwrap();
        let WaitStatus::Exited(_, errno) = status else {
            panic!("{status:?}");
        };
        assert!([libc::EINVAL, libc::EPERM].contains(&errno), "{errno}");
    }
}
