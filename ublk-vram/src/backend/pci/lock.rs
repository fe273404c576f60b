//! One user for each BAR: an exclusive flock on `/run/ublk-vram/pci-ADDRESS-BAR.lock`.
//!
//! The file names the process that holds the lock. A lock ends with the last descriptor of its open
//! file, in whatever process that is; the file that a killed server leaves behind is taken over.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::PciAddress;
use crate::control::RunDir;
use crate::error::{Error, ErrorKind, Result};

/// Each try loses only against a claim that ended in the same moment.
const TRIES: usize = 16;

/// The lock; it ends, and the file goes, when it is dropped.
#[derive(Debug)]
pub(super) struct BarLock {
    /// Not nix's `Flock`, whose drop unlocks for every process that shares the open file.
    pub(super) file: File,
    pub(super) path: PathBuf,
    /// What the lock files of all BARs of the function begin with.
    pub(super) prefix: String,
    /// Whether the file goes when this is dropped: another process that shares the lock needs it.
    pub(super) owner: bool,
}

impl BarLock {
    /// Takes the lock of one BAR; the directory is made if it is not there.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] with the holder's process id if somebody has it.
    pub(super) fn take(run_dir: &Path, address: PciAddress, bar: u8) -> Result<BarLock> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(run_dir)
            .map_err(|error| Error::os(format!("cannot make {}", run_dir.display()), error))?;
        // The ':' keeps these names apart from devices' names.
        let prefix = format!("pci-{address}-");
        let path = run_dir.join(format!("{prefix}{bar}.lock"));
        let failed = |error| Error::os(format!("cannot lock {}", path.display()), error);
        for _ in 0..TRIES {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .open(&path)
                .map_err(failed)?;
            // SAFETY: flock takes a descriptor and a number; the descriptor is open.
            let locked =
                unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0;
            if locked {
                // The last holder may have removed the file between our open and our lock.
                if !RunDir::is_still(&file, &path) {
                    continue;
                }
                let mut writer: &File = &file;
                file.set_len(0)
                    .and_then(|()| writeln!(writer, "{}", std::process::id()))
                    .map_err(failed)?;
                return Ok(BarLock {
                    file,
                    path,
                    prefix,
                    owner: true,
                });
            }
            match Errno::last() {
                Errno::EWOULDBLOCK => return Err(taken(file, address, bar)),
                errno => return Err(failed(errno.into())),
            }
        }
        Err(Error::new(
            ErrorKind::Busy,
            format!("{} does not stay in place", path.display()),
        ))
    }

    /// Whether somebody holds the lock of another BAR of the same function.
    pub(super) fn function_is_shared(&self) -> bool {
        let Some(dir) = self.path.parent() else {
            return false;
        };
        fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .any(|entry| {
                let name = entry.file_name();
                let other = name
                    .to_str()
                    .is_some_and(|name| name.starts_with(&self.prefix))
                    && entry.path() != self.path;
                other
                    && File::open(entry.path())
                        .is_ok_and(|file| Flock::lock(file, FlockArg::LockSharedNonblock).is_err())
            })
    }
}

impl Drop for BarLock {
    fn drop(&mut self) {
        if !self.owner {
            return;
        }
        // Removed before the lock ends, so that nobody's new file is removed. A failure leaves an
        // unlocked file, which the next claim takes over.
        let _ = fs::remove_file(&self.path);
    }
}

fn taken(mut file: File, address: PciAddress, bar: u8) -> Error {
    let mut holder = String::new();
    let who = match file.read_to_string(&mut holder) {
        Ok(_) if !holder.trim().is_empty() => format!("process {}", holder.trim()),
        _ => "another process".to_owned(),
    };
    Error::new(
        ErrorKind::Busy,
        format!("BAR {bar} of PCI function {address} is in use by {who}: remove its device first"),
    )
}
