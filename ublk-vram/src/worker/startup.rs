//! From a session to a disk that is served: one that is made, or one whose worker is gone. What fails
//! on the way takes all of it down again.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use super::headers::{check_headers, label, open_access};
use super::lifecycle::{Event, Live};
use super::link::Link;
use super::memory::{
    check_contents, guard_memory, outlive_driver, start_mapping, start_rebuild, start_watch,
};
use super::orders::Shared;
use super::prepare::{Prepared, crash, prepare, spawn, why_a_queue_ended};
use super::swapoff::SwapoffHelper;
use crate::backend::Backend;
use crate::device::{CrashPoint, StaticInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::safety;
use crate::session::{Report, Session};
use crate::store::zero_and_check;
use crate::ublk::{Heir, QueueHandle, QueueSeat, Target, Wishes};

/// ADD_DEV is known to hang on some kernels; then the process ends with a reason.
const ADD_LIMIT: Duration = Duration::from_secs(30);
/// What a takeover allocates (messages, the device's object) is far less.
const HEAP_RESERVE: usize = 512 << 10;

/// Makes the device, waits for the order to show it, and serves it.
pub(super) fn make(
    session: &'static Session,
    link: &Link,
    shared: &Arc<Shared>,
    memory_was_given: bool,
    sender: Sender<Event>,
    events: Receiver<Event>,
) -> Result<()> {
    let backend = session.memory.open(&session.layout)?;
    guard_memory(&*backend);
    zero_and_check(&*backend)?;
    let mut access = open_access(&*backend)?;
    label(session, &mut access, session.generation)?;
    if let Some(checksums) = &shared.status.view().checksums {
        checksums.set_all_zero();
    }
    let mut mortal = session
        .spec
        .lab
        .no_recovery
        .then(|| "the lab switch no-recovery was given".to_owned());
    if !memory_was_given {
        match session.memory.export() {
            Ok(exported) => {
                let fds: Vec<_> = exported.fds.iter().map(std::os::fd::AsFd::as_fd).collect();
                link.report_with(&Report::Memory(exported.description), &fds)?;
            }
            Err(error) if error.kind == ErrorKind::Unsupported => {
                mortal = mortal.or(Some(error.message));
            }
            Err(error) => return Err(error),
        }
    }
    let helper = SwapoffHelper::start()?;
    let memory = (backend, access);
    let prepared = prepare(session, link, shared, memory, Some(helper), sender, events)?;
    let target = {
        let _guard = AddGuard::set(link);
        Target::add(
            session.spec.id,
            &session.shape,
            session.layout.device_bytes(),
            Wishes {
                survive: mortal.is_none(),
                no_safe_stop: session.spec.lab.no_safe_stop,
            },
        )?
    };
    if mortal.is_none() && !target.survives() {
        mortal = Some("the ublk driver has no recovery (Linux 6.1 and later have it)".to_owned());
    }
    let shown = show_disk(session, link, shared, prepared, target, mortal);
    shown?.serve()
}

fn show_disk(
    session: &'static Session,
    link: &Link,
    shared: &Arc<Shared>,
    prepared: Prepared,
    target: Target,
    mortal: Option<String>,
) -> Result<Live> {
    let survives = mortal.clone().map_or(Ok(()), Err);
    *shared
        .survives
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner) = survives.clone();
    link.report(&Report::Added {
        id: target.id(),
        survives,
    });
    let Prepared {
        backend,
        access: _,
        table,
        seats,
        helper,
        watch,
        sender,
        events,
    } = prepared;
    let delete = |target: Target| {
        target
            .delete()
            .unwrap_or_else(|error| tracing::error!("{error}"));
    };
    if !wait_for_order(&events) {
        drop(seats);
        delete(target);
        return Err(Error::new(ErrorKind::Io, "the start was called off"));
    }
    let started = start_queues(seats, &target, &events).and_then(|queues| {
        match target.start(session.layout.device_bytes()) {
            Ok(geometry) => Ok((queues, geometry)),
            Err(error) => {
                target
                    .stop()
                    .unwrap_or_else(|error| tracing::error!("{error}"));
                join(queues);
                Err(error)
            }
        }
    });
    let (queues, geometry) = match started {
        Ok(started) => started,
        Err(error) => {
            delete(target);
            return Err(error);
        }
    };
    let fixed = StaticInfo {
        device: geometry.path.display().to_string(),
        id: geometry.id,
        major: geometry.major,
        minor: geometry.minor,
        mortal,
        ..describe(session, &*backend, &target)
    };
    announce(shared, link, &fixed);
    let health = Arc::clone(&watch.health);
    if fixed.mortal.is_none() {
        outlive_driver(shared, &health, None);
    }
    let watch = start_watch(watch, shared, sender)?;
    Ok(Live {
        session,
        backend,
        table,
        shared: Arc::clone(shared),
        link: link.clone(),
        target,
        fixed,
        queues,
        helper,
        health,
        watch,
        stop_beside: Arc::default(),
        events,
    })
}

