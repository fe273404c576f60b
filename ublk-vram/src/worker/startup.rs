//! From a session to a disk that is served: one that is made, or one whose worker is gone. What fails
//! on the way takes all of it down again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::lifecycle::{Event, Live};
use super::link::Link;
use super::orders::Shared;
use super::swapoff::SwapoffHelper;
use crate::backend::fault::{FaultBackend, FaultControl};
use crate::backend::{Backend, QueueId};
use crate::copy::CopyRoutines;
use crate::device::{CrashPoint, LabSpec, StaticInfo};
use crate::engine::{Engine, Integrity};
use crate::error::{Error, ErrorKind, Result};
use crate::health::{Canaries, Health, Watch, WatchHandle};
use crate::safety::{self, bus_error};
use crate::session::{Report, Session, TagBoard};
use crate::store::checksum::{rebuild, sample};
use crate::store::{ChunkTable, Header, read_header, write_header, zero_and_check};
use crate::ublk::{Heir, QueueHandle, QueueSeat, QueueSetup, Target, Wishes, seat_queue};

/// ADD_DEV is known to hang on some kernels; then the process ends with a reason.
const ADD_LIMIT: Duration = Duration::from_secs(30);
/// What a takeover allocates (messages, the device's object) is far less.
const HEAP_RESERVE: usize = 512 << 10;

/// Blocks that a takeover checks before it believes the memory.
const SAMPLE_BLOCKS: u64 = 64;

/// Memory, threads and rings of a worker that has no device yet.
struct Prepared {
    backend: Box<dyn Backend>,
    table: Arc<ChunkTable>,
    seats: Vec<QueueSeat>,
    helper: Option<SwapoffHelper>,
    watch: Watch,
    sender: Sender<Event>,
    events: Receiver<Event>,
}

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
    let routines = CopyRoutines::best();
    guard_memory(&*backend);
    zero_and_check(backend.chunks(), &routines)?;
    write_headers(session, &*backend, session.generation)?;
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
            Err(error) => mortal = mortal.or(Some(error.message)),
        }
    }
    let helper = SwapoffHelper::start()?;
    let prepared = prepare(session, link, shared, backend, Some(helper), sender, events)?;
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
        stop_rebuild: Arc::default(),
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
    let prepared = prepare(session, link, shared, backend, None, sender, events)?;
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
        table,
        seats,
        helper,
        watch,
        sender,
        events,
    } = prepared;
    let size = session.layout.device_bytes();
    // It waits until the last worker is gone: nobody but us touches the memory from then on.
    let taking = heir.begin(size, &session.shape)?;
    let believed = check_headers(session, &*backend, generation)
        .and_then(|()| check_contents(session, shared, &*backend));
    let is_new_table = match believed {
        Ok(is_new_table) => is_new_table,
        Err(error) => {
            link.report(&Report::Lost(error.clone()));
            return Err(error);
        }
    };
    write_headers(session, &*backend, generation)?;
    let queues = start_queues(seats, taking.target(), &events)?;
    crash(session, shared, CrashPoint::BeforeEnd);
    let target = taking.end()?;
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
    let stop_rebuild = Arc::default();
    if is_new_table {
        start_rebuild(session, shared, &watch, &stop_rebuild)?;
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
        stop_rebuild,
        events,
    })
}

/// The lab's kill, as if from outside.
fn crash(session: &Session, shared: &Shared, at: CrashPoint) {
    let wanted = session.spec.lab.crash.is_some_and(|crash| crash.at == at);
    let life = &shared.status.view().life;
    let takes_over = life.record().generation.load(Ordering::Relaxed) > 1;
    if wanted && takes_over && life.crashes_now() {
        let _ = kill(Pid::this(), Signal::SIGKILL);
    }
}

fn wait_for_order(events: &Receiver<Event>) -> bool {
    loop {
        match events.recv() {
            Ok(Event::GoLive) => return true,
            Ok(Event::Terminate | Event::QueueEnded(..)) | Err(_) => return false,
            Ok(Event::Remove(_) | Event::Lost | Event::TakeOver { .. }) => {}
        }
    }
}

