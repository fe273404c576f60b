//! Leaving the caller behind: a server is started by a command that ends, from a terminal that
//! closes, in a directory somebody wants to unmount.

use std::fs::File;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{chdir, dup2_stderr, dup2_stdin, dup2_stdout, setsid};

use crate::error::{Error, ErrorKind, Result};

/// Makes the process independent of whoever started it: its own session without a terminal, `/` as
/// its directory, umask 022, SIGHUP and SIGPIPE ignored.
///
/// # Errors
/// The process leads a process group (a shell made it one): then it cannot get a session of its
/// own, and must be started by fork or spawn.
pub fn detach_from_caller() -> Result<()> {
    setsid().map_err(|e| match e {
        nix::Error::EPERM => Error::new(
            ErrorKind::Unsupported,
            "cannot leave the caller's session (setsid): the process leads a process group; \
             it has to be started as a child (vramctl add, a unit), not by a shell itself",
        ),
        e => Error::os("cannot leave the caller's session: setsid", e),
    })?;
    chdir("/").map_err(|e| Error::os("cannot leave the caller's directory: chdir /", e))?;
    umask(Mode::from_bits_truncate(0o022));
    for ignored in [Signal::SIGHUP, Signal::SIGPIPE] {
        // SAFETY: ignoring a signal installs no handler, so nothing can run in a signal's context.
        unsafe { signal(ignored, SigHandler::SigIgn) }
            .map_err(|e| Error::os(format_args!("cannot ignore {ignored}"), e))?;
    }
    Ok(())
}

/// Raises the soft limit of open files towards the hard one, for itself and all it starts: memory comes
/// with a descriptor for each chunk, and goes from process to process. Programs whose soft limit is low by
/// default are those that use select(2), which none of ours does.
pub fn allow_open_files() {
    /// Beyond this nobody needs any, and a library that closes every number there could be takes long.
    const MOST: u64 = 1 << 16;
    if let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        // What is lost if this fails is found by whoever needs the limit.
        let _ = setrlimit(Resource::RLIMIT_NOFILE, soft.max(hard.min(MOST)), hard);
    }
}

/// Whether memory of `chunks` chunks can be held and handed on.
///
/// # Errors
/// [`ErrorKind::NoSpace`] with the limit that forbids it.
pub fn check_open_files(chunks: u32) -> Result<()> {
    /// Descriptors of each chunk in one process: the driver's, ours, a message's on its way, and one.
    const EACH: u64 = 4;
    /// Descriptors of a process beside those: rings, sockets, eventfds, the driver's own.
    const OTHERS: u64 = 256;
    let wanted = u64::from(chunks) * EACH + OTHERS;
    let (allowed, _) = getrlimit(Resource::RLIMIT_NOFILE)
        .map_err(|errno| Error::os("the limit of open files", errno))?;
    if wanted <= allowed {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::NoSpace,
        format!(
            "{chunks} chunks need {wanted} open files and {allowed} are allowed: use a larger --chunk, or \
             raise the limit (ulimit -n, LimitNOFILE=)"
        ),
    ))
}

/// Makes the process one that is never dumped to a core file: its buffers hold what the disk holds,
/// and writing a dump would need memory that only this process can free.
///
/// # Errors
/// None that is known; the kernel's answer is passed on.
pub fn forbid_core_dump() -> Result<()> {
    // SAFETY: PR_SET_DUMPABLE takes one integer and touches no memory of ours.
    let result = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
    nix::errno::Errno::result(result)
        .map(drop)
        .map_err(|e| Error::os("cannot forbid core dumps (PR_SET_DUMPABLE)", e))
}

/// Points standard input, output and error at /dev/null. To be called last: until then an error can
/// still be told to the caller.
///
/// # Errors
/// /dev/null cannot be opened.
pub fn redirect_stdio_to_null() -> Result<()> {
    let failed = |e| Error::os("cannot point standard input and output at /dev/null", e);
    let null = File::options()
        .read(true)
        .write(true)
        .open("/dev/null")
        .map_err(|e| Error::os("cannot open /dev/null", e))?;
    dup2_stdin(&null).map_err(failed)?;
    dup2_stdout(&null).map_err(failed)?;
    dup2_stderr(&null).map_err(failed)?;
    Ok(())
}

/// Gives the process the name that `ps` and the tests know it by, whatever path it was started from.
pub fn name_process() {
    // SAFETY: PR_SET_NAME reads a NUL-terminated string of at most 16 bytes, which is static.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"ublk-vram".as_ptr()) };
}

/// From here on a panic in any thread is said and ends the process at once, as SIGKILL would: a worker
/// that lost a thread must not go on with the rest.
pub fn abort_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        tracing::error!("{panic}");
        std::process::abort();
    }));
}

/// Blocks SIGTERM and SIGINT in the calling thread and those it will start, and gives back the set
/// for the one thread that waits for them (sigwait). To be called before a second thread exists:
/// a thread that does not block them would be ended by them.
///
/// # Errors
/// None that is known; the kernel's answer is passed on.
pub fn block_termination_signals() -> Result<SigSet> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    set.thread_block()
        .map_err(|e| Error::os("cannot block SIGTERM and SIGINT", e))?;
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safety::fixture::in_child;
    use nix::unistd::{getpid, getsid, setpgid};

    #[test]
    fn no_core_dump() {
        let said = in_child(|| {
            forbid_core_dump().unwrap();
            // SAFETY: PR_GET_DUMPABLE takes no argument and touches no memory.
            unsafe { libc::prctl(libc::PR_GET_DUMPABLE) }.to_string()
        });
        assert_eq!(said, "0");
    }

    #[test]
    fn a_session_of_its_own() {
        let said = in_child(|| {
            detach_from_caller().unwrap();
            assert_eq!(getsid(None).unwrap(), getpid());
            assert_eq!(umask(Mode::empty()).bits(), 0o022);
            // SAFETY: raise delivers to this thread; the signal is ignored.
            assert_eq!(unsafe { libc::raise(libc::SIGHUP) }, 0);
            let again = detach_from_caller().unwrap_err();
            assert!(again.message.contains("leads a process group"), "{again}");
            std::env::current_dir().unwrap().display().to_string()
        });
        assert_eq!(said, "/");
    }

    #[test]
    fn the_leader_of_a_group_is_told_why() {
        let said = in_child(|| {
            setpgid(getpid(), getpid()).unwrap();
            detach_from_caller().unwrap_err().message
        });
        assert!(said.contains("leads a process group"), "{said}");
    }

    #[test]
    fn signals_wait_for_the_thread_that_takes_them() {
        let said = in_child(|| {
            let set = block_termination_signals().unwrap();
            std::thread::spawn(move || {
                // SAFETY: kill to the own process; the signal is blocked in every thread.
                assert_eq!(unsafe { libc::kill(libc::getpid(), libc::SIGTERM) }, 0);
                set.wait().unwrap()
            })
            .join()
            .unwrap()
            .to_string()
        });
        assert_eq!(said, "SIGTERM");
    }

    #[test]
    fn stdio_goes_nowhere() {
        let said = in_child(|| {
            redirect_stdio_to_null().unwrap();
            ["0", "1", "2"]
                .map(|fd| std::fs::read_link(format!("/proc/self/fd/{fd}")).unwrap())
                .map(|path| path.display().to_string())
                .join(" ")
        });
        assert_eq!(said, "/dev/null /dev/null /dev/null");
    }
}
