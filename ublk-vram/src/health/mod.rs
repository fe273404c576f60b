//! Whether a device's memory is still there, and who is told when it is not.
//!
//! Queue threads find out first: a read that is not what was written, a canary that is not there, an
//! access that raised SIGBUS. They may not log, wait or look at the bus. So they set a flag, or leave a
//! fixed-size event in a ring that was allocated beforehand, and write to an eventfd. One thread of
//! control ([`Watch`]) reads that, speaks, looks at the bus on its own, and says which copy has not
//! come back in time.
//!
//! ```text
//!   queue threads --lose, report--> Health --notice--> Watch --> log, lifecycle
//!        ^----------------wake, is_lost--|<--lose--------'
//! ```
//!
//! A driver that lost the GPU took this process's way to the memory, and not always the memory: another
//! process may find it as it was ([`Health::driver_lost`]).
//!
//! [`Health::lose`] is final: a device that was lost stays lost. Every request that is in flight, and
//! every one that comes, ends with EIO; nothing is read from the memory or written to it any more. A
//! buffer that an engine may still write to is not used for anything else: no copy is started after
//! the loss, and the memory stays mapped until the process is gone.

mod presence;
mod watch;

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crossbeam_queue::ArrayQueue;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::backend::QueueId;
use crate::error::{Error, Result};

pub use presence::Presence;
pub(crate) use watch::judge as judge_canary;
pub use watch::{Canaries, Watch, WatchHandle};

/// Events that are kept until somebody reads them; more are counted only.
const EVENTS: usize = 256;

/// How it was found out that a device's memory is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Loss {
    /// The kernel said that the PCI function was removed.
    Removed = 1,
    /// The function does not answer with its vendor id.
    Absent,
    /// A chunk's header reads as all ones.
    AllOnes,
    /// A chunk's header does not read as it was written.
    Canary,
    /// The mapping was taken away (SIGBUS).
    Gone,
    /// A copy did not complete within its limit.
    Overdue,
    /// The driver lost the GPU, and no other process is to try.
    Driver,
}

impl Loss {
    const ALL: [Loss; 7] = [
        Loss::Removed,
        Loss::Absent,
        Loss::AllOnes,
        Loss::Canary,
        Loss::Gone,
        Loss::Overdue,
        Loss::Driver,
    ];
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Loss::Removed => "the PCI function was removed",
            Loss::Absent => "the PCI function does not answer on the bus",
            Loss::AllOnes => "the memory reads as all ones: it is off the bus",
            Loss::Canary => "the memory does not hold the device's headers any more",
            Loss::Gone => "the memory was taken away (SIGBUS)",
            Loss::Overdue => "a copy has not completed within its limit",
            Loss::Driver => "the driver lost the GPU (VK_ERROR_DEVICE_LOST)",
        })
    }
}

/// What a queue thread has to tell: plain data of a fixed size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoEvent {
    /// A block is not what was written to it: the read ended with EIO.
    BadBlock {
        /// The block, in 4 KiB from the device's start.
        block: u64,
        /// CRC32C of what was written.
        expected: u32,
        /// CRC32C of what was read.
        found: u32,
    },
    /// A chunk's canary was not there, and was there when it was read again.
    CanaryBlinked {
        /// The chunk.
        chunk: u32,
    },
}

/// What is known of a device's memory; shared by its queue threads and by control.
pub struct Health {
    /// 0, or a [`Loss`].
    lost: AtomicU8,
    /// Seconds that [`Watch`] has counted; never 0, so that 0 can mean "not in flight".
    tick: AtomicU32,
    queues: Box<[Queue]>,
    events: ArrayQueue<IoEvent>,
    dropped: AtomicU64,
    notice: EventFd,
    hand_over: OnceLock<HandOver>,
}

/// Ends the process, so that another one tries; comes back if none is to.
type HandOver = Box<dyn Fn() + Send + Sync>;

