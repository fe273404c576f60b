//! The lifecycle thread of a device that is live: see the module's header for the states.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::session::Session;
use super::start::{StartLine, StartPipe};
use super::startup::{bring_up, tell};
use super::status::Status;
use super::swapoff::SwapoffHelper;
use crate::backend::Backend;
use crate::control::Reply;
use crate::copy::CopyRoutines;
use crate::device::DeviceState;
use crate::error::{Error, ErrorKind, Result};
use crate::health::{Health, WatchHandle};
use crate::safety::{self, Holder, Root};
use crate::store::{ChunkTable, zero_and_check};
use crate::ublk::{Geometry, StopOutcome, Target};

/// Whoever merely looks at a disk (udev, blkid) is gone by then.
const PASSERS_BY: Duration = Duration::from_secs(3);
/// How often somebody who waits for the users of a disk looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
/// How often a drain looks again.
const DRAIN_TICK: Duration = Duration::from_millis(250);
/// How long copies may be in flight, and queue threads may run, after the disk is gone.
const END_LIMIT: Duration = Duration::from_secs(30);

/// Where the answer to a `remove` goes; see [`crate::control::Answer::Later`].
pub(super) type ReplySlot = oneshot::Sender<(Reply, Sender<()>)>;

/// What the lifecycle thread is told.
pub(super) enum Event {
    /// SIGTERM, SIGINT: drain and end.
    Terminate,
    /// A `remove`, to be answered.
    Remove(ReplySlot),
    /// The device's memory is lost; [`Health`] knows how.
    Lost,
    /// A queue thread has ended: in order when the disk is gone, else with the reason.
    QueueEnded(u16, Result<()>),
}

/// A device that is live.
pub(super) struct Live<'a> {
    pub(super) session: &'a Session,
    pub(super) backend: Box<dyn Backend>,
    pub(super) table: Arc<ChunkTable>,
    pub(super) status: Arc<Status>,
    pub(super) health: Arc<Health>,
    /// Dropped before the memory is unmapped.
    pub(super) watch: WatchHandle,
    pub(super) target: Target,
    pub(super) geometry: Geometry,
    pub(super) queues: Vec<JoinHandle<()>>,
    pub(super) helper: Option<SwapoffHelper>,
    pub(super) events: Receiver<Event>,
}

/// How an attempt to end went.
enum Ending {
    /// The disk is gone.
    Stopped,
    /// It is in use, by these.
    InUse(Vec<Holder>),
}

pub(super) fn run(session: Session, start: StartPipe, warnings: Vec<String>) -> Result<()> {
    let (name, run_dir) = (&session.spec.name, &session.run_dir);
    let pipe = Arc::new(Mutex::new(start));
    let outcome = bring_up(&session, &pipe).inspect_err(|error| {
        tell(
            &pipe,
            &StartLine::Failed {
                failed: error.clone(),
            },
        );
    });
    let was_live = outcome.is_ok();
    let ended = outcome.and_then(|(live, fixed)| {
        if let Ok(text) = serde_json::to_vec_pretty(&fixed) {
            // For `list` without root only; that it cannot be written harms nothing else.
            if let Err(error) = std::fs::write(run_dir.note(name), text) {
                tracing::warn!("cannot write {}: {error}", run_dir.note(name).display());
            }
        }
        live.status.become_state(DeviceState::Live, None);
        // Before the line: whoever reads it may go away, and take the other end of stderr along.
        if let Err(error) = safety::redirect_stdio_to_null() {
            tracing::warn!("{error}");
        }
        tell(
            &pipe,
            &StartLine::Ready {
                ready: Box::new(fixed),
                warnings,
            },
        );
        live.serve()
    });
    if was_live && ended.is_err() {
        // Something may still use the memory (`finish`): the claim on it and the name stay ours until
        // the process is gone, and `remove --force` finds what it needs.
        std::mem::forget(session);
        return ended.map(drop);
    }
    for path in [run_dir.socket(name), run_dir.note(name)] {
        let _ = std::fs::remove_file(path);
    }
    // Nothing is lost if the empty group stays.
    let _ = safety::remove_cgroup(name.as_str());
    // The claim on the memory and the name go last.
    drop(session);
    if let Some(reply) = ended? {
        // The process ends now: wait until the caller has its answer.
        let (written, wait) = channel();
        let answer = Reply::from_result(Ok(serde_json::json!({})));
        if reply.send((answer, written)).is_ok() {
            let _ = wait.recv_timeout(Duration::from_secs(2));
        }
    }
    Ok(())
}

