//! The GPU's engines: how work reaches them, and how its end is noticed.
//!
//! ```text
//!   queue thread      records commands, fills a shader's table      [lane, gather]
//!        | EngineQueue::submit: a ring, one owner at a time
//!   VkQueue
//!        | timeline semaphore, one for each lane
//!   queue thread      looks at its value while it polls             [lane]
//!   waker thread      sleeps on it when the queue thread sleeps     [waker]
//! ```
//!
//! A queue thread never waits for a lock or for an engine. Nothing is allocated by us after the
//! lanes were made.

mod gather;
mod lane;
mod waker;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering, fence};

use ash::vk;
use crossbeam_queue::ArrayQueue;

pub(super) use gather::{GatherLane, MOST_PIECES, Pipeline};
pub(super) use lane::{Batch, CopyLane, Ended, Part};
pub(super) use waker::Waker;

use super::device::Device;

/// Submissions that wait for a queue's owner; far more than all lanes together have slots.
const RING: usize = 4096;
/// Submissions passed to the driver in one call.
const TOGETHER: usize = 16;

/// What became of a submission: the engine has it.
const SENT: u8 = 0;
/// The driver refused it; it will never run.
const REFUSED: u8 = 1;
/// It is in the ring, or in the hands of the queue's owner.
const WAITING: u8 = 2;

/// A recorded command buffer to be run.
pub(super) struct Job {
    command: vk::CommandBuffer,
    semaphore: vk::Semaphore,
    value: u64,
    fate: Arc<AtomicU8>,
}

/// A VkQueue. Vulkan lets one thread at a time submit to it; here that is whoever comes first. The
/// others leave their work in the ring and go on: the owner takes it along, or they do themselves
/// when the owner has just left.
pub(super) struct EngineQueue {
    queue: vk::Queue,
    pub(super) family: u32,
    ring: ArrayQueue<Job>,
    owned: AtomicBool,
}

impl EngineQueue {
    pub(super) fn new(queue: vk::Queue, family: u32) -> EngineQueue {
        EngineQueue {
            queue,
            family,
            ring: ArrayQueue::new(RING),
            owned: AtomicBool::new(false),
        }
    }

    /// Passes a job to the engine, at once or by the thread that is at it. A refusal shows in the
    /// job's fate.
    pub(super) fn submit(&self, device: &Device, job: Job) {
        if let Err(job) = self.ring.push(job) {
            job.fate.store(REFUSED, Ordering::Release);
            return;
        }
        loop {
            if self.owned.swap(true, Ordering::SeqCst) {
                return;
            }
            self.drain(device);
            self.owned.store(false, Ordering::SeqCst);
            // Whoever found the queue owned has pushed before: either it is seen here, or it found the
            // queue free.
            fence(Ordering::SeqCst);
            if self.ring.is_empty() {
                return;
            }
        }
    }

    /// Submits all that is in the ring. Only the owner calls this.
    fn drain(&self, device: &Device) {
        loop {
            let mut jobs: [Option<Job>; TOGETHER] = std::array::from_fn(|_| None);
            let mut count = 0;
            for place in &mut jobs {
                *place = self.ring.pop();
                if place.is_none() {
                    break;
                }
                count += 1;
            }
            if count == 0 {
                return;
            }
            let outcome = self.send(device, &jobs, count);
            let fate = match outcome {
                Ok(()) => SENT,
                Err(result) => {
                    device.note(result);
                    REFUSED
                }
            };
            for job in jobs.iter().flatten() {
                job.fate.store(fate, Ordering::Release);
            }
        }
    }

    fn send(
        &self,
        device: &Device,
        jobs: &[Option<Job>; TOGETHER],
        count: usize,
    ) -> Result<(), vk::Result> {
        let of = |index: usize| jobs.get(index).and_then(Option::as_ref);
        let commands: [_; TOGETHER] =
            std::array::from_fn(|n| of(n).map_or(vk::CommandBuffer::null(), |job| job.command));
        let semaphores: [_; TOGETHER] =
            std::array::from_fn(|n| of(n).map_or(vk::Semaphore::null(), |job| job.semaphore));
        let values: [u64; TOGETHER] = std::array::from_fn(|n| of(n).map_or(0, |job| job.value));
        let mut timelines: [vk::TimelineSemaphoreSubmitInfo<'_>; TOGETHER] = Default::default();
        for (timeline, value) in timelines.iter_mut().zip(&values) {
            *timeline = timeline.signal_semaphore_values(std::slice::from_ref(value));
        }
        let mut infos: [vk::SubmitInfo<'_>; TOGETHER] = Default::default();
        let parts = timelines.iter_mut().zip(commands.iter().zip(&semaphores));
        for (info, (timeline, (command, semaphore))) in infos.iter_mut().zip(parts) {
            *info = info
                .command_buffers(std::slice::from_ref(command))
                .signal_semaphores(std::slice::from_ref(semaphore))
                .push_next(timeline);
        }
        let infos = infos.get(..count).unwrap_or(&[]);
        // SAFETY: this thread owns the queue; every command buffer is recorded and not in flight (its
        // slot was free), every semaphore is a timeline whose value only grows, and each lane keeps
        // both until its work has ended.
        unsafe {
            device
                .api
                .queue_submit(self.queue, infos, vk::Fence::null())
        }
    }
}
