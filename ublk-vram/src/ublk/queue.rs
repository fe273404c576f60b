//! One thread for each queue: takes every ready request, lets the engine work, gives every result
//! back with one system call.
//!
//! ```text
//!   io_uring_enter(commits and fetches, wait for 1)      <- the only place where it sleeps
//!     every completion: a tag that is ready, or the engine's wake-up
//!   engine.submit(each ready request)
//!   engine.advance()                                     copies complete, slices of zeroes go on
//!   zero copy: one READ_FIXED or WRITE_FIXED entry for each copy that the kernel is to make
//!   one COMMIT_AND_FETCH entry for each finished tag
//! ```
//!
//! Only a completion wakes the thread. While the engine has work that nobody will announce, the
//! thread does not sleep but looks again. Between the first fetch and the end it does not allocate,
//! log or take a lock.
//!
//! libublk's queue gives the ring and the mapped descriptors. The commands are built here: libublk
//! would keep a second account of every tag, and its fetch takes only buffers it allocated itself.

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use io_uring::{IoUring, opcode, squeue, types};
use libublk::io::{UblkDev, UblkQueue, ublk_init_task_ring};
use libublk::{UblkError, sys};

use super::device::Shape;
use super::release::Release;
use crate::backend::{Direction, QueueId, registered};
use crate::engine::{Engine, Finished, Op, Request, StatsTable};
use crate::error::{Error, ErrorKind, Result};
use crate::safety;
use crate::session::{TagBoard, TagMark};
use crate::store::shared::SharedMapping;

/// Marks an entry as ours: libublk counts the others (`UblkUringData::Target`).
pub(super) const OURS: u64 = 1 << 63;
/// The entry watches the engine's completion descriptor.
const WAKE: u64 = 1 << 32;
/// The entry watches for the loss of the device's memory.
const LOSS: u64 = 1 << 33;
/// The entry is a copy that the kernel makes; its id is in the lower half.
const TRANSFER: u64 = 1 << 34;
/// The entry waits for the end of this thread.
pub(super) const RELEASE: u64 = 1 << 35;
/// /dev/ublkcN in the ring's table of files; libublk puts it there.
pub(super) const CDEV: types::Fixed = types::Fixed(0);
/// So many bytes of copies that the kernel makes go with one call: it looks neither at signals nor at the
/// scheduler until all of them are done (io_submit_sqes in io_uring/io_uring.c), and a read through a bus
/// takes some 2 ms for each megabyte.
const TURN_BYTES: u32 = 4 << 20;
/// Bytes of a queue thread's stack; all of it is locked memory.
const STACK_BYTES: usize = 256 << 10;
/// Ring entries beside one for each tag: the wake-up, room for its renewal, and the watch for a loss.
const SPARE_ENTRIES: u32 = 4;
/// The word of an entry that is `addr` (struct io_uring_sqe in include/uapi/linux/io_uring.h).
const ADDR_WORD: usize = 2;
/// UBLK_IO_F_SWAP in `op_flags` (include/uapi/linux/ublk_cmd.h): a write that is swap.
const OP_FLAG_SWAP: u32 = 1 << 16;
const SECTOR: u64 = 512;
/// UBLK_IO_RES_OK as a completion carries it.
const RES_OK: i32 = sys::UBLK_IO_RES_OK as i32;

/// Where the bytes of requests are while the server has them.
#[derive(Clone)]
pub enum Buffers {
    /// In buffers of the server's.
    Arena(Arc<SharedMapping>),
    /// In their own pages, which the kernel copies to and from this file: the region that the device's
    /// memory is (zero copy).
    Region(Arc<File>),
}

impl Buffers {
    /// Where the request of a tag is.
    fn of(&self, shape: &Shape, queue: QueueId, tag: u16) -> *mut u8 {
        match self {
            Buffers::Arena(arena) => arena
                .as_ptr()
                .wrapping_add(shape.buffer_offset(queue.0, tag)),
            Buffers::Region(_) => registered::address_of(tag, shape.max_io),
        }
    }
}

