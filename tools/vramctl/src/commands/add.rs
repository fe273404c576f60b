//! `vramctl add`: the arguments become a specification, a server is started with it, and when the
//! device is usable its path is printed. Standard output holds that path and nothing else.

use std::path::{Path, PathBuf};

use ublk_vram::backend::MemoryHandles;
use ublk_vram::backend::pci::{self, PciAddress, PciFunction};
use ublk_vram::backend::vulkan::{self, Gpu, Residency};
use ublk_vram::control::{Call, Client, RunDir};
use ublk_vram::device::{BackendSpec, CopyPath, DeviceSpec, LabSpec, StaticInfo, VulkanSpec};
use ublk_vram::size::{SizeSpec, human};
use ublk_vram::{Error, ErrorKind, Result, session};

use super::limit_for;
use super::swap::{evictable, zero_copy};
use crate::args::{AddArgs, BackendName, MemoryArgs, Switch};
use crate::devices::{ASK_LIMIT, Devices};
use crate::output;
use crate::start::{find_server, start};
use crate::swap::{SwapOn, make_and_swap_on};

pub fn run(args: &AddArgs) -> Result<()> {
    let backend = choose_backend(&args.memory, pci::list, vulkan::list)?;
    refuse_evictable_swap(args, &backend)?;
    if args.swap.is_some() && args.zero_copy {
        return Err(zero_copy(&args.name));
    }
    let spec = specification(args, backend)?;
    let server = find_server();
    if args.dry_run {
        return dry_run(&spec, server);
    }
    let server = server?;
    refuse_ghost(&spec)?;
    let limit = args
        .timeout
        .unwrap_or_else(|| limit_for(rough_bytes(&spec)));
    let started = start(&server, &spec, limit)?;
    for warning in &started.warnings {
        output::warning(warning);
    }
    if started.device.residency.as_deref() == Some(Residency::Evictable.as_str()) {
        output::warning(
            "the GPU's driver may move this memory to system memory, under pressure and when the \
             machine sleeps: it is no safe swap",
        );
    }
    if let Some(priority) = args.swap {
        swap_or_remove(&started.device, priority)?;
    }
    output::data(&format!("{}\n", started.device.device))
}

/// Where the memory comes from: what the user named, or the first PCI function that can be used.
/// System memory is never chosen for anybody. A PCI address whose function has a driver, and that
/// Vulkan knows, is used through Vulkan.
pub(super) fn choose_backend(
    args: &MemoryArgs,
    list: impl Fn() -> Result<Vec<PciFunction>>,
    vulkan: impl FnOnce() -> Result<Vec<Gpu>>,
) -> Result<BackendSpec> {
    let through_vulkan = |gpu: &str| {
        BackendSpec::Vulkan(VulkanSpec {
            gpu: gpu.to_owned(),
            allow_cpu_device: args.allow_cpu_device,
            reserve: args.gpu_reserve,
            mapped: args.gpu_mapped,
            copy_path: args.copy_path.map(CopyPath::from).unwrap_or_default(),
        })
    };
    if args.backend == Some(BackendName::Vulkan) {
        if args.bar.is_some() {
            return Err(Error::usage("--bar is of --backend pci: leave it out"));
        }
        return Ok(through_vulkan(args.gpu.as_deref().unwrap_or(vulkan::AUTO)));
    }
    let needs_vulkan = [
        (args.allow_cpu_device, "--allow-cpu-device"),
        (args.gpu_reserve.is_some(), "--gpu-reserve"),
        (args.gpu_mapped.is_some(), "--gpu-mapped"),
        (args.copy_path.is_some(), "--copy-path"),
    ];
    let needs_vulkan = needs_vulkan.iter().find(|(is_given, _)| *is_given);
    let is_named = matches!(&args.gpu, Some(gpu) if gpu == vulkan::AUTO || vulkan::is_uuid(gpu));
    if let Some((_, option)) = needs_vulkan.filter(|_| args.backend.is_some() || !is_named) {
        return Err(Error::usage(format!("{option} is of --backend vulkan")));
    }
    if args.backend == Some(BackendName::Host) {
        if args.gpu.is_some() || args.bar.is_some() {
            return Err(Error::usage(
                "--backend host is system memory: leave out --gpu and --bar",
            ));
        }
        return Ok(BackendSpec::Host);
    }
    if args.backend == Some(BackendName::Cuda) {
        if args.bar.is_some() {
            return Err(Error::usage("--bar is of --backend pci: leave it out"));
        }
        let gpu = args.gpu.as_deref().map(|gpu| named_gpu(gpu, &list));
        return Ok(BackendSpec::Cuda {
            gpu: gpu.transpose()?.map(|address| address.to_string()),
        });
    }
    let is_open = args.backend.is_none() && args.bar.is_none();
    let address = match args.gpu.as_deref() {
        Some(gpu) if is_open && (gpu == vulkan::AUTO || vulkan::is_uuid(gpu)) => {
            return Ok(through_vulkan(gpu));
        }
        Some(gpu) => {
            let address = named_gpu(gpu, &list)?;
            if is_open && is_for_vulkan(address, &list, vulkan) {
                return Ok(through_vulkan(&address.to_string()));
            }
            address
        }
        None => first_usable(&list()?, args.bar)?,
    };
    Ok(BackendSpec::Pci {
        address: address.to_string(),
        bar: args.bar,
    })
}

