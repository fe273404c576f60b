//! Where calls of the control socket come in: `show` is answered at once, from memory; everything else
//! is the supervisor's loop's to answer.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use tokio::sync::oneshot;

use super::machine::Event;
use crate::control::{Answer, Call, Handler, Reply};
use crate::device::{DeviceInfo, DeviceState, StaticInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::session::View;

/// Where the answer to a call goes; see [`Answer::Later`].
pub(super) type ReplySlot = oneshot::Sender<(Reply, Sender<()>)>;

/// Wakes the supervisor's loop.
#[derive(Clone)]
pub(super) struct Wake(Arc<EventFd>);

impl Wake {
    pub(super) fn new() -> Result<Wake> {
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        EventFd::from_value_and_flags(0, flags)
            .map(|fd| Wake(Arc::new(fd)))
            .map_err(|errno| Error::os("eventfd", errno))
    }

    pub(super) fn wake(&self) {
        // Full: it is going to wake.
        let _ = self.0.write(1);
    }

    pub(super) fn clear(&self) {
        let _ = self.0.read();
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What the device is now.
#[derive(Debug, Clone)]
pub(super) struct Current {
    pub(super) state: DeviceState,
    pub(super) reason: Option<String>,
    pub(super) fixed: Option<StaticInfo>,
}

/// State and reason, set by the supervisor's loop, read by the control thread. The lock is held for the
/// exchange of a pointer only: a reader that waits for memory must not hold up the loop.
pub(super) struct Status {
    current: Mutex<Arc<Current>>,
    pub(super) view: View,
}

impl Status {
    pub(super) fn new(view: View, state: DeviceState) -> Status {
        let current = Current {
            state,
            reason: None,
            fixed: None,
        };
        Status {
            current: Mutex::new(Arc::new(current)),
            view,
        }
    }

    pub(super) fn current(&self) -> Arc<Current> {
        Arc::clone(&self.current.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn set(&self, current: Current) {
        let current = Arc::new(current);
        let old = std::mem::replace(
            &mut *self.current.lock().unwrap_or_else(PoisonError::into_inner),
            current,
        );
        drop(old);
    }

    fn info(&self) -> Result<DeviceInfo> {
        let current = self.current();
        let fixed = current.fixed.clone().ok_or_else(|| {
            Error::new(
                ErrorKind::Busy,
                "the device is being made: its memory is zeroed and checked",
            )
        })?;
        self.view.info(fixed, current.state, current.reason.clone())
    }
}

/// Takes calls from the control thread.
pub(super) struct Desk {
    pub(super) status: Arc<Status>,
    pub(super) events: Mutex<Sender<Event>>,
    pub(super) wake: Wake,
}

impl Handler for Desk {
    fn call(&self, call: Call) -> Answer {
        if call == (Call::Show {}) {
            return Answer::Now(Reply::from_result(self.status.info()));
        }
        let (reply, answer) = oneshot::channel();
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        match events.send(Event::Call(call, reply)) {
            Ok(()) => {
                self.wake.wake();
                Answer::Later(answer)
            }
            Err(_) => Answer::Now(Reply::from_result::<()>(Err(Error::new(
                ErrorKind::Busy,
                "the device is ending already",
            )))),
        }
    }
}
