//! Processes of a server die, each of them, at every moment, and nobody who uses the disk notices
//! more than a pause.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmrig::{Kernel, VmBuilder};

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("recovery::kills_under_fio", On::Every, kills_under_fio),
    (
        "recovery::kills_under_swap_storm",
        // Older drivers can hang in it, rarely (docs/safety.md).
        On::Newest,
        kills_under_swap_storm,
    ),
    (
        "recovery::killed_while_stopped",
        On::Every,
        killed_while_stopped,
    ),
    (
        "recovery::without_kernel_threads",
        On::Newest,
        without_kernel_threads,
    ),
    ("recovery::every_moment", On::Every, every_moment),
    ("recovery::supervisor_killed", On::Every, supervisor_killed),
    ("recovery::all_killed", On::Every, all_killed),
    ("recovery::crash_loop", On::Newest, crash_loop),
    ("recovery::restart", On::Every, restart),
];

const OPTIONS: &str = "--size max --io-memory 4M --allow-unsafe";

/// Writes and verifies until /tmp/stop is there, and fails if a byte is wrong.
pub fn fio_until_stopped(path: &str) -> String {
    format!(
        "while [ ! -e /tmp/stop ]; do fio --name=x --filename={path} --direct=1 --ioengine=io_uring \
         --iodepth=16 --rw=randwrite --bs=8k --size=24M --loops=3 --verify=crc32c --verify_fatal=1 \
         --thread --output-format=terse >/dev/null || exit 1; done; rm /tmp/stop"
    )
}

pub fn report(line: &str) -> Result<Value> {
    serde_json::from_str(line).with_context(|| format!("not a report: {line}"))
}

pub fn number(report: &Value, key: &str) -> Result<u64> {
    report[key]
        .as_u64()
        .with_context(|| format!("no {key} in {report}"))
}

fn worker(guest: &Guest) -> Result<i64> {
    Ok(guest.processes("d")?[1])
}

fn wait_state(guest: &Guest, state: &str, seconds: u64) -> Result<()> {
    guest.wait_state("d", state, seconds)
}

fn kills_under_fio(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "kills-fio", 64, |vm| {
        vm.tools(&["fio"])
            .panic_on_hung_task(Duration::from_secs(60))
    })?;
    let path = guest.add("d", &format!("{} {OPTIONS} --lab-fault", guest.gpu(0)))?;
    let fio = guest.spawn_sh(&fio_until_stopped(&path))?;
    let killed = guest.must_within("vramtest kill-worker d --times 14 --hold --whole", 200)?;
    let killed = report(&killed)?;
    // And without waiting for a standby: what takes over is started when it is needed.
    let rapid = guest.must_within("vramtest kill-worker d --times 6 --hold", 200)?;
    let rapid = report(&rapid)?;
    guest.must("touch /tmp/stop")?;
    fio.wait(Duration::from_secs(120))?.ok()?;
    ensure!(number(&rapid, "takeovers")? == 20, "{killed} {rapid}");
    ensure!(number(&rapid, "errors")? == 0, "{killed} {rapid}");
    ensure!(number(&killed, "reissued")? > 0, "{killed}");
    eprintln!("kills under fio: {killed} {rapid}");
    let show = guest.show("d")?;
    ensure!(show["server"]["generation"] == 21, "{show}");
    // A panic in a queue thread is a death like any other.
    let before = worker(&guest)?;
    guest.must("vramctl fault d panic --count 1")?;
    guest.must_within(
        &format!("dd if={path} of=/dev/null bs=4k count=1 iflag=direct"),
        60,
    )?;
    ensure!(
        worker(&guest)? != before,
        "the worker lives on without a thread"
    );
    guest.wait_whole("d")?;
    guest.server_is_protected("d")?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

