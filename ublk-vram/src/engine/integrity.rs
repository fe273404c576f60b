//! Whether what was read is what was written: checksums, canaries, and what follows from them.
//!
//! ```text
//!   copy of a read is done
//!     each block: fits its checksum          believed
//!                 has one and does not fit   read it again, and judge (`store::checksum`)
//!                 has none, and ends in a line of ones or zeroes   suspicious
//!     suspicious -> read the chunk's canary by the same path
//!                     as it was written      believed: it was data
//!                     twice another          the memory is lost
//! ```
//!
//! With zero copy the server does not see what was read: every read counts as suspicious.
//!
//! A bus that is gone answers with all ones (or, under an emulator, zeroes), from some line on and for
//! good. So a block whose last line is neither is not from such a bus, and one that fits its checksum is
//! what was written, whatever it looks like. A canary that is read after a suspicious line, by the same
//! path, and is right, says that the bus was there when the line was read.

use std::sync::Arc;

use super::tag::{Slot, Step};
use super::{Engine, id_of};
use crate::backend::{DRIVER_LOST, Direction, GONE, Mapping, QueueId};
use crate::copy::LINE;
use crate::health::{Health, IoEvent, Loss, judge_canary};
use crate::store::checksum::{BLOCK_BYTES, Doubt, Verdict, ZERO_BLOCK_CRC, crc32c};
use crate::store::{CANARY_BYTES, ChecksumTable};

const BLOCK: u64 = BLOCK_BYTES as u64;
/// So often a block is read again that is written all the time; then it is handed out as it is.
const MOST_TRIES: u8 = 4;

const _: () = assert!(CANARY_BYTES == LINE);

/// What the queues of a device check reads against; shared by all of them.
#[derive(Clone)]
pub struct Integrity {
    /// The checksums, if the device has them.
    pub checksums: Option<Arc<ChecksumTable>>,
    /// Whether the memory is there.
    pub health: Arc<Health>,
    /// The first line of every chunk's header.
    pub canary: [u8; CANARY_BYTES],
    /// The bytes of requests are not seen by this process (zero copy): each read is believed only when the
    /// canary was read after it. There are no checksums then.
    pub is_blind: bool,
    /// Where canaries are read to, a line for each copy of each queue: I/O memory, as the backend must
    /// reach it.
    pub lines: Mapping,
}

/// The blocks that a piece covers whole, as a range of block numbers in the device.
fn whole_blocks(piece: &Slot) -> std::ops::Range<u64> {
    let end = (piece.device_offset + u64::from(piece.len)) / BLOCK;
    let start = piece.device_offset.div_ceil(BLOCK);
    start..end.max(start)
}

/// The bytes of one of the piece's whole blocks.
fn block_of(piece: &Slot, block: u64) -> &[u8] {
    let skip = (block * BLOCK - piece.device_offset) as usize;
    // SAFETY: the piece's memory is valid for its length, and the block is one of `whole_blocks`; it
    // belongs to the request until it ends, and no copy of the piece is in flight.
    unsafe { std::slice::from_raw_parts(piece.memory.add(skip), BLOCK as usize) }
}

/// Whether the last line of a block is what a bus that is gone would give.
fn looks_lost(block: &[u8]) -> bool {
    let Some((_, tail)) = block.split_last_chunk::<LINE>() else {
        return false;
    };
    let [first, ..] = tail;
    matches!(first, 0 | 0xff) && tail.iter().all(|byte| byte == first)
}

impl Integrity {
    /// For an engine whose memory has no headers and no checksums, as a bench's.
    ///
    /// # Errors
    /// As [`Health::new`].
    pub fn none(queues: u16, depth: u16) -> crate::Result<Integrity> {
        Integrity::new(queues, depth, None, [0; CANARY_BYTES])
    }

    /// For a device with so many queues of that depth.
    ///
    /// # Errors
    /// As [`Health::new`], or there is no memory.
    pub fn new(
        queues: u16,
        depth: u16,
        checksums: Option<Arc<ChecksumTable>>,
        canary: [u8; CANARY_BYTES],
    ) -> crate::Result<Integrity> {
        let lines = usize::from(queues) * Engine::copies(depth);
        Ok(Integrity {
            checksums,
            health: Arc::new(Health::new(queues, depth)?),
            canary,
            is_blind: false,
            lines: Mapping::anonymous(lines * LINE)?,
        })
    }

