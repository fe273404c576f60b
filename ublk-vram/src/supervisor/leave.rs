//! The end of a supervisor: what is given back, and what is left as it is.

use std::sync::mpsc::channel;
use std::time::Duration;

use super::desk::ReplySlot;
use super::machine::{End, Machine};
use super::start::StartLine;
use crate::control::Reply;
use crate::error::Result;
use crate::session::process::Process;
use crate::ublk;

/// How long a process that has said its last word may take to end.
const LAST_WORD: Duration = Duration::from_secs(10);
/// The driver's time for each command.
const DRIVER_LIMIT: Duration = Duration::from_secs(10);

impl Machine {
    /// Gives everything back, or leaves it as it is, and answers who waited for that.
    pub(super) fn leave(mut self, end: End) -> Result<()> {
        for process in [self.worker.take(), self.standby.take()]
            .into_iter()
            .flatten()
        {
            dismiss(process, &end);
        }
        let start = self.take_start();
        match end {
            End::Done => {
                self.kept.release();
                answer_all(self.removals, &Ok(()));
                Ok(())
            }
            End::NotStarted(error) => {
                if let Some(id) = self.device
                    && let Err(error) = ublk::delete_orphan(id, DRIVER_LIMIT)
                {
                    tracing::error!("{error}");
                }
                self.kept.release();
                if let Some(mut start) = start {
                    let failed = error.clone();
                    start.send(&StartLine::Failed { failed });
                }
                Err(error)
            }
            End::LeftBehind(error) => {
                tracing::error!("{error}");
                self.kept.disown();
                answer_all(self.removals, &Err(error.clone()));
                if let Some(mut start) = start {
                    let failed = error.clone();
                    start.send(&StartLine::Failed { failed });
                }
                Err(error)
            }
        }
    }
}

/// Lets a process end that is not needed any more, and makes it if it does not. A worker that may have
/// something in the driver's hands is not waited for when it hangs there.
fn dismiss(process: Process, end: &End) {
    let mut process = process;
    if matches!(end, End::NotStarted(_)) {
        process.kill();
    }
    // A standby ends when the other end of its channel does.
    process.hang_up();
    if !process.has_ended(LAST_WORD) {
        process.kill();
        if !process.has_ended(LAST_WORD) {
            tracing::error!("process {} does not end", process.pid);
            return;
        }
    }
    process.how_it_ended();
}

/// Answers everybody; the process ends next, so each is waited for until the answer is written.
fn answer_all(slots: Vec<ReplySlot>, result: &Result<()>) {
    for slot in slots {
        let (written, wait) = channel();
        let answer = match result {
            Ok(()) => Reply::from_result(Ok(serde_json::json!({}))),
            Err(error) => Reply::from_result::<()>(Err(error.clone())),
        };
        if slot.send((answer, written)).is_ok() {
            let _ = wait.recv_timeout(Duration::from_secs(2));
        }
    }
}