fn kills_under_swap_storm(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "kills-storm", 512, |vm| {
        vm.memory(384).panic_on_hung_task(Duration::from_secs(100))
    })?;
    let path = guest.add(
        "swap0",
        &format!("{} --size max --io-memory 8M --lab-fault", guest.gpu(0)),
    )?;
    guest.must("vramctl swap on swap0")?;
    let hog = guest.spawn_sh("HOG_STOP=/tmp/stop exec vramtest hog --mib 330 --rounds 1000")?;
    guest.wait_storm()?;
    let killed = guest.must_within("vramtest kill-worker swap0 --times 20 --whole --hold", 500)?;
    guest.must("touch /tmp/stop")?;
    let killed = report(&killed)?;
    let filled = hog.wait(Duration::from_secs(300))?.ok()?.stdout;
    let filled = report(filled.lines().last().unwrap_or_default())?;
    ensure!(filled["bad"] == 0, "{filled}");
    ensure!(number(&killed, "takeovers")? == 20, "{killed}");
    ensure!(number(&killed, "errors")? == 0, "{killed}");
    ensure!(number(&killed, "reissued")? > 0, "{killed}");
    let (swapped_in, swapped_out) = (guest.vmstat("pswpin")?, guest.vmstat("pswpout")?);
    ensure!(swapped_in > 0 && swapped_out > 0, "no storm");
    eprintln!("kills under a swap storm: {killed}, in {swapped_in}, out {swapped_out}");
    guest.server_is_protected("swap0")?;
    guest.must_within(&format!("swapoff {path}"), 200)?;
    guest.must("vramctl remove swap0")?;
    guest.nothing_left()?;
    guest.end()
}

/// Requests that reach a worker which is not to run again: those that it was told of last of all, and whose
/// tags it never took.
fn killed_while_stopped(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "stopped", 64, |vm| {
        vm.tools(&["dd", "cmp"])
            .panic_on_hung_task(Duration::from_secs(60))
    })?;
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    guest.fill(&path, 2)?;
    for _ in 0..4 {
        let [_, worker, _] = guest.wait_whole("d")?;
        // 16 readers of the first MiB, 16 who write the second one.
        let script = format!(
            "kill -STOP {worker}; \
             for i in $(seq 0 15); do \
             dd if={path} of=/tmp/read$i bs=64k skip=$i count=1 iflag=direct 2>/dev/null & \
             dd if=/tmp/data of={path} bs=64k skip=$((16+i)) seek=$((16+i)) count=1 oflag=direct 2>/dev/null & \
             done; sleep 1; kill -KILL {worker}; wait; \
             for i in $(seq 0 15); do cat /tmp/read$i; rm /tmp/read$i; done | cmp -n 1048576 - /tmp/data && \
             dd if={path} bs=64k count=32 iflag=direct 2>/dev/null | cmp - /tmp/data"
        );
        guest.must_within(&script, 90)?;
    }
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

fn without_kernel_threads(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "no-kthreads", 64, without_kernel_threads_vm)?;
    let options = format!("{} {OPTIONS} --queues 4 --lab-fault", guest.gpu(0));
    let path = guest.add("d", &options)?;
    kills_without_kernel_threads(&guest, &path)?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

/// A CPU that [`kills_without_kernel_threads`] can take, and its tools.
pub fn without_kernel_threads_vm(vm: VmBuilder) -> VmBuilder {
    // The end of deferred probing waits for kernel threads, too, and holds up a worker meanwhile.
    vm.cpus(4)
        .append("isolcpus=3 deferred_probe_timeout=0")
        .tools(&["dd", "cmp"])
}

/// In a storm kthreadd may wait for the very disk that waits for its next worker: nothing of a takeover of
/// device `d` may wait for a kernel thread that does not exist yet.
pub fn kills_without_kernel_threads(guest: &Guest, path: &str) -> Result<()> {
    guest.fill(path, 8)?;
    // No program with rings of its own: as they end, the kernel makes the threads that are to be missing.
    let readers = guest.spawn_sh(&format!(
        "for i in 0 1 2 3 4 5 6 7; do \
         (until [ -e /tmp/over ]; do dd if={path} bs=16k count=512 iflag=direct 2>/dev/null | cmp - /tmp/data \
         || touch /tmp/wrong; done) & done; wait; [ ! -e /tmp/wrong ]"
    ))?;
    guest.wait_whole("d")?;
    let stall = guest.spawn_sh("exec vramtest stall --cpu 3 --stop /tmp/over")?;
    guest.must_within("until [ -e /tmp/over.stalled ]; do sleep 0.1; done", 30)?;
    guest.must_within("vramtest kill-worker d --times 5 --whole", 300)?;
    let killed = guest.must_within("vramtest kill-worker d --times 5 --hold --whole", 300)?;
    let killed = report(&killed)?;
    ensure!(number(&killed, "takeovers")? == 10, "{killed}");
    ensure!(number(&killed, "errors")? == 0, "{killed}");
    eprintln!("kills without kernel threads: {killed}");
    guest.must("touch /tmp/over")?;
    readers.wait(Duration::from_secs(120))?.ok()?;
    stall.wait(Duration::from_secs(60))?.ok()?;
    Ok(())
}