/// What a queue thread works with.
pub struct QueueSetup {
    /// Its number.
    pub queue: QueueId,
    /// How queues and buffers are cut.
    pub shape: Shape,
    /// The I/O buffers.
    pub buffers: Buffers,
    /// The requests.
    pub engine: Engine,
    /// The counters.
    pub stats: Arc<StatsTable>,
    /// The marks of requests in hand.
    pub tags: Arc<TagBoard>,
    /// Lets go of the device when this process is killed, where that is right.
    pub release: Option<Arc<Release>>,
    /// Called in the middle of the fetches, for the lab.
    pub half_fetched: Option<Box<dyn FnOnce() + Send>>,
}

/// A queue thread that is ready and has no device yet: its ring is made and its stack touched.
pub struct QueueSeat {
    thread: JoinHandle<()>,
    devices: SyncSender<Arc<UblkDev>>,
    warm: Receiver<()>,
    ready: Receiver<()>,
}

impl QueueSeat {
    /// Waits until the thread is warm (true) or has ended (false, and `on_end` tells why).
    pub fn wait_warm(&self) -> bool {
        self.warm.recv().is_ok()
    }

    /// Gives the thread its device: it begins to fetch.
    pub fn start(self, device: Arc<UblkDev>) -> QueueHandle {
        // One that has ended is noticed by `wait_ready`.
        let _ = self.devices.send(device);
        QueueHandle {
            thread: self.thread,
            ready: self.ready,
        }
    }
}

/// A running queue thread.
pub struct QueueHandle {
    thread: JoinHandle<()>,
    ready: Receiver<()>,
}

impl QueueHandle {
    /// Waits until the thread has sent its fetches (true) or ended before it could (false, and
    /// `on_end` tells why).
    pub fn wait_ready(self) -> (JoinHandle<()>, bool) {
        let is_ready = self.ready.recv().is_ok();
        (self.thread, is_ready)
    }
}

/// Starts the thread of a queue. It ends when the driver has aborted every tag (the disk is gone, or
/// is to be served by another process), or when its seat is dropped. `on_end` is called on it last of
/// all, with an error if it ended (or panicked) in any other way: requests of this queue are then
/// never answered while the process lives.
///
/// # Errors
/// If the thread cannot be made.
pub fn seat_queue(
    setup: QueueSetup,
    on_end: impl FnOnce(Result<()>) + Send + 'static,
) -> Result<QueueSeat> {
    let (announce, ready) = sync_channel(1);
    let (heat, warm) = sync_channel(1);
    let (devices, device) = sync_channel(1);
    let queue = setup.queue;
    let thread = std::thread::Builder::new()
        .name(format!("ublk-queue-{}", queue.0))
        .stack_size(STACK_BYTES)
        .spawn(move || {
            let release = setup.release.clone();
            // It keeps `release` to its end.
            let serve = move || {
                let tid = libublk::ctrl::UblkCtrl::init_queue_thread();
                make_ring(queue, setup.shape, release.as_deref())?;
                safety::prefault_stack(STACK_BYTES);
                // Nobody waiting any more is no reason to stop, here and below.
                let _ = heat.send(());
                let Ok(device) = device.recv() else {
                    return Ok(());
                };
                let device: Arc<UblkDev> = device;
                let mut urgent = Some(safety::Urgent::begin());
                setup.stats.of(queue).set_tid(tid);
                let mut server = Server::new(&device, setup)?;
                let outcome = server.run(|| {
                    urgent = None;
                    let _ = announce.send(());
                });
                if outcome.is_err() {
                    // Its end would take the table of files out of the ring, which up to Linux 6.12 waits
                    // for the fetches (io_rsrc_ref_quiesce), and nobody would hear of the error.
                    std::mem::forget(server);
                }
                outcome
            };
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(serve));
            on_end(outcome.unwrap_or_else(|_| {
                Err(Error::new(
                    ErrorKind::Io,
                    format!("the thread of queue {} panicked", queue.0),
                ))
            }));
        })
        .map_err(|error| {
            Error::os(
                format!("cannot start the thread of queue {}", queue.0),
                error,
            )
        })?;
    Ok(QueueSeat {
        thread,
        devices,
        warm,
        ready,
    })
}

