//! Boots real kernels and checks that every way in which a guest can behave is told apart.

use std::{fs, os::unix::fs::FileExt, path::Path, thread, time::Duration};

use vmrig::{Device, Error, KernelSpec, Vm, VmBuilder};

fn second(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn exercise(suite: &str) -> vmrig::Result<()> {
    let kernel = KernelSpec::Suite(suite.into()).resolve()?;
    let dir = tempfile::tempdir()?;
    let bar = dir.path().join("bar");
    let disk = dir.path().join("disk");
    fs::write(&disk, vec![0; 1 << 20])?;
    let vm = VmBuilder::new(&kernel)
        .name("boot")
        .memory(256)
        .device(Device::Qxl { vram_mib: 256 })
        .device(Device::Ivshmem {
            size_mib: 64,
            file: bar.clone(),
        })
        .device(Device::VirtioBlk { file: disk })
        .hotplug_ports(1)
        .module("ublk_drv")
        .tools(&["mkswap", "swapon", "swapoff"])
        .boot()?;
    eprintln!("{} is up after {:?}", vm.release(), vm.boot_time());
    assert_eq!(vm.sh("uname -r")?.ok()?.stdout.trim(), kernel.release);
    vm.sh("test -c /dev/ublk-control && test -b /dev/vda")?
        .ok()?;
    commands(&vm)?;
    background(&vm)?;
    devices(&vm, &bar)?;
    hotplug(&vm, &dir.path().join("plugged"))?;
    root_is_not_swappable(&vm)?;
    assert_eq!(vm.kernel_complaints(), Vec::<String>::new());
    let log = vm.log_path().to_owned();
    assert!(log.exists());
    vm.shutdown()?;
    assert!(!log.exists(), "the log of a good run is removed");
    Ok(())
}

fn commands(vm: &Vm) -> vmrig::Result<()> {
    let failed = vm.sh("echo out; echo err >&2; exit 7")?;
    assert_eq!(
        (failed.rc, failed.stdout.as_str(), failed.stderr.as_str()),
        (7, "out\n", "err\n")
    );
    let message = failed.ok().unwrap_err().to_string();
    assert!(
        message.contains("exit code 7") && message.contains("err"),
        "{message}"
    );

    let killed = vm.sh_timeout("echo begun; sleep 100", second(1))?;
    assert!(
        killed.timed_out && !killed.stuck && killed.signal == Some(9),
        "{killed}"
    );
    assert_eq!(killed.stdout, "begun\n");

    // A daemon that keeps its outputs open does not keep the command from ending.
    let daemon = vm.sh_timeout("sleep 30 & echo left", second(20))?.ok()?;
    assert!(daemon.duration < second(15), "{daemon:?}");

    vm.write_file("/tmp/a/b", 0o755, b"\0\xff\n")?;
    assert_eq!(vm.read_file("/tmp/a/b")?, b"\0\xff\n");
    assert_eq!(vm.sh("stat -c %a /tmp/a/b")?.ok()?.stdout.trim(), "755");
    assert!(matches!(
        vm.read_file("/nonexistent"),
        Err(Error::Refused { .. })
    ));

    // The real programs are found before busybox's, from the shell and from what starts programs.
    for how in [
        "mkswap --version",
        "timeout 5 mkswap --version",
        "env mkswap --version",
    ] {
        assert!(vm.sh(how)?.ok()?.stdout.contains("util-linux"), "{how}");
    }
    // The agent's own protection is not inherited.
    let score = vm
        .sh("cat /proc/self/oom_score_adj; grep VmLck /proc/self/status")?
        .ok()?
        .stdout;
    assert!(
        score.starts_with("0\n") && score.contains(" 0 kB"),
        "{score}"
    );

    // Several requests are under way at once.
    thread::scope(|scope| {
        let slow = scope.spawn(|| vm.sh("while [ ! -e /tmp/go ]; do sleep 0.1; done; echo gone"));
        let quick = vm.sh("touch /tmp/go");
        assert!(quick.is_ok_and(|out| out.success()));
        assert_eq!(slow.join().unwrap().unwrap().stdout, "gone\n");
    });
    Ok(())
}

fn background(vm: &Vm) -> vmrig::Result<()> {
    let process = vm.spawn_sh("echo $$; trap 'exit 3' TERM; while :; do sleep 0.1; done")?;
    assert!(process.try_wait()?.is_none());
    assert!(matches!(
        process.wait(Duration::from_millis(300)),
        Err(Error::StillRunning { .. })
    ));
    assert_eq!(process.output()?.0.trim(), process.pid().to_string());
    process.kill(15)?;
    assert_eq!(process.wait(second(20))?.rc, 3);
    assert_eq!(process.wait(second(20))?.rc, 3);
    assert!(process.kill(15).is_err());
    Ok(())
}

fn devices(vm: &Vm, bar: &Path) -> vmrig::Result<()> {
    let sys = |index| format!("/sys/bus/pci/devices/{}", vm.pci_address(index));
    let class = |index| {
        vm.sh(&format!("cat {}/class", sys(index)))?
            .ok()
            .map(|out| out.stdout)
    };
    assert_eq!(class(0)?.trim(), "0x038000");
    assert_eq!(class(1)?.trim(), "0x050000");
    let size = vm
        .sh(&format!("stat -c %s {}/resource4_wc", sys(0)))?
        .ok()?
        .stdout;
    assert_eq!(size.trim(), (256 << 20).to_string());
    vm.sh(&format!(
        "for d in {} {}; do echo 1 > $d/enable; done",
        sys(0),
        sys(1)
    ))?
    .ok()?;
    let pattern = b"seen by the host";
    let resource = format!("{}/resource2_wc", sys(1));
    vm.write_mapping(&resource, 4100, pattern)?;
    let mut file = fs::read(bar)?;
    let seen = file.get_mut(4100..4100 + pattern.len()).unwrap();
    assert_eq!(seen, pattern);
    seen.copy_from_slice(b"seen by guest...");
    fs::OpenOptions::new()
        .write(true)
        .open(bar)?
        .write_all_at(&file, 0)?;
    assert_eq!(vm.read_mapping(&resource, 4100, 16)?, b"seen by guest...");
    assert!(matches!(
        vm.read_mapping(&resource, 64 << 20, 1),
        Err(Error::Refused { .. })
    ));
    let vram = format!("{}/resource4_wc", sys(0));
    vm.write_mapping(&vram, (256 << 20) - 16, pattern)?;
    assert_eq!(vm.read_mapping(&vram, (256 << 20) - 16, 16)?, pattern);
    Ok(())
}

fn hotplug(vm: &Vm, file: &Path) -> vmrig::Result<()> {
    let device = Device::Ivshmem {
        size_mib: 16,
        file: file.to_owned(),
    };
    for _ in 0..2 {
        let address = vm.plug(&device)?;
        let size = vm
            .sh(&format!(
                "stat -c %s /sys/bus/pci/devices/{address}/resource2"
            ))?
            .ok()?;
        assert_eq!(size.stdout.trim(), (16 << 20).to_string());
        vm.unplug(&address)?;
        vm.sh(&format!("test ! -e /sys/bus/pci/devices/{address}"))?
            .ok()?;
    }
    Ok(())
}

fn root_is_not_swappable(vm: &Vm) -> vmrig::Result<()> {
    let mounts = vm.sh("cat /proc/mounts")?.ok()?.stdout;
    assert!(
        mounts
            .lines()
            .any(|line| line.starts_with("rootfs / ") || line.contains(" / ramfs"))
    );
    assert!(!mounts.contains(" / tmpfs"), "{mounts}");
    Ok(())
}

fn bad_ends(suite: &str) -> vmrig::Result<()> {
    let kernel = KernelSpec::Suite(suite.into()).resolve()?;
    let small = || VmBuilder::new(&kernel).memory(256);

    let vm = small().name("panic-during-request").boot()?;
    let error = vm.sh("echo c > /proc/sysrq-trigger").unwrap_err();
    assert!(
        error.is_panic() && error.to_string().contains("sysrq triggered crash"),
        "{error}"
    );
    let log = vm.log_path().to_owned();
    drop(vm);
    let text = fs::read_to_string(&log)?;
    assert!(text.contains("sysrq triggered crash"), "{text}");
    fs::remove_file(log)?;

    let vm = small().name("panic-expected").boot()?;
    let _process = vm.spawn_sh("sleep 1; echo c > /proc/sysrq-trigger")?;
    assert!(vm.wait_panic(second(30))?.contains("sysrq triggered crash"));
    assert!(vm.wait_panic(second(1)).is_ok());
    drop(vm);

    // A guest that ends by itself neither panicked nor was shut down.
    let vm = small().name("power-off").boot()?;
    let error = vm.sh("echo o > /proc/sysrq-trigger; sleep 30").unwrap_err();
    assert!(matches!(error, Error::Died { .. }), "{error}");
    let log = vm.log_path().to_owned();
    drop(vm);
    fs::remove_file(log)?;

    // The agent stands still: the host gives up, but not before it has the stacks.
    let vm = small().name("frozen").grace(second(5)).boot()?;
    let freeze =
        "cd /sys/fs/cgroup && mkdir f && echo 1 > f/cgroup.procs && echo 1 > f/cgroup.freeze";
    let error = vm.sh_timeout(freeze, second(1)).unwrap_err();
    assert!(error.is_no_answer(), "{error}");
    assert!(
        vm.console_contains("task:init") && vm.console_contains("Mem-Info"),
        "{error}"
    );
    let log = vm.log_path().to_owned();
    drop(vm);
    fs::remove_file(log)?;

    let missing = small()
        .module("no_such_module")
        .boot()
        .err()
        .map(|error| format!("{error:#}"));
    assert!(missing.is_some_and(|message| message.contains("no_such_module")));
    Ok(())
}

#[test]
fn trixie_backports() {
    exercise("trixie-backports").unwrap();
}

#[test]
fn trixie() {
    exercise("trixie").unwrap();
}

#[test]
fn ends_are_told_apart() {
    bad_ends("trixie-backports").unwrap();
}
