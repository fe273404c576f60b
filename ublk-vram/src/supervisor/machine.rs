//! The supervisor's loop: what happened, and what is done about it.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use super::calls::reply;
use super::chores::{self, Chore, Purpose};
use super::desk::{Current, ReplySlot, Status, Wake};
use super::kept::Kept;
use super::start::{StartLine, StartPipe};
use super::takeover::Takeover;
use crate::control::Call;
use crate::device::{DeviceState, StaticInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::safety;
use crate::session::process::Process;
use crate::session::{LifeRecord, Order, Report, Role};

/// The loop looks at its timers at least this often.
const TICK: Duration = Duration::from_secs(1);

/// What the loop is told by other threads.
pub(super) enum Event {
    /// A call to be answered.
    Call(Call, ReplySlot),
    /// A process was started, or could not be.
    Spawned(Purpose, Result<Box<Process>>),
    /// The driver let go of the worker, or did not.
    Quiesced(Result<()>),
    /// A disk without a worker was ended, or could not be.
    DiskEnded(Result<()>),
}

/// How this supervisor came to its device.
pub(super) enum Origin {
    /// It makes it.
    New,
    /// It takes the place of one that is gone, and the worker lives.
    Adopted {
        worker: Box<Process>,
        fixed: Box<StaticInfo>,
        survives: std::result::Result<(), String>,
        reason: Option<String>,
    },
    /// Every process of the device was gone.
    Orphan { fixed: Box<StaticInfo> },
}

/// How the loop ended.
pub(super) enum End {
    /// Everything is given back.
    Done,
    /// There is no device; nothing is left behind.
    NotStarted(Error),
    /// What may still be in use is left as it is, for `list` and `remove --force`.
    LeftBehind(Error),
}

/// Everything the loop knows.
pub(super) struct Machine {
    pub(super) kept: Kept,
    pub(super) status: Arc<Status>,
    events: Receiver<Event>,
    wake: Wake,
    signals: SignalFd,
    pub(super) chores: Sender<Chore>,
    pub(super) worker: Option<Process>,
    pub(super) standby: Option<Process>,
    pub(super) standby_is_ready: bool,
    /// A standby is being started.
    pub(super) is_spawning: bool,
    /// The driver's number, once there is a device.
    pub(super) device: Option<u32>,
    pub(super) survives: std::result::Result<(), String>,
    pub(super) takeover: Takeover,
    /// SIGTERM came: a worker that takes over is to drain.
    pub(super) is_draining: bool,
    start: Option<StartPipe>,
    warnings: Vec<String>,
    /// Calls that the worker is to answer.
    pub(super) pending: HashMap<u64, (bool, ReplySlot)>,
    pub(super) next_call: u64,
    /// Answered when all is over.
    pub(super) removals: Vec<ReplySlot>,
    /// Answered when a fresh worker serves.
    pub(super) restarts: Vec<ReplySlot>,
    /// Why the last process ended, in its own words.
    pub(super) last_words: Option<Error>,
    /// The worker has said that all is over.
    has_ended: bool,
    pub(super) end: Option<End>,
}

impl Machine {
    pub(super) fn new(
        kept: Kept,
        status: Arc<Status>,
        events: Receiver<Event>,
        wake: Wake,
        chores: Sender<Chore>,
        origin: Origin,
    ) -> Result<Machine> {
        let signals = safety::block_termination_signals()?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals =
            SignalFd::with_flags(&signals, flags).map_err(|errno| Error::os("signalfd", errno))?;
        let mut machine = Machine {
            kept,
            status,
            events,
            wake,
            signals,
            chores,
            worker: None,
            standby: None,
            standby_is_ready: false,
            is_spawning: false,
            device: None,
            survives: Err("it is not known yet".to_owned()),
            takeover: Takeover::default(),
            is_draining: false,
            start: None,
            warnings: Vec::new(),
            pending: HashMap::with_capacity(16),
            next_call: 0,
            removals: Vec::with_capacity(4),
            restarts: Vec::with_capacity(4),
            last_words: None,
            has_ended: false,
            end: None,
        };
        let own = std::process::id();
        let record = machine.life();
        record
            .supervisor
            .store(u64::from(own), std::sync::atomic::Ordering::Relaxed);
        // Those of an earlier supervisor's time are no news.
        machine.takeover.is_new_loss(&machine.status.view.life);
        machine.begin(origin)?;
        Ok(machine)
    }

    fn begin(&mut self, origin: Origin) -> Result<()> {
        match origin {
            Origin::New => self.spawn(Purpose::Maker, Role::Maker, Duration::ZERO)?,
            Origin::Adopted {
                worker,
                fixed,
                survives,
                reason,
            } => {
                self.life()
                    .supervisors
                    .fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                self.device = Some(fixed.id);
                self.survives = survives;
                let state = self.state();
                self.is_draining = state == DeviceState::Draining;
                self.set_fixed(*fixed);
                self.set_state(state, reason);
                worker.channel.send(&Order::Adopted, &[])?;
                self.worker = Some(*worker);
                self.kept.own();
                self.note();
                self.make_standby(Duration::ZERO);
            }
            Origin::Orphan { fixed } => {
                self.device = Some(fixed.id);
                self.survives = Ok(());
                self.set_fixed(*fixed);
                self.begin_takeover("every process of its server was gone".to_owned(), true);
            }
        }
        Ok(())
    }

    /// The words that every process of the server sees.
    pub(super) fn life(&self) -> &LifeRecord {
        self.status.view.life.record()
    }

    pub(super) fn state(&self) -> DeviceState {
        self.status.current().state
    }

    pub(super) fn fixed(&self) -> Option<StaticInfo> {
        self.status.current().fixed.clone()
    }

    fn set_fixed(&mut self, mut fixed: StaticInfo) {
        fixed.pid = i32::try_from(std::process::id()).unwrap_or(0);
        let current = self.status.current();
        if let Some(before) = &current.fixed {
            fixed.since = before.since;
        }
        let worker = u64::try_from(fixed.worker).unwrap_or(0);
        self.life()
            .worker
            .store(worker, std::sync::atomic::Ordering::Relaxed);
        self.status.set(Current {
            fixed: Some(fixed),
            ..Current::clone(&current)
        });
    }

    pub(super) fn set_state(&mut self, state: DeviceState, reason: Option<String>) {
        let current = self.status.current();
        debug_assert!(
            current.state == state || current.state.may_become(state),
            "{} -> {state}",
            current.state
        );
        match &reason {
            Some(reason) => tracing::info!("{state}: {reason}"),
            None => tracing::info!("{state}"),
        }
        self.status.set(Current {
            state,
            reason,
            fixed: current.fixed.clone(),
        });
    }

    /// Writes the notes again.
    pub(super) fn note(&self) {
        if let Some(fixed) = self.fixed() {
            let _ = self.chores.send(Chore::Note(Box::new(fixed)));
        }
    }

    pub(super) fn spawn(&self, purpose: Purpose, role: Role, after: Duration) -> Result<()> {
        let (begin, fds) = self.kept.begin(role)?;
        let begin = Box::new(begin);
        let _ = self.chores.send(Chore::Spawn {
            purpose,
            begin,
            fds,
            after,
        });
        Ok(())
    }

    /// Runs until there is nothing left to supervise.
    pub(super) fn run(mut self, start: Option<StartPipe>, warnings: Vec<String>) -> Result<()> {
        self.start = start;
        self.warnings = warnings;
        let end = loop {
            self.look_at_timers();
            if let Some(end) = self.end.take() {
                break end;
            }
            self.wait();
            while let Ok(event) = self.events.try_recv() {
                self.handle(event);
            }
            while let Ok(Some(signal)) = self.signals.read_signal() {
                tracing::info!("signal {}", signal.ssi_signo);
                self.terminate();
            }
            self.listen_to_worker();
            self.listen_to_standby();
        };
        self.leave(end)
    }

    fn wait(&self) {
        let limit = self.next_timer().map_or(TICK, |at| {
            at.saturating_duration_since(Instant::now()).min(TICK)
        });
        // Rounded up, so that the last fraction of a millisecond is slept and not spun.
        let millis = limit.as_millis().saturating_add(1);
        let mut fds = Vec::with_capacity(6);
        fds.push(PollFd::new(self.wake.fd(), PollFlags::POLLIN));
        fds.push(PollFd::new(self.signals.as_fd(), PollFlags::POLLIN));
        for process in [&self.worker, &self.standby].into_iter().flatten() {
            if !process.has_hung_up {
                fds.push(PollFd::new(process.channel.as_fd(), PollFlags::POLLIN));
            }
            fds.push(PollFd::new(process.end(), PollFlags::POLLIN));
        }
        // An interrupted wait is one that ended early.
        let _ = poll(
            &mut fds,
            PollTimeout::try_from(millis).unwrap_or(PollTimeout::ZERO),
        );
        self.wake.clear();
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Call(call, slot) => self.answer(call, slot),
            Event::Spawned(purpose, process) => self.spawned(purpose, process),
            Event::Quiesced(outcome) => self.quiesced(outcome),
            Event::DiskEnded(outcome) => self.disk_ended(outcome),
        }
    }

    pub(super) fn tell_worker(&self, order: &Order) {
        if let Some(worker) = &self.worker
            && let Err(error) = worker.channel.send(order, &[])
        {
            // A worker that is gone is seen by its pidfd.
            tracing::warn!("{error}");
        }
    }

    fn terminate(&mut self) {
        match self.state() {
            DeviceState::Creating => {
                let error = Error::new(ErrorKind::Io, "the start was called off by a signal");
                self.end = Some(End::NotStarted(error));
            }
            DeviceState::Failed => {
                tracing::error!("a device that failed cannot be drained: recover or remove it");
            }
            DeviceState::Stopping => {}
            _ => {
                self.is_draining = true;
                self.tell_worker(&Order::Terminate);
            }
        }
    }

    fn listen_to_worker(&mut self) {
        while let Some(worker) = &mut self.worker {
            if worker.has_hung_up || !is_readable(worker.channel.as_fd()) {
                break;
            }
            match worker.channel.receive::<Report>() {
                Ok(Some((report, fds))) => self.hear(report, fds),
                // Its pidfd tells.
                Ok(None) => worker.has_hung_up = true,
                Err(error) => {
                    tracing::error!("{error}");
                    worker.has_hung_up = true;
                    let state = self.status.current().state;
                    if self.survives.is_ok() || state == DeviceState::Creating {
                        // Both sides would wait for ever; what it holds is safe without it.
                        worker.kill();
                        self.last_words = Some(error);
                    }
                }
            }
        }
        if self.worker.as_ref().is_some_and(has_ended)
            && let Some(mut worker) = self.worker.take()
        {
            let how = worker.how_it_ended();
            self.worker_ended(worker.pid, &how);
        }
    }

    fn hear(&mut self, report: Report, fds: Vec<std::os::fd::OwnedFd>) {
        match report {
            Report::Region(what) => {
                if let Err(error) = self.kept.keep_region(what, fds) {
                    self.last_words = Some(error);
                }
            }
            Report::Memory(description) => self.kept.keep_memory(description, fds),
            Report::Added { id, survives } => {
                self.device = Some(id);
                self.survives = survives;
                if self.survives.is_ok() {
                    self.make_standby(Duration::ZERO);
                } else {
                    self.tell_worker(&Order::GoLive);
                }
            }
            Report::Live(fixed) => self.worker_is_live(*fixed),
            Report::Copy(copy) => {
                if let Some(fixed) = self.fixed() {
                    self.set_fixed(StaticInfo { copy, ..fixed });
                }
            }
            Report::State { state, reason } => {
                self.is_draining &= state != DeviceState::Live;
                self.set_state(state, reason);
            }
            Report::Answer { id, reply: answer } => {
                if let Some((_, slot)) = self.pending.remove(&id) {
                    let (written, _) = channel();
                    let _ = slot.send((answer, written));
                }
            }
            Report::Terminate => self.terminate(),
            Report::Failed(error) => self.last_words = Some(error),
            Report::Lost(error) => self.takeover.lost = Some(error),
            Report::Ended(error) => {
                self.last_words = error;
                self.has_ended = true;
            }
            Report::Ready => {}
        }
    }

    fn worker_is_live(&mut self, fixed: StaticInfo) {
        let is_first = self.fixed().is_none();
        self.set_fixed(fixed);
        if is_first {
            if let Some(fixed) = self.fixed() {
                chores::write_notes(&self.kept.identity, &self.kept.run_dir, &fixed);
            }
            self.set_state(DeviceState::Live, None);
        } else {
            self.taken_over();
            self.kept.own();
            self.note();
        }
        self.say_ready();
        if self.survives.is_ok() && self.standby.is_none() && !self.is_spawning {
            self.make_standby(Duration::ZERO);
        }
    }

    pub(super) fn take_start(&mut self) -> Option<StartPipe> {
        self.start.take()
    }

    /// Tells who waits for the start, if anybody does.
    fn say_ready(&mut self) {
        let (Some(mut start), Some(fixed)) = (self.start.take(), self.fixed()) else {
            return;
        };
        // Before the line: whoever reads it may go away, and take the other end of stderr along.
        if let Err(error) = safety::redirect_stdio_to_null() {
            tracing::warn!("{error}");
        }
        start.send(&StartLine::Ready {
            ready: Box::new(fixed),
            warnings: std::mem::take(&mut self.warnings),
        });
    }

    fn worker_ended(&mut self, pid: i32, how: &str) {
        for (_, (is_removal, slot)) in self.pending.drain() {
            if is_removal
                && (self.has_ended || self.status.current().state == DeviceState::Stopping)
            {
                self.removals.push(slot);
            } else {
                let error = "the worker ended before it answered: try again in a moment";
                reply(slot, Err(Error::new(ErrorKind::Busy, error)));
            }
        }
        if self.has_ended {
            self.end = Some(End::Done);
            return;
        }
        let words = self.last_words.take();
        let why = match &words {
            Some(error) => format!("the worker (process {pid}) ended: {error}"),
            None if self.takeover.is_new_loss(&self.status.view.life) => format!(
                "the GPU's driver lost it (VK_ERROR_DEVICE_LOST), and the worker (process {pid}) ended for \
                 another one to look at the memory"
            ),
            None => format!("the worker (process {pid}) died ({how})"),
        };
        match self.state() {
            DeviceState::Creating => {
                let error = words.unwrap_or_else(|| {
                    Error::new(ErrorKind::Io, format!("{why} before the device was usable"))
                });
                self.end = Some(End::NotStarted(error));
            }
            // The disk is gone, or about to be: what is left is to delete it and to wipe.
            DeviceState::Stopping => {
                tracing::error!("{why} while the device was stopping");
                self.end_disk(&why);
            }
            _ if self.survives.is_err() => {
                let because = self.survives.clone().err().unwrap_or_default();
                let error = format!("{why}, and its disk with it: {because}");
                self.end = Some(End::LeftBehind(Error::new(ErrorKind::Io, error)));
            }
            _ => self.worker_died(why),
        }
    }
}

pub(super) fn is_readable(fd: std::os::fd::BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN)];
    matches!(poll(&mut fds, PollTimeout::ZERO), Ok(n) if n > 0)
}

pub(super) fn has_ended(process: &Process) -> bool {
    process.has_ended(Duration::ZERO)
}
