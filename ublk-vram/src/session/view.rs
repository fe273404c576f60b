//! What `show` tells of a device, put together from its regions: whichever process is asked.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Identity, Life, Regions, Session, map_checksums, map_stats};
use crate::backend::vulkan::Residency;
use crate::device::{ChecksumInfo, DeviceInfo, DeviceState, QueueInfo, ServerInfo, StaticInfo};
use crate::engine::StatsTable;
use crate::error::Result;
use crate::safety;
use crate::store::ChecksumTable;

/// The regions that `show` reads.
pub struct View {
    /// The counters.
    pub stats: StatsTable,
    /// What the device has lived through.
    pub life: Life,
    /// The checksums, if the device has them.
    pub checksums: Option<Arc<ChecksumTable>>,
    arena: u64,
    /// Bytes of device memory that is system memory (the host backend's): locked, but not a cost.
    storage: u64,
}

impl View {
    /// Maps them.
    ///
    /// # Errors
    /// As [`Session::shared_region`].
    pub fn new(regions: &Regions, identity: &Identity, arena: u64, storage: u64) -> Result<View> {
        let device_bytes = identity.layout()?.device_bytes();
        Ok(View {
            stats: map_stats(regions, identity.shape.queues)?,
            life: Life::map(regions)?,
            checksums: map_checksums(regions, &identity.spec, device_bytes)?.map(Arc::new),
            arena,
            storage,
        })
    }

    /// Those of a session.
    ///
    /// # Errors
    /// As [`View::new`].
    pub fn of(session: &Session) -> Result<View> {
        let storage = session.memory.system_bytes(&session.layout);
        View::new(
            &session.regions,
            session.identity(),
            session.shape.arena_bytes() as u64,
            storage,
        )
    }

    /// The processes.
    pub fn server(&self) -> ServerInfo {
        let record = self.life.record();
        let load = |word: &std::sync::atomic::AtomicU64| word.load(Ordering::Relaxed);
        let pid = |word| i32::try_from(load(word)).unwrap_or(0);
        ServerInfo {
            supervisor: pid(&record.supervisor),
            worker: pid(&record.worker),
            standby: pid(&record.standby),
            generation: load(&record.generation),
            takeovers: load(&record.takeovers),
            last_pause_us: load(&record.last_pause_us),
            longest_pause_us: load(&record.longest_pause_us),
            supervisors: load(&record.supervisors),
            driver_losses: load(&record.driver_losses),
        }
    }

    /// Everything.
    ///
    /// # Errors
    /// No process of the server can be looked at.
    pub fn info(
        &self,
        fixed: StaticInfo,
        state: DeviceState,
        reason: Option<String>,
    ) -> Result<DeviceInfo> {
        let server = self.server();
        let processes = [server.supervisor, server.worker, server.standby];
        let processes: Vec<i32> = processes.into_iter().filter(|pid| *pid > 0).collect();
        let mut memory = safety::memory_info(&processes, self.arena)?;
        memory.cost = memory.cost.saturating_sub(self.storage);
        let (queue, paths) = (self.stats.read(), fixed.paths.clone());
        let (state, reason) = degraded(state, reason, &fixed, &queue);
        Ok(DeviceInfo {
            fixed,
            state,
            reason,
            server,
            memory,
            checksum: self.checksums.as_ref().map(|table| ChecksumInfo {
                bytes: table.len_bytes(),
                left_writing: table.left_writing(),
                unverified: table.is_unverified(),
            }),
            carried: paths.map(|paths| paths.with(&queue)),
            queue,
        })
    }
}

/// A live device whose memory the GPU's driver may move away is degraded once it is seen to be swap: under
/// the pressure that makes the kernel swap, the driver takes memory to move it. So is one with zero copy, for
/// whose requests the kernel takes memory. It stays so: that no swap is
/// on it any more is not known here, a swap file or a volume on it has a name of its own.
fn degraded(
    state: DeviceState,
    reason: Option<String>,
    fixed: &StaticInfo,
    queues: &[QueueInfo],
) -> (DeviceState, Option<String>) {
    let is_swap = queues.iter().any(|queue| queue.swap_writes > 0);
    let is_evictable = fixed.residency.as_deref() == Some(Residency::Evictable.as_str());
    let because = if is_evictable {
        "on memory that the GPU's driver may move away"
    } else if fixed.zero_copy {
        "with zero copy, for which the kernel allocates memory"
    } else {
        return (state, reason);
    };
    if state != DeviceState::Live || !is_swap {
        return (state, reason);
    }
    let why = format!("it is or was swap, {because}: as swap it can hang the machine");
    let reason = reason.map_or_else(|| why.clone(), |reason| format!("{reason}; {why}"));
    (DeviceState::Degraded, Some(reason))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swap_on_evictable_memory_is_degraded() {
        let fixed = |residency: &str| {
            StaticInfo {
            residency: Some(residency.to_owned()),
            ..serde_json::from_value(serde_json::json!({
                "name": "t", "device": "/dev/ublkb0", "id": 0, "major": 1, "minor": 1, "size": 4096,
                "backend": "vulkan", "gpu": null, "uuid": "", "queues": 1, "depth": 1, "max_io": 4096,
                "chunk_size": 4096, "chunks": 1, "features": [], "copy": "", "pid": 1, "since": 0,
            }))
            .unwrap()
        }
        };
        let seen = |residency: &str, state, swap_writes| {
            let queue = QueueInfo {
                swap_writes,
                ..QueueInfo::default()
            };
            degraded(state, None, &fixed(residency), &[queue]).0
        };
        use DeviceState::{Degraded, Draining, Live};
        assert_eq!(seen("evictable", Live, 1), Degraded);
        assert_eq!(seen("evictable", Live, 0), Live);
        assert_eq!(seen("evictable", Draining, 1), Draining);
        assert_eq!(seen("pinned", Live, 1), Live);
        let zero_copy = StaticInfo {
            zero_copy: true,
            ..fixed("pinned")
        };
        let queue = QueueInfo {
            swap_writes: 1,
            ..QueueInfo::default()
        };
        let (state, reason) = degraded(Live, None, &zero_copy, &[queue]);
        assert_eq!(state, Degraded);
        assert!(reason.unwrap().contains("zero copy"));
    }
}
