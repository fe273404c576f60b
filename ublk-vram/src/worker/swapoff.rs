//! The swapoff helper: a process of its own, started before the device goes live.
//!
//! swapoff(2) makes its caller's whole process the OOM killer's first choice, whatever its score
//! (mm/swapfile.c, set_current_oom_origin), and it must be allowed to reclaim, which an IO_FLUSHER
//! is not. So neither may be the server. The helper is one more `ublk-vram` process that waits on a
//! pipe; if it fails or is killed, the device stays.

use std::ffi::CString;
use std::io::{BufRead, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::error::{Error, ErrorKind, Result};
use crate::safety;

/// The hidden subcommand the helper runs as.
pub const SUBCOMMAND: &str = "swapoff-helper";

/// The server's side of the helper.
pub(super) struct SwapoffHelper {
    child: Child,
    orders: ChildStdin,
    answers: ChildStdout,
    answer: Vec<u8>,
    busy: bool,
}

impl SwapoffHelper {
    /// Starts the helper.
    pub(super) fn start() -> Result<SwapoffHelper> {
        let failed = |error| Error::os("cannot start the swapoff helper", error);
        // No `pre_exec`: the child is made by posix_spawn (vfork), so no page of ours becomes
        // copy-on-write and no I/O thread takes a fault for it.
        // This very program, even where its path is not in our mount namespace or was replaced.
        let mut child = Command::new("/proc/self/exe")
            .arg(SUBCOMMAND)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let (Some(orders), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::new(ErrorKind::Io, "the swapoff helper has no pipes"));
        };
        fcntl(&answers, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))
            .map_err(|errno| Error::os("the swapoff helper's pipe", errno))?;
        Ok(SwapoffHelper {
            child,
            orders,
            answers,
            answer: Vec::with_capacity(256),
            busy: false,
        })
    }

    /// Whether an order is being carried out.
    pub(super) fn is_busy(&self) -> bool {
        self.busy
    }

    /// Orders the swapoff of `swap`.
    pub(super) fn order(&mut self, swap: &Path) -> Result<()> {
        let mut line = swap.as_os_str().as_bytes().to_vec();
        line.push(b'\n');
        self.orders
            .write_all(&line)
            .map_err(|error| Error::os("the swapoff helper is gone", error))?;
        self.busy = true;
        Ok(())
    }

    /// The outcome of the order, once there is one.
    pub(super) fn poll(&mut self) -> Option<Result<()>> {
        let mut buffer = [0u8; 256];
        match self.answers.read(&mut buffer) {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
            Ok(0) | Err(_) => {
                self.busy = false;
                let status = self
                    .child
                    .wait()
                    .map_or_else(|e| e.to_string(), |s| s.to_string());
                return Some(Err(Error::new(
                    ErrorKind::Io,
                    format!("the swapoff helper died ({status})"),
                )));
            }
            Ok(count) => self.answer.extend_from_slice(buffer.get(..count)?),
        }
        let end = self.answer.iter().position(|&byte| byte == b'\n')?;
        let line: Vec<u8> = self.answer.drain(..=end).collect();
        self.busy = false;
        let errno: i32 = String::from_utf8_lossy(&line)
            .trim()
            .parse()
            .unwrap_or(libc::EIO);
        Some(match errno {
            // EINVAL and ENOENT: somebody else's swapoff was faster. The next look tells.
            0 | libc::EINVAL | libc::ENOENT => Ok(()),
            libc::ENOMEM => Err(Error::new(
                ErrorKind::NoSpace,
                "swapoff failed: what is swapped does not fit into memory and other swap",
            )),
            errno => Err(Error::os(
                "swapoff failed",
                std::io::Error::from_raw_os_error(errno),
            )),
        })
    }
}

impl Drop for SwapoffHelper {
    fn drop(&mut self) {
        // Killed rather than asked: it may be in the middle of a swapoff that nobody wants any more.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The helper's own `main`: one path a line in, one errno (0: done) a line out, until the pipe ends.
///
/// # Errors
/// If its protections cannot be undone, or a pipe breaks.
pub fn helper_main() -> Result<()> {
    // Without the right to change it (--allow-unsafe) it was never set.
    if safety::is_io_flusher().unwrap_or(false) {
        safety::clear_io_flusher()?;
    }
    safety::expose_to_oom_killer(i32::try_from(std::process::id()).unwrap_or(0))?;
    let input = std::io::stdin().lock();
    let mut output = std::io::stdout().lock();
    for line in input.split(b'\n') {
        let line = line.map_err(|error| Error::os("the swapoff helper's orders", error))?;
        let errno = match CString::new(line) {
            // SAFETY: a NUL-terminated path that lives through the call.
            Ok(path) if unsafe { libc::swapoff(path.as_ptr()) } == 0 => 0,
            Ok(_) => std::io::Error::last_os_error()
                .raw_os_error()
                .unwrap_or(libc::EIO),
            Err(_) => libc::EINVAL,
        };
        writeln!(output, "{errno}")
            .and_then(|()| output.flush())
            .map_err(|error| Error::os("the swapoff helper's answers", error))?;
    }
    Ok(())
}
