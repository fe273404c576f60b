//! A device whose memory is gone: every request ends with EIO, in bounded time, and it can be removed.

use std::time::Duration;

use anyhow::{Result, ensure};
use vmrig::{Device, Kernel};

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    ("loss::unplugged", On::Every, unplugged),
    (
        "loss::unplugged_under_swap",
        On::Newest,
        unplugged_under_swap,
    ),
    ("loss::mapping_taken_away", On::Every, mapping_taken_away),
    ("loss::copy_that_hangs", On::Newest, copy_that_hangs),
    ("loss::canary_overwritten", On::Newest, canary_overwritten),
    ("loss::driver_lost", On::Newest, driver_lost),
];

const OPTIONS: &str = "--size max --io-memory 4M --allow-unsafe";
/// Longer than anything here may take.
const LIMIT: Duration = Duration::from_secs(30);

/// Every request ends with EIO, it is said once, and nothing is left after the removal.
fn is_lost(guest: &Guest, path: &str, reason: &str) -> Result<()> {
    guest.must_within(
        "until vramctl show d --json | grep -q '\"state\": \"lost\"'; do sleep 0.2; done",
        30,
    )?;
    let show = guest.show("d")?;
    ensure!(
        show["reason"]
            .as_str()
            .is_some_and(|text| text.contains(reason)),
        "{show}"
    );
    let list = guest.must("vramctl list --noheadings -o NAME,STATE")?;
    ensure!(list.split_whitespace().eq(["d", "lost"]), "{list}");
    for command in [
        format!("dd if={path} of=/dev/null bs=4k count=1 iflag=direct"),
        format!("dd if={path} of=/dev/null bs=1M skip=8 count=1 iflag=direct"),
        format!("dd if=/dev/zero of={path} bs=64k count=1 oflag=direct"),
    ] {
        let out = guest.sh_timeout(&command, LIMIT)?;
        ensure!(
            !out.success() && out.stderr.contains("Input/output error"),
            "{command}: {out}"
        );
    }
    let said = guest.must("dmesg | grep -c 'device memory LOST'")?;
    ensure!(said == "1", "said {said} times");
    guest.must_within("vramctl remove d", 60)?;
    guest.nothing_left()
}

