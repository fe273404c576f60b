//! Where a story takes place: a guest, or this machine.

use std::time::Duration;

use anyhow::{Result, bail};
use vmrig::Vm;

/// What a command that ended printed.
#[derive(Debug)]
pub struct Ran {
    /// Exit code; 128 + number after a signal.
    pub rc: i32,
    pub stdout: String,
    pub stderr: String,
    /// How long it ran.
    pub took: Duration,
}

impl Ran {
    /// The same if the exit code is 0.
    ///
    /// # Errors
    /// What the command said, otherwise.
    pub fn ok(self, script: &str) -> Result<Self> {
        if self.rc != 0 {
            bail!(
                "`{script}` ended with exit code {}: {}",
                self.rc,
                self.said()
            );
        }
        Ok(self)
    }

    /// Both outputs, for a message.
    pub fn said(&self) -> String {
        let text = [self.stdout.trim(), self.stderr.trim()];
        let text: Vec<&str> = text.into_iter().filter(|text| !text.is_empty()).collect();
        text.join("\n")
    }
}

/// Runs shell scripts.
pub trait Machine {
    /// Runs one to its end, or until `limit`.
    ///
    /// # Errors
    /// When there is no result; a command that fails is one.
    fn sh(&self, script: &str, limit: Duration) -> Result<Ran>;

    /// Runs one that must not be torn apart: nothing but `limit` ends it.
    ///
    /// # Errors
    /// As [`Machine::sh`].
    fn sh_whole(&self, script: &str, limit: Duration) -> Result<Ran> {
        self.sh(script, limit)
    }

    /// Runs one that must succeed.
    ///
    /// # Errors
    /// When there is no result, or another exit code than 0.
    fn must(&self, script: &str, limit: Duration) -> Result<Ran> {
        self.sh(script, limit)?.ok(script)
    }
}

impl Machine for Vm {
    fn sh(&self, script: &str, limit: Duration) -> Result<Ran> {
        let out = self.sh_timeout(script, limit)?;
        if out.timed_out {
            bail!("`{script}` did not end within {} s", limit.as_secs());
        }
        Ok(Ran {
            rc: out.rc,
            took: out.duration,
            stdout: out.stdout,
            stderr: out.stderr,
        })
    }
}
