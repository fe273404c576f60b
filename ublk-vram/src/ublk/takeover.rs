//! Serving a disk whose server is gone (USER_RECOVERY).
//!
//! ```text
//!   the server dies -> the driver takes its requests back, state QUIESCED, new requests wait
//!   START_USER_RECOVERY   -EBUSY until the dead one's /dev/ublkcN is closed: tried again
//!   open /dev/ublkcN, map the descriptors, fetch every tag of every queue
//!   END_USER_RECOVERY     waits for the fetches; the disk is live, waiting requests come
//! ```
//!
//! What can be made beforehand is made beforehand, by [`Heir::prepare`]: between the two deaths the
//! machine may have no memory and no disk to give.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use libublk::ctrl::UblkCtrl;
use libublk::sys;

use super::command::Commander;
use super::device::{Shape, Target, explain, open_device};
use super::features::{self, Features};
use crate::error::{Error, ErrorKind, Result};

/// How long a dead server may take to be gone: its memory is unmapped and its descriptors closed, on
/// a machine that may be busy.
const GONE_LIMIT: Duration = Duration::from_secs(60);
/// How long END_USER_RECOVERY may wait for the fetches.
const FETCH_LIMIT: Duration = Duration::from_secs(30);
/// Pause before START_USER_RECOVERY is sent again.
const RETRY: Duration = Duration::from_millis(1);

/// One that waits for the server of a device to die.
pub struct Heir {
    commander: Commander,
    ctrl: UblkCtrl,
    features: Features,
    id: u32,
    no_safe_stop: bool,
    /// Keeps the node's entry in memory; nothing is opened for good.
    _node: File,
}

impl Heir {
    /// Makes ready for device `id`, which another process serves.
    ///
    /// # Errors
    /// There is no such device, or the driver cannot be asked.
    pub fn prepare(id: u32, no_safe_stop: bool) -> Result<Heir> {
        let commander = Commander::open()?;
        let features = features::probe()?;
        let number = i32::try_from(id).unwrap_or(i32::MAX);
        let ctrl = UblkCtrl::new_simple(number)
            .map_err(|error| explain(&format!("ublk device {id}"), error))?;
        let path = ctrl.get_cdev_path();
        let node = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_PATH)
            .open(&path)
            .map_err(|error| Error::os(format!("cannot find {path}"), error))?;
        Ok(Heir {
            commander,
            ctrl,
            features,
            id,
            no_safe_stop,
            _node: node,
        })
    }

    /// Begins the takeover: waits until the dead server is gone and opens the device. `in_gap` is 1 while
    /// the recovery is, or may be, begun.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if the server is not gone after 60 s; what else the driver answers.
    pub fn begin(mut self, size: u64, shape: &Shape, in_gap: &AtomicU64) -> Result<Taking> {
        let end = Instant::now() + GONE_LIMIT;
        loop {
            in_gap.store(1, Ordering::SeqCst);
            let started = self.commander.simple(
                sys::UBLK_U_CMD_START_USER_RECOVERY,
                self.id,
                0,
                "START_USER_RECOVERY",
                FETCH_LIMIT,
            );
            if started.is_err() {
                in_gap.store(0, Ordering::SeqCst);
            }
            match started {
                Ok(()) => break,
                Err(error) if error.kind == ErrorKind::Busy && Instant::now() < end => {
                    std::thread::sleep(RETRY);
                }
                Err(error) => return Err(error),
            }
        }
        let info = self.ctrl.dev_info();
        let device = open_device(&self.ctrl, &info, size, shape)?;
        let safe_stop = self.features.has(features::SAFE_STOP_DEV) && !self.no_safe_stop;
        Ok(Taking {
            commander: self.commander,
            target: Target {
                device: Arc::new(device),
                ctrl: self.ctrl,
                features: self.features,
                safe_stop,
                id: self.id,
            },
        })
    }
}

/// A device between START_USER_RECOVERY and END_USER_RECOVERY.
pub struct Taking {
    commander: Commander,
    target: Target,
}

impl Taking {
    /// The device, for the queue threads.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Makes the disk live, once every queue thread has sent its fetches.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn end(mut self) -> Result<Target> {
        // The driver wants the process that fetches.
        let pid = u64::from(std::process::id());
        self.commander.simple(
            sys::UBLK_U_CMD_END_USER_RECOVERY,
            self.id(),
            pid,
            "END_USER_RECOVERY",
            FETCH_LIMIT,
        )?;
        Ok(self.target)
    }

    fn id(&self) -> u32 {
        self.target.id
    }
}
