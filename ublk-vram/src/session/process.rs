//! Starting another process of the same server, connected to this one.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::Channel;
use crate::error::{Error, Result};

/// This very program, even where its path is not in our mount namespace or was replaced.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// Another process of the server.
pub struct Process {
    /// Its id.
    pub pid: i32,
    /// Its end: readable once it has ended.
    pidfd: OwnedFd,
    /// To speak to it.
    pub channel: Channel,
    /// It has closed its end: nothing comes any more.
    pub has_hung_up: bool,
    /// Absent for one that this process did not start.
    child: Option<Child>,
}

/// Where standard error of a new process goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stderr {
    /// To ours: somebody listens.
    Inherit,
    /// Nowhere.
    Null,
}

impl Process {
    /// Starts `program` with `arguments`. Its standard input is the other end of the channel.
    ///
    /// No `pre_exec`: the child is made by posix_spawn (vfork), so no page of ours becomes
    /// copy-on-write and no I/O thread takes a fault for it.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(program: &Path, arguments: &[&str], stderr: Stderr) -> Result<Process> {
        let failed = |error| Error::os(format!("cannot start {}", program.display()), error);
        let (channel, theirs) = Channel::pair()?;
        let child = Command::new(program)
            .arg0("ublk-vram")
            .args(arguments)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(match stderr {
                Stderr::Inherit => Stdio::inherit(),
                Stderr::Null => Stdio::null(),
            })
            .spawn()
            .map_err(failed)?;
        let pid = i32::try_from(child.id()).unwrap_or(0);
        Ok(Process {
            pid,
            pidfd: pidfd(pid)?,
            channel,
            has_hung_up: false,
            child: Some(child),
        })
    }

    /// A process that runs already and has the other end of `channel`.
    ///
    /// # Errors
    /// It has ended.
    pub fn running(pid: i32, channel: Channel) -> Result<Process> {
        Ok(Process {
            pid,
            pidfd: pidfd(pid)?,
            channel,
            has_hung_up: false,
            child: None,
        })
    }

    /// Readable once the process has ended.
    pub fn end(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Closes this end of the channel.
    pub fn hang_up(&mut self) {
        self.has_hung_up = true;
        self.channel.close();
    }

    /// Ends it at once.
    pub fn kill(&self) {
        // SAFETY: pidfd_send_signal with no further information touches no memory; the descriptor names
        // this process and never another one of the same id.
        unsafe {
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.pidfd.as_raw_fd(),
                libc::SIGKILL,
                std::ptr::null::<libc::siginfo_t>(),
                0,
            )
        };
    }

    /// Whether it has ended, waiting for at most `limit`.
    pub fn has_ended(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        loop {
            let left = end.saturating_duration_since(Instant::now()).as_millis();
            let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
            let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, left) {
                Ok(0) if Instant::now() >= end => return false,
                Ok(0) | Err(_) => {}
                Ok(_) => return true,
            }
        }
    }

    /// How it ended, in words. To be called once it has: a child is reaped.
    pub fn how_it_ended(&mut self) -> String {
        let status: Option<ExitStatus> = self.child.as_mut().and_then(|child| child.wait().ok());
        match status {
            Some(status) => status.to_string(),
            None => "in a way that only its parent learns".to_owned(),
        }
    }
}

fn pidfd(pid: i32) -> Result<OwnedFd> {
    // SAFETY: pidfd_open takes two numbers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let fd = i32::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        let error = std::io::Error::last_os_error();
        return Err(Error::os(format!("process {pid} of the server"), error));
    }
    // SAFETY: the kernel has just made this descriptor for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The channel that this process was started with: its standard input, which becomes /dev/null.
///
/// # Errors
/// There are no descriptors left.
pub fn inherited_channel() -> Result<Channel> {
    let failed = |error| Error::os("cannot take over standard input", error);
    let socket = std::io::stdin()
        .as_fd()
        .try_clone_to_owned()
        .map_err(failed)?;
    let null = File::open("/dev/null").map_err(failed)?;
    nix::unistd::dup2_stdin(&null).map_err(|errno| failed(errno.into()))?;
    Ok(Channel::new(socket))
}

/// Where the program that runs here is installed: another version may lie there by now.
pub fn installed_program() -> PathBuf {
    let own = std::env::current_exe().unwrap_or_else(|_| OWN_PROGRAM.into());
    // The kernel says so of a file that was replaced (fs/d_path.c).
    let text = own.to_string_lossy();
    let path = PathBuf::from(text.strip_suffix(" (deleted)").unwrap_or(&text));
    if OpenOptions::new().read(true).open(&path).is_ok() {
        path
    } else {
        OWN_PROGRAM.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_started_seen_to_end_and_killed() {
        let shell = Path::new("/bin/sh");
        let mut short = Process::start(shell, &["-c", "exit 3"], Stderr::Null).unwrap();
        assert!(short.has_ended(Duration::from_secs(10)));
        assert!(short.how_it_ended().contains("exit status: 3"));
        assert!(short.channel.receive::<u32>().unwrap().is_none());

        let mut long = Process::start(shell, &["-c", "exec sleep 100"], Stderr::Null).unwrap();
        assert!(!long.has_ended(Duration::ZERO));
        let seen = Process::running(long.pid, Channel::pair().unwrap().0).unwrap();
        long.kill();
        assert!(seen.has_ended(Duration::from_secs(10)));
        assert!(long.how_it_ended().contains("signal: 9"));
        let gone = Process::start(Path::new("/nowhere"), &[], Stderr::Null).err();
        assert_eq!(gone.unwrap().kind, crate::ErrorKind::NotFound);
    }
}
