//! The host's end of the conversation with the guest agent: many requests under way, each with a
//! reply of its own.

use std::{
    collections::HashMap,
    io::ErrorKind,
    os::unix::net::UnixStream,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, Receiver, Sender},
    },
    thread,
    time::Duration,
};

use anyhow::{Context, Result};

use crate::protocol::{Reply, Request, read_frame, write_frame};

/// A guest that takes none of a frame for so long is as good as dead.
const WRITE_LIMIT: Duration = Duration::from_secs(60);

type Answer = (Reply, Vec<u8>);
type Pending = Arc<Mutex<Option<HashMap<u64, Sender<Answer>>>>>;

/// A connection to one guest agent.
pub(crate) struct Channel {
    writer: Mutex<UnixStream>,
    pending: Pending,
    next_id: AtomicU64,
}

impl Channel {
    /// Starts reading; the first answer on the returned receiver is the agent's greeting.
    pub(crate) fn start(stream: UnixStream) -> Result<(Self, Receiver<Answer>)> {
        let reader = stream
            .try_clone()
            .context("cannot copy the channel's descriptor")?;
        stream.set_write_timeout(Some(WRITE_LIMIT))?;
        let (sender, hello) = mpsc::channel();
        let pending: Pending = Arc::new(Mutex::new(Some(HashMap::from([(0, sender)]))));
        let shared = pending.clone();
        thread::Builder::new()
            .name("vmrig-channel".into())
            .spawn(move || {
                read_replies(reader, &shared);
                // From here on every receiver learns at once that no answer will come.
                shared.lock().unwrap_or_else(PoisonError::into_inner).take();
            })
            .context("cannot start a thread")?;
        Ok((
            Self {
                writer: Mutex::new(stream),
                pending,
                next_id: AtomicU64::new(1),
            },
            hello,
        ))
    }

    /// Sends a request; its answer comes on the receiver, which is closed if the guest is gone.
    pub(crate) fn send(&self, request: Request, payload: &[u8]) -> Result<Receiver<Answer>> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = mpsc::channel();
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pending) = pending.as_mut() {
            pending.insert(id, sender);
        }
        drop(pending);
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        match write_frame(&mut *writer, id, request, payload) {
            // A broken pipe is the end of QEMU: the caller finds the reason when its receiver is
            // closed.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => {
                Err(error).context("cannot send a request to the guest")
            }
            _ => Ok(receiver),
        }
    }
}

fn read_replies(mut reader: UnixStream, pending: &Mutex<Option<HashMap<u64, Sender<Answer>>>>) {
    while let Ok((head, payload)) = read_frame::<Reply>(&mut reader) {
        let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
        let sender = pending
            .as_mut()
            .and_then(|pending| pending.remove(&head.id));
        if let Some(sender) = sender {
            let _ = sender.send((head.body, payload));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_find_their_requests_in_any_order() {
        let (host, mut guest) = UnixStream::pair().unwrap();
        let (channel, hello) = Channel::start(host).unwrap();
        write_frame(&mut guest, 0, Reply::Done, b"").unwrap();
        assert!(matches!(hello.recv().unwrap().0, Reply::Done));
        let first = channel.send(Request::PowerOff, b"").unwrap();
        let second = channel.send(Request::PowerOff, b"").unwrap();
        for id in [2_u64, 1] {
            write_frame(&mut guest, id, Reply::Done, &id.to_le_bytes()).unwrap();
        }
        assert_eq!(first.recv().unwrap().1, 1_u64.to_le_bytes());
        assert_eq!(second.recv().unwrap().1, 2_u64.to_le_bytes());
        let third = channel.send(Request::PowerOff, b"").unwrap();
        drop(guest);
        assert!(third.recv().is_err());
        let fourth = channel.send(Request::PowerOff, b"").unwrap();
        assert!(fourth.recv().is_err());
    }
}
