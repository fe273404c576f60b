//! Zero copy: the kernel copies between the pages of requests and the region, the server sees no bytes.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmrig::Kernel;

use super::Machine;
use crate::recovery::{kills_without_kernel_threads, without_kernel_threads_vm};

/// Chunks of 2 MiB: many requests cross from one into the next.
const OPTIONS: &str = "--size max --chunk 2M --zero-copy";
const CHUNK: usize = 2 << 20;
/// Bytes at the end of a chunk that the device does not have.
const HEADER: usize = 4096;

fn report(line: &str) -> Result<Value> {
    serde_json::from_str(line).with_context(|| format!("not a report: {line}"))
}

/// A counter, over all queues.
fn total(show: &Value, key: &str) -> u64 {
    let queues = show["queue"].as_array();
    let queues = queues.map(Vec::as_slice).unwrap_or_default();
    queues.iter().filter_map(|queue| queue[key].as_u64()).sum()
}

pub fn zero_copy(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-zero-copy", 128, |vm| {
        vm.memory(768).tools(&["fio", "dd", "cmp", "blkdiscard"])
    })?;
    let gpu = machine.gpu(0);
    refusals(&machine, &gpu)?;

    let path = machine.add("d", &format!("{gpu} {OPTIONS} --lab-fault"))?;
    let show = machine.show("d")?;
    let copy = show["copy"].as_str().unwrap_or_default();
    ensure!(copy.contains("kernel module, zero copy"), "{show}");
    ensure!(show["zero_copy"] == true, "{show}");
    ensure!(
        show["features"].to_string().contains("AUTO_BUF_REG"),
        "{show}"
    );
    ensure!(
        show["checksum"].is_null() && show["memory"]["arena"] == 0,
        "no checksums, no I/O buffers: {show}"
    );
    machine.server_is_protected("d")?;
    machine.refused("vramctl swap on d", 1, &["no safe swap", "--zero-copy"])?;
    bytes_are_in_their_place(&machine, &path)?;

    machine.fio_verify(&path, "--bsrange=4k-512k --size=96M", 300)?;
    let show = machine.show("d")?;
    ensure!(total(&show, "errors") == 0, "{show}");
    let (reads, canaries) = (total(&show, "reads"), total(&show, "canary_reads"));
    ensure!(
        0 < canaries && canaries <= reads,
        "a canary for each batch of reads: {show}"
    );
    // A queue's ring hands nothing to a worker of its own (the kernel names it after the thread).
    let worker = &show["server"]["worker"];
    for queue in show["queue"].as_array().context("no queues in show")? {
        machine.must(&format!(
            "! grep -qx iou-wrk-{} /proc/{worker}/task/*/comm",
            queue["tid"]
        ))?;
    }

    kills(&machine, &path)?;
    machine.must("vramctl remove d")?;
    machine.nothing_left()?;
    let bytes = std::fs::read(&machine.bar_file)?;
    ensure!(bytes.iter().all(|&byte| byte == 0), "not wiped");
    machine.end(false)
}

fn refusals(machine: &Machine, gpu: &str) -> Result<()> {
    let add = format!("vramctl add d {gpu} {OPTIONS}");
    for (more, rc, words) in [
        ("--checksum=on", 2, ["--checksum", "exclude each other"]),
        ("--io-memory 4M", 2, ["--io-memory", "no I/O buffers"]),
        ("--swap", 1, ["no safe swap", "leave out --zero-copy"]),
    ] {
        machine.refused(&format!("{add} {more}"), rc, &words)?;
    }
    machine.refused(
        "vramctl add d --backend host --size 32M --zero-copy",
        2,
        &["kernel module", "--backend pci"],
    )?;
    machine.must("rmmod ublk_vram")?;
    machine.refused(&add, 1, &["ublk_vram, which is not loaded", "modprobe"])?;
    machine.must("insmod /root/ublk_vram.ko")?;
    machine.nothing_left()
}

