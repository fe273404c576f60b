//! `xtask demo --host` where it can do no harm: on a guest as the machine at hand.
//!
//! What it promises is to leave the machine as it was, so that is what is looked at, after the end
//! and after a signal in the middle.

use std::{path::Path, time::Duration};

use vmrig::{Device, KernelSpec, Vm, VmBuilder, workspace};

const DEMO: &str = "xtask demo --host --size";

fn boot() -> vmrig::Result<Vm> {
    let kernel = KernelSpec::Suite("trixie-backports".into()).resolve()?;
    VmBuilder::new(&kernel)
        .name("xtask-host-demo")
        .memory(768)
        .device(Device::Qxl { vram_mib: 128 })
        .module("ublk_drv")
        .tools(&["mkswap", "swapon", "swapoff", "wipefs"])
        .program(Path::new(env!("CARGO_BIN_EXE_xtask")))
        .program(workspace::program("ublk-vram", "ublk-vram")?)
        .program(workspace::program("vramctl", "vramctl")?)
        .boot()
}

/// What a demo changes and must put back.
fn traces(vm: &Vm) -> vmrig::Result<String> {
    let script = "vramctl list -n; cat /proc/swaps; ls -d /sys/fs/cgroup/*/; \
                  cat /sys/fs/cgroup/cgroup.subtree_control; ls /dev | grep ublk; grep -lE '^(xtask|vramctl|ublk-vram)$' /proc/[0-9]*/comm; true";
    Ok(vm.sh(script)?.ok()?.stdout)
}

fn limit(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn the_machine_is_left_as_it_was() -> vmrig::Result<()> {
    let vm = boot()?;
    let before = traces(&vm)?;

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
        assert!(story.contains(part), "no '{part}' in\n{story}");
    }
    assert_eq!(traces(&vm)?, before);

    // A signal while the program swaps.
    let demo = vm.spawn_sh(&format!("exec {DEMO} 128M --backend host"))?;
    let swapped = "/sys/fs/cgroup/ublk-vram-demo/memory.swap.current";
    let wait = format!(
        "until [ \"$(cat {swapped} 2>/dev/null || echo 0)\" -gt 4000000 ]; do sleep 0.1; done"
    );
    vm.sh_timeout(&wait, limit(120))?.ok()?;
    demo.kill(libc::SIGINT)?;
    let ended = demo.wait(limit(120))?.expect_rc(1)?;
    assert!(ended.stderr.contains("interrupted"), "{ended}");
    assert_eq!(traces(&vm)?, before);

    // A device of that name that is somebody else's.
    vm.sh("vramctl add demo --size 96M --backend host --io-memory 1M")?
        .ok()?;
    let refused = vm.sh(&format!("{DEMO} 96M --backend host"))?.expect_rc(1)?;
    assert!(refused.stderr.contains("exists already"), "{refused}");
    vm.sh("vramctl remove demo")?.ok()?;
    assert_eq!(traces(&vm)?, before);

    // A machine that cannot have a device.
    vm.sh("rmmod ublk_drv")?.ok()?;
    let refused = vm.sh(&format!("{DEMO} 96M --backend host"))?.expect_rc(1)?;
    assert!(refused.stdout.contains("ublk"), "{refused}");
    assert!(refused.stderr.contains("cannot have a device"), "{refused}");
    assert_eq!(vm.kernel_complaints(), Vec::<String>::new());
    vm.shutdown()
}
