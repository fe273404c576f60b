//! `vramctl show NAME`: everything about one device.

use std::fmt::Write as _;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};
use ublk_vram::Result;
use ublk_vram::device::{DeviceInfo, MemoryInfo, QueueInfo, ServerInfo, StaticInfo};
use ublk_vram::safety::{self, Root, Survey};
use ublk_vram::size::human;

use super::list::json_swap;
use super::paths;
use crate::args::ShowArgs;
use crate::devices::{Device, Devices, kernel_name};
use crate::output;
use crate::table::{Align, Table};

/// Version of the JSON form.
const JSON_VERSION: u32 = 1;

pub fn run(args: &ShowArgs) -> Result<()> {
    let device = Devices::system()?.find(&args.name)?;
    // That the users cannot be seen is no reason to show nothing.
    let users = device.fixed.as_ref().and_then(|fixed| {
        survey(fixed)
            .inspect_err(|error| output::warning(&error.message))
            .ok()
    });
    if args.json {
        return output::json(&document(&device, users.as_ref()));
    }
    output::data(&text(&device, users.as_ref()))
}

/// Who uses the disk, its own server left out.
fn survey(fixed: &StaticInfo) -> Result<Survey> {
    let number = (fixed.major, fixed.minor);
    safety::holders(
        &Root::default(),
        number,
        kernel_name(fixed),
        &[fixed.pid, fixed.worker],
    )
}

fn document(device: &Device, users: Option<&Survey>) -> Value {
    let mut shown = match (&device.info, &device.fixed) {
        (Some(info), _) => json!(info),
        (None, Some(fixed)) => json!(fixed),
        (None, None) => json!({ "name": device.name }),
    };
    if let Some(fields) = shown.as_object_mut() {
        fields.insert("state".into(), json!(device.state.as_str()));
        fields.insert("problem".into(), json!(device.problem));
        fields.insert("swap".into(), json!(device.swap.as_ref().map(json_swap)));
        fields.insert("used_by".into(), json!(users.map(used_by)));
        fields.insert("not_seen".into(), json!(users.map(|users| &users.blind)));
    }
    json!({ "version": JSON_VERSION, "device": shown })
}

/// One text for each user of the disk.
fn used_by(users: &Survey) -> Vec<String> {
    users
        .holders
        .iter()
        .map(|holder| safety::describe(std::slice::from_ref(holder)))
        .collect()
}

/// `key: value`, one a line, and a table of the queues.
fn text(device: &Device, users: Option<&Survey>) -> String {
    let mut block = Block::default();
    block.line("name", &device.name);
    block.line("state", device.state.as_str());
    let reason = device.info.as_ref().and_then(|info| info.reason.clone());
    if let Some(reason) = reason.or_else(|| device.problem.clone()) {
        block.line("reason", reason);
    }
    if let Some(fixed) = &device.fixed {
        describe_fixed(&mut block, fixed);
    }
    match &device.swap {
        Some(swap) => block.line(
            "swap",
            format!(
                "{} of {} used, priority {}",
                human(swap.used),
                human(swap.size),
                swap.priority
            ),
        ),
        None => block.line("swap", "no"),
    }
    if let Some(users) = users {
        block.line("used by", safety::describe(&users.holders));
        for blind in &users.blind {
            block.line("not seen", blind);
        }
    }
    if let Some(info) = &device.info {
        describe_server(&mut block, &info.server);
        describe_memory(&mut block, &info.memory);
        describe_checksum(&mut block, info);
    }
    let mut text = block.render();
    if let Some(info) = &device.info {
        text.push('\n');
        text.push_str(&queues(info));
        if let Some(paths) = &info.carried {
            text.push('\n');
            text.push_str(&paths::costs(paths));
            text.push('\n');
            text.push_str(&paths::choices(paths));
        }
    }
    text
}

