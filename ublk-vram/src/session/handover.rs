//! Whether device memory outlives the process that made it, tried without a block device: for machines
//! whose kernel has no ublk.
//!
//! ```text
//!   maker     makes the memory, fills it, hands it over        killed (SIGKILL) once the heir is ready
//!   keeper    holds descriptors and a description, no GPU library
//!   heir      opens the memory, too; after the maker's end reads every byte that was filled, maps what
//!             could not be mapped before, writes other bytes, reads those, and
//!             passes the conformance suite
//! ```
//!
//! It is the way a server goes when its worker dies and the standby takes over, with the same messages'
//! parts.

use std::os::fd::AsFd;
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
    Look(Box<Offer>),
}

/// Memory as another process can have it, with its descriptors.
#[derive(Serialize, Deserialize)]
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

/// What the heir found.
#[derive(Serialize, Deserialize)]
struct Found {
    pages: u64,
    /// Of what the maker wrote.
    wrong: u64,
    seconds: f64,
    /// Chunks that the CPU maps now.
    mapped: usize,
    /// To map them.
    mapping_seconds: f64,
    /// Of what the heir wrote then.
    wrong_again: u64,
}

/// Tries it with the memory that `spec` names, and tells in words. What the memory held is lost.
///
/// # Errors
/// A process fails, or the memory does not hold what was in it.
pub fn keeper(spec: DeviceSpec) -> Result<String> {
    let mut maker = start(&Task::Make(Box::new(spec)), Vec::new())?;
    let (made, fds) = answer::<Made>(&mut maker)?;
    let Made {
        offer,
        mapped,
        seconds,
    } = made;
    let (size, chunks) = (offer.device_bytes, offer.description.fds());
    let fds = take_fds(&mut fds.into_iter(), chunks)?;
    let before = Instant::now();
    let mut heir = start(&Task::Look(Box::new(offer)), fds)?;
    let (ready, _) = answer::<Ready>(&mut heir)?;
    let opened = before.elapsed().as_secs_f64();
    maker.kill();
    if !maker.has_ended(GONE) {
        return Err(Error::new(ErrorKind::Io, "the maker does not end"));
    }
    heir.channel.send(&(), &[])?;
    let (found, _) = answer::<Found>(&mut heir)?;
    // Whoever wants the memory next is to find it free.
    if !heir.has_ended(GONE) {
        return Err(Error::new(ErrorKind::Io, "the heir does not end"));
    }
    let text = format!(
        "{} in {chunks} chunks, {mapped} of them mapped for the CPU: filled in {seconds:.1} s; another process \
         had all of them after {opened:.1} s, {} mapped; the first was killed, and {} pages were read by the \
         other in {:.1} s, {} wrong; with {} mapped, {:.1} s later, they were written anew and read, \
         {} wrong; the conformance suite passed\n",
        human(size),
        ready.mapped,
        found.pages,
        found.seconds,
        found.wrong,
        found.mapped,
        found.mapping_seconds,
        found.wrong_again
    );
    if found.wrong + found.wrong_again > 0 {
        return Err(Error::new(ErrorKind::Io, text.trim_end().to_owned()));
    }
    Ok(text)
}

fn start(task: &Task, fds: Vec<std::os::fd::OwnedFd>) -> Result<Process> {
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
        Task::Look(offer) => match open(*offer, fds) {
            Ok((layout, kept)) => {
                let mapped = mapped(&*kept.1);
                channel.send(&Ok::<_, Error>(Ready { mapped }), &[])?;
                if channel.receive::<()>()?.is_some() {
                    channel.send(&look(layout, &kept), &[])?;
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

fn look(layout: Layout, (memory, backend): &Kept) -> Result<Found> {
    let (bench, len) = (Bench::filled(&**backend, layout), filled(&layout));
    let first = bench.verify(0, len, THREADS)?;
    let before = Instant::now();
    let chunks = backend.chunks();
    for (index, mapping) in memory.map_rest(chunks) {
        if let Some(chunk) = chunks.get(index) {
            chunk.set_mapping(mapping);
        }
    }
    let mapping_seconds = before.elapsed().as_secs_f64();
    let written = bench.fill(0, len, THREADS)?;
    let again = bench.verify(0, len, THREADS)?;
    check_backend(&**backend, &layout).into_result()?;
    Ok(Found {
        pages: first.bytes / 4096,
        wrong: first.wrong + first.errors,
        seconds: first.seconds,
        mapped: mapped(&**backend),
        mapping_seconds,
        wrong_again: written.errors + again.wrong + again.errors,
    })
}