/// Tells the supervisor that the disk is served. Before that: whoever reads of it may go away, and
/// take the other end of stderr along.
fn announce(shared: &Shared, link: &Link, fixed: &StaticInfo) {
    if let Err(error) = safety::redirect_stdio_to_null() {
        tracing::warn!("{error}");
    }
    shared.status.go_live(fixed);
    link.report(&Report::Live(Box::new(fixed.clone())));
}

/// Makes ready to take the place of a worker, waits for its death, and takes over.
pub(super) fn stand_by(
    session: &'static Session,
    link: &Link,
    shared: &Arc<Shared>,
    id: u32,
    sender: Sender<Event>,
    events: Receiver<Event>,
) -> Result<()> {
    let backend = session.memory.open(&session.layout)?;
    guard_memory(&*backend);
    let access = open_access(&*backend)?;
    let memory = (backend, access);
    let prepared = prepare(session, link, shared, memory, None, sender, events)?;
    let heir = Heir::prepare(id, session.spec.lab.no_safe_stop)?;
    safety::redirect_stdio_to_null()?;
    safety::reserve_heap(HEAP_RESERVE);
    safety::prefault_stack(HEAP_RESERVE);
    link.report(&Report::Ready);
    let (generation, fixed) = loop {
        match prepared.events.recv() {
            Ok(Event::TakeOver { generation, fixed }) => break (generation, fixed),
            // A queue thread that ended has no device to be told of: its reason is what counts.
            Ok(Event::QueueEnded(_, Err(error))) => return Err(error),
            Ok(_) => {}
            Err(_) => return Err(Error::new(ErrorKind::Io, "every event source is gone")),
        }
    };
    take_over(session, link, shared, prepared, heir, generation, *fixed)?.serve()
}

fn take_over(
    session: &'static Session,
    link: &Link,
    shared: &Arc<Shared>,
    prepared: Prepared,
    heir: Heir,
    generation: u64,
    fixed: StaticInfo,
) -> Result<Live> {
    let Prepared {
        backend,
        mut access,
        table,
        seats,
        helper,
        watch,
        sender,
        events,
    } = prepared;
    let size = session.layout.device_bytes();
    // Also for the threads that it starts below: the kernel locks a new stack with all of the process's
    // mappings held, which a queue thread may need.
    let _urgent = safety::Urgent::begin();
    // It waits until the last worker is gone: nobody but us touches the memory from then on.
    let record = shared.status.view().life.record();
    let in_gap = &record.in_gap;
    let taking = heir.begin(size, &session.shape, in_gap)?;
    let was_lost = record.driver_lost.load(Ordering::SeqCst) != 0;
    let believed = check_headers(session, &mut access, generation)
        .and_then(|()| check_contents(session, shared, &mut access, was_lost));
    let is_new_table = match believed {
        Ok(is_new_table) => is_new_table,
        Err(error) => {
            link.report(&Report::Lost(error.clone()));
            return Err(error);
        }
    };
    label(session, &mut access, generation)?;
    outlive_driver(shared, &watch.health, was_lost.then(Instant::now));
    let queues = start_queues(seats, taking.target(), &events)?;
    in_gap.store(0, Ordering::SeqCst);
    crash(session, shared, CrashPoint::BeforeEnd);
    let target = taking.end()?;
    if was_lost {
        // Not otherwise: a queue thread may have lost the GPU since it was looked at.
        record.driver_lost.store(0, Ordering::SeqCst);
    }
    crash(session, shared, CrashPoint::AfterEnd);
    let now = describe(session, &*backend, &target);
    let fixed = StaticInfo {
        copy: now.copy,
        worker: now.worker,
        ..fixed
    };
    *shared
        .survives
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner) = Ok(());
    shared.status.go_live(&fixed);
    link.report(&Report::Live(Box::new(fixed.clone())));
    let health = Arc::clone(&watch.health);
    let stop_beside = Arc::default();
    if is_new_table {
        start_rebuild(session, shared, access, &stop_beside)?;
    }
    let watch = start_watch(watch, shared, sender.clone())?;
    // The device is served without, more slowly.
    start_mapping(session, &*backend, &stop_beside, sender)
        .unwrap_or_else(|error| tracing::warn!("no more is mapped for the CPU: {error}"));
    Ok(Live {
        session,
        backend,
        table,
        shared: Arc::clone(shared),
        link: link.clone(),
        target,
        fixed,
        queues,
        helper,
        health,
        watch,
        stop_beside,
        events,
    })
}

