//! The QEMU process: its command line, its sockets, its end.
//!
//! The command line is the one that boots fastest and has no known trap: q35, TCG named explicitly
//! (a /dev/kvm that opens may still not work), the ELF kernel, no default devices. QEMU gets its
//! sockets and the initramfs as inherited descriptors, so nothing is left in the file system.

use std::{
    fs::File,
    io::{Read, Seek, SeekFrom},
    os::{
        fd::{AsRawFd, RawFd},
        unix::{net::UnixStream, process::CommandExt, process::ExitStatusExt},
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    sys::wait::{Id, WaitPidFlag, waitid},
    unistd::Pid,
};

use crate::{
    devices::{self, Device, SERIAL_SLOT},
    kernel::Kernel,
    protocol::{EXIT_PORT, PORT},
    workspace,
};

const PROGRAM: &str = "qemu-system-x86_64";
/// What makes the kernel boot fast, end on a panic, and keep its root file system out of swap.
/// With a log level of 5 warnings are on the console, those of the kernel about itself among them; `quiet`
/// would keep them off it.
const APPEND: &str = "console=ttyS0 panic=-1 loglevel=5 mitigations=off tsc=reliable no_timer_check \
    cryptomgr.notests nokaslr audit=0 apparmor=0 rcupdate.rcu_expedited=1 8250.nr_uarts=1 \
    rootfstype=ramfs sysrq_always_enabled oops=panic";

/// What a machine is made of.
pub(crate) struct Hardware<'a> {
    pub(crate) kernel: &'a Kernel,
    pub(crate) initramfs: File,
    pub(crate) memory_mib: u64,
    pub(crate) cpus: u32,
    pub(crate) append: &'a str,
    pub(crate) devices: &'a [Device],
    pub(crate) hotplug_ports: usize,
}

/// The host's ends of the machine's sockets.
pub(crate) struct Sockets {
    pub(crate) console: UnixStream,
    pub(crate) channel: UnixStream,
    pub(crate) qmp: UnixStream,
}

/// A running or ended QEMU.
pub(crate) struct Qemu {
    shared: Arc<Shared>,
}

struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    pid: Option<i32>,
    status: Option<ExitStatus>,
    stderr: String,
}

impl Qemu {
    /// Starts QEMU.
    pub(crate) fn start(hardware: Hardware<'_>) -> Result<(Self, Sockets)> {
        let program = workspace::which(PROGRAM).with_context(|| {
            format!("{PROGRAM} is not installed: install the package qemu-system-x86")
        })?;
        let (console, console_far) = UnixStream::pair()?;
        let (channel, channel_far) = UnixStream::pair()?;
        let (qmp, qmp_far) = UnixStream::pair()?;
        let far = [
            console_far.as_raw_fd(),
            channel_far.as_raw_fd(),
            qmp_far.as_raw_fd(),
        ];
        let mut command = Command::new(program);
        command.args(arguments(&hardware, far)?);
        let mut initramfs = hardware.initramfs;
        initramfs.seek(SeekFrom::Start(0))?;
        let inherited = [far[0], far[1], far[2], initramfs.as_raw_fd()];
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let parent = nix::unistd::getpid();
        // SAFETY: between fork and exec the closure makes only async-signal-safe system calls and
        // allocates nothing.
        unsafe {
            command.pre_exec(move || {
                for fd in inherited {
                    if libc::fcntl(fd, libc::F_SETFD, 0) < 0 {
                        return Err(std::io::Error::last_os_error());
                    }
                }
                if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                // The parent may have died before the request was made.
                if libc::getppid() != parent.as_raw() {
                    libc::_exit(1);
                }
                Ok(())
            });
        }
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            ended: Condvar::new(),
        });
        let (sender, receiver) = mpsc::channel();
        let watched = shared.clone();
        // The parent-death signal is sent when the thread that forked ends, so that thread must
        // stay for as long as QEMU.
        thread::Builder::new()
            .name("vmrig-qemu".into())
            .spawn(move || {
                let child = command.spawn();
                drop((console_far, channel_far, qmp_far, initramfs));
                match child {
                    Ok(child) => {
                        watched.lock().pid = Some(child.id() as i32);
                        let _ = sender.send(Ok(()));
                        watched.watch(child);
                    }
                    Err(error) => drop(sender.send(Err(error))),
                }
            })
            .context("cannot start a thread")?;
        receiver
            .recv()
            .map_err(|_| anyhow!("the thread that starts QEMU ended"))?
            .context("cannot start QEMU")?;
        Ok((
            Self { shared },
            Sockets {
                console,
                channel,
                qmp,
            },
        ))
    }

    /// How it ended, if it did.
    pub(crate) fn status(&self) -> Option<ExitStatus> {
        self.shared.lock().status
    }

    /// Waits for its end.
    pub(crate) fn wait(&self, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + limit;
        let mut state = self.shared.lock();
        while state.status.is_none() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.shared.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.status
    }

    /// Ends it now.
    pub(crate) fn kill(&self) {
        // The lock keeps the watcher from reaping it, so the id cannot be somebody else's.
        let state = self.shared.lock();
        if let (Some(pid), None) = (state.pid, state.status) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }

    /// What it said on stderr; complete once it ended.
    pub(crate) fn stderr(&self) -> String {
        self.shared.lock().stderr.clone()
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watch(&self, mut child: Child) {
        if let Some(mut stderr) = child.stderr.take() {
            let mut buffer = [0; 1024];
            while let Ok(length @ 1..) = stderr.read(&mut buffer) {
                let text = String::from_utf8_lossy(buffer.get(..length).unwrap_or_default());
                self.lock().stderr.push_str(&text);
            }
        }
        // Only stderr is closed so far: wait without reaping, then reap under the lock that `kill`
        // takes.
        let pid = Pid::from_raw(child.id() as i32);
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        while waitid(Id::Pid(pid), flags) == Err(Errno::EINTR) {}
        let mut state = self.lock();
        state.status = Some(child.wait().unwrap_or_else(|_| ExitStatus::from_raw(0)));
        self.ended.notify_all();
    }
}

