//! Zero copy: the bytes of a request never come into this process. The kernel copies them between the
//! request's own pages and the region of the kernel module that the device's memory is.
//!
//! ```text
//!   submit(copy)      -> a transfer: bytes of the region, and a part of the request with that tag
//!   next_transfer()   -> the queue's ring (READ_FIXED, WRITE_FIXED): the kernel copies
//!   transferred()     -> a completion, for poll()
//! ```
//!
//! The driver registers the pages of the request with tag N as buffer N of its queue's ring before it
//! hands it over (UBLK_F_AUTO_BUF_REG). This process has no address of them. [`address_of`] gives each
//! byte one that stands for it and is never mapped, so that requests are cut into copies in one way,
//! whoever copies.
//!
//! Whatever has a real address, or none (canaries, zeroes), goes through the CPU's mapping as ever. So
//! a canary is read by the same bus as the data, and after it: the ring copies when it is entered, on
//! the queue's own thread.

use std::collections::VecDeque;

use super::layer::Layer;
use super::{Backend, BackendQueue, ChunkMemory, Completion, Copy, Direction, GONE};
use super::{Mapping, QueueId};
use crate::device::PathCounters;
use crate::error::Result;
use crate::store::Layout;

/// Where addresses begin that stand for bytes of requests. None of them can be mapped: they are not
/// canonical on x86-64 (bits 47 to 63 differ), so an access by mistake is a fault and no wrong data.
const BASE: usize = 1 << 62;

/// The address that stands for the first byte of a tag's request, where none is larger than `max_io`.
pub fn address_of(tag: u16, max_io: u32) -> *mut u8 {
    let offset = usize::from(tag) * max_io as usize;
    std::ptr::without_provenance_mut(BASE + offset)
}

/// A copy that the kernel is to make.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Transfer {
    /// Comes back in [`BackendQueue::transferred`].
    pub id: u32,
    /// From the region to the request ([`Direction::Read`]), or the other way.
    pub direction: Direction,
    /// The tag of the request, and the number of its buffer.
    pub tag: u16,
    /// First byte in the request.
    pub skip: u32,
    /// Bytes.
    pub len: u32,
    /// First byte in the region.
    pub offset: u64,
}

/// A backend whose memory is a region of the kernel module, which the kernel copies to and from.
pub struct RegisteredBackend {
    inner: Box<dyn Backend>,
    layout: Layout,
    max_io: u32,
}

impl RegisteredBackend {
    /// Over `inner`, whose chunks lie one after the other from the region's first byte.
    pub fn new(inner: Box<dyn Backend>, layout: Layout, max_io: u32) -> RegisteredBackend {
        RegisteredBackend {
            inner,
            layout,
            max_io,
        }
    }
}

impl Layer for RegisteredBackend {
    const NAME: &'static str = "zero copy";

    fn inner(&self) -> &dyn Backend {
        &*self.inner
    }

    fn open_layered(
        &self,
        queue: QueueId,
        copies: usize,
        memory: &[Mapping],
    ) -> Result<Box<dyn BackendQueue>> {
        let inner = self.inner.open_queue(queue, copies, memory)?;
        if queue.is_control() {
            return Ok(inner);
        }
        Ok(Box::new(RegisteredQueue {
            inner,
            layout: self.layout,
            max_io: self.max_io,
            wanted: VecDeque::with_capacity(copies),
            in_kernel: 0,
            done: VecDeque::with_capacity(copies),
        }))
    }
}

/// A queue whose copies of requests are the kernel's.
struct RegisteredQueue {
    inner: Box<dyn BackendQueue>,
    layout: Layout,
    max_io: u32,
    wanted: VecDeque<Transfer>,
    in_kernel: usize,
    done: VecDeque<Completion>,
}

impl RegisteredQueue {
    /// The transfer of a copy whose memory end is a part of a request.
    fn transfer(&self, copy: &Copy) -> Option<Transfer> {
        let at = copy.memory.addr().checked_sub(BASE)?;
        let max_io = self.max_io as usize;
        Some(Transfer {
            id: copy.id,
            direction: copy.direction,
            tag: u16::try_from(at / max_io).ok()?,
            skip: u32::try_from(at % max_io).ok()?,
            len: copy.len,
            offset: self.layout.chunk_start(copy.chunk) + copy.offset,
        })
    }
}

