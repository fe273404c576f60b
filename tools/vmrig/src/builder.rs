//! Describes a machine and boots it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};

use crate::{
    Device, Error, Kernel, ModuleSet, Result, Vm,
    channel::Channel,
    console::Console,
    devices, initramfs,
    initramfs::Contents,
    machine::Machine,
    protocol::Reply,
    qemu::{Hardware, Qemu},
    qmp::Qmp,
    workspace,
};

/// A booting guest that said nothing for so long does not boot. It takes 3 to 6 seconds on an idle
/// machine.
const BOOT_LIMIT: Duration = Duration::from_secs(180);

/// Default of [`VmBuilder::grace`].
const GRACE: Duration = Duration::from_secs(30);

/// What a machine is to be. Every method replaces or adds to what was said before.
#[derive(Debug, Clone)]
pub struct VmBuilder {
    kernel: Kernel,
    name: String,
    memory_mib: u64,
    cpus: u32,
    append: Vec<String>,
    devices: Vec<Device>,
    hotplug_ports: usize,
    contents: Contents,
    keep_log: bool,
    grace: Duration,
}

/// How many times as long a machine with a debug kernel may take for anything, and the memory in MiB that it
/// has beside what was asked for.
const DEBUG_PATIENCE: u32 = 6;
const DEBUG_MEMORY: u64 = 256;

/// What the console shows of it: the breakpoint that the kernel puts over an instruction while it changes
/// it (text_poke_bp in arch/x86/kernel/alternative.c), met by a CPU that does not see the handler's table
/// yet. Under multi-threaded TCG that happens to one boot in some hundred; it is no fault of the guest.
const PATCHING_RACE: &str = "Oops: int3";

fn is_patching_race(console: &str) -> bool {
    console.contains(PATCHING_RACE)
}

impl VmBuilder {
    /// A machine with 512 MiB of memory and 2 CPUs, named after the current thread.
    pub fn new(kernel: &Kernel) -> Self {
        let mut contents = Contents::default();
        // No udev here: device-mapper nodes are made by libdevmapper itself.
        contents
            .environment
            .push(("DM_DISABLE_UDEV".into(), "1".into()));
        Self {
            kernel: kernel.clone(),
            name: thread::current().name().unwrap_or("vm").to_owned(),
            memory_mib: 512,
            cpus: 2,
            append: Vec::new(),
            devices: Vec::new(),
            hotplug_ports: 0,
            contents,
            keep_log: false,
            grace: GRACE,
        }
    }

    /// Names the machine's log.
    #[must_use]
    pub fn name(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Guest memory in MiB; the initramfs is part of it.
    #[must_use]
    pub fn memory(mut self, mib: u64) -> Self {
        self.memory_mib = mib;
        self
    }

    /// Number of CPUs.
    #[must_use]
    pub fn cpus(mut self, cpus: u32) -> Self {
        self.cpus = cpus;
        self
    }

    /// Adds to the kernel's command line.
    #[must_use]
    pub fn append(mut self, text: &str) -> Self {
        self.append.push(text.to_owned());
        self
    }

    /// Makes the kernel panic when a task has been blocked for so long (whole seconds).
    #[must_use]
    pub fn panic_on_hung_task(self, after: Duration) -> Self {
        let seconds = after.saturating_mul(self.patience()).as_secs().max(1);
        self.append(&format!(
            "sysctl.kernel.hung_task_timeout_secs={seconds} sysctl.kernel.hung_task_panic=1"
        ))
    }

    /// Adds a device; its address is [`Vm::pci_address`] of its place in the order of these calls.
    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.devices.push(device);
        self
    }

    /// Adds empty PCIe ports for [`Vm::plug`], up to 8.
    #[must_use]
    pub fn hotplug_ports(mut self, ports: usize) -> Self {
        self.hotplug_ports = ports;
        self
    }

    /// Loads a module, and all it depends on, before the first request. Parameters may follow the
    /// name after a space.
    #[must_use]
    pub fn module(mut self, module: &str) -> Self {
        let (name, parameters) = module.split_once(' ').unwrap_or((module, ""));
        self.contents
            .modules
            .push((name.to_owned(), parameters.to_owned()));
        self
    }

    /// Loads modules.
    #[must_use]
    pub fn modules(self, modules: &[&str]) -> Self {
        modules
            .iter()
            .fold(self, |builder, module| builder.module(module))
    }

    /// Puts a program of the host, with its libraries, into the guest at its host path. It replaces
    /// a busybox applet of the same name.
    #[must_use]
    pub fn tool(mut self, name: &str) -> Self {
        self.contents.tools.insert(name.to_owned());
        self
    }

    /// Puts programs of the host into the guest.
    #[must_use]
    pub fn tools(self, names: &[&str]) -> Self {
        names.iter().fold(self, |builder, name| builder.tool(name))
    }

