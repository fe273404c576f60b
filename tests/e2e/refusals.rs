//! What cannot be done is refused with one sentence and the right exit code, and leaves nothing.

use anyhow::Result;
use vmrig::{Device, Kernel};

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("refusals::bad_input", On::Newest, bad_input),
    ("refusals::pci_functions", On::Newest, pci_functions),
    ("refusals::no_ublk_driver", On::Newest, no_ublk_driver),
    ("refusals::no_root", On::Newest, no_root),
];

fn bad_input(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "bad-input", 64, |vm| vm)?;
    let gpu = guest.gpu(0);
    for size in ["2Q", "''", "0", "1e400", "5000", "16E"] {
        guest.refused(&format!("vramctl add d {gpu} --size {size}"), 2, &["size"])?;
    }
    for name in ["a/b", "..", "'a b'", "x123456789012345678901234567890123"] {
        guest.refused(
            &format!("vramctl add {name} {gpu} --size 32M"),
            2,
            &["name"],
        )?;
    }
    guest.refused(
        &format!("vramctl add d {gpu} --size 65M"),
        1,
        &["does not fit", "64"],
    )?;
    guest.refused(
        &format!("vramctl add d {gpu} --size 32M --depth 5000"),
        2,
        &["depth"],
    )?;
    guest.refused(
        &format!("vramctl add d {gpu} --size 32M --queues 64"),
        2,
        &["queues"],
    )?;
    guest.refused(
        &format!("vramctl add d {gpu} --size 32M --chunk 3M"),
        2,
        &["chunk"],
    )?;
    guest.refused(
        &format!("vramctl add d {gpu} --size 32M --io-memory 4k"),
        2,
        &["I/O memory"],
    )?;
    guest.refused(
        &format!("vramctl add d {gpu} --size 16M"),
        1,
        &["locked", "--allow-unsafe"],
    )?;
    guest.refused("vramctl remove nope", 3, &["nope"])?;
    guest.refused("vramctl show nope", 3, &["nope"])?;
    guest.refused("vramctl swap on nope", 3, &["nope"])?;
    guest.nothing_left()?;
    guest.end()
}

fn pci_functions(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "pci-functions", 1, |vm| {
        vm.device(Device::Vga { vram_mib: 64 })
            .device(Device::Qxl { vram_mib: 128 })
            .module("uio_pci_generic")
    })?;
    // A driver owns the function; once it lets go, the function can be used.
    let qxl = guest.pci_address(2);
    let driver = "/sys/bus/pci/drivers/uio_pci_generic";
    guest.must(&format!(
        "echo uio_pci_generic > /sys/bus/pci/devices/{qxl}/driver_override; echo {qxl} > {driver}/bind"
    ))?;
    let add = format!("vramctl add d --gpu {qxl} --size 100M --io-memory 1M");
    guest.refused(&add, 1, &["uio_pci_generic", "unbind"])?;
    guest.must(&format!(
        "echo {qxl} > {driver}/unbind; echo > /sys/bus/pci/devices/{qxl}/driver_override"
    ))?;
    guest.must(&format!("{add} && vramctl remove d"))?;
    guest.refused(
        "vramctl add d --gpu 0000:1f:1f.0 --size 32M",
        3,
        &["0000:1f:1f.0"],
    )?;
    guest.refused("vramctl add d --gpu nonsense --size 32M", 2, &["nonsense"])?;
    // A BAR of 1 MiB: too small for the device.
    guest.refused(
        &format!("vramctl add d {} --size 32M", guest.gpu(0)),
        1,
        &["does not fit"],
    )?;
    // The host bridge is no display or memory controller.
    guest.refused(
        "vramctl add d --gpu 00:00.0 --size 32M",
        1,
        &["0000:00:00.0"],
    )?;
    guest.nothing_left()?;
    guest.end()
}

fn no_ublk_driver(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "no-driver", 64, |vm| vm)?;
    guest.must("rmmod ublk_drv")?;
    let add = format!(
        "vramctl add d {} --size max --io-memory 1M --allow-unsafe",
        guest.gpu(0)
    );
    guest.refused(&add, 1, &["modprobe ublk_drv"])?;
    let check = guest.sh("vramctl check")?.expect_rc(1)?;
    anyhow::ensure!(check.stdout.contains("ublk_drv"), "{check}");
    guest.nothing_left()?;
    guest.end()
}

fn no_root(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "no-root", 64, |vm| vm.tools(&["setpriv"]))?;
    let add = format!("vramctl add d {} --size max --io-memory 1M", guest.gpu(0));
    guest.refused(
        &format!("setpriv --reuid 1000 --clear-groups {add}"),
        1,
        &["root"],
    )?;
    for command in ["list", "gpus", "check"] {
        let out = guest.sh(&format!(
            "setpriv --reuid 1000 --clear-groups vramctl {command}"
        ))?;
        anyhow::ensure!(out.rc <= 1 && !out.stderr.contains("panicked"), "{out}");
    }
    guest.nothing_left()?;
    guest.end()
}
