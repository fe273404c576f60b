//! The process that holds what must outlive a worker, and sees to it that there is one.
//!
//! It is small: no GPU library, no I/O. It owns the name, the control socket and the session, keeps all
//! memory that is system memory locked (a worker's locks end with it), and watches the worker by a
//! pidfd. Beside the worker stands another one that is ready ([`crate::worker`]): when the worker dies,
//! that one is told to take over, and nothing has to be started, opened or allocated for it.
//!
//! ```text
//!   creating -- memory ready, ADD_DEV, standby ready, START_DEV --> live
//!   live -- the worker died, or is replaced --> recovering -- the standby serves the disk --> live
//!   recovering -- five deaths without one completed request --> failed -- recover --> recovering
//!   failed -- remove --force, or the time limit --> stopping
//!   live -- SIGTERM --> draining -- nobody uses it --> stopping --> the processes end
//!   live -- remove, nobody uses it --> stopping
//! ```
//!
//! The supervisor's own death stops nothing: the worker starts another one (`worker::alone`), which is
//! handed the same session. Neither process has the other's death as a reason to end, and neither is to
//! be ended for it by a service manager: a unit says `KillMode=process`.
//!
//! Threads: this one (a loop over descriptors that never waits for anything else), one for the control
//! socket, one for chores that may take long.

mod calls;
mod chores;
mod desk;
mod kept;
mod leave;
mod machine;
mod orphans;
mod plan;
mod start;
mod takeover;

use std::os::unix::net::UnixListener;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use orphans::disk_is_there;
pub use plan::{SUBCOMMAND as PLAN_SUBCOMMAND, main as plan_main};
pub use start::{StartLine, StartPipe};

use self::desk::{Desk, Status, Wake};
use self::kept::Kept;
use self::machine::{Event, Machine, Origin};
use crate::backend::MemoryHandles;
use crate::backend::access::Access;
use crate::control::{self, RunDir};
use crate::device::{DeviceName, DeviceSpec, DeviceState, StaticInfo};
use crate::error::{Error, ErrorKind, Result};
use crate::safety;
use crate::session::process::{Process, inherited_channel};
use crate::session::{Adopt, Identity, NameLock, Regions, VERSION, take_fds};
use crate::store::{HEADER_BYTES, read_header};
use crate::ublk;

/// The driver's time for a question.
const ASK_LIMIT: Duration = Duration::from_secs(10);
/// UBLK_S_DEV_QUIESCED (include/uapi/linux/ublk_cmd.h): the disk waits for a server.
const QUIESCED: u16 = 2;

/// Makes the device of `spec` and serves it until it has ended in order.
///
/// # Errors
/// Why it could not be started (told through `start` too), or did not end in order.
pub fn run(spec: DeviceSpec, mut start: StartPipe, warnings: Vec<String>) -> Result<()> {
    let machine = match prepare(spec) {
        Ok(machine) => machine,
        Err(error) => {
            start.send(&StartLine::Failed {
                failed: error.clone(),
            });
            return Err(error);
        }
    };
    machine.run(Some(start), warnings)
}

fn prepare(spec: DeviceSpec) -> Result<Machine> {
    let run_dir = RunDir::system();
    let mut name = NameLock::take(&run_dir, &spec.name)?;
    // What an orphan left stays, the file of its name's lock included.
    orphans::refuse_if_orphaned(&run_dir, &spec).inspect_err(|_| {
        if run_dir.note(&spec.name).exists() {
            name.disown();
        }
    })?;
    let (layout, shape) = plan::of(&spec)?;
    let memory = if MemoryHandles::needs_gpu_library(&spec.backend) {
        None
    } else {
        Some(MemoryHandles::create(&spec.backend, &layout)?)
    };
    let identity = Identity::new(spec, &layout, shape)?;
    let socket = run_dir.socket(&identity.spec.name);
    let listener = control::bind(&socket)?;
    let regions = Regions::default();
    let crash = identity.spec.lab.crash;
    let machine = Kept::new(identity, run_dir, name, listener, memory, regions)
        .and_then(|kept| assemble(kept, DeviceState::Creating, Origin::New))
        .inspect_err(|_| drop(std::fs::remove_file(socket)))?;
    let life = machine.life();
    life.generation
        .store(1, std::sync::atomic::Ordering::Relaxed);
    let crashes = crash.map_or(0, |crash| crash.count);
    life.crashes_left
        .store(crashes, std::sync::atomic::Ordering::Relaxed);
    Ok(machine)
}