/// Makes the calling thread's ring, which libublk keeps in the thread.
fn make_ring(queue: QueueId, shape: Shape, release: Option<&Release>) -> Result<()> {
    let transfers = match shape.zero_copy {
        true => Engine::copies(shape.depth) as u32,
        false => 0,
    };
    let entries = u32::from(shape.depth) + SPARE_ENTRIES + transfers + Release::entries(&shape);
    ublk_init_task_ring(|cell| {
        let mut ring: IoUring = IoUring::builder()
            // Twice the entries: the completion queue never overflows into allocated memory.
            .setup_cqsize(entries.next_power_of_two() * 2)
            .setup_coop_taskrun()
            .setup_single_issuer()
            .build(entries)
            .map_err(UblkError::IOError)?;
        if shape.zero_copy {
            // The driver puts the request of a tag into the slot of its number.
            ring.submitter()
                .register_buffers_sparse(u32::from(shape.depth))
                .map_err(UblkError::IOError)?;
        }
        if let Some(release) = release {
            release
                .arm(&mut ring, queue, &shape)
                .map_err(UblkError::IOError)?;
        }
        // Last: what waits for the end keeps what it has.
        let commands = u32::from(shape.depth) + SPARE_ENTRIES;
        warm(&mut ring, commands).map_err(UblkError::IOError)?;
        cell.set(ring.into())
            .map_err(|_| UblkError::OtherError(-libc::EEXIST))
    })
    .map_err(|error| set_up_failed(queue, &error))
}

/// Has the ring allocate now what as many commands take as will be in flight: it keeps that for the next ones
/// (`submit_state.free_list` and `cmd_cache` in io_uring, the latter for 128 commands). The fetches of a
/// takeover are sent when there may be no memory.
fn warm(ring: &mut IoUring, commands: u32) -> std::io::Result<()> {
    // It takes any command, and does nothing (uring_cmd_null in drivers/char/mem.c).
    let null = File::options().read(true).write(true).open("/dev/null")?;
    let null = types::Fd(null.as_raw_fd());
    let entry = opcode::UringCmd16::new(null, 0).build();
    // All of a chain is allocated before the first of it runs.
    push_chain(ring, (1..commands).map(|_| entry.clone()), entry.clone())?;
    let mut ended = 0;
    while ended < commands as usize {
        match ring.submit_and_wait(1) {
            Err(error) if error.kind() != std::io::ErrorKind::Interrupted => return Err(error),
            _ => ended += ring.completion().count(),
        }
    }
    Ok(())
}

/// Puts entries into the ring of which each runs when the one before it has ended, however that went. None of
/// them may name memory. To be submitted in one call: a part of the chain, sent alone, would run by itself.
pub(super) fn push_chain(
    ring: &mut IoUring,
    links: impl Iterator<Item = squeue::Entry>,
    last: squeue::Entry,
) -> std::io::Result<()> {
    let links = links.map(|entry| entry.flags(squeue::Flags::IO_HARDLINK));
    for entry in links.chain([last]) {
        // SAFETY: it names no memory.
        unsafe { ring.submission().push(&entry) }.map_err(std::io::Error::other)?;
    }
    Ok(())
}

fn set_up_failed(queue: QueueId, error: &UblkError) -> Error {
    Error::new(
        ErrorKind::Io,
        format!("cannot set up queue {}: {error}", queue.0),
    )
}

/// A command of the driver's for one tag.
pub(super) fn io_command(
    op: u32,
    queue: QueueId,
    tag: u16,
    result: i32,
    address: u64,
) -> squeue::Entry {
    let command = sys::ublksrv_io_cmd {
        q_id: queue.0,
        tag,
        result,
        addr: address,
    };
    // SAFETY: `ublksrv_io_cmd` is 16 bytes of plain data without padding (uapi struct).
    let bytes = unsafe { std::mem::transmute::<sys::ublksrv_io_cmd, [u8; 16]>(command) };
    opcode::UringCmd16::new(CDEV, op).cmd(bytes).build()
}

