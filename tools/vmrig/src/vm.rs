//! A running machine: run commands in it, change its hardware, end it.

use std::{
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc::RecvTimeoutError,
    },
    thread,
    time::Duration,
};

use anyhow::{Context, anyhow};
use serde_json::Value;

use crate::{
    Error, Out, Process, Result, devices,
    machine::Machine,
    protocol::{Command, QEMU_EXIT_CLEAN, Reply, Request},
};

/// Time limit of [`Vm::sh`] in the guest.
const DEFAULT_LIMIT: Duration = Duration::from_secs(60);

/// A running virtual machine. All methods take `&self`: several threads may drive one machine.
///
/// Dropping it ends QEMU at once and keeps the console's log; [`Vm::shutdown`] is the orderly end.
pub struct Vm {
    pub(crate) machine: Arc<Machine>,
    release: String,
    boot_time: Duration,
    devices: usize,
    /// What is plugged into each port.
    pub(crate) ports: Mutex<Vec<Option<String>>>,
    keep_log: bool,
    ended_well: AtomicBool,
}

impl Vm {
    pub(crate) fn new(machine: Arc<Machine>, devices: usize, ports: usize, keep_log: bool) -> Self {
        Self {
            machine,
            release: String::new(),
            boot_time: Duration::ZERO,
            devices,
            ports: Mutex::new(vec![None; ports]),
            keep_log,
            ended_well: AtomicBool::new(false),
        }
    }

    pub(crate) fn booted(mut self, release: String, boot_time: Duration) -> Self {
        self.release = release;
        self.boot_time = boot_time;
        self
    }

    /// The running kernel's release.
    pub fn release(&self) -> &str {
        &self.release
    }

    /// From the call of [`boot`](crate::VmBuilder::boot) to the first request that could be sent.
    pub fn boot_time(&self) -> Duration {
        self.boot_time
    }

    /// Runs a shell script, for up to 60 s.
    ///
    /// # Errors
    /// Only when there is no result: see [`Error`]. A command that fails is a result.
    pub fn sh(&self, script: &str) -> Result<Out> {
        self.sh_timeout(script, DEFAULT_LIMIT)
    }

    /// Runs a shell script; after `limit` it is killed and the result says so.
    ///
    /// # Errors
    /// As [`sh`](Self::sh).
    pub fn sh_timeout(&self, script: &str, limit: Duration) -> Result<Out> {
        self.run(shell(script), &[], limit)
    }

    /// Runs a program with standard input.
    ///
    /// # Errors
    /// As [`sh`](Self::sh), and [`Error::Refused`] when the guest has no such program.
    pub fn run(&self, command: Command, stdin: &[u8], limit: Duration) -> Result<Out> {
        let what = describe(&command);
        let limit = self.machine.patient(limit);
        let timeout_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        let request = Request::Run {
            command,
            timeout_ms,
        };
        let answer = self.machine.call(&what, request, stdin, limit)?;
        finished(&what, answer)
    }

    /// Starts a shell script in the background.
    ///
    /// # Errors
    /// As [`sh`](Self::sh).
    pub fn spawn_sh(&self, script: &str) -> Result<Process> {
        self.spawn(shell(script))
    }