struct Queue {
    wake: EventFd,
    /// For each tag the tick at which its copies in flight were started; 0 if it has none.
    since: Box<[AtomicU32]>,
}

/// A tag whose copy is in flight for too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Overdue {
    /// The queue.
    pub queue: u16,
    /// The tag.
    pub tag: u16,
}

fn eventfd() -> Result<EventFd> {
    EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
        .map_err(|errno| Error::os("eventfd", errno))
}

impl Health {
    /// Of a device with so many queues of that depth. All memory it ever uses is allocated here.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn new(queues: u16, depth: u16) -> Result<Health> {
        let queue = |_| {
            Ok(Queue {
                wake: eventfd()?,
                since: (0..depth).map(|_| AtomicU32::new(0)).collect(),
            })
        };
        Ok(Health {
            lost: AtomicU8::new(0),
            tick: AtomicU32::new(1),
            queues: (0..queues).map(queue).collect::<Result<_>>()?,
            events: ArrayQueue::new(EVENTS),
            dropped: AtomicU64::new(0),
            notice: eventfd()?,
            hand_over: OnceLock::new(),
        })
    }

    /// What is done when the driver has lost the GPU: `hand_over` ends the process, its requests with it,
    /// if another process is to look at the memory. It is called by queue threads.
    pub fn on_driver_loss(&self, hand_over: impl Fn() + Send + Sync + 'static) {
        // There is one worker's life in a process, and it says so once.
        let _ = self.hand_over.set(Box::new(hand_over));
    }

    /// The driver has lost the GPU. No request that was in flight is answered if another process takes
    /// them over; else the memory is lost.
    pub fn driver_lost(&self) {
        if let Some(hand_over) = self.hand_over.get()
            && !self.is_lost()
        {
            hand_over();
        }
        self.lose(Loss::Driver);
    }

    /// Whether the memory is lost.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed) != 0
    }

    /// Why the memory is lost, if it is.
    pub fn loss(&self) -> Option<Loss> {
        let lost = self.lost.load(Ordering::SeqCst);
        Loss::ALL.into_iter().find(|&loss| loss as u8 == lost)
    }

    /// The memory is lost: wakes every queue and the watch. Only the first reason is kept.
    pub fn lose(&self, loss: Loss) {
        let first = self
            .lost
            .compare_exchange(0, loss as u8, Ordering::SeqCst, Ordering::Relaxed);
        if first.is_ok() {
            for queue in &self.queues {
                wake(&queue.wake);
            }
            wake(&self.notice);
        }
    }

    /// Leaves an event for the watch; one that finds no room is counted.
    pub fn report(&self, event: IoEvent) {
        if self.events.push(event).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
        wake(&self.notice);
    }

    /// Notes that a copy of a tag was started.
    #[inline]
    pub fn started(&self, queue: QueueId, tag: u16) {
        if let Some(since) = self.since(queue, tag) {
            since.store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Notes that no copy of a tag is in flight.
    #[inline]
    pub fn ended(&self, queue: QueueId, tag: u16) {
        if let Some(since) = self.since(queue, tag) {
            since.store(0, Ordering::Relaxed);
        }
    }

    #[inline]
    fn since(&self, queue: QueueId, tag: u16) -> Option<&AtomicU32> {
        self.queues
            .get(usize::from(queue.0))?
            .since
            .get(usize::from(tag))
    }

    /// What becomes readable, and stays so, when the memory is lost: for the ring of a queue.
    pub fn wake_fd(&self, queue: QueueId) -> Option<RawFd> {
        let queue = self.queues.get(usize::from(queue.0))?;
        Some(queue.wake.as_fd().as_raw_fd())
    }

    /// The next event.
    pub fn take_event(&self) -> Option<IoEvent> {
        self.events.pop()
    }

    /// How many events were not kept since the last call.
    pub fn take_dropped(&self) -> u64 {
        self.dropped.swap(0, Ordering::Relaxed)
    }

    /// One second has passed.
    fn advance(&self) {
        let next = self.tick.load(Ordering::Relaxed).wrapping_add(1).max(1);
        self.tick.store(next, Ordering::Relaxed);
    }

    /// A tag whose copies are in flight for more than `limit` ticks.
    fn overdue(&self, limit: u32) -> Option<Overdue> {
        let now = self.tick.load(Ordering::Relaxed);
        self.queues.iter().zip(0..).find_map(|(entry, queue)| {
            let late = |since: &AtomicU32| match since.load(Ordering::Relaxed) {
                0 => false,
                since => now.wrapping_sub(since) > limit,
            };
            let tag = entry.since.iter().position(late)?;
            Some(Overdue {
                queue,
                tag: u16::try_from(tag).unwrap_or(u16::MAX),
            })
        })
    }

    fn notice_fd(&self) -> BorrowedFd<'_> {
        self.notice.as_fd()
    }
}

