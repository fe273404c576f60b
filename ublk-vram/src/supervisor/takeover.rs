//! The worker died: another one takes over, or, when that does not work, the device failed.
//!
//! One moment is beyond help on older kernels. The driver forgets a queue's server at
//! START_USER_RECOVERY and learns the next one when all of the queue's tags are fetched; up to Linux 6.14
//! a second START_USER_RECOVERY in between dereferences the one it does not have
//! (drivers/block/ublk_drv.c, ublk_queue_reinit), and the machine is gone. Fixed drivers are told by
//! PER_IO_DAEMON, which came a release later. On the others, a worker that dies in that gap of some
//! milliseconds fails the device at once.

use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::calls::reply;
use super::chores::{Chore, Purpose};
use super::desk::ReplySlot;
use super::machine::{End, Machine, has_ended, is_readable};
use super::start::StartLine;
use crate::device::DeviceState;
use crate::error::{Error, ErrorKind, Result};
use crate::safety;
use crate::session::process::Process;
use crate::session::{Life, Order, Report, Role};

/// So many deaths without one completed request in between are a crash loop.
const MOST_DEATHS: u32 = 5;
/// The pause before the second attempt; it doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// A worker that served so long did not die of what killed the one before.
const LONG_LIFE: Duration = Duration::from_secs(60);
/// How long a takeover may take, the end of the dead worker's process included.
const TAKEOVER_LIMIT: Duration = Duration::from_secs(120);
/// How long a worker that the driver let go of may take to end.
const QUIESCED_LIMIT: Duration = Duration::from_secs(10);
/// The pause before a standby that died is replaced; it doubles with each, up to a minute.
const STANDBY_PAUSE: Duration = Duration::from_secs(1);

/// What a takeover needs to remember.
#[derive(Default)]
pub(super) struct Takeover {
    /// Somebody is to take over as soon as there is one that is ready.
    is_wanted: bool,
    /// The process that takes over was told to.
    is_told: bool,
    /// The worker is being replaced by a fresh one.
    is_planned: bool,
    /// When the last worker was seen to be dead.
    seen: Option<Instant>,
    /// When the worker went live.
    live_since: Option<Instant>,
    /// When whatever is waited for is given up.
    deadline: Option<Instant>,
    /// When a device that failed ends by itself.
    fail_at: Option<Instant>,
    /// Deaths without a completed request.
    deaths: u32,
    /// Completed requests at the last death.
    completed: u64,
    /// Standbys that died since the last that was ready.
    lost_standbys: u32,
    /// Losses of the GPU by its driver that were told of.
    driver_losses: u64,
    /// Processes that were told to end.
    leaving: Vec<Process>,
    /// The memory does not hold the device's contents.
    pub(super) lost: Option<Error>,
    /// The memory was to be wiped once already.
    was_wiped: bool,
    /// The device was found lost: that it cannot be wiped is no surprise then.
    is_gone: bool,
}

impl Takeover {
    /// Whether a driver has lost the GPU since the last time this was asked.
    pub(super) fn is_new_loss(&mut self, life: &Life) -> bool {
        let losses = life.record().driver_losses.load(Ordering::SeqCst);
        std::mem::replace(&mut self.driver_losses, losses) != losses
    }
}

impl Machine {
    /// Starts a standby after a pause.
    pub(super) fn make_standby(&mut self, after: Duration) {
        self.spawn_standby(Purpose::Standby, after);
    }

    fn spawn_standby(&mut self, purpose: Purpose, after: Duration) {
        let Some(id) = self.device else { return };
        self.is_spawning = true;
        if let Err(error) = self.spawn(purpose, Role::Standby { id }, after) {
            self.spawned(purpose, Err(error));
        }
    }

    pub(super) fn spawned(&mut self, purpose: Purpose, process: Result<Box<Process>>) {
        match (purpose, process) {
            (Purpose::Maker | Purpose::Wiper, Ok(process)) => self.worker = Some(*process),
            (Purpose::Maker, Err(error)) => self.end = Some(End::NotStarted(error)),
            (Purpose::Wiper, Err(error)) => self.end = Some(End::LeftBehind(error)),
            (Purpose::Standby | Purpose::Fresh, Ok(process)) => {
                self.is_spawning = false;
                self.standby_is_ready = false;
                self.standby = Some(*process);
            }
            (Purpose::Standby | Purpose::Fresh, Err(error)) => {
                self.is_spawning = false;
                self.standby_failed(&format!("a standby cannot be started: {error}"));
            }
        }
    }

