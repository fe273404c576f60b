//! From a session to a disk. What fails on the way takes all of it down again.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

use super::lifecycle::{Event, Live};
use super::session::Session;
use super::start::{StartLine, StartPipe};
use super::status::{Desk, Status};
use super::swapoff::SwapoffHelper;
use crate::backend::fault::{FaultBackend, FaultControl};
use crate::backend::{Backend, QueueId};
use crate::control;
use crate::copy::CopyRoutines;
use crate::device::{LabSpec, StaticInfo};
use crate::engine::{Engine, Integrity, StatsTable};
use crate::error::{Error, ErrorKind, Result};
use crate::health::{Canaries, Health, Watch, WatchHandle};
use crate::safety::{self, bus_error};
use crate::store::shared::SharedMapping;
use crate::store::{ChunkTable, Header, write_header, zero_and_check};
use crate::ublk::{Geometry, QueueHandle, Target, start_queue};

/// ADD_DEV is known to hang on some kernels; then the process ends with a reason.
const ADD_LIMIT: Duration = Duration::from_secs(30);

/// The start pipe as this thread and the guard of ADD_DEV share it.
pub(super) type SharedPipe = Arc<Mutex<StartPipe>>;

/// Writes the one line of the start pipe.
pub(super) fn tell(pipe: &SharedPipe, line: &StartLine) {
    pipe.lock()
        .unwrap_or_else(PoisonError::into_inner)
        .send(line);
}

/// Everything up to the disk.
pub(super) fn bring_up<'a>(
    session: &'a Session,
    pipe: &SharedPipe,
) -> Result<(Live<'a>, StaticInfo)> {
    let (sender, events) = channel();
    let stats = Arc::new(session.map_state()?);
    let arena = Arc::new(session.map_arena()?);
    let mut backend = session.memory.open(&session.layout)?;
    let routines = CopyRoutines::best();
    // From here on a mapping that is taken away is an error, and not the end of the process.
    bus_error::watch(backend.chunks().iter().filter_map(|chunk| {
        let first = chunk.mapping.at(0, chunk.mapping.len())?;
        Some((first as usize, chunk.mapping.len()))
    }));
    zero_and_check(backend.chunks(), &routines)?;
    for (chunk, index) in backend.chunks().iter().zip(0..) {
        write_header(chunk, &header(session, index), &routines)?;
    }
    let integrity = Integrity {
        checksums: session.map_checksums()?.map(Arc::new),
        health: Arc::new(Health::new(session.shape.queues, session.shape.depth)?),
        canary: header(session, 0).canary(),
    };
    if let Some(checksums) = &integrity.checksums {
        checksums.set_all_zero();
    }

    let lab = &session.spec.lab;
    let fault = lab.fault.then(|| Arc::new(FaultControl::default()));
    if let Some(fault) = &fault {
        backend = Box::new(FaultBackend::new(backend, Arc::clone(fault)));
    }
    let table = Arc::new(ChunkTable::new(backend.chunks(), session.shape.queues));
    let storage = session.memory.system_bytes(&session.layout);
    let status = Arc::new(Status::new(Arc::clone(&stats), arena.len() as u64, storage));
    status.set_checksums(integrity.checksums.clone());
    let helper = SwapoffHelper::start()?;

    // From here on every mapping is locked, those of threads and of later allocations included.
    if !lab.no_memory_lock {
        match safety::lock_memory() {
            Err(error) if !session.spec.allow_unsafe => return Err(error),
            Err(error) => tracing::warn!("{error}"),
            Ok(()) => {}
        }
    }
    start_signal_thread(sender.clone())?;
    start_control_thread(session, &status, sender.clone(), fault)?;

    let engines = make_engines(session, &*backend, &table, &stats, &integrity)?;
    let watch = start_watch(session, &*backend, &engines, &integrity, sender.clone())?;
    let target = {
        let _guard = AddGuard::set(session, pipe);
        Target::add(
            session.spec.id,
            &session.shape,
            session.layout.device_bytes(),
            lab.no_safe_stop,
        )?
    };
    let shown = show_disk(session, &target, engines, &stats, &arena, &events, &sender);
    let (queues, geometry) = match shown {
        Ok(shown) => shown,
        Err(error) => {
            target
                .delete()
                .unwrap_or_else(|error| tracing::error!("{error}"));
            return Err(error);
        }
    };
    let fixed = describe(session, &*backend, &target, &geometry);
    status.set_fixed(fixed.clone());
    let live = Live {
        session,
        backend,
        table,
        status,
        health: integrity.health,
        watch,
        target,
        geometry,
        queues,
        helper: Some(helper),
        events,
    };
    Ok((live, fixed))
}

fn header(session: &Session, index: u32) -> Header {
    Header {
        uuid: session.uuid,
        name: session.spec.name.clone(),
        index,
        count: session.layout.chunks(),
        chunk_bytes: session.layout.chunk_bytes(index),
        device_bytes: session.layout.device_bytes(),
        chunk_size: session.layout.chunk_size(),
        generation: session.generation,
        clean: false,
    }
}

fn make_engines(
    session: &Session,
    backend: &dyn Backend,
    table: &Arc<ChunkTable>,
    stats: &Arc<StatsTable>,
    integrity: &Integrity,
) -> Result<Vec<Engine>> {
    let depth = session.shape.depth;
    (0..session.shape.queues)
        .map(|number| {
            let queue = QueueId(number);
            let copies = backend.open_queue(queue, Engine::copies(depth))?;
            let (table, stats) = (Arc::clone(table), Arc::clone(stats));
            Ok(Engine::new(
                queue,
                depth,
                session.layout,
                table,
                copies,
                stats,
                integrity.clone(),
            ))
        })
        .collect()
}

