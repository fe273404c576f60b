//! One device's life: open the memory, zero and check it, start the queues, show the disk, serve
//! control, end in order.
//!
//! ```text
//!   creating -- zeroed, checked, locked, started --> live
//!   live -- SIGTERM --> draining -- nobody uses it --> stopping --> the process ends
//!                          |  swapoff failed: back to live, the device stays
//!   live -- remove, nobody uses it --> stopping
//! ```
//!
//! Threads: this one (lifecycle, and the only one that sends ublk control commands), one for each
//! queue, one for the control socket, one that waits for signals. They talk to this one through a
//! channel; queue threads talk to nobody.

mod lifecycle;
mod session;
mod start;
mod startup;
mod status;
pub mod swapoff;

pub use session::{BASE_COST_BYTES, Session, cost_bytes, plan};
pub use start::{StartLine, StartPipe};

use crate::error::Result;

/// Serves the device of `session` until it has ended in order.
///
/// # Errors
/// Why it could not be started (told through `start` too), or did not end in order.
pub fn run(session: Session, start: StartPipe, warnings: Vec<String>) -> Result<()> {
    lifecycle::run(session, start, warnings)
}
