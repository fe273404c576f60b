//! Whether the shader may carry copies now.

use super::Seen;

/// Nanoseconds above which a batch may be late: half of the time slice that was seen (2 ms). What waits for
/// other batches of ours takes less.
pub(super) const LATE: f64 = 1e6;
/// And so many times what was expected.
const LATE_FACTOR: f64 = 8.0;
/// A record older than this proves nothing.
const FRESH: f64 = 1e9;
/// The first pause after being late, and the longest.
const FIRST_PAUSE: f64 = 50e6;
const LONGEST_PAUSE: f64 = 5e9;
/// In time for so long, and the next pause is a first one again. Whoever computes with gaps between lets
/// probes through all the time; each return costs somebody a time slice, so returns must become rare.
const FORGIVEN: f64 = 10e9;
/// Probes in a row that must be in time after being late.
const PROOFS: u8 = 3;

/// The record of a path that may stop being any good at any moment.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    /// When it was last seen in time.
    good_at: f64,
    /// No probe before this.
    pause_until: f64,
    late_at: f64,
    pause: f64,
    /// Probes in time that are still missing.
    missing: u8,
    /// Somebody would have taken it.
    wanted: bool,
    probing: bool,
}

impl Trial {
    /// A record that begins with being in time at `now`, or with being late.
    pub fn new(was_late: bool, now: f64) -> Trial {
        Trial {
            good_at: now,
            pause_until: 0.0,
            late_at: now,
            pause: FIRST_PAUSE,
            missing: if was_late { PROOFS } else { 0 },
            wanted: false,
            probing: false,
        }
    }

    /// Whether it was seen in time a moment ago.
    pub fn may_carry(&self, now: f64) -> bool {
        self.missing == 0 && now - self.good_at < FRESH
    }

    /// Whether it was late and has not proved itself since.
    pub fn is_late(&self) -> bool {
        self.missing > 0
    }

    /// It would have been taken: worth a probe.
    pub fn want(&mut self) {
        self.wanted = true;
    }

    /// Whether a probe should be sent.
    pub fn probe_due(&self, now: f64) -> bool {
        self.wanted && !self.probing && now >= self.pause_until && !self.may_carry(now)
    }

    /// A probe is on its way.
    pub fn probe_sent(&mut self) {
        self.probing = true;
    }

    /// A probe ended.
    pub fn probed(&mut self, expected: f64, seen: Seen, now: f64) {
        self.probing = false;
        if is_late(expected, seen.after) {
            self.late(now);
        } else if !is_late(expected, seen.by) {
            self.missing = self.missing.saturating_sub(1);
            if self.missing == 0 {
                self.good_at = now;
                self.wanted = false;
            }
        }
        // Otherwise nobody looked in time: it proves nothing.
    }

    /// A probe failed: that counts as late.
    pub fn probe_failed(&mut self, now: f64) {
        self.probing = false;
        self.late(now);
    }

    /// It carried copies. False if it was late.
    pub fn carried(&mut self, expected: f64, seen: Seen, now: f64) -> bool {
        if is_late(expected, seen.after) {
            self.late(now);
            return false;
        }
        if self.missing == 0 && !is_late(expected, seen.by) {
            self.good_at = now;
            if now - self.late_at > FORGIVEN {
                self.pause = FIRST_PAUSE;
            }
        }
        true
    }

    fn late(&mut self, now: f64) {
        self.missing = PROOFS;
        self.late_at = now;
        self.pause_until = now + self.pause;
        self.pause = (self.pause * 2.0).min(LONGEST_PAUSE);
    }
}

fn is_late(expected: f64, time: f64) -> bool {
    time > LATE && time > LATE_FACTOR * expected
}
