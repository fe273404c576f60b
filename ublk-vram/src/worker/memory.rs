//! What a worker does with the memory beside serving it: it is watched, believed after a look, and its
//! checksums are made again where they were lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::lifecycle::Event;
use super::orders::Shared;
use super::prepare::spawn;
use crate::backend::access::Access;
use crate::backend::{Backend, Mapping};
use crate::error::{Error, ErrorKind, Result};
use crate::health::{Health, Watch, WatchHandle};
use crate::safety::{Root, available_memory, bus_error};
use crate::session::Session;
use crate::store::checksum::{rebuild, sample};

/// Blocks that a takeover checks before it believes the memory.
const SAMPLE_BLOCKS: u64 = 64;
/// So much system memory is to be available before more is mapped, beside its page tables.
const LEAST_AVAILABLE: u64 = 256 << 20;
/// A mapped page of 4 KiB takes 8 bytes of a page table.
const PAGE_TABLE_SHARE: u64 = 512;
/// How often it is looked for.
const AVAILABLE_AGAIN: Duration = Duration::from_secs(5);
/// A worker that took over a GPU that its driver had lost, and loses it again so soon, ends the device.
const SECOND_LOSS: Duration = Duration::from_secs(60);

/// From here on a mapping that is taken away is an error, and not the end of the process.
pub(crate) fn guard_memory(backend: &dyn Backend) {
    let chunks = backend.chunks().iter();
    bus_error::watch(chunks.filter_map(|chunk| range(chunk.mapping()?)));
}

fn range(mapping: &Mapping) -> Option<(usize, usize)> {
    let first = mapping.at(0, mapping.len())?;
    Some((first as usize, mapping.len()))
}

/// Maps, beside the I/O, what the driver had no room for while the last worker had it mapped. It waits until
/// there is memory for that: a machine that is short of it needs its swap, and this thread has locks of the
/// heap and of the driver that queue threads take, too.
pub(super) fn start_mapping(
    session: &'static Session,
    backend: &dyn Backend,
    stop: &Arc<AtomicBool>,
    events: Sender<Event>,
) -> Result<()> {
    let chunks = backend.chunks().to_vec();
    let rest = session.memory.unmapped_rest(&chunks);
    if rest == 0 {
        return Ok(());
    }
    let stop = Arc::clone(stop);
    spawn("map-rest", move || {
        let needed = LEAST_AVAILABLE + rest / PAGE_TABLE_SHARE;
        loop {
            match available_memory(&Root::default()) {
                Ok(available) if available >= needed => break,
                Ok(_) => std::thread::sleep(AVAILABLE_AGAIN),
                Err(error) => return tracing::warn!("no more is mapped for the CPU: {error}"),
            }
            if stop.load(Ordering::SeqCst) {
                return;
            }
        }
        let rest = session.memory.map_rest(&chunks, &stop);
        if rest.is_empty() {
            return;
        }
        bus_error::watch(rest.iter().filter_map(|(_, mapping)| range(mapping)));
        tracing::info!("{} more chunks are mapped for the CPU", rest.len());
        for (chunk, mapping) in rest {
            chunk.set_mapping(mapping);
        }
        // Nobody who listens any more needs to know.
        let _ = events.send(Event::Mapped);
    })
}

/// Starts the thread that looks after the memory.
pub(super) fn start_watch(
    watch: Watch,
    shared: &Arc<Shared>,
    events: Sender<Event>,
) -> Result<WatchHandle> {
    let shared = Arc::clone(shared);
    watch.start(move |_reason| {
        // No worker that comes after this one may believe the memory.
        let record = shared.status.view().life.record();
        record.lost.store(1, Ordering::SeqCst);
        // Nobody who listens any more needs to know.
        let _ = events.send(Event::Lost);
    })
}

/// When the driver loses the GPU this process ends at once, with every request it has, and the next one
/// looks at the memory. Once: `tried` is when this process took over for that reason itself.
pub(super) fn outlive_driver(shared: &Arc<Shared>, health: &Health, tried: Option<Instant>) {
    let shared = Arc::clone(shared);
    health.on_driver_loss(move || {
        if tried.is_some_and(|tried| tried.elapsed() < SECOND_LOSS) {
            return;
        }
        let record = shared.status.view().life.record();
        if record.supervisor.load(Ordering::SeqCst) == 0 {
            // There is nobody to take over, and the memory would go with this process.
            return;
        }
        // The queue threads find out together.
        if record.driver_lost.swap(1, Ordering::SeqCst) == 0 {
            record.driver_losses.fetch_add(1, Ordering::SeqCst);
        }
        // SAFETY: _exit takes any number. Nothing that runs at an exit is to wait for the driver.
        unsafe { libc::_exit(1) };
    });
}

/// Gives every block a checksum that has none, beside the I/O.
pub(super) fn start_rebuild(
    session: &'static Session,
    shared: &Shared,
    mut access: Access,
    stop: &Arc<AtomicBool>,
) -> Result<()> {
    let Some(table) = shared.status.view().checksums.clone() else {
        return Ok(());
    };
    table.set_unverified();
    let stop = Arc::clone(stop);
    spawn("rebuild", move || {
        match rebuild(&table, &session.layout, &mut access, &stop) {
            Ok(blocks) => tracing::info!("{blocks} blocks have a checksum again"),
            Err(error) => tracing::error!("{error}"),
        }
    })
}

/// The contents are believed if most of a sample fits its checksums: one bad block is one bad block, many
/// are other contents. After the driver lost the GPU all of them must fit (`is_doubtful`). Takes over the
/// checksums; whether there are none yet.
pub(super) fn check_contents(
    session: &Session,
    shared: &Shared,
    access: &mut Access,
    is_doubtful: bool,
) -> Result<bool> {
    let lost = |why: &str| {
        let name = &session.spec.name;
        Err(Error::new(
            ErrorKind::Io,
            format!("the memory of '{name}' does not hold its contents any more: {why}"),
        ))
    };
    let view = shared.status.view();
    if view.life.record().lost.load(Ordering::SeqCst) != 0 {
        return lost("an earlier worker found it lost");
    }
    let Some(table) = &view.checksums else {
        return Ok(false);
    };
    let found = table.adopt();
    let sample = sample(table, &session.layout, access, SAMPLE_BLOCKS)?;
    let is_other = if is_doubtful {
        sample.bad > 0
    } else {
        sample.bad * 2 > sample.checked
    };
    if is_other {
        return lost(&format!(
            "{} of {} blocks do not fit their checksums",
            sample.bad, sample.checked
        ));
    }
    // A rebuild that an earlier worker has begun goes on.
    Ok(found.is_new || table.is_unverified())
}
