//! The node itself.

use std::fs;
use std::time::Duration;

use anyhow::{Result, ensure};
use vmrig::{Device, Kernel, Process};

use super::{DEBUG, Machine};

/// Size of all BARs.
const BAR_MIB: u64 = 8;

/// A machine that looks for faults of the module, with function 0 bound to it.
fn boot(kernel: &Kernel, name: &str) -> Result<Machine> {
    let machine = Machine::boot(kernel, name, BAR_MIB, |vm| vm.append(DEBUG))?;
    machine.bind(&machine.pci_address(0))?;
    Ok(machine)
}

pub fn calls_and_data(kernel: &Kernel) -> Result<()> {
    let files = tempfile::tempdir()?;
    let large = Device::Ivshmem {
        size_mib: 1024,
        file: files.path().join("large"),
    };
    let machine = Machine::boot(kernel, "kmod-calls", BAR_MIB, |vm| {
        vm.append(DEBUG).device(large)
    })?;
    machine.bind(&machine.pci_address(0))?;
    let bar = machine.bar();
    let mode = machine.must("stat -c %a:%u /dev/ublk-vram")?;
    ensure!(mode == "600:0", "the node is {mode}");
    machine.must_within(&format!("vramtest kmod calls {bar}"), 60)?;
    let size = machine.must_within(&format!("vramtest kmod data {bar}"), 60)?;
    let file = fs::read(&machine.bar_file)?;
    ensure!(size == file.len().to_string(), "{size} bytes");
    // The last thing that the guest wrote.
    let expected: Vec<u8> = (0..file.len() as u64 / 8)
        .flat_map(|index| index.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    ensure!(
        file == expected,
        "the BAR's file does not hold what was written last"
    );
    machine.must_within(&format!("vramtest kmod uring {bar}"), 30)?;
    let address = machine.pci_address(2);
    machine.bind(&address)?;
    let step = machine.must_within(&format!("vramtest kmod huge {address}/2"), 60)?;
    eprintln!("kmod::calls_and_data: pages of {step} bytes");
    // No driver that can be used: a sentence in the log, an errno, and nothing held.
    let out = machine.sh("vramtest kmod nvidia-sticky")?;
    ensure!(
        !out.success() && out.stderr.contains("not supported"),
        "{out}"
    );
    ensure!(
        machine.console_contains("no nvidia driver that can be used"),
        "no sentence"
    );
    machine.end(false)
}

pub fn fuzz(kernel: &Kernel) -> Result<()> {
    let machine = boot(kernel, "kmod-fuzz")?;
    machine.load_mock()?;
    let (bar, address) = (machine.bar(), machine.pci_address(0));
    // Two at once, while a third takes the memory away and gives it back.
    let chaos = machine.spawn_sh(&format!(
        "while [ ! -e /run/stop ]; do \
         echo 1 > /sys/module/nvidia_mock/parameters/revoke; \
         echo {address} > /sys/bus/pci/drivers/ublk-vram/unbind; \
         echo {address} > /sys/bus/pci/drivers_probe; sleep 0.05; done"
    ))?;
    let runs: Vec<Process> = [1, 2]
        .iter()
        .map(|seed| {
            machine.spawn_sh(&format!(
                "vramtest kmod fuzz {bar} --calls 50000 --seed {seed}"
            ))
        })
        .collect::<vmrig::Result<_>>()?;
    for run in runs {
        let out = run.wait(Duration::from_secs(180))?.ok()?;
        eprintln!("kmod::fuzz: {}", out.stdout.trim());
    }
    machine.must("touch /run/stop")?;
    chaos.wait(Duration::from_secs(20))?.ok()?;
    machine.must(&format!("vramtest kmod fuzz {bar} --calls 100 --seed 3"))?;
    machine.end(true)
}

pub fn lifetimes(kernel: &Kernel) -> Result<()> {
    let machine = boot(kernel, "kmod-lifetimes")?;
    let (bar, address) = (machine.bar(), machine.pci_address(0));

    // The function is unbound while mapped and in use; later it serves again.
    for _ in 0..3 {
        let (process, line) = machine.start(&format!("revoked {bar}"))?;
        ensure!(line == "ready", "{line}");
        machine.unbind(&address)?;
        machine.finish(process)?;
        machine.bind(&address)?;
    }
    machine.must("vramtest kmod count | grep -x 0")?;

    // The module does not unload while open, mapped, or sticky.
    let (process, _) = machine.start("open")?;
    machine.refused("rmmod ublk_vram", 1, &[])?;
    machine.finish(process)?;
    let id = machine.must(&format!("vramtest kmod sticky {bar}"))?;
    machine.refused("rmmod ublk_vram", 1, &[])?;

    // A process is killed in its stores; the next finds the bytes. Three times over.
    for round in 0..3 {
        let (process, line) = machine.start(&format!("mapper {id}"))?;
        ensure!(line == "mapped", "{line}");
        process.kill(9)?;
        let found = machine.must(&format!("vramtest kmod successor {id}"))?;
        let first = found == "written by the first process";
        ensure!(first == (round == 0), "round {round}: {found}");
        process.wait(Duration::from_secs(20))?;
    }
    machine.must(&format!("vramtest kmod destroy {id}"))?;

    // A sticky region that nobody has open ends with its function.
    machine.must(&format!("vramtest kmod sticky {bar}"))?;
    machine.unbind(&address)?;
    machine.must("vramtest kmod count | grep -x 0")?;
    machine.bind(&address)?;

    // Sysfs and the module keep out of each other's way: who has claimed the range has it alone.
    let id = machine.must(&format!("vramtest kmod sticky {bar}"))?;
    let sysfs = format!("/sys/bus/pci/devices/{address}/resource2_wc");
    let mapped = machine.read_mapping(&sysfs, 0, 4096);
    ensure!(
        mapped.is_err(),
        "a claimed range can be mapped through sysfs"
    );
    machine.must(&format!("vramtest kmod destroy {id}"))?;
    machine.end(false)
}

pub fn unplugged(kernel: &Kernel) -> Result<()> {
    let machine = boot(kernel, "kmod-unplugged")?;
    let file = machine.gpu_file.with_file_name("plugged");
    let device = Device::Ivshmem {
        size_mib: BAR_MIB,
        file,
    };
    for _ in 0..2 {
        let address = machine.plug(&device)?;
        machine.bind(&address)?;
        let (process, line) = machine.start(&format!("revoked {address}/2"))?;
        ensure!(line == "ready", "{line}");
        machine.unplug(&address)?;
        machine.finish(process)?;
    }
    machine.end(false)
}

pub fn nvidia(kernel: &Kernel) -> Result<()> {
    let machine = boot(kernel, "kmod-nvidia")?;
    machine.load_mock()?;
    machine.must_within("vramtest kmod nvidia", 60)?;
    // The host finds page n of the GPU at page (last - n) of the BAR.
    let file = fs::read(&machine.gpu_file)?;
    let pages = file.len() >> 16;
    for (page, bytes) in file.chunks(1 << 16).rev().enumerate().take(32) {
        let wanted = (page * 7 + 1) as u8;
        ensure!(
            bytes.iter().all(|byte| *byte == wanted),
            "page {page} of {pages}"
        );
    }
    machine.must_within("vramtest kmod nvidia-errors", 60)?;
    let lines = machine.must_within("vramtest kmod nvidia-revoked", 120)?;
    eprintln!("kmod::nvidia: {lines}");

    // The maker is gone; pages, region and bytes are there, and hold both modules.
    let id = machine.must("vramtest kmod nvidia-sticky")?;
    machine.refused("rmmod nvidia_mock", 1, &[])?;
    machine.refused("rmmod ublk_vram", 1, &[])?;
    let (process, _) = machine.start(&format!("mapper {id}"))?;
    process.kill(9)?;
    let found = machine.must(&format!("vramtest kmod successor {id}"))?;
    ensure!(found == "written by the first process", "{found}");
    process.wait(Duration::from_secs(20))?;
    machine.must(&format!("vramtest kmod destroy {id}"))?;
    machine.end(true)
}
