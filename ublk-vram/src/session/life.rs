//! What a device has lived through, in a region of its own: every process of the server reads and
//! writes it, so each word is atomic and means something alone.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Regions;
use crate::error::Result;
use crate::store::shared::SharedMapping;

/// The words. All-zero bytes are a valid value, so a fresh region is one.
#[repr(C)]
pub struct LifeRecord {
    /// The generation that is, or is being made, live.
    pub generation: AtomicU64,
    /// How often a worker took over from one that died or was replaced.
    pub takeovers: AtomicU64,
    /// Microseconds from the sight of the last worker's death to the disk being live again.
    pub last_pause_us: AtomicU64,
    /// The longest of these.
    pub longest_pause_us: AtomicU64,
    /// How often a supervisor took over.
    pub supervisors: AtomicU64,
    /// How many more times the lab's crash point is to kill a worker.
    pub crashes_left: AtomicU64,
    /// Process id of the worker.
    pub worker: AtomicU64,
    /// Process id of the supervisor.
    pub supervisor: AtomicU64,
    /// 1 from START_USER_RECOVERY until every tag is fetched: see `supervisor::takeover`.
    pub in_gap: AtomicU64,
    /// Process id of the standby, while there is one that is ready.
    pub standby: AtomicU64,
    /// 1 once a worker found the memory lost: no other one may serve it.
    pub lost: AtomicU64,
    /// 1 from the end of a worker whose driver lost the GPU until the next one has taken over.
    pub driver_lost: AtomicU64,
    /// How often a driver lost the GPU and a worker took over.
    pub driver_losses: AtomicU64,
}

/// The record, mapped.
pub struct Life(SharedMapping);

impl Life {
    /// Maps the record of a device.
    ///
    /// # Errors
    /// As [`super::Session::shared_region`].
    pub fn map(regions: &Regions) -> Result<Life> {
        regions.map("life", size_of::<LifeRecord>()).map(Life)
    }

    /// The words.
    pub fn record(&self) -> &LifeRecord {
        // SAFETY: the mapping is page aligned and has the record's size; every bit pattern is a
        // valid record, and all access is through atomics.
        unsafe { &*self.0.as_ptr().cast::<LifeRecord>() }
    }

    /// Notes a takeover that took `pause`.
    pub fn note_takeover(&self, pause: Duration) {
        let micros = u64::try_from(pause.as_micros()).unwrap_or(u64::MAX);
        let record = self.record();
        record.takeovers.fetch_add(1, Ordering::Relaxed);
        record.last_pause_us.store(micros, Ordering::Relaxed);
        record.longest_pause_us.fetch_max(micros, Ordering::Relaxed);
    }

    /// Whether the lab wants a crash now; each yes counts.
    pub fn crashes_now(&self) -> bool {
        let left = &self.record().crashes_left;
        let less = |n: u64| n.checked_sub(1);
        left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takeovers_and_crashes_are_counted() {
        let life = Life::map(&Regions::default()).unwrap();
        life.note_takeover(Duration::from_millis(30));
        life.note_takeover(Duration::from_millis(20));
        let record = life.record();
        assert_eq!(record.takeovers.load(Ordering::Relaxed), 2);
        assert_eq!(record.last_pause_us.load(Ordering::Relaxed), 20_000);
        assert_eq!(record.longest_pause_us.load(Ordering::Relaxed), 30_000);
        record.crashes_left.store(1, Ordering::Relaxed);
        assert_eq!((life.crashes_now(), life.crashes_now()), (true, false));
    }
}