fn describe_fixed(block: &mut Block, fixed: &StaticInfo) {
    block.line(
        "device",
        format!("{} ({}:{})", fixed.device, fixed.major, fixed.minor),
    );
    block.line(
        "size",
        format!("{} ({} bytes)", human(fixed.size), fixed.size),
    );
    let gpu = fixed
        .gpu
        .as_ref()
        .map(|gpu| format!(" on {gpu}"))
        .unwrap_or_default();
    block.line("backend", format!("{}{gpu}", fixed.backend));
    if let Some(residency) = &fixed.residency {
        block.line("residency", residency);
    }
    block.line("copies by", &fixed.copy);
    block.line(
        "chunks",
        format!("{} of {}", fixed.chunks, human(fixed.chunk_size)),
    );
    block.line(
        "queues",
        format!("{} of depth {}", fixed.queues, fixed.depth),
    );
    block.line("largest request", human(u64::from(fixed.max_io)));
    block.line(
        "ublk features",
        if fixed.features.is_empty() {
            "none".into()
        } else {
            fixed.features.join(" ")
        },
    );
    block.line("uuid", &fixed.uuid);
    block.line("server", format!("pid {}", fixed.pid));
    if let Some(why) = &fixed.mortal {
        block.line("survives", format!("no: {why}"));
    }
    let since = SystemTime::UNIX_EPOCH + Duration::from_secs(fixed.since);
    if let Ok(age) = since.elapsed() {
        block.line("up", duration(age));
    }
}

fn describe_server(block: &mut Block, server: &ServerInfo) {
    let process = |pid: i32| match pid {
        0 => "none".to_owned(),
        pid => pid.to_string(),
    };
    block.line(
        "processes",
        format!(
            "supervisor {}, worker {}, standby {}",
            process(server.supervisor),
            process(server.worker),
            process(server.standby)
        ),
    );
    if server.takeovers > 0 {
        block.line(
            "takeovers",
            format!(
                "{}, the last in {} ms, the longest in {} ms",
                server.takeovers,
                server.last_pause_us / 1000,
                server.longest_pause_us / 1000
            ),
        );
    }
    if server.driver_losses > 0 {
        let times = server.driver_losses;
        block.line("GPU lost", format!("{times} times by its driver"));
    }
}

fn describe_memory(block: &mut Block, memory: &MemoryInfo) {
    block.line(
        "costs",
        format!(
            "{} of system memory ({} of it I/O buffers)",
            human(memory.cost),
            human(memory.arena)
        ),
    );
    block.line(
        "server's memory",
        format!(
            "{} locked, {} resident, {} swapped{}",
            human(memory.locked),
            human(memory.resident),
            human(memory.swapped),
            if memory.swapped > 0 {
                " (must be none: this server can hang)"
            } else {
                ""
            }
        ),
    );
}

fn describe_checksum(block: &mut Block, info: &DeviceInfo) {
    let Some(checksum) = &info.checksum else {
        block.line("checksums", "none: a flipped bit is not noticed");
        return;
    };
    let sum = |of: fn(&QueueInfo) -> u64| info.queue.iter().map(of).sum::<u64>();
    let mut line = format!(
        "CRC32C of 4K blocks in {}, {} bad",
        human(checksum.bytes),
        sum(|queue| queue.bad_blocks)
    );
    if checksum.left_writing > 0 {
        // Writing to a String does not fail.
        let _ = write!(
            line,
            ", {} left half written by a server that died",
            checksum.left_writing
        );
    }
    if checksum.unverified {
        line.push_str(", unverified: made again from what is in the memory");
    }
    block.line("checksums", line);
}

