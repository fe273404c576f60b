//! `cargo xtask bench`: our devices beside the kernel's RAM disks, in one virtual machine.
//!
//! Under emulation no figure says anything about real hardware. What can be compared is the devices
//! with each other: the same guest, the same memory behind all of them, and each job run on one
//! device after the other, so that whatever else the host does meets all of them.

use std::{path::PathBuf, process::Command, process::ExitCode, time::Duration};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmrig::{Device, KernelSpec, Vm, VmBuilder};

use crate::{cargo, deps};

mod fio;
mod report;
mod zero_copy;

use fio::JOBS;
use report::{Cost, Row};

/// Size of every device that is measured.
const DEVICE_MIB: u64 = 256;
const LIMIT: Duration = Duration::from_secs(200);

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Debian suite whose newest cloud kernel is booted
    #[arg(long, default_value = "trixie-backports")]
    suite: String,
    /// Guest memory
    #[arg(long, value_name = "MiB", default_value_t = 2048)]
    memory: u64,
    /// How long each job is measured, after one second that is not
    #[arg(long, value_name = "SECONDS", default_value_t = 4)]
    seconds: u32,
    /// Compare zero copy with copies by the server instead, on the kernel module
    #[arg(long, conflicts_with = "write")]
    zero_copy: bool,
    /// Put the result between the markers of this document
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
}

