//! How a worker that is killed lets go of its disk.
//!
//! Nobody can take a disk over while the dead one's /dev/ublkcN is open, and the ring of a queue holds it:
//! its fetches wait there, its table of files names it, and with zero copy its buffers are requests. Left to
//! itself, the kernel tears a ring down in a work item (io_ring_exit_work in io_uring/io_uring.c), which
//! waits for others (the fallback work of the dead task, io_uring/tw.c), on workers that kthreadd makes when
//! they are needed. With the disk as swap that can be never: short of memory, kthreadd waits to swap
//! something out, to this very disk.
//!
//! So each queue thread does it as it dies. A request on a file that is itself a ring is cancelled by the
//! exit of the thread that made it, together with all its commands (REQ_F_INFLIGHT and
//! io_uring_cancel_generic in io_uring/cancel.c). What is linked to it runs then, on that thread:
//!
//! ```text
//!   poll a ring where nothing ever happens        cancelled by the thread's exit
//!   -> unregister the buffer of each tag          zero copy only
//!   -> close the slot of /dev/ublkcN              hard links: what came before may fail
//! ```

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use io_uring::{IoUring, opcode, squeue, types};
use libublk::sys;

use super::device::Shape;
use super::queue::io_command;
use crate::backend::QueueId;
use crate::error::{Error, Result};

/// The ring where nothing ever happens; one is enough for a process.
pub struct Release {
    quiet: OwnedFd,
}

impl Release {
    /// Makes the ring.
    ///
    /// # Errors
    /// The kernel has no memory for it, or forbids io_uring (`kernel.io_uring_disabled`).
    pub fn new() -> Result<Release> {
        let failed = |error| Error::os("cannot make a ring of io_uring", error);
        let ring: IoUring = IoUring::new(1).map_err(failed)?;
        // SAFETY: the descriptor is open as long as `ring`, which outlives the borrow.
        let descriptor = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
        Ok(Release {
            quiet: descriptor.try_clone_to_owned().map_err(failed)?,
        })
    }

    /// How many entries [`Release::entries`] gives.
    pub(super) fn count(shape: &Shape) -> u32 {
        2 + match shape.zero_copy {
            true => u32::from(shape.depth),
            false => 0,
        }
    }

    /// What a queue thread submits before its first fetch, in one call, for the device in slot `cdev` of
    /// its ring. All complete when the thread ends, and not before.
    pub(super) fn entries(
        &self,
        queue: QueueId,
        shape: &Shape,
        cdev: types::Fixed,
    ) -> impl Iterator<Item = squeue::Entry> {
        let poll = opcode::PollAdd::new(types::Fd(self.quiet.as_raw_fd()), libc::POLLIN as u32);
        let tags = match shape.zero_copy {
            true => 0..shape.depth,
            false => 0..0,
        };
        // The driver takes the index of a buffer, which is its tag, as the address.
        let buffers = tags.map(move |tag| {
            let op = sys::UBLK_U_IO_UNREGISTER_IO_BUF;
            io_command(cdev, op, queue, tag, 0, u64::from(tag))
        });
        std::iter::once(poll.build())
            .chain(buffers)
            .map(|entry| entry.flags(squeue::Flags::IO_HARDLINK))
            .chain(std::iter::once(opcode::Close::new(cdev).build()))
    }
}
