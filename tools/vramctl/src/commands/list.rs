//! `vramctl list`: a table for people, JSON for programs, built from the same rows.

use serde_json::{Value, json};
use ublk_vram::device::QueueInfo;
use ublk_vram::safety::SwapEntry;
use ublk_vram::size::human;
use ublk_vram::{Error, Result};

use crate::args::ListArgs;
use crate::devices::{Device, Devices, kernel_name};
use crate::output;
use crate::table::{Align, NOTHING, Table};

/// Version of the JSON form.
const JSON_VERSION: u32 = 1;
/// How many of [`COLUMNS`] are shown unless told otherwise.
const DEFAULT_COLUMNS: usize = 13;

type Cell = fn(&Device, &dyn Fn(u64) -> String) -> Option<String>;

/// Every column: its heading, its side, and its cell.
const COLUMNS: [(&str, Align, Cell); 20] = [
    ("NAME", Align::Left, |d, _| Some(d.name.to_string())),
    ("DEVICE", Align::Left, |d, _| {
        Some(d.fixed.as_ref()?.device.clone())
    }),
    ("STATE", Align::Left, |d, _| {
        Some(d.state.as_str().to_owned())
    }),
    ("SIZE", Align::Right, |d, size| {
        Some(size(d.fixed.as_ref()?.size))
    }),
    ("SWAP", Align::Right, |d, size| {
        Some(size(d.swap.as_ref()?.used))
    }),
    ("BACKEND", Align::Left, |d, _| {
        Some(d.fixed.as_ref()?.backend.clone())
    }),
    ("GPU", Align::Left, |d, _| d.fixed.as_ref()?.gpu.clone()),
    ("QUEUES", Align::Right, |d, _| {
        Some(d.fixed.as_ref()?.queues.to_string())
    }),
    ("DEPTH", Align::Right, |d, _| {
        Some(d.fixed.as_ref()?.depth.to_string())
    }),
    ("READS", Align::Right, |d, _| total(d, |q| q.reads)),
    ("WRITES", Align::Right, |d, _| total(d, |q| q.writes)),
    ("ERRORS", Align::Right, |d, _| total(d, |q| q.errors)),
    ("PID", Align::Right, |d, _| {
        Some(d.fixed.as_ref()?.pid.to_string())
    }),
    ("KNAME", Align::Left, |d, _| {
        Some(kernel_name(d.fixed.as_ref()?).to_owned())
    }),
    ("MAJ:MIN", Align::Left, |d, _| {
        d.fixed
            .as_ref()
            .map(|fixed| format!("{}:{}", fixed.major, fixed.minor))
    }),
    ("PRIO", Align::Right, |d, _| {
        Some(d.swap.as_ref()?.priority.to_string())
    }),
    ("COST", Align::Right, |d, size| {
        Some(size(d.info.as_ref()?.memory.cost))
    }),
    ("UUID", Align::Left, |d, _| {
        Some(d.fixed.as_ref()?.uuid.clone())
    }),
    ("COPY", Align::Left, |d, _| {
        Some(d.fixed.as_ref()?.copy.clone())
    }),
    ("REASON", Align::Left, |d, _| reason(d).map(str::to_owned)),
];

pub fn run(args: &ListArgs) -> Result<()> {
    if args
        .output
        .iter()
        .any(|name| name.eq_ignore_ascii_case("help"))
    {
        let names: Vec<&str> = COLUMNS.iter().map(|(name, ..)| *name).collect();
        return output::data(&format!("{}\n", names.join("\n")));
    }
    let columns = choose(&args.output)?;
    let devices = Devices::system()?;
    let all = devices.all();
    if args.json {
        output::json(&document(&all, &devices.ghosts()))?;
    } else {
        output::data(&table(&all, &columns, args.bytes).render(!args.noheadings))?;
    }
    for device in &all {
        if let Some(problem) = &device.problem {
            output::warning(&format!("{}: {problem}", device.name));
        }
    }
    for ghost in devices.ghosts() {
        output::warning(&format!(
            "ghost swap: {} is gone while it was swap ({} in use)",
            ghost.path.display(),
            human(ghost.used)
        ));
    }
    Ok(())
}

fn choose(names: &[String]) -> Result<Vec<usize>> {
    if names.is_empty() {
        return Ok((0..DEFAULT_COLUMNS).collect());
    }
    names
        .iter()
        .map(|name| {
            let name = name.trim();
            COLUMNS
                .iter()
                .position(|(known, ..)| known.eq_ignore_ascii_case(name))
                .ok_or_else(|| {
                    let known: Vec<&str> = COLUMNS.iter().map(|(known, ..)| *known).collect();
                    Error::usage(format!(
                        "there is no column '{name}': there are {}",
                        known.join(", ")
                    ))
                })
        })
        .collect()
}

fn table(devices: &[Device], columns: &[usize], bytes: bool) -> Table {
    let size = |n: u64| if bytes { n.to_string() } else { human(n) };
    let columns: Vec<_> = columns
        .iter()
        .filter_map(|&column| COLUMNS.get(column))
        .collect();
    let mut table = Table::new(columns.iter().map(|(name, align, _)| (*name, *align)));
    for device in devices {
        table.row(
            columns
                .iter()
                .map(|(_, _, cell)| cell(device, &size).unwrap_or_else(|| NOTHING.to_owned())),
        );
    }
    table
}

fn total(device: &Device, of: fn(&QueueInfo) -> u64) -> Option<String> {
    sum(device, of).map(|sum| sum.to_string())
}

fn sum(device: &Device, of: fn(&QueueInfo) -> u64) -> Option<u64> {
    Some(
        device
            .info
            .as_ref()?
            .queue
            .iter()
            .map(of)
            .fold(0u64, u64::wrapping_add),
    )
}