fn arguments(hardware: &Hardware<'_>, sockets: [RawFd; 3]) -> Result<Vec<String>> {
    let [console, channel, qmp] = sockets;
    let mut line: Vec<String> = Vec::new();
    let mut add = |option: &str, value: String| line.extend([option.to_owned(), value]);
    add("-machine", "q35".into());
    add("-accel", "tcg,thread=multi".into());
    add("-cpu", "max".into());
    add("-m", hardware.memory_mib.to_string());
    add("-smp", hardware.cpus.to_string());
    add("-display", "none".into());
    add("-kernel", hardware.kernel.image.display().to_string());
    add(
        "-initrd",
        format!("/proc/self/fd/{}", hardware.initramfs.as_raw_fd()),
    );
    add("-append", format!("{APPEND} {}", hardware.append));
    add(
        "-device",
        format!("isa-debug-exit,iobase={EXIT_PORT:#x},iosize=0x04"),
    );
    add("-chardev", format!("socket,id=console,fd={console}"));
    add("-serial", "chardev:console".into());
    add("-chardev", format!("socket,id=qmp,fd={qmp}"));
    add("-mon", "chardev=qmp,mode=control".into());
    add("-chardev", format!("socket,id=channel,fd={channel}"));
    add(
        "-device",
        format!("virtio-serial-pci,id=serial,bus=pcie.0,addr={SERIAL_SLOT:#x}"),
    );
    add(
        "-device",
        format!("virtserialport,bus=serial.0,chardev=channel,name={PORT}"),
    );
    for port in 0..hardware.hotplug_ports {
        let slot = devices::port_slot(port)?;
        add(
            "-device",
            format!(
                "pcie-root-port,id=port{port},bus=pcie.0,addr={slot:#x},chassis={chassis},\
                 pref64-reserve=4G",
                chassis = port + 1
            ),
        );
    }
    for (index, device) in hardware.devices.iter().enumerate() {
        let id = format!("device{index}");
        let description = device.describe(&id, "pcie.0", devices::slot(index)?)?;
        if let Some(object) = description.object {
            add("-object", object.to_string());
        }
        if let Some(blockdev) = description.blockdev {
            add("-blockdev", blockdev.to_string());
        }
        add("-device", description.device.to_string());
    }
    line.extend([
        "-nodefaults".into(),
        "-no-user-config".into(),
        "-no-reboot".into(),
    ]);
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_names_tcg_and_every_address() {
        let kernel = Kernel {
            release: "x".into(),
            image: "/k".into(),
            modules: "/m".into(),
            debug: false,
        };
        let hardware = Hardware {
            kernel: &kernel,
            initramfs: tempfile::tempfile().unwrap(),
            memory_mib: 256,
            cpus: 2,
            append: "extra=1",
            devices: &[Device::Qxl { vram_mib: 64 }],
            hotplug_ports: 1,
        };
        let line = arguments(&hardware, [10, 11, 12]).unwrap().join(" ");
        for part in [
            "tcg,thread=multi",
            "rootfstype=ramfs",
            "extra=1",
            "fd=10",
            "addr=0x10",
        ] {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert!(line.contains("\"addr\":\"0x4\""), "{line}");
        assert!(!line.contains("kvm"));
    }
}
