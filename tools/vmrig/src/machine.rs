//! The parts of a machine that its handle and its background processes share: ask, wait, and tell
//! how it ended.

use std::{
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use serde_json::json;

use crate::{
    Error, Result,
    channel::Channel,
    console::Console,
    protocol::{Reply, Request},
    qemu::Qemu,
    qmp::Qmp,
};

/// The parts of a machine that requests and background processes share.
pub(crate) struct Machine {
    pub(crate) qemu: Qemu,
    pub(crate) console: Console,
    pub(crate) channel: Channel,
    pub(crate) qmp: Qmp,
    pub(crate) grace: Duration,
    /// How many times as long as usual everything may take.
    pub(crate) patience: u32,
}

impl Machine {
    /// A time limit as it is for this machine.
    pub(crate) fn patient(&self, limit: Duration) -> Duration {
        limit.saturating_mul(self.patience)
    }

    /// Sends a request that the guest needs up to `limit` for, and waits for its answer.
    pub(crate) fn call(
        &self,
        what: &str,
        request: Request,
        payload: &[u8],
        limit: Duration,
    ) -> Result<(Reply, Vec<u8>)> {
        self.console.note(what);
        let receiver = self.channel.send(request, payload)?;
        let (reply, payload) = self.answer(
            &receiver,
            what,
            limit.saturating_add(self.patient(self.grace)),
        )?;
        self.console
            .note(&format!("{} of {what}", describe(&reply)));
        match reply {
            Reply::Error { message } => Err(Error::Refused {
                what: what.into(),
                message,
            }),
            reply => Ok((reply, payload)),
        }
    }

    /// Waits for an answer while watching the machine.
    pub(crate) fn answer(
        &self,
        receiver: &Receiver<(Reply, Vec<u8>)>,
        what: &str,
        limit: Duration,
    ) -> Result<(Reply, Vec<u8>)> {
        let deadline = Instant::now().checked_add(limit);
        loop {
            match receiver.recv_timeout(Duration::from_millis(100)) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) if self.console.panic().is_some() => {
                    return Err(self.end(what));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Err(self.end(what)),
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                self.dump_stacks();
                let console = self.console.tail();
                return Err(Error::NoAnswer {
                    what: what.into(),
                    limit,
                    console,
                });
            }
        }
    }

    /// Describes a machine that is gone, or going.
    pub(crate) fn end(&self, what: &str) -> Error {
        // A panic prints its stacks before QEMU ends.
        if self.qemu.wait(Duration::from_secs(10)).is_some() {
            self.console.join();
        }
        let console = self.console.tail();
        if let Some(message) = self.console.panic() {
            return Error::Panic {
                what: what.into(),
                message,
                console,
            };
        }
        let status = match self.qemu.status() {
            Some(status) => status.to_string(),
            None => "it runs, but closed its socket".into(),
        };
        Error::Died {
            what: what.into(),
            status,
            stderr: self.qemu.stderr(),
            console,
        }
    }

    /// Makes a guest that answers nothing print all its stacks: a break on the serial line is
    /// handled in the kernel's interrupt handler and needs no user space.
    pub(crate) fn dump_stacks(&self) {
        for key in [b"8", b"l", b"w", b"t", b"m"] {
            let sent = self
                .qmp
                .execute("chardev-send-break", json!({ "id": "console" }));
            if sent.is_err() || self.console.write(key).is_err() {
                return;
            }
            self.console
                .settle(Duration::from_millis(700), Duration::from_secs(20));
        }
    }
}

/// An answer in a few words, for the log.
fn describe(reply: &Reply) -> String {
    match reply {
        Reply::Finished(finished) if finished.timed_out => "time-out".into(),
        Reply::Finished(finished) => match (finished.rc, finished.signal) {
            (Some(rc), _) => format!("exit code {rc}"),
            (_, signal) => format!("signal {}", signal.unwrap_or_default()),
        },
        Reply::Spawned { pid, .. } => format!("start as process {pid}"),
        Reply::StillRunning => "no end yet".into(),
        Reply::Error { message } => format!("refusal ({message})"),
        Reply::Hello { .. } | Reply::Output { .. } | Reply::Done => "end".into(),
    }
}
