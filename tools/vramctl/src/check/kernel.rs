//! What the kernel offers: its release, the ublk driver, io_uring, lockdown.

use std::process::{Command, Stdio};

use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use ublk_vram::safety::kernel_warning;
use ublk_vram::{ErrorKind, ublk};

use super::{Item, Machine};

const NODE: &str = "/dev/ublk-control";

pub(super) fn items(machine: &Machine) -> Vec<Item> {
    let mut items = vec![release(&machine.release), driver(machine)];
    if machine.root.path(NODE).exists() {
        items.push(node(machine));
        items.push(features());
    }
    items.push(io_uring(machine, io_uring_probe()));
    items.push(lockdown(machine));
    items
}

pub(super) fn release(release: &str) -> Item {
    match kernel_warning(release) {
        None => Item::ok("kernel", release),
        Some(warning) => Item::warn(
            "kernel",
            warning,
            "try `vramctl add test --size 256M --backend host`, and remove it, before you rely on it",
        ),
    }
}

/// Whether the driver is there, could be loaded, or was never built.
pub(super) fn driver(machine: &Machine) -> Item {
    const ITEM: &str = "ublk driver";
    let root = &machine.root;
    if root.path("/sys/module/ublk_drv").exists() || root.path(NODE).exists() {
        return Item::ok(ITEM, "loaded");
    }
    if can_load("ublk_drv") {
        return Item::fail(ITEM, "not loaded", "run `modprobe ublk_drv`");
    }
    let release = &machine.release;
    let (detail, todo) = match config(machine, "CONFIG_BLK_DEV_UBLK") {
        Some(value) if value == "m" => (
            format!("built as a module, which is not installed for kernel {release}"),
            "install the rest of the kernel's modules (Ubuntu: linux-modules-extra, Fedora: \
             kernel-modules-extra), or restart into the kernel that is installed",
        ),
        Some(value) if value == "y" => (
            "built into the kernel, but there is no /dev/ublk-control".to_owned(),
            "look at `dmesg | grep ublk`; in a container, the node must be let in",
        ),
        Some(_) => (
            "this kernel was built without it (CONFIG_BLK_DEV_UBLK is not set)".to_owned(),
            "use a kernel with CONFIG_BLK_DEV_UBLK=m, as most distributions have",
        ),
        None => (
            format!(
                "no module ublk_drv for kernel {release}, and its configuration is not readable"
            ),
            "install the kernel's extra modules, or use a kernel with CONFIG_BLK_DEV_UBLK",
        ),
    };
    Item::fail(ITEM, detail, todo)
}

/// Asks modprobe what it would do; nothing is loaded.
fn can_load(module: &str) -> bool {
    ["/usr/sbin/modprobe", "/sbin/modprobe", "/usr/bin/modprobe"]
        .iter()
        .any(|program| {
            Command::new(program)
                .args(["-n", "-q", module])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success())
        })
}

/// The value of a kernel option: `y`, `m`, `n`; `None` if the configuration cannot be read.
pub(super) fn config(machine: &Machine, option: &str) -> Option<String> {
    let release = &machine.release;
    let text = [
        format!("/boot/config-{release}"),
        format!("/lib/modules/{release}/config"),
    ]
    .iter()
    .find_map(|path| machine.root.read_text(path).ok())
    .or_else(|| {
        let packed = machine.root.path("/proc/config.gz");
        let output = Command::new("gzip")
            .args(["-dc", "--"])
            .arg(packed)
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output()
            .ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
    })?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(option)?.strip_prefix('='));
    Some(value.unwrap_or("n").to_owned())
}

fn node(machine: &Machine) -> Item {
    const ITEM: &str = "control node";
    match access(
        &machine.root.path(NODE),
        AccessFlags::R_OK | AccessFlags::W_OK,
    ) {
        Ok(()) => Item::ok(ITEM, NODE),
        Err(Errno::EACCES) if !machine.is_root => Item::unseen(ITEM, "only root may open it"),
        Err(errno) => Item::fail(
            ITEM,
            format!("{NODE}: {}", errno.desc()),
            "look at its mode and owner; in a container, at the device cgroup",
        ),
    }
}

