//! A layer that wraps any backend and fails, shortens, holds or delays chosen copies, or panics in
//! their place.
//!
//! Hardware does not hang or break on demand; this does, on real I/O paths. It is a laboratory's
//! tool (`--lab-fault`): unlike everything else on the I/O path it takes a lock and allocates.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use super::layer::Layer;
use super::registered::Transfer;
use super::{
    Backend, BackendQueue, ChunkMemory, Completion, Copy, DRIVER_LOST, Direction, Mapping, QueueId,
};
use crate::control::{FaultAction, FaultRule};
use crate::device::PathCounters;
use crate::error::{Error, Result};

/// Set in the id of a copy of the layer's own, whose completion nobody waits for. Ids of others are
/// far below: twice the depth of a queue.
const SILENT: u32 = 1 << 31;

/// The rules, shared by every queue and by control.
#[derive(Default)]
pub struct FaultControl {
    rules: Mutex<Vec<FaultRule>>,
    /// Grows by one with each release, so that a queue sees that there was one.
    releases: AtomicU32,
    reverse: AtomicU32,
    alarms: Mutex<Vec<Arc<TimerFd>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FaultControl {
    /// Adds a rule; rules are tried in the order they came.
    pub fn add(&self, rule: FaultRule) {
        lock(&self.rules).push(rule);
    }

    /// Removes every rule and lets held copies go, newest first if `reverse`.
    pub fn release(&self, reverse: bool) {
        lock(&self.rules).clear();
        self.reverse.store(u32::from(reverse), Ordering::SeqCst);
        self.releases.fetch_add(1, Ordering::SeqCst);
        for alarm in lock(&self.alarms).iter() {
            arm(alarm, Duration::ZERO);
        }
    }

    /// The action for a copy, counting the rule's `count` down.
    fn judge(&self, copy: &Copy) -> Option<(FaultAction, u32)> {
        let mut rules = lock(&self.rules);
        let end = copy.device_offset.saturating_add(u64::from(copy.len));
        let at = rules.iter().position(|rule| {
            rule.reads
                .is_none_or(|reads| reads == (copy.direction == Direction::Read))
                && rule.from < end
                && rule.to.is_none_or(|to| copy.device_offset < to)
        })?;
        let rule = rules.get_mut(at)?;
        let verdict = (rule.action, rule.delay_ms);
        if let Some(count) = rule.count.as_mut() {
            *count = count.saturating_sub(1);
            if *count == 0 {
                rules.remove(at);
            }
        }
        Some(verdict)
    }
}

/// Makes the timer expire after `delay`.
fn arm(alarm: &TimerFd, delay: Duration) {
    // A zero time would disarm the timer.
    let delay = delay.max(Duration::from_nanos(1));
    // The flags and the time are valid, so this cannot fail; a lab layer has nobody to tell anyway.
    let _ = alarm.set(
        Expiration::OneShot(TimeSpec::from_duration(delay)),
        TimerSetTimeFlags::empty(),
    );
}

/// A backend with the layer around it.
pub struct FaultBackend {
    inner: Box<dyn Backend>,
    control: Arc<FaultControl>,
}

impl FaultBackend {
    /// Wraps `inner`; `control` steers it.
    pub fn new(inner: Box<dyn Backend>, control: Arc<FaultControl>) -> FaultBackend {
        FaultBackend { inner, control }
    }
}

impl Layer for FaultBackend {
    const NAME: &'static str = "fault layer";

    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn open_layered(
        &self,
        queue: QueueId,
        copies: usize,
        memory: &[Mapping],
    ) -> Result<Box<dyn BackendQueue>> {
        if queue.is_control() {
            return self.inner.open_queue(queue, copies, memory);
        }
        let alarm = TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK,
        )
        .map_err(|errno| Error::os("timerfd_create for the fault layer", errno))?;
        let alarm = Arc::new(alarm);
        lock(&self.control.alarms).push(Arc::clone(&alarm));
        Ok(Box::new(FaultQueue {
            inner: self.inner.open_queue(queue, copies, memory)?,
            seen: self.control.releases.load(Ordering::SeqCst),
            control: Arc::clone(&self.control),
            alarm,
            held: Vec::with_capacity(copies),
            held_done: Vec::with_capacity(copies),
            delayed: Vec::with_capacity(copies),
            done: VecDeque::with_capacity(copies),
        }))
    }
}

type Pending = (Copy, ChunkMemory);

struct FaultQueue {
    inner: Box<dyn BackendQueue>,
    control: Arc<FaultControl>,
    alarm: Arc<TimerFd>,
    seen: u32,
    held: Vec<Pending>,
    held_done: Vec<Completion>,
    delayed: Vec<(Instant, Pending)>,
    done: VecDeque<Completion>,
}