impl BackendQueue for RegisteredQueue {
    unsafe fn submit(&mut self, copy: &Copy, chunk: &ChunkMemory) {
        match self.transfer(copy) {
            Some(transfer) => self.wanted.push_back(transfer),
            // SAFETY: the caller's promise is passed on; an address that stands for a byte of a request
            // does not get here.
            None => unsafe { self.inner.submit(copy, chunk) },
        }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.inner.poll(done);
        while done.len() < done.capacity() {
            match self.done.pop_front() {
                Some(completion) => done.push(completion),
                None => break,
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.wanted.len() + self.in_kernel + self.done.len()
    }

    fn should_poll(&self) -> bool {
        self.inner.should_poll()
    }

    fn path_counters(&self) -> Option<PathCounters> {
        self.inner.path_counters()
    }

    fn next_transfer(&mut self) -> Option<Transfer> {
        let transfer = self.wanted.pop_front()?;
        self.in_kernel += 1;
        Some(transfer)
    }

    fn transferred(&mut self, id: u32, result: i32) {
        self.in_kernel = self.in_kernel.saturating_sub(1);
        let result = match u32::try_from(result) {
            Ok(bytes) => Ok(bytes),
            // What the module answers when a region's memory is gone, and when the region itself is
            // (kmod/src/rw.rs).
            Err(_) if [-libc::EIO, -libc::ENOTCONN].contains(&result) => Err(GONE),
            Err(_) => Err(result.saturating_neg()),
        };
        self.done.push_back(Completion { id, result });
    }

    fn in_kernel(&self) -> usize {
        self.in_kernel
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::MemoryHandles;
    use crate::backend::host::HostMemory;

    const MAX_IO: u32 = 1 << 20;
    const QUEUE: QueueId = QueueId(0);

    struct Bench {
        backend: RegisteredBackend,
        queue: Box<dyn BackendQueue>,
        done: Vec<Completion>,
    }

    fn bench() -> Bench {
        let layout = Layout::new(4 << 20, Some(2 << 20)).unwrap();
        let memory = MemoryHandles::Host(HostMemory::create(&layout).unwrap());
        let backend = RegisteredBackend::new(memory.open(&layout).unwrap(), layout, MAX_IO);
        let queue = backend.open_queue(QUEUE, 8, &[]).unwrap();
        Bench {
            backend,
            queue,
            done: Vec::with_capacity(8),
        }
    }

    impl Bench {
        fn submit(&mut self, id: u32, direction: Direction, offset: u64, memory: *mut u8) {
            let copy = Copy {
                id,
                direction,
                chunk: 1,
                offset,
                len: 4096,
                memory,
                device_offset: 0,
            };
            let chunk = &self.backend.chunks()[1];
            // SAFETY: the memory stands for a request, or is as long as the copy, or there is none.
            unsafe { self.queue.submit(&copy, chunk) };
        }

        fn poll(&mut self) -> Vec<Completion> {
            self.done.clear();
            self.queue.poll(&mut self.done);
            self.done.clone()
        }
    }

    #[test]
    fn a_copy_of_a_request_is_a_transfer_of_the_region() {
        let mut bench = bench();
        let memory = address_of(3, MAX_IO).wrapping_add(8192);
        bench.submit(6, Direction::Write, 12288, memory);
        assert_eq!((bench.poll(), bench.queue.in_flight()), (Vec::new(), 1));
        let expected = Transfer {
            id: 6,
            direction: Direction::Write,
            tag: 3,
            skip: 8192,
            len: 4096,
            offset: (2 << 20) + 12288,
        };
        assert_eq!(bench.queue.next_transfer(), Some(expected));
        assert_eq!(bench.queue.next_transfer(), None, "each is handed out once");
        assert_eq!((bench.queue.in_kernel(), bench.queue.in_flight()), (1, 1));
        bench.queue.transferred(6, 4096);
        let result = Ok(4096);
        assert_eq!(bench.poll(), [Completion { id: 6, result }]);
        assert_eq!((bench.queue.in_kernel(), bench.queue.in_flight()), (0, 0));
    }

    #[test]
    fn zeroes_and_real_memory_are_the_cpus() {
        let mut bench = bench();
        let mut line = vec![7u8; 4096];
        bench.submit(0, Direction::Zero, 0, std::ptr::null_mut());
        bench.submit(1, Direction::Read, 0, line.as_mut_ptr());
        assert_eq!(bench.queue.next_transfer(), None);
        assert_eq!(bench.poll().len(), 2);
        assert!(line.iter().all(|byte| *byte == 0));
    }

    #[test]
    fn memory_that_is_gone_is_told_from_other_errors() {
        let mut bench = bench();
        let cases = [
            (-libc::EIO, Err(GONE)),
            (-libc::ENOTCONN, Err(GONE)),
            (-libc::EFAULT, Err(libc::EFAULT)),
            (1024, Ok(1024)),
        ];
        for (result, expected) in cases {
            bench.submit(2, Direction::Read, 0, address_of(0, MAX_IO));
            bench.queue.next_transfer().unwrap();
            bench.queue.transferred(2, result);
            assert_eq!(bench.poll()[0].result, expected, "{result}");
        }
    }

    #[test]
    fn controls_own_queues_copy_as_ever() {
        let bench = bench();
        let mut queue = bench
            .backend
            .open_queue(QueueId::control(0), 1, &[])
            .unwrap();
        assert_eq!(queue.next_transfer(), None);
        assert!(bench.backend.copy_path().ends_with("zero copy"));
    }
}
