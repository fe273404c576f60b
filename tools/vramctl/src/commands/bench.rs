//! `vramctl bench engine`: what a device would do here, measured without one.

use std::time::Duration;

use serde_json::{Value, json};
use ublk_vram::backend::{Backend, MemoryHandles};
use ublk_vram::engine::bench::{Bench, Outcome, Times, Workload};
use ublk_vram::size::human;
use ublk_vram::store::{Layout, zero_and_check};
use ublk_vram::{Error, ErrorKind, Result, safety};

use super::add::choose_backend;
use super::paths;
use crate::args::{BenchEngineArgs, BenchPart, BenchPattern};
use crate::output;
use crate::table::{Align, Table};

/// Version of the JSON form.
const JSON_VERSION: u32 = 1;
/// Threads that fill and verify.
const FILLERS: u16 = 4;
/// How long idleness is watched.
const IDLE: Duration = Duration::from_millis(500);

/// One line of the table.
struct Row {
    name: String,
    load: Option<Workload>,
    outcome: Outcome,
    /// How many copies took each path, where there is more than one.
    taken: Vec<(String, u64)>,
}

pub fn engine(args: &BenchEngineArgs) -> Result<()> {
    safety::allow_open_files();
    let backend = choose_backend(
        &args.memory,
        ublk_vram::backend::pci::list,
        ublk_vram::backend::vulkan::list,
    )?;
    let layout = MemoryHandles::layout(&backend, &args.size, args.chunk)?;
    // The claim on the memory outlives the backend: what is declared first is dropped last.
    let memory = MemoryHandles::create(&backend, &layout)?;
    let backend = memory.open(&layout)?;
    zero_and_check(&*backend)?;
    let outcome = measure(args, &*backend, layout);
    // What was measured with is nobody's: nothing of it stays in the memory.
    let wiped = zero_and_check(&*backend);
    let wrong = outcome?;
    wiped?;
    if wrong > 0 {
        return Err(Error::new(
            ErrorKind::Io,
            format!("{wrong} pages or requests were wrong: this memory cannot be used"),
        ));
    }
    Ok(())
}

/// Runs everything and prints it; gives how much was wrong.
fn measure(args: &BenchEngineArgs, backend: &dyn Backend, layout: Layout) -> Result<u64> {
    let (start, len) = part(args.part, backend, &layout)?;
    let bench = Bench::new(backend, layout);
    let idle = bench.idle(FILLERS, IDLE)?;
    let mut rows = Vec::new();
    let mut row = |name: &str, load: Option<Workload>, outcome: Outcome| {
        rows.push(Row {
            name: name.to_owned(),
            load,
            outcome,
            taken: taken(&outcome),
        });
    };
    // Whole blocks for every filler.
    let whole = len / (u64::from(FILLERS) << 20) * (u64::from(FILLERS) << 20);
    let filled = if whole > 0 { whole } else { len };
    let fillers = if whole > 0 { FILLERS } else { 1 };
    row("fill", None, bench.fill(start, filled, fillers)?);
    for pattern in &args.rw {
        for size in &args.block_size {
            for threads in &args.threads {
                for depth in &args.depth {
                    let load = workload(args, *pattern, *size, *threads, *depth, (start, filled))?;
                    row(pattern_name(*pattern), Some(load), bench.run(&load)?);
                }
            }
        }
    }
    row("verify", None, bench.verify(start, filled, fillers)?);
    let memory = safety::memory_info(&[std::process::id().cast_signed()], 0)?;
    let information = backend.paths();
    let wrong = rows
        .iter()
        .map(|row| row.outcome.wrong + row.outcome.errors)
        .sum();
    if args.json {
        output::json(&json!({
            "version": JSON_VERSION,
            "backend": backend.kind(),
            "gpu": backend.gpu(),
            "copy": backend.copy_path(),
            "start": start,
            "len": filled,
            "idle_cpus": idle,
            "memory": memory,
            "paths": information,
            "rows": rows.iter().map(document).collect::<Vec<Value>>(),
        }))?;
        return Ok(wrong);
    }
    let on = backend.gpu().map(|gpu| format!(" on {gpu}"));
    output::data(&format!(
        "{}{}: {}\n{} at {}; idle: {idle:.3} CPUs; resident: {}\n\n",
        backend.kind(),
        on.unwrap_or_default(),
        backend.copy_path(),
        human(filled),
        human(start),
        human(memory.resident),
    ))?;
    output::data(&table(&rows).render(true))?;
    if let Some(information) = &information {
        output::data(&format!(
            "\n{}\n{}",
            paths::costs(information),
            paths::choices(information)
        ))?;
    }
    Ok(wrong)
}

