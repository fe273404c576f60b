//! The lock of a device's name.
//!
//! One open file description, of which every process of the server has a descriptor: the name is
//! taken until the last of them is gone, whichever that is.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::control::RunDir;
use crate::device::DeviceName;
use crate::error::{Error, ErrorKind, Result};

/// `vramctl list` takes a name's lock, shared, for a moment to see whether its server lives.
const LOOKERS: Duration = Duration::from_millis(500);

/// The lock of a device's name; its file goes with it.
pub struct NameLock {
    /// Not nix's `Flock`, whose drop unlocks for every process that shares the open file.
    file: OwnedFd,
    path: PathBuf,
    /// Whether the file goes when this is dropped.
    owner: bool,
}

impl Drop for NameLock {
    fn drop(&mut self) {
        if !self.owner {
            return;
        }
        // While the lock is still held: nobody can have taken the name in between.
        let _ = fs::remove_file(&self.path);
    }
}

impl NameLock {
    /// Takes the lock of a name.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if a process of another server has it.
    pub fn take(run_dir: &RunDir, name: &DeviceName) -> Result<NameLock> {
        DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(run_dir.path())
            .map_err(|error| {
                Error::os(format!("cannot make {}", run_dir.path().display()), error)
            })?;
        let path = run_dir.lock(name);
        let end = Instant::now() + LOOKERS;
        loop {
            let file = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o644)
                .open(&path)
                .map_err(|error| Error::os(format!("cannot make {}", path.display()), error))?;
            // SAFETY: flock takes a descriptor and a number; the descriptor is open.
            let locked =
                unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0;
            // A server that ends removes the file it holds: the lock counts only on the one that is
            // still there.
            if locked && RunDir::is_still(&file, &path) {
                let file = file.into();
                let owner = true;
                return Ok(NameLock { file, path, owner });
            }
            match Errno::last() {
                _ if locked => {}
                Errno::EWOULDBLOCK if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Errno::EWOULDBLOCK => {
                    return Err(Error::new(
                        ErrorKind::Busy,
                        format!("a device named '{name}' exists already: see `vramctl list`"),
                    ));
                }
                errno => {
                    return Err(Error::os(format!("cannot lock {}", path.display()), errno));
                }
            }
        }
    }

    /// The lock whose descriptor came from another process of the same server. Its file stays until
    /// [`NameLock::own`].
    pub fn inherited(file: OwnedFd, run_dir: &RunDir, name: &DeviceName) -> NameLock {
        NameLock {
            file,
            path: run_dir.lock(name),
            owner: false,
        }
    }

    /// Takes the place of the one that took the lock.
    pub fn own(&mut self) {
        self.owner = true;
    }

    /// Leaves the file in place: what it stands for is still there.
    pub fn disown(&mut self) {
        self.owner = false;
    }

    /// The lock's descriptor, to hand on.
    pub fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Whether the file that is locked is the one at the name's path.
    pub fn is_in_place(&self) -> bool {
        let file = self.file.try_clone().map(File::from);
        file.is_ok_and(|file| RunDir::is_still(&file, &self.path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_taken_until_the_last_descriptor_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(dir.path());
        let name: DeviceName = "x".parse().unwrap();
        let lock = NameLock::take(&run_dir, &name).unwrap();
        assert!(lock.is_in_place());
        let copy = lock.as_fd().try_clone_to_owned().unwrap();
        let again = NameLock::take(&run_dir, &name).err().unwrap();
        assert_eq!(again.kind, ErrorKind::Busy);
        drop(lock);
        assert!(!run_dir.lock(&name).exists());
        // The name is free although a copy of the old lock still exists: its file is gone.
        let second = NameLock::take(&run_dir, &name).unwrap();
        drop(copy);
        assert!(second.is_in_place());
    }
}