fn every_moment(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "moments", 64, |vm| {
        vm.tools(&["dd", "cmp"])
            .panic_on_hung_task(Duration::from_secs(60))
    })?;
    guest.must("dd if=/dev/urandom of=/tmp/data bs=1M count=8 2>/dev/null")?;
    let write = |path: &str| format!("dd if=/tmp/data of={path} bs=64k oflag=direct 2>/dev/null");
    let compare = |path: &str| {
        format!("dd if={path} bs=64k count=128 iflag=direct 2>/dev/null | cmp - /tmp/data")
    };
    let mut known = None;
    for place in ["half-fetched", "before-end", "after-end"] {
        let options = format!("{} {OPTIONS} --lab-crash {place}:1", guest.gpu(0));
        let path = guest.add("d", &options)?;
        guest.must(&write(&path))?;
        let [_, first, standby] = guest.wait_whole("d")?;
        let features = guest.show("d")?["features"].to_string();
        guest.must(&format!("kill -9 {first}"))?;
        if place == "half-fetched" && !features.contains("PER_IO_DAEMON") {
            // This driver would crash the machine at another attempt.
            wait_state(&guest, "failed", 60)?;
            guest.refused("vramctl recover d", 1, &["would crash the machine"])?;
            guest.must_within("vramctl remove d --force", 60)?;
            guest.nothing_left()?;
            // Its cancel function warns of the server that it has forgotten.
            known = Some("ublk_ch_uring_cmd");
            continue;
        }
        guest.must_within(&compare(&path), 60)?;
        let [_, third, _] = guest.wait_whole("d")?;
        ensure!(
            third != first && third != standby,
            "{place}: the second death"
        );
        let show = guest.show("d")?;
        // A worker that died after the end of the recovery was live, and nobody had heard of it.
        ensure!(show["server"]["takeovers"] == 1, "{place}: {show}");
        ensure!(show["server"]["generation"] == 3, "{place}: {show}");
        guest.must("vramctl remove d")?;
        guest.nothing_left()?;
    }

    // The standby: it is replaced, and nobody notices.
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    guest.must(&write(&path))?;
    let [_, worker, standby] = guest.wait_whole("d")?;
    guest.must(&format!("kill -9 {standby}"))?;
    guest.must_within(
        &format!(
            "until vramctl show d | grep -q 'standby [1-9]' && ! vramctl show d | grep -q 'standby {standby}$'; \
             do sleep 0.1; done"
        ),
        60,
    )?;
    ensure!(guest.processes("d")?[1] == worker, "the worker stays");

    // During a drain: the next worker goes on with it.
    let opener = guest.spawn_sh(&format!("exec vramtest hold {path} 1000"))?;
    guest.must("sleep 1")?;
    let supervisor = guest.show("d")?["pid"].clone();
    guest.must(&format!("kill -TERM {supervisor}"))?;
    wait_state(&guest, "draining", 30)?;
    guest.must(&format!("kill -9 {worker}"))?;
    guest.must_within(&compare(&path), 60)?;
    wait_state(&guest, "draining", 30)?;
    opener.kill(libc::SIGKILL)?;
    guest.must_within(
        &format!("while kill -0 {supervisor} 2>/dev/null; do sleep 0.1; done"),
        60,
    )?;
    guest.nothing_left()?;
    let bytes = std::fs::read(&guest.bar_file)?;
    ensure!(bytes.iter().all(|&byte| byte == 0), "not wiped");
    guest.end_but(known)
}

