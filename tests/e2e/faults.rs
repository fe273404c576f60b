//! With the fault layer around the backend: overlap, order, and errors that reach the caller.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use vmrig::Kernel;

use crate::guest::Guest;
use crate::{Case, On};

pub const CASES: &[Case] = &[
    (
        "faults::thirty_two_in_flight",
        On::Newest,
        thirty_two_in_flight,
    ),
    ("faults::one_held_the_other_completes", On::Newest, one_held),
    (
        "faults::errors_reach_the_caller",
        On::Newest,
        errors_reach_the_caller,
    ),
];

fn boot(kernel: &Kernel, name: &str) -> Result<(Guest, String)> {
    let guest = Guest::boot(kernel, name, 64, |vm| vm.tools(&["fio", "dd"]))?;
    let options = "--size max --io-memory 4M --queues 1 --allow-unsafe --lab-fault";
    let path = guest.add("d", &format!("{} {options}", guest.gpu(0)))?;
    Ok((guest, path))
}

fn queue(guest: &Guest, key: &str) -> Result<u64> {
    guest.show("d")?["queue"][0][key]
        .as_u64()
        .with_context(|| format!("no {key} in show"))
}

fn thirty_two_in_flight(kernel: &Kernel) -> Result<()> {
    let (guest, path) = boot(kernel, "overlap")?;
    guest.must("vramctl fault d hold --writes")?;
    let writer = guest.spawn_sh(&format!(
        "fio --name=w --filename={path} --direct=1 --ioengine=io_uring --iodepth=32 --rw=write --bs=64k \
         --size=2M --verify=crc32c --do_verify=0 --thread --output-format=terse"
    ))?;
    guest.must_within(
        "until vramctl show d --json | tr -d ' \\n' | grep -q '\"in_flight\":32,'; do sleep 0.2; done",
        60,
    )?;
    ensure!(
        queue(&guest, "most_in_flight")? == 32,
        "{}",
        guest.show("d")?
    );
    ensure!(
        queue(&guest, "writes")? == 0,
        "nothing may complete while all copies are held"
    );
    guest.must("vramctl release d --reverse")?;
    writer.wait(Duration::from_secs(60))?.ok()?;
    guest.must_within(
        &format!(
            "fio --name=w --filename={path} --direct=1 --ioengine=io_uring --iodepth=32 --rw=write --bs=64k \
             --size=2M --verify=crc32c --verify_only --verify_fatal=1 --thread --output-format=terse"
        ),
        60,
    )?;
    ensure!(
        queue(&guest, "largest_batch")? > 1,
        "batches of more than one: {}",
        guest.show("d")?
    );
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

fn one_held(kernel: &Kernel) -> Result<()> {
    let (guest, path) = boot(kernel, "one-held")?;
    guest.must("vramctl fault d hold --count 1 --from 0 --to 4096")?;
    let held = guest.spawn_sh(&format!(
        "dd if={path} of=/dev/null bs=4k count=1 iflag=direct 2>&1"
    ))?;
    guest.must_within("until vramctl show d --json | tr -d ' \\n' | grep -q '\"in_flight\":1,'; do sleep 0.2; done", 30)?;
    guest.must_within(
        &format!("dd if=/dev/urandom of={path} bs=4k count=64 seek=16 oflag=direct 2>/dev/null"),
        20,
    )?;
    ensure!(held.try_wait()?.is_none(), "the held read must still wait");
    // A busy device is not removed, and the refusal does not wait for the held copy.
    guest.refused("vramctl remove d", 1, &["open by dd"])?;
    guest.must("vramctl release d")?;
    held.wait(Duration::from_secs(20))?.ok()?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    guest.end()
}

fn errors_reach_the_caller(kernel: &Kernel) -> Result<()> {
    let (guest, path) = boot(kernel, "errors")?;
    for (rule, command) in [
        (
            "fail --reads",
            format!("dd if={path} of=/dev/null bs=4k count=1 iflag=direct"),
        ),
        (
            "short --reads",
            format!("dd if={path} of=/dev/null bs=64k count=1 iflag=direct"),
        ),
        (
            "fail --writes",
            format!("dd if=/dev/zero of={path} bs=4k count=1 oflag=direct"),
        ),
        (
            "short --writes",
            format!("dd if=/dev/zero of={path} bs=64k count=1 oflag=direct"),
        ),
    ] {
        guest.must(&format!("vramctl fault d {rule} --count 1"))?;
        let out = guest.sh_timeout(&command, Duration::from_secs(20))?;
        ensure!(
            !out.success() && out.stderr.contains("Input/output error"),
            "{rule}: {out}"
        );
        guest.must(&command)?;
    }
    ensure!(queue(&guest, "errors")? == 4, "{}", guest.show("d")?);
    guest.must("vramctl fault d delay --delay-ms 300 --count 1")?;
    guest.must(&format!(
        "dd if={path} of=/dev/null bs=4k count=1 iflag=direct"
    ))?;
    guest.must("vramctl remove d")?;
    guest.nothing_left()?;
    // The injected errors are all that the kernel may have seen.
    guest.end()
}
