//! One block request in flight: plain state, completed exactly once.

use crate::backend::{Copy, Direction};
use crate::store::checksum::Doubt;

/// Copies of one tag at the same time.
pub(super) const SLOTS: usize = 2;

/// What a request wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    /// Bytes from the device.
    Read,
    /// Bytes to the device.
    Write,
    /// Zeroes to the device: WRITE_ZEROES, and DISCARD (so that secrets go and checksums stay
    /// defined).
    Zero,
    /// Nothing to do: a completed write is in device memory, there is no volatile cache.
    Flush,
    /// What the device does not do: it ends with this errno.
    Refuse(i32),
}

/// A request as the kernel hands it over.
#[derive(Debug, Clone, Copy)]
pub struct Request {
    /// Its tag.
    pub tag: u16,
    /// What it wants.
    pub op: Op,
    /// The kernel marked it as swap (UBLK_IO_F_SWAP; only writes are ever marked).
    pub swap: bool,
    /// First byte in the device.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The tag's I/O buffer.
    pub memory: *mut u8,
}

/// The piece a copy moves, and how far it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub direction: Direction,
    pub chunk: u32,
    /// First byte in the chunk.
    pub offset: u64,
    /// First byte in the device.
    pub device_offset: u64,
    pub len: u32,
    /// The memory end of the whole piece; null for zeroes.
    pub memory: *mut u8,
    pub step: Step,
    /// Some of what was read looks like a bus that is gone, and has no checksum to say otherwise.
    pub is_suspicious: bool,
}

/// What the copy in flight is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// It moves the piece.
    Move,
    /// It reads a block again whose checksum did not fit.
    Again {
        /// The block, in the device.
        block: u64,
        doubt: Doubt,
        tries: u8,
    },
    /// It reads the chunk's canary.
    Canary { tries: u8 },
}

impl Slot {
    /// The copy of `len` bytes of the piece, from `skip` bytes into it.
    pub fn copy(&self, id: u32, skip: u32, len: u32) -> Copy {
        Copy {
            id,
            direction: self.direction,
            chunk: self.chunk,
            offset: self.offset + u64::from(skip),
            len,
            memory: if self.memory.is_null() {
                self.memory
            } else {
                self.memory.wrapping_add(skip as usize)
            },
            device_offset: self.device_offset + u64::from(skip),
        }
    }
}

/// A tag, idle when `request` is `None`.
#[derive(Default)]
pub(super) struct Tag {
    request: Option<Request>,
    /// Bytes for which a copy was started.
    started: u64,
    slots: [Option<Slot>; SLOTS],
    errno: i32,
}

// SAFETY: the raw address in `request` is valid on every thread by the promise of `Engine::submit`;
// the tag itself is only ever used by the thread that owns the engine.
unsafe impl Send for Tag {}

impl Tag {
    pub fn begin(&mut self, request: &Request) {
        debug_assert!(self.request.is_none(), "tag {} is in flight", request.tag);
        *self = Tag {
            request: Some(*request),
            ..Tag::default()
        };
    }

    /// Notes an error; the first one stays.
    pub fn fail(&mut self, errno: i32) {
        if self.errno == 0 {
            self.errno = errno;
        }
    }

    pub fn failed(&self) -> bool {
        self.errno != 0
    }

    pub fn is_zeroing(&self) -> bool {
        self.request.is_some_and(|request| request.op == Op::Zero)
    }

    /// Bytes for which no copy was started yet.
    pub fn left(&self) -> u64 {
        match self.request {
            Some(Request {
                op: Op::Read | Op::Write | Op::Zero,
                len,
                ..
            }) => len.saturating_sub(self.started),
            _ => 0,
        }
    }

    pub fn next_offset(&self) -> u64 {
        self.request
            .map_or(0, |request| request.offset + self.started)
    }

    pub fn next_memory(&self) -> *mut u8 {
        match self.request {
            Some(Request {
                op: Op::Read | Op::Write,
                memory,
                ..
            }) => memory.wrapping_add(usize::try_from(self.started).unwrap_or(usize::MAX)),
            _ => std::ptr::null_mut(),
        }
    }

    pub fn start(&mut self, slot: usize, piece: Slot) {
        self.started += u64::from(piece.len);
        if let Some(slot) = self.slots.get_mut(slot) {
            *slot = Some(piece);
        }
    }

    pub fn finish(&mut self, slot: usize) -> Option<Slot> {
        self.slots.get_mut(slot)?.take()
    }

    /// The same piece goes on, with another copy.
    pub fn resume(&mut self, slot: usize, piece: Slot) {
        if let Some(slot) = self.slots.get_mut(slot) {
            *slot = Some(piece);
        }
    }

    /// Forgets every copy in flight: they may complete, and nobody listens. Whether there was one.
    pub fn abandon(&mut self) -> bool {
        let had_any = self.pending() > 0;
        self.slots = [None; SLOTS];
        had_any
    }

    /// Copies in flight.
    pub fn pending(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Ends the request: what it was, and the kernel's result for it.
    pub fn end(&mut self) -> (Option<Request>, i32) {
        let request = self.request.take();
        let result = match request {
            _ if self.errno != 0 => -self.errno,
            Some(Request {
                op: Op::Read | Op::Write,
                len,
                ..
            }) => i32::try_from(len).unwrap_or(-libc::EIO),
            _ => 0,
        };
        (request, result)
    }
}