fn supervisor_killed(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "supervisor", 64, |vm| {
        vm.tools(&["fio"])
            .panic_on_hung_task(Duration::from_secs(60))
    })?;
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    let fio = guest.spawn_sh(&fio_until_stopped(&path))?;
    let [first, worker, _] = guest.wait_whole("d")?;
    guest.must(&format!("kill -9 {first}"))?;
    // By itself: the worker starts another one.
    guest.must_within(
        &format!("until vramctl show d | grep -q 'supervisor [1-9].*worker {worker},'; do sleep 0.1; done"),
        60,
    )?;
    let [second, same, _] = guest.wait_whole("d")?;
    ensure!(second != first && same == worker, "{second} {same}");
    ensure!(guest.show("d")?["server"]["supervisors"] == 1);

    // Where no process can be started, `list` says what is missing, and I/O goes on.
    let group = "/sys/fs/cgroup/ublk-vram/d";
    guest.must(
        "echo +pids > /sys/fs/cgroup/cgroup.subtree_control; \
         echo +pids > /sys/fs/cgroup/ublk-vram/cgroup.subtree_control",
    )?;
    guest.must(&format!("echo 1 > {group}/pids.max; kill -9 {second}"))?;
    guest.must_within(
        "until vramctl list -n -o STATE,REASON | grep -q '^live.*its supervisor is gone'; do sleep 0.1; done",
        30,
    )?;
    guest.must_within(
        &format!("dd if={path} of=/dev/null bs=4k count=64 iflag=direct"),
        30,
    )?;
    guest.refused("vramctl remove d", 1, &["supervisor is gone"])?;
    guest.must(&format!("echo max > {group}/pids.max; vramctl recover d"))?;
    let [third, same, _] = guest.wait_whole("d")?;
    ensure!(third != second && same == worker, "{third} {same}");

    // The new one does all that the first one did.
    guest.must(&format!("kill -9 {worker}"))?;
    guest.wait_whole("d")?;
    guest.must("touch /tmp/stop")?;
    fio.wait(Duration::from_secs(120))?.ok()?;
    guest.server_is_protected("d")?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

fn all_killed(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "all-killed", 64, |vm| vm.tools(&["dd", "cmp"]))?;
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    guest.fill(&path, 8)?;
    guest.kill_all("d")?;
    let reader = guest.spawn_sh(&format!(
        "dd if={path} bs=64k count=128 iflag=direct 2>/dev/null | cmp - /tmp/data"
    ))?;
    guest.must("sleep 1")?;
    ensure!(reader.try_wait()?.is_none(), "a request waits for a worker");
    guest.refused("vramctl remove d", 1, &["recover d", "--force"])?;
    // Neither its name nor its memory is free.
    let gpu = guest.gpu(0);
    guest.refused(&format!("vramctl add d {gpu} {OPTIONS}"), 1, &["recover d"])?;
    guest.refused(
        &format!("vramctl add e {gpu} {OPTIONS}"),
        1,
        &["that of 'd'"],
    )?;
    wait_state(&guest, "orphan", 10)?;
    let back = guest.must_within("vramctl recover d", 90)?;
    ensure!(back == path, "{back}");
    reader.wait(Duration::from_secs(60))?.ok()?;
    guest.wait_whole("d")?;
    guest.server_is_protected("d")?;

    // Ended by force: who waits gets EIO, and nothing is left.
    guest.kill_all("d")?;
    let writer = guest.spawn_sh(&format!(
        "dd if=/dev/zero of={path} bs=4k count=1 oflag=direct"
    ))?;
    guest.must("sleep 1")?;
    guest.must_within("vramctl remove d --force", 60)?;
    let out = writer.wait(Duration::from_secs(30))?;
    ensure!(
        !out.success() && out.stderr.contains("Input/output error"),
        "{out}"
    );
    guest.nothing_left()?;
    let bytes = std::fs::read(&guest.bar_file)?;
    ensure!(bytes.iter().all(|&byte| byte == 0), "not wiped");

    // Memory that went with its processes is not taken for anything else.
    guest.add(
        "d",
        "--backend host --size 32M --io-memory 4M --allow-unsafe",
    )?;
    guest.kill_all("d")?;
    guest
        .refused("vramctl recover d", 1, &["went with its last process"])
        .or_else(|_| guest.refused("vramctl recover d", 3, &["went with its last process"]))?;
    guest.must_within("vramctl remove d --force", 60)?;
    guest.nothing_left()?;
    guest.end()
}

