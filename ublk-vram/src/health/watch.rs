//! The thread that looks after a device's memory from the side of control.
//!
//! It sleeps until a queue thread leaves a notice, the kernel tells of a PCI function, or a second has
//! passed. Each second it counts the clock that copies are timed by, so a machine that slept, or a
//! process that was stopped, has not waited. It may log and allocate; no queue thread waits for it.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Health, IoEvent, Loss, Presence};
use crate::backend::ChunkMemory;
use crate::copy::CopyRoutines;
use crate::error::{Error, Result};
use crate::safety::bus_error;
use crate::store::{CANARY_BYTES, HEADER_BYTES};

/// The clock of copies in flight.
const TICK: Duration = Duration::from_secs(1);
/// Every so many ticks the bus and the canaries are looked at without a suspicion.
const LOOK_EVERY: u32 = 5;
/// So often, so far apart, a function has not answered before it counts as gone.
const LOOKS: u32 = 3;
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);
/// Events of one kind that are told in a second; the rest are counted.
const TOLD_A_TICK: u32 = 8;

/// The canaries of every chunk, as the CPU reads them.
pub struct Canaries {
    /// The chunks.
    pub chunks: Vec<ChunkMemory>,
    /// What each of them reads as.
    pub expected: [u8; CANARY_BYTES],
    /// How they are read.
    pub routines: CopyRoutines,
}

/// What the thread works with.
pub struct Watch {
    /// What it looks after.
    pub health: Arc<Health>,
    /// Where the memory is on the bus, if it is on one.
    pub presence: Option<Presence>,
    /// The canaries, for a look at times.
    pub canaries: Canaries,
    /// A copy in flight for longer than this is the loss of the device; `None` where copies are done by
    /// the CPU, so that none can be outstanding but by a queue thread that gets no time to run.
    pub copy_limit: Option<Duration>,
}

/// A running watch. Dropped, it ends.
pub struct WatchHandle {
    stop: Arc<AtomicBool>,
    health: Arc<Health>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for WatchHandle {
    /// Ends the thread and waits for it: what it maps it has let go then.
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        super::wake(&self.health.notice);
        if let Some(thread) = self.thread.take() {
            // It panics only by a bug, which its message has told.
            let _ = thread.join();
        }
    }
}

impl Watch {
    /// Starts the thread; `on_loss` is called once, with the reason in words.
    ///
    /// # Errors
    /// If there is no thread to be had.
    pub fn start(self, on_loss: impl FnOnce(String) + Send + 'static) -> Result<WatchHandle> {
        let (stop, health) = (Arc::default(), Arc::clone(&self.health));
        let told = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("watch".to_owned())
            .stack_size(256 << 10)
            .spawn(move || self.run(&told, on_loss))
            .map_err(|error| Error::os("cannot start the watch thread", error))?;
        Ok(WatchHandle {
            stop,
            health,
            thread: Some(thread),
        })
    }

    fn run(self, stop: &AtomicBool, on_loss: impl FnOnce(String)) {
        let mut on_loss = Some(on_loss);
        let (mut ticks, mut told) = (0u32, 0u32);
        let mut next = Instant::now() + TICK;
        while !stop.load(Ordering::SeqCst) {
            self.sleep(next.saturating_duration_since(Instant::now()));
            let mut suspicion = self.tell_events(&mut told);
            if Instant::now() >= next {
                // From now, not from `next`: time that nobody could run in does not count.
                next = Instant::now() + TICK;
                self.health.advance();
                (ticks, told) = (ticks.wrapping_add(1), 0);
                suspicion |= ticks.is_multiple_of(LOOK_EVERY);
                self.look_for_overdue();
            }
            if suspicion && !self.health.is_lost() {
                self.look();
            }
            if self.presence.as_ref().is_some_and(Presence::was_removed) {
                self.health.lose(Loss::Removed);
            }
            if let Some(loss) = self.health.loss()
                && let Some(on_loss) = on_loss.take()
            {
                let reason = loss.to_string();
                tracing::error!(
                    "device memory LOST: {reason}; every request ends with EIO, and what was on the device \
                     is gone: swap it off or unmount it, and remove it"
                );
                on_loss(reason);
            }
        }
    }

