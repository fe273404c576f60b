//! The control socket: how `vramctl` and the tests speak to a server.
//!
//! `/run/ublk-vram/NAME.sock`, mode 0600, root only (checked again by SO_PEERCRED). Calls and
//! replies are JSON, each ended by a NUL byte, in the form of Varlink
//! (`{"method":..,"parameters":..}`), so that any Varlink client can speak it.

mod client;
mod protocol;
mod server;

pub use client::Client;
pub use protocol::{
    Call, FAILED_ERROR, FaultAction, FaultRule, MAX_MESSAGE, METHOD_PREFIX, Reply, RunDir,
};
pub use server::{Answer, Handler, bind, serve};
