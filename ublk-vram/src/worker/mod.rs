//! The process that does a device's I/O, and can die at any time.
//!
//! ```text
//!   maker:    memory zeroed, checked, locked -> ADD_DEV -> (order) START_DEV -> live
//!   standby:  memory mapped, locked, threads and rings made -> (order) takeover -> live
//!   live:     a drain, a removal: the disk goes, the memory is wiped, the process ends
//!             the supervisor is gone: another one is started, I/O goes on
//! ```
//!
//! Threads: this one (lifecycle, and the only one that sends ublk control commands), one for each
//! queue, one for the supervisor's orders, one that waits for signals; after a takeover perhaps one that makes
//! checksums again and one that maps more. They talk to this one through a channel; queue threads talk to nobody.
//!
//! A queue thread that ends in any way but the disk's end ends the process, a panic included: its
//! requests would wait for ever otherwise, and the next worker gets them from the kernel.

mod alone;
mod headers;
mod lifecycle;
mod link;
mod memory;
mod orders;
mod prepare;
mod startup;
mod status;
pub mod swapoff;

use std::sync::mpsc::channel;

use crate::backend::MemoryHandles;
use crate::error::{Error, ErrorKind, Result};
use crate::safety;
use crate::session::process::inherited_channel;
use crate::session::{Begin, Channel, Order, Regions, Report, Role, Session, VERSION, take_fds};
use crate::store::zero_and_check;

use self::link::Link;
use self::orders::Inheritance;

/// The hidden subcommand a worker runs as.
pub const SUBCOMMAND: &str = "worker";

/// A worker's `main`.
///
/// # Errors
/// Why it ended early; the supervisor has been told.
pub fn main() -> Result<()> {
    safety::settle_allocator();
    safety::limit_thread_stacks();
    safety::block_termination_signals()?;
    let mut channel = inherited_channel()?;
    let Some((Order::Begin(begin), fds)) = channel.receive()? else {
        return Err(Error::usage("a worker is started by its supervisor only"));
    };
    let link = Link::new(&channel)?;
    let role = begin.role;
    begin_work(*begin, fds, channel, &link).inspect_err(|error| {
        tracing::error!("{role:?}: {error}");
        link.report(&Report::Failed(error.clone()));
    })
}

fn begin_work(
    begin: Begin,
    fds: Vec<std::os::fd::OwnedFd>,
    channel: Channel,
    link: &Link,
) -> Result<()> {
    if begin.version != VERSION {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "this program speaks version {VERSION} within a server and the server that runs speaks \
                 {}: end the device and add it again to run the new program",
                begin.version
            ),
        ));
    }
    let spec = &begin.identity.spec;
    safety::name_process();
    crate::log::start(spec)?;
    safety::abort_on_panic();
    safety::protect(spec.allow_unsafe, spec.lab.no_memory_lock)?;
    let mut fds = fds.into_iter();
    let inherited = take_fds(&mut fds, 2)?;
    let region_fds = take_fds(&mut fds, begin.regions.len())?;
    let keeper = link.region_keeper();
    let regions = Regions::inherited(
        begin.regions.iter().cloned().zip(region_fds),
        Some(Box::new(keeper)),
    );
    let identity = begin.identity;
    let (memory, was_given) = match begin.memory {
        Some(description) => {
            let count = description.fds();
            let memory = MemoryHandles::import(description, take_fds(&mut fds, count)?)?;
            (memory, true)
        }
        None if !matches!(begin.role, Role::Maker) => {
            return Err(Error::new(
                ErrorKind::Io,
                "the device's memory was not handed over",
            ));
        }
        None => (
            MemoryHandles::create(&identity.spec.backend, &identity.layout()?)?,
            false,
        ),
    };
    // It lives as long as the process: what it holds keeps the device's memory.
    let session: &'static Session =
        Box::leak(Box::new(Session::new(identity, 1, memory, regions)?));
    let inheritance = Inheritance::new(inherited)?;
    let (sender, events) = channel_of_events();
    match begin.role {
        Role::Wiper => wipe(session, link),
        Role::Maker => {
            let orders = orders::start(session, channel, link, sender.clone(), inheritance)?;
            startup::make(session, link, &orders, was_given, sender, events)
        }
        Role::Standby { id } => {
            let orders = orders::start(session, channel, link, sender.clone(), inheritance)?;
            startup::stand_by(session, link, &orders, id, sender, events)
        }
    }
}

fn channel_of_events() -> (
    std::sync::mpsc::Sender<lifecycle::Event>,
    std::sync::mpsc::Receiver<lifecycle::Event>,
) {
    channel()
}

/// Wipes what a device held whose worker died after its disk was gone.
fn wipe(session: &Session, link: &Link) -> Result<()> {
    let backend = session.memory.open(&session.layout)?;
    memory::guard_memory(&*backend);
    zero_and_check(&*backend)?;
    link.report(&Report::Ended(None));
    Ok(())
}
