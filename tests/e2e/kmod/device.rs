//! Block devices whose memory is a region of the module's.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmrig::{Kernel, workspace};

use super::Machine;
use crate::recovery::{fio_until_stopped, number, report};

/// Writes 8 MiB that are kept in `file`.
fn fill(path: &str, file: &str) -> String {
    format!(
        "dd if=/dev/urandom of={file} bs=1M count=8 2>/dev/null && \
         dd if={file} of={path} bs=1M oflag=direct 2>/dev/null"
    )
}

/// Whether they are still there.
fn compare(path: &str, file: &str) -> String {
    format!("dd if={path} bs=1M count=8 iflag=direct 2>/dev/null | cmp - {file}")
}

/// All processes of the device are killed while a request is on its way, and `vramctl recover` finds its
/// region, one of so many, with every byte in it.
fn recovers(machine: &Machine, name: &str, path: &str, count: &str) -> Result<()> {
    machine.must(&fill(path, "/tmp/data"))?;
    machine.kill_all(name)?;
    let reader = machine.spawn_sh(&compare(path, "/tmp/data"))?;
    ensure!(
        regions(machine)? == count,
        "regions went with the processes"
    );
    ensure!(reader.try_wait()?.is_none(), "a request waits for a server");
    let back = machine.must_within(&format!("vramctl recover {name}"), 90)?;
    ensure!(back == path, "{back}");
    reader.wait(Duration::from_secs(60))?.ok()?;
    machine.server_is_protected(name)?;
    ensure!(regions(machine)? == count, "another region");
    // And as ever when its worker dies again.
    let worker = machine.processes(name)?[1];
    machine.must(&format!("kill -9 {worker}; {}", compare(path, "/tmp/data")))?;
    machine.wait_whole(name)?;
    Ok(())
}

/// The number of regions, with nobody at the node but who asks.
fn regions(machine: &Machine) -> Result<String> {
    machine.must("vramtest kmod count")
}

pub fn device(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-device", 128, |vm| {
        vm.memory(768).tools(&["fio"])
    })?;
    let address = machine.pci_address(0);
    let check = machine.sh("vramctl check")?;
    ensure!(
        check.stdout.contains("ublk_vram is loaded, 0 regions"),
        "{check}"
    );
    // The suite that every backend passes.
    let spec = format!(
        r#"{{"name":"c","size":"max","backend":{{"kind":"pci","address":"{address}"}},"chunk":33554432}}"#
    );
    let report = machine.must_within(&format!("echo '{spec}' | ublk-vram conformance"), 120)?;
    ensure!(report.contains("kernel module"), "{report}");
    machine.nothing_left()?;

    let path = machine.add(
        "d",
        &format!("{} --size max --io-memory 8M", machine.gpu(0)),
    )?;
    let copy = machine.show("d")?["copy"].clone();
    let copy = copy.as_str().unwrap_or_default();
    ensure!(copy.contains("write-combined, kernel module"), "{copy}");
    let list = machine.must("vramctl list --json")?;
    ensure!(list.contains("kernel module"), "{list}");
    ensure!(regions(&machine)? == "1", "one region");
    machine.server_is_protected("d")?;
    machine.fio_verify(&path, "--bsrange=4k-64k --size=48M", 200)?;
    machine.refused("rmmod ublk_vram", 1, &[])?;
    machine.refused(
        &format!("vramctl add e {} --size max", machine.gpu(0)),
        1,
        &["in use"],
    )?;
    machine.must("vramctl remove d")?;
    machine.nothing_left()?;
    ensure!(regions(&machine)? == "0", "the region went with its device");
    let bound = machine.must(&format!(
        "ls -d /sys/bus/pci/devices/{address}/driver; true"
    ))?;
    ensure!(bound.is_empty(), "the function is still bound");

    // Every process is killed: the region and its bytes stay, and the next server serves them.
    let path = machine.add(
        "d",
        &format!("{} --size max --io-memory 8M", machine.gpu(0)),
    )?;
    recovers(&machine, "d", &path, "1")?;
    machine.kill_all("d")?;
    ensure!(
        regions(&machine)? == "1",
        "a sticky region outlives its server"
    );
    let used = std::fs::read(&machine.bar_file)?;
    ensure!(
        used[..4 << 20].iter().any(|byte| *byte != 0),
        "and so do its bytes"
    );
    machine.must_within("vramctl remove d --force", 60)?;
    ensure!(regions(&machine)? == "0", "clean-up ends the region");
    let wiped = std::fs::read(&machine.bar_file)?;
    ensure!(
        wiped.iter().all(|byte| *byte == 0),
        "clean-up wipes the memory"
    );
    machine.end(false)
}