/// Whether a function has a driver, and Vulkan can use it. Vulkan that is not there says no.
fn is_for_vulkan(
    address: PciAddress,
    list: impl FnOnce() -> Result<Vec<PciFunction>>,
    vulkan: impl FnOnce() -> Result<Vec<Gpu>>,
) -> bool {
    let has_driver = list().is_ok_and(|functions| {
        let mut functions = functions.iter();
        functions.any(|function| function.address == address && function.driver.is_some())
    });
    has_driver
        && vulkan().is_ok_and(|gpus| {
            let mut gpus = gpus.iter();
            gpus.any(|gpu| gpu.address == Some(address) && gpu.usable(false).is_ok())
        })
}

/// Refuses --swap on memory that may be moved away, before anything is started.
fn refuse_evictable_swap(args: &AddArgs, backend: &BackendSpec) -> Result<()> {
    let BackendSpec::Vulkan(spec) = backend else {
        return Ok(());
    };
    if args.swap.is_none() || args.allow_evictable {
        return Ok(());
    }
    match vulkan::find(&spec.gpu, spec.allow_cpu_device)?.residency {
        Residency::Evictable => Err(evictable(&args.name)),
        Residency::Pinned | Residency::System => Ok(()),
    }
}

/// A PCI address, or an index in `vramctl gpus`.
fn named_gpu(gpu: &str, list: impl FnOnce() -> Result<Vec<PciFunction>>) -> Result<PciAddress> {
    let Ok(index) = gpu.parse::<usize>() else {
        return gpu.parse().map_err(|_| {
            Error::usage(format!(
                "--gpu: '{gpu}' is neither an index in `vramctl gpus` nor a PCI address as \
                 `lspci -D` writes it, such as 0000:03:00.0"
            ))
        });
    };
    let functions = list()?;
    functions
        .get(index)
        .map(|function| function.address)
        .ok_or_else(|| {
            let there = match functions.len() {
                0 => "no display or memory device at all".to_owned(),
                1 => "one, with index 0".to_owned(),
                count => format!("{count}, from 0 to {}", count - 1),
            };
            Error::new(
                ErrorKind::NotFound,
                format!("there is no GPU with index {index}: `vramctl gpus` lists {there}"),
            )
        })
}

fn first_usable(functions: &[PciFunction], bar: Option<u8>) -> Result<PciAddress> {
    let mut reasons = Vec::new();
    for function in functions {
        match function.usable(bar) {
            Ok(_) => return Ok(function.address),
            Err(reason) => reasons.push(reason.message),
        }
    }
    let why = if reasons.is_empty() {
        "there is no PCI device of the display or memory class".to_owned()
    } else {
        reasons.join("; ")
    };
    Err(Error::new(
        ErrorKind::NotFound,
        format!("no GPU memory can be used: {why}. (--backend host would take system memory)"),
    ))
}

