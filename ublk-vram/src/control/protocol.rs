//! The messages, and where the sockets are.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::device::{DeviceInfo, DeviceName};
use crate::error::{Error, ErrorKind, Result};

/// Begins every method's name on the wire.
pub const METHOD_PREFIX: &str = "io.github.ublk_vram.";
/// The one error's name on the wire; its parameters are an [`Error`].
pub const FAILED_ERROR: &str = "io.github.ublk_vram.Failed";
/// Longest message in bytes, either way. A longer one ends the connection.
pub const MAX_MESSAGE: usize = 256 << 10;

/// A call to the server of one device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "method", content = "parameters")]
pub enum Call {
    /// Tells everything about the device. Answered by [`Reply::info`].
    #[serde(rename = "io.github.ublk_vram.Show")]
    Show {},
    /// Ends the device. Refused with [`ErrorKind::Busy`] while anybody uses it. The reply comes
    /// when the block device is gone and the memory is wiped.
    #[serde(rename = "io.github.ublk_vram.Remove")]
    Remove {
        /// End a device that failed although it is used: what waits for it gets EIO.
        #[serde(default)]
        force: bool,
    },
    /// Replaces the worker by a fresh one of the program as it is installed now. The reply comes when
    /// the new one serves the disk; requests wait meanwhile, and none fails.
    #[serde(rename = "io.github.ublk_vram.Restart")]
    Restart {},
    /// Tries again to bring a device back that failed, or whose supervisor is gone.
    #[serde(rename = "io.github.ublk_vram.Recover")]
    Recover {},
    /// Adds a rule to the fault layer (only with `--lab-fault`).
    #[serde(rename = "io.github.ublk_vram.Fault")]
    Fault {
        /// What to do to which copies.
        rule: FaultRule,
    },
    /// Lets copies go that a [`FaultAction::Hold`] holds, newest first if `reverse`; removes all rules.
    #[serde(rename = "io.github.ublk_vram.Release")]
    Release {
        /// Complete the held copies in the reverse of the order they came in.
        reverse: bool,
    },
}

/// What the fault layer does to the copies a rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FaultAction {
    /// The copy fails: EIO reaches the caller.
    Fail,
    /// The copy moves only half of its bytes: must become EIO, never a short success.
    Short,
    /// The copy is kept until `Release`.
    Hold,
    /// The copy completes after `delay_ms`.
    Delay,
    /// Half of the bytes are moved, then the copy is kept until `Release`.
    HoldHalf,
    /// The copy is done, and its completion kept until `Release`.
    HoldDone,
    /// The queue thread panics before the copy.
    Panic,
    /// The copy fails as if the driver had lost the GPU.
    DriverLost,
}

/// Which copies, and what happens to them. The first rule that matches a copy is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct FaultRule {
    /// What happens.
    pub action: FaultAction,
    /// Only reads (`true`), only writes (`false`), or both.
    #[serde(default)]
    pub reads: Option<bool>,
    /// Only copies that touch bytes from here (an offset in the device) ...
    #[serde(default)]
    pub from: u64,
    /// ... to before here; absent: to the end.
    #[serde(default)]
    pub to: Option<u64>,
    /// Only so many copies; absent: all from now on.
    #[serde(default)]
    pub count: Option<u32>,
    /// Milliseconds of a [`FaultAction::Delay`].
    #[serde(default)]
    pub delay_ms: u32,
}

/// The answer to a [`Call`].
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Reply {
    /// The error's name; absent when the call succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// What the call gives: an [`Error`], [`DeviceInfo`], or an empty object.
    pub parameters: serde_json::Value,
}

impl Reply {
    /// The reply that carries a result, or the error in its place.
    pub fn from_result<T: Serialize>(result: Result<T>) -> Reply {
        let failed = |error: &Error| Reply {
            error: Some(FAILED_ERROR.to_owned()),
            parameters: serde_json::to_value(error).unwrap_or_default(),
        };
        match result.map(|value| serde_json::to_value(value)) {
            Ok(Ok(parameters)) => Reply {
                error: None,
                parameters,
            },
            Ok(Err(error)) => failed(&Error::new(ErrorKind::Io, format!("reply: {error}"))),
            Err(error) => failed(&error),
        }
    }

    /// The reply's result.
    ///
    /// # Errors
    /// What the server answered, or that its answer could not be understood.
    pub fn into_result<T: for<'de> Deserialize<'de>>(self) -> Result<T> {
        let bad = |error: serde_json::Error| {
            Error::new(
                ErrorKind::Io,
                format!("the server's answer is not understood: {error}"),
            )
        };
        match self.error {
            None => serde_json::from_value(self.parameters).map_err(bad),
            Some(_) => Err(serde_json::from_value::<Error>(self.parameters).map_err(bad)?),
        }
    }

    /// The reply to [`Call::Show`].
    pub fn info(self) -> Result<DeviceInfo> {
        self.into_result()
    }
}

/// `/run/ublk-vram` (or `$UBLK_VRAM_RUN_DIR` for tests): sockets, locks and notes of all servers.
#[derive(Debug, Clone)]
pub struct RunDir(PathBuf);

impl RunDir {
    /// The directory of this machine.
    pub fn system() -> RunDir {
        RunDir(
            std::env::var_os("UBLK_VRAM_RUN_DIR")
                .map_or_else(|| "/run/ublk-vram".into(), PathBuf::from),
        )
    }

    /// Another directory, for tests.
    pub fn at(path: &Path) -> RunDir {
        RunDir(path.to_path_buf())
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The control socket of a device.
    pub fn socket(&self, name: &DeviceName) -> PathBuf {
        self.0.join(format!("{name}.sock"))
    }

    /// The file whose lock (flock) a server holds for its whole life: the name is taken.
    pub fn lock(&self, name: &DeviceName) -> PathBuf {
        self.0.join(format!("{name}.lock"))
    }

    /// Whether a process of a server holds the name, as far as it can be seen. The look itself takes
    /// the lock for a moment, shared.
    pub fn is_locked(&self, name: &DeviceName) -> bool {
        let Ok(file) = File::open(self.lock(name)) else {
            return false;
        };
        Flock::lock(file, FlockArg::LockSharedNonblock).is_err()
    }

    /// Whether `path` still names the open file. A server that ends removes its lock's file while it
    /// holds it: a lock counts only on the file that is still there.
    pub fn is_still(file: &File, path: &Path) -> bool {
        let identity = |data: Metadata| (data.dev(), data.ino());
        let open = file.metadata().map(identity).ok();
        open.is_some() && open == std::fs::metadata(path).map(identity).ok()
    }

    /// What `recover` needs of a device whose processes are all gone (0600: only root reads it).
    pub fn session(&self, name: &DeviceName) -> PathBuf {
        self.0.join(format!("{name}.session"))
    }

    /// Where [`crate::device::StaticInfo`] is left for those who may not open the socket.
    pub fn note(&self, name: &DeviceName) -> PathBuf {
        self.0.join(format!("{name}.json"))
    }

    /// The names that have a lock file, sorted; each is live, or dead if nobody holds the lock.
    pub fn names(&self) -> Vec<DeviceName> {
        let mut names: Vec<DeviceName> = std::fs::read_dir(&self.0)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| {
                entry
                    .file_name()
                    .to_str()?
                    .strip_suffix(".lock")?
                    .parse()
                    .ok()
            })
            .collect();
        names.sort();
        names
    }
}