/// Makes an eventfd readable. It never blocks: at the end of its range it is readable already.
fn wake(eventfd: &EventFd) {
    let _ = eventfd.write(1);
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    fn readable(fd: BorrowedFd<'_>) -> bool {
        poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn the_first_loss_stays_and_wakes_everybody() {
        let health = Health::new(2, 4).unwrap();
        assert!(!health.is_lost() && health.loss().is_none());
        let fds: Vec<RawFd> = (0..2).filter_map(|q| health.wake_fd(QueueId(q))).collect();
        assert_eq!((fds.len(), health.wake_fd(QueueId(2))), (2, None));
        health.lose(Loss::Canary);
        health.lose(Loss::Absent);
        assert_eq!(health.loss(), Some(Loss::Canary));
        for queue in &health.queues {
            assert!(readable(queue.wake.as_fd()));
        }
        assert!(readable(health.notice_fd()));
    }

    #[test]
    fn a_driver_that_lost_the_gpu_is_a_loss_unless_somebody_takes_over() {
        let health = Health::new(1, 1).unwrap();
        health.driver_lost();
        assert_eq!(health.loss(), Some(Loss::Driver));
        let health = std::sync::Arc::new(Health::new(1, 1).unwrap());
        let seen = std::sync::Arc::clone(&health);
        let (asked, was_asked) = std::sync::mpsc::channel();
        let asked = std::sync::Mutex::new(asked);
        health.on_driver_loss(move || {
            let asked = asked.lock().unwrap();
            asked.send(seen.is_lost()).unwrap();
        });
        health.driver_lost();
        assert!(!was_asked.recv().unwrap(), "asked before anybody is told");
        health.driver_lost();
        assert!(was_asked.try_recv().is_err(), "what is lost stays lost");
        assert_eq!(health.loss(), Some(Loss::Driver), "nobody took over");
    }

    #[test]
    fn events_are_kept_up_to_a_number_and_counted_above() {
        let health = Health::new(1, 1).unwrap();
        for chunk in 0..EVENTS as u32 + 3 {
            health.report(IoEvent::CanaryBlinked { chunk });
        }
        assert_eq!(
            health.take_event(),
            Some(IoEvent::CanaryBlinked { chunk: 0 })
        );
        assert_eq!((health.take_dropped(), health.take_dropped()), (3, 0));
    }

    #[test]
    fn a_copy_that_does_not_come_back_is_overdue() {
        let health = Health::new(2, 4).unwrap();
        health.started(QueueId(1), 3);
        health.started(QueueId(0), 9);
        for _ in 0..3 {
            health.advance();
        }
        assert_eq!(health.overdue(3), None);
        assert_eq!(health.overdue(2), Some(Overdue { queue: 1, tag: 3 }));
        health.ended(QueueId(1), 3);
        assert_eq!(health.overdue(0), None);
        health.tick.store(u32::MAX, Ordering::Relaxed);
        health.started(QueueId(0), 0);
        health.advance();
        health.advance();
        assert_eq!(health.overdue(0), Some(Overdue { queue: 0, tag: 0 }));
    }
}
