//! One queue thread's way to one engine: command buffers that are recorded anew for each batch of
//! copies, and a timeline semaphore that counts them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use ash::vk;

use super::{EngineQueue, Job, REFUSED, SENT, WAITING};
use crate::backend::vulkan::device::Device;
use crate::backend::vulkan::loader::failed;
use crate::backend::{DRIVER_LOST, Direction};
use crate::copy::planner::Seen;
use crate::error::Result;

/// What is still in flight when a queue is closed has so long to end.
const CLOSE_LIMIT: Duration = Duration::from_secs(5);

/// One copy of a batch, in engine's terms.
#[derive(Debug, Clone, Copy)]
pub(in crate::backend::vulkan) struct Part {
    /// [`crate::backend::Copy::id`].
    pub id: u32,
    pub direction: Direction,
    pub len: u32,
    /// The chunk's buffer and address, and where in it.
    pub chunk: vk::Buffer,
    pub chunk_address: u64,
    pub chunk_offset: u64,
    /// The buffer and address of the I/O memory, and where in it.
    pub host: vk::Buffer,
    pub host_address: u64,
    pub host_offset: u64,
}

/// Copies that run together.
#[derive(Debug, Clone, Copy)]
pub(in crate::backend::vulkan) struct Batch {
    /// Of most of them.
    pub direction: Direction,
    /// What the planner's costs say of it, together with what was in flight before it; nanoseconds.
    pub plain: f64,
    /// Its own part of that; 0 for a probe.
    pub own: f64,
}

/// A batch that has ended, one way or the other.
pub(in crate::backend::vulkan) struct Ended {
    pub batch: Batch,
    pub result: std::result::Result<(), i32>,
    pub seen: Seen,
}

/// The part that every lane has: slots, and the counting of their ends.
pub(super) struct Slots {
    pub(super) device: Arc<Device>,
    queue: Arc<EngineQueue>,
    pub(super) pool: vk::CommandPool,
    timeline: vk::Semaphore,
    last: u64,
    slots: Box<[Slot]>,
    free: Vec<usize>,
    flying: VecDeque<usize>,
    looked: Instant,
}

struct Slot {
    command: vk::CommandBuffer,
    value: u64,
    fate: Arc<AtomicU8>,
    parts: Vec<Part>,
    batch: Batch,
    sent: Instant,
}

impl Slots {
    /// `count` slots for up to `parts` copies each.
    pub(super) fn new(
        device: &Arc<Device>,
        queue: &Arc<EngineQueue>,
        count: usize,
        parts: usize,
    ) -> Result<Slots> {
        let fail = |result| {
            device.note(result);
            failed(
                format!("no commands for {} can be made", device.gpu.label()),
                result,
            )
        };
        let info = vk::CommandPoolCreateInfo::default()
            .queue_family_index(queue.family)
            .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER);
        // What is made from here on is destroyed by the drop, whatever fails.
        let mut slots = Slots {
            device: Arc::clone(device),
            queue: Arc::clone(queue),
            pool: vk::CommandPool::null(),
            timeline: vk::Semaphore::null(),
            last: 0,
            slots: Box::default(),
            free: (0..count).rev().collect(),
            flying: VecDeque::with_capacity(count),
            looked: Instant::now(),
        };
        // SAFETY: the device is alive and has a queue of this family.
        slots.pool = unsafe { device.api.create_command_pool(&info, None) }.map_err(fail)?;
        let mut kind = vk::SemaphoreTypeCreateInfo::default()
            .semaphore_type(vk::SemaphoreType::TIMELINE)
            .initial_value(0);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: the device is alive, `info` and its chain outlive the call.
        slots.timeline = unsafe { device.api.create_semaphore(&info, None) }.map_err(fail)?;
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(slots.pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(u32::try_from(count).unwrap_or(u32::MAX));
        // SAFETY: the pool was just made from this device.
        let commands = unsafe { device.api.allocate_command_buffers(&info) }.map_err(fail)?;
        slots.slots = commands
            .into_iter()
            .map(|command| Slot {
                command,
                value: 0,
                fate: Arc::new(AtomicU8::new(SENT)),
                parts: Vec::with_capacity(parts),
                batch: Batch {
                    direction: Direction::Read,
                    plain: 0.0,
                    own: 0.0,
                },
                sent: Instant::now(),
            })
            .collect();
        Ok(slots)
    }

