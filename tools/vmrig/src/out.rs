//! The typed result of a command that ran in the guest.

use std::{fmt, time::Duration};

use crate::{Error, Result, protocol::Finished};

/// How a command in the guest ended and what it printed.
#[derive(Debug, Clone)]
pub struct Out {
    /// The command, as the caller wrote it.
    pub command: String,
    /// Exit code, or 128 + signal number as a shell has it.
    pub rc: i32,
    /// The signal that ended the command, if one did.
    pub signal: Option<i32>,
    /// The guest's time limit ran out and the command was killed.
    pub timed_out: bool,
    /// SIGKILL did not end the command: a task of it sits in the kernel. `rc` says nothing then.
    pub stuck: bool,
    /// Standard output, invalid UTF-8 replaced.
    pub stdout: String,
    /// Standard error, invalid UTF-8 replaced.
    pub stderr: String,
    /// Standard output as bytes.
    pub stdout_bytes: Vec<u8>,
    /// Time in the guest.
    pub duration: Duration,
}

impl Out {
    pub(crate) fn new(command: &str, finished: &Finished, payload: &[u8]) -> Self {
        let (stdout, stderr) = payload.split_at(payload.len().min(finished.stdout_len as usize));
        Self {
            command: command.to_owned(),
            rc: finished
                .rc
                .or(finished.signal.map(|signal| 128 + signal))
                .unwrap_or(-1),
            signal: finished.signal,
            timed_out: finished.timed_out,
            stuck: finished.stuck,
            stdout: String::from_utf8_lossy(stdout).into_owned(),
            stderr: String::from_utf8_lossy(stderr).into_owned(),
            stdout_bytes: stdout.to_vec(),
            duration: Duration::from_millis(finished.duration_ms),
        }
    }

    /// Whether the command ended by itself with exit code 0.
    pub fn success(&self) -> bool {
        self.rc == 0 && !self.timed_out && !self.stuck
    }

    /// The same result if the command succeeded.
    ///
    /// # Errors
    /// [`Error::Command`], with both outputs in its message, on any other exit code, a signal or a
    /// time-out.
    pub fn ok(self) -> Result<Self> {
        if self.success() {
            Ok(self)
        } else {
            Err(Error::Command(Box::new(self)))
        }
    }

    /// The same result if the command ended by itself with exit code `rc`.
    ///
    /// # Errors
    /// [`Error::Command`], with both outputs in its message, otherwise.
    pub fn expect_rc(self, rc: i32) -> Result<Self> {
        if self.rc == rc && !self.timed_out && !self.stuck {
            Ok(self)
        } else {
            Err(Error::Command(Box::new(self)))
        }
    }
}

impl fmt::Display for Out {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}` ", self.command.trim())?;
        match (self.stuck, self.timed_out, self.signal) {
            (true, ..) => write!(f, "could not be killed after {:?}", self.duration)?,
            (_, true, _) => write!(f, "was killed by its time limit after {:?}", self.duration)?,
            (_, _, Some(signal)) => write!(f, "was ended by signal {signal}")?,
            _ => write!(f, "ended with exit code {}", self.rc)?,
        }
        for (name, text) in [("stdout", &self.stdout), ("stderr", &self.stderr)] {
            if !text.trim().is_empty() {
                write!(f, "\n--- {name} ---\n{}", text.trim_end())?;
            }
        }
        Ok(())
    }
}
