//! swapoff(2): first whether what is swapped fits elsewhere, then the call, with progress.
//!
//! It may run for minutes, and nothing can hurry it. If it fails the swap is as it was.

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use ublk_vram::safety::Root;
use ublk_vram::safety::{SwapEntry, read_swaps};
use ublk_vram::size::human;
use ublk_vram::{Error, ErrorKind, Result};

use super::on::c_path;
use super::progress::Progress;

const MIB: u64 = 1 << 20;
/// How often progress is shown.
const TICK: Duration = Duration::from_secs(1);

/// Moves everything back that is swapped to `swap`, one of `swaps`, and no longer swaps to it.
///
/// # Errors
/// [`ErrorKind::NoSpace`] with the MiB that are missing; or why the kernel could not do it.
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
    let available = mem_available(&Root::default().read_text("/proc/meminfo")?)?;
    let missing = missing_bytes(swap, swaps, available);
    if missing > 0 {
        return Err(too_little(swap, missing));
    }
    let path = c_path(&swap.path)?;
    let (done, finished) = channel::<()>();
    let result = std::thread::scope(|scope| {
        if std::io::stderr().is_terminal() {
            scope.spawn(move || show_progress(swap, &finished));
        }
        // SAFETY: a system call that reads the NUL-terminated path, which outlives it.
        let result = Errno::result(unsafe { libc::swapoff(path.as_ptr()) });
        drop(done);
        result
    });
    result.map(drop).map_err(|errno| refused(swap, errno))
}

fn refused(swap: &SwapEntry, errno: Errno) -> Error {
    let disk = swap.path.display();
    match errno {
        Errno::EPERM => Error::new(
            ErrorKind::Permission,
            format!("cannot swap off {disk}: that needs root"),
        ),
        Errno::ENOMEM => {
            let (swaps, meminfo) = (
                read_swaps(&Root::default()),
                Root::default().read_text("/proc/meminfo"),
            );
            let now = swaps
                .ok()
                .zip(meminfo.ok().and_then(|text| mem_available(&text).ok()));
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

/// MemAvailable of /proc/meminfo, in bytes.
fn mem_available(text: &str) -> Result<u64> {
    text.lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok())
        .and_then(|kib| kib.checked_mul(1024))
        .ok_or_else(|| Error::new(ErrorKind::Io, "/proc/meminfo has no MemAvailable"))
}

/// Shows how much is left, every second, until the other end of the channel is dropped.
fn show_progress(swap: &SwapEntry, finished: &Receiver<()>) {
    let begin = Instant::now();
    let mut progress = Progress::new(swap.used);
    let mut shown = false;
    while finished.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
        if let Some(left) = used_of(&swap.path) {
            progress.sample(begin.elapsed(), left);
        }
        let line = format!("swapoff {}: {}", swap.path.display(), progress.line());
        // A terminal that went away is no reason to stop a swapoff.
        let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
        shown = true;
    }
    if shown {
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
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
    fn meminfo() {
        let text = "MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:     64 kB\n";
        assert_eq!(mem_available(text).unwrap(), 65536);
        assert!(mem_available("MemTotal: 1 kB\n").is_err());
        assert!(mem_available("MemAvailable: x kB\n").is_err());
    }
}
