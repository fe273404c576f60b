//! The start pipe: how a server tells the program that started it that the device is usable, or why
//! it is not. One JSON line; after that the two have nothing to do with each other.

use std::fs::File;
use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde::{Deserialize, Serialize};

use crate::device::StaticInfo;
use crate::error::Error;

/// The one line.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", untagged)]
pub enum StartLine {
    /// The device is usable.
    Ready {
        /// What it is.
        ready: Box<StaticInfo>,
        /// What the user should know.
        warnings: Vec<String>,
    },
    /// There is no device.
    Failed {
        /// Why.
        failed: Error,
    },
}

/// The writing end; without one (a server started by hand) lines go nowhere.
pub struct StartPipe(Option<File>);

impl StartPipe {
    /// The pipe at descriptor `fd`, which the caller inherited and gives away.
    ///
    /// # Safety
    /// Nothing else in the process may own `fd`.
    pub unsafe fn inherited(fd: Option<RawFd>) -> StartPipe {
        StartPipe(fd.map(|fd| {
            // SAFETY: the caller says that the descriptor is ours.
            let pipe = unsafe { OwnedFd::from_raw_fd(fd) };
            // It was inherited, so it has no close-on-exec flag; a child of ours that kept it open
            // would hide our death from the reader.
            let _ = fcntl(&pipe, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC));
            File::from(pipe)
        }))
    }

    /// Writes the line and closes the pipe. A reader that is gone is no reason to stop.
    pub fn send(&mut self, line: &StartLine) {
        if let (Some(mut pipe), Ok(mut text)) = (self.0.take(), serde_json::to_vec(line)) {
            text.push(b'\n');
            let _ = pipe.write_all(&text);
        }
    }
}