    pub(super) fn listen_to_standby(&mut self) {
        while let Some(standby) = &mut self.standby {
            if standby.has_hung_up || !is_readable(standby.channel.as_fd()) {
                break;
            }
            match standby.channel.receive::<Report>() {
                Ok(Some((Report::Ready, _))) => self.standby_is_ready(),
                Ok(Some((Report::Failed(error), _))) => self.last_words = Some(error),
                Ok(Some(_)) => {}
                Ok(None) => standby.has_hung_up = true,
                Err(error) => {
                    tracing::error!("{error}");
                    standby.has_hung_up = true;
                    standby.kill();
                    self.last_words = Some(error);
                }
            }
        }
        if self.standby.as_ref().is_some_and(has_ended)
            && let Some(mut standby) = self.standby.take()
        {
            let how = standby.how_it_ended();
            let why = match self.last_words.take() {
                Some(error) => format!("the standby (process {}) ended: {error}", standby.pid),
                None => format!("the standby (process {}) died ({how})", standby.pid),
            };
            self.standby_is_ready = false;
            self.life().standby.store(0, Ordering::Relaxed);
            self.standby_failed(&why);
        }
    }

    fn standby_is_ready(&mut self) {
        let Some(standby) = &self.standby else { return };
        let pid = u64::try_from(standby.pid).unwrap_or(0);
        self.life().standby.store(pid, Ordering::Relaxed);
        self.standby_is_ready = true;
        self.takeover.lost_standbys = 0;
        if self.state() == DeviceState::Creating {
            self.tell_worker(&Order::GoLive);
        } else if self.takeover.is_wanted {
            self.promote();
        } else if !self.restarts.is_empty() {
            self.replace_worker();
        }
    }

    fn standby_failed(&mut self, why: &str) {
        tracing::warn!("{why}");
        let state = self.state();
        if state == DeviceState::Creating {
            let error = Error::new(ErrorKind::Io, why.to_owned());
            self.end = Some(End::NotStarted(error));
            return;
        }
        for slot in self.restarts.drain(..) {
            let error = Error::new(ErrorKind::Unsupported, format!("the worker stays: {why}"));
            reply(slot, Err(error));
        }
        if self.takeover.is_wanted {
            self.worker_died(why.to_owned());
        } else if state.is_served() {
            let lost = self.takeover.lost_standbys;
            self.takeover.lost_standbys = lost.saturating_add(1);
            self.make_standby(STANDBY_PAUSE.saturating_mul(1 << lost.min(6)));
        }
    }

    /// The worker is dead and its disk waits: the next one is told, unless this goes on and on.
    pub(super) fn worker_died(&mut self, why: String) {
        if let Some(error) = self.takeover.lost.take() {
            self.is_lost(error);
            return;
        }
        let now = Instant::now();
        self.takeover.seen.get_or_insert(now);
        let completed = self.status.view.stats.ended();
        let since = self.takeover.live_since.take();
        let lived_long = since.is_some_and(|since| since.elapsed() >= LONG_LIFE);
        if completed != self.takeover.completed || lived_long {
            self.takeover.deaths = 0;
        }
        self.takeover.completed = completed;
        let is_planned = std::mem::take(&mut self.takeover.is_planned);
        if !is_planned {
            tracing::warn!("{why}");
            self.takeover.deaths += 1;
        }
        if self.is_stuck_in_gap() {
            let why = format!(
                "{why} in the middle of a takeover, and the ublk driver of this kernel would crash the \
                 machine at another attempt (Linux 6.15 and later do not): the memory is kept and \
                 requests wait; `vramctl remove {} --force` ends it with EIO",
                self.kept.identity.spec.name
            );
            self.fail(why);
        } else if self.takeover.deaths >= MOST_DEATHS {
            let name = &self.kept.identity.spec.name;
            let why = format!(
                "{MOST_DEATHS} workers died without one completed request; the last: {why}. The memory is \
                 kept and requests wait: `vramctl recover {name}` tries again, `vramctl remove {name} \
                 --force` ends it with EIO"
            );
            self.fail(why);
        } else {
            self.begin_takeover(why, false);
        }
    }

    /// Whether the last worker died where this kernel's driver cannot take another one.
    fn is_stuck_in_gap(&self) -> bool {
        let can_begin_twice = self
            .fixed()
            .is_some_and(|fixed| fixed.features.iter().any(|name| name == "PER_IO_DAEMON"));
        !can_begin_twice && self.life().in_gap.load(Ordering::SeqCst) != 0
    }

    /// Lets somebody take over, now or when there is one that is ready.
    pub(super) fn begin_takeover(&mut self, why: String, is_fresh: bool) {
        if is_fresh {
            self.takeover.deaths = 0;
            self.takeover.completed = self.status.view.stats.ended();
        }
        self.takeover.seen.get_or_insert_with(Instant::now);
        self.takeover.is_wanted = true;
        self.takeover.is_told = false;
        self.takeover.deadline = Some(Instant::now() + TAKEOVER_LIMIT);
        self.life().worker.store(0, Ordering::Relaxed);
        self.set_state(DeviceState::Recovering, Some(why));
        if self.standby_is_ready {
            self.promote();
        } else if self.standby.is_none() && !self.is_spawning {
            let before = self.takeover.deaths.saturating_sub(1);
            let pause = match before {
                0 => Duration::ZERO,
                n => FIRST_PAUSE.saturating_mul(1 << n.min(10)),
            };
            self.make_standby(pause);
        }
    }