    /// A slot that is free, with its command buffer.
    pub(super) fn take(&mut self) -> Option<(usize, vk::CommandBuffer)> {
        let index = self.free.pop()?;
        let command = self.slots.get(index)?.command;
        Some((index, command))
    }

    pub(super) fn give_back(&mut self, index: usize) {
        self.free.push(index);
    }

    pub(super) fn commands(&self) -> impl Iterator<Item = vk::CommandBuffer> {
        self.slots.iter().map(|slot| slot.command)
    }

    /// Sends the slot's command buffer; `parts` is what it copies.
    pub(super) fn send(&mut self, index: usize, parts: &[Part], batch: Batch) {
        let Some(slot) = self.slots.get_mut(index) else {
            return;
        };
        self.last += 1;
        slot.value = self.last;
        slot.fate.store(WAITING, Ordering::Relaxed);
        slot.parts.clear();
        slot.parts.extend_from_slice(parts);
        slot.batch = batch;
        slot.sent = Instant::now();
        if self.flying.is_empty() {
            self.looked = slot.sent;
        }
        let job = Job {
            command: slot.command,
            semaphore: self.timeline,
            value: slot.value,
            fate: Arc::clone(&slot.fate),
        };
        self.flying.push_back(index);
        self.queue.submit(&self.device, job);
    }

    /// Batches in flight.
    pub(super) fn flying(&self) -> usize {
        self.flying.len()
    }

    /// What the batches in flight cost, together.
    pub(super) fn backlog(&self) -> f64 {
        let flying = self.flying.iter();
        let slots = flying.filter_map(|index| self.slots.get(*index));
        slots.map(|slot| slot.batch.own).sum()
    }

    /// The semaphore, and the value that the oldest batch in flight will give it.
    pub(super) fn next_end(&self) -> Option<(vk::Semaphore, u64)> {
        let oldest = self.slots.get(*self.flying.front()?)?;
        Some((self.timeline, oldest.value))
    }

    /// Somebody else has watched: nothing that is in flight had ended at `at`.
    pub(super) fn unfinished_at(&mut self, at: Instant) {
        self.looked = self.looked.max(at);
    }

    /// Takes every batch that has ended; `each` gets its parts.
    pub(super) fn collect(&mut self, mut each: impl FnMut(&Ended, &[Part])) {
        if self.flying.is_empty() {
            return;
        }
        let before = self.looked;
        self.looked = Instant::now();
        // SAFETY: the semaphore is this device's.
        let reached = unsafe { self.device.api.get_semaphore_counter_value(self.timeline) };
        if let Err(result) = reached {
            self.device.note(result);
        }
        let is_lost = self.device.is_lost();
        while let Some(&index) = self.flying.front() {
            let Some(slot) = self.slots.get_mut(index) else {
                break;
            };
            let fate = slot.fate.load(Ordering::Acquire);
            if fate == WAITING {
                // Still in the hands of the thread that owns the queue, which is about to pass it on.
                break;
            }
            let result = if fate == REFUSED || is_lost {
                // A lost GPU executes nothing any more (Vulkan, "Lost Device").
                Err(if is_lost { DRIVER_LOST } else { libc::EIO })
            } else if reached.is_ok_and(|reached| reached >= slot.value) {
                Ok(())
            } else {
                break;
            };
            let since = |at: Instant| at.saturating_duration_since(slot.sent).as_nanos() as f64;
            let ended = Ended {
                batch: slot.batch,
                result,
                seen: Seen {
                    after: since(before),
                    by: since(self.looked),
                },
            };
            each(&ended, &slot.parts);
            self.flying.pop_front();
            self.free.push(index);
        }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        let is_waiting = |index: &usize| {
            let slot = self.slots.get(*index);
            slot.is_some_and(|slot| slot.fate.load(Ordering::Acquire) == WAITING)
        };
        let end = Instant::now() + CLOSE_LIMIT;
        while self.flying.iter().any(is_waiting) && Instant::now() < end {
            std::thread::yield_now();
        }
        // What was refused never ends, and never began.
        self.collect(|_, _| {});
        let has_work = !self.flying.is_empty() && !self.device.is_lost();
        if has_work {
            let semaphores = [self.timeline];
            let values = [self.last];
            let info = vk::SemaphoreWaitInfo::default()
                .semaphores(&semaphores)
                .values(&values);
            let limit = u64::try_from(CLOSE_LIMIT.as_nanos()).unwrap_or(u64::MAX);
            // SAFETY: the semaphore is this device's.
            let waited = unsafe { self.device.api.wait_semaphores(&info, limit) };
            if waited.is_err() {
                self.device.abandon();
            }
        }
        if self.device.is_abandoned() {
            return;
        }
        // SAFETY: nothing of this lane is in flight; null handles are ignored. Freeing the pool frees
        // its command buffers.
        unsafe {
            self.device.api.destroy_semaphore(self.timeline, None);
            self.device.api.destroy_command_pool(self.pool, None);
        }
    }
}