    /// The line of a queue's copy.
    fn line(&self, queue: QueueId, copies: usize, id: u32) -> Option<*mut u8> {
        let index = usize::from(queue.0) * copies + id as usize;
        self.lines.at((index * LINE) as u64, LINE)
    }

    /// Before the first byte of a write or of zeroes is stored.
    pub(super) fn begin_write(&self, piece: &Slot) {
        let Some(table) = &self.checksums else { return };
        for block in touched_blocks(piece) {
            table.begin(block);
        }
    }

    /// After its last byte is ordered, or it has failed.
    fn end_write(&self, piece: &Slot, is_whole: bool) {
        let Some(table) = &self.checksums else { return };
        let whole = whole_blocks(piece);
        for block in touched_blocks(piece) {
            let crc = match piece.direction {
                _ if !is_whole || !whole.contains(&block) => None,
                Direction::Zero => Some(ZERO_BLOCK_CRC),
                Direction::Write | Direction::Read => Some(crc32c(block_of(piece, block))),
            };
            table.end(block, crc);
        }
    }
}

fn touched_blocks(piece: &Slot) -> std::ops::Range<u64> {
    let end = piece.device_offset + u64::from(piece.len);
    piece.device_offset / BLOCK..end.div_ceil(BLOCK)
}

impl Engine {
    /// Looks at a copy that has completed; the piece with its next step, if it needs one.
    pub(super) fn judge(
        &mut self,
        index: u16,
        slot: usize,
        piece: Slot,
        result: Result<u32, i32>,
    ) -> Option<Slot> {
        let expected = match piece.step {
            Step::Move => piece.len,
            Step::Again { .. } => BLOCK_BYTES,
            Step::Canary { .. } => CANARY_BYTES as u32,
        };
        let is_whole = result == Ok(expected);
        if piece.direction != Direction::Read {
            self.integrity.end_write(&piece, is_whole);
        }
        if !is_whole {
            // Fewer bytes than asked for are an error to the caller.
            let errno = match result {
                Err(GONE) => {
                    self.integrity.health.lose(Loss::Gone);
                    libc::EIO
                }
                Err(DRIVER_LOST) => {
                    self.integrity.health.driver_lost();
                    libc::EIO
                }
                Err(errno) => errno,
                Ok(_) => libc::EIO,
            };
            self.fail(index, errno);
            return None;
        }
        match piece.step {
            _ if piece.direction != Direction::Read => None,
            Step::Move if self.integrity.is_blind => Some(Slot {
                step: Step::Canary { tries: 0 },
                ..piece
            }),
            Step::Move => self.check_from(piece, whole_blocks(&piece).start),
            Step::Again {
                block,
                doubt,
                tries,
            } => self.check_again(index, piece, block, doubt, tries),
            Step::Canary { tries } => {
                let at = self.canary_line(id_of(index, slot))?;
                // SAFETY: a line of this slot's own, and its copy has completed.
                let line = unsafe { at.cast::<[u8; CANARY_BYTES]>().read() };
                match judge_canary(&line, &self.integrity.canary) {
                    Ok(()) if tries > 0 => {
                        let chunk = piece.chunk;
                        self.integrity
                            .health
                            .report(IoEvent::CanaryBlinked { chunk });
                        if self.integrity.is_blind {
                            // Nobody has seen what was read just before, and it may be as wrong.
                            self.fail(index, libc::EIO);
                        }
                        None
                    }
                    Ok(()) => None,
                    Err(_) if tries == 0 => Some(Slot {
                        step: Step::Canary { tries: 1 },
                        ..piece
                    }),
                    Err(loss) => {
                        self.fail(index, libc::EIO);
                        self.integrity.health.lose(loss);
                        None
                    }
                }
            }
        }
    }

    fn canary_line(&self, id: u32) -> Option<*mut u8> {
        let copies = self.tags.len() * super::SLOTS;
        self.integrity.line(self.queue, copies, id)
    }

    pub(super) fn fail(&mut self, index: u16, errno: i32) {
        if let Some(tag) = self.tags.get_mut(usize::from(index)) {
            tag.fail(errno);
        }
    }

