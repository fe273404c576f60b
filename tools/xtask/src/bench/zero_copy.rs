//! `cargo xtask bench --zero-copy`: one server's two ways to a region of the kernel module, side by side.

use anyhow::{Context, Result};
use vmrig::{Device, Kernel, Vm, VmBuilder, workspace};

use super::{Arguments, DEVICE_MIB, measure, must, report};

/// Name, and what it is added with. The first one is what the others are compared with.
const DEVICES: [(&str, &str); 3] = [
    ("copy", "--checksum=off"),
    ("copy, checksums", "--checksum=on"),
    ("zero copy", "--zero-copy"),
];

/// Boots the machine: one BAR for each device, and the module.
pub fn boot(builder: VmBuilder, kernel: &Kernel) -> Result<Vm> {
    let module = workspace::kmod_dir(&kernel.release)?.join("ublk_vram.ko");
    let module = std::fs::read(&module)
        .with_context(|| format!("{}: `cargo xtask kmod build` first", module.display()))?;
    let files = tempfile::tempdir()?;
    let builder = DEVICES
        .iter()
        .zip(0..)
        .fold(builder, |builder, (_, index)| {
            builder.device(Device::Ivshmem {
                size_mib: 2 * DEVICE_MIB,
                file: files.path().join(format!("bar{index}")),
            })
        });
    let vm = builder.file("/root/ublk_vram.ko", 0o644, module).boot()?;
    must(&vm, "insmod /root/ublk_vram.ko")?;
    Ok(vm)
}

/// Adds the devices, measures each job on each, and makes a table.
pub fn table(vm: &Vm, arguments: &Arguments) -> Result<String> {
    let mut devices = Vec::new();
    for ((name, options), index) in DEVICES.iter().zip(0..) {
        let gpu = vm.pci_address(index);
        let add = format!("vramctl add d{index} --gpu {gpu} --size {DEVICE_MIB}M {options}");
        let path = must(vm, &add)?;
        must(
            vm,
            &format!("dd if=/dev/urandom of={path} bs=1M count={DEVICE_MIB} oflag=direct 2>&1"),
        )?;
        devices.push((*name, path));
    }
    let rows = measure(vm, &devices, &["d0", "d1", "d2"], arguments.seconds)?;
    Ok(report::table(&DEVICES.map(|(name, _)| name), &rows))
}
