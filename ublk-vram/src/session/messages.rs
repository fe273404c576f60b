//! What the processes of a server tell each other.

use serde::{Deserialize, Serialize};

use super::{Identity, Sized};
use crate::backend::MemoryDescription;
use crate::control::{Call, Reply};
use crate::device::{DeviceState, StaticInfo};
use crate::error::Error;

/// Changes with every change of these messages or of the regions' contents: a worker of another
/// version is turned away before it has anything in hand.
pub const VERSION: u32 = 3;

/// What a process is started for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// Makes the device: zeroes its memory, adds it to the driver, waits for [`Order::GoLive`].
    Maker,
    /// Is made ready beside a live worker and waits for [`Order::TakeOver`].
    Standby {
        /// The driver's number of the device.
        id: u32,
    },
    /// Wipes the memory of a device whose disk is gone, and ends.
    Wiper,
}

/// The first message to a worker. Its descriptors: the name's lock, the control socket, one for each
/// region, those of the memory.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Begin {
    /// [`VERSION`] of the sender.
    pub version: u32,
    /// What for.
    pub role: Role,
    /// The device.
    pub identity: Identity,
    /// The regions.
    pub regions: Vec<Sized>,
    /// The device memory; absent where the first worker makes it.
    pub memory: Option<MemoryDescription>,
}

/// The first message to a supervisor that a worker starts in place of one that is gone.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Adopt {
    /// As a worker gets it, with the same descriptors.
    pub begin: Begin,
    /// The sender's process id.
    pub worker: i32,
    /// What `show` tells.
    pub fixed: StaticInfo,
    /// The state the device is in.
    pub state: DeviceState,
    /// And why.
    pub reason: Option<String>,
    /// Whether the device survives its worker; else why not.
    pub survives: Result<(), String>,
}

/// To a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// Be this.
    Begin(Box<Begin>),
    /// Show the disk.
    GoLive,
    /// The last worker is dead: serve its disk.
    TakeOver {
        /// The new generation.
        generation: u64,
        /// What `show` told so far.
        fixed: Box<StaticInfo>,
    },
    /// A call that the worker is to answer.
    Call {
        /// Comes back in [`Report::Answer`].
        id: u64,
        /// The call.
        call: Call,
    },
    /// Drain and end.
    Terminate,
    /// Answers [`Adopt`]: there is a supervisor again.
    Adopted,
}

/// From a worker.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Report {
    /// A new region, with its descriptor.
    Region(Sized),
    /// The memory that this worker made, with its descriptors.
    Memory(MemoryDescription),
    /// The driver has the device; there is no disk yet.
    Added {
        /// The driver's number.
        id: u32,
        /// Whether the device survives its worker; else why not.
        survives: Result<(), String>,
    },
    /// A standby is ready.
    Ready,
    /// The disk is served.
    Live(Box<StaticInfo>),
    /// The copy path, as `show` tells it, is another one.
    Copy(String),
    /// The device is in another state.
    State {
        /// Which.
        state: DeviceState,
        /// And why.
        reason: Option<String>,
    },
    /// The answer to a call.
    Answer {
        /// Of [`Order::Call`].
        id: u64,
        /// The answer.
        reply: Reply,
    },
    /// SIGTERM came to this process.
    Terminate,
    /// What was asked for cannot be done; the process ends.
    Failed(Error),
    /// The memory does not hold the device's contents: nobody may serve it. The process ends.
    Lost(Error),
    /// The disk is gone and the memory wiped, as far as was possible; the process ends.
    Ended(Option<Error>),
}