/// The CUDA library, which no guest has: a stub that hands out what the mock driver pins.
fn cuda_stub() -> Result<Vec<u8>> {
    let dir = tempfile::tempdir()?;
    let library = dir.path().join("libcuda.so.1");
    let source = workspace::root().join("tests/fixtures/cuda_stub.c");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-w", "-o"])
        .args([&library, &source])
        .status()
        .context("cannot run cc")?;
    ensure!(status.success(), "cannot compile {}", source.display());
    Ok(std::fs::read(library)?)
}

pub fn cuda(kernel: &Kernel) -> Result<()> {
    let stub = cuda_stub()?;
    let machine = Machine::boot(kernel, "kmod-cuda", 128, |vm| {
        vm.memory(768).tools(&["fio"])
    })?;
    let add = "vramctl add d --backend cuda --size 96M --io-memory 4M";
    machine.refused(add, 1, &["no CUDA driver"])?;
    machine.write_file("/usr/lib/libcuda.so.1", 0o755, &stub)?;
    machine.refused(add, 1, &["cannot pin", "open kernel module"])?;
    machine.load_mock()?;
    machine.refused(
        "vramctl add d --backend cuda --gpu 0000:00:04.0 --size 96M",
        3,
        &["CUDA knows no GPU at 0000:00:04.0"],
    )?;
    machine.refused(
        "vramctl add d --backend cuda --size 120M --io-memory 8M",
        1,
        &["does not fit"],
    )?;
    let spec = r#"{"name":"c","size":"max","backend":{"kind":"cuda","gpu":null},"chunk":33554432}"#;
    let report = machine.must_within(&format!("echo '{spec}' | ublk-vram conformance"), 120)?;
    ensure!(report.contains("kernel module"), "{report}");

    let path = machine.add(
        "d",
        "--backend cuda --gpu 0000:00:05.0 --size 96M --io-memory 4M",
    )?;
    let show = machine.show("d")?;
    ensure!(
        show["backend"] == "cuda" && show["gpu"] == "0000:00:05.0",
        "{show}"
    );
    ensure!(regions(&machine)? == "1", "one region");
    machine.server_is_protected("d")?;
    // The server links no GPU library; only the maker had it.
    let pid = show["pid"].as_i64().context("no pid")?;
    machine.must(&format!("! grep -q libcuda /proc/{pid}/maps"))?;
    machine.fio_verify(&path, "--bsrange=4k-64k --size=48M", 200)?;
    machine.refused("rmmod nvidia_mock", 1, &[])?;
    machine.must("vramctl remove d")?;
    machine.nothing_left()?;
    ensure!(regions(&machine)? == "0", "the region went with its device");

    // The kernel copies to pinned pages too, which do not lie one after the other.
    let path = machine.add("d", "--backend cuda --size 96M --chunk 8M --zero-copy")?;
    let show = machine.show("d")?;
    ensure!(show["zero_copy"] == true, "{show}");
    machine.fio_verify(&path, "--bsrange=4k-512k --size=48M", 200)?;
    machine.must("vramctl remove d")?;
    machine.nothing_left()?;

    // Killed, both of two alike: each finds its own region again, and what is left is wiped alone.
    let options = "--backend cuda --size 40M --io-memory 2M --allow-unsafe";
    let other = machine.add("other", options)?;
    machine.write_file("/run/cuda-offset", 0o644, b"64")?;
    let path = machine.add("d", options)?;
    machine.must(&fill(&other, "/tmp/other"))?;
    machine.kill_all("other")?;
    recovers(&machine, "d", &path, "2")?;
    machine.kill_all("d")?;
    ensure!(
        regions(&machine)? == "2",
        "sticky regions outlive their servers"
    );
    machine.must_within("vramctl remove d --force", 60)?;
    ensure!(regions(&machine)? == "1", "clean-up ends its region alone");
    // The mock's pages lie back to front.
    let file = std::fs::read(&machine.gpu_file)?;
    let wiped = &file[file.len() - (104 << 20)..file.len() - (64 << 20)];
    ensure!(
        wiped.iter().all(|byte| *byte == 0),
        "clean-up wipes the memory"
    );
    machine.must_within("vramctl recover other", 90)?;
    machine.must_within(&compare(&other, "/tmp/other"), 60)?;
    machine.must("vramctl remove other")?;
    machine.nothing_left()?;
    machine.end(true)
}

