//! Devices on Vulkan, on lavapipe: memory that a GPU's driver may move away, and an `add` that fails
//! when memory was taken already.
//!
//! Between the loader and lavapipe is a driver that says of itself, and refuses, what a file tells it to
//! (`fixtures/vulkan_shim.c`): all else is lavapipe, whose memory is system memory.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use vmrig::{Kernel, VmBuilder, workspace};

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("vulkan::evictable_as_swap", On::Newest, evictable_as_swap),
    ("vulkan::failed_add", On::Newest, failed_add),
    ("vulkan::standby_maps_less", On::Newest, standby_maps_less),
];

const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";
const LAVAPIPE: &str = "libvulkan_lvp.so";
const MANIFEST: &str = "/usr/share/vulkan/icd.d/test.json";
/// VkPhysicalDeviceType and VkDriverId, as the shim's file has them.
const INTEGRATED: &str = "type 1";
const NVIDIA: &str = "type 1\ndriver 4";

/// Adds the Vulkan loader and lavapipe to a guest.
pub fn lavapipe(vm: VmBuilder) -> VmBuilder {
    with_libraries(vm).file(
        MANIFEST,
        0o644,
        manifest(&format!("{LIBRARIES}/{LAVAPIPE}")),
    )
}

fn with_libraries(vm: VmBuilder) -> VmBuilder {
    vm.library(format!("{LIBRARIES}/libvulkan.so.1"))
        .library(format!("{LIBRARIES}/{LAVAPIPE}"))
}

/// By which the loader finds a driver.
fn manifest(library: &str) -> String {
    let icd = serde_json::json!({ "api_version": "1.1.230", "library_path": library });
    serde_json::json!({ "file_format_version": "1.0.0", "ICD": icd }).to_string()
}

/// A guest whose one GPU is the shim's.
fn boot(kernel: &Kernel, name: &str) -> Result<Guest> {
    let dir = tempfile::tempdir()?;
    let library = dir.path().join("shim.so");
    let source = workspace::root().join("tests/fixtures/vulkan_shim.c");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .args([&library, &source])
        .status()
        .context("cannot run cc")?;
    ensure!(status.success(), "cannot compile {}", source.display());
    let shim = format!("{LIBRARIES}/libvulkan_shim.so");
    let library = std::fs::read(library)?;
    Guest::boot(kernel, name, 16, |vm| {
        with_libraries(vm.memory(1536))
            .file(&shim, 0o755, library)
            .file(MANIFEST, 0o644, manifest(&shim))
    })
}

/// What the shim says of itself from now on.
fn shim(guest: &Guest, lines: &str) -> Result<()> {
    Ok(guest.write_file("/run/vulkan-shim", 0o644, format!("{lines}\n").as_bytes())?)
}

/// Its residency, as `gpus` and `check` tell it in text and in JSON.
fn residency(guest: &Guest) -> Result<[String; 4]> {
    let gpus: Value = serde_json::from_str(&guest.must_within("vramctl gpus --json", 60)?)?;
    let text = guest.must_within("vramctl gpus", 60)?;
    let (heading, row) = text
        .lines()
        .skip_while(|line| !line.contains("RESIDENCY"))
        .collect::<Vec<_>>()
        .first_chunk::<2>()
        .map(|[heading, row]| ((*heading).to_owned(), (*row).to_owned()))
        .with_context(|| format!("no table of Vulkan's GPUs: {text}"))?;
    let column = heading.find("RESIDENCY").and_then(|at| row.get(at..));
    let cell = column.and_then(|rest| rest.split_whitespace().next());
    // One of its checks may warn or fail in a guest: what counts is the line.
    let checks: Value = serde_json::from_str(&guest.sh("vramctl check --json")?.stdout)?;
    let text = guest.sh("vramctl check")?.stdout;
    let word = |line: &str| {
        ["pinned", "evictable"]
            .into_iter()
            .find(|word| line.ends_with(&format!("({word})")))
            .unwrap_or(if line.contains("system memory") {
                "system"
            } else {
                "?"
            })
            .to_owned()
    };
    let of_memory = |check: &&Value| check["item"] == "GPU memory";
    let check = checks["checks"]
        .as_array()
        .into_iter()
        .flatten()
        .find(of_memory);
    let check = check.with_context(|| format!("no GPU memory: {checks}"))?;
    let line = text.lines().find(|line| line.contains("GPU memory"));
    Ok([
        gpus["vulkan"][0]["residency"]
            .as_str()
            .unwrap_or_default()
            .to_owned(),
        cell.unwrap_or_default().to_owned(),
        word(check["detail"].as_str().unwrap_or_default()),
        word(line.unwrap_or_default().trim()),
    ])
}