fn crash_loop(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "crash-loop", 64, |vm| vm.tools(&["dd", "cmp"]))?;
    guest.must("dd if=/dev/urandom of=/tmp/data bs=1M count=4 2>/dev/null")?;
    let add = |more: &str| -> Result<String> {
        let path = guest.add("d", &format!("{} {OPTIONS} {more}", guest.gpu(0)))?;
        guest.must(&format!("dd if=/tmp/data of={path} bs=64k oflag=direct"))?;
        guest.wait_whole("d")?;
        guest.must(&format!("kill -9 {}", worker(&guest)?))?;
        Ok(path)
    };
    // Killed once by us and four times by the lab; two more times after `recover`.
    let path = add("--lab-crash before-end:6")?;
    let reader = guest.spawn_sh(&format!(
        "dd if={path} bs=64k count=64 iflag=direct 2>/dev/null | cmp - /tmp/data"
    ))?;
    wait_state(&guest, "failed", 60)?;
    let show = guest.show("d")?;
    ensure!(
        show["reason"]
            .as_str()
            .is_some_and(|why| why.contains("5 workers died")),
        "{show}"
    );
    ensure!(reader.try_wait()?.is_none(), "requests wait");
    // The cancel function of older drivers warns of the server that it has forgotten, in the second part.
    let features = show["features"].to_string();
    let known = (!features.contains("PER_IO_DAEMON")).then_some("ublk_ch_uring_cmd");
    guest.refused("vramctl remove d", 1, &["is failed", "--force"])?;
    guest.must_within("vramctl recover d", 90)?;
    reader.wait(Duration::from_secs(60))?.ok()?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;

    // Ended by force.
    let path = add("--lab-crash half-fetched:100")?;
    let writer = guest.spawn_sh(&format!(
        "dd if=/dev/zero of={path} bs=4k count=1 oflag=direct"
    ))?;
    wait_state(&guest, "failed", 60)?;
    guest.must_within("vramctl remove d --force", 60)?;
    let out = writer.wait(Duration::from_secs(30))?;
    ensure!(out.stderr.contains("Input/output error"), "{out}");
    guest.nothing_left()?;

    // Ended by its time limit.
    let path = add("--lab-crash before-end:100 --fail-after 2")?;
    let writer = guest.spawn_sh(&format!(
        "dd if=/dev/zero of={path} bs=4k count=1 oflag=direct"
    ))?;
    let out = writer.wait(Duration::from_secs(60))?;
    ensure!(out.stderr.contains("Input/output error"), "{out}");
    guest.must_within(
        "while [ -e /run/ublk-vram/d.lock ]; do sleep 0.1; done; sleep 0.5",
        30,
    )?;
    guest.nothing_left()?;
    guest.end_but(known)
}

fn restart(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "restart", 64, |vm| {
        vm.tools(&["fio"])
            .panic_on_hung_task(Duration::from_secs(60))
    })?;
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    let fio = guest.spawn_sh(&fio_until_stopped(&path))?;
    for round in 1..=3 {
        let [supervisor, before, _] = guest.wait_whole("d")?;
        guest.must_within("vramctl restart d", 90)?;
        let [same, after, _] = guest.wait_whole("d")?;
        ensure!(same == supervisor && after != before);
        ensure!(guest.show("d")?["server"]["takeovers"] == round);
    }
    guest.must("touch /tmp/stop")?;
    fio.wait(Duration::from_secs(120))?.ok()?;
    let show = guest.show("d")?;
    ensure!(show["queue"][0]["errors"] == 0, "{show}");
    eprintln!("restarts: {}", show["server"]);
    guest.must("vramctl remove d")?;

    // A disk that dies with its worker is not restarted.
    guest.add(
        "d",
        &format!("{} {OPTIONS} --lab-no-recovery", guest.gpu(0)),
    )?;
    guest.refused("vramctl restart d", 1, &["does not survive"])?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}