/// Starts the thread that looks after the memory.
fn start_watch(
    session: &Session,
    backend: &dyn Backend,
    engines: &[Engine],
    integrity: &Integrity,
    events: Sender<Event>,
) -> Result<WatchHandle> {
    let limit = session.spec.lab.copy_limit.unwrap_or(LabSpec::COPY_LIMIT);
    // A copy that the CPU does is done when it was started: only an engine's can be outstanding.
    let is_engine = engines.iter().any(|e| e.completion_fd().is_some());
    let watch = Watch {
        health: Arc::clone(&integrity.health),
        presence: session.memory.presence()?,
        canaries: Canaries {
            chunks: backend.chunks().to_vec(),
            expected: integrity.canary,
            routines: CopyRoutines::best(),
        },
        copy_limit: is_engine.then(|| Duration::from_secs(limit)),
    };
    // Nobody who listens any more needs to know.
    watch.start(move |_reason| drop(events.send(Event::Lost)))
}

/// Starts every queue thread and then the disk. On an error every thread has ended.
fn show_disk(
    session: &Session,
    target: &Target,
    engines: Vec<Engine>,
    stats: &Arc<StatsTable>,
    arena: &Arc<SharedMapping>,
    events: &Receiver<Event>,
    sender: &Sender<Event>,
) -> Result<(Vec<JoinHandle<()>>, Geometry)> {
    let mut failure = None;
    let mut handles: Vec<QueueHandle> = Vec::with_capacity(engines.len());
    for (engine, number) in engines.into_iter().zip(0..) {
        let sender = sender.clone();
        let on_end = move |outcome| drop(sender.send(Event::QueueEnded(number, outcome)));
        match start_queue(
            target.device(),
            QueueId(number),
            session.shape,
            Arc::clone(arena),
            engine,
            Arc::clone(stats),
            on_end,
        ) {
            Ok(handle) => handles.push(handle),
            Err(error) => {
                failure = Some(error);
                break;
            }
        }
    }
    // Every thread has sent its fetches, or has ended, before anything is stopped: a fetch that is
    // sent after the stop would wait for ever.
    let (queues, are_ready): (Vec<_>, Vec<_>) =
        handles.into_iter().map(QueueHandle::wait_ready).unzip();
    if failure.is_none() && are_ready.contains(&false) {
        failure = Some(why_a_queue_ended(events));
    }
    let outcome = match failure {
        Some(error) => Err(error),
        None => target.start(session.layout.device_bytes()),
    };
    match outcome {
        Ok(geometry) => Ok((queues, geometry)),
        Err(error) => {
            target
                .stop()
                .unwrap_or_else(|error| tracing::error!("{error}"));
            for thread in queues {
                // A panic was reported by its `on_end`.
                let _ = thread.join();
            }
            Err(error)
        }
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

fn describe(
    session: &Session,
    backend: &dyn Backend,
    target: &Target,
    geometry: &Geometry,
) -> StaticInfo {
    StaticInfo {
        name: session.spec.name.clone(),
        device: geometry.path.display().to_string(),
        id: geometry.id,
        major: geometry.major,
        minor: geometry.minor,
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
        pid: i32::try_from(std::process::id()).unwrap_or(0),
        since: SystemTime::UNIX_EPOCH
            .elapsed()
            .map_or(0, |since| since.as_secs()),
    }
}

/// SIGTERM and SIGINT become events. They were blocked in `main`, before any thread.
fn start_signal_thread(events: Sender<Event>) -> Result<()> {
    let signals = safety::block_termination_signals()?;
    spawn("signals", move || {
        while let Ok(signal) = signals.wait() {
            tracing::info!("{signal}");
            if events.send(Event::Terminate).is_err() {
                break;
            }
        }
    })
}

fn start_control_thread(
    session: &Session,
    status: &Arc<Status>,
    events: Sender<Event>,
    fault: Option<Arc<FaultControl>>,
) -> Result<()> {
    let listener = control::bind(&session.run_dir.socket(&session.spec.name))?;
    let desk = Arc::new(Desk {
        status: Arc::clone(status),
        events: Mutex::new(events),
        fault,
    });
    let (serving, is_serving) = channel();
    spawn("control", move || {
        let ready = || {
            // Whoever waited may have given up.
            let _ = serving.send(());
        };
        if let Err(error) = control::serve(listener, desk, ready) {
            tracing::error!("{error}");
        }
    })?;
    is_serving.recv().map_err(|_| {
        Error::new(
            ErrorKind::Io,
            "the control socket cannot be served: io_uring gives it no ring",
        )
    })
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
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
    fn set(session: &Session, pipe: &SharedPipe) -> AddGuard {
        let (lift, lifted) = channel::<()>();
        let (name, run_dir) = (session.spec.name.clone(), session.run_dir.clone());
        let pipe = Arc::clone(pipe);
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
            tell(&pipe, &StartLine::Failed { failed });
            let left: [PathBuf; 2] = [run_dir.socket(&name), run_dir.lock(&name)];
            for path in left {
                let _ = std::fs::remove_file(path);
            }
            let _ = safety::remove_cgroup(name.as_str());
            std::process::exit(1);
        });
        AddGuard { _lift: lift }
    }
}