    /// Checks the blocks of a read from `start` on.
    fn check_from(&mut self, mut piece: Slot, start: u64) -> Option<Slot> {
        let mut unchecked = 0;
        for block in start..whole_blocks(&piece).end {
            let bytes = block_of(&piece, block);
            let verdict = match &self.integrity.checksums {
                Some(table) => table.check(block, bytes),
                None => Verdict::Unchecked,
            };
            match verdict {
                Verdict::Good => {}
                Verdict::Doubtful(doubt) => {
                    piece.step = Step::Again {
                        block,
                        doubt,
                        tries: 1,
                    };
                    break;
                }
                Verdict::Unchecked | Verdict::Bad { .. } => {
                    piece.is_suspicious |= looks_lost(bytes);
                    unchecked += 1;
                }
            }
        }
        let stats = self.stats.of(self.queue);
        if self.integrity.checksums.is_some() {
            stats.unchecked_blocks(unchecked);
        }
        if let Step::Again { .. } = piece.step {
            stats.reread_block();
            return Some(piece);
        }
        // All blocks were looked at: a suspicious piece waits for the chunk's canary.
        piece.is_suspicious.then_some(Slot {
            step: Step::Canary { tries: 0 },
            ..piece
        })
    }

    /// Judges a block that was read again, and goes on behind it.
    fn check_again(
        &mut self,
        index: u16,
        mut piece: Slot,
        block: u64,
        doubt: Doubt,
        tries: u8,
    ) -> Option<Slot> {
        let bytes = block_of(&piece, block);
        let verdict = match &self.integrity.checksums {
            Some(table) => table.judge(block, bytes, doubt),
            None => Verdict::Unchecked,
        };
        let stats = self.stats.of(self.queue);
        match verdict {
            Verdict::Good => {}
            Verdict::Doubtful(doubt) if tries < MOST_TRIES => {
                stats.reread_block();
                piece.step = Step::Again {
                    block,
                    doubt,
                    tries: tries + 1,
                };
                return Some(piece);
            }
            // Each of the reads met another write: it may be anything that was written meanwhile.
            Verdict::Unchecked | Verdict::Doubtful(_) => {
                piece.is_suspicious |= looks_lost(bytes);
                stats.unchecked_blocks(1);
            }
            Verdict::Bad { expected, found } => {
                piece.is_suspicious |= looks_lost(bytes);
                stats.bad_block();
                self.integrity.health.report(IoEvent::BadBlock {
                    block,
                    expected,
                    found,
                });
                self.fail(index, libc::EIO);
            }
        }
        piece.step = Step::Move;
        self.check_from(piece, block + 1)
    }

    /// Starts the copy that a piece's next step needs. False if there is nothing to copy from, which
    /// cannot be: the chunk was entered for the piece's first copy, and is left after its last.
    pub(super) fn proceed(&mut self, index: u16, slot: usize, piece: Slot) -> bool {
        let id = id_of(index, slot);
        let copy = match piece.step {
            Step::Move => piece.copy(id, 0, piece.len),
            Step::Again { block, .. } => {
                let skip = (block * BLOCK - piece.device_offset) as u32;
                piece.copy(id, skip, BLOCK_BYTES)
            }
            Step::Canary { .. } => {
                let Some(line) = self.canary_line(id) else {
                    return false;
                };
                // SAFETY: a line of this slot's own, and no copy uses it. The next read must not find
                // what the last one left.
                unsafe { line.write_bytes(0, LINE) };
                let mut copy = piece.copy(id, 0, CANARY_BYTES as u32);
                copy.offset = self.layout.payload_of(piece.chunk);
                copy.memory = line;
                copy
            }
        };
        if let Step::Canary { .. } = piece.step {
            self.stats.of(self.queue).canary_read();
        }
        let Some(chunk) = self.table.entered(piece.chunk) else {
            return false;
        };
        if let Some(tag) = self.tags.get_mut(usize::from(index)) {
            tag.resume(slot, piece);
        }
        // SAFETY: `memory` is a part of the request's memory, or the slot's own line, both untouched
        // until this copy's completion; `chunk` is the memory of `copy.chunk`.
        unsafe { self.backend.submit(&copy, chunk) };
        true
    }
}