fn unplugged(kernel: &Kernel) -> Result<()> {
    let files = tempfile::tempdir()?;
    let guest = Guest::boot(kernel, "unplugged", 16, |vm| {
        vm.hotplug_ports(1).tools(&["dd", "fio"])
    })?;
    let device = Device::Ivshmem {
        size_mib: 64,
        file: files.path().join("plugged"),
    };
    let address = guest.plug(&device)?;
    let path = guest.add("d", &format!("--gpu {address} {OPTIONS}"))?;
    guest.must(&format!(
        "dd if=/dev/urandom of={path} bs=1M count=8 oflag=direct 2>/dev/null"
    ))?;
    // Requests are on their way when it goes.
    let busy = guest.spawn_sh(&format!(
        "fio --name=x --filename={path} --direct=1 --ioengine=io_uring --iodepth=16 --rw=randrw --bs=16k \
         --size=8M --time_based --runtime=60 --thread --output-format=terse"
    ))?;
    guest.must_within(
        "until vramctl show d --json | tr -d ' \\n' | grep -q '\"reads\":[1-9][0-9][0-9]'; do sleep 0.2; done",
        60,
    )?;
    guest.unplug(&address)?;
    let out = busy.wait(Duration::from_secs(60))?;
    ensure!(!out.success(), "it must see the loss: {out}");
    is_lost(&guest, &path, "PCI function")?;
    // The next one starts with nothing of this.
    let address = guest.plug(&Device::Ivshmem {
        size_mib: 64,
        file: files.path().join("other"),
    })?;
    guest.add("d", &format!("--gpu {address} {OPTIONS}"))?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

/// What was swapped is gone: whoever touches it gets SIGBUS, and the machine goes on.
fn unplugged_under_swap(kernel: &Kernel) -> Result<()> {
    let files = tempfile::tempdir()?;
    let guest = Guest::boot(kernel, "unplugged-swap", 16, |vm| {
        vm.hotplug_ports(1)
            .panic_on_hung_task(Duration::from_secs(60))
    })?;
    let address = guest.plug(&Device::Ivshmem {
        size_mib: 256,
        file: files.path().join("plugged"),
    })?;
    guest.add("d", &format!("--gpu {address} {OPTIONS} --swap"))?;
    // Pushed out by a limit of its cgroup; there is memory enough to bring it all back.
    guest.must(
        "echo +memory > /sys/fs/cgroup/cgroup.subtree_control; mkdir -p /sys/fs/cgroup/small; \
         echo 40M > /sys/fs/cgroup/small/memory.high; mkfifo /tmp/go",
    )?;
    let keeper = guest.spawn_sh(
        "echo $$ > /sys/fs/cgroup/small/cgroup.procs; exec vramtest hog --mib 80 --keep < /tmp/go",
    )?;
    let opener = guest.spawn_sh("exec sleep 1000 > /tmp/go")?;
    guest.must_within(
        "while ! grep -q pswpout\\ [1-9][0-9][0-9][0-9] /proc/vmstat; do sleep 0.2; done",
        60,
    )?;
    guest.unplug(&address)?;
    guest.must_within(
        "until vramctl show d --json | grep -q '\"state\": \"lost\"'; do sleep 0.2; done",
        30,
    )?;
    guest.must("echo max > /sys/fs/cgroup/small/memory.high")?;
    // Every page that cannot be read is marked as such, and swapoff goes on.
    guest.must_within("vramctl remove d --swapoff", 120)?;
    guest.nothing_left()?;
    if keeper.try_wait()?.is_none() {
        guest.must("echo > /tmp/go")?;
    }
    let out = keeper.wait(Duration::from_secs(60))?;
    ensure!(
        !out.success(),
        "lost memory must not look like memory: {out}"
    );
    opener.kill(libc::SIGKILL)?;
    guest.end()
}

/// The pages behind the mapping go: the next access raises SIGBUS.
fn mapping_taken_away(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "taken-away", 16, |vm| vm.tools(&["dd", "truncate"]))?;
    let path = guest.add(
        "d",
        "--backend host --size 32M --io-memory 4M --allow-unsafe --checksum",
    )?;
    guest.must(&format!(
        "dd if=/dev/urandom of={path} bs=1M count=8 oflag=direct 2>/dev/null"
    ))?;
    let pid = guest.show("d")?["server"]["worker"].clone();
    guest.must(&format!(
        "for fd in /proc/{pid}/fd/*; do case $(readlink $fd) in *ublk-vram-chunk*) \
         truncate -s 4M $fd;; esac; done"
    ))?;
    let out = guest.sh_timeout(
        &format!("dd if={path} of=/dev/null bs=64k skip=80 count=1 iflag=direct"),
        LIMIT,
    )?;
    ensure!(out.stderr.contains("Input/output error"), "{out}");
    ensure!(
        guest.show("d")?["server"]["worker"] == pid,
        "the worker lives"
    );
    is_lost(&guest, &path, "SIGBUS")?;
    guest.end()
}

/// A copy engine that takes copies and never gives them back.
fn copy_that_hangs(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "hangs", 64, |vm| vm.tools(&["dd", "blkdiscard"]))?;
    let options = "--queues 1 --lab-fault --lab-copy-limit 3";
    let path = guest.add("d", &format!("{} {OPTIONS} {options}", guest.gpu(0)))?;
    guest.must(&format!(
        "dd if=/dev/urandom of={path} bs=1M count=8 oflag=direct 2>/dev/null; vramctl fault d hold"
    ))?;
    let held: Vec<_> = [
        format!("dd if={path} of=/dev/null bs=64k count=1 iflag=direct"),
        format!("dd if=/dev/zero of={path} bs=64k count=1 seek=9 oflag=direct"),
        format!(
            "blkdiscard -o 4194304 -l 1048576 {path} || dd if={path} bs=4k count=1 iflag=direct"
        ),
    ]
    .iter()
    .map(|command| guest.spawn_sh(command))
    .collect::<vmrig::Result<_>>()?;
    for process in held {
        let out = process.wait(LIMIT)?;
        ensure!(
            !out.success() && out.stderr.contains("Input/output error"),
            "{out}"
        );
    }
    // What comes back now finds nobody, and no memory that is used for anything else.
    guest.must("vramctl release d")?;
    is_lost(&guest, &path, "not completed")?;
    guest.end()
}