    /// Puts a program, with its libraries, into the guest's `/usr/bin`; debug information is
    /// stripped.
    #[must_use]
    pub fn program(mut self, path: impl AsRef<Path>) -> Self {
        self.contents.programs.push(path.as_ref().to_owned());
        self
    }

    /// Puts a shared library of the host, with those it needs, into the guest at its host path: one that
    /// is opened by name at run time, which no program tells of.
    #[must_use]
    pub fn library(mut self, path: impl AsRef<Path>) -> Self {
        self.contents.libraries.push(path.as_ref().to_owned());
        self
    }

    /// Puts a file into the guest.
    #[must_use]
    pub fn file(mut self, path: &str, mode: u32, content: impl Into<Vec<u8>>) -> Self {
        self.contents
            .files
            .insert(path.to_owned(), (mode, content.into()));
        self
    }

    /// Sets a variable in the environment of every command.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.contents
            .environment
            .push((name.to_owned(), value.to_owned()));
        self
    }

    /// Keeps the console's log of a run that went well, too.
    #[must_use]
    pub fn keep_log(mut self) -> Self {
        self.keep_log = true;
        self
    }

    /// How long the host waits for an answer beyond the guest's own time limit before the guest
    /// counts as hung; 30 s unless said otherwise. The guest kills, collects and sends within that
    /// time.
    #[must_use]
    pub fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    fn patience(&self) -> u32 {
        if self.kernel.debug { DEBUG_PATIENCE } else { 1 }
    }

    fn memory_mib(&self) -> u64 {
        self.memory_mib + if self.kernel.debug { DEBUG_MEMORY } else { 0 }
    }

    /// Boots the machine and waits for its guest agent. A boot that the emulator spoils is tried once more.
    ///
    /// # Errors
    /// [`Error::Host`] when something is missing on this host or a module did not load;
    /// [`Error::Panic`], [`Error::Died`] or [`Error::NoAnswer`] when the guest did not come up.
    pub fn boot(mut self) -> Result<Vm> {
        for index in 0..self.devices.len() {
            let (name, value) = (format!("VMRIG_DEVICE{index}"), devices::address(index));
            self.contents.environment.push((name, value));
        }
        match self.boot_once() {
            Err(Error::Panic { console, .. }) if is_patching_race(&console) => {
                eprintln!("vmrig: booting again: {}", PATCHING_RACE);
                self.boot_once()
            }
            outcome => outcome,
        }
    }

    fn boot_once(&self) -> Result<Vm> {
        let started = Instant::now();
        let mut asked = vec!["virtio_console"];
        asked.extend(self.devices.iter().filter_map(Device::module));
        asked.extend(self.contents.modules.iter().map(|(name, _)| name.as_str()));
        let modules = ModuleSet::open(&self.kernel.modules)?.resolve(asked)?;
        let (initramfs, length) =
            initramfs::build(&self.contents, &modules).context("cannot make the initramfs")?;
        let needed = (length >> 20) * 2 + 100;
        if self.memory_mib() < needed {
            return Err(Error::Host(anyhow!(
                "{} MiB of memory are too few for an initramfs of {} MiB: \
                 give the machine {needed} MiB or leave out tools",
                self.memory_mib(),
                length >> 20
            )));
        }
        let log = self.log_path()?;
        let (qemu, sockets) = Qemu::start(Hardware {
            kernel: &self.kernel,
            initramfs,
            memory_mib: self.memory_mib(),
            cpus: self.cpus,
            append: &self.append.join(" "),
            devices: &self.devices,
            hotplug_ports: self.hotplug_ports,
        })?;
        let console = Console::start(sockets.console, &log)?;
        let (channel, hello) = Channel::start(sockets.channel)?;
        let machine = Arc::new(Machine {
            qemu,
            console,
            channel,
            qmp: Qmp::new(sockets.qmp),
            grace: self.grace,
            patience: self.patience(),
        });
        let vm = Vm::new(
            machine,
            self.devices.len(),
            self.hotplug_ports,
            self.keep_log,
        );
        let (reply, _) = vm
            .machine
            .answer(&hello, "booting", vm.machine.patient(BOOT_LIMIT))?;
        let Reply::Hello { release, problems } = reply else {
            return Err(Error::Host(anyhow!(
                "the guest agent did not greet: {reply:?}"
            )));
        };
        if !problems.is_empty() {
            return Err(Error::Refused {
                what: "booting".into(),
                message: problems.join("; "),
            });
        }
        Ok(vm.booted(release, started.elapsed()))
    }

    fn log_path(&self) -> Result<PathBuf> {
        let plain = |c: char| {
            if c.is_ascii_alphanumeric() || "-_.+".contains(c) {
                c
            } else {
                '-'
            }
        };
        let name: String = self.name.chars().map(plain).collect();
        let dir = workspace::target_dir()?.join("vmrig/logs");
        Ok(dir.join(format!("{name}-{}.log", self.kernel.release)))
    }
}
