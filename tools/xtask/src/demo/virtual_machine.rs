//! The story in a virtual machine, with proof from outside of it.

use std::{collections::HashMap, fs, path::Path, process::ExitCode, time::Duration};

use anyhow::{Context, Result, bail, ensure};
use vmrig::{Device, KernelSpec, Vm, VmBuilder, workspace};

use super::{
    machine::Machine,
    story::{MIB, Pressure, Story, grouped, mib, number_of, tell},
};
use crate::{deps, hog};

const MEMORY_MIB: u64 = 384;
const BAR_MIB: u64 = 512;
const HOG_MIB: u64 = 450;
const ROUNDS: u32 = 2;
const PAGE: usize = 4096;
const WORDS: usize = PAGE / 8;
/// The longest a step may take under emulation on a busy host.
const LIMIT: Duration = Duration::from_secs(400);

/// Boots, swaps, and looks into the file that is the GPU's memory.
///
/// # Errors
/// When a step fails or a byte is wrong.
pub fn run(suite: &str) -> Result<ExitCode> {
    deps::ensure_build_tools()?;
    deps::ensure_programs(&[&deps::BOOT, &deps::SWAP])?;
    let programs = [
        workspace::program("ublk-vram", "ublk-vram")?,
        workspace::program("vramctl", "vramctl")?,
        std::env::current_exe().context("cannot tell where this program is")?,
    ];
    let kernel = KernelSpec::Suite(suite.to_owned()).resolve()?;
    let files = tempfile::tempdir()?;
    let bar = files.path().join("bar");
    let mut builder = VmBuilder::new(&kernel)
        .name("xtask-demo")
        .memory(MEMORY_MIB)
        .device(Device::Ivshmem {
            size_mib: BAR_MIB,
            file: bar.clone(),
        })
        .module("ublk_drv")
        .tools(&deps::SWAP.map(|(program, _)| program));
    for program in programs {
        builder = builder.program(program);
    }
    let vm = builder.boot()?;
    tell_machine(&vm)?;
    let story = Story {
        machine: &vm,
        name: "swap0",
        vramctl: "vramctl".into(),
    };
    let options = format!("--gpu {} --size max", vm.pci_address(0));
    story.tell_device(&story.add(&options, LIMIT)?)?;
    story.swap_on(100)?;
    let memory = vm.must("cat /proc/meminfo", LIMIT)?.stdout;
    let available = number_of(&memory, "MemAvailable").context("no MemAvailable")? << 10;
    story.press(
        &Pressure {
            prelude: String::new(),
            xtask: "xtask".into(),
            mib: HOG_MIB,
            rounds: ROUNDS,
            ram: format!("{} of RAM available", mib(available / MIB * MIB)),
        },
        LIMIT,
    )?;
    let found = pages_of_the_program(&bar)?;
    ensure!(
        found > 1000,
        "the BAR's file holds only {found} pages of the program"
    );
    tell(
        "proof",
        &format!(
            "on this host, the file behind the BAR holds {} pages of the program",
            grouped(found)
        ),
    );
    story.remove(LIMIT)?;
    let left = fs::read(&bar)?.iter().filter(|byte| **byte != 0).count();
    ensure!(left == 0, "{left} bytes outlived the device");
    tell(
        "proof",
        &format!("all {} of the file are zero", mib(BAR_MIB * MIB)),
    );
    let mut complaints = vm.kernel_complaints();
    // Under such pressure the kernel may say, with a trace, that an allocation has to wait.
    complaints.retain(|line| !line.contains("Call Trace:"));
    if !complaints.is_empty() {
        bail!("the kernel complained: {}", complaints.join("; "));
    }
    vm.shutdown()?;
    Ok(ExitCode::SUCCESS)
}

fn tell_machine(vm: &Vm) -> Result<()> {
    tell(
        "machine",
        &format!(
            "Linux {} in QEMU, 2 CPUs (emulated), {MEMORY_MIB} MiB of RAM, up in {:.1} s",
            vm.release(),
            vm.boot_time().as_secs_f64()
        ),
    );
    let address = vm.pci_address(0);
    let dir = format!("/sys/bus/pci/devices/{address}");
    let script = format!(
        "cat {dir}/class {dir}/vendor {dir}/device; ls -d {dir}/driver 2>/dev/null; stat -c %s {dir}/resource2"
    );
    let out = vm.must(&script, LIMIT)?.stdout;
    let [class, vendor, device, size] = *out.lines().collect::<Vec<_>>() else {
        bail!("{address} is not what it should be (it must have no driver): {out}");
    };
    let size: u64 = size.trim().parse().context("size of the BAR")?;
    tell(
        "gpu",
        &format!(
            "{address}, a stand-in ({}:{}, class {}), no driver, BAR 2 of {}",
            vendor.trim_start_matches("0x"),
            device.trim_start_matches("0x"),
            class.trim_start_matches("0x"),
            mib(size)
        ),
    );
    Ok(())
}

/// How many pages of the file are, in every byte, pages that the program wrote in any round.
///
/// A page that was swapped out while the program wrote it is not counted.
fn pages_of_the_program(file: &Path) -> Result<u64> {
    let starts: HashMap<u64, (u32, usize)> = (1..=ROUNDS)
        .flat_map(|round| (0..HOG_MIB as usize * 256).map(move |page| (round, page)))
        .map(|(round, page)| (hog::word(round, page, 0), (round, page)))
        .collect();
    let bytes = fs::read(file)?;
    let pages = bytes.chunks_exact(PAGE);
    Ok(pages
        .filter(|page| is_of_the_program(page, &starts))
        .count() as u64)
}

/// The program's own pages begin at a page of memory, or 16 bytes into it, behind the allocator's
/// note on the block.
fn is_of_the_program(page: &[u8], starts: &HashMap<u64, (u32, usize)>) -> bool {
    let at = |index: usize| {
        let word = page.get(index * 8..).and_then(|rest| rest.first_chunk());
        word.map(|word| u64::from_le_bytes(*word))
    };
    [0, 2].into_iter().any(|shift| {
        let Some((round, number)) = at(shift).and_then(|first| starts.get(&first)) else {
            return false;
        };
        // Before the first word of all is the allocator's note.
        let first = if *number == 0 { shift } else { 0 };
        (first..WORDS).all(|index| {
            let place = number * WORDS + index - shift;
            at(index) == Some(hog::word(*round, place / WORDS, place % WORDS))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_of_the_program_is_known_by_all_of_it() {
        // `512 - shift` words of a page, after the last of the page before.
        let page = |round, number: usize, shift| -> Vec<u8> {
            (0..WORDS)
                .map(|index| number * WORDS + index - shift)
                .flat_map(|place| hog::word(round, place / WORDS, place % WORDS).to_le_bytes())
                .collect()
        };
        let mut torn = page(2, 7, 0);
        torn[4095] ^= 1;
        let bytes = [page(1, 3, 0), vec![0; PAGE], page(2, 9, 2), torn].concat();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("bar");
        fs::write(&file, bytes).unwrap();
        assert_eq!(pages_of_the_program(&file).unwrap(), 2);
    }
}