/// Somebody else wrote over the memory, or the card was reset: no bus is gone, and all the same
/// nothing in it can be believed.
fn canary_overwritten(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "canary", 64, |vm| vm.tools(&["dd"]))?;
    let path = guest.add("d", &format!("{} {OPTIONS}", guest.gpu(0)))?;
    guest.overwrite_bar(0, &vec![0; 64 << 20])?;
    // Nobody reads: it is found all the same.
    is_lost(&guest, &path, "headers")?;
    guest.end()
}

/// The driver loses the GPU: one other process looks at the memory, and serves it if it is as it was.
fn driver_lost(kernel: &Kernel) -> Result<()> {
    let guest = Guest::boot(kernel, "driver-lost", 64, |vm| {
        vm.tools(&["dd", "fio", "cmp"])
    })?;
    let add = format!("{} {OPTIONS} --lab-fault", guest.gpu(0));
    let path = guest.add("d", &add)?;
    let busy = guest.spawn_sh(&format!(
        "fio --name=x --filename={path} --direct=1 --ioengine=io_uring --iodepth=16 --rw=randwrite --bs=8k \
         --size=24M --loops=8 --verify=crc32c --verify_fatal=1 --thread --output-format=terse"
    ))?;
    guest.must_within(
        "until vramctl show d --json | tr -d ' \n' | grep -q '\"writes\":[1-9][0-9][0-9]'; do sleep 0.2; done",
        60,
    )?;
    let worker = guest.show("d")?["server"]["worker"].clone();
    guest.wait_whole("d")?;
    guest.must("vramctl fault d driver-lost")?;
    guest.must_within(
        "until vramctl show d | grep -q 'GPU lost:.*1 times by its driver'; do sleep 0.2; done",
        60,
    )?;
    guest.wait_whole("d")?;
    // Nobody saw an error, and every byte is what was written.
    busy.wait(Duration::from_secs(200))?.ok()?;
    let server = guest.show("d")?["server"].clone();
    ensure!(
        server["takeovers"] == 1 && server["driver_losses"] == 1 && server["worker"] != worker,
        "{server}"
    );
    let said = guest.must("dmesg | grep -c 'driver lost it'")?;
    ensure!(said == "1", "said {said} times");
    // The other one loses it too, at once: that is the end.
    guest.must("vramctl fault d driver-lost")?;
    let out = guest.sh_timeout(
        &format!("dd if={path} of=/dev/null bs=64k count=1 iflag=direct"),
        LIMIT,
    )?;
    ensure!(out.stderr.contains("Input/output error"), "{out}");
    is_lost(&guest, &path, "driver lost the GPU")?;

    // Memory that is not as it was: a part of it is enough to believe none of it.
    let path = guest.add("d", &add)?;
    guest.must(&format!(
        "dd if=/dev/urandom of={path} bs=1M count=48 oflag=direct 2>/dev/null"
    ))?;
    guest.wait_whole("d")?;
    guest.overwrite_bar(4 << 20, &vec![0x5a; 2 << 20])?;
    guest.must("vramctl fault d driver-lost")?;
    let out = guest.sh_timeout(
        &format!("dd if={path} of=/dev/null bs=64k skip=960 count=1 iflag=direct"),
        LIMIT,
    )?;
    ensure!(out.stderr.contains("Input/output error"), "{out}");
    guest.must_within(
        "until vramctl show d --json | grep -q '\"state\": \"lost\"'; do sleep 0.2; done",
        30,
    )?;
    let reason = guest.show("d")?["reason"].clone();
    ensure!(
        reason
            .as_str()
            .is_some_and(|reason| reason.contains("do not fit their checksums")),
        "{reason}"
    );
    guest.must_within("vramctl remove d", 60)?;
    guest.nothing_left()?;
    guest.end()
}
