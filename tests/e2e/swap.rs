//! The device as swap, under more pressure than the guest has memory.

#[path = "../guest/hog.rs"]
#[expect(dead_code, reason = "the guest runs the rest of it")]
mod hog;

use std::collections::HashSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmrig::Kernel;

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("swap::storm", On::Newest, storm),
    ("swap::one_cpu_256_mib", On::Newest, one_cpu),
    (
        "swap::without_memory_lock_it_hangs",
        On::Newest,
        without_memory_lock,
    ),
    ("swap::sigterm_drains", On::Newest, sigterm_drains),
];

/// A page that [`hog`] wrote begins like this.
fn page_starts(mib: usize, round: u32) -> HashSet<u64> {
    (0..mib * 256)
        .map(|page| hog::word(round, page, 0))
        .collect()
}

/// How many pages of the BAR's file were written by the hog.
fn swapped_pages(guest: &Guest, starts: &HashSet<u64>) -> Result<usize> {
    let bytes = std::fs::read(&guest.bar_file)?;
    Ok(bytes
        .chunks_exact(4096)
        .filter_map(|page| page.first_chunk::<8>())
        .filter(|start| starts.contains(&u64::from_le_bytes(**start)))
        .count())
}

fn storm(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "swap-storm", 512, |vm| {
        vm.memory(320).panic_on_hung_task(Duration::from_secs(60))
    })?;
    let path = guest.add(
        "swap0",
        &format!("{} --size max --io-memory 8M", guest.gpu(0)),
    )?;
    guest.must("vramctl swap on swap0")?;
    guest.server_is_protected("swap0")?;
    // What docs/safety.md advises: by default the kernel's compaction moves even locked pages, and
    // a thread that touches one at that moment takes a minor fault and waits for the move.
    guest.must("echo 0 > /proc/sys/vm/compact_unevictable_allowed")?;
    let faults = guest.queue_faults("swap0")?;

    // One program keeps what it has while another pushes it out.
    guest.must("mkfifo /tmp/go")?;
    let keeper = guest.spawn_sh("vramtest hog --mib 110 --keep < /tmp/go")?;
    let opener = guest.spawn_sh("exec sleep 1000 > /tmp/go")?;
    let filled = guest.must_within("vramtest hog --mib 240 --rounds 2", 400)?;
    ensure!(report(&filled)?["bad"] == 0, "{filled}");

    ensure!(
        guest.vmstat("pswpout")? > 10_000 && guest.vmstat("pswpin")? > 1000,
        "no storm"
    );
    guest.server_is_protected("swap0")?;
    no_faults(&guest, &faults)?;
    let swapped = swapped_pages(&guest, &page_starts(240, 2))?;
    ensure!(
        swapped > 1000,
        "only {swapped} swapped pages are in the BAR"
    );

    guest.must_within(&format!("swapoff {path}"), 300)?;
    guest.must("echo > /tmp/go")?;
    let kept = keeper.wait(Duration::from_secs(120))?.ok()?.stdout;
    ensure!(
        report(kept.lines().last().unwrap_or_default())?["bad"] == 0,
        "{kept}"
    );
    opener.kill(libc::SIGKILL)?;
    no_faults(&guest, &faults)?;
    let show = guest.show("swap0")?;
    let errors: u64 = show["queue"]
        .as_array()
        .context("queues")?
        .iter()
        .filter_map(|q| q["errors"].as_u64())
        .sum();
    ensure!(errors == 0, "{show}");
    guest.must("vramctl remove swap0")?;
    let wiped = swapped_pages(&guest, &page_starts(240, 2))?;
    ensure!(wiped == 0, "{wiped} pages outlived the device");
    guest.nothing_left()?;
    guest.end()
}

/// No queue thread of `swap0` took a page fault since `before`.
fn no_faults(guest: &Guest, before: &[(u64, u64)]) -> Result<()> {
    let now = guest.queue_faults("swap0")?;
    ensure!(
        now == before,
        "queue threads took page faults: (minor, major) {before:?} -> {now:?}"
    );
    Ok(())
}

fn report(line: &str) -> Result<Value> {
    serde_json::from_str(line).with_context(|| format!("not a report: {line}"))
}

fn one_cpu(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "swap-one-cpu", 256, |vm| {
        vm.memory(256)
            .cpus(1)
            .panic_on_hung_task(Duration::from_secs(90))
    })?;
    guest.add(
        "swap0",
        &format!("{} --size max --io-memory 2M --depth 32", guest.gpu(0)),
    )?;
    guest.must("vramctl swap on swap0")?;
    // Compaction is left as it is by default: no fault may be a major one.
    let faults = guest.queue_faults("swap0")?;
    let filled = guest.must_within("vramtest hog --mib 260 --rounds 2", 400)?;
    ensure!(report(&filled)?["bad"] == 0, "{filled}");
    ensure!(
        guest.vmstat("pswpout")? > 5000 && guest.vmstat("pswpin")? > 500,
        "no storm"
    );
    guest.server_is_protected("swap0")?;
    let major = |faults: &[(u64, u64)]| faults.iter().map(|(_, major)| major).sum::<u64>();
    ensure!(
        major(&guest.queue_faults("swap0")?) == major(&faults),
        "major faults"
    );
    guest.must_within("vramctl remove swap0 --swapoff", 200)?;
    guest.nothing_left()?;
    guest.end()
}

