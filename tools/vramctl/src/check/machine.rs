//! What the machine and the caller have: rights, memory, GPUs, programs, leftovers.

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use ublk_vram::backend::pci::{self, PciFunction};
use ublk_vram::backend::vulkan::{self, Gpu, Residency};
use ublk_vram::device::DeviceSpec;
use ublk_vram::kmod::{NODE, Node, abi};
use ublk_vram::safety;
use ublk_vram::session::BASE_COST_BYTES;
use ublk_vram::size::human;
use ublk_vram::store::ChecksumTable;

use super::{Item, Machine};
use crate::start::find_server;
use crate::swap::tool;

/// Page tables of a mapped BAR: 8 bytes for each 4 KiB page.
const PAGE_TABLES_SHARE: u64 = 512;

pub(super) fn items(machine: &Machine) -> Vec<Item> {
    let mut items = vec![
        privileges(machine, &safety::missing_privileges()),
        memory_lock(machine),
        cgroup(machine),
        compaction(machine),
        kernel_module(machine),
        gpus(pci::list()),
        ghosts(machine),
        programs(),
        cost(),
    ];
    items.extend(vulkan_gpus());
    items.extend(wsl2(machine));
    items
}

pub(super) fn privileges(machine: &Machine, missing: &[String]) -> Item {
    const ITEM: &str = "privileges";
    if missing.is_empty() {
        return Item::ok(ITEM, "all that a server needs");
    }
    let detail = format!("missing: {}", missing.join(", "));
    if machine.is_root {
        Item::fail(
            ITEM,
            detail,
            "run as root of the host itself, not of a container",
        )
    } else {
        Item::warn(
            ITEM,
            detail,
            "devices are added and removed by root: use sudo",
        )
    }
}

fn memory_lock(machine: &Machine) -> Item {
    const ITEM: &str = "memory lock";
    let limit = match getrlimit(Resource::RLIMIT_MEMLOCK) {
        Ok((RLIM_INFINITY, _)) => "unlimited".to_owned(),
        Ok((soft, _)) => human(soft),
        Err(errno) => errno.desc().to_owned(),
    };
    match safety::can_lock_memory() {
        Ok(()) => Item::ok(ITEM, format!("allowed (RLIMIT_MEMLOCK {limit})")),
        Err(_) if !machine.is_root => Item::warn(
            ITEM,
            format!("not allowed for this user (RLIMIT_MEMLOCK {limit})"),
            "root is not bound by it: use sudo",
        ),
        Err(error) => Item::fail(
            ITEM,
            format!("{} (RLIMIT_MEMLOCK {limit})", error.message),
            "give CAP_IPC_LOCK, or `ulimit -l unlimited` (systemd: LimitMEMLOCK=infinity)",
        ),
    }
}

/// What the GPUs' drivers do with memory, one line for each GPU that Vulkan knows.
fn vulkan_gpus() -> Vec<Item> {
    match vulkan::list() {
        Ok(gpus) if gpus.is_empty() => vec![Item::ok(GPU, "Vulkan knows none")],
        Ok(gpus) => gpus.iter().map(gpu_memory).collect(),
        Err(error) => vec![Item::ok(
            GPU,
            format!("not through Vulkan, which is needed for GPUs with a driver only: {error}"),
        )],
    }
}

const GPU: &str = "GPU memory";

pub(super) fn gpu_memory(gpu: &Gpu) -> Item {
    let what = match gpu.address {
        Some(address) => format!("{address} {}", gpu.name),
        None => gpu.name.clone(),
    };
    match (gpu.usable(true), gpu.residency) {
        (Err(error), _) => Item::ok(GPU, error.to_string()),
        (Ok(()), Residency::Pinned) => Item::ok(GPU, format!("{what}: stays where it is (pinned)")),
        (Ok(()), Residency::System) => Item::ok(
            GPU,
            format!("{what}: system memory; for tests (--allow-cpu-device)"),
        ),
        (Ok(()), Residency::Evictable) => Item::warn(
            GPU,
            format!("{what}: its driver may move memory away under pressure (evictable)"),
            "use it as a scratch disk or a cache, not as swap",
        ),
    }
}

/// It is optional: not having it is no fault.
fn kernel_module(machine: &Machine) -> Item {
    const ITEM: &str = "kernel module";
    if !Node::is_there() {
        return Item::ok(ITEM, "ublk_vram is not loaded; it is optional");
    }
    match Node::open().and_then(|node| node.info()) {
        Ok(info) if info.abi == abi::ABI => Item::ok(
            ITEM,
            format!("ublk_vram is loaded, {} regions", info.regions),
        ),
        Ok(info) => Item::fail(
            ITEM,
            format!(
                "ublk_vram speaks version {} and this program {}",
                info.abi,
                abi::ABI
            ),
            "load the module that came with this program, or unload it",
        ),
        Err(_) if !machine.is_root => Item::unseen(ITEM, "the loaded module ublk_vram"),
        Err(error) => Item::warn(
            ITEM,
            format!("{NODE} does not answer: {error}"),
            "unload the module: `rmmod ublk_vram`",
        ),
    }
}

