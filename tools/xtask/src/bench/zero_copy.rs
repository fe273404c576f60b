//! `cargo xtask bench --zero-copy`: one server's two ways to a region of the kernel module, side by side.

use anyhow::{Context, Result};
use vmrig::{Device, Kernel, Vm, VmBuilder, workspace};

use super::{Arguments, DEVICE_MIB, Row, measure, must, report};

/// Name, and what it is added with. The first one is what the others are compared with.
const DEVICES: [(&str, &str); 4] = [
    ("copy", "--checksum=off"),
    // Requests as large as those of zero copy.
    (
        "copy, 128M of buffers",
        "--checksum=off --io-memory 128M --allow-unsafe",
    ),
    ("copy, checksums", "--checksum=on"),
    ("zero copy", "--zero-copy"),
];
/// So often each job is measured; the median counts.
const PASSES: usize = 3;

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
    let names = ["d0", "d1", "d2", "d3"];
    let mut passes = Vec::new();
    for _ in 0..PASSES {
        passes.push(measure(vm, &devices, &names, arguments.seconds)?);
    }
    Ok(report::table(
        &DEVICES.map(|(name, _)| name),
        &medians(passes),
    ))
}

/// The median of each figure over all passes.
fn medians(passes: Vec<Vec<Row>>) -> Vec<Row> {
    let median = |row: usize, column: usize| {
        let figures = passes.iter().filter_map(|rows| rows.get(row));
        let mut figures: Vec<f64> = figures
            .filter_map(|row| row.figures.get(column).copied())
            .collect();
        figures.sort_by(f64::total_cmp);
        figures.get(figures.len() / 2).copied().unwrap_or_default()
    };
    let first = passes.first().into_iter().flatten().enumerate();
    first
        .map(|(index, row)| Row {
            name: row.name,
            unit: row.unit,
            figures: (0..row.figures.len())
                .map(|column| median(index, column))
                .collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::fio::Unit;

    #[test]
    fn one_pass_that_was_disturbed_does_not_count() {
        let pass = |first: f64, second: f64| {
            vec![Row {
                name: "reads",
                unit: Unit::Iops,
                figures: vec![first, second],
            }]
        };
        let rows = medians(vec![pass(5.0, 70.0), pass(6.0, 1.0), pass(90.0, 60.0)]);
        assert_eq!(rows[0].figures, [6.0, 60.0]);
    }
}