    fn sleep(&self, limit: Duration) {
        let mut fds = vec![PollFd::new(self.health.notice_fd(), PollFlags::POLLIN)];
        if let Some(presence) = &self.presence {
            fds.push(PollFd::new(presence.uevents(), PollFlags::POLLIN));
        }
        // Rounded up, so that the last fraction of a millisecond is slept and not spun.
        let millis = limit.as_millis().saturating_add(1);
        let timeout = PollTimeout::try_from(millis).unwrap_or(PollTimeout::MAX);
        // Whatever it says, everything is looked at.
        let _ = poll(&mut fds, timeout);
        let mut count = 0u64;
        // SAFETY: eight bytes of our own stack; the eventfd does not block.
        unsafe {
            libc::read(
                self.health.notice_fd().as_raw_fd(),
                (&raw mut count).cast(),
                size_of::<u64>(),
            )
        };
    }

    /// Tells what queue threads have left; whether any of it is a reason to look at the bus.
    fn tell_events(&self, told: &mut u32) -> bool {
        let mut any = false;
        let mut untold = self.health.take_dropped();
        while let Some(event) = self.health.take_event() {
            any = true;
            *told += 1;
            if *told > TOLD_A_TICK {
                untold += 1;
                continue;
            }
            match event {
                IoEvent::BadBlock {
                    block,
                    expected,
                    found,
                } => tracing::error!(
                    "bad device memory: block {block} (bytes {} to {} of the device) reads with CRC32C \
                     {found:08x}, and {expected:08x} was written; the read ended with EIO",
                    block * 4096,
                    block * 4096 + 4095
                ),
                IoEvent::CanaryBlinked { chunk } => tracing::warn!(
                    "chunk {chunk}: its header read wrong once and right the next time"
                ),
            }
        }
        if untold > 0 {
            tracing::error!("{untold} more errors of device memory in the last second");
        }
        any || untold > 0
    }

    fn look_for_overdue(&self) {
        let Some(limit) = self.copy_limit else { return };
        let ticks = u32::try_from(limit.as_secs()).unwrap_or(u32::MAX).max(1);
        if let Some(overdue) = self.health.overdue(ticks) {
            tracing::error!(
                "queue {}, tag {}: a copy has not completed within {} s",
                overdue.queue,
                overdue.tag,
                limit.as_secs()
            );
            self.health.lose(Loss::Overdue);
        }
    }

    /// Looks at the bus, and at every canary.
    fn look(&self) {
        if let Some(presence) = &self.presence
            && !answers_in_time(presence)
        {
            self.health.lose(Loss::Absent);
            return;
        }
        for chunk in &self.canaries.chunks {
            // Twice: one read that went wrong is not the loss of a device.
            if let (Err(_), Err(loss)) = (self.canaries.read(chunk), self.canaries.read(chunk)) {
                self.health.lose(loss);
                return;
            }
        }
    }
}

/// A link that is being trained anew, or a function that is being reset, may not answer for a moment.
fn answers_in_time(presence: &Presence) -> bool {
    (0..LOOKS).any(|look| {
        if look > 0 {
            std::thread::sleep(BETWEEN_LOOKS);
        }
        presence.answers()
    })
}

impl Canaries {
    fn read(&self, chunk: &ChunkMemory) -> std::result::Result<(), Loss> {
        let mut line = [0u8; CANARY_BYTES];
        let to = line.as_mut_ptr();
        let offset = chunk.size.saturating_sub(HEADER_BYTES);
        // What the CPU does not reach is looked at by the reads of queues alone.
        let Some(at) = chunk.at(offset, CANARY_BYTES) else {
            return Ok(());
        };
        let routines = self.routines;
        // SAFETY: `at` is mapped for the line, which nobody writes while the device is live.
        bus_error::guarded(|| unsafe { routines.load(to, at, CANARY_BYTES) })
            .map_err(|_| Loss::Gone)?;
        judge(&line, &self.expected)
    }
}

