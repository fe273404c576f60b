//! What wakes a queue thread that sleeps while its copies are in flight.
//!
//! A queue thread sleeps in `io_uring_enter` and is woken by completions alone; one of them is that
//! of a poll on the eventfd here. The driver has no descriptor to give for the end of a copy, so a
//! thread for each queue sleeps in `vkWaitSemaphores` in its place. It does so only when asked, for
//! as long as the copy takes: while nothing is in flight, or the queue thread polls, it sleeps on a
//! futex and nothing wakes it.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use ash::vk;
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::backend::vulkan::device::Device;
use crate::error::{Error, Result};

/// Engines a queue thread has work on.
const ENGINES: usize = 2;
/// One wait is so long at most: then the queue thread looks, and this one can be told to end.
const WAIT_NS: u64 = 100_000_000;
const STACK_BYTES: usize = 256 << 10;

/// The waker of one queue thread.
pub(in crate::backend::vulkan) struct Waker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    device: Arc<Device>,
    event: EventFd,
    /// Semaphore handles and the values to wait for; handle 0 is none.
    wanted: [(AtomicU64, AtomicU64); ENGINES],
    armed: AtomicBool,
    stop: AtomicBool,
}

impl Waker {
    pub(in crate::backend::vulkan) fn new(device: &Arc<Device>) -> Result<Waker> {
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| Error::os("eventfd for a queue", errno))?;
        let shared = Arc::new(Shared {
            device: Arc::clone(device),
            event,
            wanted: Default::default(),
            armed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let thread = std::thread::Builder::new()
            .name("ublk-waker".to_owned())
            .stack_size(STACK_BYTES)
            .spawn({
                let shared = Arc::clone(&shared);
                move || shared.run()
            })
            .map_err(|error| Error::os("cannot start the thread that wakes a queue", error))?;
        Ok(Waker {
            shared,
            thread: Some(thread),
        })
    }

    pub(in crate::backend::vulkan) fn descriptor(&self) -> RawFd {
        self.shared.event.as_fd().as_raw_fd()
    }

    /// Asks to be woken when one of `ends` is reached. There is one answer to it, or to this and a
    /// later call together; the asker looks at [`Waker::is_armed`].
    pub(in crate::backend::vulkan) fn arm(&self, ends: [Option<(vk::Semaphore, u64)>; ENGINES]) {
        use vk::Handle;
        for (place, end) in self.shared.wanted.iter().zip(ends) {
            // Each place has one semaphore for ever, and its values grow: a mixture of an old and a new
            // pair is one that was or will be reached.
            let (semaphore, value) = end.map_or((0, 0), |(at, value)| (at.as_raw(), value));
            place.1.store(value, Ordering::Relaxed);
            place.0.store(semaphore, Ordering::Release);
        }
        self.shared.armed.store(true, Ordering::SeqCst);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    /// Whether the answer to the last [`Waker::arm`] is still to come.
    pub(in crate::backend::vulkan) fn is_armed(&self) -> bool {
        self.shared.armed.load(Ordering::SeqCst)
    }
}

impl Drop for Waker {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It ends within one wait; a panic in it has been reported.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        while !self.stop.load(Ordering::SeqCst) {
            if !self.armed.load(Ordering::SeqCst) {
                std::thread::park();
                continue;
            }
            if !self.wait() {
                continue;
            }
            self.armed.store(false, Ordering::SeqCst);
            // A full counter wakes as well; nothing else can fail here.
            let _ = self.event.write(1);
        }
    }

    /// Whether one of the ends was reached, or the GPU can tell nothing any more.
    fn wait(&self) -> bool {
        use vk::Handle;
        let mut semaphores = [vk::Semaphore::null(); ENGINES];
        let mut values = [0; ENGINES];
        let mut count = 0;
        let wanted = self.wanted.iter().map(|(semaphore, value)| {
            (
                semaphore.load(Ordering::Acquire),
                value.load(Ordering::Relaxed),
            )
        });
        let places = semaphores.iter_mut().zip(&mut values);
        for ((semaphore, value), end) in places.zip(wanted.filter(|(semaphore, _)| *semaphore != 0))
        {
            (*semaphore, *value) = (vk::Semaphore::from_raw(end.0), end.1);
            count += 1;
        }
        if count == 0 || self.device.is_lost() {
            return true;
        }
        let info = vk::SemaphoreWaitInfo::default()
            .flags(vk::SemaphoreWaitFlags::ANY)
            .semaphores(semaphores.get(..count).unwrap_or(&semaphores))
            .values(values.get(..count).unwrap_or(&values));
        // SAFETY: the semaphores belong to lanes of the queue that owns this waker, which is dropped
        // (and its thread joined) before them.
        match unsafe { self.device.api.wait_semaphores(&info, WAIT_NS) } {
            // After a while without an end the queue thread looks for itself: a batch that was refused
            // never reaches its value.
            Ok(()) | Err(vk::Result::TIMEOUT) => true,
            Err(result) => {
                self.device.note(result);
                true
            }
        }
    }
}