/// Measures, prints, and writes if it is to.
///
/// # Errors
/// When the machine does not boot, or a device or fio fails.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    deps::ensure_build_tools()?;
    deps::ensure_programs(&[&deps::BOOT, &deps::SWAP, &deps::FIO])?;
    let programs = cargo::build_release()?;
    let kernel = KernelSpec::Suite(arguments.suite.clone()).resolve()?;
    let kib = DEVICE_MIB << 10;
    let builder = VmBuilder::new(&kernel)
        .name("xtask-bench")
        .memory(arguments.memory)
        .module("ublk_drv")
        .tools(&["fio", "dd"])
        .program(programs.join("ublk-vram"))
        .program(programs.join("vramctl"));
    if arguments.zero_copy {
        let vm = zero_copy::boot(builder, &kernel)?;
        println!("{}", zero_copy::table(&vm, arguments)?);
        vm.shutdown()?;
        return Ok(ExitCode::SUCCESS);
    }
    let vm = builder
        .device(Device::Qxl { vram_mib: 512 })
        .module(&format!("brd rd_nr=1 rd_size={kib}"))
        .module("zram num_devices=1")
        .boot()?;
    let costs = costs(&vm)?;
    let load = host_load()?;
    let devices = devices(&vm)?;
    let rows = measure(&vm, &devices, &["host", "pci"], arguments.seconds)?;
    let names = devices.each_ref().map(|(name, _)| *name);
    let section = format!(
        "{}\nEach cell: the figure, and in brackets its ratio to brd.\n\n{}\nWhat a server takes of \
         the machine's memory (`vramctl show --json`, `memory`):\n\n{}",
        machine(&vm, arguments, &load)?,
        report::table(&names, &rows),
        report::costs(&costs)
    );
    vm.shutdown()?;
    println!("{section}");
    if let Some(path) = &arguments.write {
        report::write(path, &section)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn must(vm: &Vm, script: &str) -> Result<String> {
    let out = vm.sh_timeout(script, LIMIT)?.ok()?;
    Ok(out.stdout.trim().to_owned())
}

/// Makes the four devices, all of the same size, each written full once.
fn devices(vm: &Vm) -> Result<[(&'static str, String); 4]> {
    let gpu = vm.pci_address(0);
    let zram = must(
        vm,
        &format!(
            "echo lz4 > /sys/block/zram0/comp_algorithm 2>/dev/null; \
             echo {DEVICE_MIB}M > /sys/block/zram0/disksize; \
             sed 's/.*\\[\\(.*\\)\\].*/\\1/' /sys/block/zram0/comp_algorithm"
        ),
    )?;
    eprintln!("xtask: zram compresses with {zram}");
    let devices = [
        ("brd", "/dev/ram0".to_owned()),
        ("zram", "/dev/zram0".to_owned()),
        (
            "ours, host",
            must(
                vm,
                &format!("vramctl add host --backend host --size {DEVICE_MIB}M"),
            )?,
        ),
        (
            "ours, pci",
            must(
                vm,
                &format!("vramctl add pci --gpu {gpu} --size {DEVICE_MIB}M"),
            )?,
        ),
    ];
    for (name, path) in &devices {
        must(
            vm,
            &format!("dd if=/dev/urandom of={path} bs=1M count={DEVICE_MIB} oflag=direct 2>&1"),
        )
        .with_context(|| format!("cannot fill {name}"))?;
    }
    Ok(devices)
}

/// Runs every job on every device; `ours` are those of a server, by name.
fn measure(vm: &Vm, devices: &[(&str, String)], ours: &[&str], seconds: u32) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for job in &JOBS {
        eprintln!("xtask: {}", job.name);
        let figures = devices.iter().map(|(name, path)| {
            let output = must(vm, &job.command(path, seconds))?;
            job.figure(&output).with_context(|| format!("on {name}"))
        });
        rows.push(Row {
            name: job.name,
            unit: job.unit,
            figures: figures.collect::<Result<_>>()?,
        });
    }
    for name in ours {
        let errors: u64 = show(vm, name)?["queue"]
            .as_array()
            .context("no queues in show")?
            .iter()
            .filter_map(|queue| queue["errors"].as_u64())
            .sum();
        ensure!(errors == 0, "the device {name} had {errors} I/O errors");
    }
    Ok(rows)
}

fn show(vm: &Vm, name: &str) -> Result<Value> {
    let text = must(vm, &format!("vramctl show {name} --json"))?;
    let mut shown: Value = serde_json::from_str(&text).context("show --json")?;
    Ok(shown["device"].take())
}

/// What some devices cost, each alone.
fn costs(vm: &Vm) -> Result<Vec<Cost>> {
    let pci = format!("--gpu {}", vm.pci_address(0));
    [
        (
            "pci, 64M, `--io-memory 4M`",
            format!("{pci} --size 64M --io-memory 4M"),
        ),
        ("pci, 256M", format!("{pci} --size 256M")),
        ("pci, max (512M BAR)", format!("{pci} --size max")),
        ("host, 256M", "--backend host --size 256M".to_owned()),
    ]
    .into_iter()
    .map(|(what, options)| {
        must(vm, &format!("vramctl add cost {options}"))?;
        let shown = show(vm, "cost")?;
        must(vm, "vramctl remove cost")?;
        let bytes = |key: &str| {
            shown["memory"][key]
                .as_u64()
                .with_context(|| format!("no memory.{key} in show"))
        };
        let queues = shown["queues"].as_u64().unwrap_or_default();
        Ok(Cost {
            what: format!("{what}, {queues} queues"),
            cost: bytes("cost")?,
            arena: bytes("arena")?,
            locked: bytes("locked")?,
            resident: bytes("resident")?,
        })
    })
    .collect()
}

/// Everything that a figure has to name.
fn machine(vm: &Vm, arguments: &Arguments, load: &str) -> Result<String> {
    let qemu = Command::new("qemu-system-x86_64")
        .arg("--version")
        .output()
        .context("cannot run qemu-system-x86_64")?;
    let qemu = String::from_utf8_lossy(&qemu.stdout);
    let qemu = qemu.lines().next().unwrap_or_default();
    let qemu = qemu.split(" (").next().unwrap_or_default();
    let cpus = std::thread::available_parallelism()?;
    let zram = must(vm, "cat /sys/block/zram0/comp_algorithm")?;
    let zram = zram.split(['[', ']']).nth(1).unwrap_or("?");
    let example = JOBS[2].command("DEVICE", arguments.seconds);
    let queues = must(vm, "vramctl list -n -o QUEUES,DEPTH | head -n 1")?;
    let queues: Vec<&str> = queues.split_whitespace().collect();
    Ok(format!(
        "Host: {}, {cpus} CPUs, load {load} before. {qemu}, TCG (no KVM). Guest: Linux {}, 2 CPUs, \
         {} MiB; all devices {DEVICE_MIB} MiB, written full once; ours with {} queues of depth {}; \
         zram with {zram}, incompressible data. Release build.\n\n    cargo xtask bench\n    {}\n",
        host_cpu()?,
        vm.release(),
        arguments.memory,
        queues.first().unwrap_or(&"?"),
        queues.get(1).unwrap_or(&"?"),
        example.split_whitespace().collect::<Vec<_>>().join(" ")
    ))
}

fn host_cpu() -> Result<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo")?;
    let field = |key: &str| {
        let line = text.lines().find(|line| {
            let name = line.split(':').next().unwrap_or_default();
            name.trim() == key
        });
        let value = line.and_then(|line| line.split(':').nth(1));
        value.map_or("?", str::trim).to_owned()
    };
    Ok(format!(
        "{} (model {})",
        field("model name"),
        field("model")
    ))
}

fn host_load() -> Result<String> {
    let text = std::fs::read_to_string("/proc/loadavg")?;
    Ok(text.split(' ').next().unwrap_or("?").to_owned())
}
