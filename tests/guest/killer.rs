//! Somebody who kills a device's worker again and again, while requests are inside it, and sees to it
//! that each time another one takes over.

use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::mman::{MlockAllFlags, mlockall};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use ublk_vram::control::{Call, Client, FaultAction, FaultRule, RunDir};
use ublk_vram::device::{DeviceInfo, DeviceName, DeviceState};

/// How long a takeover may take on an emulated machine under pressure.
const LIMIT: Duration = Duration::from_secs(90);
/// After so long the kernel is asked what all its tasks and workers wait for.
const LATE: Duration = Duration::from_secs(30);
/// How long a held copy is waited for; a device that is idle at that moment has none.
const HELD_LIMIT: Duration = Duration::from_secs(3);

pub struct Plan {
    pub name: DeviceName,
    pub times: u32,
    /// Hold some copies before, during or after the copy, in turn.
    pub hold: bool,
    /// Kill only when a standby is ready.
    pub whole: bool,
    pub pause: Duration,
}

pub fn call(name: &DeviceName, call: &Call) -> anyhow::Result<serde_json::Value> {
    let mut client = Client::connect(&RunDir::system().socket(name), LIMIT)?;
    Ok(client.call(call, LIMIT)?.into_result()?)
}

pub fn show(name: &DeviceName) -> anyhow::Result<DeviceInfo> {
    Ok(serde_json::from_value(call(name, &Call::Show {})?)?)
}

/// Live, or live with something that should not be.
fn is_served(info: &DeviceInfo) -> bool {
    matches!(info.state, DeviceState::Live | DeviceState::Degraded)
}

/// Looks until `is_so`.
fn wait(
    name: &DeviceName,
    what: &str,
    limit: Duration,
    is_so: impl Fn(&DeviceInfo) -> bool,
) -> anyhow::Result<DeviceInfo> {
    let end = Instant::now() + limit;
    loop {
        let info = show(name)?;
        if is_so(&info) {
            return Ok(info);
        }
        if Instant::now() >= end {
            bail!("{what}: {}", serde_json::to_string(&info)?);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Since when a takeover is waited for.
type Since = Mutex<Option<Instant>>;

fn set(since: &Since, value: Option<Instant>) {
    *since.lock().unwrap_or_else(PoisonError::into_inner) = value;
}

/// Has the kernel print its tasks and workqueues, once, when a takeover is late: whoever waits for it may
/// wait for memory himself by then.
fn watch(since: Arc<Since>) -> anyhow::Result<()> {
    let mut trigger = File::options()
        .write(true)
        .open("/proc/sysrq-trigger")
        .context("/proc/sysrq-trigger")?;
    std::thread::spawn(move || {
        let is_late = || {
            let since = since.lock().unwrap_or_else(PoisonError::into_inner);
            since.is_some_and(|since| since.elapsed() > LATE)
        };
        while !is_late() {
            std::thread::sleep(Duration::from_secs(1));
        }
        let _ = trigger.write(b"t");
    });
    Ok(())
}

pub fn run(plan: &Plan) -> anyhow::Result<()> {
    // It must be able to act while the disk waits for a worker.
    mlockall(MlockAllFlags::MCL_CURRENT | MlockAllFlags::MCL_FUTURE).context("mlockall")?;
    let name = &plan.name;
    let since = Arc::new(Since::default());
    watch(Arc::clone(&since))?;
    let mut pauses = Vec::new();
    for round in 0..plan.times {
        let info = wait(name, "the server is not whole", LIMIT, |info| {
            is_served(info) && (!plan.whole || info.server.standby > 0)
        })?;
        if plan.hold {
            let actions = [
                FaultAction::Hold,
                FaultAction::HoldHalf,
                FaultAction::HoldDone,
            ];
            let rule = FaultRule {
                action: actions[round as usize % actions.len()],
                reads: None,
                from: 0,
                to: None,
                count: Some(4),
                delay_ms: 0,
            };
            call(name, &Call::Fault { rule })?;
            // An idle moment holds nothing: then the kill lands without.
            let _ = wait(name, "nothing is held", HELD_LIMIT, |info| {
                info.queue.iter().any(|queue| queue.in_flight > 0)
            });
        }
        set(&since, Some(Instant::now()));
        kill(Pid::from_raw(info.server.worker), Signal::SIGKILL).context("kill")?;
        let after = wait(name, "nobody takes over", LIMIT, |now| {
            is_served(now) && now.server.takeovers > info.server.takeovers
        })?;
        set(&since, None);
        ensure!(after.server.worker != info.server.worker);
        pauses.push(after.server.last_pause_us / 1000);
        std::thread::sleep(plan.pause);
    }
    let info = show(name)?;
    let sum = |of: fn(&ublk_vram::device::QueueInfo) -> u64| info.queue.iter().map(of).sum::<u64>();
    println!(
        "{}",
        serde_json::json!({
            "kills": plan.times,
            "takeovers": info.server.takeovers,
            "reissued": sum(|queue| queue.reissued),
            "errors": sum(|queue| queue.errors),
            "pauses_ms": pauses,
        })
    );
    Ok(())
}
