//! Whether device memory outlives the process that made it, tried without a block device: for machines
//! whose kernel has no ublk.
//!
//! ```text
//!   keeper    holds descriptors and a description, no GPU library
//!   maker     makes the memory and fills it; killed (SIGKILL) once the heir is ready
//!   heir      opens the memory beside the maker; after its end reads every byte, maps what could not be
//!             mapped before, passes the conformance suite, and fills the memory anew
//!   another   opens the memory when nothing but the descriptors is left of the heir, and reads every byte
//! ```
//!
//! It is the way a server goes when its worker dies and the standby takes over, and when there was none,
//! with the same messages' parts.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::process::{Process, Stderr, inherited_channel, installed_program};
use super::take_fds;
use crate::backend::conformance::check_backend;
use crate::backend::{Backend, MemoryDescription, MemoryHandles};
use crate::device::DeviceSpec;
use crate::engine::bench::Bench;
use crate::error::{Error, ErrorKind, Result};
use crate::size::human;
use crate::store::Layout;

/// The hidden subcommand that maker and heir run as.
pub const SUBCOMMAND: &str = "handover-part";
/// Threads that fill and look.
const THREADS: u16 = 4;
/// A process that was killed is gone by then.
const GONE: Duration = Duration::from_secs(30);

#[derive(Serialize, Deserialize)]
enum Task {
    Make(Box<DeviceSpec>),
    Open {
        offer: Box<Offer>,
        /// So often it was filled.
        times: u32,
    },
}

/// Memory as another process can have it, with its descriptors.
#[derive(Clone, Serialize, Deserialize)]
struct Offer {
    device_bytes: u64,
    chunk_bytes: u64,
    description: MemoryDescription,
}

/// Memory that its maker has filled.
#[derive(Serialize, Deserialize)]
struct Made {
    offer: Offer,
    /// Chunks that the CPU maps.
    mapped: usize,
    seconds: f64,
}

/// The heir has opened the memory.
#[derive(Serialize, Deserialize)]
struct Ready {
    mapped: usize,
}

/// What the heir read.
#[derive(Serialize, Deserialize)]
struct Found {
    pages: u64,
    wrong: u64,
    seconds: f64,
}

/// What the heir wrote then.
#[derive(Serialize, Deserialize)]
struct Written {
    /// Chunks that the CPU maps by now.
    mapped: usize,
    mapping_seconds: f64,
    wrong: u64,
}

/// Tries it with the memory that `spec` names, and tells in words. What the memory held is lost.
///
/// # Errors
/// A process fails, or the memory does not hold what was in it.
pub fn keeper(spec: DeviceSpec) -> Result<String> {
    let mut maker = start(&Task::Make(Box::new(spec)), &[])?;
    let (made, fds) = answer::<Made>(&mut maker)?;
    let (size, chunks) = (made.offer.device_bytes, made.offer.description.fds());
    // What keeps the memory, whoever dies.
    let fds = take_fds(&mut fds.into_iter(), chunks)?;
    // A process that has opened the memory, the chunks that it maps, and the seconds that it took.
    let open = |times| -> Result<(Process, usize, f64)> {
        let before = Instant::now();
        let offer = Box::new(made.offer.clone());
        let mut process = start(&Task::Open { offer, times }, &fds)?;
        let (ready, _) = answer::<Ready>(&mut process)?;
        Ok((process, ready.mapped, before.elapsed().as_secs_f64()))
    };
    let mut text = format!(
        "{} in {chunks} chunks, {} of them mapped for the CPU, filled in {:.1} s\n",
        human(size),
        made.mapped,
        made.seconds
    );

    let (mut heir, mapped, opened) = open(1)?;
    maker.kill();
    await_end(&maker)?;
    let found: Found = ask(&mut heir)?;
    text.push_str(&format!(
        "a second process had all of them after {opened:.1} s, {mapped} mapped; the first was killed: {}\n",
        found.told()
    ));
    let written: Written = ask(&mut heir)?;
    await_end(&heir)?;
    text.push_str(&format!(
        "{} mapped {:.1} s later; the conformance suite passed; filled anew, {} wrong\n",
        written.mapped, written.mapping_seconds, written.wrong
    ));

    let (mut another, mapped, opened) = open(2)?;
    let last: Found = ask(&mut another)?;
    another.hang_up();
    await_end(&another)?;
    text.push_str(&format!(
        "a third process, when the second was gone, had them after {opened:.1} s, {mapped} mapped: {}\n",
        last.told()
    ));
    if found.wrong + written.wrong + last.wrong > 0 {
        return Err(Error::new(ErrorKind::Io, text.trim_end().to_owned()));
    }
    Ok(text)
}

impl Found {
    fn told(&self) -> String {
        let Found {
            pages,
            wrong,
            seconds,
        } = self;
        format!("{pages} pages read in {seconds:.1} s, {wrong} wrong")
    }
}

/// The next of what a process has to tell.
fn ask<T: serde::de::DeserializeOwned>(process: &mut Process) -> Result<T> {
    process.channel.send(&(), &[])?;
    Ok(answer(process)?.0)
}

