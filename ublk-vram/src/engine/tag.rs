//! One block request in flight: plain state, completed exactly once.

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

/// The piece a copy moves.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slot {
    pub chunk: u32,
    pub len: u32,
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