/// Fills and checks 80 MiB where 40 may stay in memory: the rest is swapped.
const STORM: &str = "echo $$ > /sys/fs/cgroup/small/cgroup.procs; exec vramtest hog --mib 80";
const OPTIONS: &str = "--backend vulkan --size 100M --chunk 32M --gpu-reserve 0 --io-memory 4M \
                       --allow-unsafe";

/// The states of `v` in `list`, `show` and `show --json`, and its reason if all three give it.
fn shown(guest: &Guest) -> Result<([String; 3], String)> {
    let listed = guest.must("vramctl list -n -o STATE,REASON")?;
    let (state, reason) = listed
        .split_once(char::is_whitespace)
        .unwrap_or((&listed, ""));
    let text = guest.must("vramctl show v")?;
    let value = |key: &str| -> String {
        let mut lines = text.lines();
        let value = lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        value.unwrap_or_default().trim().to_owned()
    };
    let json = guest.show("v")?;
    let reason = reason.trim().to_owned();
    let is_same =
        reason == value("reason") && reason == json["reason"].as_str().unwrap_or_default();
    Ok((
        [
            state.to_owned(),
            value("state"),
            json["state"].as_str().unwrap_or_default().to_owned(),
        ],
        if is_same { reason } else { String::new() },
    ))
}

fn is_degraded(guest: &Guest) -> Result<()> {
    let (states, reason) = shown(guest)?;
    ensure!(
        states == ["degraded"; 3] && reason.contains("driver may move"),
        "{states:?}: {reason:?}"
    );
    Ok(())
}

fn evictable_as_swap(kernel: &Kernel) -> Result<()> {
    let guest = boot(kernel, "evictable")?;
    for (lines, word) in [(NVIDIA, "pinned"), (INTEGRATED, "evictable")] {
        shim(&guest, lines)?;
        let told = residency(&guest)?;
        ensure!(told == [word; 4], "{told:?} in place of {word}");
    }
    guest.refused(
        &format!("vramctl add v {OPTIONS} --swap"),
        1,
        &["'v' is no safe swap", "--allow-evictable"],
    )?;
    guest.nothing_left()?;
    // The standby has half of it by the engines alone, and is to map it under the storm.
    shim(&guest, &format!("{INTEGRATED}\nmaps 2"))?;
    let added = guest.sh_timeout(&format!("vramctl add v {OPTIONS}"), Duration::from_secs(90))?;
    let added = added.ok()?;
    let path = added.stdout.trim();
    ensure!(
        added.stderr.lines().count() == 1 && added.stderr.contains("no safe swap"),
        "it warns: {added}"
    );
    let show = guest.show("v")?;
    ensure!(show["residency"] == "evictable", "{show}");
    guest.refused(
        "vramctl swap on v",
        1,
        &["'v' is no safe swap", "--allow-evictable"],
    )?;
    guest.wait_whole("v")?;
    shim(&guest, INTEGRATED)?;
    ensure!(shown(&guest)?.0 == ["live"; 3], "{:?}", shown(&guest)?);
    let copy = show["copy"].clone();

    // Nothing stops swapon(8): the device sees it by what is written.
    guest.must(&format!("mkswap -q {path} && swapon {path}"))?;
    guest.must(
        "echo +memory > /sys/fs/cgroup/cgroup.subtree_control; mkdir -p /sys/fs/cgroup/small; \
         echo 40M > /sys/fs/cgroup/small/memory.max",
    )?;
    let hog = guest.spawn_sh(&format!("export HOG_STOP=/tmp/stop; {STORM} --rounds 1000"))?;
    guest.wait_state("v", "degraded", 60)?;
    is_degraded(&guest)?;
    // Its worker dies under a storm, and its supervisor: what it was it still is.
    guest.must_within("vramtest kill-worker v --times 1 --whole", 200)?;
    is_degraded(&guest)?;
    let end = Instant::now() + Duration::from_secs(60);
    while guest.show("v")?["copy"] != copy {
        ensure!(Instant::now() < end, "{}", guest.show("v")?);
    }
    let [supervisor, worker, _] = guest.wait_whole("v")?;
    guest.must(&format!("kill -9 {supervisor}"))?;
    guest.must_within(
        &format!(
            "until vramctl show v | grep -q 'supervisor [1-9].*worker {worker},'; do sleep 0.1; done"
        ),
        60,
    )?;
    is_degraded(&guest)?;
    guest.must("touch /tmp/stop")?;
    // And every page was right.
    hog.wait(Duration::from_secs(120))?.ok()?;
    let show = guest.show("v")?;
    let queues = show["queue"].as_array().into_iter().flatten();
    let errors: u64 = queues.filter_map(|queue| queue["errors"].as_u64()).sum();
    ensure!(errors == 0 && show["server"]["takeovers"] == 1, "{show}");
    ensure!(
        guest.vmstat("pswpin")? > 1000 && guest.vmstat("pswpout")? > 1000,
        "no storm"
    );
    guest.must_within("vramctl swap off v", 60)?;
    is_degraded(&guest)?;
    guest.must_within("vramctl swap on v --allow-evictable", 60)?;
    guest.must_within("vramctl remove v --swapoff", 60)?;
    guest.nothing_left()?;

    // With the word it is done at once.
    guest.must_within(
        &format!("vramctl add v {OPTIONS} --swap --allow-evictable 2>/dev/null"),
        90,
    )?;
    guest.must_within(STORM, 120)?;
    is_degraded(&guest)?;
    guest.must_within("vramctl remove v --swapoff", 60)?;
    guest.nothing_left()?;
    guest.end()
}