/// A fetch that has the driver register the request as buffer `tag` of this ring (`struct
/// ublk_auto_buf_reg` in the entry's `addr`). Where the kernel has no memory for that, the request is to
/// come all the same, marked, and not to fail unseen.
fn with_registration(mut entry: squeue::Entry, tag: u16) -> squeue::Entry {
    let registration = sys::ublk_auto_buf_reg {
        index: tag,
        flags: sys::UBLK_AUTO_BUF_REG_FALLBACK as u8,
        ..Default::default()
    };
    let word = sys::ublk_auto_buf_reg_to_sqe_addr(&registration);
    // SAFETY: an entry is a `struct io_uring_sqe` (`repr(C)`, 64 bytes, aligned to 8), whose third word
    // is `addr`; every value is a valid one.
    unsafe {
        std::ptr::from_mut(&mut entry)
            .cast::<u64>()
            .add(ADDR_WORD)
            .write(word);
    }
    entry
}

struct Server<'a> {
    queue: UblkQueue<'a>,
    id: QueueId,
    shape: Shape,
    buffers: Buffers,
    engine: Engine,
    stats: Arc<StatsTable>,
    tags: Arc<TagBoard>,
    /// Requests that the last worker had in hand and that have not come again yet.
    left: Vec<TagMark>,
    half_fetched: Option<Box<dyn FnOnce() + Send>>,
    ready: Vec<u16>,
    finished: Vec<Finished>,
    /// Tags that the driver has taken back.
    aborted: u16,
    /// A command that the driver refused: its tag and negative errno.
    refused: Option<(u16, i32)>,
    wake_armed: bool,
}