fn features() -> Item {
    const ITEM: &str = "ublk features";
    match ublk::features::probe() {
        Ok(features) if features.bits.is_some() => {
            let names = features.names().join(" ");
            if features.has(ublk::features::PER_IO_DAEMON) {
                return Item::ok(ITEM, names);
            }
            Item::warn(
                ITEM,
                format!(
                    "{names}; with this driver, a worker that dies while the machine is short of \
                     memory may never be replaced"
                ),
                "for swap, take Linux 6.16 or later",
            )
        }
        Ok(_) => Item::warn(
            ITEM,
            "this driver cannot be asked (it is older than Linux 6.5)",
            "nothing: what is newer is not used",
        ),
        Err(error) if error.kind == ErrorKind::Permission => Item::unseen(ITEM, error.message),
        Err(error) => Item::fail(ITEM, error.message, "look at `dmesg | grep ublk`"),
    }
}

/// io_uring_setup(2) without parameters: EFAULT where it is allowed, since nothing was given.
fn io_uring_probe() -> Errno {
    // SAFETY: the kernel is given a null pointer for the parameters; it refuses it, or refuses
    // before it looks. Nothing of this process is read or written.
    let result = unsafe {
        libc::syscall(
            libc::SYS_io_uring_setup,
            1,
            std::ptr::null_mut::<libc::c_void>(),
        )
    };
    if result >= 0 {
        Errno::UnknownErrno
    } else {
        Errno::last()
    }
}

pub(super) fn io_uring(machine: &Machine, probe: Errno) -> Item {
    const ITEM: &str = "io_uring";
    let disabled = machine
        .root
        .read_text("/proc/sys/kernel/io_uring_disabled")
        .ok();
    match (probe, disabled.as_deref().map(str::trim)) {
        (Errno::ENOSYS, _) => Item::fail(
            ITEM,
            "this kernel has none (CONFIG_IO_URING), or a sandbox hides it",
            "use a kernel with CONFIG_IO_URING=y",
        ),
        (Errno::EPERM, Some("2")) => Item::fail(
            ITEM,
            "switched off for everybody (kernel.io_uring_disabled = 2)",
            "run `sysctl kernel.io_uring_disabled=1`, which lets root have it",
        ),
        (Errno::EPERM, Some("1")) if !machine.is_root => {
            Item::ok(ITEM, "for root only (kernel.io_uring_disabled = 1)")
        }
        (Errno::EPERM, _) => Item::fail(
            ITEM,
            "refused by a sandbox (seccomp) or security module",
            "run the server outside the container, or let it have io_uring",
        ),
        (_, Some("1")) => Item::ok(ITEM, "allowed (kernel.io_uring_disabled = 1: root only)"),
        _ => Item::ok(ITEM, "allowed"),
    }
}

pub(super) fn lockdown(machine: &Machine) -> Item {
    const ITEM: &str = "lockdown";
    let Ok(text) = machine.root.read_text("/sys/kernel/security/lockdown") else {
        return match machine
            .root
            .path("/sys/kernel/security")
            .read_dir()
            .map(|mut dir| dir.next())
        {
            // Mounted, and no such file: the kernel has no lockdown.
            Ok(Some(_)) => Item::ok(ITEM, "none"),
            _ if machine.is_root => Item::ok(ITEM, "not seen: securityfs is not mounted here"),
            _ => Item::unseen(ITEM, "/sys/kernel/security cannot be read"),
        };
    };
    let mode = text
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map(|(mode, _)| mode);
    match mode {
        Some("none") => Item::ok(ITEM, "none"),
        mode => Item::warn(
            ITEM,
            format!(
                "{}: PCI memory cannot be mapped (backend pci)",
                mode.unwrap_or(&text)
            ),
            "switch Secure Boot off, or use a backend that goes through a driver",
        ),
    }
}
