//! `cargo xtask vm`: a kernel with this workspace's programs in it, for a command or for a look
//! around.

use std::{
    io::{IsTerminal, Write, stderr, stdin, stdout},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Result, bail};
use vmrig::{Device, KernelSpec, Vm, VmBuilder, protocol, workspace};

use crate::deps;

/// What the workspace builds for users: package and program.
const PROGRAMS: [(&str, &str); 2] = [("ublk-vram", "ublk-vram"), ("vramctl", "vramctl")];
/// Programs of the host that are of use in the guest.
const TOOLS: [&str; 29] = [
    "bash",
    "blkdiscard",
    "blkid",
    "dd",
    "dmsetup",
    "e2fsck",
    "findmnt",
    "fio",
    "fsck.ext4",
    "losetup",
    "lsblk",
    "mkfs.ext4",
    "mkswap",
    "mount",
    "nsenter",
    "prlimit",
    "script",
    "setsid",
    "sha256sum",
    "stress-ng",
    "swaplabel",
    "swapoff",
    "swapon",
    "taskset",
    "tune2fs",
    "umount",
    "unshare",
    "wipefs",
    "zramctl",
];
/// Modules to load where the kernel has them.
const MODULES: [&str; 4] = ["ublk_drv", "dm_mod", "dm_cache", "dm_cache_smq"];

/// Arguments of `cargo xtask vm`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Debian suite whose newest cloud kernel is booted
    #[arg(long, default_value = "trixie-backports", conflicts_with_all = ["kernel", "modules"])]
    suite: String,
    /// Kernel to boot instead: a bzImage or vmlinux
    #[arg(long, value_name = "FILE", requires = "modules")]
    kernel: Option<PathBuf>,
    /// The /lib/modules/RELEASE directory of that kernel
    #[arg(long, value_name = "DIR", requires = "kernel")]
    modules: Option<PathBuf>,
    /// Guest memory
    #[arg(long, value_name = "MiB", default_value_t = 1024)]
    memory: u64,
    /// Number of CPUs
    #[arg(long, value_name = "N", default_value_t = 2)]
    cpus: u32,
    /// Size of the PCI BAR that stands in for GPU memory, a power of two
    #[arg(long, value_name = "MiB", default_value_t = 512)]
    vram: u64,
    /// Leave this workspace's programs out, and do not build them
    #[arg(long)]
    bare: bool,
    /// Time limit of COMMAND
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Command to run in the guest (one word: a shell script); without one, a shell on this
    /// terminal
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Boots the machine, runs the command or shell, and exits with its code.
///
/// # Errors
/// When the machine does not boot, panics or hangs.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    if arguments.command.is_empty() && !stdin().is_terminal() {
        bail!("standard input is no terminal: give a command after `--`");
    }
    deps::ensure_programs(&[&deps::BOOT, &deps::SWAP, &deps::GUEST])?;
    if !arguments.bare {
        deps::ensure_build_tools()?;
    }
    let spec = match (&arguments.kernel, &arguments.modules) {
        (Some(image), Some(modules)) => KernelSpec::Files {
            image: image.clone(),
            modules: modules.clone(),
        },
        _ => KernelSpec::Suite(arguments.suite.clone()),
    };
    let kernel = spec.resolve()?;
    let set = vmrig::ModuleSet::open(&kernel.modules)?;
    let mut builder = VmBuilder::new(&kernel)
        .name("xtask-vm")
        .memory(arguments.memory)
        .cpus(arguments.cpus)
        .device(Device::Qxl {
            vram_mib: arguments.vram,
        });
    for module in MODULES.into_iter().filter(|module| set.contains(module)) {
        builder = builder.module(module);
    }
    for tool in TOOLS
        .into_iter()
        .filter(|tool| workspace::which(tool).is_some())
    {
        builder = builder.tool(tool);
    }
    for (package, name) in PROGRAMS {
        if !arguments.bare && workspace::has_program(package, name)? {
            builder = builder.program(workspace::program(package, name)?);
        }
    }
    for terminal in ["linux", "dumb"].map(terminfo).into_iter().flatten() {
        let content = std::fs::read(&terminal)?;
        builder = builder.file(
            &terminal.to_string_lossy().replacen("/lib/", "/usr/lib/", 1),
            0o644,
            content,
        );
    }
    let vm = builder.boot()?;
    let rc = match arguments.command.as_slice() {
        [] => look_around(&vm)?,
        command => run_command(&vm, command, Duration::from_secs(arguments.timeout))?,
    };
    vm.shutdown()?;
    Ok(ExitCode::from(u8::try_from(rc).unwrap_or(1)))
}

fn look_around(vm: &Vm) -> Result<i32> {
    eprintln!(
        "kernel {} after {:.1} s; {} stands in for a GPU; leave with `exit`",
        vm.release(),
        vm.boot_time().as_secs_f64(),
        vm.pci_address(0)
    );
    Ok(vm.interactive_shell()?.rc)
}

fn run_command(vm: &Vm, command: &[String], limit: Duration) -> Result<i32> {
    let out = match command {
        [script] => vm.sh_timeout(script, limit)?,
        argv => {
            let command = protocol::Command {
                argv: argv.to_vec(),
                env: Vec::new(),
            };
            vm.run(command, &[], limit)?
        }
    };
    stdout().write_all(&out.stdout_bytes)?;
    stderr().write_all(out.stderr.as_bytes())?;
    if out.timed_out {
        bail!("the command did not end within {limit:?}");
    }
    Ok(out.rc)
}

/// The host's description of a terminal, where line editing looks for it.
fn terminfo(name: &str) -> Option<PathBuf> {
    let first = name.get(..1)?;
    let path = Path::new("/lib/terminfo").join(first).join(name);
    path.exists().then_some(path)
}