/// Everything that needs no device. From here on every mapping is locked, those of threads and of
/// later allocations included.
fn prepare(
    session: &'static Session,
    link: &Link,
    shared: &Arc<Shared>,
    mut backend: Box<dyn Backend>,
    helper: Option<SwapoffHelper>,
    sender: Sender<Event>,
    events: Receiver<Event>,
) -> Result<Prepared> {
    let stats = Arc::new(session.map_state()?);
    let arena = Arc::new(session.map_arena()?);
    let tags = Arc::new(TagBoard::map(&session.regions, session.shape)?);
    let lab = &session.spec.lab;
    let fault = lab.fault.then(|| Arc::new(FaultControl::default()));
    if let Some(fault) = &fault {
        backend = Box::new(FaultBackend::new(backend, Arc::clone(fault)));
    }
    shared.set_fault(fault);
    let table = Arc::new(ChunkTable::new(backend.chunks(), session.shape.queues));
    if !lab.no_memory_lock {
        match safety::lock_memory() {
            Err(error) if !session.spec.allow_unsafe => return Err(error),
            Err(error) => tracing::warn!("{error}"),
            Ok(()) => {}
        }
    }
    start_signal_thread(link.clone(), sender.clone(), Arc::clone(shared))?;
    let integrity = Integrity {
        checksums: shared.status.view().checksums.clone(),
        health: Arc::new(Health::new(session.shape.queues, session.shape.depth)?),
        canary: header(session, 0, session.generation).canary(),
    };
    let mut is_engine = false;
    let depth = session.shape.depth;
    let mut seats = Vec::with_capacity(usize::from(session.shape.queues));
    for number in 0..session.shape.queues {
        let queue = QueueId(number);
        let copies = backend.open_queue(queue, Engine::copies(depth))?;
        let engine = Engine::new(
            queue,
            depth,
            session.layout,
            Arc::clone(&table),
            copies,
            Arc::clone(&stats),
            integrity.clone(),
        );
        // A copy that the CPU does is done when it was started: only an engine's can be outstanding.
        is_engine |= engine.completion_fd().is_some();
        let sender = sender.clone();
        let lab = Arc::clone(shared);
        let half_fetched = (number == 0 && session.spec.lab.crash.is_some()).then(|| {
            Box::new(move || crash(session, &lab, CrashPoint::HalfFetched))
                as Box<dyn FnOnce() + Send>
        });
        let setup = QueueSetup {
            queue,
            shape: session.shape,
            arena: Arc::clone(&arena),
            engine,
            stats: Arc::clone(&stats),
            tags: Arc::clone(&tags),
            half_fetched,
        };
        seats.push(seat_queue(setup, move |outcome| {
            drop(sender.send(Event::QueueEnded(number, outcome)));
        })?);
    }
    if !seats.iter().all(QueueSeat::wait_warm) {
        return Err(why_a_queue_ended(&events));
    }
    let limit = lab.copy_limit.unwrap_or(LabSpec::COPY_LIMIT);
    let watch = Watch {
        health: integrity.health,
        presence: session.memory.presence()?,
        canaries: Canaries {
            chunks: backend.chunks().to_vec(),
            expected: integrity.canary,
            routines: CopyRoutines::best(),
        },
        copy_limit: is_engine.then(|| Duration::from_secs(limit)),
    };
    Ok(Prepared {
        backend,
        table,
        seats,
        helper,
        watch,
        sender,
        events,
    })
}

/// From here on a mapping that is taken away is an error, and not the end of the process.
fn guard_memory(backend: &dyn Backend) {
    bus_error::watch(backend.chunks().iter().filter_map(|chunk| {
        let first = chunk.mapping.at(0, chunk.mapping.len())?;
        Some((first as usize, chunk.mapping.len()))
    }));
}

/// Starts the thread that looks after the memory.
fn start_watch(watch: Watch, shared: &Arc<Shared>, events: Sender<Event>) -> Result<WatchHandle> {
    let shared = Arc::clone(shared);
    watch.start(move |_reason| {
        // No worker that comes after this one may believe the memory.
        let record = shared.status.view().life.record();
        record.lost.store(1, Ordering::SeqCst);
        // Nobody who listens any more needs to know.
        let _ = events.send(Event::Lost);
    })
}

