//! What a server with this backend costs the host in system memory: a table for people.
//!
//! Each step is what a server does on its way to a disk. The process's own figures are those of
//! /proc/self/status; what the driver takes outside of the process shows as memory that is no longer
//! available and is not resident here.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::time::Duration;

use nix::sys::mman::{MlockAllFlags, mlockall};

use super::{Backend, Mapping, MemoryHandles, QueueId};
use crate::device::BackendSpec;
use crate::engine::Engine;
use crate::engine::bench::{Bench, Workload};
use crate::error::{Error, ErrorKind, Result};
use crate::safety::{self, Mapped, ProcessStatus, Root};
use crate::store::Layout;

/// Queues of a server by default.
const QUEUES: u16 = 4;
/// Requests of each.
const DEPTH: u16 = 64;
/// I/O memory of a server by default.
const IO_BYTES: usize = 32 << 20;
/// How long each kind of copies runs.
const COPY_FOR: Duration = Duration::from_millis(500);
/// Mappings that are told.
const SHOWN: usize = 16;

/// Takes the memory that `spec` names, opens queues, locks, and writes a line for each step.
///
/// # Errors
/// As [`MemoryHandles::create`] and [`MemoryHandles::open`]; or that memory cannot be locked.
pub fn table(spec: &BackendSpec, layout: &Layout) -> Result<String> {
    let mut table = format!(
        "{:<34} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}   (MiB)\n",
        "STEP", "RESIDENT", "ANON", "FILE", "LOCKED", "PTE", "OUTSIDE"
    );
    safety::limit_thread_stacks();
    let begin = safety::available_memory(&Root::default())?;
    let mut step = |name: &str| -> Result<()> {
        let status = safety::read_status(&Root::default())?;
        row(
            &mut table,
            name,
            &status,
            begin,
            safety::available_memory(&Root::default())?,
        );
        Ok(())
    };
    step("start")?;
    let memory = MemoryHandles::create(spec, layout)?;
    step("GPU opened")?;
    let backend = memory.open(layout)?;
    step("chunks made, paths measured")?;
    let arena = Mapping::anonymous(IO_BYTES)?;
    step("I/O memory")?;
    let queues = (0..QUEUES)
        .map(|queue| {
            backend.open_queue(
                QueueId(queue),
                Engine::copies(DEPTH),
                std::slice::from_ref(&arena),
            )
        })
        .collect::<Result<Vec<_>>>()?;
    step("queues opened")?;
    let lock = |flags| {
        mlockall(flags).map_err(|errno| Error::os("this process's memory cannot be locked", errno))
    };
    let future = MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE;
    lock(future | MlockAllFlags::from_bits_retain(libc::MCL_ONFAULT))?;
    step("locked what is resident")?;
    lock(future)?;
    step("locked everything")?;
    safety::unlock_files(&backend.cold_files())?;
    step("unlocked what no copy needs")?;
    drop(queues);
    // So that what is touched from here on is touched by copies.
    fs::write("/proc/self/clear_refs", "1")
        .map_err(|error| Error::os("cannot write /proc/self/clear_refs", error))?;
    copy(&*backend, *layout)?;
    table.push_str(&mappings(safety::read_smaps()?));
    drop((backend, memory));
    Ok(table)
}

/// Copies of every size and depth that makes the planner choose differently, both ways.
fn copy(backend: &dyn Backend, layout: Layout) -> Result<()> {
    let len = layout.device_bytes() & !((1 << 20) - 1);
    let bench = Bench::new(backend, layout);
    bench.fill(0, len, QUEUES)?;
    for (size, depth) in [(4 << 10, 1), (4 << 10, DEPTH), (1 << 20, 8)] {
        let outcome = bench.run(&Workload {
            reads: 50,
            sequential: false,
            size,
            depth,
            threads: QUEUES,
            time: Some(COPY_FOR),
            start: 0,
            len,
        })?;
        if outcome.wrong > 0 || outcome.errors > 0 {
            return Err(Error::new(ErrorKind::Io, "copies failed, or were wrong"));
        }
    }
    Ok(())
}

/// The largest parts of a process, the mappings of each file together; `no file` are all others.
fn mappings(all: Vec<Mapped>) -> String {
    let mut parts: BTreeMap<String, Mapped> = BTreeMap::new();
    for mapped in all {
        let name = match mapped.file.as_str() {
            "" => "no file".to_owned(),
            file => file.to_owned(),
        };
        let part = parts.entry(name).or_default();
        part.resident += mapped.resident;
        part.anonymous += mapped.anonymous;
        part.locked += mapped.locked;
        part.referenced += mapped.referenced;
    }
    let mut table = format!(
        "\n{:<44} {:>9} {:>9} {:>9} {:>9}   (MiB, after copies)\n",
        "MAPPINGS OF", "RESIDENT", "ANON", "LOCKED", "TOUCHED"
    );
    let mut parts: Vec<(String, Mapped)> = parts.into_iter().collect();
    parts.sort_by_key(|(_, part)| std::cmp::Reverse(part.resident));
    for (name, part) in parts.iter().take(SHOWN) {
        let mib = |kib: u64| kib as f64 / 1024.0;
        let _ = writeln!(
            table,
            "{name:<44} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
            mib(part.resident),
            mib(part.anonymous),
            mib(part.locked),
            mib(part.referenced)
        );
    }
    table
}

fn row(table: &mut String, name: &str, status: &ProcessStatus, begin: u64, now: u64) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let outside = begin as f64 - now as f64 - (status.anonymous + status.shared) as f64;
    // Writing to a string does not fail.
    let _ = writeln!(
        table,
        "{name:<34} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
        mib(status.resident),
        mib(status.anonymous),
        mib(status.file),
        mib(status.locked),
        mib(status.page_tables),
        outside / f64::from(1 << 20)
    );
}
