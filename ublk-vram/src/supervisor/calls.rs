//! Calls of the control socket that are not answered from memory.

use std::sync::mpsc::channel;

use super::desk::ReplySlot;
use super::machine::Machine;
use crate::control::{Call, Reply};
use crate::device::DeviceState;
use crate::error::{Error, ErrorKind, Result};
use crate::session::Order;

impl Machine {
    pub(super) fn answer(&mut self, call: Call, slot: ReplySlot) {
        let state = self.state();
        match call {
            Call::Restart {} => self.restart(slot),
            Call::Recover {} => self.recover(slot),
            Call::Remove { force } if state == DeviceState::Failed || self.is_lost_alone() => {
                if force || state == DeviceState::Lost {
                    self.removals.push(slot);
                    self.end_disk("it was removed by force");
                } else {
                    let name = &self.kept.identity.spec.name;
                    let error = format!(
                        "'{name}' is {state}, and requests may wait for it: `vramctl recover {name}` tries \
                         to bring it back, `vramctl remove {name} --force` ends it with EIO for them"
                    );
                    reply(slot, Err(Error::new(ErrorKind::Busy, error)));
                }
            }
            Call::Remove { force: true }
                if state == DeviceState::Recovering && self.worker.is_none() =>
            {
                self.removals.push(slot);
                self.end_disk("it was removed by force");
            }
            _ if state == DeviceState::Stopping && matches!(call, Call::Remove { .. }) => {
                self.removals.push(slot);
            }
            _ if !state.is_served() => {
                let error = format!("the device is {state}: try again in a moment");
                reply(slot, Err(Error::new(ErrorKind::Busy, error)));
            }
            call => self.forward(call, slot),
        }
    }

    fn forward(&mut self, call: Call, slot: ReplySlot) {
        let is_removal = matches!(call, Call::Remove { .. });
        let id = self.next_call;
        self.next_call = id.wrapping_add(1);
        let sent = match &self.worker {
            Some(worker) => worker.channel.send(&Order::Call { id, call }, &[]),
            None => Err(Error::new(ErrorKind::Busy, "there is no worker")),
        };
        match sent {
            Ok(()) => drop(self.pending.insert(id, (is_removal, slot))),
            Err(error) => reply(slot, Err(error)),
        }
    }
}

pub(super) fn reply(slot: ReplySlot, result: Result<()>) {
    let (written, _) = channel();
    let answer = Reply::from_result(result.map(|()| serde_json::json!({})));
    let _ = slot.send((answer, written));
}