/// What a canary's bytes say.
///
/// # Errors
/// That the memory is lost, and how.
pub(crate) fn judge(
    line: &[u8; CANARY_BYTES],
    expected: &[u8; CANARY_BYTES],
) -> std::result::Result<(), Loss> {
    if line == expected {
        Ok(())
    } else if line.iter().all(|&byte| byte == 0xff) {
        Err(Loss::AllOnes)
    } else {
        Err(Loss::Canary)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;
    use crate::backend::host::HostMemory;
    use crate::backend::{MemoryHandles, QueueId};
    use crate::store::Layout;

    fn watch(copy_limit: Option<Duration>) -> Watch {
        let layout = Layout::new(4 << 20, Some(2 << 20)).unwrap();
        let memory = MemoryHandles::Host(HostMemory::create(&layout).unwrap());
        let chunks = memory.open(&layout).unwrap().chunks().to_vec();
        Watch {
            health: Arc::new(Health::new(1, 4).unwrap()),
            presence: None,
            canaries: Canaries {
                chunks,
                expected: [0; CANARY_BYTES],
                routines: CopyRoutines::best(),
            },
            copy_limit,
        }
    }

    #[test]
    fn a_loss_is_told_once() {
        let watch = watch(None);
        let health = Arc::clone(&watch.health);
        let (sender, receiver) = channel();
        let handle = watch
            .start(move |reason| sender.send(reason).unwrap())
            .unwrap();
        health.report(IoEvent::CanaryBlinked { chunk: 0 });
        health.lose(Loss::Gone);
        health.lose(Loss::Canary);
        let reason = receiver.recv_timeout(Duration::from_secs(30)).unwrap();
        assert!(reason.contains("SIGBUS"), "{reason}");
        drop(handle);
        assert!(receiver.recv().is_err(), "once");
    }

    #[test]
    fn a_canary_that_is_gone_is_a_loss_on_suspicion() {
        let watch = watch(None);
        let health = Arc::clone(&watch.health);
        let chunk = watch.canaries.chunks[1].clone();
        let at = chunk.at(chunk.size - HEADER_BYTES, 64).unwrap();
        let (sender, receiver) = channel();
        let handle = watch
            .start(move |reason| sender.send(reason).unwrap())
            .unwrap();
        health.report(IoEvent::CanaryBlinked { chunk: 0 });
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(health.loss(), None, "they all read as they should");
        // SAFETY: a line of a mapped chunk; the watch may read it meanwhile, old, new or mixed.
        unsafe { CopyRoutines::best().store(at, [0xff; 64].as_ptr(), 64) };
        health.report(IoEvent::CanaryBlinked { chunk: 0 });
        receiver.recv_timeout(Duration::from_secs(30)).unwrap();
        assert_eq!(health.loss(), Some(Loss::AllOnes));
        drop(handle);
    }

    #[test]
    fn what_a_canary_says() {
        let expected = *b"0123456789012345678901234567890123456789012345678901234567890123";
        assert_eq!(judge(&expected, &expected), Ok(()));
        assert_eq!(judge(&[0xff; CANARY_BYTES], &expected), Err(Loss::AllOnes));
        assert_eq!(judge(&[0; CANARY_BYTES], &expected), Err(Loss::Canary));
    }

    #[test]
    fn a_copy_that_hangs_is_a_loss() {
        let watch = watch(Some(Duration::from_secs(1)));
        let health = Arc::clone(&watch.health);
        health.started(QueueId(0), 2);
        let (sender, receiver) = channel();
        let handle = watch
            .start(move |reason| sender.send(reason).unwrap())
            .unwrap();
        let reason = receiver.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(reason.contains("not completed"), "{reason}");
        drop(handle);
    }
}
