//! `ublk-vram`: the server of one device. Users start it through `vramctl add`.

use std::io::Read;
use std::os::fd::RawFd;
use std::path::Path;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use ublk_vram::backend::conformance::check_backend;
use ublk_vram::backend::{MemoryHandles, bench, cuda, footprint};
use ublk_vram::control::RunDir;
use ublk_vram::device::{DeviceName, DeviceSpec};
use ublk_vram::safety::CgroupOutcome;
use ublk_vram::session::handover;
use ublk_vram::store::Layout;
use ublk_vram::supervisor::{self, StartLine, StartPipe};
use ublk_vram::{Error, ErrorKind, Result, safety, worker};

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
        /// Serve the device again that is left of this name.
        #[arg(long, value_name = "NAME", conflicts_with = "adopt")]
        recover: Option<DeviceName>,
        /// Take over from a supervisor that is gone (started by its worker).
        #[arg(long, hide = true)]
        adopt: bool,
    },
    /// Do the I/O of a device (started by its supervisor).
    #[command(name = worker::SUBCOMMAND, hide = true)]
    Worker,
    /// Tell the sizes of the device whose specification is on standard input (started by a supervisor).
    #[command(name = supervisor::PLAN_SUBCOMMAND, hide = true)]
    Plan,
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
    /// Try whether the memory that a specification (JSON, on standard input) names outlives the process
    /// that made it. What the memory held is destroyed.
    #[command(hide = true)]
    Handover,
    /// A process of that trial (started by it).
    #[command(name = handover::SUBCOMMAND, hide = true)]
    HandoverPart,
    /// Carry out swapoff for a server (started by it).
    #[command(name = worker::swapoff::SUBCOMMAND, hide = true)]
    SwapoffHelper,
}

fn main() -> ExitCode {
    // SAFETY: no thread has been started yet.
    unsafe { ublk_vram::backend::vulkan::keep_layers_out() };
    safety::allow_open_files();
    let outcome = match Args::parse().command {
        Command::Serve { adopt: true, .. } => supervisor::adopt(),
        Command::Serve {
            start_pipe,
            recover,
            ..
        } => {
            // SAFETY: the descriptor was inherited for this purpose; no code before this line opened
            // one that could have the same number and be owned by somebody.
            serve(unsafe { StartPipe::inherited(start_pipe) }, recover)
        }
        Command::Worker => worker::main(),
        Command::Plan => supervisor::plan_main(),
        Command::Conformance => conformance(),
        Command::BenchCopy => bench_copy(),
        Command::Footprint => footprint(),
        Command::Handover => read_spec()
            .and_then(handover::keeper)
            .map(|text| print!("{text}")),
        Command::HandoverPart => handover::part(),
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

fn serve(mut start: StartPipe, orphan: Option<DeviceName>) -> Result<()> {
    let prepared = match &orphan {
        Some(name) => supervisor::read_identity(name).and_then(|identity| {
            let warnings = prepare(&identity.spec)?;
            Ok((identity.spec.clone(), Some(identity), warnings))
        }),
        None => read_spec().and_then(|spec| {
            // An empty group is left behind by a start that fails after it moved there.
            let warnings =
                prepare(&spec).inspect_err(|_| drop(safety::remove_cgroup(spec.name.as_str())))?;
            Ok((spec, None, warnings))
        }),
    };
    match prepared {
        Ok((_, Some(identity), warnings)) => supervisor::recover(identity, start, warnings),
        Ok((spec, None, warnings)) => {
            let name = spec.name.clone();
            supervisor::run(spec, start, warnings)
                .inspect_err(|_| drop(safety::remove_cgroup(name.as_str())))
        }
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
    let layout = MemoryHandles::layout(&spec.backend, &spec.size, spec.chunk)?;
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

/// What must happen while the process has one thread: then every later thread inherits it, and every
/// process that is started.
fn prepare(spec: &DeviceSpec) -> Result<Vec<String>> {
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::new(
            ErrorKind::Permission,
            "ublk devices are made by root: run this as root (sudo)",
        ));
    }
    ublk_vram::log::start(spec)?;
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
    Ok(warnings)
}