impl Live<'_> {
    /// Serves until the end; the reply of the `remove` that ended it, if it was one.
    fn serve(mut self) -> Result<Option<ReplySlot>> {
        loop {
            match self.events.recv() {
                Ok(Event::Remove(reply)) => match self.end_if_unused(PASSERS_BY) {
                    Ok(Ending::Stopped) => return self.finish().map(|()| Some(reply)),
                    Ok(Ending::InUse(holders)) => refuse(reply, self.in_use(&holders)),
                    Err(error) => refuse(reply, error),
                },
                Ok(Event::Terminate) => match self.drain() {
                    Ok(()) => return self.finish().map(|()| None),
                    Err(error) => {
                        tracing::error!("the device stays: {error}");
                        self.become_state(DeviceState::Live, Some(error.to_string()));
                    }
                },
                Ok(Event::Lost) => self.become_state(DeviceState::Live, None),
                Ok(Event::QueueEnded(queue, outcome)) => {
                    disk_ended(queue, outcome);
                    return self.finish().map(|()| None);
                }
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
        self.status.become_state(state, reason);
    }

    fn in_use(&self, holders: &[Holder]) -> Error {
        Error::new(
            ErrorKind::Busy,
            format!(
                "{} ({}) cannot be removed, it is in use: {}",
                self.session.spec.name,
                self.geometry.path.display(),
                users(holders)
            ),
        )
    }

    fn holders(&self) -> Result<Vec<Holder>> {
        let number = (self.geometry.major, self.geometry.minor);
        let kname = format!("ublkb{}", self.geometry.id);
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
                Ok(Event::Remove(reply)) => refuse(reply, self.in_use(&holders)),
                Ok(Event::QueueEnded(queue, outcome)) => {
                    disk_ended(queue, outcome);
                    return Ok(());
                }
                Ok(Event::Lost) => self.become_state(DeviceState::Draining, None),
                Ok(Event::Terminate) | Err(RecvTimeoutError::Timeout) => {}
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

    /// After the disk is gone: every thread out, memory wiped, number given back.
    ///
    /// # Errors
    /// That something may still use the memory: it is neither wiped nor unmapped then, and the
    /// process must end.
    fn finish(self) -> Result<()> {
        self.status.become_state(DeviceState::Stopping, None);
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
        drop(self.watch);
        if let Some(loss) = self.health.loss() {
            // Nothing can be wiped, and copies that never came back may come yet: what they would write
            // to stays mapped until the process is gone, which is now.
            tracing::warn!("the device's memory was not wiped: {loss}");
            std::mem::forget((self.backend, self.table));
            return Ok(());
        }
        if let Err(error) = self.table.retire_all(END_LIMIT) {
            std::mem::forget((self.backend, self.table));
            return Err(error);
        }
        zero_and_check(self.backend.chunks(), &CopyRoutines::best()).unwrap_or_else(|error| {
            tracing::error!("the device's memory could not be wiped: {error}");
        });
        Ok(())
    }
}

/// A queue thread has ended. In order: the disk is gone, whoever stopped it. Otherwise its requests
/// would wait for ever: the process ends, the driver sees that and fails them.
fn disk_ended(queue: u16, outcome: Result<()>) {
    if let Err(error) = outcome {
        tracing::error!("the server ends, its disk with it: {error} (queue {queue})");
        std::process::abort();
    }
    tracing::warn!("the disk was stopped by somebody else");
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

fn refuse(reply: ReplySlot, error: Error) {
    let (written, _) = channel();
    let _ = reply.send((Reply::from_result::<()>(Err(error)), written));
}
