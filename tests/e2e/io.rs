//! Data through the disk: fio with verification, a filesystem, discards under load.

use anyhow::{Result, ensure};
use serde_json::Value;
use vmrig::{Device, Kernel};

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("io::fio_verify", On::Every, fio_verify),
    ("io::filesystem", On::Newest, filesystem),
    ("io::discard_under_load", On::Newest, discard_under_load),
    ("io::host_backend", On::Newest, host_backend),
    ("io::conformance", On::Newest, conformance),
    ("io::vulkan", On::Newest, vulkan),
];

/// fio with its data checked: what was written is read back, by offset and checksum.
fn fio(path: &str, name: &str, options: &str) -> String {
    format!(
        "fio --name={name} --filename={path} --direct=1 --ioengine=io_uring --verify=crc32c \
         --verify_fatal=1 --verify_dump=0 --randrepeat=0 --output-format=terse --thread {options}"
    )
}

fn fio_verify(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "fio", 256, |vm| vm.memory(768).tools(&["fio"]))?;
    let path = guest.add("d", &format!("{} --size max --io-memory 8M", guest.gpu(0)))?;
    for (name, options) in [
        (
            "sequential-1m",
            "--rw=write --bs=1M --iodepth=32 --size=128M",
        ),
        (
            "random-4k",
            "--rw=randwrite --bs=4k --iodepth=32 --size=24M",
        ),
        (
            "mixed",
            "--rw=randrw --bsrange=4k-1M --bs_unaligned=0 --blockalign=4k --iodepth=32 --size=96M",
        ),
        (
            "jobs",
            "--rw=randwrite --bs=16k --iodepth=32 --numjobs=4 --size=24M --offset_increment=48M",
        ),
    ] {
        guest.must_within(&fio(&path, name, options), 200)?;
    }
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

/// A device on Vulkan in software: mapped chunks, chunks that only the engines reach, and a planner.
fn vulkan(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "vulkan", 64, |vm| {
        crate::vulkan::lavapipe(vm.memory(2048).tools(&["fio"]))
    })?;
    let gpus: Value = serde_json::from_str(&guest.must_within("vramctl gpus --json", 60)?)?;
    ensure!(gpus["vulkan"][0]["kind"] == "cpu", "{gpus}");
    let options = "--backend vulkan --gpu 0 --size 96M --chunk 16M --gpu-mapped 48M --io-memory 4M \
                   --queues 2 --depth 16 --allow-unsafe";
    guest.refused(
        &format!("vramctl add v {options}"),
        1,
        &["--allow-cpu-device"],
    )?;
    let path = guest.add("v", &format!("{options} --allow-cpu-device"))?;
    for (name, options) in [
        ("random-4k", "--rw=randwrite --bs=4k --iodepth=16 --size=8M"),
        (
            "everywhere",
            "--rw=randrw --bsrange=4k-128k --bs_unaligned=0 --blockalign=4k --iodepth=16 --size=90M \
             --io_size=24M",
        ),
    ] {
        guest.must_within(&fio(&path, name, options), 200)?;
    }
    let shown = guest.show("v")?;
    let costs = shown["carried"]["costs"].as_array();
    let carried = |path: &str| -> u64 {
        let costs = costs.into_iter().flatten();
        let of_path = costs.filter(|cost| cost["path"] == path);
        of_path.filter_map(|cost| cost["copies"].as_u64()).sum()
    };
    ensure!(carried("bar-store") > 0, "{shown}");
    ensure!(carried("dma") + carried("gather") > 0, "{shown}");
    // Its memory outlives its worker: another one maps the descriptors that the supervisor holds, and
    // that a supervisor after it was handed.
    ensure!(shown["mortal"].is_null(), "{shown}");
    guest.fill(&path, 80)?;
    for takeovers in 1..=2 {
        let [supervisor, worker, _] = guest.wait_whole("v")?;
        guest.must(&format!("kill -9 {worker}"))?;
        guest.must_within(
            &format!(
                "dd if={path} of=/tmp/back bs=1M count=80 iflag=direct 2>/dev/null \
                 && cmp /tmp/data /tmp/back"
            ),
            60,
        )?;
        let shown = guest.show("v")?;
        ensure!(shown["server"]["takeovers"] == takeovers, "{shown}");
        let [_, worker, _] = guest.wait_whole("v")?;
        guest.must(&format!("kill -9 {supervisor}"))?;
        guest.must_within(
            &format!(
                "until vramctl show v | grep -q 'supervisor [1-9].*worker {worker},'; \
                 do sleep 0.1; done"
            ),
            60,
        )?;
    }
    let text = guest.must("vramctl show v")?;
    ensure!(
        text.contains("bar-store") && text.contains("EXPECTED-US"),
        "{text}"
    );
    guest.must("vramctl remove v")?;
    guest.nothing_left()?;
    guest.end()
}