/// MiB that are free, or would be if asked for. Pages on the free lists of CPUs, tens of MiB since Linux 6.7
/// sizes those by itself, count as free for nobody (mm/page_alloc.c): they are in /proc/zoneinfo.
fn available(guest: &Guest) -> Result<i64> {
    let text = guest.must("grep MemAvailable: /proc/meminfo; grep count: /proc/zoneinfo")?;
    let number = |line: &str| line.split_whitespace().nth(1)?.parse::<i64>().ok();
    let mut numbers = text.lines().filter_map(number);
    let kib = numbers.next().context("MemAvailable")?;
    Ok((kib + numbers.sum::<i64>() * 4) >> 10)
}

/// A driver that maps less for another process than for the one that made the memory: the standby has the
/// rest by the engines alone, and maps it once it is the worker and there is room.
fn standby_maps_less(kernel: &Kernel) -> Result<()> {
    let guest = boot(kernel, "maps-less")?;
    let add = "vramctl add v --backend vulkan --gpu-reserve 0 --io-memory 4M --allow-unsafe --chunk 4M \
               --size 49104K";
    let copy = || -> Result<String> {
        let show = guest.show("v")?;
        ensure!(show["mortal"].is_null(), "{show}");
        Ok(show["copy"].as_str().unwrap_or_default().to_owned())
    };
    shim(&guest, &format!("{INTEGRATED}\nmaps 4"))?;
    let path = guest.must_within(&format!("{add} 2>/dev/null"), 120)?;
    let first = copy()?;
    ensure!(!first.contains("engines alone"), "{first}");
    guest.fill(&path, 44)?;
    // A standby is as it was made ready until it takes over; then it maps what there is room for by now, the
    // second time not before there is system memory for it.
    let some = "24M by the GPU's engines alone";
    for (room, is_short) in [("\nmaps 6", false), ("", true)] {
        let [_, worker, _] = guest.wait_whole("v")?;
        shim(&guest, &format!("{INTEGRATED}{room}"))?;
        if is_short {
            let taken = available(&guest)? - 150;
            let fill = format!("dd if=/dev/zero of=/tmp/fill bs=1M count={taken} 2>/dev/null");
            guest.must_within(&fill, 120)?;
        }
        guest.must(&format!("kill -9 {worker}"))?;
        guest.must_within(&format!("cmp -n 46137344 {path} /tmp/data"), 90)?;
        if is_short {
            guest.wait_whole("v")?;
            guest.must("sleep 6")?;
            let now = copy()?;
            ensure!(now.contains(some), "{now}: {} MiB", available(&guest)?);
            guest.must("rm /tmp/fill")?;
        }
        let end = Instant::now() + Duration::from_secs(60);
        loop {
            let now = copy()?;
            if now == first || !is_short && now.contains(some) {
                break;
            }
            ensure!(Instant::now() < end, "{now}");
        }
        guest.must_within(&format!("cmp -n 46137344 {path} /tmp/data"), 90)?;
        guest.must_within(
            &format!("dd if=/tmp/data of={path} bs=1M oflag=direct 2>/dev/null"),
            60,
        )?;
    }
    guest.must("vramctl remove v")?;
    guest.nothing_left()?;
    guest.end()
}

