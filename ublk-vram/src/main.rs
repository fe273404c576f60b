//! `ublk-vram`: the server of one device. Users start it through `vramctl add`.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::fd::RawFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;

use clap::{Parser, Subcommand};
use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;
use ublk_vram::backend::conformance::check_backend;
use ublk_vram::backend::{MemoryHandles, bench, cuda, footprint};
use ublk_vram::control::RunDir;
use ublk_vram::device::DeviceSpec;
use ublk_vram::safety::CgroupOutcome;
use ublk_vram::store::Layout;
use ublk_vram::worker::{self, Session, StartLine, StartPipe};
use ublk_vram::{Error, ErrorKind, Result, safety};

/// Serves a block device whose storage is GPU memory. Started by `vramctl add`.
#[derive(Parser)]
#[command(version, about)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serve the device whose specification (JSON) is on standard input.
    Serve {
        /// Descriptor of the pipe that learns how the start went.
        #[arg(long, value_name = "FD")]
        start_pipe: Option<RawFd>,
    },
    /// Check the memory that a specification (JSON, on standard input) names with the suite that
    /// every backend passes. What the memory held is destroyed.
    #[command(hide = true)]
    Conformance,
    /// Measure the copy routines on the first chunk of the memory that a specification (JSON, on
    /// standard input) names. What the memory held is destroyed.
    #[command(hide = true)]
    BenchCopy,
    /// Tell what a server with the memory that a specification (JSON, on standard input) names costs the
    /// host. What the memory held is destroyed.
    #[command(hide = true)]
    Footprint,
    /// Allocate and pin GPU memory for a server (started by it).
    #[command(name = cuda::SUBCOMMAND, hide = true)]
    MakeCudaRegion,
    /// Carry out swapoff for a server (started by it).
    #[command(name = worker::swapoff::SUBCOMMAND, hide = true)]
    SwapoffHelper,
}

fn main() -> ExitCode {
    // SAFETY: no thread has been started yet.
    unsafe { ublk_vram::backend::vulkan::keep_layers_out() };
    let outcome = match Args::parse().command {
        // SAFETY: the descriptor was inherited for this purpose; no code before this line opened one
        // that could have the same number and be owned by somebody.
        Command::Serve { start_pipe } => serve(unsafe { StartPipe::inherited(start_pipe) }),
        Command::Conformance => conformance(),
        Command::BenchCopy => bench_copy(),
        Command::Footprint => footprint(),
        Command::MakeCudaRegion => cuda::maker_main(),
        Command::SwapoffHelper => worker::swapoff::helper_main(),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ublk-vram: error: {error}");
            ExitCode::from(error.kind.exit_code())
        }
    }
}

fn serve(mut start: StartPipe) -> Result<()> {
    let prepared = read_spec().and_then(|spec| {
        let name = spec.name.clone();
        // An empty group is left behind by a start that fails after it moved there.
        prepare(spec).inspect_err(|_| drop(safety::remove_cgroup(name.as_str())))
    });
    match prepared {
        Ok((session, warnings)) => worker::run(session, start, warnings),
        Err(error) => {
            start.send(&StartLine::Failed {
                failed: error.clone(),
            });
            Err(error)
        }
    }
}

fn conformance() -> Result<()> {
    // The claim on the memory outlives the backend: what is declared first is dropped last.
    let (memory, layout) = take_memory()?;
    let backend = memory.open(&layout)?;
    let report = check_backend(&*backend, &layout);
    print!("{report}");
    report.into_result()
}

fn bench_copy() -> Result<()> {
    let (memory, layout) = take_memory()?;
    let backend = memory.open(&layout)?;
    let Some(chunk) = backend.chunks().first() else {
        return Err(Error::usage("the memory has no chunk"));
    };
    let (kind, path) = (backend.kind(), backend.copy_path());
    println!("backend {kind} ({path})");
    print!("{}", bench::copy_table(chunk)?);
    Ok(())
}

fn footprint() -> Result<()> {
    let (spec, layout) = read_layout()?;
    print!("{}", footprint::table(&spec.backend, &layout)?);
    Ok(())
}

/// Takes the memory that the specification on standard input names, without a device.
fn take_memory() -> Result<(MemoryHandles, Layout)> {
    let (spec, layout) = read_layout()?;
    Ok((MemoryHandles::create(&spec.backend, &layout)?, layout))
}

fn read_layout() -> Result<(DeviceSpec, Layout)> {
    let spec = read_spec()?;
    let available = MemoryHandles::available(&spec.backend)?;
    let largest = Layout::largest_device(available, spec.chunk);
    let layout = Layout::new(spec.size.resolve(largest)?, spec.chunk)?;
    Ok((spec, layout))
}

fn read_spec() -> Result<DeviceSpec> {
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|error| Error::os("cannot read the device's specification", error))?;
    serde_json::from_str(&text).map_err(|error| {
        Error::usage(format!(
            "the device's specification is not understood: {error}"
        ))
    })
}

/// What must happen while the process has one thread: then every later thread inherits it.
fn prepare(spec: DeviceSpec) -> Result<(Session, Vec<String>)> {
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::new(
            ErrorKind::Permission,
            "ublk devices are made by root: run this as root (sudo)",
        ));
    }
    start_log(&spec)?;
    safety::settle_allocator();
    safety::detach_from_caller()?;
    let mut warnings = Vec::new();
    // A cgroup of its own keeps the server out of swap as well as the memory lock does, so the lab
    // switch that takes the one takes the other.
    if !spec.lab.no_memory_lock
        && let CgroupOutcome::LeftInPlace { reason } =
            safety::leave_caller_cgroup(spec.name.as_str())?
    {
        warnings.push(format!("the server stays in its caller's cgroup: {reason}"));
    }
    let run_dir = RunDir::system();
    let programs = safety::PROGRAM_DIRECTORIES.map(Path::new);
    let keep: Vec<&Path> = programs.into_iter().chain([run_dir.path()]).collect();
    safety::enter_private_mount_namespace(&keep)?;
    safety::block_termination_signals()?;
    warnings.extend(safety::protect(spec.allow_unsafe, spec.lab.no_memory_lock)?);
    Ok((Session::create(spec)?, warnings))
}

/// Messages go to standard error until the device is live, and to the lab's file if there is one.
/// Warnings and errors go to the kernel's log as well: it is the one place that works early in boot,
/// under memory pressure, and when the server has no standard error any more.
///
/// libublk speaks through the `log` crate, which nobody listens to here: its messages are about single
/// requests, on the I/O path.
fn start_log(spec: &DeviceSpec) -> Result<()> {
    let open = |path: &Path| OpenOptions::new().create(true).append(true).open(path);
    let filter =
        EnvFilter::try_from_env("UBLK_VRAM_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lab_file = match &spec.lab.log_file {
        Some(path) => Some(
            open(path)
                .map_err(|error| Error::os(format!("cannot open {}", path.display()), error))?,
        ),
        None => None,
    };
    // Without the right to write there, its messages are lost and nothing else.
    let kernel_log = OpenOptions::new().write(true).open("/dev/kmsg").ok();
    let kernel_log = kernel_log.map(|file| {
        let layer = fmt::layer().with_ansi(false).without_time();
        layer
            .with_writer(Mutex::new(file))
            .with_filter(LevelFilter::WARN)
    });
    let lab_log = lab_file.map(|file| fmt::layer().with_ansi(false).with_writer(Mutex::new(file)));
    tracing_subscriber::registry()
        .with(fmt::layer().with_ansi(false).with_writer(std::io::stderr))
        .with(lab_log)
        .with(kernel_log)
        .with(filter)
        .init();
    Ok(())
}