pub(super) fn cgroup(machine: &Machine) -> Item {
    const ITEM: &str = "cgroup";
    if machine
        .root
        .path("/sys/fs/cgroup/cgroup.controllers")
        .exists()
    {
        return Item::ok(ITEM, "version 2");
    }
    Item::warn(
        ITEM,
        "no cgroup version 2: a memory limit on whoever adds a device holds for its server too",
        "boot with systemd.unified_cgroup_hierarchy=1, or add devices from outside any limit",
    )
}

/// Compaction moves locked pages too, unless this is 0 (Documentation/admin-guide/sysctl/vm.rst): a
/// queue thread that touches one at that moment waits for the move.
pub(super) fn compaction(machine: &Machine) -> Item {
    const ITEM: &str = "compaction";
    const KNOB: &str = "/proc/sys/vm/compact_unevictable_allowed";
    match machine.root.read_text(KNOB).as_deref().map(str::trim) {
        Ok("0") => Item::ok(ITEM, "leaves locked pages where they are"),
        // A kernel without compaction has no such file.
        Err(_) => Item::ok(ITEM, "not in this kernel"),
        Ok(_) => Item::warn(
            ITEM,
            "may move locked pages: now and then a request waits for that (microseconds)",
            "for steady latency: sysctl vm.compact_unevictable_allowed=0",
        ),
    }
}

fn gpus(functions: ublk_vram::Result<Vec<PciFunction>>) -> Item {
    const ITEM: &str = "gpu memory";
    let todo = "see `vramctl gpus`; --backend host needs no GPU, but takes system memory";
    let functions = match functions {
        Ok(functions) => functions,
        Err(error) => return Item::warn(ITEM, error.message, todo),
    };
    let usable: Vec<String> = functions
        .iter()
        .filter_map(|function| Some((function, function.usable(None).ok()?)))
        .map(|(function, bar)| {
            format!(
                "{} BAR {} ({})",
                function.address,
                bar.index,
                human(bar.size)
            )
        })
        .collect();
    match (usable.is_empty(), functions.len()) {
        (false, _) => Item::ok(ITEM, usable.join(", ")),
        (true, 0) => Item::warn(ITEM, "no display or memory device on PCI", todo),
        (true, count) => Item::warn(
            ITEM,
            format!("none of {count} PCI devices can be used"),
            todo,
        ),
    }
}

pub(super) fn ghosts(machine: &Machine) -> Item {
    const ITEM: &str = "ghost swap";
    let swaps = match safety::read_swaps(&machine.root) {
        Ok(swaps) => swaps,
        Err(error) => return Item::warn(ITEM, error.message, "look at /proc/swaps"),
    };
    let ghosts: Vec<String> = safety::ghosts(&swaps)
        .iter()
        .map(|ghost| format!("{} ({} in use)", ghost.path.display(), human(ghost.used)))
        .collect();
    if ghosts.is_empty() {
        return Item::ok(ITEM, "none");
    }
    Item::fail(
        ITEM,
        format!("gone while they were swap: {}", ghosts.join(", ")),
        "restart the machine: nothing else takes them away; do not run `swapoff -a`",
    )
}

fn programs() -> Item {
    const ITEM: &str = "programs";
    let server = match find_server() {
        Ok(server) => server,
        Err(error) => {
            return Item::fail(ITEM, error.message, "install the package ublk-vram whole");
        }
    };
    let missing: Vec<&str> = ["mkswap", "wipefs"]
        .into_iter()
        .filter(|name| tool(name).is_none())
        .collect();
    if missing.is_empty() {
        return Item::ok(ITEM, format!("{}, mkswap, wipefs", server.display()));
    }
    Item::warn(
        ITEM,
        format!("{}; missing: {}", server.display(), missing.join(", ")),
        "install util-linux, to use devices as swap",
    )
}

/// What a device costs with default settings: said beforehand, since it is memory that is lost.
pub(super) fn cost() -> Item {
    let arena = DeviceSpec::MAX_DEFAULT_ARENA;
    Item::ok(
        "cost",
        format!(
            "a device of {} or more takes up to {} of locked system memory ({} I/O buffers, {} server), \
             and for each GiB {} of checksums (unless --checksum=off) and {} of page tables",
            human(arena * 16),
            human(arena + BASE_COST_BYTES),
            human(arena),
            human(BASE_COST_BYTES),
            human(ChecksumTable::bytes(1 << 30)),
            human((1 << 30) / PAGE_TABLES_SHARE)
        ),
    )
}

fn wsl2(machine: &Machine) -> Option<Item> {
    machine.root.path("/dev/dxg").exists().then(|| {
        Item::fail(
            "wsl2",
            "/dev/dxg: the GPU driver of WSL2 crashes the kernel when a server locks its memory",
            "use a machine that runs Linux itself",
        )
    })
}