/// The counters of each queue, and their sums.
fn queues(info: &DeviceInfo) -> String {
    type Counter = fn(&QueueInfo) -> u64;
    let counters: [(&'static str, Counter, bool); 11] = [
        ("READS", |q| q.reads, false),
        ("READ", |q| q.read_bytes, true),
        ("WRITES", |q| q.writes, false),
        ("WRITTEN", |q| q.write_bytes, true),
        ("SWAP-WRITES", |q| q.swap_writes, false),
        ("ZEROED", |q| q.zero_bytes, true),
        ("ERRORS", |q| q.errors, false),
        ("REISSUED", |q| q.reissued, false),
        ("BATCHES", |q| q.batches, false),
        ("IN-FLIGHT", |q| q.in_flight, false),
        ("MOST", |q| q.most_in_flight, false),
    ];
    let columns = [("QUEUE", Align::Right), ("TID", Align::Right)].into_iter();
    let mut table = Table::new(columns.chain(counters.map(|(name, ..)| (name, Align::Right))));
    let show = |bytes: bool, value: u64| {
        if bytes {
            human(value)
        } else {
            value.to_string()
        }
    };
    for (number, queue) in info.queue.iter().enumerate() {
        let head = [number.to_string(), queue.tid.to_string()];
        table.row(
            head.into_iter()
                .chain(counters.map(|(_, of, bytes)| show(bytes, of(queue)))),
        );
    }
    if info.queue.len() > 1 {
        let head = ["all".to_owned(), String::new()];
        table.row(head.into_iter().chain(counters.map(|(_, of, bytes)| {
            show(
                bytes,
                info.queue.iter().map(of).fold(0u64, u64::wrapping_add),
            )
        })));
    }
    table.render(true)
}

/// `3 d 4 h`, `5 min 6 s`, `7 s`.
fn duration(age: Duration) -> String {
    let seconds = age.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

/// Lines of `key: value`, the values under each other.
#[derive(Default)]
struct Block(Vec<(&'static str, String)>);

impl Block {
    fn line(&mut self, key: &'static str, value: impl ToString) {
        self.0.push((key, value.to_string()));
    }

    fn render(&self) -> String {
        let width = self
            .0
            .iter()
            .map(|(key, _)| key.len() + 1)
            .max()
            .unwrap_or(0);
        self.0.iter().fold(String::new(), |mut text, (key, value)| {
            // Writing to a String does not fail.
            let _ = writeln!(text, "{:<width$} {value}", format!("{key}:"));
            text
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Seen;
    use ublk_vram::device::DeviceState;

    fn device() -> Device {
        let info: DeviceInfo = serde_json::from_value(json!({
            "name": "fast", "device": "/dev/ublkb0", "id": 0, "major": 259, "minor": 3,
            "size": 1u64 << 30, "backend": "host", "gpu": null,
            "uuid": "8f0d3c5e-3f0b-4a52-9c1e-0a4b6f2d7e11", "queues": 2, "depth": 64,
            "max_io": 262144, "chunk_size": 64 << 20, "chunks": 17, "features": [],
            "copy": "avx2", "pid": 4711, "since": 0, "state": "live", "reason": null,
            "memory": {"cost": 44 << 20, "locked": 46 << 20, "resident": 46 << 20, "swapped": 0,
                       "arena": 32 << 20},
            "checksum": {"bytes": 2 << 20, "left_writing": 5, "unverified": false},
            "queue": [],
        }))
        .unwrap();
        let queue = QueueInfo {
            tid: 12,
            reads: 5,
            read_bytes: 20480,
            bad_blocks: 1,
            ..QueueInfo::default()
        };
        let info = DeviceInfo {
            queue: vec![queue, queue],
            ..info
        };
        Device {
            name: "fast".parse().unwrap(),
            state: Seen::State(DeviceState::Live),
            fixed: Some(info.fixed.clone()),
            info: Some(info),
            swap: None,
            problem: None,
        }
    }

    #[test]
    fn keys_and_queues() {
        let text = text(&device(), Some(&Survey::default()));
        for line in [
            "name:            fast\n",
            "device:          /dev/ublkb0 (259:3)\n",
            "size:            1G (1073741824 bytes)\n",
            "used by:         nobody\n",
            "costs:           44M of system memory (32M of it I/O buffers)\n",
            "checksums:       CRC32C of 4K blocks in 2M, 2 bad, 5 left half written by a server that died\n",
            "QUEUE  TID  READS  READ",
            "\n  all    -     10   40K",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }

    #[test]
    fn a_dead_device_shows_what_is_left() {
        let device = Device {
            state: Seen::State(DeviceState::Dead),
            info: None,
            fixed: None,
            ..device()
        };
        assert_eq!(text(&device, None), "name:  fast\nstate: dead\nswap:  no\n");
        let json = document(&device, None);
        assert_eq!(json["device"]["state"], "dead");
        assert_eq!(json["version"], 1);
    }

    #[test]
    fn json_has_all_of_the_servers_answer() {
        let json = document(&device(), Some(&Survey::default()));
        assert_eq!(json["device"]["memory"]["cost"], 44 << 20);
        assert_eq!(json["device"]["queue"][1]["tid"], 12);
        assert_eq!(json["device"]["used_by"], json!([]));
        assert_eq!(json["device"]["state"], "live");
    }

    #[test]
    fn ages() {
        for (seconds, text) in [
            (7, "7 s"),
            (306, "5 min 6 s"),
            (3660, "1 h 1 min"),
            (273_600, "3 d 4 h"),
        ] {
            assert_eq!(duration(Duration::from_secs(seconds)), text);
        }
    }
}