// SAFETY: the raw addresses in held copies are valid on every thread (`BackendQueue::submit`), and
// the queue is used by one thread at a time.
unsafe impl Send for FaultQueue {}

impl FaultQueue {
    fn resume(&mut self, (copy, chunk): Pending) {
        // SAFETY: the promise made for the held copy's submit holds until its completion is polled.
        unsafe { self.inner.submit(&copy, &chunk) };
    }
}

impl BackendQueue for FaultQueue {
    unsafe fn submit(&mut self, copy: &Copy, chunk: &ChunkMemory) {
        match self.control.judge(copy) {
            None => {
                // SAFETY: the caller's promise is passed on.
                unsafe { self.inner.submit(copy, chunk) }
            }
            Some((FaultAction::Fail, _)) => {
                self.done.push_back(Completion {
                    id: copy.id,
                    result: Err(libc::EIO),
                });
            }
            Some((FaultAction::DriverLost, _)) => {
                self.done.push_back(Completion {
                    id: copy.id,
                    result: Err(DRIVER_LOST),
                });
            }
            Some((FaultAction::Short, _)) => {
                self.done.push_back(Completion {
                    id: copy.id,
                    result: Ok(copy.len / 2),
                });
            }
            Some((FaultAction::Hold, _)) => self.held.push((*copy, chunk.clone())),
            Some((FaultAction::HoldHalf, _)) => {
                let half = Copy {
                    len: copy.len / 2,
                    id: copy.id | SILENT,
                    ..*copy
                };
                // SAFETY: the caller's promise, for half of the bytes.
                unsafe { self.inner.submit(&half, chunk) };
                self.held.push((*copy, chunk.clone()));
            }
            Some((FaultAction::HoldDone, _)) => {
                let silent = Copy {
                    id: copy.id | SILENT,
                    ..*copy
                };
                // SAFETY: the caller's promise is passed on.
                unsafe { self.inner.submit(&silent, chunk) };
                self.held_done.push(Completion {
                    id: copy.id,
                    result: Ok(copy.len),
                });
            }
            #[expect(clippy::panic, reason = "it is what the rule asks for")]
            Some((FaultAction::Panic, _)) => panic!("the fault layer was told to panic"),
            Some((FaultAction::Delay, ms)) => {
                let due = Duration::from_millis(u64::from(ms));
                self.delayed
                    .push((Instant::now() + due, (*copy, chunk.clone())));
                if self.delayed.len() == 1 {
                    arm(&self.alarm, due);
                }
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        let releases = self.control.releases.load(Ordering::SeqCst);
        if releases != self.seen {
            self.seen = releases;
            let mut held = std::mem::take(&mut self.held);
            if self.control.reverse.load(Ordering::SeqCst) != 0 {
                held.reverse();
            }
            for pending in held {
                self.resume(pending);
            }
            self.done.extend(self.held_done.drain(..));
        }
        let now = Instant::now();
        while let Some(at) = self.delayed.iter().position(|(due, _)| *due <= now) {
            let (_, pending) = self.delayed.remove(at);
            self.resume(pending);
        }
        if let Some(next) = self.delayed.iter().map(|(due, _)| *due).min() {
            arm(&self.alarm, next - now);
            if self.control.releases.load(Ordering::SeqCst) != self.seen {
                // A release that came meanwhile has set the timer too, and just lost it.
                arm(&self.alarm, Duration::ZERO);
            }
        }
        let before = done.len();
        self.inner.poll(done);
        let mut at = 0;
        done.retain(|completion| {
            at += 1;
            at <= before || completion.id & SILENT == 0
        });
        while done.len() < done.capacity() {
            match self.done.pop_front() {
                Some(completion) => done.push(completion),
                None => break,
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
            + self.held.len()
            + self.held_done.len()
            + self.delayed.len()
            + self.done.len()
    }

    fn path_counters(&self) -> Option<PathCounters> {
        self.inner.path_counters()
    }

    /// The inner queue's descriptor is not watched beside the timer: while it works, look again.
    fn should_poll(&self) -> bool {
        self.inner.in_flight() > self.inner.in_kernel()
    }

    fn next_transfer(&mut self) -> Option<Transfer> {
        self.inner.next_transfer()
    }

    fn transferred(&mut self, id: u32, result: i32) {
        self.inner.transferred(id, result);
    }

    fn in_kernel(&self) -> usize {
        self.inner.in_kernel()
    }

    fn completion_fd(&self) -> Option<RawFd> {
        use std::os::fd::AsFd;
        Some(self.alarm.as_fd().as_raw_fd())
    }
}