fn filesystem(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "filesystem", 128, |vm| {
        vm.module("ext4")
            .tools(&["mkfs.ext4", "e2fsck", "mount", "umount"])
    })?;
    let path = guest.add(
        "fs",
        &format!("{} --size max --io-memory 4M --allow-unsafe", guest.gpu(0)),
    )?;
    guest.must_within(
        &format!("mkfs.ext4 -q {path} && mkdir -p /mnt && mount {path} /mnt"),
        120,
    )?;
    guest.must_within(
        "for i in 1 2 3 4 5 6 7 8; do mkdir /mnt/$i; \
         dd if=/dev/urandom of=/mnt/$i/data bs=1M count=6 2>/dev/null; done; \
         cd /mnt && find . -name data | sort | xargs sha256sum > /tmp/sums && rm -r /mnt/8 && sync",
        120,
    )?;
    guest.must(&format!("cd /; umount /mnt && e2fsck -fn {path}"))?;
    guest.must(&format!(
        "mount -o ro {path} /mnt && cd /mnt && grep -v /8/ /tmp/sums | sha256sum -c -"
    ))?;
    guest.must("cd /; umount /mnt; vramctl remove fs")?;
    guest.nothing_left()?;
    guest.end()
}

fn discard_under_load(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "discard", 256, |vm| {
        vm.memory(768).tools(&["fio", "blkdiscard", "cmp"])
    })?;
    let path = guest.add(
        "d",
        &format!("{} --size max --io-memory 8M --queues 1", guest.gpu(0)),
    )?;
    guest.must(&format!(
        "dd if=/dev/urandom of={path} bs=1M count=64 oflag=direct 2>/dev/null"
    ))?;
    let reads = format!(
        "fio --name=r --filename={path} --direct=1 --ioengine=io_uring --rw=randread --bs=4k --iodepth=8 \
         --thread --time_based --runtime=8 --output-format=terse --terse-version=3"
    );
    let reader = guest.spawn_sh(&reads)?;
    guest.must("sleep 2")?;
    guest.must_within(&format!("blkdiscard -z {path} && blkdiscard {path}"), 60)?;
    guest.must(
        "mkswap -q /dev/ublkb0 2>/dev/null; vramctl swap on d --discard && vramctl swap off d",
    )?;
    let terse = reader
        .wait(std::time::Duration::from_secs(60))?
        .ok()?
        .stdout;
    // Terse version 3, field 5: the error.
    ensure!(
        terse.split(';').nth(4) == Some("0"),
        "fio saw an error: {terse}"
    );
    guest.must(&format!("blkdiscard {path}"))?;
    guest.must_within(
        &format!("cmp -n $(cat /sys/block/ublkb0/size | awk '{{print $1*512}}') {path} /dev/zero"),
        60,
    )?;
    let zeroed = guest.show("d")?["queue"][0]["zero_bytes"].as_u64();
    let size = guest.show("d")?["size"].as_u64();
    ensure!(
        zeroed >= size.map(|size| size * 3),
        "{zeroed:?} bytes were zeroed"
    );
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

/// The same disk without any PCI device: system memory.
fn host_backend(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "host-backend", 64, |vm| {
        vm.memory(1024).tools(&["fio"])
    })?;
    let path = guest.add("h", "--backend host --size 200M --io-memory 8M")?;
    guest.must_within(
        &fio(
            &path,
            "host",
            "--rw=randrw --bs=16k --iodepth=32 --size=64M",
        ),
        200,
    )?;
    guest.server_is_protected("h")?;
    guest.must("vramctl remove h")?;
    guest.nothing_left()?;
    guest.end()
}

/// The one suite that every backend passes, on real BARs and on system memory.
fn conformance(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "conformance", 64, |vm| {
        vm.memory(768).device(Device::Qxl { vram_mib: 128 })
    })?;
    let pci = |index| {
        format!(
            r#"{{"kind":"pci","address":"{}"}}"#,
            guest.pci_address(index)
        )
    };
    for (backend, size) in [
        (pci(0), r#""max""#),
        (pci(1), r#""max""#),
        (r#"{"kind":"host"}"#.to_owned(), r#"{"bytes":67108864}"#),
    ] {
        let spec = format!(r#"{{"name":"c","size":{size},"backend":{backend},"chunk":16777216}}"#);
        let report = guest.must_within(&format!("echo '{spec}' | ublk-vram conformance"), 120)?;
        ensure!(report.lines().count() > 10, "{report}");
    }
    guest.nothing_left()?;
    guest.end()
}