fn failed_add(kernel: &Kernel) -> Result<()> {
    let guest = boot(kernel, "failed-add")?;
    shim(&guest, INTEGRATED)?;
    let many = "vramctl add v --backend vulkan --gpu-reserve 0 --io-memory 4M --allow-unsafe \
                --size 512M --chunk 2M";
    let add =
        "vramctl add v --backend vulkan --gpu-reserve 0 --io-memory 4M --allow-unsafe --chunk 16M";
    // What stays in caches for good is there from now on.
    guest.must_within(&format!("{add} --size 128M && vramctl remove v"), 90)?;
    guest.nothing_left()?;
    let before = available(&guest)?;
    let leaves_nothing = |script: &str, words: &[&str]| -> Result<()> {
        guest.refused(script, 1, words)?;
        guest.nothing_left()?;
        let missing = before - available(&guest)?;
        ensure!(missing < 24, "{script}: {missing} MiB are still taken");
        Ok(())
    };

    // More than the GPU has, by what it tells of itself; more than a software device may take.
    leaves_nothing(&format!("{add} --size 3G"), &["does not fit"])?;
    shim(&guest, "")?;
    leaves_nothing(
        &format!("{add} --size 1900M --gpu 0 --allow-cpu-device"),
        &["does not fit"],
    )?;
    // The driver gives less than it told: after 20 of 33 chunks.
    shim(&guest, &format!("{INTEGRATED}\nallocations 20"))?;
    leaves_nothing(
        &format!("{add} --size 512M"),
        &["no more memory", "320M of the", "given back"],
    )?;
    // It has given all, and hands none of it on.
    shim(&guest, &format!("{INTEGRATED}\nexports 20"))?;
    leaves_nothing(&format!("{add} --size 512M"), &["no descriptor of memory"])?;
    shim(&guest, INTEGRATED)?;
    // More descriptors than may be open, whichever process meets the limit.
    leaves_nothing(
        &format!("ulimit -n 1100; {many}"),
        &["257 chunks need 1284 open files and 1100 are allowed"],
    )?;
    // All memory is there and written, and the driver of the disk refuses.
    guest.add(
        "other",
        "--backend host --size 32M --io-memory 4M --allow-unsafe --id 7",
    )?;
    guest.refused(
        &format!("{add} --size 512M --id 7"),
        1,
        &["device 7 exists already"],
    )?;
    ensure!(
        guest.show("other")?["state"] == "live",
        "what had the number has it still"
    );
    guest.must("vramctl remove other")?;
    guest.nothing_left()?;
    ensure!(before - available(&guest)? < 24, "memory is still taken");

    // And none of this stands in the way: as many files as the soft limit does not allow.
    guest.must_within(&format!("ulimit -Sn 512; {many}"), 90)?;
    let [_, worker, _] = guest.wait_whole("v")?;
    ensure!(guest.show("v")?["mortal"].is_null(), "{}", guest.show("v")?);
    guest.must(&format!("kill -9 {worker}"))?;
    let [supervisor, ..] = guest.wait_whole("v")?;
    guest.must(&format!("kill -9 {supervisor}"))?;
    guest.must_within(
        "until vramctl show v | grep -q 'supervisor [1-9]'; do sleep 0.1; done",
        60,
    )?;
    guest.wait_whole("v")?;
    guest.must("vramctl remove v")?;
    guest.nothing_left()?;
    ensure!(before - available(&guest)? < 24, "memory is still taken");
    guest.end()
}
