//! What may take long, on a thread of its own: starting processes, writing files, commands that wait in
//! the driver. The supervisor's loop must see a worker's death whatever these wait for: on a machine
//! whose only swap is our disk they may wait for the very worker that died.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::desk::Wake;
use super::machine::Event;
use crate::control::RunDir;
use crate::device::StaticInfo;
use crate::error::{Error, Result};
use crate::session::process::{OWN_PROGRAM, Process, Stderr, installed_program};
use crate::session::{Begin, Identity, Order};
use crate::ublk;
use crate::worker::SUBCOMMAND;

/// The driver's time for each command.
const DRIVER_LIMIT: Duration = Duration::from_secs(10);

/// Why a process is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    /// To make the device.
    Maker,
    /// To stand by, or to take over at once if there is nobody to stand by for.
    Standby,
    /// To stand by with the program as it is installed now.
    Fresh,
    /// To wipe the memory.
    Wiper,
}

/// One piece of work.
pub(super) enum Chore {
    /// Start a process and tell it to begin.
    Spawn {
        purpose: Purpose,
        begin: Box<Begin>,
        fds: Vec<OwnedFd>,
        /// So long before.
        after: Duration,
    },
    /// Write what others may read of the device, and what `recover` needs.
    Note(Box<StaticInfo>),
    /// Make the driver let go of the worker.
    Quiesce(u32),
    /// End a disk that no worker serves.
    End(u32),
}

/// Starts the thread; it ends with the sender.
pub(super) fn start(
    identity: Identity,
    run_dir: RunDir,
    events: Sender<Event>,
    wake: Wake,
) -> Result<Sender<Chore>> {
    let (chores, todo) = channel();
    std::thread::Builder::new()
        .name("chores".to_owned())
        .stack_size(256 << 10)
        .spawn(move || work(&identity, &run_dir, &todo, &events, &wake))
        .map_err(|error| Error::os("cannot start the thread for chores", error))?;
    Ok(chores)
}

fn work(
    identity: &Identity,
    run_dir: &RunDir,
    todo: &Receiver<Chore>,
    events: &Sender<Event>,
    wake: &Wake,
) {
    while let Ok(chore) = todo.recv() {
        let event = match chore {
            Chore::Spawn {
                purpose,
                begin,
                fds,
                after,
            } => {
                std::thread::sleep(after);
                Event::Spawned(purpose, spawn(purpose, begin, &fds).map(Box::new))
            }
            Chore::Note(fixed) => {
                write_notes(identity, run_dir, &fixed);
                continue;
            }
            Chore::Quiesce(id) => Event::Quiesced(ublk::quiesce(id, DRIVER_LIMIT)),
            Chore::End(id) => Event::DiskEnded(ublk::delete_orphan(id, DRIVER_LIMIT)),
        };
        if events.send(event).is_err() {
            return;
        }
        wake.wake();
    }
}

fn spawn(purpose: Purpose, begin: Box<Begin>, fds: &[OwnedFd]) -> Result<Process> {
    let program: PathBuf = match purpose {
        Purpose::Fresh => installed_program(),
        _ => Path::new(OWN_PROGRAM).to_path_buf(),
    };
    let stderr = if purpose == Purpose::Maker {
        Stderr::Inherit
    } else {
        Stderr::Null
    };
    let process = Process::start(&program, &[SUBCOMMAND], stderr)?;
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    process.channel.send(&Order::Begin(begin), &fds)?;
    Ok(process)
}

/// Leaves what `list` tells without root, and what `recover` needs when all processes are gone. That
/// one of them cannot be written harms nothing else.
pub(super) fn write_notes(identity: &Identity, run_dir: &RunDir, fixed: &StaticInfo) {
    let name = &identity.spec.name;
    let note = serde_json::to_vec_pretty(fixed).unwrap_or_default();
    let session = serde_json::to_vec_pretty(identity).unwrap_or_default();
    for (path, mode, text) in [
        (run_dir.note(name), 0o644, note),
        (run_dir.session(name), 0o600, session),
    ] {
        if let Err(error) = write_whole(&path, mode, &text) {
            tracing::warn!("cannot write {}: {error}", path.display());
        }
    }
}

/// Whoever reads finds the old text or the new one.
fn write_whole(path: &Path, mode: u32, text: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(mode)
        .open(&beside)?;
    file.write_all(text)?;
    std::fs::rename(&beside, path)
}
