//! The kernel module: its node called in every way, memory that goes at every moment, and the kernel's
//! opinion of it.
//!
//! The machine has two functions whose BARs are files of the host. The module gets the first; the
//! second is the GPU of a mock of the NVIDIA driver. Slab debugging, zeroing of freed pages, and the
//! kernel's sampled bounds checker are on, so that a use after free does not go unseen.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vmrig::{Device, Kernel, Process, workspace};

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("kmod::calls_and_data", On::Newest, calls_and_data),
    ("kmod::fuzz", On::Newest, fuzz),
    ("kmod::lifetimes", On::Newest, lifetimes),
    ("kmod::unplugged", On::Newest, unplugged),
    ("kmod::nvidia", On::Newest, nvidia),
];

/// Size of both BARs.
const BAR_MIB: u64 = 8;
const DEBUG: &str = "slub_debug=FZPU init_on_free=1 kfence.sample_interval=5";
const HUNG: Duration = Duration::from_secs(20);

/// A guest with the module loaded and function 0 bound to it.
struct Machine {
    guest: Guest,
    /// The file behind the mock GPU's BAR.
    gpu_file: PathBuf,
    _files: tempfile::TempDir,
}

impl std::ops::Deref for Machine {
    type Target = Guest;

    fn deref(&self) -> &Guest {
        &self.guest
    }
}

impl Machine {
    fn boot(kernel: &Kernel, name: &str) -> Result<Machine> {
        let dir = workspace::kmod_dir(&kernel.release)?;
        let module = |name: &str| {
            fs::read(dir.join(format!("{name}.ko"))).with_context(|| {
                format!(
                    "the module for kernel {} is not built: `cargo xtask kmod build`",
                    kernel.release
                )
            })
        };
        let (ours, mock) = (module("ublk_vram")?, module("nvidia_mock")?);
        let files = tempfile::tempdir()?;
        let gpu_file = files.path().join("gpu");
        let guest = Guest::boot(kernel, name, BAR_MIB, |vm| {
            vm.device(Device::Ivshmem {
                size_mib: BAR_MIB,
                file: gpu_file.clone(),
            })
            .hotplug_ports(1)
            .append(DEBUG)
            .panic_on_hung_task(HUNG)
            .file("/root/ublk_vram.ko", 0o644, ours)
            .file("/root/nvidia_mock.ko", 0o644, mock)
        })?;
        guest.must("insmod /root/ublk_vram.ko && [ -c /dev/ublk-vram ]")?;
        let machine = Machine {
            guest,
            gpu_file,
            _files: files,
        };
        machine.bind(&machine.pci_address(0))?;
        Ok(machine)
    }

    /// Binds a function to the module, as an administrator does.
    fn bind(&self, address: &str) -> Result<()> {
        self.must(&format!(
            "echo ublk-vram > /sys/bus/pci/devices/{address}/driver_override && \
             echo {address} > /sys/bus/pci/drivers_probe && \
             [ -e /sys/bus/pci/drivers/ublk-vram/{address} ]"
        ))?;
        Ok(())
    }

    fn unbind(&self, address: &str) -> Result<()> {
        self.must(&format!(
            "echo {address} > /sys/bus/pci/drivers/ublk-vram/unbind"
        ))?;
        Ok(())
    }

    fn load_mock(&self) -> Result<()> {
        let address = self.pci_address(1);
        self.must(&format!("insmod /root/nvidia_mock.ko device={address}"))?;
        Ok(())
    }

    /// BAR 2 of function 0, as the guest program takes it.
    fn bar(&self) -> String {
        format!("{}/2", self.pci_address(0))
    }

    /// Starts the guest program in the background and waits for its first line.
    fn start(&self, arguments: &str) -> Result<(Process, String)> {
        let process = self.spawn_sh(&format!(
            "rm -f /run/in; mkfifo /run/in; exec vramtest kmod {arguments} < /run/in"
        ))?;
        self.must("until [ -p /run/in ]; do sleep 0.05; done; (sleep 1000 > /run/in &) ; true")?;
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let (out, err) = process.output()?;
            if let Some((line, _)) = out.split_once('\n') {
                let line = line.to_owned();
                return Ok((process, line));
            }
            if let Some(out) = process.try_wait()? {
                bail!("it ended without a word: {out}");
            }
            ensure!(
                Instant::now() < deadline,
                "`{arguments}` says nothing: {err}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Says a line to what [`Machine::start`] started, and waits for its good end.
    fn finish(&self, process: Process) -> Result<String> {
        self.must("echo > /run/in")?;
        Ok(process.wait(Duration::from_secs(30))?.ok()?.stdout)
    }

    /// Nothing refers to the module, nothing of it is left, and both modules unload.
    fn end(self, mock: bool) -> Result<()> {
        let count = self.must("vramtest kmod count")?;
        ensure!(count == "0", "{count} regions are left");
        if mock {
            let live = self.must("cat /sys/module/nvidia_mock/parameters/live")?;
            ensure!(live == "0", "{live} page tables are left");
            self.must("rmmod nvidia_mock")?;
        }
        let users = self.must("cat /sys/module/ublk_vram/refcnt")?;
        ensure!(users == "0", "{users} references to the module are left");
        self.must("rmmod ublk_vram && [ ! -e /dev/ublk-vram ]")?;
        let left = self.must("grep ublk-vram /proc/iomem /proc/filesystems; true")?;
        ensure!(left.is_empty(), "left behind: {left}");
        // Once more: what the first load left behind would show now.
        self.must("insmod /root/ublk_vram.ko && rmmod ublk_vram")?;
        self.guest.end()
    }
}

fn calls_and_data(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-calls")?;
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

fn fuzz(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-fuzz")?;
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

fn lifetimes(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-lifetimes")?;
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

fn unplugged(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-unplugged")?;
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

fn nvidia(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-nvidia")?;
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
