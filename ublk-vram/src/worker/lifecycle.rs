//! The lifecycle thread of a worker whose disk is live: it serves until the disk ends, is drained, or
//! is to be served by another process.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::link::Link;
use super::orders::Shared;
use super::swapoff::SwapoffHelper;
use crate::backend::Backend;
use crate::control::Reply;
use crate::device::{DeviceState, StaticInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::health::{Health, WatchHandle};
use crate::safety::{self, Holder, Root};
use crate::session::{Report, Session};
use crate::store::{ChunkTable, zero_and_check};
use crate::ublk::{StopOutcome, Target};

/// Whoever merely looks at a disk (udev, blkid) is gone by then.
const PASSERS_BY: Duration = Duration::from_secs(3);
/// How often somebody who waits for the users of a disk looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How often a drain looks again.
const DRAIN_TICK: Duration = Duration::from_millis(250);
/// How long copies may be in flight, and queue threads may run, after the disk is gone.
const END_LIMIT: Duration = Duration::from_secs(30);

/// What the lifecycle thread is told.
pub(super) enum Event {
    /// Show the disk.
    GoLive,
    /// The last worker is dead: serve its disk.
    TakeOver {
        generation: u64,
        fixed: Box<StaticInfo>,
    },
    /// Drain and end.
    Terminate,
    /// A `remove`, to be answered under this number.
    Remove(u64),
    /// The CPU maps more of the memory than before.
    Mapped,
    /// The device's memory is lost; [`Health`] knows how.
    Lost,
    /// A queue thread has ended: in order when the disk is gone or taken away, else with the reason.
    QueueEnded(u16, Result<()>),
}

/// A device that is live.
pub(super) struct Live {
    pub(super) session: &'static Session,
    pub(super) backend: Box<dyn Backend>,
    pub(super) table: Arc<ChunkTable>,
    pub(super) shared: Arc<Shared>,
    pub(super) link: Link,
    pub(super) target: Target,
    pub(super) fixed: StaticInfo,
    pub(super) queues: Vec<JoinHandle<()>>,
    pub(super) helper: Option<SwapoffHelper>,
    pub(super) health: Arc<Health>,
    /// Dropped before the memory is wiped: it looks at the headers.
    pub(super) watch: WatchHandle,
    /// Ends the threads that make checksums again and map more, if there are any.
    pub(super) stop_beside: Arc<AtomicBool>,
    pub(super) events: Receiver<Event>,
}

/// How an attempt to end went.
enum Ending {
    /// The disk is gone.
    Stopped,
    /// It is in use, by these.
    InUse(Vec<Holder>),
}

impl Live {
    /// Serves until the end.
    pub(super) fn serve(mut self) -> Result<()> {
        if self.helper.is_none() {
            // A worker that took over: now there is a disk again, so a process can be started.
            self.helper = SwapoffHelper::start()
                .inspect_err(|error| tracing::warn!("{error}"))
                .ok();
        }
        loop {
            match self.events.recv() {
                Ok(Event::Remove(call)) => match self.end_if_unused(PASSERS_BY) {
                    Ok(Ending::Stopped) => return self.finish(),
                    Ok(Ending::InUse(holders)) => self.refuse(call, self.in_use(&holders)),
                    Err(error) => self.refuse(call, error),
                },
                Ok(Event::Terminate) => match self.drain() {
                    Ok(()) => return self.finish(),
                    Err(error) => {
                        tracing::error!("the device stays: {error}");
                        self.become_state(DeviceState::Live, Some(error.to_string()));
                    }
                },
                Ok(Event::QueueEnded(queue, outcome)) => {
                    self.disk_ended(queue, outcome);
                    return self.finish();
                }
                Ok(Event::Lost) => self.become_state(DeviceState::Live, None),
                Ok(Event::Mapped) => self.tell_copy(),
                Ok(Event::GoLive | Event::TakeOver { .. }) => {}
                Err(_) => return Err(Error::new(ErrorKind::Io, "every event source is gone")),
            }
        }
    }

    /// Moves to `state`; a device whose memory is lost stays lost until its disk is gone.
    fn become_state(&self, state: DeviceState, reason: Option<String>) {
        let (state, reason) = match (state, self.health.loss()) {
            (DeviceState::Live | DeviceState::Draining, Some(loss)) => {
                let reason =
                    reason.map_or_else(|| loss.to_string(), |reason| format!("{loss}; {reason}"));
                (DeviceState::Lost, Some(reason))
            }
            other => (other.0, reason),
        };
        self.shared.status.become_state(state, reason);
    }

    /// Tells how bytes are copied now.
    fn tell_copy(&self) {
        let copy = self.backend.copy_path();
        self.shared.status.set_copy(&copy);
        self.link.report(&Report::Copy(copy));
    }

    fn refuse(&self, call: u64, error: Error) {
        let reply = Reply::from_result::<()>(Err(error));
        self.link.report(&Report::Answer { id: call, reply });
    }

    /// A queue thread has ended. In order: the disk is gone, whoever stopped it, or the driver waits
    /// for another process to serve it. Otherwise its requests would wait for ever: the process ends,
    /// the driver sees that, and gives them to the next worker or fails them.
    fn disk_ended(&self, queue: u16, outcome: Result<()>) {
        if let Err(error) = outcome {
            tracing::error!("the worker ends: {error} (queue {queue})");
            std::process::abort();
        }
        match self.target.has_disk() {
            Ok(false) => tracing::warn!("the disk was stopped by somebody else"),
            Ok(true) => {
                tracing::info!("another worker is to serve the disk");
                std::process::exit(0);
            }
            Err(error) if error.kind == ErrorKind::NotFound => {
                tracing::warn!("the disk was deleted by somebody else");
            }
            Err(error) => {
                // Nothing is wiped while it is not known that the disk is gone.
                tracing::error!("{error}");
                std::process::abort();
            }
        }
    }

    fn in_use(&self, holders: &[Holder]) -> Error {
        Error::new(
            ErrorKind::Busy,
            format!(
                "{} ({}) cannot be removed, it is in use: {}",
                self.session.spec.name,
                self.fixed.device,
                users(holders)
            ),
        )
    }

    fn holders(&self) -> Result<Vec<Holder>> {
        let number = (self.fixed.major, self.fixed.minor);
        let kname = format!("ublkb{}", self.fixed.id);
        let survey = safety::holders(&Root::default(), number, &kname, &[])?;
        for blind in &survey.blind {
            tracing::warn!("there may be more users than can be seen: {blind}");
        }
        Ok(survey.holders)
    }

    /// Removes the disk if nobody uses it. Processes that only have it open are given `patience`.
    fn end_if_unused(&self, patience: Duration) -> Result<Ending> {
        let end = Instant::now() + patience;
        loop {
            let holders = self.holders()?;
            let is_open = |holder: &Holder| matches!(holder, Holder::Process { .. });
            let is_lasting = !holders.iter().all(is_open);
            // A driver with SAFE_STOP_DEV knows better than /proc who has the disk open.
            let may_try = holders.is_empty() || (!is_lasting && self.target.has_safe_stop());
            let is_unused = || Ok(self.holders()?.is_empty());
            if may_try && self.target.try_stop(is_unused)? == StopOutcome::Stopped {
                return Ok(Ending::Stopped);
            }
            if is_lasting || Instant::now() >= end {
                return Ok(Ending::InUse(holders));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Waits until nobody uses the disk, swapping it off by the helper, and removes it.
    ///
    /// # Errors
    /// Why the swapoff failed: the device stays as it is.
    fn drain(&mut self) -> Result<()> {
        self.become_state(DeviceState::Draining, None);
        let mut said = String::new();
        loop {
            // What cannot be found out now is found out later: only a failed swapoff ends a drain.
            let (waiting, holders) = match self.end_if_unused(Duration::ZERO) {
                Ok(Ending::Stopped) => return Ok(()),
                Ok(Ending::InUse(holders)) => (users(&holders), holders),
                Err(error) => (error.to_string(), Vec::new()),
            };
            if waiting != said {
                let reason = format!("waiting: {waiting}");
                self.become_state(DeviceState::Draining, Some(reason));
                said = waiting;
            }
            self.swap_off(&holders)?;
            match self.events.recv_timeout(DRAIN_TICK) {
                Ok(Event::Remove(call)) => self.refuse(call, self.in_use(&holders)),
                Ok(Event::QueueEnded(queue, outcome)) => {
                    self.disk_ended(queue, outcome);
                    return Ok(());
                }
                Ok(Event::Lost) => self.become_state(DeviceState::Draining, None),
                Ok(Event::Mapped) => self.tell_copy(),
                Ok(Event::Terminate | Event::GoLive | Event::TakeOver { .. })
                | Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => std::thread::sleep(DRAIN_TICK),
            }
        }
    }

    /// Orders the next swapoff, or looks after the one that runs.
    fn swap_off(&mut self, holders: &[Holder]) -> Result<()> {
        if let Some(helper) = self.helper.as_mut().filter(|helper| helper.is_busy()) {
            return match helper.poll() {
                // A helper that died is replaced; one that failed can be asked again.
                Some(Err(error)) => {
                    self.helper = None;
                    Err(error)
                }
                Some(Ok(())) | None => Ok(()),
            };
        }
        let swap: Option<PathBuf> = holders.iter().find_map(|holder| match holder {
            Holder::Swap { path, .. } => Some(path.clone()),
            _ => None,
        });
        let Some(swap) = swap else { return Ok(()) };
        // One that died while it waited (the OOM killer may have taken it) is replaced once.
        if let Some(helper) = &mut self.helper
            && helper.order(&swap).is_ok()
        {
            return Ok(());
        }
        self.helper.insert(SwapoffHelper::start()?).order(&swap)
    }

    /// After the disk is gone: every thread out, memory wiped, number given back. Then the supervisor
    /// is told, and the process is to end.
    ///
    /// # Errors
    /// That something may still use the memory: it is neither wiped nor unmapped then, and the
    /// process must end.
    fn finish(self) -> Result<()> {
        self.become_state(DeviceState::Stopping, None);
        // Somebody else's STOP_DEV, or one of ours that was answered too late, may have begun this.
        self.target
            .stop()
            .unwrap_or_else(|error| tracing::error!("{error}"));
        let end = Instant::now() + END_LIMIT;
        while !self.queues.iter().all(JoinHandle::is_finished) {
            if Instant::now() >= end {
                std::mem::forget((self.backend, self.table));
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "queue threads run {} s after the disk is gone",
                        END_LIMIT.as_secs()
                    ),
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        for thread in self.queues {
            // It has ended; a panic was reported by its `on_end`.
            let _ = thread.join();
        }
        self.target
            .delete()
            .unwrap_or_else(|error| tracing::error!("{error}"));
        self.stop_beside.store(true, Ordering::SeqCst);
        drop(self.watch);
        if let Some(loss) = self.health.loss() {
            // Nothing can be wiped, and copies that never came back may come yet: what they would write
            // to stays mapped until the process is gone, which is now.
            tracing::warn!("the device's memory was not wiped: {loss}");
            std::mem::forget((self.backend, self.table));
            drop(self.helper);
            self.link.report(&Report::Ended(None));
            return Ok(());
        }
        if let Err(error) = self.table.retire_all(END_LIMIT) {
            std::mem::forget((self.backend, self.table));
            return Err(error);
        }
        let wiped = zero_and_check(&*self.backend);
        if let Err(error) = &wiped {
            tracing::error!("the device's memory could not be wiped: {error}");
        }
        // Its helper is gone before the supervisor hears that all is.
        drop(self.helper);
        self.link.report(&Report::Ended(wiped.err()));
        Ok(())
    }
}

/// Who uses the disk, in words. The driver may know of somebody whom /proc does not show: an open file
/// that only an io_uring or a mapping holds.
fn users(holders: &[Holder]) -> String {
    if holders.is_empty() {
        "open by somebody who does not show in /proc".to_owned()
    } else {
        safety::describe(holders)
    }
}
