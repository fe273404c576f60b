//! What is known of the devices of this machine, from three sources that must not be confused: the
//! server itself (root asks it over its socket), the note it left (anybody reads it, it may be old),
//! and the lock of the name (held: the server lives; not held: it died and left things behind).

use std::fs::{File, OpenOptions};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use ublk_vram::control::{Call, Client, RunDir};
use ublk_vram::device::{DeviceInfo, DeviceName, DeviceState, StaticInfo};
use ublk_vram::safety::Root;
use ublk_vram::safety::{SwapEntry, read_swaps};
use ublk_vram::supervisor::disk_is_there;
use ublk_vram::{Error, ErrorKind, Result};

/// How long a server may take to tell about itself: it answers from memory.
pub const ASK_LIMIT: Duration = Duration::from_secs(3);

/// How a device is, as far as it can be seen from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// As the server says, or as its files show.
    State(DeviceState),
    /// The server is there and does not answer.
    NoAnswer,
}

impl Seen {
    /// As `list` shows it.
    pub fn as_str(self) -> &'static str {
        match self {
            Seen::State(state) => state.as_str(),
            Seen::NoAnswer => "no-answer",
        }
    }
}

/// One device.
#[derive(Debug, Clone)]
pub struct Device {
    /// Its name.
    pub name: DeviceName,
    /// How it is.
    pub state: Seen,
    /// What does not change; unknown while it is being made, or when it died before.
    pub fixed: Option<StaticInfo>,
    /// What its server told.
    pub info: Option<DeviceInfo>,
    /// Its line in /proc/swaps.
    pub swap: Option<SwapEntry>,
    /// Why less is known than should be.
    pub problem: Option<String>,
}

impl Device {
    /// Whether its server is gone and left things behind.
    pub fn is_dead(&self) -> bool {
        matches!(
            self.state,
            Seen::State(DeviceState::Dead | DeviceState::Orphan)
        )
    }

    /// Whether its disk is still there although its server is gone: requests wait for another one.
    pub fn has_disk(&self) -> bool {
        self.state == Seen::State(DeviceState::Orphan)
    }

    /// What does not change of a device that has a disk.
    ///
    /// # Errors
    /// The device has none (yet).
    pub fn disk(&self) -> Result<&StaticInfo> {
        self.fixed.as_ref().ok_or_else(|| {
            let why = match self.state {
                Seen::State(DeviceState::Creating) => "it is still being made",
                Seen::State(DeviceState::Dead) => "its server died before it had one",
                _ => "its server does not tell",
            };
            Error::new(
                ErrorKind::NotFound,
                format!("'{}' has no disk: {why}", self.name),
            )
        })
    }
}

/// The devices of a machine.
pub struct Devices {
    run_dir: RunDir,
    swaps: Vec<SwapEntry>,
}

impl Devices {
    /// Looks at this machine.
    ///
    /// # Errors
    /// /proc/swaps cannot be understood.
    pub fn system() -> Result<Devices> {
        Ok(Devices {
            run_dir: RunDir::system(),
            swaps: read_swaps(&Root::default())?,
        })
    }

    /// Every device, by name.
    pub fn all(&self) -> Vec<Device> {
        self.run_dir
            .names()
            .iter()
            .filter_map(|name| self.look(name))
            .collect()
    }

    /// The device of this name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none.
    pub fn find(&self, name: &DeviceName) -> Result<Device> {
        self.look(name).ok_or_else(|| no_such_device(name))
    }

    /// Swap on ublk disks that are gone.
    pub fn ghosts(&self) -> Vec<&SwapEntry> {
        ublk_vram::safety::ghosts(&self.swaps)
    }

    /// Everything the kernel swaps to.
    pub fn swaps(&self) -> &[SwapEntry] {
        &self.swaps
    }