fn wait_for_order(events: &Receiver<Event>) -> bool {
    loop {
        match events.recv() {
            Ok(Event::GoLive) => return true,
            Ok(Event::Terminate | Event::QueueEnded(..)) | Err(_) => return false,
            Ok(Event::Remove(_) | Event::Lost | Event::Mapped | Event::TakeOver { .. }) => {}
        }
    }
}

/// Gives every queue thread its device and waits until each has sent its fetches. On an error every
/// thread has ended, or the process is to.
fn start_queues(
    seats: Vec<QueueSeat>,
    target: &Target,
    events: &Receiver<Event>,
) -> Result<Vec<JoinHandle<()>>> {
    let handles: Vec<QueueHandle> = seats
        .into_iter()
        .map(|seat| seat.start(target.device()))
        .collect();
    // Every thread has sent its fetches, or has ended, before anything is stopped: a fetch that is
    // sent after the stop would wait for ever.
    let (queues, are_ready): (Vec<_>, Vec<_>) =
        handles.into_iter().map(QueueHandle::wait_ready).unzip();
    if are_ready.contains(&false) {
        let error = why_a_queue_ended(events);
        target
            .stop()
            .unwrap_or_else(|error| tracing::error!("{error}"));
        join(queues);
        return Err(error);
    }
    Ok(queues)
}

fn join(queues: Vec<JoinHandle<()>>) {
    for thread in queues {
        // A panic was reported by its `on_end`.
        let _ = thread.join();
    }
}

fn describe(session: &Session, backend: &dyn Backend, target: &Target) -> StaticInfo {
    StaticInfo {
        name: session.spec.name.clone(),
        device: String::new(),
        id: target.id(),
        major: 0,
        minor: 0,
        size: session.layout.device_bytes(),
        backend: backend.kind().to_owned(),
        gpu: backend.gpu(),
        residency: backend.residency().map(str::to_owned),
        uuid: session.uuid_text(),
        queues: session.shape.queues,
        depth: session.shape.depth,
        max_io: session.shape.max_io,
        paths: backend.paths(),
        chunk_size: session.layout.chunk_size(),
        chunks: session.layout.chunks(),
        features: target.feature_names(),
        copy: backend.copy_path(),
        zero_copy: session.shape.zero_copy,
        pid: 0,
        worker: i32::try_from(std::process::id()).unwrap_or(0),
        mortal: None,
        since: SystemTime::UNIX_EPOCH
            .elapsed()
            .map_or(0, |since| since.as_secs()),
    }
}

/// Ends the process with a reason when ADD_DEV never comes back. Dropped, it does nothing.
struct AddGuard {
    _lift: Sender<()>,
}

impl AddGuard {
    fn set(link: &Link) -> AddGuard {
        let (lift, lifted) = channel::<()>();
        let link = link.clone();
        // If the thread cannot be made there is no guard, and an ADD_DEV that answers needs none.
        let _ = spawn("add-guard", move || {
            if lifted.recv_timeout(ADD_LIMIT) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            let failed = Error::new(
                ErrorKind::Timeout,
                format!(
                    "the ublk driver did not add a device within {} s; this kernel may be one of \
                     those known to hang (see `vramctl check`)",
                    ADD_LIMIT.as_secs()
                ),
            );
            eprintln!("ublk-vram: error: {failed}");
            link.report(&Report::Failed(failed));
            std::process::exit(1);
        });
        AddGuard { _lift: lift }
    }
}
