//! Reads whose bytes this process does not see (zero copy): one canary stands for all reads of a poll.
//!
//! Each of them needs a canary that is read after it (`integrity`). Reads that one poll has told of have
//! all ended before it, so the first one's canary, which is read next, comes after each of them; and the
//! memory is one region behind one bus, so it does not matter whose chunk the canary is in. The others
//! wait for it, in their slots. A canary costs as much as a fifth of a read of 4 KiB (docs/performance.md).

use super::tag::{Slot, Step};
use super::{Engine, id_of};

/// Reads that wait for the canary of another one.
pub(super) struct Blind {
    /// Whose canary was begun in this poll.
    leader: Option<u32>,
    waiting: Vec<Waiting>,
}

#[derive(Clone, Copy)]
struct Waiting {
    leader: u32,
    index: u16,
    slot: usize,
}

impl Blind {
    /// For up to `copies` reads.
    pub fn new(copies: usize) -> Blind {
        Blind {
            leader: None,
            waiting: Vec::with_capacity(copies),
        }
    }

    /// Another poll: what it tells of needs another canary.
    pub fn begin(&mut self) {
        self.leader = None;
    }
}

impl Engine {
    /// Goes on with a piece that needs another copy: its own, or a canary that is on its way already.
    /// False if there is nothing to copy from.
    pub(super) fn go_on(&mut self, index: u16, slot: usize, piece: Slot) -> bool {
        // One that is read again stays what others wait for.
        if !self.integrity.is_blind || piece.step != (Step::Canary { tries: 0 }) {
            return self.proceed(index, slot, piece);
        }
        let Some(leader) = self.blind.leader else {
            let goes_on = self.proceed(index, slot, piece);
            self.blind.leader = goes_on.then(|| id_of(index, slot));
            return goes_on;
        };
        if let Some(tag) = self.tags.get_mut(usize::from(index)) {
            tag.resume(slot, piece);
        }
        self.blind.waiting.push(Waiting {
            leader,
            index,
            slot,
        });
        true
    }

    /// A canary was judged: ends the reads that waited for it. What they read is believed only if the read
    /// whose canary it was is.
    pub(super) fn end_waiting(&mut self, leader: u32, is_believed: bool) {
        let is_believed = is_believed && !self.integrity.health.is_lost();
        let mut at = 0;
        while let Some(waiting) = self.blind.waiting.get(at).copied() {
            if waiting.leader != leader {
                at += 1;
                continue;
            }
            self.blind.waiting.swap_remove(at);
            let tag = self.tags.get_mut(usize::from(waiting.index));
            let Some(piece) = tag.and_then(|tag| tag.finish(waiting.slot)) else {
                continue;
            };
            if !is_believed {
                self.fail(waiting.index, libc::EIO);
            }
            self.end_piece(waiting.index, piece.chunk);
        }
    }
}
