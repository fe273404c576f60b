//! The kernel module: its node called in every way, memory that goes at every moment, devices on it,
//! and the kernel's opinion of all that.
//!
//! The machine has two functions whose BARs are files of the host. The module gets the first; the
//! second is the GPU of a mock of the NVIDIA driver.

mod device;
mod node;
mod zero_copy;

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use vmrig::{Device, Kernel, Process, VmBuilder, workspace};

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("kmod::calls_and_data", On::Newest, node::calls_and_data),
    ("kmod::fuzz", On::Newest, node::fuzz),
    ("kmod::lifetimes", On::Newest, node::lifetimes),
    ("kmod::unplugged", On::Newest, node::unplugged),
    ("kmod::nvidia", On::Newest, node::nvidia),
    ("kmod::device", On::Newest, device::device),
    ("kmod::cuda", On::Newest, device::cuda),
    ("kmod::swap_storm", On::Newest, device::swap_storm),
    ("kmod::kills", On::Newest, device::kills),
    ("kmod::zero_copy", On::Newest, zero_copy::zero_copy),
    (
        "kmod::zero_copy_without_kernel_threads",
        On::Newest,
        zero_copy::without_kernel_threads,
    ),
    ("kmod::zero_copy_lost", On::Newest, zero_copy::lost),
];

/// Slab debugging, zeroing of freed memory, and the kernel's sampled bounds checker: a use after free
/// does not go unseen.
const DEBUG: &str = "slub_debug=FZPU init_on_free=1 kfence.sample_interval=5";
const HUNG: Duration = Duration::from_secs(20);

/// A guest with the module loaded and function 0 bound to it.
struct Machine {
    guest: Guest,
    /// The file behind the mock GPU's BAR.
    gpu_file: PathBuf,
    /// How many programs were started: each has a pipe of its own.
    starts: AtomicU32,
    _files: tempfile::TempDir,
}

impl std::ops::Deref for Machine {
    type Target = Guest;

    fn deref(&self) -> &Guest {
        &self.guest
    }
}

impl Machine {
    /// Boots it with BARs of `bar_mib` MiB, and what `more` adds.
    fn boot(
        kernel: &Kernel,
        name: &str,
        bar_mib: u64,
        more: impl FnOnce(VmBuilder) -> VmBuilder,
    ) -> Result<Machine> {
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
        let guest = Guest::boot(kernel, name, bar_mib, |vm| {
            more(
                vm.device(Device::Ivshmem {
                    size_mib: bar_mib,
                    file: gpu_file.clone(),
                })
                .hotplug_ports(1)
                .panic_on_hung_task(HUNG)
                .file("/root/ublk_vram.ko", 0o644, ours)
                .file("/root/nvidia_mock.ko", 0o644, mock),
            )
        })?;
        guest.must("insmod /root/ublk_vram.ko && [ -c /dev/ublk-vram ]")?;
        let machine = Machine {
            guest,
            gpu_file,
            starts: AtomicU32::new(0),
            _files: files,
        };
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

    /// Writes a part of the disk in any order and reads it back, every byte checked.
    fn fio_verify(&self, path: &str, part: &str, seconds: u64) -> Result<()> {
        let fio = format!(
            "fio --name=x --filename={path} --direct=1 --ioengine=io_uring --iodepth=16 --rw=randwrite \
             {part} --verify=crc32c --verify_fatal=1 --thread --output-format=terse"
        );
        self.must_within(&fio, seconds).map(drop)
    }

    /// Starts the guest program in the background and waits for its first line.
    fn start(&self, arguments: &str) -> Result<(Process, String)> {
        let pipe = format!("/run/in{}", self.starts.fetch_add(1, Ordering::Relaxed) + 1);
        self.must(&format!("mkfifo {pipe}"))?;
        let process = self.spawn_sh(&format!("exec vramtest kmod {arguments} < {pipe}"))?;
        // Opens the pipe, which the program waits for, and keeps it open.
        self.must(&format!("(sleep 1000 > {pipe} &)"))?;
        let deadline = Instant::now() + Duration::from_secs(120);
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
        let pipe = format!("/run/in{}", self.starts.load(Ordering::Relaxed));
        self.must(&format!("echo > {pipe}"))?;
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
