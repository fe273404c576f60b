//! Copies made one at a time and waited for: how control reads and writes the memory of any backend,
//! to prepare it, to label it and to wipe it.

use std::time::{Duration, Instant};

use super::{Backend, BackendQueue, ChunkMemory, Completion, Copy, Direction, Mapping, QueueId};
use crate::error::{Error, ErrorKind, Result};

/// A copy that takes longer than this will never end.
const LIMIT: Duration = Duration::from_secs(30);

/// A queue of control's own, with memory for one copy.
pub struct Access {
    chunks: Vec<ChunkMemory>,
    /// `None` once a copy was given up.
    queue: Option<Box<dyn BackendQueue>>,
    memory: Mapping,
    done: Vec<Completion>,
}

impl Access {
    /// Opens control's queue `number`; reads and writes are of `bytes` at most.
    ///
    /// # Errors
    /// As [`Backend::open_queue`].
    pub fn open(backend: &dyn Backend, number: u16, bytes: usize) -> Result<Access> {
        let memory = Mapping::anonymous(bytes)?;
        Ok(Access {
            chunks: backend.chunks().to_vec(),
            queue: Some(backend.open_queue(
                QueueId::control(number),
                1,
                std::slice::from_ref(&memory),
            )?),
            memory,
            done: Vec::with_capacity(1),
        })
    }

    /// The chunks.
    pub fn chunks(&self) -> &[ChunkMemory] {
        &self.chunks
    }

    /// Reads `len` bytes at `offset` of a chunk.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if they cannot be read.
    pub fn read(&mut self, chunk: u32, offset: u64, len: usize) -> Result<&[u8]> {
        let at = self.buffer(len)?;
        self.copy(Direction::Read, chunk, offset, len, at)?;
        // SAFETY: inside the mapping (`buffer`), which is ours, and the copy has ended.
        Ok(unsafe { std::slice::from_raw_parts(at, len) })
    }

    /// Writes `bytes` at `offset` of a chunk; they are ordered before any later access.
    ///
    /// # Errors
    /// [`ErrorKind::Io`] if they cannot be written.
    pub fn write(&mut self, chunk: u32, offset: u64, bytes: &[u8]) -> Result<()> {
        let at = self.buffer(bytes.len())?;
        // SAFETY: inside the mapping (`buffer`), which is ours and which no copy uses now.
        unsafe { at.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        self.copy(Direction::Write, chunk, offset, bytes.len(), at)
    }

    /// Writes `len` zeroes at `offset` of a chunk; a multiple of four where the CPU does not reach them.
    ///
    /// # Errors
    /// As [`Access::write`].
    pub fn zero(&mut self, chunk: u32, offset: u64, len: usize) -> Result<()> {
        self.copy(Direction::Zero, chunk, offset, len, std::ptr::null_mut())
    }

    fn buffer(&self, len: usize) -> Result<*mut u8> {
        self.memory.at(0, len).ok_or_else(|| {
            Error::new(
                ErrorKind::Io,
                format!("a copy of {len} bytes is larger than its memory"),
            )
        })
    }

    fn copy(
        &mut self,
        direction: Direction,
        index: u32,
        offset: u64,
        len: usize,
        memory: *mut u8,
    ) -> Result<()> {
        let failed = |why: &str| {
            let verb = match direction {
                Direction::Read => "read",
                Direction::Write => "written",
                Direction::Zero => "zeroed",
            };
            Err(Error::new(
                ErrorKind::Io,
                format!("{len} bytes at {offset} of chunk {index} cannot be {verb}: {why}"),
            ))
        };
        let (Some(queue), Some(chunk)) = (&mut self.queue, self.chunks.get(index as usize)) else {
            return failed("there is no such chunk, or an earlier copy never ended");
        };
        let Ok(len) = u32::try_from(len) else {
            return failed("that is too much at once");
        };
        let copy = Copy {
            id: 0,
            direction,
            chunk: index,
            offset,
            len,
            memory,
            device_offset: 0,
        };
        // SAFETY: `memory` is inside our mapping for `len` bytes (or null, for zeroes), and nobody uses
        // it until this function has seen the end of the copy; one that never ends takes the mapping
        // with it (`Drop`). The chunk was looked up by its index.
        unsafe { queue.submit(&copy, chunk) };
        let end = Instant::now() + LIMIT;
        loop {
            self.done.clear();
            queue.poll(&mut self.done);
            match self.done.first().map(|done| done.result) {
                Some(Ok(moved)) if moved == len => return Ok(()),
                Some(Ok(_)) => return failed("it was cut short"),
                Some(Err(errno)) => {
                    return failed(&std::io::Error::from_raw_os_error(errno).to_string());
                }
                None if Instant::now() > end => break,
                None => std::hint::spin_loop(),
            }
        }
        // An engine may still write to the memory: it and the queue stay for ever.
        std::mem::forget((self.queue.take(), self.memory.clone()));
        failed("the copy does not end")
    }
}