fn specification(args: &AddArgs, backend: BackendSpec) -> Result<DeviceSpec> {
    // The server has another working directory.
    let log_file = match &args.lab_log {
        Some(path) => Some(
            std::path::absolute(path)
                .map_err(|error| Error::os(format!("--lab-log {}", path.display()), error))?,
        ),
        None => None,
    };
    // Whatever depends on nothing but the number itself is said here, before anything is started.
    if let SizeSpec::Bytes(_) = args.size {
        args.size.resolve(u64::MAX)?;
    }
    Ok(DeviceSpec {
        name: args.name.clone(),
        size: args.size,
        backend,
        id: args.id,
        queues: args.queues,
        depth: args.depth,
        arena: args.io_memory,
        chunk: args.chunk,
        checksum: args.checksum.map(|switch| switch == Switch::On),
        zero_copy: args.zero_copy,
        allow_unsafe: args.allow_unsafe,
        fail_after: args.fail_after.map(|limit| limit.as_secs().max(1)),
        lab: LabSpec {
            no_memory_lock: args.lab_no_memory_lock,
            fault: args.lab_fault,
            no_safe_stop: args.lab_no_safe_stop,
            copy_limit: args.lab_copy_limit,
            no_recovery: args.lab_no_recovery,
            crash: args.lab_crash,
            log_file,
        },
    })
}

/// Bytes the device will have, for a time limit.
fn rough_bytes(spec: &DeviceSpec) -> u64 {
    match spec.size {
        SizeSpec::Bytes(bytes) => bytes,
        SizeSpec::Percent(_) | SizeSpec::Max => {
            MemoryHandles::available(&spec.backend).unwrap_or(0)
        }
    }
}

/// Says what would happen, and prints what the server would be given.
fn dry_run(spec: &DeviceSpec, server: Result<PathBuf>) -> Result<()> {
    let (layout, shape) = session::plan(spec)?;
    let size = layout.device_bytes();
    let memory = match &spec.backend {
        BackendSpec::Host => "system memory".to_owned(),
        BackendSpec::Pci { address, .. } => format!("memory of PCI function {address}"),
        BackendSpec::Vulkan(spec) => format!("memory of the Vulkan GPU {}", spec.gpu),
        BackendSpec::Cuda { gpu } => format!(
            "pinned memory of the NVIDIA GPU {}",
            gpu.as_deref().unwrap_or("that there is")
        ),
    };
    match server {
        Ok(program) => output::say(&format!("dry run: would start {} serve", program.display())),
        Err(error) => output::warning(&error.message),
    }
    output::say(&format!(
        "dry run: '{}' would have {} ({size} bytes) in {} chunks of {} in {memory}, {} queues of \
         depth {}, and {} of locked system memory",
        spec.name,
        human(size),
        layout.chunks(),
        human(layout.chunk_size()),
        shape.queues,
        shape.depth,
        human(session::cost_bytes(spec, &layout, &shape))
    ));
    output::json(spec)
}

/// A ghost on the number that the new disk is to have would be taken for it ever after.
fn refuse_ghost(spec: &DeviceSpec) -> Result<()> {
    let devices = Devices::system()?;
    let Some(ghost) = devices.ghosts().into_iter().next() else {
        return Ok(());
    };
    let why = format!(
        "swap is on a disk that is gone ({} (deleted), {} in use): what was swapped there is lost",
        ghost.path.display(),
        human(ghost.used)
    );
    if spec.allow_unsafe {
        output::warning(&why);
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Unsafe,
        format!(
            "{why}, and only a restart of the machine clears it; --allow-unsafe adds a device all the same"
        ),
    ))
}

