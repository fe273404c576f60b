//! Starting a server, and learning how that went.
//!
//! The server writes one JSON line to the start pipe: the device is usable, or why it is not. Until
//! then its standard error is kept here, so that a server that dies without a word is not a riddle.
//! Everything is one poll loop: no thread and no pipe of ours is left that could block the server
//! later. A server that is not wanted any more (timeout, Ctrl-C) is asked to end by SIGTERM, never
//! killed: nobody can know whether its disk is already swap.

use std::io::{ErrorKind as IoKind, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, kill, sigprocmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{Pid, pipe2};
use ublk_vram::device::{DeviceName, DeviceSpec, StaticInfo};
use ublk_vram::supervisor::StartLine;
use ublk_vram::{Error, ErrorKind, Result};

use crate::swap::is_program;

/// The server's program.
const PROGRAM: &str = "ublk-vram";
/// Names another program, for tests and for an installation that is not in one place.
const PROGRAM_VARIABLE: &str = "UBLK_VRAM_SERVER";
/// The longest start line. What is longer is not ours.
const MAX_LINE: usize = 256 << 10;
/// Of the server's standard error so many bytes are kept.
const KEPT_BYTES: usize = 8 << 10;
/// And so many of its last lines are shown.
const SHOWN_LINES: usize = 5;
/// How long a server that has said its last word may take to end.
const END_LIMIT: Duration = Duration::from_secs(5);
/// How long a server that was asked to end may take: it may be zeroing memory.
const CALL_OFF_LIMIT: Duration = Duration::from_secs(30);
/// How long a server that is ready may take to let go of its standard error.
const DETACH_LIMIT: Duration = Duration::from_secs(2);

/// A device that is usable.
#[derive(Debug)]
pub struct Started {
    /// What it is.
    pub device: StaticInfo,
    /// What the user should know.
    pub warnings: Vec<String>,
}

/// Finds the server: `$UBLK_VRAM_SERVER` if it is set, else beside this program, else in PATH.
///
/// # Errors
/// It is nowhere.
pub fn find_server() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os(PROGRAM_VARIABLE).filter(|value| !value.is_empty()) {
        let named = PathBuf::from(named);
        if is_program(&named) {
            return Ok(named);
        }
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "${PROGRAM_VARIABLE} names {}, which is no program",
                named.display()
            ),
        ));
    }
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent).map(Path::to_path_buf);
    let path = std::env::var_os("PATH").unwrap_or_default();
    beside
        .into_iter()
        .chain(std::env::split_paths(&path).filter(|dir| dir.is_absolute()))
        .map(|dir| dir.join(PROGRAM))
        .find(|program| is_program(program))
        .ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the server program {PROGRAM} is neither beside vramctl nor in PATH: install \
                     it, or name it in ${PROGRAM_VARIABLE}"
                ),
            )
        })
}

/// Starts the server of a device and waits until the device is usable, at most `limit`.
///
/// # Errors
/// What the server said, or how it ended without saying anything.
pub fn start(program: &Path, spec: &DeviceSpec, limit: Duration) -> Result<Started> {
    let json = serde_json::to_vec(spec)
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot write JSON: {error}")))?;
    let mut server = Server::spawn(program, spec.name.as_str(), &[])?;
    server.give(&json)?;
    server.wait(limit)
}

/// Starts a server for the device that is left of `name`, and waits until it is served again, at most
/// `limit`.
///
/// # Errors
/// As [`start`].
pub fn recover(program: &Path, name: &DeviceName, limit: Duration) -> Result<Started> {
    let name = name.as_str();
    let mut server = Server::spawn(program, name, &["--recover", name])?;
    server.give(&[])?;
    server.wait(limit)
}

/// A server that was started and has not yet said how it went.
struct Server {
    child: Child,
    program: String,
    /// The device's name.
    name: String,
    start: OwnedFd,
    stderr: Option<std::process::ChildStderr>,
    said: Vec<u8>,
    signals: SignalFd,
    /// What was blocked before.
    mask: SigSet,
}

impl Drop for Server {
    fn drop(&mut self) {
        // What is started next (mkswap) inherits the mask, and must be interruptible again.
        let _ = sigprocmask(SigmaskHow::SIG_SETMASK, Some(&self.mask), None);
    }
}

