//! Never a wrong byte: device memory that changes by itself, and readers that meet writers.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vmrig::Kernel;

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("integrity::flipped_bit", On::Every, flipped_bit),
    (
        "integrity::without_checksums",
        On::Newest,
        without_checksums,
    ),
    ("integrity::across_kills", On::Newest, across_kills),
    (
        "integrity::reader_meets_writer",
        On::Every,
        reader_meets_writer,
    ),
    ("integrity::unverified", On::Newest, unverified),
];

const OPTIONS: &str = "--size max --io-memory 4M --allow-unsafe";
const BLOCK: u64 = 4096;

/// Flips one bit of the BAR, from outside.
fn flip(guest: &Guest, offset: u64) -> Result<()> {
    let mut byte = [0u8];
    File::open(&guest.bar_file)?.read_exact_at(&mut byte, offset)?;
    byte[0] ^= 0x20;
    guest.overwrite_bar(offset, &byte)
}

fn total(guest: &Guest, key: &str) -> Result<u64> {
    let show = guest.show("d")?;
    show["queue"]
        .as_array()
        .context("queues")?
        .iter()
        .map(|queue| {
            queue[key]
                .as_u64()
                .with_context(|| format!("{key}: {show}"))
        })
        .sum()
}

fn flipped_bit(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "flipped-bit", 64, |vm| vm.tools(&["dd", "cmp"]))?;
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    let show = guest.show("d")?;
    ensure!(
        show["checksum"]["bytes"].as_u64().is_some_and(|n| n > 0),
        "GPU memory has checksums by default: {show}"
    );
    guest.fill(&path, 8)?;
    flip(&guest, 777 * BLOCK + 1234)?;
    let read = |block: u64| {
        guest.sh_timeout(
            &format!("dd if={path} bs=4k skip={block} count=1 iflag=direct of=/tmp/block"),
            Duration::from_secs(20),
        )
    };
    for _ in 0..2 {
        let out = read(777)?;
        ensure!(
            !out.success() && out.stderr.contains("Input/output error"),
            "a flipped bit must be EIO: {out}"
        );
    }
    for block in [776, 778, 0, 2047] {
        read(block)?.ok()?;
        guest.must(&format!(
            "dd if=/tmp/data bs=4k skip={block} count=1 2>/dev/null | cmp - /tmp/block"
        ))?;
    }
    // Never written by anybody, and flipped: it must read as zeroes or not at all.
    flip(&guest, 3000 * BLOCK)?;
    ensure!(!read(3000)?.success(), "a block that was never written");
    guest.must_within(
        "until dmesg | grep -q 'bad device memory: block 777 ' && \
         dmesg | grep -q 'bad device memory: block 3000 '; do sleep 0.2; done",
        20,
    )?;
    ensure!(total(&guest, "bad_blocks")? == 3, "{}", guest.show("d")?);
    ensure!(
        guest.show("d")?["state"] == "live",
        "a bad block is no loss"
    );
    // Written again, it is good.
    guest.must(&format!(
        "dd if=/tmp/data of={path} bs=4k skip=777 seek=777 count=1 oflag=direct 2>/dev/null"
    ))?;
    guest.must(&format!(
        "dd if={path} bs=1M count=8 iflag=direct 2>/dev/null | cmp - /tmp/data"
    ))?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

/// The control of the case above: it is the checksums that notice.
fn without_checksums(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "no-checksums", 64, |vm| vm.tools(&["dd", "cmp"]))?;
    let path = guest.add("d", &format!("{} {OPTIONS} --checksum=off", guest.gpu(0)))?;
    ensure!(guest.show("d")?["checksum"].is_null(), "off is off");
    guest.fill(&path, 8)?;
    flip(&guest, 777 * BLOCK)?;
    let out = guest.sh(&format!(
        "dd if={path} bs=1M count=8 iflag=direct 2>/dev/null | cmp - /tmp/data"
    ))?;
    ensure!(out.rc == 1, "the bit is not noticed without: {out}");
    // A suspicious read is held back for the canary, and is data while that is there.
    guest.must(&format!(
        "dd if={path} bs=1M skip=16 count=1 iflag=direct 2>/dev/null | tr -d '\\000' | wc -c"
    ))?;
    ensure!(total(&guest, "canary_reads")? > 0, "{}", guest.show("d")?);
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

fn reader_meets_writer(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "reader-writer", 64, |vm| vm.tools(&["fio"]))?;
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    let common = format!(
        "--filename={path} --direct=1 --ioengine=io_uring --iodepth=8 --size=1M --thread --norandommap \
         --time_based --runtime=25 --group_reporting --output-format=terse"
    );
    // Few blocks, so that they meet all the time; the writers meet each other, too.
    guest.must_within(
        &format!(
            "fio {common} --name=w --rw=randwrite --bsrange=4k-64k --numjobs=2 --randrepeat=0 \
             --refill_buffers --name=r --rw=randread --bsrange=4k-64k --numjobs=2 --randrepeat=0 \
             --name=t --rw=randtrim --bs=16k --numjobs=1"
        ),
        120,
    )?;
    let show = guest.show("d")?;
    let (errors, bad) = (total(&guest, "errors")?, total(&guest, "bad_blocks")?);
    ensure!((errors, bad) == (0, 0), "false alarms: {show}");
    let met = total(&guest, "reread_blocks")? + total(&guest, "unchecked_blocks")?;
    ensure!(met > 0, "no read met a write: {show}");
    eprintln!(
        "reader_meets_writer: {} reads, {} writes, {} blocks read again, {} handed out unchecked",
        total(&guest, "reads")?,
        total(&guest, "writes")?,
        total(&guest, "reread_blocks")?,
        total(&guest, "unchecked_blocks")?
    );
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