/// Gives every block a checksum that has none, beside the I/O.
fn start_rebuild(
    session: &'static Session,
    shared: &Shared,
    watch: &Watch,
    stop: &Arc<AtomicBool>,
) -> Result<()> {
    let Some(table) = shared.status.view().checksums.clone() else {
        return Ok(());
    };
    table.set_unverified();
    let (chunks, stop) = (watch.canaries.chunks.clone(), Arc::clone(stop));
    spawn("rebuild", move || {
        match rebuild(
            &table,
            &session.layout,
            &chunks,
            &CopyRoutines::best(),
            &stop,
        ) {
            Ok(blocks) => tracing::info!("{blocks} blocks have a checksum again"),
            Err(error) => tracing::error!("{error}"),
        }
    })
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

fn why_a_queue_ended(events: &Receiver<Event>) -> Error {
    while let Ok(event) = events.recv_timeout(Duration::from_secs(1)) {
        if let Event::QueueEnded(_, Err(error)) = event {
            return error;
        }
    }
    Error::new(
        ErrorKind::Io,
        "a queue thread ended before the device was started",
    )
}

fn header(session: &Session, index: u32, generation: u64) -> Header {
    Header {
        uuid: session.uuid,
        name: session.spec.name.clone(),
        index,
        count: session.layout.chunks(),
        chunk_bytes: session.layout.chunk_bytes(index),
        device_bytes: session.layout.device_bytes(),
        chunk_size: session.layout.chunk_size(),
        generation,
        clean: false,
    }
}

fn write_headers(session: &Session, backend: &dyn Backend, generation: u64) -> Result<()> {
    let routines = CopyRoutines::best();
    for (chunk, index) in backend.chunks().iter().zip(0..) {
        write_header(chunk, &header(session, index, generation), &routines)?;
    }
    Ok(())
}

/// The memory is believed only if every chunk says that it belongs to this device, at this place. A
/// worker may have died while it wrote a new generation: any that is not newer than its own will do.
fn check_headers(session: &Session, backend: &dyn Backend, generation: u64) -> Result<()> {
    let routines = CopyRoutines::best();
    for (chunk, index) in backend.chunks().iter().zip(0..) {
        let not_ours = |why: String| {
            Error::new(
                ErrorKind::Io,
                format!(
                    "the memory of '{}' does not hold its contents any more: chunk {index}: {why}",
                    session.spec.name
                ),
            )
        };
        let found = read_header(chunk, &routines).map_err(|error| not_ours(error.to_string()))?;
        let expected = header(session, index, found.generation);
        if found.generation > generation {
            return Err(not_ours(format!(
                "its header is of generation {}, and {generation} is the next",
                found.generation
            )));
        }
        if (Header {
            clean: false,
            ..found
        }) != expected
        {
            return Err(not_ours("its header is that of another device".to_owned()));
        }
    }
    Ok(())
}

/// The contents are believed if most of a sample fits its checksums: one bad block is one bad block, many
/// are other contents. Takes over the checksums; whether there are none yet.
fn check_contents(session: &Session, shared: &Shared, backend: &dyn Backend) -> Result<bool> {
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
    let (layout, chunks) = (&session.layout, backend.chunks());
    let sample = sample(table, layout, chunks, &CopyRoutines::best(), SAMPLE_BLOCKS)?;
    if sample.bad * 2 > sample.checked {
        return lost(&format!(
            "{} of {} blocks do not fit their checksums",
            sample.bad, sample.checked
        ));
    }
    Ok(found.is_new)
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
        chunk_size: session.layout.chunk_size(),
        chunks: session.layout.chunks(),
        features: target.feature_names(),
        copy: backend.copy_path(),
        pid: 0,
        worker: i32::try_from(std::process::id()).unwrap_or(0),
        mortal: None,
        since: SystemTime::UNIX_EPOCH
            .elapsed()
            .map_or(0, |since| since.as_secs()),
    }
}

/// SIGTERM and SIGINT to a worker are meant for the server: the supervisor is told, or the lifecycle
/// thread while there is none. They were blocked in `main`, before any thread.
fn start_signal_thread(link: Link, events: Sender<Event>, shared: Arc<Shared>) -> Result<()> {
    let signals = safety::block_termination_signals()?;
    spawn("signals", move || {
        while let Ok(signal) = signals.wait() {
            tracing::info!("{signal}");
            let supervisor = &shared.status.view().life.record().supervisor;
            if supervisor.load(Ordering::Relaxed) != 0 {
                link.report(&Report::Terminate);
            } else if events.send(Event::Terminate).is_err() {
                break;
            }
        }
    })
}

pub(super) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(512 << 10)
        .spawn(work)
        .map(drop)
        .map_err(|error| Error::os(format!("cannot start the {name} thread"), error))
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