    fn look(&self, name: &DeviceName) -> Option<Device> {
        let mut device = Device {
            name: name.clone(),
            state: Seen::State(DeviceState::Dead),
            fixed: read_note(&self.run_dir.note(name)),
            info: None,
            swap: None,
            problem: None,
        };
        // A server that answers is alive: then nobody need touch its lock.
        match ask(&self.run_dir.socket(name)) {
            Ok(info) => {
                device.state = Seen::State(info.state);
                device.fixed = Some(info.fixed.clone());
                device.info = Some(info);
            }
            Err(error) => match lock_state(&self.run_dir.lock(name)) {
                LockState::Missing => return None,
                LockState::Free => {
                    if device.fixed.as_ref().is_some_and(disk_is_there) {
                        device.state = Seen::State(DeviceState::Orphan);
                        device.problem = Some(format!(
                            "no process serves it and requests wait: `vramctl recover {name}`, or \
                             `vramctl remove {name} --force`"
                        ));
                    }
                }
                LockState::Held => {
                    device.state = match error.kind {
                        // It said itself that it is being made, or it has no socket yet.
                        ErrorKind::Busy => Seen::State(DeviceState::Creating),
                        ErrorKind::NotFound if device.fixed.is_none() => {
                            Seen::State(DeviceState::Creating)
                        }
                        // Its socket goes before its lock.
                        ErrorKind::NotFound => Seen::State(DeviceState::Stopping),
                        // Who is not root may not ask: a note is written when the device goes live.
                        ErrorKind::Permission if device.fixed.is_some() => {
                            Seen::State(DeviceState::Live)
                        }
                        ErrorKind::Permission => Seen::State(DeviceState::Creating),
                        _ => {
                            device.problem = Some(error.message);
                            Seen::NoAnswer
                        }
                    };
                }
                LockState::Unknown(error) => {
                    device.problem = Some(error.message);
                    device.state = Seen::NoAnswer;
                }
            },
        }
        device.swap = self.swap_of(&device).cloned();
        Some(device)
    }

    fn swap_of(&self, device: &Device) -> Option<&SwapEntry> {
        let fixed = device.fixed.as_ref()?;
        let kname = kernel_name(fixed);
        self.swaps.iter().find(|swap| {
            swap.is_on(&Root::default(), (fixed.major, fixed.minor), kname)
                // A ghost of that name belongs to a device only if its own disk is gone too.
                && (!swap.is_ghost() || device.is_dead())
        })
    }
}

/// `ublkb0`
pub fn kernel_name(fixed: &StaticInfo) -> &str {
    fixed.device.rsplit('/').next().unwrap_or(&fixed.device)
}

/// The error of a name that nobody has.
pub fn no_such_device(name: &DeviceName) -> Error {
    Error::new(
        ErrorKind::NotFound,
        format!("there is no device '{name}': see `vramctl list`"),
    )
}

/// The name's lock, taken from a dead server.
pub type NameLock = Flock<File>;

/// Takes the lock of a name that a dead server left, so that no new one starts meanwhile.
///
/// # Errors
/// [`ErrorKind::Busy`] if a server holds it, [`ErrorKind::NotFound`] if there is none.
pub fn take_lock(run_dir: &RunDir, name: &DeviceName) -> Result<NameLock> {
    let path = run_dir.lock(name);
    let file = OpenOptions::new()
        .write(true)
        .open(&path)
        .map_err(|error| {
            if error.kind() == std::io::ErrorKind::NotFound {
                no_such_device(name)
            } else {
                Error::os(format!("cannot open {}", path.display()), error)
            }
        })?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) if RunDir::is_still(&lock, &path) => Ok(lock),
        // Somebody else has cleaned up meanwhile.
        Ok(_) => Err(no_such_device(name)),
        Err((_, Errno::EWOULDBLOCK)) => Err(Error::new(
            ErrorKind::Busy,
            format!("the server of '{name}' is alive: remove it without --force"),
        )),
        Err((_, errno)) => Err(Error::os(format!("cannot lock {}", path.display()), errno)),
    }
}

fn ask(socket: &Path) -> Result<DeviceInfo> {
    Client::connect(socket, ASK_LIMIT)?
        .call(&Call::Show {}, ASK_LIMIT)?
        .info()
}

fn read_note(path: &Path) -> Option<StaticInfo> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

enum LockState {
    Missing,
    Free,
    Held,
    Unknown(Error),
}

/// Tries a shared lock, which is given back at once: it fails only while a server has the name.
fn lock_state(path: &Path) -> LockState {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return LockState::Missing,
        Err(error) => {
            return LockState::Unknown(Error::os(format!("cannot open {}", path.display()), error));
        }
    };
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(_released_at_once) => LockState::Free,
        Err((_, Errno::EWOULDBLOCK)) => LockState::Held,
        Err((_, errno)) => {
            LockState::Unknown(Error::os(format!("cannot lock {}", path.display()), errno))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_tells_the_living_from_the_dead_and_is_given_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.lock");
        assert!(matches!(lock_state(&path), LockState::Missing));
        let file = File::create(&path).unwrap();
        assert!(matches!(lock_state(&path), LockState::Free));
        let server = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
        assert!(matches!(lock_state(&path), LockState::Held));
        drop(server);
        assert!(matches!(lock_state(&path), LockState::Free));
    }
}
