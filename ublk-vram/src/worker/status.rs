//! What the control thread may tell without asking anybody: state, counters, memory.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::oneshot;

use super::lifecycle::Event;
use crate::backend::fault::FaultControl;
use crate::control::{Answer, Call, Handler, Reply};
use crate::device::{ChecksumInfo, DeviceInfo, DeviceState, StaticInfo};
use crate::engine::StatsTable;
use crate::error::{Error, ErrorKind, Result};
use crate::safety;
use crate::store::ChecksumTable;

/// State and its reason, as everybody may see it.
pub(super) struct Status {
    current: Mutex<(DeviceState, Option<String>)>,
    fixed: Mutex<Option<StaticInfo>>,
    checksums: Mutex<Option<Arc<ChecksumTable>>>,
    stats: Arc<StatsTable>,
    arena: u64,
    /// Bytes of device memory that is system memory (the host backend's): locked, but not a cost.
    storage: u64,
}

impl Status {
    pub(super) fn new(stats: Arc<StatsTable>, arena: u64, storage: u64) -> Status {
        Status {
            current: Mutex::new((DeviceState::Creating, None)),
            fixed: Mutex::new(None),
            checksums: Mutex::new(None),
            stats,
            arena,
            storage,
        }
    }

    /// Moves to `state`, giving `reason` to those who ask.
    pub(super) fn become_state(&self, state: DeviceState, reason: Option<String>) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        debug_assert!(
            current.0 == state || current.0.may_become(state),
            "{} -> {state}",
            current.0
        );
        match &reason {
            Some(reason) => tracing::info!("{state}: {reason}"),
            None => tracing::info!("{state}"),
        }
        *current = (state, reason);
    }

    pub(super) fn set_fixed(&self, fixed: StaticInfo) {
        *self.fixed.lock().unwrap_or_else(PoisonError::into_inner) = Some(fixed);
    }

    pub(super) fn set_checksums(&self, table: Option<Arc<ChecksumTable>>) {
        *self
            .checksums
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = table;
    }

    fn checksum(&self) -> Option<ChecksumInfo> {
        let table = self
            .checksums
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        table.as_ref().map(|table| ChecksumInfo {
            bytes: table.len_bytes(),
            left_writing: table.left_writing(),
            unverified: table.is_unverified(),
        })
    }

    fn info(&self) -> Result<DeviceInfo> {
        let fixed = self
            .fixed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let fixed = fixed.ok_or_else(|| {
            Error::new(
                ErrorKind::Busy,
                "the device is being made: its memory is zeroed and checked",
            )
        })?;
        let (state, reason) = self
            .current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut memory = safety::memory_info(self.arena)?;
        memory.cost = memory.cost.saturating_sub(self.storage);
        Ok(DeviceInfo {
            fixed,
            state,
            reason,
            memory,
            checksum: self.checksum(),
            queue: self.stats.read(),
        })
    }
}

/// Takes calls from the control thread.
pub(super) struct Desk {
    pub(super) status: Arc<Status>,
    pub(super) events: Mutex<Sender<Event>>,
    pub(super) fault: Option<Arc<FaultControl>>,
}

impl Desk {
    fn fault(&self) -> Result<&FaultControl> {
        self.fault.as_deref().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                "this device has no fault layer: it was not added with --lab-fault",
            )
        })
    }
}

impl Handler for Desk {
    fn call(&self, call: Call) -> Answer {
        match call {
            Call::Show {} => Answer::Now(Reply::from_result(self.status.info())),
            Call::Fault { rule } => Answer::Now(Reply::from_result(
                self.fault().map(|fault| fault.add(rule)),
            )),
            Call::Release { reverse } => Answer::Now(Reply::from_result(
                self.fault().map(|fault| fault.release(reverse)),
            )),
            Call::Remove {} => {
                let (reply, answer) = oneshot::channel();
                let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
                match events.send(Event::Remove(reply)) {
                    Ok(()) => Answer::Later(answer),
                    Err(_) => Answer::Now(Reply::from_result::<()>(Err(Error::new(
                        ErrorKind::Busy,
                        "the device is ending already",
                    )))),
                }
            }
        }
    }
}
