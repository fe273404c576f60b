//! How a worker that is killed lets go of its disk.
//!
//! Nobody can take a disk over while the dead one's /dev/ublkcN is open, and the ring of a queue holds it:
//! its fetches wait there, its table of files names it, and with zero copy its buffers are requests. Left to
//! itself, the kernel tears a ring down in a work item (io_ring_exit_work in io_uring/io_uring.c), which
//! waits for others (the fallback work of the dead task), on workers that kthreadd makes when they are
//! needed. With the disk as swap that can be never: short of memory, kthreadd waits to swap something out,
//! to this very disk.
//!
//! So each queue thread does it as it dies. While a thread that exits has a request on a file that is itself
//! a ring, the kernel cancels that one and all commands of the thread (REQ_F_INFLIGHT,
//! io_uring_cancel_generic); what is linked to it runs then, still on the thread:
//!
//! ```text
//!   poll a ring where nothing ever happens        cancelled by the thread's exit, and its commands with it;
//!   -> poll it again, some times                  each time once more: a command is passed over while
//!                                                 ublk_queue_rq has its request in hand
//!   -> unregister the buffer of each tag          zero copy only
//!   -> close the slot of /dev/ublkcN              hard links: what came before may fail
//! ```
//!
//! Older drivers must not be treated so. They take a dead server's requests back when its commands are
//! cancelled, and not once more when the device is closed (ublk_ch_release since Linux 6.15): what they hand
//! over between the cancelling and the death would be lost, and whoever waits for it would wait for ever.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use io_uring::{IoUring, opcode, squeue, types};
use libublk::sys;

use super::device::Shape;
use super::features;
use super::queue::{CDEV, OURS, RELEASE, io_command, push_chain};
use crate::backend::QueueId;
use crate::error::{Error, Result};

/// How often the commands of a thread that exits are cancelled.
const PASSES: u16 = 8;

/// The ring where nothing ever happens; one is enough for a process.
pub struct Release {
    quiet: OwnedFd,
}

impl Release {
    /// Makes the ring; `None` if the driver is an older one. PER_IO_DAEMON (Linux 6.16) tells.
    ///
    /// # Errors
    /// The driver cannot be asked; the kernel has no memory for a ring, or forbids io_uring
    /// (`kernel.io_uring_disabled`).
    pub fn new() -> Result<Option<Release>> {
        if !features::probe()?.has(features::PER_IO_DAEMON) {
            return Ok(None);
        }
        Release::make()
            .map(Some)
            .map_err(|error| Error::os("cannot make a ring of io_uring", error))
    }

    fn make() -> io::Result<Release> {
        let ring: IoUring = IoUring::new(1)?;
        // SAFETY: the descriptor is open as long as `ring`, which outlives the borrow.
        let descriptor = unsafe { BorrowedFd::borrow_raw(ring.as_raw_fd()) };
        Ok(Release {
            quiet: descriptor.try_clone_to_owned()?,
        })
    }

    /// How many entries of a queue's ring [`Release::arm`] takes.
    pub(super) fn entries(shape: &Shape) -> u32 {
        u32::from(PASSES) + u32::from(Release::buffers(shape)) + 1
    }

    /// Registered buffers of a queue's ring.
    fn buffers(shape: &Shape) -> u16 {
        if shape.zero_copy { shape.depth } else { 0 }
    }

    /// Has the calling thread let go of what its ring will have in slot [`CDEV`], when it ends. The
    /// entries complete then, and not before; what they need is allocated now. `self` must live as long as
    /// the thread, or there is but one pass.
    ///
    /// # Errors
    /// The kernel has no memory for them; the ring is of no use then.
    pub(super) fn arm(&self, ring: &mut IoUring, queue: QueueId, shape: &Shape) -> io::Result<()> {
        let quiet = types::Fd(self.quiet.as_raw_fd());
        let polls = (0..PASSES).map(|_| opcode::PollAdd::new(quiet, libc::POLLIN as u32).build());
        // The driver takes the index of a buffer, which is its tag, as the address.
        let buffers = (0..Release::buffers(shape)).map(|tag| {
            let op = sys::UBLK_U_IO_UNREGISTER_IO_BUF;
            io_command(op, queue, tag, 0, u64::from(tag))
        });
        let ours = |entry: squeue::Entry| entry.user_data(OURS | RELEASE);
        let close = opcode::Close::new(CDEV).build();
        push_chain(ring, polls.chain(buffers).map(ours), ours(close))?;
        // What the kernel could not take whole has run, and its completions are there.
        if ring.submit()? != Release::entries(shape) as usize || !ring.completion().is_empty() {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    /// A pipe's end stands for the device: the kernel's side of this needs no driver.
    #[test]
    fn a_thread_that_ends_lets_go() {
        let release = Release::make().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        let shape = Shape {
            queues: 1,
            depth: 8,
            max_io: 4096,
            zero_copy: false,
        };
        let end = |held: OwnedFd| {
            let mut ring: IoUring = IoUring::builder()
                .setup_coop_taskrun()
                .setup_single_issuer()
                .build(Release::entries(&shape))
                .unwrap();
            release.arm(&mut ring, QueueId(0), &shape).unwrap();
            let slots = [held.as_fd().as_raw_fd()];
            ring.submitter().register_files(&slots).unwrap();
            ring
        };
        // Its ring outlives it, so that nothing else lets go.
        let mut ring = std::thread::scope(|scope| {
            let thread = scope.spawn(|| end(writer.into()));
            thread.join().unwrap()
        });
        assert_eq!(reader.read(&mut [0]).unwrap(), 0, "the other end is closed");
        let results: Vec<i32> = ring.completion().map(|entry| entry.result()).collect();
        let (close, polls) = results.split_last().unwrap();
        assert_eq!(*close, 0);
        // Each was waiting when the thread ended: one that has no ring to wait for ends with EBADF.
        assert_eq!(polls, [-libc::ECANCELED; PASSES as usize]);
    }
}
