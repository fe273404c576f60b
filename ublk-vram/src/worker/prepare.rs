//! All of a worker that needs no device: memory, threads, rings. A standby is made of it long before
//! there is a device for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::headers::header;
use super::lifecycle::Event;
use super::link::Link;
use super::orders::Shared;
use super::swapoff::SwapoffHelper;
use crate::backend::access::Access;
use crate::backend::fault::{FaultBackend, FaultControl};
use crate::backend::registered::RegisteredBackend;
use crate::backend::{Backend, QueueId};
use crate::copy::CopyRoutines;
use crate::device::{CrashPoint, LabSpec};
use crate::engine::{Engine, Integrity};
use crate::error::{Error, ErrorKind, Result};
use crate::health::{Canaries, Watch};
use crate::safety;
use crate::session::{Report, Session, TagBoard};
use crate::store::ChunkTable;
use crate::store::shared::SharedMapping;
use crate::ublk::{Buffers, QueueSeat, QueueSetup, Release, seat_queue};

/// Bytes of a thread's stack beside those of queues; all of it is locked memory.
const STACK_BYTES: usize = 192 << 10;

/// Memory, threads and rings of a worker that has no device yet.
pub(super) struct Prepared {
    pub(super) backend: Box<dyn Backend>,
    /// For headers: it must not be made between a death and the takeover.
    pub(super) access: Access,
    pub(super) table: Arc<ChunkTable>,
    pub(super) seats: Vec<QueueSeat>,
    pub(super) helper: Option<SwapoffHelper>,
    pub(super) watch: Watch,
    pub(super) sender: Sender<Event>,
    pub(super) events: Receiver<Event>,
}

/// Everything that needs no device. From here on every mapping is locked, those of threads and of
/// later allocations included.
pub(super) fn prepare(
    session: &'static Session,
    link: &Link,
    shared: &Arc<Shared>,
    (mut backend, access): (Box<dyn Backend>, Access),
    helper: Option<SwapoffHelper>,
    sender: Sender<Event>,
    events: Receiver<Event>,
) -> Result<Prepared> {
    let stats = Arc::new(session.map_state()?);
    let buffers = session.buffers()?;
    let tags = Arc::new(TagBoard::map(&session.regions, session.shape)?);
    if session.shape.zero_copy {
        let max_io = session.shape.max_io;
        backend = Box::new(RegisteredBackend::new(backend, session.layout, max_io));
    }
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
    let mut integrity = Integrity::new(
        session.shape.queues,
        session.shape.depth,
        shared.status.view().checksums.clone(),
        header(session, 0, session.generation).canary(),
    )?;
    if session.shape.zero_copy && integrity.checksums.is_some() {
        // They would be made of bytes at addresses that are none.
        return Err(Error::usage("zero copy has no checksums"));
    }
    integrity.is_blind = session.shape.zero_copy;
    let mut memory = vec![integrity.lines.clone()];
    if let Buffers::Arena(arena) = &buffers {
        memory.insert(0, SharedMapping::as_mapping(arena));
    }
    let release = Release::new()?.map(Arc::new);
    let mut is_engine = false;
    let depth = session.shape.depth;
    let mut seats = Vec::with_capacity(usize::from(session.shape.queues));
    for number in 0..session.shape.queues {
        let queue = QueueId(number);
        let copies = backend.open_queue(queue, Engine::copies(depth), &memory)?;
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
            buffers: buffers.clone(),
            engine,
            stats: Arc::clone(&stats),
            tags: Arc::clone(&tags),
            release: release.clone(),
            half_fetched,
        };
        seats.push(seat_queue(setup, move |outcome| {
            drop(sender.send(Event::QueueEnded(number, outcome)));
        })?);
    }
    if !seats.iter().all(QueueSeat::wait_warm) {
        return Err(why_a_queue_ended(&events));
    }
    // Every queue is open: what was needed for that is not needed again.
    safety::unlock_files(&backend.cold_files())?;
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
        access,
        table,
        seats,
        helper,
        watch,
        sender,
        events,
    })
}

/// The reason of the first queue thread that ended with one.
pub(super) fn why_a_queue_ended(events: &Receiver<Event>) -> Error {
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

/// The lab's kill, as if from outside.
pub(super) fn crash(session: &Session, shared: &Shared, at: CrashPoint) {
    let wanted = session.spec.lab.crash.is_some_and(|crash| crash.at == at);
    let life = &shared.status.view().life;
    let takes_over = life.record().generation.load(Ordering::Relaxed) > 1;
    if wanted && takes_over && life.crashes_now() {
        let _ = kill(Pid::this(), Signal::SIGKILL);
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
        .stack_size(STACK_BYTES)
        .spawn(work)
        .map(drop)
        .map_err(|error| Error::os(format!("cannot start the {name} thread"), error))
}
