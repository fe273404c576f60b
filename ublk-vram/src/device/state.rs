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
    /// The device's memory is gone: every request ends with EIO. It can be removed, and nothing else.
    Lost,
    /// The block device is gone; memory is being wiped and given back.
    Stopping,
    /// The server is gone and left something behind (seen by others, never by the server itself).
    Dead,
}

impl DeviceState {
    /// Every state.
    pub const ALL: [DeviceState; 6] = [
        DeviceState::Creating,
        DeviceState::Live,
        DeviceState::Draining,
        DeviceState::Lost,
        DeviceState::Stopping,
        DeviceState::Dead,
    ];

    /// Whether `self` may become `next`. A drain that fails goes back to live: the device stays.
    pub fn may_become(self, next: DeviceState) -> bool {
        use DeviceState::{Creating, Dead, Draining, Live, Lost, Stopping};
        matches!(
            (self, next),
            (Creating, Live | Stopping)
                | (Live, Draining | Lost | Stopping)
                | (Draining, Live | Lost | Stopping)
                | (Lost, Stopping)
                | (Creating | Live | Draining | Lost | Stopping, Dead)
        )
    }

    /// The name as `list` shows it.
    pub fn as_str(self) -> &'static str {
        match self {
            DeviceState::Creating => "creating",
            DeviceState::Live => "live",
            DeviceState::Draining => "draining",
            DeviceState::Lost => "lost",
            DeviceState::Stopping => "stopping",
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
        let mut allowed = Vec::new();
        for from in DeviceState::ALL {
            for to in DeviceState::ALL {
                if from.may_become(to) {
                    allowed.push(format!("{from}>{to}"));
                }
            }
        }
        assert_eq!(
            allowed,
            [
                "creating>live",
                "creating>stopping",
                "creating>dead",
                "live>draining",
                "live>lost",
                "live>stopping",
                "live>dead",
                "draining>live",
                "draining>lost",
                "draining>stopping",
                "draining>dead",
                "lost>stopping",
                "lost>dead",
                "stopping>dead",
            ]
        );
    }
}