fn reason(device: &Device) -> Option<&str> {
    let told = device.info.as_ref().and_then(|info| info.reason.as_deref());
    told.or(device.problem.as_deref())
}

fn document(devices: &[Device], ghosts: &[&SwapEntry]) -> Value {
    json!({
        "version": JSON_VERSION,
        "devices": devices.iter().map(json_device).collect::<Vec<_>>(),
        "ghosts": ghosts.iter().map(|ghost| json_swap(ghost)).collect::<Vec<_>>(),
    })
}

/// A device as `list --json` shows it; what is not known is null.
fn json_device(device: &Device) -> Value {
    let fixed = device.fixed.as_ref();
    json!({
        "name": device.name,
        "device": fixed.map(|f| &f.device),
        "kname": fixed.map(kernel_name),
        "maj:min": fixed.map(|f| format!("{}:{}", f.major, f.minor)),
        "state": device.state.as_str(),
        "reason": reason(device),
        "size": fixed.map(|f| f.size),
        "swap": device.swap.as_ref().map(json_swap),
        "backend": fixed.map(|f| &f.backend),
        "gpu": fixed.and_then(|f| f.gpu.as_ref()),
        "queues": fixed.map(|f| f.queues),
        "depth": fixed.map(|f| f.depth),
        "reads": sum(device, |q| q.reads),
        "writes": sum(device, |q| q.writes),
        "errors": sum(device, |q| q.errors),
        "cost": device.info.as_ref().map(|info| info.memory.cost),
        "uuid": fixed.map(|f| &f.uuid),
        "copy": fixed.map(|f| &f.copy),
        "pid": fixed.map(|f| f.pid),
    })
}

/// A line of /proc/swaps.
pub fn json_swap(swap: &SwapEntry) -> Value {
    json!({
        "path": swap.path,
        "size": swap.size,
        "used": swap.used,
        "priority": swap.priority,
        "deleted": swap.deleted,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::Seen;
    use ublk_vram::device::{DeviceInfo, DeviceState, MemoryInfo, ServerInfo, StaticInfo};

    fn live() -> Device {
        let fixed: StaticInfo = serde_json::from_value(json!({
            "name": "fast", "device": "/dev/ublkb0", "id": 0, "major": 259, "minor": 3,
            "size": 8u64 << 30, "backend": "pci", "gpu": "0000:03:00.0",
            "uuid": "8f0d3c5e-3f0b-4a52-9c1e-0a4b6f2d7e11", "queues": 2, "depth": 64,
            "max_io": 262144, "chunk_size": 1u64 << 30, "chunks": 9, "features": ["SAFE_STOP_DEV"],
            "copy": "avx512, write-combined", "pid": 4711, "since": 1_700_000_000,
        }))
        .unwrap();
        let queue = |reads, writes| QueueInfo {
            reads,
            writes,
            errors: 1,
            ..QueueInfo::default()
        };
        let memory = MemoryInfo {
            cost: 44 << 20,
            ..MemoryInfo::default()
        };
        Device {
            name: fixed.name.clone(),
            state: Seen::State(DeviceState::Live),
            info: Some(DeviceInfo {
                fixed: fixed.clone(),
                state: DeviceState::Live,
                reason: None,
                server: ServerInfo::default(),
                memory,
                checksum: None,
                queue: vec![queue(100, 7), queue(23, 4000)],
                carried: None,
            }),
            fixed: Some(fixed),
            swap: Some(SwapEntry {
                path: "/dev/ublkb0".into(),
                deleted: false,
                kind: "partition".into(),
                size: (8 << 30) - 4096,
                used: 512 << 20,
                priority: 50,
            }),
            problem: None,
        }
    }

    fn dead() -> Device {
        Device {
            name: "old".parse().unwrap(),
            state: Seen::State(DeviceState::Dead),
            fixed: None,
            info: None,
            swap: None,
            problem: None,
        }
    }

    #[test]
    fn the_table() {
        let columns = choose(&[]).unwrap();
        assert_eq!(
            table(&[live(), dead()], &columns, false).render(true),
            "NAME  DEVICE       STATE  SIZE  SWAP  BACKEND  GPU           QUEUES  DEPTH  READS  WRITES  \
             ERRORS   PID\n\
             fast  /dev/ublkb0  live     8G  512M  pci      0000:03:00.0       2     64    123    4007\x20\
             \x20     2  4711\n\
             old   -            dead      -     -  -        -                  -      -      -       -\x20\
             \x20     -     -\n"
        );
    }

    #[test]
    fn columns_by_name_in_bytes() {
        let columns = choose(&["size".into(), "Prio".into(), " maj:min".into()]).unwrap();
        assert_eq!(
            table(&[live()], &columns, true).render(false),
            "8589934592  50  259:3\n"
        );
        let error = choose(&["SIZE".into(), "COLOUR".into()]).unwrap_err();
        assert_eq!(error.kind.exit_code(), 2);
        assert!(error.message.contains("NAME, DEVICE"), "{error}");
    }

    #[test]
    fn the_json_form() {
        let ghost = SwapEntry {
            path: "/dev/ublkb5".into(),
            deleted: true,
            kind: "partition".into(),
            size: 1 << 20,
            used: 4096,
            priority: -2,
        };
        let text = output::json_text(&document(&[live(), dead()], &[&ghost])).unwrap();
        let golden = include_str!("../../tests/golden/list.json");
        assert_eq!(
            text, golden,
            "a change of this form needs another version number"
        );
    }

    #[test]
    fn no_devices_are_an_empty_list() {
        assert_eq!(
            document(&[], &[]).to_string(),
            r#"{"devices":[],"ghosts":[],"version":1}"#
        );
    }
}