/// The worker is killed again and again while readers and writers meet on the same blocks: the checksums
/// are those of the next worker, no read is a false alarm, and a bit that flips is still noticed.
fn across_kills(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "sums-kills", 64, |vm| {
        vm.tools(&["fio", "dd", "cmp"])
    })?;
    let path = guest.add("d", &format!("{} {OPTIONS} --lab-fault", guest.gpu(0)))?;
    guest.must(&format!(
        "dd if=/dev/urandom of=/tmp/data bs=1M count=4 2>/dev/null && \
         dd if=/tmp/data of={path} bs=1M seek=16 oflag=direct 2>/dev/null"
    ))?;
    let fio = guest.spawn_sh(&format!(
        "exec fio --filename={path} --direct=1 --ioengine=io_uring --iodepth=8 --size=1M --thread \
         --norandommap --time_based --runtime=600 --group_reporting --output-format=terse --randrepeat=0 --refill_buffers \
         --name=w --rw=randwrite --bsrange=4k-64k --name=r --rw=randread --bsrange=4k-64k --numjobs=2 \
         > /tmp/fio.out 2>&1"
    ))?;
    let killed = guest.must_within("vramtest kill-worker d --times 6 --hold --whole", 200)?;
    guest.wait_whole("d")?;
    ensure!(fio.try_wait()?.is_none(), "fio saw an error: {killed}");
    fio.kill(libc::SIGKILL)?;
    let show = guest.show("d")?;
    let (errors, bad) = (total(&guest, "errors")?, total(&guest, "bad_blocks")?);
    ensure!((errors, bad) == (0, 0), "false alarms: {show}");
    eprintln!(
        "across_kills: {killed}; {} blocks read again, {} unchecked, left half written {}",
        total(&guest, "reread_blocks")?,
        total(&guest, "unchecked_blocks")?,
        show["checksum"]["left_writing"]
    );
    guest.must(&format!(
        "dd if={path} bs=1M skip=16 count=4 iflag=direct 2>/dev/null | cmp - /tmp/data"
    ))?;
    flip(&guest, (16 << 20) + 5 * BLOCK)?;
    let out = guest.sh(&format!(
        "dd if={path} bs=4k skip=4101 count=1 iflag=direct of=/dev/null"
    ))?;
    ensure!(
        !out.success(),
        "a worker that took over must check too: {out}"
    );
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

/// Every process is gone and the checksums with them: they are made again from what is in the memory, and
/// what changed before is not noticed, what changes after is.
fn unverified(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "unverified", 256, |vm| vm.tools(&["dd", "cmp"]))?;
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    guest.fill(&path, 8)?;
    ensure!(guest.show("d")?["checksum"]["unverified"] == false);
    guest.kill_all("d")?;
    flip(&guest, 777 * BLOCK + 1234)?;
    guest.must_within("vramctl recover d", 90)?;
    let text = guest.must("vramctl show d")?;
    ensure!(
        text.contains("unverified: made again from what is in the memory"),
        "{text}"
    );
    // The worker dies meanwhile: the next one goes on where this one was.
    let worker = guest.show("d")?["server"]["worker"].clone();
    guest.must(&format!("kill -9 {worker}"))?;
    guest.must_within(
        "until vramctl show d --json | grep -q '\"unverified\": false'; do sleep 0.2; done",
        120,
    )?;
    ensure!(
        guest.show("d")?["server"]["worker"] != worker
            && !guest.must("vramctl show d")?.contains("unverified"),
        "{}",
        guest.show("d")?
    );
    // Delivered as it is, with the one bit; the rest is right.
    let differ = guest.sh(&format!(
        "dd if={path} bs=1M count=8 iflag=direct 2>/dev/null | cmp -l - /tmp/data"
    ))?;
    let differences: Vec<&str> = differ.stdout.split_whitespace().collect();
    ensure!(
        differ.rc == 1
            && differences.len() == 3
            && differences[0] == (777 * BLOCK + 1235).to_string(),
        "{differ}"
    );
    // From now on it is noticed, on blocks that were written and on those that never were.
    for block in [900, 60_000] {
        // A chunk of 64 MiB gives its last block to its header.
        flip(&guest, (block + block / 16_383) * BLOCK + 7)?;
        let out = guest.sh(&format!(
            "dd if={path} bs=4k skip={block} count=1 iflag=direct of=/dev/null"
        ))?;
        ensure!(out.stderr.contains("Input/output error"), "{out}");
        guest.must_within(
            &format!(
                "until dmesg | grep -q 'bad device memory: block {block} '; do sleep 0.2; done"
            ),
            20,
        )?;
    }
    ensure!(total(&guest, "bad_blocks")? == 2, "{}", guest.show("d")?);
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}