/// What is written lies in the BAR as without zero copy, and reads back; a discard zeroes it.
fn bytes_are_in_their_place(machine: &Machine, path: &str) -> Result<()> {
    let data: Vec<u8> = (0..6u32 << 20)
        .map(|at| (at.wrapping_mul(0x9e37_79b1) >> 13) as u8)
        .collect();
    machine.write_file("/tmp/data", 0o644, &data)?;
    machine.must(&format!(
        "dd if=/tmp/data of={path} bs=1M oflag=direct 2>/dev/null && \
         dd if={path} bs=384k count=16 iflag=direct 2>/dev/null | cmp - /tmp/data"
    ))?;
    let bar = std::fs::read(&machine.bar_file)?;
    let payload = CHUNK - HEADER;
    let chunks = bar.chunks(CHUNK).flat_map(|chunk| &chunk[..payload]);
    ensure!(chunks.take(data.len()).eq(&data), "not where it belongs");
    machine.must(&format!(
        "blkdiscard -o 1M -l 3M {path} && \
         dd if={path} bs=1M skip=1 count=3 iflag=direct 2>/dev/null | cmp -n 3145728 - /dev/zero"
    ))?;
    Ok(())
}

/// Workers die with registered buffers in hand: copies that wait, that are half done, and that are done.
fn kills(machine: &Machine, path: &str) -> Result<()> {
    let fio = machine.spawn_sh(&format!(
        "while [ ! -e /tmp/stop ]; do fio --name=x --filename={path} --direct=1 --ioengine=io_uring \
         --iodepth=16 --rw=randwrite --bsrange=8k-64k --size=24M --loops=3 --verify=crc32c --verify_fatal=1 \
         --thread --output-format=terse >/dev/null || exit 1; done"
    ))?;
    let killed = machine.must_within("vramtest kill-worker d --times 9 --hold --whole", 300)?;
    machine.wait_whole("d")?;
    machine.must_within("vramctl restart d", 90)?;
    // All processes: whatever waits is served by those that find the region again.
    machine.kill_all("d")?;
    machine.must_within("vramctl recover d", 90)?;
    machine.must("touch /tmp/stop")?;
    fio.wait(Duration::from_secs(120))?.ok()?;
    let killed = report(&killed)?;
    eprintln!("zero copy, kills under fio: {killed}");
    ensure!(
        killed["takeovers"] == 9 && killed["errors"] == 0,
        "{killed}"
    );
    ensure!(killed["reissued"].as_u64() > Some(0), "{killed}");
    machine.wait_whole("d")?;
    let show = machine.show("d")?;
    ensure!(show["zero_copy"] == true, "{show}");
    machine.server_is_protected("d")
}

/// The buffers of a dead worker's rings are its requests: they too are let go of without the kernel's help.
pub fn without_kernel_threads(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-zero-copy-no-kthreads", 128, |vm| {
        without_kernel_threads_vm(vm).memory(768)
    })?;
    let options = format!("{} {OPTIONS} --queues 4 --lab-fault", machine.gpu(0));
    let path = machine.add("d", &options)?;
    kills_without_kernel_threads(&machine, &path)?;
    machine.must("vramctl remove d")?;
    machine.nothing_left()?;
    machine.end(false)
}

/// The function is unplugged under I/O: every request ends with EIO, and nothing is read any more.
pub fn lost(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-zero-copy-lost", 64, |vm| {
        vm.memory(768).tools(&["fio", "dd"])
    })?;
    let path = machine.add("d", &format!("{} {OPTIONS} --allow-unsafe", machine.gpu(0)))?;
    let fio = machine.spawn_sh(&format!(
        "exec fio --name=x --filename={path} --direct=1 --ioengine=io_uring --iodepth=16 --rw=randrw \
         --bs=16k --size=24M --time_based --runtime=300 --thread --output-format=terse"
    ))?;
    machine.must("sleep 2")?;
    ensure!(fio.try_wait()?.is_none(), "fio ended by itself");
    let address = machine.pci_address(0);
    machine.must(&format!("echo 1 > /sys/bus/pci/devices/{address}/remove"))?;
    let out = fio.wait(Duration::from_secs(30))?;
    ensure!(!out.success(), "fio saw no error: {out}");
    machine.wait_state("d", "lost", 30)?;
    let out = machine.sh(&format!(
        "dd if={path} of=/dev/null bs=4k count=1 iflag=direct"
    ))?;
    ensure!(out.stderr.contains("Input/output error"), "{out}");
    machine.must_within("vramctl remove d", 60)?;
    machine.must("! ls /dev/ublkb* 2>/dev/null")?;
    machine.end(false)
}