    fn promote(&mut self) {
        let Some(standby) = self.standby.take() else {
            return;
        };
        let generation = self.life().generation.fetch_add(1, Ordering::Relaxed) + 1;
        self.life().standby.store(0, Ordering::Relaxed);
        self.standby_is_ready = false;
        self.takeover.is_wanted = false;
        self.takeover.is_told = true;
        self.worker = Some(standby);
        if let Some(fixed) = self.fixed() {
            let fixed = Box::new(fixed);
            let _urgent = safety::Urgent::begin();
            self.tell_worker(&Order::TakeOver { generation, fixed });
        }
    }

    /// The new worker serves.
    pub(super) fn taken_over(&mut self) {
        let pause = self.takeover.seen.take().map(|seen| seen.elapsed());
        let pause = pause.unwrap_or_default();
        self.takeover.is_told = false;
        self.takeover.deadline = None;
        self.takeover.live_since = Some(Instant::now());
        self.status.view.life.note_takeover(pause);
        tracing::warn!(
            "another worker serves the disk after {} ms",
            pause.as_millis()
        );
        self.set_state(DeviceState::Live, None);
        for slot in std::mem::take(&mut self.restarts) {
            reply(slot, Ok(()));
        }
        if self.is_draining {
            self.tell_worker(&Order::Terminate);
        }
    }

    fn fail(&mut self, reason: String) {
        self.takeover.is_wanted = false;
        self.takeover.is_told = false;
        self.takeover.deadline = None;
        let name = self.kept.identity.spec.name.clone();
        tracing::error!("'{name}' failed: {reason}");
        let limit = self.kept.identity.spec.fail_after;
        self.takeover.fail_at = limit.map(|seconds| Instant::now() + Duration::from_secs(seconds));
        if self.state() != DeviceState::Recovering {
            self.set_state(DeviceState::Recovering, None);
        }
        self.set_state(DeviceState::Failed, Some(reason.clone()));
        let error = Error::new(ErrorKind::Io, format!("'{name}' failed: {reason}"));
        for slot in std::mem::take(&mut self.restarts) {
            reply(slot, Err(error.clone()));
        }
        self.say_failed(error);
    }

    /// The contents are gone: nobody may serve them, so the disk ends and every request gets EIO.
    fn is_lost(&mut self, error: Error) {
        tracing::error!("{error}: every request gets EIO");
        self.takeover.deadline = None;
        if self.state() != DeviceState::Recovering {
            self.set_state(DeviceState::Recovering, None);
        }
        self.set_state(DeviceState::Lost, Some(error.message.clone()));
        self.takeover.is_gone = true;
        for slot in std::mem::take(&mut self.restarts) {
            reply(slot, Err(error.clone()));
        }
        self.say_failed(error);
        if let Some(id) = self.device {
            let _ = self.chores.send(Chore::End(id));
        }
    }

    fn say_failed(&mut self, failed: Error) {
        if let Some(mut start) = self.take_start() {
            start.send(&StartLine::Failed { failed });
        }
    }

    /// Whether the contents are lost and no worker is there to say so to each request.
    pub(super) fn is_lost_alone(&self) -> bool {
        self.state() == DeviceState::Lost && self.worker.is_none()
    }

    pub(super) fn recover(&mut self, slot: ReplySlot) {
        let state = self.state();
        if self.is_lost_alone() {
            let why = self.status.current().reason.clone().unwrap_or_default();
            let error = format!("the device is lost, and its contents with it: {why}");
            reply(slot, Err(Error::new(ErrorKind::Io, error)));
            return;
        }
        if state.is_served() {
            // Whatever it was, it is over.
            reply(slot, Ok(()));
            return;
        }
        if state != DeviceState::Failed {
            let error = format!("the device is {state}: try again in a moment");
            reply(slot, Err(Error::new(ErrorKind::Busy, error)));
            return;
        }
        if self.is_stuck_in_gap() {
            let reason = self.status.current().reason.clone().unwrap_or_default();
            reply(slot, Err(Error::new(ErrorKind::Unsupported, reason)));
            return;
        }
        self.takeover.fail_at = None;
        self.takeover.seen = None;
        self.restarts.push(slot);
        self.begin_takeover("somebody asked for another attempt".to_owned(), true);
    }