/// Whoever wants the memory next is to find it free.
fn await_end(process: &Process) -> Result<()> {
    if process.has_ended(GONE) {
        return Ok(());
    }
    let error = format!("process {} does not end", process.pid);
    Err(Error::new(ErrorKind::Io, error))
}

fn start(task: &Task, fds: &[std::os::fd::OwnedFd]) -> Result<Process> {
    let process = Process::start(&installed_program(), &[SUBCOMMAND], Stderr::Inherit)?;
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    process.channel.send(task, &fds)?;
    Ok(process)
}

fn answer<T: serde::de::DeserializeOwned>(
    process: &mut Process,
) -> Result<(T, Vec<std::os::fd::OwnedFd>)> {
    let answer = process.channel.receive::<Result<T, Error>>()?;
    match answer {
        Some((outcome, fds)) => Ok((outcome?, fds)),
        None => Err(Error::new(ErrorKind::Io, process.how_it_ended())),
    }
}

/// What maker and heir do.
///
/// # Errors
/// The keeper cannot be told.
pub fn part() -> Result<()> {
    let mut channel = inherited_channel()?;
    let Some((task, fds)) = channel.receive::<Task>()? else {
        return Err(Error::usage("this is started by `ublk-vram handover`"));
    };
    match task {
        Task::Make(spec) => match make(&spec) {
            Ok((made, kept, fds)) => {
                let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                channel.send(&Ok::<_, Error>(made), &fds)?;
                // Until it is killed, it has everything open that a worker has.
                while channel.receive::<()>()?.is_some() {}
                drop(kept);
                Ok(())
            }
            Err(error) => channel.send(&Err::<Made, _>(error), &[]),
        },
        Task::Open { offer, times } => match open(*offer, fds) {
            Ok((layout, (memory, backend))) => {
                let mapped = mapped(&*backend);
                channel.send(&Ok::<_, Error>(Ready { mapped }), &[])?;
                let bench = Bench::filled(&*backend, layout, times);
                if channel.receive::<()>()?.is_some() {
                    channel.send(&look(&bench, &layout), &[])?;
                }
                if channel.receive::<()>()?.is_some() {
                    channel.send(&write(&bench, &layout, &memory, &*backend), &[])?;
                }
                Ok(())
            }
            Err(error) => channel.send(&Err::<Ready, _>(error), &[]),
        },
    }
}

type Kept = (MemoryHandles, Box<dyn Backend>);

fn make(spec: &DeviceSpec) -> Result<(Made, Kept, Vec<std::os::fd::OwnedFd>)> {
    let layout = MemoryHandles::layout(&spec.backend, &spec.size, spec.chunk)?;
    let memory = MemoryHandles::create(&spec.backend, &layout)?;
    let backend = memory.open(&layout)?;
    let outcome = Bench::new(&*backend, layout).fill(0, filled(&layout), THREADS)?;
    let exported = memory.export()?;
    let made = Made {
        offer: Offer {
            device_bytes: layout.device_bytes(),
            chunk_bytes: layout.chunk_size(),
            description: exported.description,
        },
        mapped: mapped(&*backend),
        seconds: outcome.seconds,
    };
    Ok((made, (memory, backend), exported.fds))
}

fn mapped(backend: &dyn Backend) -> usize {
    let chunks = backend.chunks().iter();
    chunks.filter(|chunk| chunk.mapping().is_some()).count()
}

/// Whole blocks for every thread.
fn filled(layout: &Layout) -> u64 {
    let step = u64::from(THREADS) << 20;
    layout.device_bytes() / step * step
}

fn open(offer: Offer, fds: Vec<std::os::fd::OwnedFd>) -> Result<(Layout, Kept)> {
    let layout = Layout::new(offer.device_bytes, Some(offer.chunk_bytes))?;
    let memory = MemoryHandles::import(offer.description, fds)?;
    let backend = memory.open(&layout)?;
    Ok((layout, (memory, backend)))
}

fn look(bench: &Bench<'_>, layout: &Layout) -> Result<Found> {
    let outcome = bench.verify(0, filled(layout), THREADS)?;
    Ok(Found {
        pages: outcome.bytes / 4096,
        wrong: outcome.wrong + outcome.errors,
        seconds: outcome.seconds,
    })
}

fn write(
    bench: &Bench<'_>,
    layout: &Layout,
    memory: &MemoryHandles,
    backend: &dyn Backend,
) -> Result<Written> {
    let before = Instant::now();
    for (chunk, mapping) in memory.map_rest(backend.chunks(), &AtomicBool::new(false)) {
        chunk.set_mapping(mapping);
    }
    let mapping_seconds = before.elapsed().as_secs_f64();
    check_backend(backend, layout).into_result()?;
    let outcome = bench.fill(0, filled(layout), THREADS)?;
    Ok(Written {
        mapped: mapped(backend),
        mapping_seconds,
        wrong: outcome.wrong + outcome.errors,
    })
}
