//! `vramctl remove`: asks the server to end its device; with `--force`, cleans up behind a dead one.
//!
//! Whether a device may go is the server's and the kernel's to say, never decided here for a server
//! that lives. Behind a dead one this program is all there is, so it looks for itself: the name's
//! lock is taken first (no new server can start), then everybody who could still use the disk is
//! looked for, then the driver is asked to let the device go, and only then the files go.

use std::fs;
use std::path::Path;
use std::time::Duration;

use ublk_vram::backend::{cuda, pci};
use ublk_vram::control::{Call, RunDir};
use ublk_vram::device::StaticInfo;
use ublk_vram::safety::{self, Root};
use ublk_vram::store::Layout;
use ublk_vram::supervisor::disk_is_there;
use ublk_vram::{Error, ErrorKind, Result, ublk};

use super::swap::off_if_on;
use super::{call, dead, limit_for};
use crate::args::RemoveArgs;
use crate::devices::{Device, Devices, kernel_name, take_lock};
use crate::output;

/// The driver's time for each command on an orphan.
const DRIVER_LIMIT: Duration = Duration::from_secs(10);

pub fn run(args: &RemoveArgs) -> Result<()> {
    let devices = Devices::system()?;
    let device = devices.find(&args.name)?;
    if args.swapoff {
        off_if_on(&devices, &device)?;
    }
    if device.is_dead() {
        return if args.force {
            clean_up(&device)
        } else {
            Err(dead(&args.name))
        };
    }
    let bytes = device.fixed.as_ref().map_or(0, |fixed| fixed.size);
    let limit = args.timeout.unwrap_or_else(|| limit_for(bytes));
    call(&args.name, &Call::Remove { force: args.force }, limit)
        .map(drop)
        .map_err(|error| {
            // What the user can do is known only here: the server does not swap off for `remove`.
            if error.kind == ErrorKind::Busy && device.swap.is_some() && !args.swapoff {
                Error::new(
                    error.kind,
                    format!("{error}; `--swapoff` swaps it off first"),
                )
            } else {
                error
            }
        })
}

/// Removes what a dead server left: its disk, if the driver still has it, and its files.
fn clean_up(device: &Device) -> Result<()> {
    let run_dir = RunDir::system();
    let _lock = take_lock(&run_dir, &device.name)?;
    // Looked at again now that nobody else can change it.
    let device = &Devices::system()?.find(&device.name)?;
    if let Some(fixed) = &device.fixed {
        if disk_is_there(fixed) {
            say_who_loses(fixed)?;
        } else {
            refuse_if_used(device, fixed)?;
        }
        delete_disk(device, fixed)?;
        let layout = || Layout::new(fixed.size, Some(fixed.chunk_size));
        let wiped = match (fixed.gpu.as_deref(), fixed.backend.as_str()) {
            (Some(address), "pci") => pci::wipe_orphan(address, &layout()?),
            (_, "cuda") => cuda::wipe_orphans(&layout()?, &fixed.uuid),
            _ => Ok(()),
        };
        match wiped {
            // A card that is gone, or answers nothing, must not stay in the list for ever.
            Err(error) if [ErrorKind::NotFound, ErrorKind::Io].contains(&error.kind) => {
                output::warning(&format!("the memory was not wiped: {error}"));
            }
            outcome => outcome?,
        }
    }
    // An empty group that stays harms nobody.
    let _ = safety::remove_cgroup(device.name.as_str());
    // The lock's file last: while it is there and held, nobody takes the name.
    for path in [
        run_dir.socket(&device.name),
        run_dir.note(&device.name),
        run_dir.session(&device.name),
        run_dir.lock(&device.name),
    ] {
        remove_file(&path)?;
    }
    Ok(())
}

/// An orphan's users wait for it, some of them in ways that no signal ends: it is ended under them.
fn say_who_loses(fixed: &StaticInfo) -> Result<()> {
    let number = (fixed.major, fixed.minor);
    let survey = safety::holders(&Root::default(), number, kernel_name(fixed), &[])?;
    if !survey.is_free() {
        output::warning(&format!(
            "{} is in use: what waits for it gets EIO: {}",
            fixed.device,
            safety::describe(&survey.holders)
        ));
    }
    Ok(())
}

fn refuse_if_used(device: &Device, fixed: &StaticInfo) -> Result<()> {
    let number = (fixed.major, fixed.minor);
    let survey = safety::holders(&Root::default(), number, kernel_name(fixed), &[])?;
    for blind in &survey.blind {
        output::warning(blind);
    }
    if survey.is_free() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Busy,
        format!(
            "what '{}' left behind ({}) cannot be removed, it is in use: {}",
            device.name,
            fixed.device,
            safety::describe(&survey.holders)
        ),
    ))
}

/// Deletes the disk of a dead server from the driver, if it is still the one it was.
fn delete_disk(device: &Device, fixed: &StaticInfo) -> Result<()> {
    let status = match ublk::device_status(fixed.id, DRIVER_LIMIT) {
        Ok(status) => status,
        Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
        // No driver, no disk.
        Err(error) if error.kind == ErrorKind::Unsupported => return Ok(()),
        Err(error) => return Err(error),
    };
    // The number may have been given to another program since. A server has its character device
    // open for as long as it lives, whether its disk is live yet or not.
    if let Some(pid) = opener(&format!("/dev/ublkc{}", fixed.id)) {
        if pid == fixed.worker || pid == fixed.pid {
            return Err(Error::new(
                ErrorKind::Busy,
                format!(
                    "the server of '{}' (process {pid}) is still ending: try again in a moment",
                    device.name
                ),
            ));
        }
        output::warning(&format!(
            "ublk device {} is served by process {pid} now: it is not the one of '{}', and stays",
            fixed.id, device.name
        ));
        return Ok(());
    }
    if status.pid > 0 && status.pid != fixed.worker && status.pid != fixed.pid {
        output::warning(&format!(
            "ublk device {} belongs to process {} and not to {}, the worker of '{}': it stays",
            fixed.id, status.pid, fixed.worker, device.name
        ));
        return Ok(());
    }
    ublk::delete_orphan(fixed.id, DRIVER_LIMIT)
}

/// A process that has this file open, as far as /proc shows it.
fn opener(path: &str) -> Option<i32> {
    fs::read_dir("/proc").ok()?.flatten().find_map(|process| {
        let pid = process.file_name().to_str()?.parse::<i32>().ok()?;
        fs::read_dir(process.path().join("fd"))
            .ok()?
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|target| target == Path::new(path)))
            .then_some(pid)
    })
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(Error::os(
            format!("cannot remove {}", path.display()),
            error,
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_a_file_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        assert_eq!(opener(path), i32::try_from(std::process::id()).ok());
        assert_eq!(opener("/dev/ublkc4000000"), None);
    }
}