    pub(super) fn restart(&mut self, slot: ReplySlot) {
        let refusal = match (&self.survives, self.state()) {
            (Err(why), _) => Some(Error::new(
                ErrorKind::Unsupported,
                format!("this disk does not survive its worker: {why}"),
            )),
            (Ok(()), DeviceState::Live) if self.restarts.is_empty() => None,
            (Ok(()), state) => Some(Error::new(
                ErrorKind::Busy,
                format!("the device is {state}, or is being restarted: try again in a moment"),
            )),
        };
        if let Some(error) = refusal {
            reply(slot, Err(error));
            return;
        }
        if let Some(mut standby) = self.standby.take() {
            // It ends when its channel does. It is of the program that was installed before.
            standby.hang_up();
            self.takeover.leaving.push(standby);
        }
        self.standby_is_ready = false;
        self.life().standby.store(0, Ordering::Relaxed);
        self.restarts.push(slot);
        self.spawn_standby(Purpose::Fresh, Duration::ZERO);
    }

    /// A fresh worker is ready: the one that serves lets go.
    fn replace_worker(&mut self) {
        self.takeover.is_planned = true;
        let reason = "the worker is being replaced".to_owned();
        self.set_state(DeviceState::Recovering, Some(reason));
        let can_quiesce = self
            .fixed()
            .is_some_and(|fixed| fixed.features.iter().any(|name| name == "QUIESCE"));
        match self.device {
            Some(id) if can_quiesce => {
                self.takeover.deadline = Some(Instant::now() + TAKEOVER_LIMIT);
                let _ = self.chores.send(Chore::Quiesce(id));
            }
            _ => self.kill_worker(),
        }
    }

    fn kill_worker(&self) {
        if let Some(worker) = &self.worker {
            worker.kill();
        }
    }

    pub(super) fn quiesced(&mut self, outcome: Result<()>) {
        if !self.takeover.is_planned {
            return;
        }
        match outcome {
            Ok(()) => self.takeover.deadline = Some(Instant::now() + QUIESCED_LIMIT),
            Err(error) => {
                tracing::warn!("{error}: the worker is killed, and its requests issued again");
                self.kill_worker();
            }
        }
    }

    /// Ends a disk that no worker serves: whoever waits for it gets EIO.
    pub(super) fn end_disk(&mut self, why: &str) {
        self.takeover.fail_at = None;
        self.takeover.deadline = None;
        self.takeover.is_wanted = false;
        if self.takeover.was_wiped && self.takeover.is_gone {
            tracing::warn!("the memory of a lost device was not wiped: {why}");
            self.end = Some(End::Done);
            return;
        }
        if self.takeover.was_wiped {
            let error = format!("the memory could not be wiped: {why}");
            self.end = Some(End::LeftBehind(Error::new(ErrorKind::Io, error)));
            return;
        }
        if self.state() != DeviceState::Stopping {
            self.set_state(DeviceState::Stopping, Some(why.to_owned()));
        }
        match self.device {
            Some(id) => drop(self.chores.send(Chore::End(id))),
            None => self.disk_ended(Ok(())),
        }
    }

    pub(super) fn disk_ended(&mut self, outcome: Result<()>) {
        if self.state() != DeviceState::Stopping {
            // A lost device's disk; its memory waits for the removal. The number may be another device's
            // from now on.
            match outcome {
                Ok(()) => self.device = None,
                Err(error) => tracing::error!("{error}"),
            }
            return;
        }
        let wiped = outcome.and_then(|()| {
            self.takeover.was_wiped = true;
            self.spawn(Purpose::Wiper, Role::Wiper, Duration::ZERO)
        });
        if let Err(error) = wiped {
            self.end = Some(End::LeftBehind(error));
        }
    }

    /// Does what is due.
    pub(super) fn look_at_timers(&mut self) {
        let now = Instant::now();
        let is_due = |at: &Option<Instant>| at.is_some_and(|at| now >= at);
        if is_due(&self.takeover.deadline) {
            self.takeover.deadline = None;
            if self.worker.is_some() {
                tracing::error!("a takeover took too long: the worker is killed");
                self.kill_worker();
            } else if self.takeover.is_wanted {
                // A process that is being started may wait for memory: giving up would not help it.
                let why = "no process that can take over is ready yet; `remove --force` ends the device \
                           with EIO for what waits";
                tracing::error!("{why}");
                self.set_state(DeviceState::Recovering, Some(why.to_owned()));
                self.takeover.deadline = Some(now + TAKEOVER_LIMIT);
            }
        }
        if is_due(&self.takeover.fail_at) {
            self.end_disk("it failed, and its time limit is over");
        }
        self.takeover.leaving.retain_mut(|process| {
            let stays = !has_ended(process);
            if !stays {
                process.how_it_ended();
            }
            stays
        });
    }

    pub(super) fn next_timer(&self) -> Option<Instant> {
        let timers = [self.takeover.deadline, self.takeover.fail_at];
        timers.into_iter().flatten().min()
    }
}
