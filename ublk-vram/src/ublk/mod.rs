//! The only room that names libublk, io_uring and the kernel's ublk interface.
//!
//! libublk gives the device, its queues and the interface's types. Two things are done here and not
//! by it, for reasons in docs/architecture.md ("What of libublk is used"): its `run_target` stops
//! the disk in cases that must survive, and its control commands have no time limit and lack
//! TRY_STOP_DEV. So this room drives the queues by hand and sends stop and delete itself.

mod command;
mod device;
pub mod features;
mod queue;
mod release;
mod takeover;

pub use command::{DeviceStatus, delete_orphan, device_status, quiesce};
pub use device::{Geometry, Shape, StopOutcome, Target, Wishes};
pub use queue::{Buffers, QueueHandle, QueueSeat, QueueSetup, seat_queue};
pub use release::Release;
pub use takeover::Heir;
