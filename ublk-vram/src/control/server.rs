//! The server's side, on a thread of its own with tokio-uring's runtime.
//!
//! Only this room names tokio-uring. Its listener cannot bind a unix socket on kernels from 6.12.9
//! on (it sets SO_REUSEPORT, which unix sockets now refuse), so the listener is tokio's and the
//! streams are tokio-uring's. This thread may allocate and wait; no I/O thread ever waits for it.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use tokio::sync::oneshot;

use super::protocol::{Call, MAX_MESSAGE, Reply};
use crate::error::{Error, Result};

/// Bytes read at once.
const READ_BYTES: usize = 4096;

/// How a call is answered.
pub enum Answer {
    /// At once.
    Now(Reply),
    /// When the owner of the sending half has it; the sender in the pair is dropped once the reply
    /// has been written, so that a process that ends afterwards can wait for that.
    Later(oneshot::Receiver<(Reply, Sender<()>)>),
}

/// What calls go to. It must not block: what takes time is answered [`Answer::Later`].
pub trait Handler: Send + Sync + 'static {
    /// Takes one call.
    fn call(&self, call: Call) -> Answer;
}

/// Makes the control socket, mode 0600, in place of one that a dead server left.
///
/// # Errors
/// If it cannot be made. The caller holds the name's lock, so no live server's socket is replaced.
pub fn bind(path: &Path) -> Result<UnixListener> {
    let what = || format!("cannot make the control socket {}", path.display());
    match std::fs::remove_file(path) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Error::os(what(), error)),
    }
    let listener = UnixListener::bind(path).map_err(|error| Error::os(what(), error))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))
        .and_then(|()| listener.set_nonblocking(true))
        .map_err(|error| Error::os(what(), error))?;
    Ok(listener)
}

/// Serves the socket on the calling thread, for ever; `ready` is called once calls are taken. The
/// runtime panics if the kernel gives it no ring, so a caller waits for that.
///
/// # Errors
/// If the runtime cannot take the listener.
pub fn serve(
    listener: UnixListener,
    handler: Arc<dyn Handler>,
    ready: impl FnOnce(),
) -> Result<()> {
    tokio_uring::start(async move {
        let listener = tokio::net::UnixListener::from_std(listener)
            .map_err(|error| Error::os("the control socket cannot be served", error))?;
        ready();
        loop {
            match listener.accept().await {
                Ok((stream, _)) => match stream.into_std() {
                    Ok(stream) => {
                        drop(tokio_uring::spawn(connection(stream, Arc::clone(&handler))))
                    }
                    Err(error) => tracing::warn!("control: a connection was lost: {error}"),
                },
                Err(error) => {
                    tracing::warn!("control: accept: {error}");
                    // Out of descriptors or memory: waiting is all that can help.
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                }
            }
        }
    })
}

async fn connection(stream: UnixStream, handler: Arc<dyn Handler>) {
    match getsockopt(&stream, PeerCredentials) {
        Ok(peer) if peer.uid() == 0 => {}
        Ok(peer) => {
            tracing::warn!("control: user {} was turned away", peer.uid());
            return;
        }
        Err(errno) => {
            tracing::warn!("control: a peer without credentials was turned away: {errno}");
            return;
        }
    }
    // io_uring waits for a blocking descriptor; for a non-blocking one it would return EAGAIN.
    if stream.set_nonblocking(false).is_err() {
        return;
    }
    let stream = tokio_uring::net::UnixStream::from_std(stream);
    let mut received: Vec<u8> = Vec::new();
    let mut buffer = vec![0u8; READ_BYTES];
    loop {
        while let Some(end) = received.iter().position(|&byte| byte == 0) {
            let message: Vec<u8> = received.drain(..=end).collect();
            let answer = match serde_json::from_slice(message.get(..end).unwrap_or_default()) {
                Ok(call) => handler.call(call),
                Err(error) => Answer::Now(Reply::from_result::<()>(Err(Error::usage(format!(
                    "the call is not understood: {error}"
                ))))),
            };
            let (reply, written) = match answer {
                Answer::Now(reply) => (reply, None),
                Answer::Later(reply) => match reply.await {
                    Ok((reply, written)) => (reply, Some(written)),
                    Err(_) => return,
                },
            };
            let mut text = serde_json::to_vec(&reply).unwrap_or_default();
            text.push(0);
            let (sent, _) = stream.write_all(text).await;
            drop(written);
            if sent.is_err() {
                return;
            }
        }
        if received.len() > MAX_MESSAGE {
            tracing::warn!("control: a call of over {MAX_MESSAGE} bytes ended its connection");
            return;
        }
        let (read, back) = stream.read(buffer).await;
        buffer = back;
        match read {
            Ok(0) | Err(_) => return,
            Ok(count) => received.extend_from_slice(buffer.get(..count).unwrap_or_default()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};

    struct Echo;

    impl Handler for Echo {
        fn call(&self, call: Call) -> Answer {
            match call {
                Call::Remove { .. } => {
                    let (send, reply) = oneshot::channel();
                    std::thread::spawn(move || {
                        let (written, wait) = std::sync::mpsc::channel();
                        send.send((Reply::from_result(Ok("gone")), written))
                            .unwrap();
                        assert!(wait.recv().is_err(), "dropped after the write");
                    });
                    Answer::Later(reply)
                }
                _ => Answer::Now(Reply::from_result(Ok("now"))),
            }
        }
    }

    fn ask(stream: &mut UnixStream, text: &[u8]) -> String {
        stream.write_all(text).unwrap();
        let mut answer = Vec::new();
        let mut byte = [0u8];
        while stream.read(&mut byte).unwrap() == 1 && byte[0] != 0 {
            answer.push(byte[0]);
        }
        String::from_utf8(answer).unwrap()
    }

    #[test]
    fn calls_are_answered_in_order_on_one_connection() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.sock");
        let listener = bind(&path).unwrap();
        assert_eq!(
            std::fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        std::thread::spawn(move || serve(listener, Arc::new(Echo), || ()));
        let mut stream = UnixStream::connect(&path).unwrap();
        if !nix::unistd::geteuid().is_root() {
            // Only root is let in: the connection ends without an answer.
            assert_eq!(ask(&mut stream, b"{}\0"), "");
            return;
        }
        let show = b"{\"method\":\"io.github.ublk_vram.Show\",\"parameters\":{}}\0";
        let remove = b"{\"method\":\"io.github.ublk_vram.Remove\",\"parameters\":{}}\0";
        assert_eq!(ask(&mut stream, show), r#"{"parameters":"now"}"#);
        assert_eq!(ask(&mut stream, remove), r#"{"parameters":"gone"}"#);
        assert!(ask(&mut stream, b"{\"method\":\"x\"}\0").contains("not understood"));
        assert!(ask(&mut stream, b"garbage\0").contains("not understood"));
        assert_eq!(ask(&mut stream, show), r#"{"parameters":"now"}"#);
    }

    #[test]
    fn a_call_without_an_end_is_cut_off() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("t.sock");
        let listener = bind(&path).unwrap();
        std::thread::spawn(move || serve(listener, Arc::new(Echo), || ()));
        let mut stream = UnixStream::connect(&path).unwrap();
        let chunk = vec![b'x'; 1 << 16];
        let mut refused = false;
        for _ in 0..64 {
            refused |= stream.write_all(&chunk).is_err();
        }
        assert!(refused, "the server must not take 4 MiB without an end");
    }
}