/// Locks memory, starts the threads, and puts the loop together.
fn assemble(mut kept: Kept, state: DeviceState, origin: Origin) -> Result<Machine> {
    let view = kept.lock()?;
    let status = Arc::new(Status::new(view, state));
    let (sender, events) = channel();
    let wake = Wake::new()?;
    start_control(&kept, &status, sender.clone(), &wake)?;
    let chores = chores::start(
        kept.identity.clone(),
        kept.run_dir.clone(),
        sender,
        wake.clone(),
    )?;
    Machine::new(kept, status, events, wake, chores, origin)
}

fn start_control(
    kept: &Kept,
    status: &Arc<Status>,
    events: Sender<Event>,
    wake: &Wake,
) -> Result<()> {
    let listener: UnixListener = kept.listener()?;
    let desk = Arc::new(Desk {
        status: Arc::clone(status),
        events: Mutex::new(events),
        wake: wake.clone(),
    });
    let (serving, is_serving) = channel();
    std::thread::Builder::new()
        .name("control".to_owned())
        .stack_size(256 << 10)
        .spawn(move || {
            let ready = || {
                // Whoever waited may have given up.
                let _ = serving.send(());
            };
            if let Err(error) = control::serve(listener, desk, ready) {
                tracing::error!("{error}");
            }
        })
        .map_err(|error| Error::os("cannot start the control thread", error))?;
    is_serving.recv().map_err(|_| {
        Error::new(
            ErrorKind::Io,
            "the control socket cannot be served: io_uring gives it no ring",
        )
    })
}

/// Takes the place of a supervisor that is gone: the worker that started this process hands over.
///
/// # Errors
/// What was handed over is not understood, or a protection cannot be had.
pub fn adopt() -> Result<()> {
    safety::settle_allocator();
    safety::block_termination_signals()?;
    let mut channel = inherited_channel()?;
    let Some((adopt, fds)) = channel.receive::<Adopt>()? else {
        return Err(Error::usage("only a worker adopts a supervisor"));
    };
    let begin = adopt.begin;
    if begin.version != VERSION {
        return Err(Error::new(ErrorKind::Unsupported, "another version"));
    }
    let spec = &begin.identity.spec;
    safety::name_process();
    crate::log::start(spec)?;
    safety::protect(spec.allow_unsafe, spec.lab.no_memory_lock)?;
    let run_dir = RunDir::system();
    let mut fds = fds.into_iter();
    let mut first = take_fds(&mut fds, 2)?.into_iter();
    let (Some(name), Some(listener)) = (first.next(), first.next()) else {
        return Err(Error::new(ErrorKind::Io, "descriptors are missing"));
    };
    let region_fds = take_fds(&mut fds, begin.regions.len())?;
    let regions = Regions::inherited(begin.regions.into_iter().zip(region_fds), None);
    let name = NameLock::inherited(name, &run_dir, &spec.name);
    let needs_library = MemoryHandles::needs_gpu_library(&spec.backend);
    let (memory, handed_over) = match begin.memory {
        Some(description) if needs_library => {
            let count = description.fds();
            (None, Some((description, take_fds(&mut fds, count)?)))
        }
        Some(description) => {
            let count = description.fds();
            let memory = MemoryHandles::import(description, take_fds(&mut fds, count)?)?;
            (Some(memory), None)
        }
        None => (None, None),
    };
    let listener = UnixListener::from(listener);
    let mut kept = Kept::new(begin.identity, run_dir, name, listener, memory, regions)?;
    if let Some((description, fds)) = handed_over {
        kept.keep_memory(description, fds);
    }
    let worker = Process::running(adopt.worker, channel)?;
    let origin = Origin::Adopted {
        worker: Box::new(worker),
        fixed: Box::new(adopt.fixed),
        survives: adopt.survives,
        reason: adopt.reason,
    };
    assemble(kept, adopt.state, origin)?.run(None, Vec::new())
}

