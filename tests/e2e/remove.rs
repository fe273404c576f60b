//! Removal is refused while anybody uses the disk, and races cleanly with those who begin to.

use std::time::Duration;

use anyhow::{Result, ensure};
use vmrig::Kernel;

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("remove::refused_while_used", On::Every, refused_while_used),
    ("remove::races_swapon", On::Every, races_swapon),
    (
        "remove::races_swapon_without_safe_stop",
        On::Newest,
        races_swapon_without_safe_stop,
    ),
    (
        "remove::killed_while_mounted",
        On::Newest,
        killed_while_mounted,
    ),
];

const OPTIONS: &str = "--size max --io-memory 4M --allow-unsafe";

fn refused_while_used(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "remove-refused", 64, |vm| {
        vm.modules(&["ext4", "dm_mod"]).tools(&[
            "mkfs.ext4",
            "mount",
            "umount",
            "dmsetup",
            "nsenter",
        ])
    })?;
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;

    guest.must("vramctl swap on d")?;
    guest.refused("vramctl remove d", 1, &["swap"])?;
    guest.must("vramctl swap off d")?;

    guest.must_within(
        &format!("mkfs.ext4 -q {path} && mkdir -p /mnt && mount {path} /mnt"),
        60,
    )?;
    guest.refused("vramctl remove d", 1, &["mounted on /mnt"])?;
    // The mount moves into a namespace of its own: it is not in the host's list any more.
    let hidden = guest.spawn_sh("exec vramtest unshare sleep 1000")?;
    guest.must("sleep 1; umount /mnt && ! grep -q ' /mnt ' /proc/mounts")?;
    guest.refused("vramctl remove d", 1, &["mounted on /mnt", "namespace"])?;
    hidden.kill(libc::SIGKILL)?;
    guest.must("sleep 1")?;

    let opener = guest.spawn_sh(&format!("exec vramtest hold {path} 1000"))?;
    guest.must("sleep 1")?;
    guest.refused("vramctl remove d", 1, &["open by vramtest"])?;
    opener.kill(libc::SIGKILL)?;

    let sectors = guest.must("cat /sys/block/ublkb0/size")?;
    guest.must(&format!(
        "echo '0 {sectors} linear {path} 0' | dmsetup create stacked"
    ))?;
    guest.refused("vramctl remove d", 1, &["dm-0", "stacked"])?;
    guest.must("dmsetup remove stacked")?;

    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

fn races_swapon(kernel: &Kernel) -> Result<()> {
    race(kernel, "remove-race", OPTIONS)
}

fn races_swapon_without_safe_stop(kernel: &Kernel) -> Result<()> {
    race(
        kernel,
        "remove-race-old",
        &format!("{OPTIONS} --lab-no-safe-stop"),
    )
}

/// One loses cleanly: either the disk is swap and stays, or it is gone and swapon says so. Never both.
fn race(kernel: &Kernel, name: &str, options: &str) -> Result<()> {
    let guest = Guest::boot(kernel, name, 64, |vm| vm)?;
    let mut refusals = 0;
    for _ in 0..8 {
        let path = guest.add("d", &format!("{} {options}", guest.gpu(0)))?;
        guest.must(&format!("mkswap {path}"))?;
        let swapper = guest.spawn_sh(&format!("exec vramtest swap-loop {path} 60"))?;
        refusals += guest
            .must_within(
                "n=0; until vramctl remove d 2>/dev/null; do n=$((n+1)); done; echo $n",
                90,
            )?
            .parse::<u32>()?;
        swapper.wait(Duration::from_secs(60))?.ok()?;
        let swaps = guest.must("tail -n +2 /proc/swaps")?;
        ensure!(swaps.is_empty(), "a swap entry without a disk: {swaps}");
        guest.nothing_left()?;
    }
    eprintln!("{name}: 8 removals, {refusals} refusals before them");
    guest.end()
}

/// The worker of a device without recovery dies while a filesystem is on its disk: the disk goes, nobody hangs, and what is left
/// can be cleaned up.
fn killed_while_mounted(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "killed-mounted", 64, |vm| {
        vm.module("ext4").tools(&["mkfs.ext4", "mount", "umount"])
    })?;
    let path = guest.add(
        "d",
        &format!("{} {OPTIONS} --lab-no-recovery", guest.gpu(0)),
    )?;
    guest.must_within(
        &format!("mkfs.ext4 -q {path} && mkdir -p /mnt && mount {path} /mnt"),
        60,
    )?;
    let pid = guest.show("d")?["server"]["worker"].clone();
    guest.must(&format!(
        "dd if=/dev/zero of=/mnt/dirty bs=1M count=8 2>/dev/null; kill -9 {pid}"
    ))?;
    guest.must_within(
        &format!("while kill -0 {pid} 2>/dev/null; do sleep 0.1; done"),
        20,
    )?;
    guest.must_within(
        "until vramctl list --json | grep -q '\"dead\"'; do sleep 0.2; done",
        20,
    )?;
    guest.must_within("umount /mnt", 30)?;
    guest.must("vramctl remove d --force")?;
    guest.nothing_left()?;
    let bytes = std::fs::read(&guest.bar_file)?;
    ensure!(
        bytes.iter().all(|&byte| byte == 0),
        "what was on the disk outlived its server"
    );
    // ext4 may say what it lost; it must not be the kernel that is broken.
    guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}