pub fn swap_storm(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-storm", 256, |vm| vm.memory(256))?;
    let path = machine.add(
        "swap0",
        &format!("{} --size max --io-memory 8M", machine.gpu(0)),
    )?;
    ensure!(regions(&machine)? == "1", "the device is not on the module");
    machine.must("vramctl swap on swap0")?;
    machine.server_is_protected("swap0")?;
    machine.must("echo 0 > /proc/sys/vm/compact_unevictable_allowed")?;
    let faults = machine.queue_faults("swap0")?;
    let filled = machine.must_within("vramtest hog --mib 260", 400)?;
    let report: Value = serde_json::from_str(&filled).context("hog's report")?;
    ensure!(report["bad"] == 0, "{filled}");
    ensure!(machine.vmstat("pswpout")? > 10_000, "no storm");
    // The mapping was populated once and for all.
    let now = machine.queue_faults("swap0")?;
    ensure!(
        now == faults,
        "queue threads took page faults: {faults:?} -> {now:?}"
    );
    machine.must_within(&format!("swapoff {path}"), 200)?;
    machine.must_within("vramctl remove swap0", 60)?;
    machine.nothing_left()?;
    machine.end(false)
}

/// Workers are killed again and again under fio and under a swap storm, with copies held: one region all
/// the time, no error, and every byte is right.
pub fn kills(kernel: &Kernel) -> Result<()> {
    let machine = Machine::boot(kernel, "kmod-kills", 512, |vm| {
        vm.memory(384)
            .tools(&["fio"])
            .panic_on_hung_task(Duration::from_secs(100))
    })?;
    let path = machine.add(
        "swap0",
        &format!("{} --size max --io-memory 8M --lab-fault", machine.gpu(0)),
    )?;
    let kill = |times: u32, takeovers: u64| -> Result<u64> {
        let command = format!("vramtest kill-worker swap0 --times {times} --whole --hold");
        let killed = report(&machine.must_within(&command, 400)?)?;
        ensure!(number(&killed, "takeovers")? == takeovers, "{killed}");
        ensure!(number(&killed, "errors")? == 0, "{killed}");
        ensure!(regions(&machine)? == "1", "one region: {killed}");
        eprintln!("kmod::kills: {killed}");
        number(&killed, "reissued")
    };
    let fio = machine.spawn_sh(&fio_until_stopped(&path))?;
    let under_fio = kill(4, 4)?;
    machine.must("touch /tmp/stop")?;
    fio.wait(Duration::from_secs(120))?.ok()?;
    ensure!(under_fio > 0, "nothing was issued again under fio");

    machine.must("vramctl swap on swap0 --force")?;
    let hog = machine.spawn_sh("HOG_STOP=/tmp/stop exec vramtest hog --mib 330 --rounds 1000")?;
    machine.wait_storm()?;
    let reissued = kill(10, 14)?;
    machine.must("touch /tmp/stop")?;
    let filled = hog.wait(Duration::from_secs(300))?.ok()?.stdout;
    let filled = report(filled.lines().last().unwrap_or_default())?;
    ensure!(filled["bad"] == 0, "{filled}");
    ensure!(reissued > under_fio, "nothing was issued again under swap");
    ensure!(
        machine.vmstat("pswpin")? > 0 && machine.vmstat("pswpout")? > 0,
        "no storm"
    );
    machine.server_is_protected("swap0")?;
    machine.must_within("vramctl remove swap0 --swapoff", 200)?;
    machine.nothing_left()?;
    machine.end(false)
}