    /// Starts a program in the background.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn spawn(&self, command: Command) -> Result<Process> {
        let what = describe(&command);
        match self
            .machine
            .call(&what, Request::Spawn { command }, &[], Duration::ZERO)?
        {
            (Reply::Spawned { process, pid }, _) => {
                Ok(Process::new(self.machine.clone(), what, process, pid))
            }
            (reply, _) => Err(unexpected(&what, &reply)),
        }
    }

    /// Reads a file of the guest.
    ///
    /// # Errors
    /// [`Error::Refused`] with the guest's reason, or as [`sh`](Self::sh).
    pub fn read_file(&self, path: &str) -> Result<Vec<u8>> {
        let what = format!("read of {path}");
        let request = Request::ReadFile { path: path.into() };
        Ok(self.machine.call(&what, request, &[], DEFAULT_LIMIT)?.1)
    }

    /// Makes or replaces a file of the guest.
    ///
    /// # Errors
    /// As [`read_file`](Self::read_file).
    pub fn write_file(&self, path: &str, mode: u32, content: &[u8]) -> Result<()> {
        let what = format!("write of {path}");
        let request = Request::WriteFile {
            path: path.into(),
            mode,
        };
        self.machine
            .call(&what, request, content, DEFAULT_LIMIT)
            .map(drop)
    }

    /// Reads through a shared mapping, the only way into a PCI BAR
    /// (`/sys/bus/pci/devices/ADDRESS/resourceN_wc`).
    ///
    /// # Errors
    /// As [`read_file`](Self::read_file).
    pub fn read_mapping(&self, path: &str, offset: u64, length: u64) -> Result<Vec<u8>> {
        let what = format!("mapped read of {path}");
        let request = Request::ReadMapping {
            path: path.into(),
            offset,
            length,
        };
        Ok(self.machine.call(&what, request, &[], DEFAULT_LIMIT)?.1)
    }

    /// Writes through a shared mapping.
    ///
    /// # Errors
    /// As [`read_file`](Self::read_file).
    pub fn write_mapping(&self, path: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        let what = format!("mapped write of {path}");
        let request = Request::WriteMapping {
            path: path.into(),
            offset,
        };
        self.machine
            .call(&what, request, bytes, DEFAULT_LIMIT)
            .map(drop)
    }

    /// The PCI address of the device with that place in the order of
    /// [`device`](crate::VmBuilder::device) calls, such as `0000:00:04.0`.
    ///
    /// # Panics
    /// When the machine has no such device.
    pub fn pci_address(&self, index: usize) -> String {
        assert!(
            index < self.devices,
            "the machine has {} devices, no {index}",
            self.devices
        );
        devices::address(index)
    }

    /// Runs a command of QEMU's monitor.
    ///
    /// # Errors
    /// When QEMU refuses it or does not answer within 10 s.
    pub fn qmp(&self, command: &str, arguments: Value) -> Result<Value> {
        Ok(self.machine.qmp.execute(command, arguments)?)
    }

    /// The whole console so far.
    pub fn console(&self) -> String {
        self.machine.console.text()
    }

    /// Whether the console has `needle`.
    pub fn console_contains(&self, needle: &str) -> bool {
        self.machine.console.contains(needle)
    }

    /// Where the console is logged with times; the file is removed after a good run.
    pub fn log_path(&self) -> &Path {
        self.machine.console.log_path()
    }

    /// Lines in which the kernel complains of itself: warnings, bugs, stalls, hung tasks.
    pub fn kernel_complaints(&self) -> Vec<String> {
        let complaints = [
            "BUG:",
            "WARNING:",
            "Oops",
            "INFO: task ",
            "INFO: trying to register non-static key",
            "stall",
            "Call Trace:",
        ];
        let text = self.console();
        text.lines()
            .filter(|line| complaints.iter().any(|complaint| line.contains(complaint)))
            .map(str::to_owned)
            .collect()
    }

    /// Prints the stacks of all tasks on the console and returns what was printed.
    pub fn stacks(&self) -> String {
        let before = self.console().len();
        self.machine.dump_stacks();
        self.console().get(before..).unwrap_or_default().to_owned()
    }

    /// Waits for the kernel to panic and returns its reason. Such an end is a good one: the log is
    /// removed.
    ///
    /// # Errors
    /// [`Error::NoAnswer`] when it does not within `limit`, [`Error::Died`] when QEMU ended
    /// otherwise.
    pub fn wait_panic(&self, limit: Duration) -> Result<String> {
        let ended = self.machine.qemu.wait(limit).is_some();
        if !ended {
            self.machine.dump_stacks();
            let console = self.machine.console.tail();
            return Err(Error::NoAnswer {
                what: "a panic".into(),
                limit,
                console,
            });
        }
        match self.machine.end("waiting for a panic") {
            Error::Panic { message, .. } => {
                self.ended_well.store(true, Ordering::Relaxed);
                Ok(message)
            }
            error => Err(error),
        }
    }

    /// Ends the machine in order and removes its log.
    ///
    /// # Errors
    /// When the guest did not end, or did not end in order.
    pub fn shutdown(self) -> Result<()> {
        let what = "power-off";
        let limit = self.machine.patient(self.machine.grace);
        let receiver = self.machine.channel.send(Request::PowerOff, &[])?;
        // No answer comes: the end of the channel is the answer.
        match receiver.recv_timeout(limit) {
            Err(RecvTimeoutError::Disconnected) => {}
            _ => {
                self.machine.dump_stacks();
                let console = self.machine.console.tail();
                return Err(Error::NoAnswer {
                    what: what.into(),
                    limit,
                    console,
                });
            }
        }
        let status = self.machine.qemu.wait(limit);
        if status.and_then(|status| status.code()) != Some(QEMU_EXIT_CLEAN) {
            return Err(self.machine.end(what));
        }
        self.ended_well.store(true, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.machine.qemu.kill();
        if self.machine.qemu.wait(Duration::from_secs(10)).is_some() {
            self.machine.console.join();
        }
        if self.ended_well.load(Ordering::Relaxed) && !self.keep_log && !thread::panicking() {
            let _ = std::fs::remove_file(self.machine.console.log_path());
        }
    }
}

/// The command that runs a shell script.
pub(crate) fn shell(script: &str) -> Command {
    let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    Command {
        argv,
        env: Vec::new(),
    }
}

fn describe(command: &Command) -> String {
    match command.argv.as_slice() {
        [sh, c, script] if sh == "/bin/sh" && c == "-c" => script.clone(),
        argv => argv.join(" "),
    }
}

/// Turns the answer to a command into its result.
pub(crate) fn finished(what: &str, answer: (Reply, Vec<u8>)) -> Result<Out> {
    match answer {
        (Reply::Finished(finished), payload) => Ok(Out::new(what, &finished, &payload)),
        (reply, _) => Err(unexpected(what, &reply)),
    }
}

pub(crate) fn unexpected(what: &str, reply: &Reply) -> Error {
    let answer = Err::<(), _>(anyhow!("{reply:?}"));
    Error::Host(
        answer
            .context(format!("the guest agent misunderstood {what}"))
            .unwrap_err(),
    )
}
