//! Devices come and go: often, together, and from sessions that end.

use std::time::Duration;

use anyhow::{Result, ensure};
use vmrig::{Device, Kernel};

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("lifecycle::again_and_again", On::Newest, again_and_again),
    ("lifecycle::two_at_once", On::Newest, two_at_once),
    ("lifecycle::one_name_one_bar", On::Newest, one_name_one_bar),
    ("lifecycle::the_session_ends", On::Newest, the_session_ends),
    ("lifecycle::secrets_do_not_outlive_it", On::Newest, secrets),
    ("lifecycle::what_is_shown", On::Newest, what_is_shown),
];

const OPTIONS: &str = "--size max --io-memory 4M --allow-unsafe";

fn again_and_again(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "again", 16, |vm| vm)?;
    let gpu = guest.gpu(0);
    guest.must_within(
        &format!(
            "i=0; while [ $i -lt 25 ]; do \
             vramctl add d {gpu} {OPTIONS} >/dev/null && vramctl remove d || exit 1; i=$((i+1)); done"
        ),
        300,
    )?;
    guest.nothing_left()?;
    guest.end()
}

fn two_at_once(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "two", 64, |vm| {
        vm.memory(768)
            .device(Device::Qxl { vram_mib: 128 })
            .tools(&["fio"])
    })?;
    let one = guest.add("one", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    let two = guest.add("two", &format!("{} {OPTIONS}", guest.gpu(1)))?;
    ensure!(one != two, "{one} twice");
    let fio = |path: &str, seed: u32| {
        format!(
            "fio --name=x --filename={path} --direct=1 --ioengine=io_uring --iodepth=16 --rw=randwrite --bs=8k \
             --size=32M --verify=crc32c --verify_fatal=1 --randseed={seed} --thread --output-format=terse"
        )
    };
    let first = guest.spawn_sh(&fio(&one, 1))?;
    let second = guest.spawn_sh(&fio(&two, 2))?;
    first.wait(Duration::from_secs(120))?.ok()?;
    second.wait(Duration::from_secs(120))?.ok()?;
    let list = guest.must("vramctl list --noheadings")?;
    ensure!(list.lines().count() == 2, "{list}");
    guest.must("vramctl remove one && vramctl show two >/dev/null && vramctl remove two")?;
    guest.nothing_left()?;
    guest.end()
}

fn one_name_one_bar(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "one-name", 64, |vm| {
        vm.device(Device::Qxl { vram_mib: 128 })
    })?;
    // Two adds of one name at the same time: one wins, the other says why not.
    let (a, b) = (guest.gpu(0), guest.gpu(1));
    let first = guest.spawn_sh(&format!("vramctl add same {a} {OPTIONS}"))?;
    let second = guest.spawn_sh(&format!("vramctl add same {b} {OPTIONS}"))?;
    let outs = [
        first.wait(Duration::from_secs(60))?,
        second.wait(Duration::from_secs(60))?,
    ];
    ensure!(
        outs.iter().filter(|out| out.success()).count() == 1,
        "{outs:?}"
    );
    ensure!(
        outs.iter()
            .any(|out| out.rc == 1 && out.stderr.contains("exists already")),
        "{outs:?}"
    );
    guest.must("vramctl remove same")?;
    guest.nothing_left()?;

    guest.add("d", &format!("{a} {OPTIONS}"))?;
    guest.refused(
        &format!("vramctl add d {b} {OPTIONS}"),
        1,
        &["exists already"],
    )?;
    guest.refused(
        &format!("vramctl add e {a} {OPTIONS}"),
        1,
        &[&guest.pci_address(0)],
    )?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    // What was refused left nothing that stands in the way.
    guest.add("e", &format!("{a} {OPTIONS}"))?;
    guest.must("vramctl remove e")?;
    guest.nothing_left()?;
    guest.end()
}

fn the_session_ends(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "session", 64, |vm| vm.tools(&["dd"]))?;
    let gpu = guest.gpu(0);
    let path = guest.must_within(
        &format!("vramtest session vramctl add d {gpu} {OPTIONS}"),
        60,
    )?;
    guest.must(&format!(
        "dd if=/dev/urandom of={path} bs=1M count=4 oflag=direct 2>/dev/null"
    ))?;
    let pid = guest.show("d")?["pid"].clone();
    let group = guest.must(&format!("cat /proc/{pid}/cgroup"))?;
    ensure!(group.ends_with("/ublk-vram/d"), "{group}");
    ensure!(
        guest.must("cat /sys/fs/cgroup/ublk-vram/d/memory.swap.max")? == "0",
        "swap.max"
    );
    ensure!(
        guest.must(&format!("readlink /proc/{pid}/cwd"))? == "/",
        "cwd"
    );
    ensure!(
        guest.must(&format!("readlink /proc/{pid}/fd/0"))? == "/dev/null",
        "stdin"
    );
    guest.server_is_protected("d")?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

fn secrets(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "secrets", 16, |vm| vm.tools(&["dd"]))?;
    let gpu = guest.gpu(0);
    // What an earlier owner of the memory left there.
    guest.overwrite_bar(0, &vec![0x5a; 16 << 20])?;
    let path = guest.add("d", &format!("{gpu} {OPTIONS}"))?;
    let left = guest.must(&format!(
        "dd if={path} bs=1M 2>/dev/null | tr -d '\\000' | wc -c"
    ))?;
    ensure!(left == "0", "{left} bytes of the last owner can be read");
    guest.must(&format!(
        "yes secret | dd of={path} bs=1M count=8 iflag=fullblock oflag=direct 2>/dev/null"
    ))?;
    let bytes = std::fs::read(&guest.bar_file)?;
    ensure!(
        bytes.windows(6).any(|window| window == b"secret"),
        "the data is not in the BAR"
    );
    guest.must("vramctl remove d")?;
    let bytes = std::fs::read(&guest.bar_file)?;
    ensure!(
        bytes.iter().all(|&byte| byte == 0),
        "something outlived the device"
    );
    guest.nothing_left()?;
    guest.end()
}

fn what_is_shown(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "shown", 64, |vm| {
        vm.device(Device::Qxl { vram_mib: 128 })
    })?;
    ensure!(
        guest.must("vramctl list --noheadings")?.is_empty(),
        "an empty list"
    );
    guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    let show = guest.show("d")?;
    for key in [
        "name", "device", "state", "size", "backend", "gpu", "uuid", "queue", "memory", "features",
        "pid",
    ] {
        ensure!(!show[key].is_null(), "{key} is missing: {show}");
    }
    ensure!(
        show["state"] == "live" && show["backend"] == "pci",
        "{show}"
    );
    ensure!(show["gpu"] == guest.pci_address(0).as_str(), "{show}");
    // As anybody: names and sizes without the counters.
    let list = guest.must(
        "setpriv --reuid 1000 --clear-groups vramctl list --noheadings 2>/dev/null || \
                           su -s /bin/sh nobody -c 'vramctl list --noheadings'",
    )?;
    ensure!(list.contains("d") && list.contains("/dev/ublkb0"), "{list}");
    let gpus = guest.must("vramctl gpus --json")?;
    ensure!(
        gpus.contains(&guest.pci_address(0)) && gpus.contains(&guest.pci_address(1)),
        "{gpus}"
    );
    guest.must("vramctl check")?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}