/// How many copies each path took, if there is more than one.
fn taken(outcome: &Outcome) -> Vec<(String, u64)> {
    let [read, write] = outcome.paths.copies;
    let [load, from_dma, from_gather] = read;
    let [store, to_dma, to_gather] = write;
    [
        ("bar-load", load),
        ("bar-store", store),
        ("dma", from_dma + to_dma),
        ("gather", from_gather + to_gather),
    ]
    .into_iter()
    .filter(|(_, copies)| *copies > 0)
    .map(|(path, copies)| (path.to_owned(), copies))
    .collect()
}

/// `dma 97%, gather 3%`, the most used first.
fn shares(taken: &[(String, u64)]) -> String {
    let all: u64 = taken.iter().map(|(_, count)| count).sum();
    let mut taken = taken.to_vec();
    taken.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let share = |(path, count): &(String, u64)| {
        format!("{path} {:.0}%", *count as f64 * 100.0 / all.max(1) as f64)
    };
    taken.iter().map(share).collect::<Vec<_>>().join(", ")
}

/// The part of the device that is asked for, in bytes.
fn part(part: BenchPart, backend: &dyn Backend, layout: &Layout) -> Result<(u64, u64)> {
    let mapped: u64 = (0..)
        .zip(backend.chunks())
        .filter(|(_, chunk)| chunk.mapping().is_some())
        .map(|(index, _)| layout.payload_of(index))
        .sum();
    let (start, len) = match part {
        BenchPart::All => (0, layout.device_bytes()),
        BenchPart::Mapped => (0, mapped),
        BenchPart::Unmapped => (mapped, layout.device_bytes() - mapped),
    };
    if len == 0 {
        return Err(Error::usage(match part {
            BenchPart::Mapped => "the CPU maps none of this memory: leave out --part mapped",
            _ => "the CPU maps all of this memory: leave out --part unmapped, or say --gpu-mapped",
        }));
    }
    Ok((start, len))
}

fn workload(
    args: &BenchEngineArgs,
    pattern: BenchPattern,
    size: u64,
    threads: u16,
    depth: u16,
    (start, len): (u64, u64),
) -> Result<Workload> {
    let (reads, sequential) = match pattern {
        BenchPattern::Read => (100, true),
        BenchPattern::Write => (0, true),
        BenchPattern::RandRead => (100, false),
        BenchPattern::RandWrite => (0, false),
        BenchPattern::RandRw => (50, false),
    };
    Ok(Workload {
        reads,
        sequential,
        size: u32::try_from(size)
            .map_err(|_| Error::usage(format!("--block-size {} is too large", human(size))))?,
        depth,
        threads,
        time: Some(args.time),
        start,
        len,
    })
}

fn pattern_name(pattern: BenchPattern) -> &'static str {
    match pattern {
        BenchPattern::Read => "read",
        BenchPattern::Write => "write",
        BenchPattern::RandRead => "randread",
        BenchPattern::RandWrite => "randwrite",
        BenchPattern::RandRw => "randrw",
    }
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new([
        ("WHAT", Align::Left),
        ("SIZE", Align::Right),
        ("THREADS", Align::Right),
        ("DEPTH", Align::Right),
        ("KIOPS", Align::Right),
        ("GB/S", Align::Right),
        ("READ-P50-US", Align::Right),
        ("P99", Align::Right),
        ("WRITE-P50-US", Align::Right),
        ("P99", Align::Right),
        ("CPUS", Align::Right),
        ("WRONG", Align::Right),
        ("BY", Align::Left),
    ]);
    let micros = |times: Option<Times>, of: fn(Times) -> u64| {
        times.map_or_else(String::new, |times| {
            format!("{:.2}", of(times) as f64 / 1e3)
        })
    };
    for Row {
        name,
        load,
        outcome,
        taken,
    } in rows
    {
        let of_load = |of: fn(&Workload) -> String| load.as_ref().map_or_else(String::new, of);
        table.row([
            name.clone(),
            of_load(|load| human(u64::from(load.size))),
            of_load(|load| load.threads.to_string()),
            of_load(|load| load.depth.to_string()),
            format!("{:.1}", outcome.requests as f64 / outcome.seconds / 1e3),
            format!("{:.2}", outcome.bytes as f64 / outcome.seconds / 1e9),
            micros(outcome.read, |times| times.p50),
            micros(outcome.read, |times| times.p99),
            micros(outcome.write, |times| times.p50),
            micros(outcome.write, |times| times.p99),
            format!("{:.2}", outcome.cpus),
            (outcome.wrong + outcome.errors).to_string(),
            shares(taken),
        ]);
    }
    table
}

fn document(row: &Row) -> Value {
    let taken: serde_json::Map<_, _> = row
        .taken
        .iter()
        .map(|(path, count)| (path.clone(), json!(count)))
        .collect();
    json!({ "what": row.name, "workload": row.load, "outcome": row.outcome, "taken": taken })
}
