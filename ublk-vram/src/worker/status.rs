//! State and its reason, as the lifecycle thread sets them and others tell them.

use std::sync::{Mutex, PoisonError};

use super::link::Link;
use crate::device::{DeviceInfo, DeviceState, StaticInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::session::{Report, Session, View};

/// What a device is and in which state.
#[derive(Debug, Clone)]
pub(super) struct Current {
    pub(super) state: DeviceState,
    pub(super) reason: Option<String>,
    pub(super) fixed: Option<StaticInfo>,
}

/// The one place where it is kept; the supervisor is told of every change.
pub(super) struct Status {
    current: Mutex<Current>,
    view: View,
    link: Link,
}

impl Status {
    pub(super) fn new(session: &Session, link: &Link) -> Result<Status> {
        Ok(Status {
            current: Mutex::new(Current {
                state: DeviceState::Creating,
                reason: None,
                fixed: None,
            }),
            view: View::of(session)?,
            link: link.clone(),
        })
    }

    /// Moves to `state`, giving `reason` to those who ask.
    pub(super) fn become_state(&self, state: DeviceState, reason: Option<String>) {
        {
            let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
            debug_assert!(
                current.state == state || current.state.may_become(state),
                "{} -> {state}",
                current.state
            );
            current.state = state;
            current.reason.clone_from(&reason);
        }
        match &reason {
            Some(reason) => tracing::info!("{state}: {reason}"),
            None => tracing::info!("{state}"),
        }
        self.link.report(&Report::State { state, reason });
    }

    /// The disk is served from now on. The supervisor learns of it by a report of its own.
    pub(super) fn go_live(&self, fixed: &StaticInfo) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.state = DeviceState::Live;
        current.fixed = Some(fixed.clone());
    }

    /// The copy path, as `show` tells it, is another one. The supervisor learns of it by a report of its own.
    pub(super) fn set_copy(&self, copy: &str) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fixed) = &mut current.fixed {
            copy.clone_into(&mut fixed.copy);
        }
    }

    pub(super) fn current(&self) -> Current {
        self.current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(super) fn view(&self) -> &View {
        &self.view
    }

    /// What `show` tells while there is no supervisor to tell it.
    pub(super) fn info_alone(&self, why: &str) -> Result<DeviceInfo> {
        let Current {
            state,
            reason,
            fixed,
        } = self.current();
        let fixed = fixed.ok_or_else(|| Error::new(ErrorKind::Busy, "there is no disk yet"))?;
        let reason = reason.map_or_else(|| why.to_owned(), |reason| format!("{reason}; {why}"));
        self.view.info(fixed, state, Some(reason))
    }
}