impl<'a> Server<'a> {
    fn new(device: &'a UblkDev, setup: QueueSetup) -> Result<Server<'a>> {
        let depth = usize::from(setup.shape.depth);
        let mut left = Vec::with_capacity(depth);
        setup.tags.take_left(setup.queue, &mut left);
        let queue = UblkQueue::new(setup.queue.0, device)
            .map_err(|error| set_up_failed(setup.queue, &error))?;
        Ok(Server {
            queue,
            id: setup.queue,
            shape: setup.shape,
            buffers: setup.buffers,
            engine: setup.engine,
            stats: setup.stats,
            tags: setup.tags,
            left,
            half_fetched: setup.half_fetched,
            ready: Vec::with_capacity(depth),
            finished: Vec::with_capacity(depth),
            aborted: 0,
            refused: None,
            wake_armed: false,
        })
    }

    fn run(&mut self, announce: impl FnOnce()) -> Result<()> {
        for tag in 0..self.shape.depth {
            if tag == self.shape.depth / 2
                && let Some(half_fetched) = self.half_fetched.take()
            {
                self.enter(0)?;
                half_fetched();
            }
            self.command(sys::UBLK_U_IO_FETCH_REQ, tag, -1)?;
        }
        self.arm_wake()?;
        if let Some(fd) = self.engine.loss_fd() {
            self.watch(fd, LOSS)?;
        }
        self.enter(0)?;
        if self.aborted > 0 {
            return Err(Error::new(
                ErrorKind::Io,
                format!("queue {}: the driver takes no fetches", self.id.0),
            ));
        }
        announce();
        while self.aborted < self.shape.depth {
            let wait = usize::from(!self.engine.has_work() && self.ready.is_empty());
            self.enter(wait)?;
            self.take_ready();
            self.clear_wake();
            self.engine.advance(&mut self.finished);
            self.transfer()?;
            self.commit()?;
            self.arm_wake()?;
        }
        if self.engine.has_abandoned_copies() {
            // An engine may still write there.
            std::mem::forget(self.buffers.clone());
        }
        Ok(())
    }

    /// Submits what is queued, waits for `wait` completions, and sorts them.
    fn enter(&mut self, wait: usize) -> Result<()> {
        let (ready, aborted) = (&mut self.ready, &mut self.aborted);
        let (refused, armed) = (&mut self.refused, &mut self.wake_armed);
        let engine = &mut self.engine;
        let outcome = self.queue.flush_and_wake_io_tasks(
            |user_data, completion, _last| {
                let tag = (user_data & u64::from(u16::MAX)) as u16;
                match completion.result() {
                    _ if user_data & WAKE != 0 => *armed = false,
                    // Once and for good: the engine sees it for itself, and the end is the end.
                    _ if user_data & (LOSS | RELEASE) != 0 => {}
                    result if user_data & TRANSFER != 0 => {
                        engine.transferred(user_data as u32, result);
                    }
                    RES_OK => ready.push(tag),
                    sys::UBLK_IO_RES_ABORT => *aborted = aborted.saturating_add(1),
                    errno => *refused = Some((tag, errno)),
                }
            },
            wait,
        );
        if let Some((tag, errno)) = self.refused {
            // Its request would wait for ever: privileged ublk requests have no time limit.
            let cause = std::io::Error::from_raw_os_error(-errno);
            return Err(Error::new(
                ErrorKind::Io,
                format!("queue {}: the driver refuses tag {tag}: {cause}", self.id.0),
            ));
        }
        match outcome {
            Ok(_) | Err(UblkError::UringTimeout) => Ok(()),
            // EAGAIN and EBUSY are the kernel short of memory for a moment: what was queued is still
            // in the ring, and is sent by the next call.
            Err(UblkError::IOError(error))
                if [libc::EINTR, libc::EAGAIN, libc::EBUSY]
                    .contains(&error.raw_os_error().unwrap_or(0)) =>
            {
                Ok(())
            }
            Err(error) => Err(Error::new(
                ErrorKind::Io,
                format!("queue {}: io_uring_enter: {error}", self.id.0),
            )),
        }
    }

    fn take_ready(&mut self) {
        if self.ready.is_empty() {
            return;
        }
        self.stats.of(self.id).batch(self.ready.len() as u64);
        for tag in self.ready.drain(..) {
            let descriptor = self.queue.get_iod(tag);
            let op = match descriptor.op_flags & 0xff {
                sys::UBLK_IO_OP_READ => Op::Read,
                sys::UBLK_IO_OP_WRITE => Op::Write,
                sys::UBLK_IO_OP_FLUSH => Op::Flush,
                sys::UBLK_IO_OP_DISCARD | sys::UBLK_IO_OP_WRITE_ZEROES => Op::Zero,
                _ => Op::Refuse(libc::EOPNOTSUPP),
            };
            let len = u64::from(descriptor.nr_sectors) * SECTOR;
            let fits = len <= u64::from(self.shape.max_io) || !matches!(op, Op::Read | Op::Write);
            // The kernel had no memory for the entry of its buffer table.
            let is_missing = descriptor.op_flags & sys::UBLK_IO_F_NEED_REG_BUF != 0;
            let request = Request {
                tag,
                op: match (fits, is_missing) {
                    (true, false) => op,
                    (true, true) => Op::Refuse(libc::ENOMEM),
                    (false, _) => Op::Refuse(libc::EIO),
                },
                swap: descriptor.op_flags & OP_FLAG_SWAP != 0,
                offset: descriptor.start_sector.saturating_mul(SECTOR),
                len,
                memory: self.buffers.of(&self.shape, self.id, tag),
            };
            let mark = TagMark::new(
                descriptor.op_flags,
                descriptor.nr_sectors,
                descriptor.start_sector,
            );
            if let Some(at) = self.left.iter().position(|left| *left == mark) {
                self.left.swap_remove(at);
                self.stats.of(self.id).reissued();
            }
            self.tags.set(self.id, tag, mark);
            // SAFETY: the tag's buffer is inside the arena, which `Shape` cut for every queue and tag; it
            // has `max_io` bytes and is its alone; the kernel does not touch it between delivering the
            // request and the commit. With zero copy the address stands for the request, and the engine
            // was made for that. A delivered tag is not in flight in the engine, because it was
            // committed before.
            unsafe { self.engine.submit(request) };
        }
    }

    fn commit(&mut self) -> Result<()> {
        // Taken out so that `command` can borrow; the memory stays the same.
        let mut finished = std::mem::take(&mut self.finished);
        let mut outcome = Ok(());
        for done in finished.drain(..) {
            self.tags.clear(self.id, done.tag);
            outcome = outcome.and(self.command(
                sys::UBLK_U_IO_COMMIT_AND_FETCH_REQ,
                done.tag,
                done.result,
            ));
        }
        self.finished = finished;
        outcome
    }

    /// Puts copies that the kernel is to make into the ring, not too many at once. It makes them when the
    /// ring is entered, on this thread: the region's file never has to wait (docs/kmod.md), and their ends
    /// are there when the call returns.
    fn transfer(&mut self) -> Result<()> {
        let Buffers::Region(file) = &self.buffers else {
            return Ok(());
        };
        let fd = types::Fd(file.as_raw_fd());
        let mut bytes = 0;
        while bytes < TURN_BYTES
            && let Some(transfer) = self.engine.next_transfer()
        {
            bytes += transfer.len;
            // The address in a buffer that the driver has registered counts from 0
            // (io_buffer_register_bvec in io_uring/rsrc.c).
            let at = std::ptr::without_provenance_mut::<u8>(transfer.skip as usize);
            let entry = match transfer.direction {
                Direction::Read => opcode::ReadFixed::new(fd, at, transfer.len, transfer.tag)
                    .offset(transfer.offset)
                    .build(),
                Direction::Write | Direction::Zero => {
                    opcode::WriteFixed::new(fd, at, transfer.len, transfer.tag)
                        .offset(transfer.offset)
                        .build()
                }
            };
            self.push(entry.user_data(OURS | TRANSFER | u64::from(transfer.id)))?;
        }
        Ok(())
    }

    fn command(&self, op: u32, tag: u16, result: i32) -> Result<()> {
        let address = match &self.buffers {
            Buffers::Arena(_) => self.buffers.of(&self.shape, self.id, tag) as u64,
            // The driver refuses one.
            Buffers::Region(_) => 0,
        };
        let entry = io_command(op, self.id, tag, result, address).user_data(OURS | u64::from(tag));
        match &self.buffers {
            Buffers::Arena(_) => self.push(entry),
            Buffers::Region(_) => self.push(with_registration(entry, tag)),
        }
    }

    /// Takes the event that fired out of the completion descriptor. This comes before the engine
    /// looks for completions: an event that arrives after is still there when the watch is renewed.
    fn clear_wake(&self) {
        if let Some(fd) = self.engine.completion_fd().filter(|_| !self.wake_armed) {
            let mut count = 0u64;
            // SAFETY: eight bytes of our own stack; the descriptor (an eventfd or timerfd) is
            // non-blocking, so this never waits.
            unsafe { libc::read(fd, std::ptr::from_mut(&mut count).cast(), size_of::<u64>()) };
        }
    }

    /// Watches the engine's completion descriptor, if it has one and it is not watched already.
    fn arm_wake(&mut self) -> Result<()> {
        let Some(fd) = self.engine.completion_fd().filter(|_| !self.wake_armed) else {
            return Ok(());
        };
        self.wake_armed = true;
        self.watch(fd, WAKE)
    }

    /// Has the ring tell, once, when a descriptor is readable.
    fn watch(&self, fd: RawFd, what: u64) -> Result<()> {
        let entry = opcode::PollAdd::new(types::Fd(fd), libc::POLLIN as u32)
            .build()
            .user_data(OURS | what);
        self.push(entry)
    }

    fn push(&self, entry: squeue::Entry) -> Result<()> {
        self.queue.ublk_submit_sqe_sync(entry).map_err(|error| {
            Error::new(
                ErrorKind::Io,
                format!("queue {}: no room in its ring: {error}", self.id.0),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_warm_and_empty() {
        let mut ring: IoUring = IoUring::builder().setup_coop_taskrun().build(68).unwrap();
        warm(&mut ring, 64).unwrap();
        assert!(ring.completion().is_empty() && ring.submission().is_empty());
    }
}
