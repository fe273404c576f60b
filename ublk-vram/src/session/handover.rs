//! Whether device memory outlives the process that made it, tried without a block device: for machines
//! whose kernel has no ublk.
//!
//! ```text
//!   maker     makes the memory, fills it, hands it over        killed (SIGKILL)
//!   keeper    holds descriptors and a description, no GPU library
//!   heir      maps the memory again and looks at every byte that was filled
//! ```
//!
//! It is the way a server goes when its worker dies, with the same messages' parts.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::process::{Process, Stderr, inherited_channel, installed_program};
use super::take_fds;
use crate::backend::{MemoryDescription, MemoryHandles};
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
    Map(Box<Offer>),
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
    seconds: f64,
}

/// What the heir found.
#[derive(Serialize, Deserialize)]
struct Found {
    pages: u64,
    wrong: u64,
    seconds: f64,
}

/// Tries it with the memory that `spec` names, and tells in words. What the memory held is lost.
///
/// # Errors
/// A process fails, or the memory does not hold what was in it.
pub fn keeper(spec: DeviceSpec) -> Result<String> {
    let mut maker = start(&Task::Make(Box::new(spec)), Vec::new())?;
    let (made, fds) = answer::<Made>(&mut maker)?;
    let fds = take_fds(&mut fds.into_iter(), made.offer.description.fds())?;
    maker.kill();
    if !maker.has_ended(GONE) {
        return Err(Error::new(ErrorKind::Io, "the maker does not end"));
    }
    let death = Instant::now();
    let (size, chunks) = (made.offer.device_bytes, made.offer.description.fds());
    let filled = made.seconds;
    let mut heir = start(&Task::Look(Box::new(made.offer)), fds)?;
    let (found, _) = answer::<Found>(&mut heir)?;
    let text = format!(
        "{} in {chunks} chunks: filled in {filled:.1} s by a process that was then killed; mapped again \
         {:.2} s after its end; {} pages read in {:.1} s, {} wrong\n",
        human(size),
        death.elapsed().as_secs_f64() - found.seconds,
        found.pages,
        found.seconds,
        found.wrong
    );
    if found.wrong > 0 {
        return Err(Error::new(ErrorKind::Io, text.trim_end().to_owned()));
    }
    Ok(text)
}

/// Lets another process have the memory for a moment, as a standby will.
///
/// # Errors
/// Why it cannot.
pub fn can_be_taken(memory: &MemoryHandles, layout: &Layout) -> Result<()> {
    let (offer, fds) = offer(memory, layout)?;
    let mut heir = start(&Task::Map(Box::new(offer)), fds)?;
    let (outcome, _) = answer::<()>(&mut heir)?;
    heir.hang_up();
    if !heir.has_ended(GONE) {
        heir.kill();
    }
    Ok(outcome)
}

fn offer(memory: &MemoryHandles, layout: &Layout) -> Result<(Offer, Vec<std::os::fd::OwnedFd>)> {
    let exported = memory.export()?;
    let offer = Offer {
        device_bytes: layout.device_bytes(),
        chunk_bytes: layout.chunk_size(),
        description: exported.description,
    };
    Ok((offer, exported.fds))
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
        Task::Look(offer) => channel.send(&look(*offer, fds), &[]),
        Task::Map(offer) => {
            let outcome = map(*offer, fds).map(drop);
            channel.send(&outcome, &[])
        }
    }
}

type Kept = (MemoryHandles, Box<dyn crate::backend::Backend>);

fn make(spec: &DeviceSpec) -> Result<(Made, Kept, Vec<std::os::fd::OwnedFd>)> {
    let layout = MemoryHandles::layout(&spec.backend, &spec.size, spec.chunk)?;
    let memory = MemoryHandles::create(&spec.backend, &layout)?;
    let backend = memory.open(&layout)?;
    let outcome = Bench::new(&*backend, layout).fill(0, filled(&layout), THREADS)?;
    let (offer, fds) = offer(&memory, &layout)?;
    let seconds = outcome.seconds;
    Ok((Made { offer, seconds }, (memory, backend), fds))
}

/// Whole blocks for every thread.
fn filled(layout: &Layout) -> u64 {
    let step = u64::from(THREADS) << 20;
    layout.device_bytes() / step * step
}

fn map(offer: Offer, fds: Vec<std::os::fd::OwnedFd>) -> Result<(Layout, Kept)> {
    let layout = Layout::new(offer.device_bytes, Some(offer.chunk_bytes))?;
    let memory = MemoryHandles::import(offer.description, fds)?;
    let backend = memory.open(&layout)?;
    Ok((layout, (memory, backend)))
}

fn look(offer: Offer, fds: Vec<std::os::fd::OwnedFd>) -> Result<Found> {
    let (layout, (_memory, backend)) = map(offer, fds)?;
    let outcome = Bench::filled(&*backend, layout).verify(0, filled(&layout), THREADS)?;
    Ok(Found {
        pages: outcome.bytes / 4096,
        wrong: outcome.wrong + outcome.errors,
        seconds: outcome.seconds,
    })
}