/// Serves a device again whose processes are all gone, where its memory is still there.
///
/// # Errors
/// There is no such device, its disk or its memory is gone, or somebody serves it; told through
/// `start` too.
pub fn recover(identity: Identity, mut start: StartPipe, warnings: Vec<String>) -> Result<()> {
    let machine = match find_orphan(identity) {
        Ok(machine) => machine,
        Err(error) => {
            start.send(&StartLine::Failed {
                failed: error.clone(),
            });
            return Err(error);
        }
    };
    machine.run(Some(start), warnings)
}

/// What was left of the device `name`.
///
/// # Errors
/// Nothing was, or it is not understood.
pub fn read_identity(name: &DeviceName) -> Result<Identity> {
    let path = RunDir::system().session(name);
    let text = std::fs::read(&path).map_err(|error| {
        Error::os(
            format!("nothing is known of a device '{name}': {}", path.display()),
            error,
        )
    })?;
    serde_json::from_slice(&text).map_err(|error| {
        Error::new(
            ErrorKind::Io,
            format!("{} is not understood: {error}", path.display()),
        )
    })
}

fn find_orphan(identity: Identity) -> Result<Machine> {
    let run_dir = RunDir::system();
    let name = &identity.spec.name;
    let mut lock = NameLock::take(&run_dir, name)?;
    // Until the disk is served an error leaves the orphan as it was, its files and the claim on its
    // memory included.
    lock.disown();
    let (fixed, mut memory, generation) = look_at_orphan(&identity, &run_dir)?;
    memory.disown();
    let listener = control::bind(&run_dir.socket(name))?;
    let regions = Regions::default();
    let kept = Kept::new(identity, run_dir, lock, listener, Some(memory), regions)?;
    let origin = Origin::Orphan {
        fixed: Box::new(fixed),
    };
    let machine = assemble(kept, DeviceState::Recovering, origin)?;
    let word = &machine.life().generation;
    word.store(generation, std::sync::atomic::Ordering::Relaxed);
    Ok(machine)
}

/// The device's note, its memory, and the generation of its last worker.
fn look_at_orphan(
    identity: &Identity,
    run_dir: &RunDir,
) -> Result<(StaticInfo, MemoryHandles, u64)> {
    let name = &identity.spec.name;
    let note = run_dir.note(name);
    let fixed: StaticInfo = std::fs::read(&note)
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .ok_or_else(|| {
            Error::new(
                ErrorKind::NotFound,
                format!("'{name}' never had a disk ({})", note.display()),
            )
        })?;
    let status = ublk::device_status(fixed.id, ASK_LIMIT)?;
    if status.state != QUIESCED {
        return Err(Error::new(
            ErrorKind::Busy,
            format!(
                "{} does not wait for a server (state {} of the driver): its last one is still \
                 ending, or another program serves it",
                fixed.device, status.state
            ),
        ));
    }
    let layout = identity.layout()?;
    let gpu = fixed.gpu.as_deref();
    let mut memory = MemoryHandles::find_again(&identity.spec, &layout, &identity.uuid, gpu)?;
    memory.disown();
    let backend = memory.open(&layout)?;
    let mut access = Access::open(&*backend, 0, HEADER_BYTES as usize)?;
    let mut generation = 0;
    for index in 0..layout.chunks() {
        let header = read_header(&mut access, index)
            .map_err(|error| error.to_string())
            .and_then(|header| {
                let is_ours = header.uuid == identity.uuid && header.index == index;
                is_ours
                    .then_some(header)
                    .ok_or_else(|| "its header is that of another device".to_owned())
            });
        let header = header.map_err(|why| {
            Error::new(
                ErrorKind::Io,
                format!(
                    "the memory of '{name}' does not hold its contents any more (chunk {index}: \
                     {why}): end it with `vramctl remove {name} --force`"
                ),
            )
        })?;
        generation = generation.max(header.generation);
    }
    drop((access, backend));
    Ok((fixed, memory, generation))
}