impl Server {
    fn wait(mut self, limit: Duration) -> Result<Started> {
        match self.wait_for_line(limit)? {
            Some(line) => self.judge(&line),
            None => Err(self.ended_without_a_word()),
        }
    }

    fn spawn(program: &Path, name: &str, more: &[&str]) -> Result<Server> {
        let failed = |errno: Errno| Error::os("cannot prepare the start of a server", errno);
        let (start, theirs) = pipe2(OFlag::O_CLOEXEC).map_err(failed)?;
        // Only the server inherits it: this program has one thread and starts nothing else here.
        fcntl(&theirs, FcntlArg::F_SETFD(FdFlag::empty())).map_err(failed)?;
        let program_text = program.display().to_string();
        let mut child = Command::new(program)
            .args(["serve", "--start-pipe", &theirs.as_raw_fd().to_string()])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Error::os(format!("cannot start {program_text}"), error))?;
        drop(theirs);
        let stderr = child.stderr.take();
        nonblocking(&start).map_err(failed)?;
        if let Some(stderr) = &stderr {
            nonblocking(stderr).map_err(failed)?;
        }
        // After the start: the server must not inherit the mask.
        let mut mask = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            mask.add(signal);
        }
        let mut before = SigSet::empty();
        sigprocmask(SigmaskHow::SIG_BLOCK, Some(&mask), Some(&mut before)).map_err(failed)?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let signals = SignalFd::with_flags(&mask, flags).map_err(failed)?;
        Ok(Server {
            child,
            program: program_text,
            name: name.to_owned(),
            start,
            stderr,
            said: Vec::new(),
            signals,
            mask: before,
        })
    }

    /// Writes the specification to the server's standard input and closes it.
    fn give(&mut self, json: &[u8]) -> Result<()> {
        // It is far smaller than a pipe, so this does not wait.
        let Some(mut stdin) = self.child.stdin.take() else {
            return Ok(());
        };
        match stdin.write_all(json) {
            // A server that died before it read has more to say than that.
            Err(error) if error.kind() != IoKind::BrokenPipe => {
                Err(Error::os("cannot give the server its specification", error))
            }
            _ => Ok(()),
        }
    }

    /// The start line, or `None` when the pipe ends without one.
    fn wait_for_line(&mut self, limit: Duration) -> Result<Option<Vec<u8>>> {
        let end = Instant::now() + limit;
        let mut line = Vec::new();
        loop {
            if let Some(length) = line.iter().position(|&byte| byte == b'\n') {
                line.truncate(length);
                return Ok(Some(line));
            }
            if line.len() > MAX_LINE {
                return Ok(Some(line));
            }
            if Instant::now() >= end {
                let what = format!("did not become usable within {} s", limit.as_secs_f32());
                return Err(self.call_off(ErrorKind::Timeout, &what));
            }
            self.wait_some(end)?;
            if let Ok(Some(_)) = self.signals.read_signal() {
                return Err(self.call_off(ErrorKind::Io, "was called off by a signal"));
            }
            self.listen();
            match read_some(&self.start, &mut line) {
                Got::Nothing | Got::Bytes => {}
                Got::End if line.is_empty() => return Ok(None),
                Got::End => return Ok(Some(line)),
            }
        }
    }

    /// Waits until something is there, a second at most.
    fn wait_some(&self, end: Instant) -> Result<()> {
        let left = end
            .saturating_duration_since(Instant::now())
            .as_millis()
            .saturating_add(1);
        let left = PollTimeout::try_from(left.min(1000)).unwrap_or(PollTimeout::ZERO);
        let mut fds = vec![
            PollFd::new(self.start.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
        ];
        if let Some(stderr) = &self.stderr {
            fds.push(PollFd::new(stderr.as_fd(), PollFlags::POLLIN));
        }
        match poll(&mut fds, left) {
            Ok(_) | Err(Errno::EINTR) => Ok(()),
            Err(errno) => Err(Error::os("cannot wait for the server", errno)),
        }
    }

    /// Takes what the server has written to its standard error. False when that is all.
    fn listen(&mut self) -> bool {
        let Some(stderr) = &self.stderr else {
            return false;
        };
        loop {
            match read_some(stderr, &mut self.said) {
                Got::Bytes => {
                    let excess = self.said.len().saturating_sub(KEPT_BYTES);
                    self.said.drain(..excess);
                }
                Got::Nothing => return true,
                Got::End => {
                    self.stderr = None;
                    return false;
                }
            }
        }
    }

    fn judge(mut self, line: &[u8]) -> Result<Started> {
        match serde_json::from_slice(line) {
            Ok(StartLine::Ready { ready, warnings }) => {
                // The server lets go of its standard error next: not before that may we end, or a
                // word it still writes would meet a broken pipe.
                let end = Instant::now() + DETACH_LIMIT;
                while self.listen() && Instant::now() < end {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Ok(Started {
                    device: *ready,
                    warnings,
                })
            }
            Ok(StartLine::Failed { failed }) => {
                // Nothing is left behind when this program ends.
                self.wait_for_end(END_LIMIT);
                Err(failed)
            }
            Err(error) => Err(self.call_off(
                ErrorKind::Io,
                &format!(
                    "cannot be used: the first line of its server {} is not understood ({error}): \
                     is it of the same version?",
                    self.program
                ),
            )),
        }
    }

    fn ended_without_a_word(&mut self) -> Error {
        let Some(status) = self.wait_for_end(END_LIMIT) else {
            return self.call_off(
                ErrorKind::Io,
                "cannot be used: its server closed the start pipe without a word",
            );
        };
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => format!("exit status {code}"),
            (None, Some(number)) => match Signal::try_from(number) {
                Ok(signal) => format!("killed by {signal}"),
                Err(_) => format!("killed by signal {number}"),
            },
            (None, None) => status.to_string(),
        };
        Error::new(
            ErrorKind::Io,
            format!(
                "the server of '{}' ({}) ended before the device was usable: {how}{}",
                self.name,
                self.program,
                self.last_words()
            ),
        )
    }

    /// Asks the server to end, and says why and whether it did.
    fn call_off(&mut self, kind: ErrorKind, what: &str) -> Error {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).unwrap_or(0));
        let ended = self.wait_for_end(Duration::ZERO).is_some();
        let ended = ended || {
            // Not reaped, so the id is still our child's.
            let asked = pid.as_raw() > 0 && kill(pid, Signal::SIGTERM).is_ok();
            asked && self.wait_for_end(CALL_OFF_LIMIT).is_some()
        };
        let server = if ended {
            "its server has ended".to_owned()
        } else {
            format!("its server (pid {pid}) was asked to end and has not yet")
        };
        Error::new(
            kind,
            format!(
                "device '{}' {what}; {server}{}",
                self.name,
                self.last_words()
            ),
        )
    }

    /// Waits for the server's end and takes its last words; `None` if it does not come.
    fn wait_for_end(&mut self, limit: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            self.listen();
            match self.child.try_wait() {
                Ok(Some(status)) => {
                    self.listen();
                    return Some(status);
                }
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(10)),
                Ok(None) | Err(_) => return None,
            }
        }
    }

    fn last_words(&self) -> String {
        let text = String::from_utf8_lossy(&self.said);
        let lines: Vec<&str> = text
            .lines()
            .map(str::trim_end)
            .filter(|line| !line.is_empty())
            .collect();
        let from = lines.len().saturating_sub(SHOWN_LINES);
        match lines.get(from..) {
            None | Some([]) => String::new(),
            Some(last) => format!("; it said last: {}", last.join(" / ")),
        }
    }
}

enum Got {
    Bytes,
    Nothing,
    End,
}

/// Appends what a non-blocking descriptor has to give.
fn read_some(fd: &impl AsFd, to: &mut Vec<u8>) -> Got {
    let mut buffer = [0u8; 4096];
    match nix::unistd::read(fd, &mut buffer) {
        Ok(0) => Got::End,
        Ok(count) => {
            to.extend_from_slice(buffer.get(..count).unwrap_or_default());
            Got::Bytes
        }
        Err(Errno::EAGAIN | Errno::EINTR) => Got::Nothing,
        Err(_) => Got::End,
    }
}

fn nonblocking(fd: &impl AsFd) -> Result<(), Errno> {
    fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map(drop)
}
