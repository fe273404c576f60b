//! A process that runs in the guest while the test does something else.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use crate::{
    Error, Out, Result,
    machine::Machine,
    protocol::{Reply, Request},
    vm::{finished, unexpected},
};

/// A background process of the guest. Dropping the handle does not end it.
pub struct Process {
    machine: Arc<Machine>,
    command: String,
    process: u64,
    pid: i32,
    out: Mutex<Option<Out>>,
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Process")
            .field("command", &self.command)
            .field("pid", &self.pid)
            .finish()
    }
}

impl Process {
    pub(crate) fn new(machine: Arc<Machine>, command: String, process: u64, pid: i32) -> Self {
        Self {
            machine,
            command,
            process,
            pid,
            out: Mutex::new(None),
        }
    }

    /// Process id in the guest. It leads a session and process group of its own.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// [`Error::StillRunning`] when it runs on after `limit` (it is not killed), or those of
    /// [`Vm::sh`](crate::Vm::sh).
    pub fn wait(&self, limit: Duration) -> Result<Out> {
        self.poll(limit)?.ok_or_else(|| Error::StillRunning {
            what: self.command.clone(),
            limit,
        })
    }

    /// Its result, if it has ended.
    ///
    /// # Errors
    /// Those of [`Vm::sh`](crate::Vm::sh).
    pub fn try_wait(&self) -> Result<Option<Out>> {
        self.poll(Duration::ZERO)
    }

    fn poll(&self, limit: Duration) -> Result<Option<Out>> {
        let mut known = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        if known.is_none() {
            let limit = self.machine.patient(limit);
            let timeout_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
            let request = Request::Wait {
                process: self.process,
                timeout_ms,
            };
            match self.machine.call(&self.command, request, &[], limit)? {
                (Reply::StillRunning, _) => {}
                answer => *known = Some(finished(&self.command, answer)?),
            }
        }
        Ok(known.clone())
    }

    /// Standard output and standard error so far.
    ///
    /// # Errors
    /// Those of [`Vm::sh`](crate::Vm::sh).
    pub fn output(&self) -> Result<(String, String)> {
        // The lock is held while somebody waits for the end: then there is none yet.
        if let Ok(known) = self.out.try_lock()
            && let Some(out) = known.as_ref()
        {
            return Ok((out.stdout.clone(), out.stderr.clone()));
        }
        let request = Request::Peek {
            process: self.process,
        };
        match self
            .machine
            .call(&self.command, request, &[], Duration::ZERO)?
        {
            (Reply::Output { stdout_len }, payload) => {
                let (stdout, stderr) = payload.split_at(payload.len().min(stdout_len as usize));
                let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
                Ok((text(stdout), text(stderr)))
            }
            (reply, _) => Err(unexpected(&self.command, &reply)),
        }
    }

    /// Sends a signal to the process alone.
    ///
    /// # Errors
    /// [`Error::Refused`] when it has ended, or those of [`Vm::sh`](crate::Vm::sh).
    pub fn kill(&self, signal: i32) -> Result<()> {
        self.signal(signal, false)
    }

    /// Sends a signal to all of its process group.
    ///
    /// # Errors
    /// As [`kill`](Self::kill).
    pub fn kill_group(&self, signal: i32) -> Result<()> {
        self.signal(signal, true)
    }

    fn signal(&self, signal: i32, group: bool) -> Result<()> {
        let what = format!("signal {signal} to `{}`", self.command);
        let request = Request::Kill {
            process: self.process,
            signal,
            group,
        };
        self.machine
            .call(&what, request, &[], Duration::ZERO)
            .map(drop)
    }
}
