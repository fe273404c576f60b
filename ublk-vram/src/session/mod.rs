//! Everything that outlives a worker, and how one process of a server hands it to another.
//!
//! A worker can die at any time; what it worked on must not die with it. So all of it is here, as
//! descriptors and plain data: what the device is ([`Identity`]), the device memory's handles, and
//! named regions of shared memory ([`Regions`]: counters, I/O buffers, the marks of requests in
//! flight, and what a worker asked for). The supervisor holds a session for the device's whole life;
//! a worker and its standby each get the same one over a socket ([`Channel`], [`Order`], [`Report`]),
//! and keep descriptors of all of it too, so that a supervisor may die as well.
//!
//! Nothing here starts a process, touches a GPU or speaks to the driver.

mod channel;
pub mod handover;
mod life;
mod messages;
mod name;
mod plan;
pub mod process;
mod regions;
mod tags;
mod view;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::backend::MemoryHandles;
use crate::control::RunDir;
use crate::device::DeviceSpec;
use crate::engine::StatsTable;
use crate::error::{Error, ErrorKind, Result};
use crate::store::shared::SharedMapping;
use crate::store::{ChecksumTable, Layout};
use crate::ublk::{Buffers, Shape};

pub use channel::{Channel, Sender};
pub use life::{Life, LifeRecord};
pub use messages::{Adopt, Begin, Order, Report, Role, VERSION};
pub use name::NameLock;
pub use plan::{BASE_COST_BYTES, Identity, cost_bytes, plan};
pub use regions::{Regions, Sized};
pub use tags::{TagBoard, TagMark};
pub use view::View;

/// A device as a worker sees it, independent of the process that serves it.
pub struct Session {
    /// What the user asked for.
    pub spec: DeviceSpec,
    /// Identity of the contents.
    pub uuid: [u8; 16],
    /// Grows by one with each worker that goes live.
    pub generation: u64,
    /// How the device lies in chunks.
    pub layout: Layout,
    /// How queues and I/O buffers are cut.
    pub shape: Shape,
    /// The device memory's handles.
    pub memory: MemoryHandles,
    /// Shared memory by name.
    pub regions: Regions,
    /// Where sockets and notes are.
    pub run_dir: RunDir,
    identity: Identity,
}

impl Session {
    /// The session of a device whose memory is at hand.
    ///
    /// # Errors
    /// The identity's sizes make no layout.
    pub fn new(
        identity: Identity,
        generation: u64,
        memory: MemoryHandles,
        regions: Regions,
    ) -> Result<Session> {
        Ok(Session {
            spec: identity.spec.clone(),
            uuid: identity.uuid,
            generation,
            layout: identity.layout()?,
            shape: identity.shape,
            memory,
            regions,
            run_dir: RunDir::system(),
            identity,
        })
    }

    /// The plain data of the device.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Maps the counters.
    ///
    /// # Errors
    /// As [`Session::shared_region`].
    pub fn map_state(&self) -> Result<StatsTable> {
        map_stats(&self.regions, self.shape.queues)
    }

    /// The I/O buffers: mapped, or with zero copy the file of the memory's region.
    ///
    /// # Errors
    /// As [`Session::shared_region`]; [`ErrorKind::Unsupported`] if the memory is no region.
    pub fn buffers(&self) -> Result<Buffers> {
        if !self.shape.zero_copy {
            let arena = self.shared_region("io", self.shape.arena_bytes())?;
            return Ok(Buffers::Arena(Arc::new(arena)));
        }
        match self.memory.region_file()? {
            Some(file) => Ok(Buffers::Region(Arc::new(file))),
            None => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the memory of '{}' is no region of the kernel module ublk_vram: leave out --zero-copy",
                    self.spec.name
                ),
            )),
        }
    }

    /// Maps the region `name` of `bytes` bytes: memory that outlives the worker. The first worker
    /// that asks finds zeroes; every later one what the last one left there. Asked for while the
    /// device is made, before memory is locked: from then on every process of the server has it in
    /// RAM.
    ///
    /// A worker can die between any two stores: whoever keeps something here that spans more than
    /// one atomic word says itself which of its states are valid.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] if there is no memory for it; [`ErrorKind::Io`] if a region of that
    /// name has another size.
    pub fn shared_region(&self, name: &str, bytes: usize) -> Result<SharedMapping> {
        self.regions.map(name, bytes)
    }

    /// The UUID in its text form (RFC 9562, section 4).
    pub fn uuid_text(&self) -> String {
        self.identity.uuid_text()
    }
}

/// Maps the counters of a device with so many queues.
///
/// # Errors
/// As [`Session::shared_region`].
pub fn map_stats(regions: &Regions, queues: u16) -> Result<StatsTable> {
    StatsTable::new(regions.map("state", StatsTable::bytes(queues))?, queues)
}

/// Maps the checksums of a device, if it has them.
///
/// # Errors
/// As [`Session::shared_region`].
pub fn map_checksums(
    regions: &Regions,
    spec: &DeviceSpec,
    device_bytes: u64,
) -> Result<Option<ChecksumTable>> {
    if !plan::has_checksums(spec) {
        return Ok(None);
    }
    let bytes = usize::try_from(ChecksumTable::bytes(device_bytes)).unwrap_or(usize::MAX);
    ChecksumTable::new(regions.map("checksums", bytes)?, device_bytes).map(Some)
}

/// The next `count` descriptors of a message.
///
/// # Errors
/// There are fewer: the sender and the receiver are not of one version.
pub fn take_fds(fds: &mut impl Iterator<Item = OwnedFd>, count: usize) -> Result<Vec<OwnedFd>> {
    let taken: Vec<OwnedFd> = fds.take(count).collect();
    if taken.len() == count {
        return Ok(taken);
    }
    Err(Error::new(
        ErrorKind::Io,
        format!(
            "{count} descriptors were announced and {} came",
            taken.len()
        ),
    ))
}
