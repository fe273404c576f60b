//! One entry of the table as plain data: what a 64-bit word says about a block, and how it changes.
//!
//! | bits | field |
//! | --- | --- |
//! | 0..32 | CRC32C of the block, if `VALID` |
//! | 32..52 | writes of the block in flight |
//! | 52 | `VALID`: the CRC is that of the block |
//! | 53 | `MIXED`: two writes in flight at the same time met |
//! | 54 | `LEFT`: a worker died while it wrote the block |
//! | 55..64 | changes, modulo 512: two equal words with a write between them differ here |
//!
//! The all-zero word is an unset entry, so fresh pages of a memfd are a table.

const WRITER: u64 = 1 << 32;
const WRITERS: u64 = 0xf_ffff << 32;
const VALID: u64 = 1 << 52;
const MIXED: u64 = 1 << 53;
const LEFT: u64 = 1 << 54;
const CHANGE: u64 = 1 << 55;

/// The word of one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry(pub(super) u64);

impl Entry {
    /// An entry that nothing is known about but its checksum.
    pub(super) const fn valid(crc: u32) -> Entry {
        Entry(VALID | crc as u64)
    }

    /// The checksum, if the block is known to have one and nobody writes to it.
    pub(super) fn crc(self) -> Option<u32> {
        (self.0 & (VALID | WRITERS) == VALID).then_some(self.0 as u32)
    }

    /// Whether a write is in flight.
    pub(super) fn is_writing(self) -> bool {
        self.0 & WRITERS != 0
    }

    /// Whether a dead worker left a write of it half done.
    pub(super) fn is_left(self) -> bool {
        self.0 & LEFT != 0
    }

    /// Before the first byte of a write is stored.
    pub(super) fn begin(self) -> Entry {
        let mixed = if self.is_writing() {
            MIXED
        } else {
            self.0 & MIXED
        };
        let kept = self.0 & !(VALID | MIXED | u64::from(u32::MAX));
        Entry((kept | mixed).wrapping_add(WRITER).wrapping_add(CHANGE))
    }

    /// After the last byte of a write is ordered before what comes. `crc` is that of the whole
    /// block, `None` if the write failed or covered only a part. Of writes that met, nobody knows
    /// which bytes won: the block has no checksum until it is written again.
    pub(super) fn end(self, crc: Option<u32>) -> Entry {
        if !self.is_writing() {
            return self;
        }
        let rest = self.0.wrapping_sub(WRITER);
        // A write that is not known to be whole spoils what those beside it know.
        let mixed = rest & MIXED != 0 || crc.is_none();
        if rest & WRITERS != 0 {
            return Entry(if mixed { rest | MIXED } else { rest });
        }
        let changes = (rest & !(CHANGE - 1)).wrapping_add(CHANGE);
        match crc {
            Some(crc) if !mixed => Entry(changes | VALID | u64::from(crc)),
            // What a dead worker left is still what is there.
            _ => Entry(changes | rest & LEFT),
        }
    }

    /// What a new worker makes of an entry that a dead one left: a write in flight is in flight no
    /// more, and what it stored is not known.
    pub(super) fn adopt(self) -> Entry {
        if self.is_writing() {
            Entry((self.0 & !(CHANGE - 1)).wrapping_add(CHANGE) | LEFT)
        } else {
            self
        }
    }

    /// An unset entry, with the checksum of what was read while it did not change.
    pub(super) fn rebuild(self, crc: u32) -> Entry {
        Entry((self.0 & !(CHANGE - 1)).wrapping_add(CHANGE) | VALID | u64::from(crc))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNSET: Entry = Entry(0);

    #[test]
    fn a_lone_write_makes_a_checksum() {
        let writing = UNSET.begin();
        assert!(writing.is_writing() && writing.crc().is_none());
        let valid = writing.end(Some(7));
        assert_eq!(valid.crc(), Some(7));
        assert_ne!(
            valid,
            valid.begin().end(Some(7)),
            "the same content written again is another word"
        );
    }

    #[test]
    fn writes_that_meet_leave_no_checksum_until_the_next() {
        let both = UNSET.begin().begin();
        let one = both.end(Some(1));
        assert!(one.is_writing() && one.crc().is_none());
        let none = one.end(Some(2));
        assert_eq!((none.crc(), none.is_writing()), (None, false));
        assert_eq!(none.begin().end(Some(3)).crc(), Some(3));
        // The third comes after the first of two has ended.
        let three = both.end(Some(1)).begin().end(Some(2)).end(Some(3));
        assert_eq!((three.crc(), three.is_writing()), (None, false));
    }

    #[test]
    fn a_failed_or_partial_write_leaves_no_checksum() {
        assert_eq!(Entry::valid(9).begin().end(None).crc(), None);
        assert_eq!(UNSET.begin().begin().end(None).end(Some(1)).crc(), None);
        assert_eq!(UNSET.end(Some(1)), UNSET, "no write was in flight");
    }

    #[test]
    fn what_a_dead_worker_left_is_known_as_such_until_it_is_rewritten() {
        let left = Entry::valid(5).begin().begin().adopt();
        assert!(left.is_left() && !left.is_writing() && left.crc().is_none());
        let writing = left.begin();
        assert!(writing.is_left());
        let valid = writing.end(Some(6));
        assert_eq!((valid.is_left(), valid.crc()), (false, Some(6)));
        assert!(writing.end(None).is_left(), "a write that failed");
        assert_eq!(Entry::valid(5).adopt(), Entry::valid(5));
        assert_eq!(left.rebuild(8).crc(), Some(8));
        assert!(!left.rebuild(8).is_left());
    }

    #[test]
    fn the_change_counter_wraps_into_nothing_else() {
        let mut entry = UNSET;
        for _ in 0..2000 {
            entry = entry.begin().end(Some(0xffff_ffff));
            assert_eq!(entry.crc(), Some(0xffff_ffff));
        }
    }
}