/// Swaps to a new device; a device that was wanted as swap and is none is removed again.
fn swap_or_remove(device: &StaticInfo, priority: u16) -> Result<()> {
    let how = SwapOn {
        priority,
        discard: false,
        force: false,
    };
    let Err(error) = make_and_swap_on(Path::new(&device.device), how) else {
        return Ok(());
    };
    let socket = RunDir::system().socket(&device.name);
    let removed = Client::connect(&socket, ASK_LIMIT)
        .and_then(|mut client| client.call(&Call::Remove { force: false }, limit_for(device.size)))
        .and_then(|reply| reply.into_result::<serde_json::Value>());
    Err(Error::new(
        error.kind,
        match removed {
            Ok(_) => format!("{error}; '{}' was removed again", device.name),
            Err(why) => format!(
                "{error}; and '{}' could not be removed again: {why}",
                device.name
            ),
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Args, Verb};
    use clap::Parser;

    fn args(text: &str) -> AddArgs {
        let words = ["vramctl", "add"]
            .into_iter()
            .chain(text.split_whitespace());
        match Args::try_parse_from(words).unwrap().verb {
            Some(Verb::Add(args)) => *args,
            other => panic!("{other:?}"),
        }
    }

    fn none() -> Result<Vec<PciFunction>> {
        Ok(Vec::new())
    }

    fn no_gpus() -> Result<Vec<Gpu>> {
        Ok(Vec::new())
    }

    #[test]
    fn vulkan_when_it_is_named_or_only_it_can() {
        let vulkan = |gpu: &str, allow_cpu_device| {
            BackendSpec::Vulkan(VulkanSpec {
                gpu: gpu.into(),
                allow_cpu_device,
                reserve: None,
                mapped: None,
                copy_path: CopyPath::Auto,
            })
        };
        let uuid = "GPU-00000003-1111-2222-3333-444444444444";
        for (text, expected) in [
            ("--backend vulkan", vulkan("auto", false)),
            ("--backend vulkan --gpu 2", vulkan("2", false)),
            (
                "--backend vulkan --gpu 0 --allow-cpu-device",
                vulkan("0", true),
            ),
            ("--gpu auto", vulkan("auto", false)),
            (&format!("--gpu {uuid}"), vulkan(uuid, false)),
        ] {
            let args = args(&format!("x -s 1G {text}"));
            assert_eq!(
                choose_backend(&args.memory, none, no_gpus).unwrap(),
                expected
            );
        }
        for text in [
            "--backend vulkan --bar 1",
            "--allow-cpu-device",
            "--backend host --allow-cpu-device",
            "--gpu-reserve 1G",
            "--gpu 03:00.0 --gpu-mapped 1G",
            "--backend pci --copy-path dma",
            "--backend pci --gpu auto",
        ] {
            let args = args(&format!("x -s 1G {text}"));
            let error = choose_backend(&args.memory, none, no_gpus).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Usage, "{text}");
        }
    }

    #[test]
    fn system_memory_only_when_it_is_asked_for() {
        assert_eq!(
            choose_backend(&args("x -s 1G --backend host").memory, none, no_gpus).unwrap(),
            BackendSpec::Host
        );
        let error = choose_backend(&args("x -s 1G").memory, none, no_gpus).unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound);
        assert!(
            error
                .message
                .contains("no PCI device of the display or memory class"),
            "{error}"
        );
        let error = choose_backend(
            &args("x -s 1G --backend host --gpu 0").memory,
            none,
            no_gpus,
        )
        .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
    }

    #[test]
    fn a_gpu_by_address_is_not_looked_for_here() {
        assert_eq!(
            choose_backend(&args("x -s 1G --gpu 03:00.0 --bar 2").memory, none, no_gpus).unwrap(),
            BackendSpec::Pci {
                address: "0000:03:00.0".into(),
                bar: Some(2)
            }
        );
        let error = choose_backend(&args("x -s 1G --gpu 7").memory, none, no_gpus).unwrap_err();
        assert_eq!(error.kind.exit_code(), 3);
        let error =
            choose_backend(&args("x -s 1G --gpu renderD128").memory, none, no_gpus).unwrap_err();
        assert_eq!(error.kind.exit_code(), 2);
    }

    #[test]
    fn arguments_become_the_specification() {
        let args = args(
            "fast --size 1.5G --backend host --id 7 --queues 2 --depth 32 --io-memory 8M --chunk 64M \
             --checksum=off --zero-copy --allow-unsafe --lab-fault --lab-copy-limit 9 --lab-no-memory-lock --lab-no-safe-stop --lab-log /tmp/log \
             --lab-no-recovery --lab-crash before-end:3 --fail-after 90",
        );
        let spec = specification(&args, BackendSpec::Host).unwrap();
        assert_eq!(
            serde_json::to_value(&spec).unwrap(),
            serde_json::json!({
                "name": "fast", "size": {"bytes": 1_610_612_736u64}, "backend": {"kind": "host"},
                "id": 7, "queues": 2, "depth": 32, "arena": 8 << 20, "chunk": 64 << 20,
                "checksum": false, "zero-copy": true, "allow-unsafe": true, "fail-after": 90,
                "lab": {
                    "no-memory-lock": true, "fault": true, "copy-limit": 9, "no-recovery": true, "crash": {"at": "before-end", "count": 3}, "no-safe-stop": true,
                    "log-file": "/tmp/log",
                },
            })
        );
    }

    #[test]
    fn a_size_that_is_no_multiple_of_a_block_is_usage() {
        let error =
            specification(&args("x -s 5000 --backend host"), BackendSpec::Host).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Usage);
    }
}
