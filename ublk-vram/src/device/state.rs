//! The states a device can be in.

use std::fmt;

use serde::{Deserialize, Serialize};

/// One state of a device's life. [`DeviceState::may_become`] is the whole state machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeviceState {
    /// Memory is being allocated, zeroed and checked; there is no block device yet.
    Creating,
    /// The block device serves requests.
    Live,
    /// The device is to end: its users are being waited for, or swapped off.
    Draining,
    /// The worker died or is being replaced: requests wait, and another worker takes over.
    Recovering,
    /// The disk is served, but something that should hold does not.
    Degraded,
    /// The device memory's contents are lost: every request gets an error.
    Lost,
    /// No worker could take over: the memory is kept, requests wait.
    Failed,
    /// The block device is gone; memory is being wiped and given back.
    Stopping,
    /// Every process of the server is gone; the disk is still there and its requests wait (seen by
    /// others, never by the server itself).
    Orphan,
    /// Every process of the server is gone and so is the disk, but something is left behind (seen by
    /// others, never by the server itself).
    Dead,
}

impl DeviceState {
    /// Every state.
    pub const ALL: [DeviceState; 10] = [
        DeviceState::Creating,
        DeviceState::Live,
        DeviceState::Draining,
        DeviceState::Recovering,
        DeviceState::Degraded,
        DeviceState::Lost,
        DeviceState::Failed,
        DeviceState::Stopping,
        DeviceState::Orphan,
        DeviceState::Dead,
    ];

    /// Whether `self` may become `next`. A drain that fails goes back to live: the device stays. An
    /// orphan that is recovered goes through recovering like any other takeover.
    pub fn may_become(self, next: DeviceState) -> bool {
        use DeviceState::{
            Creating, Dead, Degraded, Draining, Failed, Live, Lost, Orphan, Recovering, Stopping,
        };
        match self {
            Creating => matches!(next, Live | Stopping | Dead),
            Live => !matches!(next, Live | Creating | Failed),
            Draining => matches!(
                next,
                Live | Degraded | Recovering | Lost | Stopping | Orphan | Dead
            ),
            Recovering => matches!(
                next,
                Live | Draining | Degraded | Lost | Failed | Stopping | Orphan | Dead
            ),
            Degraded => matches!(
                next,
                Live | Draining | Recovering | Lost | Stopping | Orphan | Dead
            ),
            Lost => matches!(next, Draining | Recovering | Stopping | Orphan | Dead),
            Failed => matches!(next, Recovering | Stopping | Orphan | Dead),
            Stopping => next == Dead,
            Orphan => matches!(next, Recovering | Dead),
            Dead => false,
        }
    }

    /// Whether a worker serves the disk in this state.
    pub fn is_served(self) -> bool {
        use DeviceState::{Degraded, Draining, Live, Lost};
        matches!(self, Live | Draining | Degraded | Lost)
    }

    /// The name as `list` shows it.
    pub fn as_str(self) -> &'static str {
        match self {
            DeviceState::Creating => "creating",
            DeviceState::Live => "live",
            DeviceState::Draining => "draining",
            DeviceState::Recovering => "recovering",
            DeviceState::Degraded => "degraded",
            DeviceState::Lost => "lost",
            DeviceState::Failed => "failed",
            DeviceState::Stopping => "stopping",
            DeviceState::Orphan => "orphan",
            DeviceState::Dead => "dead",
        }
    }
}

impl fmt::Display for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceState;

    #[test]
    fn the_allowed_transitions() {
        let table = DeviceState::ALL.map(|from| {
            let to = DeviceState::ALL
                .into_iter()
                .filter(|to| from.may_become(*to));
            let to: Vec<&str> = to.map(DeviceState::as_str).collect();
            format!("{from}: {}", to.join(" "))
        });
        assert_eq!(
            table,
            [
                "creating: live stopping dead",
                "live: draining recovering degraded lost stopping orphan dead",
                "draining: live recovering degraded lost stopping orphan dead",
                "recovering: live draining degraded lost failed stopping orphan dead",
                "degraded: live draining recovering lost stopping orphan dead",
                "lost: draining recovering stopping orphan dead",
                "failed: recovering stopping orphan dead",
                "stopping: dead",
                "orphan: recovering dead",
                "dead: ",
            ]
        );
    }

    #[test]
    fn names_are_those_of_the_json_form() {
        for state in DeviceState::ALL {
            assert_eq!(serde_json::to_value(state).unwrap(), state.as_str());
        }
    }
}
