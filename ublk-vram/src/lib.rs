//! A block device whose storage is GPU memory, served by a userspace process through ublk.
//!
//! The crate is the server: `ublk-vram serve` is a thin `main.rs` over [`worker`]. `vramctl` and
//! the tests use the same crate for what both sides must agree on: names, sizes, the control
//! protocol and the rules that decide whether a device may go.
//!
//! The rooms, from a request's point of view (docs/architecture.md tells it as one run):
//! [`ublk`] takes a request from the kernel, [`engine`] cuts it into copies, [`store`] finds the
//! chunk, [`copy`] (or, later, the GPU's copy engine) of a [`backend`] moves the bytes, and [`ublk`]
//! gives the answer back. [`health`] knows whether the memory is still there. A [`worker`] does the I/O of one device and may die; a [`supervisor`] holds
//! the [`session`], which outlives it, and lets another one take over; [`control`] lets others ask,
//! [`safety`] keeps the machine alive.
#![warn(missing_docs)]
#![cfg_attr(
    not(test),
    deny(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic
    )
)]

pub mod backend;
pub mod control;
pub mod copy;
pub mod device;
pub mod engine;
pub mod error;
pub mod health;
pub mod kmod;
pub mod log;
pub mod safety;
pub mod session;
pub mod size;
pub mod store;
pub mod supervisor;
pub mod ublk;
pub mod worker;

pub use error::{Error, ErrorKind, Result};
