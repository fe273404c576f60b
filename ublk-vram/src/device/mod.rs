//! What a device is, as plain data: its name, what the user asked for, the state it is in, and what
//! `show` tells of it. Nothing here opens a file or talks to a kernel.

mod info;
mod name;
mod spec;
mod state;

pub use info::{
    ChecksumInfo, DeviceInfo, MemoryInfo, PathChoice, PathCost, PathCounters, PathsInfo, QueueInfo,
    ServerInfo, StaticInfo,
};
pub use name::DeviceName;
pub use spec::{BackendSpec, CopyPath, CrashPoint, DeviceSpec, LabCrash, LabSpec, VulkanSpec};
pub use state::DeviceState;
