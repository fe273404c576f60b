//! A kernel that can make no threads: what one is that has no memory but what it can swap out to the very
//! device that waits for its next worker.
//!
//! kthreadd, which makes every thread of the kernel, is tied to a CPU that is kept busy by a real-time
//! thread. Nothing else needs that CPU: the guest runs with `isolcpus`.

use std::path::Path;

use anyhow::{Context, ensure};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Makes every thread of the kernel (kernel/kthread.c).
const KTHREADD: Pid = Pid::from_raw(2);

/// Stalls until the file is there; makes one of that name and `.stalled` when it has begun.
pub fn run(cpu: usize, stop: &Path) -> anyhow::Result<()> {
    let mut only = CpuSet::new();
    only.set(cpu)?;
    // A share of each CPU is kept from real-time threads (sched(7)), and one for threads of no real-time
    // class (the fair server of kernel/sched/deadline.c): so kthreadd gets a real-time class, too.
    std::fs::write("/proc/sys/kernel/sched_rt_runtime_us", "-1").context("sched_rt_runtime_us")?;
    for (pid, priority) in [(Pid::from_raw(0), 2), (KTHREADD, 1)] {
        sched_setaffinity(pid, &only).with_context(|| format!("affinity of {pid}"))?;
        let parameters = libc::sched_param {
            sched_priority: priority,
        };
        // SAFETY: a valid parameter block, read during the call.
        let outcome = unsafe {
            libc::sched_setscheduler(pid.as_raw(), libc::SCHED_FIFO, &raw const parameters)
        };
        nix::errno::Errno::result(outcome).with_context(|| format!("SCHED_FIFO for {pid}"))?;
    }
    std::fs::write(stop.with_extension("stalled"), "").context("saying so")?;
    while !stop.exists() {
        for _ in 0..100_000 {
            std::hint::spin_loop();
        }
    }
    let stat = std::fs::read_to_string(format!("/proc/{KTHREADD}/stat")).context("kthreadd")?;
    let state = stat
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.chars().next());
    ensure!(state == Some('R'), "nobody wanted a thread: {stat}");
    Ok(())
}