/// The way to a copy engine.
pub(in crate::backend::vulkan) struct CopyLane {
    slots: Slots,
    regions: Vec<vk::BufferCopy>,
}

impl CopyLane {
    pub(in crate::backend::vulkan) fn new(
        device: &Arc<Device>,
        queue: &Arc<EngineQueue>,
        slots: usize,
        parts: usize,
    ) -> Result<CopyLane> {
        Ok(CopyLane {
            slots: Slots::new(device, queue, slots, parts)?,
            regions: Vec::with_capacity(parts),
        })
    }

    /// Starts a batch. False if every slot is taken: try again
    /// after a batch has ended.
    pub(in crate::backend::vulkan) fn start(
        &mut self,
        parts: &[Part],
        batch: Batch,
    ) -> std::result::Result<bool, i32> {
        let Some((index, command)) = self.slots.take() else {
            return Ok(false);
        };
        if let Err(result) = self.record(command, parts) {
            self.slots.device.note(result);
            self.slots.give_back(index);
            return Err(libc::EIO);
        }
        self.slots.send(index, parts, batch);
        Ok(true)
    }

    fn record(
        &mut self,
        command: vk::CommandBuffer,
        parts: &[Part],
    ) -> std::result::Result<(), vk::Result> {
        let api = &self.slots.device.api;
        let begin = vk::CommandBufferBeginInfo::default()
            .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        // SAFETY: the command buffer's slot is free, so it is not in flight; its pool is this thread's;
        // beginning it resets it.
        unsafe { api.begin_command_buffer(command, &begin)? };
        for part in parts {
            let host = part.host;
            let (len, chunk) = (u64::from(part.len), part.chunk_offset);
            let region = |src, dst| {
                [vk::BufferCopy::default()
                    .src_offset(src)
                    .dst_offset(dst)
                    .size(len)]
            };
            self.regions.clear();
            // SAFETY: the ranges are inside their buffers, which live as long as the backend; the
            // command buffer is being recorded.
            unsafe {
                match part.direction {
                    Direction::Read => {
                        self.regions.extend(region(chunk, part.host_offset));
                        api.cmd_copy_buffer(command, part.chunk, host, &self.regions);
                    }
                    Direction::Write => {
                        self.regions.extend(region(part.host_offset, chunk));
                        api.cmd_copy_buffer(command, host, part.chunk, &self.regions);
                    }
                    Direction::Zero => api.cmd_fill_buffer(command, part.chunk, chunk, len, 0),
                }
            }
        }
        // What the CPU and other engines do next sees the bytes; no later copy of this engine has to
        // wait for them, because whoever needs them waits for the end of this one.
        let barrier = vk::MemoryBarrier::default()
            .src_access_mask(vk::AccessFlags::TRANSFER_WRITE)
            .dst_access_mask(vk::AccessFlags::HOST_READ | vk::AccessFlags::HOST_WRITE);
        // SAFETY: as above.
        unsafe {
            api.cmd_pipeline_barrier(
                command,
                vk::PipelineStageFlags::TRANSFER,
                vk::PipelineStageFlags::HOST,
                vk::DependencyFlags::empty(),
                &[barrier],
                &[],
                &[],
            );
            api.end_command_buffer(command)
        }
    }

    pub(in crate::backend::vulkan) fn flying(&self) -> usize {
        self.slots.flying()
    }

    pub(in crate::backend::vulkan) fn backlog(&self) -> f64 {
        self.slots.backlog()
    }

    pub(in crate::backend::vulkan) fn next_end(&self) -> Option<(vk::Semaphore, u64)> {
        self.slots.next_end()
    }

    pub(in crate::backend::vulkan) fn unfinished_at(&mut self, at: Instant) {
        self.slots.unfinished_at(at);
    }

    pub(in crate::backend::vulkan) fn collect(&mut self, each: impl FnMut(&Ended, &[Part])) {
        self.slots.collect(each);
    }
}
