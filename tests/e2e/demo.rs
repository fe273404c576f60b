//! `xtask demo --host` where it can do no harm: on a guest as the machine at hand.
//!
//! What it promises is to leave the machine as it was, so that is what is looked at, after the end
//! and after a signal in the middle.

use std::time::Duration;

use anyhow::{Result, ensure};
use vmrig::{Device, Kernel, Vm, VmBuilder, workspace};

use crate::{Case, On};

pub const CASES: &[Case] = &[("demo::on_the_host", On::Newest, on_the_host)];

const DEMO: &str = "xtask demo --host --size";

fn boot(kernel: &Kernel) -> Result<Vm> {
    let vm = VmBuilder::new(kernel)
        .name("demo-host")
        .memory(768)
        .device(Device::Qxl { vram_mib: 128 })
        .module("ublk_drv")
        .tools(&["mkswap", "swapon", "swapoff", "wipefs"])
        .program(workspace::program("xtask", "xtask")?)
        .program(workspace::program("ublk-vram", "ublk-vram")?)
        .program(workspace::program("vramctl", "vramctl")?);
    Ok(vm.boot()?)
}

/// What a demo changes and must put back.
fn traces(vm: &Vm) -> Result<String> {
    let script = "vramctl list -n; cat /proc/swaps; ls -d /sys/fs/cgroup/*/; \
                  cat /sys/fs/cgroup/cgroup.subtree_control; ls /dev | grep ublk; grep -lE '^(xtask|vramctl|ublk-vram)$' /proc/[0-9]*/comm; true";
    Ok(vm.sh(script)?.ok()?.stdout)
}

fn limit(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn on_the_host(kernel: &Kernel) -> Result<()> {
    let vm = boot(kernel)?;
    let before = traces(&vm)?;
    let is_as_it_was = || -> Result<()> {
        let now = traces(&vm)?;
        ensure!(now == before, "{before}\nbecame\n{now}");
        Ok(())
    };

    let story = vm
        .sh_timeout(&format!("{DEMO} max --gpu 0"), limit(300))?
        .ok()?
        .stdout;
    eprintln!("{story}");
    for part in [
        "machine",
        "/dev/ublkb0",
        "swapped",
        "every byte: 0 wrong",
        "removed",
    ] {
        ensure!(story.contains(part), "no '{part}' in\n{story}");
    }
    is_as_it_was()?;

    // A signal while the program swaps.
    let demo = vm.spawn_sh(&format!("exec {DEMO} 128M --backend host"))?;
    let swapped = "/sys/fs/cgroup/ublk-vram-demo/memory.swap.current";
    let wait = format!(
        "until [ \"$(cat {swapped} 2>/dev/null || echo 0)\" -gt 4000000 ]; do sleep 0.1; done"
    );
    vm.sh_timeout(&wait, limit(120))?.ok()?;
    demo.kill(libc::SIGINT)?;
    let ended = demo.wait(limit(120))?.expect_rc(1)?;
    ensure!(ended.stderr.contains("interrupted"), "{ended}");
    is_as_it_was()?;

    // A device of that name that is somebody else's.
    vm.sh("vramctl add demo --size 96M --backend host --io-memory 1M")?
        .ok()?;
    let refused = vm.sh(&format!("{DEMO} 96M --backend host"))?.expect_rc(1)?;
    ensure!(refused.stderr.contains("exists already"), "{refused}");
    vm.sh("vramctl remove demo")?.ok()?;
    is_as_it_was()?;

    // A machine that cannot have a device.
    vm.sh("rmmod ublk_drv")?.ok()?;
    let refused = vm.sh(&format!("{DEMO} 96M --backend host"))?.expect_rc(1)?;
    ensure!(refused.stdout.contains("ublk"), "{refused}");
    ensure!(refused.stderr.contains("cannot have a device"), "{refused}");
    let complaints = vm.kernel_complaints();
    ensure!(complaints.is_empty(), "{complaints:?}");
    Ok(vm.shutdown()?)
}
