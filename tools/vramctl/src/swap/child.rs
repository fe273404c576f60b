//! Work on a disk, in a process of its own.
//!
//! A disk that does not answer holds whoever reads it, in a sleep that no signal ends. This program must
//! not be held: it has the work done by a child, waits for a time, says what it waited for, and leaves.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, setpgid};
use ublk_vram::{Error, ErrorKind, Result};

/// How soon the end of a child is noticed.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How long a killed child may take to end.
const KILL_LIMIT: Duration = Duration::from_secs(5);

/// Starts a child that ends with the status that `work` gives.
///
/// # Errors
/// If there is no process to be had.
pub fn start(work: impl FnOnce() -> i32) -> Result<Pid> {
    // SAFETY: this program has one thread, so the child may do whatever its parent could; it leaves by
    // _exit, which runs nothing of the parent's.
    match unsafe { fork() } {
        Ok(ForkResult::Parent { child }) => Ok(child),
        Ok(ForkResult::Child) => {
            // Nobody would hear of its end. What it starts in turn is in its group.
            // SAFETY: prctl on plain values.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let _ = setpgid(Pid::from_raw(0), Pid::from_raw(0));
            let status = work();
            // SAFETY: _exit only ends the process.
            unsafe { libc::_exit(status) }
        }
        Err(errno) => Err(Error::os("cannot start a process", errno)),
    }
}

/// How the child ended, if it does within `limit`.
///
/// # Errors
/// If it is no child.
pub fn wait(child: Pid, limit: Duration) -> Result<Option<WaitStatus>> {
    let end = Instant::now() + limit;
    loop {
        match waitpid(child, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => {}
            Ok(status) => return Ok(Some(status)),
            Err(errno) => return Err(Error::os("cannot wait for a child process", errno)),
        }
        if Instant::now() >= end {
            return Ok(None);
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

/// Ends the child and what it started; false if it cannot be ended, because it waits for a disk.
pub fn end(child: Pid) -> bool {
    // One that has just ended, or has no group yet, is waited for all the same.
    let _ = kill(Pid::from_raw(-child.as_raw()), Signal::SIGKILL);
    let _ = kill(child, Signal::SIGKILL);
    matches!(wait(child, KILL_LIMIT), Ok(Some(_)))
}

/// Has `work` done within `limit`; `what` says in the error what was waited for.
///
/// # Errors
/// That of `work`, or [`ErrorKind::Timeout`].
pub fn limited(what: &str, limit: Duration, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let (mut reader, mut writer) =
        std::io::pipe().map_err(|error| Error::os("cannot make a pipe", error))?;
    let child = start(|| {
        let answer = serde_json::to_vec(&work().err()).unwrap_or_default();
        // Short enough for the pipe's buffer; a parent that is gone needs no answer.
        i32::from(writer.write_all(&answer).is_err())
    })?;
    drop(writer);
    match wait(child, limit)? {
        Some(WaitStatus::Exited(_, 0)) => {
            let mut answer = Vec::new();
            reader
                .read_to_end(&mut answer)
                .map_err(|error| Error::os(what, error))?;
            match serde_json::from_slice::<Option<Error>>(&answer) {
                Ok(None) => Ok(()),
                Ok(Some(error)) => Err(error),
                Err(error) => Err(Error::new(ErrorKind::Io, format!("{what}: {error}"))),
            }
        }
        Some(status) => Err(Error::new(
            ErrorKind::Io,
            format!("{what}: the process that did it ended with {status:?}"),
        )),
        None => {
            let rest = if end(child) {
                "and was given up"
            } else {
                "and cannot be ended: the disk does not answer (`vramctl list` may say why)"
            };
            Err(Error::new(
                ErrorKind::Timeout,
                format!("{what} took longer than {} s, {rest}", limit.as_secs()),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_outcome_comes_back() {
        let limit = Duration::from_secs(20);
        assert!(limited("x", limit, || Ok(())).is_ok());
        let error = limited("x", limit, || Err(Error::usage("no"))).unwrap_err();
        assert_eq!(
            (error.kind, error.message.as_str()),
            (ErrorKind::Usage, "no")
        );
    }

    #[test]
    fn what_takes_too_long_is_named_and_ended() {
        let work = || {
            std::thread::sleep(Duration::from_secs(1000));
            Ok(())
        };
        let error = limited("reading /dev/x", Duration::from_millis(50), work).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Timeout);
        assert!(
            error.message.starts_with("reading /dev/x took longer than"),
            "{error}"
        );
        assert!(error.message.ends_with("given up"), "{error}");
    }
}
