//! Ends that are honest: what does not fit is not begun, what fails leaves the device, and a disk that
//! went away under swap is seen by everybody.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vmrig::{Device, Kernel, Process};

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    (
        "endings::swapoff_that_does_not_fit",
        On::Newest,
        does_not_fit,
    ),
    ("endings::ghost", On::Every, ghost),
    ("endings::hung_disk", On::Newest, hung_disk),
    (
        "endings::wiped_after_a_kill",
        On::Newest,
        wiped_after_a_kill,
    ),
];

/// A program that keeps `mib` MiB, as it ends when a line is written to /tmp/go; and who keeps that open.
fn keeper(guest: &Guest, mib: u64) -> Result<(Process, Process)> {
    guest.must("mkfifo /tmp/go")?;
    let keeper = guest.spawn_sh(&format!(
        "echo -1000 > /proc/self/oom_score_adj; exec vramtest hog --mib {mib} --keep < /tmp/go"
    ))?;
    let opener = guest.spawn_sh("exec sleep 1000 > /tmp/go")?;
    for _ in 0..300 {
        if keeper.output()?.0.contains("filled") {
            return Ok((keeper, opener));
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    anyhow::bail!("the memory was never filled")
}

/// What is swapped does not fit into memory: `remove` refuses; after SIGTERM the helper fails or is killed, the
/// server lives, and every page is right. Once it fits, the next SIGTERM ends it.
fn does_not_fit(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "does-not-fit", 256, |vm| vm.memory(256))?;
    let options = "--size max --io-memory 4M --queues 1";
    guest.add("swap0", &format!("{} {options}", guest.gpu(0)))?;
    guest.must("vramctl swap on swap0")?;
    let (keeper, opener) = keeper(&guest, 230)?;
    let refusal = guest.refused(
        "vramctl remove swap0 --swapoff 2>/tmp/said; rc=$?; tail -n 1 /tmp/said >&2; exit $rc",
        1,
        &["do not fit into memory and other swap", "free", "MiB"],
    )?;
    let show = guest.show("swap0")?;
    ensure!(
        show["state"] == "live" && !show["swap"].is_null(),
        "{refusal}: the device stays: {show}"
    );
    let pid = &show["pid"];
    guest.must(&format!("kill -TERM {pid}"))?;
    guest.must_within(
        "while ! vramctl show swap0 --json | grep -q 'swapoff'; do sleep 1; done; \
         vramctl list --json | grep -q '\"live\"'",
        240,
    )?;
    guest.server_is_protected("swap0")?;
    guest.must("echo > /tmp/go")?;
    let kept = keeper.wait(Duration::from_secs(200))?.ok()?.stdout;
    let report: serde_json::Value = serde_json::from_str(kept.lines().last().unwrap_or_default())?;
    ensure!(report["bad"] == 0, "{kept}");
    opener.kill(libc::SIGKILL)?;
    guest.must_within(
        &format!("kill -TERM {pid}; while kill -0 {pid} 2>/dev/null; do sleep 0.2; done"),
        120,
    )?;
    guest.nothing_left()?;
    guest.end()
}

/// The server is killed under swap. What the kernel keeps in its list is shown, explained, and in the
/// way of the next device.
fn ghost(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "ghost", 128, |vm| {
        vm.device(Device::Qxl { vram_mib: 128 })
    })?;
    let options = "--size max --io-memory 4M --queues 1";
    guest.add(
        "swap0",
        &format!("{} {options} --lab-no-recovery", guest.gpu(0)),
    )?;
    guest.must("vramctl swap on swap0")?;
    let pid = guest.show("swap0")?["server"]["worker"].clone();
    guest.must(&format!("kill -9 {pid}"))?;
    guest.must_within("until grep -q deleted /proc/swaps; do sleep 0.2; done", 30)?;
    let list: serde_json::Value = serde_json::from_str(&guest.must("vramctl list --json")?)?;
    let ghosts = list["ghosts"].as_array().context("ghosts")?;
    ensure!(
        ghosts.len() == 1 && ghosts[0]["deleted"] == true,
        "one ghost: {list}"
    );
    let said = guest.sh("vramctl list")?.ok()?;
    ensure!(said.stderr.contains("ghost swap: /dev/ublkb0"), "{said}");
    let other = format!("{} {options}", guest.gpu(1));
    guest.refused(
        &format!("vramctl add other {other}"),
        1,
        &["(deleted)", "restart of the machine"],
    )?;
    guest.refused(
        "vramctl remove swap0 --swapoff",
        1,
        &["gone while it was swap"],
    )?;
    guest.refused("vramctl remove swap0 --force", 1, &["swap"])?;
    Ok(())
}

/// A disk that answers nothing holds nobody who asks about it or wants to end it.
fn hung_disk(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "hung-disk", 64, |vm| vm.tools(&["dd"]))?;
    let options = "--size max --io-memory 4M --queues 1 --allow-unsafe --lab-fault";
    let path = guest.add("d", &format!("{} {options}", guest.gpu(0)))?;
    guest.must("vramctl fault d hold")?;
    let reader = guest.spawn_sh(&format!(
        "dd if={path} of=/dev/null bs=4k count=1 iflag=direct"
    ))?;
    guest.must_within("vramctl list && vramctl show d", 20)?;
    guest.refused("vramctl remove d", 1, &["open by dd"])?;
    guest.must("vramctl release d")?;
    reader.wait(Duration::from_secs(30))?.ok()?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

/// What was on a device whose server was killed stays in the memory until it is cleaned up, and is
/// nowhere after that.
fn wiped_after_a_kill(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "wiped", 16, |vm| vm.tools(&["dd"]))?;
    let options = "--size max --io-memory 4M --allow-unsafe --lab-no-recovery";
    let path = guest.add("d", &format!("{} {options}", guest.gpu(0)))?;
    guest.must(&format!(
        "yes secret | dd of={path} bs=1M count=8 iflag=fullblock oflag=direct 2>/dev/null"
    ))?;
    let pid = guest.show("d")?["server"]["worker"].clone();
    guest.must(&format!("kill -9 {pid}"))?;
    guest.must_within(
        "until vramctl list --json | grep -q '\"dead\"'; do sleep 0.2; done",
        20,
    )?;
    let has_secret = || -> Result<bool> {
        let bytes = std::fs::read(&guest.bar_file)?;
        Ok(bytes.windows(6).any(|window| window == b"secret"))
    };
    ensure!(has_secret()?, "a killed server wipes nothing");
    guest.must_within("vramctl remove d --force", 60)?;
    ensure!(!has_secret()?, "the secret outlived the device");
    let bytes = std::fs::read(&guest.bar_file)?;
    ensure!(bytes.iter().all(|&byte| byte == 0), "headers are left");
    guest.nothing_left()?;
    guest.end()
}