/// The same storm, the memory lock taken away: if this did not hang, the storm would prove nothing.
fn without_memory_lock(kernel: &Kernel) -> Result<()> {
    let mut last = String::new();
    for attempt in 1..=3 {
        let guest = Guest::boot(kernel, "swap-unlocked", 512, |vm| {
            // A panic prints the state of every task.
            vm.memory(384)
                .append("panic_print=1")
                .panic_on_hung_task(Duration::from_secs(10))
        })?;
        let options = "--size max --io-memory 8M --lab-no-memory-lock --allow-unsafe";
        guest.add("swap0", &format!("{} {options}", guest.gpu(0)))?;
        guest.must("vramctl swap on swap0")?;
        let storm = guest.spawn_sh("vramtest hog --mib 450 --rounds 3")?;
        match guest.wait_panic(Duration::from_secs(150)) {
            Ok(reason) => {
                ensure!(reason.contains("hung_task"), "another panic: {reason}");
                return mechanism(&guest.console());
            }
            // No task in D for long enough: the stacks say whether a queue thread is stuck (R).
            Err(vmrig::Error::NoAnswer { .. }) => {
                if mechanism(&guest.console()).is_ok() {
                    return Ok(());
                }
                last = format!("attempt {attempt}: no hang; {:?}", storm.try_wait());
            }
            Err(error) => return Err(error.into()),
        }
    }
    anyhow::bail!("the storm survives without the memory lock, so it is no storm: {last}")
}

/// A queue thread of the server is stuck in a page fault of its own.
fn mechanism(console: &str) -> Result<()> {
    let stuck = [
        "do_swap_page",
        "folio_wait_bit",
        "__alloc_pages_slowpath",
        "try_to_free_pages",
        "filemap_fault",
        "wbt_wait",
        "rq_qos_wait",
    ];
    let blocks: Vec<&str> = console
        .split("task:")
        .filter(|block| block.starts_with("ublk-queue"))
        .collect();
    ensure!(
        blocks
            .iter()
            .any(|block| stuck.iter().any(|frame| block.contains(frame))),
        "no queue thread's stack shows why it hangs: {blocks:#?}"
    );
    Ok(())
}

/// SIGTERM under swap: the helper swaps off, the server ends with everything in order.
fn sigterm_drains(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "swap-sigterm", 256, |vm| vm.memory(512))?;
    // Started by hand, so that its exit status can be seen.
    let spec = format!(
        r#"{{"name":"swap0","size":"max","arena":4194304,"backend":{{"kind":"pci","address":"{}"}}}}"#,
        guest.pci_address(0)
    );
    let server = guest.spawn_sh(&format!("echo '{spec}' | ublk-vram serve"))?;
    guest.must_within(
        "until vramctl list --json | grep -q '\"live\"'; do sleep 0.2; done",
        60,
    )?;
    guest.must("vramctl swap on swap0")?;
    let pid = guest.show("swap0")?["pid"].clone();
    // Pushed out by a limit of its cgroup, so that it fits back when asked.
    guest.must("mkdir /sys/fs/cgroup/small && echo +memory > /sys/fs/cgroup/cgroup.subtree_control; \
                mkdir -p /sys/fs/cgroup/small; echo 60M > /sys/fs/cgroup/small/memory.high; mkfifo /tmp/go")?;
    let keeper = guest.spawn_sh(
        "echo $$ > /sys/fs/cgroup/small/cgroup.procs; vramtest hog --mib 120 --keep < /tmp/go",
    )?;
    let opener = guest.spawn_sh("exec sleep 1000 > /tmp/go")?;
    guest.must_within(
        "while ! grep -q pswpout\\ [1-9][0-9][0-9][0-9] /proc/vmstat; do sleep 0.2; done",
        60,
    )?;
    guest.must("echo max > /sys/fs/cgroup/small/memory.high")?;
    guest.must(&format!("kill -TERM {pid}"))?;
    server.wait(Duration::from_secs(120))?.ok()?;
    guest.must("echo > /tmp/go")?;
    let kept = keeper.wait(Duration::from_secs(60))?.ok()?.stdout;
    ensure!(
        report(kept.lines().last().unwrap_or_default())?["bad"] == 0,
        "{kept}"
    );
    opener.kill(libc::SIGKILL)?;
    guest.nothing_left()?;
    guest.end()
}
