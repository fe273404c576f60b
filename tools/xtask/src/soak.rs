//! `cargo xtask soak MINUTES`: I/O, kills, injected errors, adding and removing, all mixed, in a virtual
//! machine, with every byte checked.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmrig::{Device, KernelSpec, Vm, VmBuilder};

use crate::{cargo::cargo, deps};

/// How long one device is used before it is removed and the next one added.
const ROUND: u64 = 45;
const BAR_MIB: u64 = 64;

/// Arguments of `cargo xtask soak`.
#[derive(clap::Args)]
pub struct Arguments {
    /// How long
    #[arg(value_name = "MINUTES")]
    minutes: u64,
    /// Debian suite whose newest cloud kernel is booted
    #[arg(long, default_value = "trixie-backports")]
    suite: String,
    /// Begins the numbers that decide what happens when
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
}

/// Runs until the time is over or something is wrong.
///
/// # Errors
/// A byte was wrong, a request failed that should not, something was left behind, or the kernel
/// complained.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    deps::ensure_build_tools()?;
    deps::ensure_programs(&[&deps::BOOT])?;
    let built = cargo(&[
        "build",
        "--bins",
        "--package=ublk-vram",
        "--package=vramctl",
        "--package=vmrig",
        "--package=ublk-vram-tests",
    ])
    .status()
    .context("cargo build")?;
    ensure!(built.success(), "the programs are not built");
    let programs = vmrig::workspace::target_dir()?.join("debug");
    let kernel = KernelSpec::Suite(arguments.suite.clone()).resolve()?;
    let files = tempfile::tempdir()?;
    let bar: PathBuf = files.path().join("bar");
    let vm = VmBuilder::new(&kernel)
        .name("xtask-soak")
        .memory(512)
        .device(Device::Ivshmem {
            size_mib: BAR_MIB,
            file: bar.clone(),
        })
        .module("ublk_drv")
        .panic_on_hung_task(Duration::from_secs(100))
        .program(programs.join("ublk-vram"))
        .program(programs.join("vramctl"))
        .program(programs.join("vramtest"))
        .boot()?;
    let end = Instant::now() + Duration::from_secs(arguments.minutes * 60);
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    let mut round = 0;
    while Instant::now() < end {
        let left = end.saturating_duration_since(Instant::now()).as_secs();
        let seconds = ROUND.min(left.max(5));
        let report = one_round(&vm, arguments.seed + round, seconds)
            .with_context(|| format!("round {round}"))?;
        let wiped = std::fs::read(&bar)?.iter().all(|&byte| byte == 0);
        ensure!(wiped, "round {round}: something outlived the device");
        round += 1;
        for (key, value) in report.as_object().into_iter().flatten() {
            let value = value.as_u64().unwrap_or(0);
            let sum = sums.entry(key.clone()).or_default();
            *sum = if key.starts_with("longest") {
                (*sum).max(value)
            } else {
                *sum + value
            };
        }
        eprintln!("xtask: round {round}: {report}");
    }
    let complaints = vm.kernel_complaints();
    ensure!(
        complaints.is_empty(),
        "the kernel complained: {complaints:#?}"
    );
    vm.shutdown()?;
    println!(
        "{round} devices on {} ({}):\n{}",
        kernel.release,
        arguments.suite,
        serde_json::to_string_pretty(&sums)?
    );
    Ok(ExitCode::SUCCESS)
}

/// One device: added, used, removed.
fn one_round(vm: &Vm, seed: u64, seconds: u64) -> Result<Value> {
    let gpu = vm.pci_address(0);
    let limit = Duration::from_secs(seconds + 300);
    let must = |script: &str| -> Result<String> {
        let out = vm.sh_timeout(script, limit)?.ok()?;
        Ok(out.stdout.trim().to_owned())
    };
    let path = must(&format!(
        "vramctl add soak --gpu {gpu} --size max --chunk 16M --io-memory 4M --allow-unsafe --lab-fault"
    ))?;
    let report = must(&format!(
        "vramtest soak soak {path} --seconds {seconds} --seed {seed}"
    ))?;
    must("vramctl remove soak")?;
    let left = must(
        "ls /dev | grep '^ublk[bc][0-9]'; ls /run/ublk-vram; \
         grep -lx ublk-vram /proc/[0-9]*/comm 2>/dev/null; true",
    )?;
    ensure!(left.is_empty(), "left behind: {left}");
    serde_json::from_str(&report).with_context(|| format!("not a report: {report}"))
}
