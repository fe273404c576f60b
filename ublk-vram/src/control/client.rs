//! The caller's side: blocking, and never for longer than it was told.
//!
//! A server can hang (a driver that does not answer, a process that was stopped), and whoever asks
//! it must not hang with it. So every step — connect, send, wait for the answer — polls against one
//! deadline, and a timeout says which step it was. After a timeout the connection is of no more use:
//! the late answer to one call would be taken for the answer to the next.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};

use super::protocol::{Call, MAX_MESSAGE, METHOD_PREFIX, Reply};
use crate::error::{Error, ErrorKind, Result};

/// Bytes read at once.
const READ_BYTES: usize = 16 << 10;
/// Pause before a connection is tried again whose listener has no room.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// A connection to the server of one device.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    /// The device's name, for messages.
    name: String,
    /// Bytes that came after the last answer.
    received: Vec<u8>,
    /// An earlier call failed half-way: answers no longer belong to calls.
    broken: bool,
}

impl Client {
    /// Connects to the control socket of a device.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] when nobody listens there, [`ErrorKind::Permission`] when the caller
    /// is not root, [`ErrorKind::Timeout`] when the server takes no connections.
    pub fn connect(path: &Path, timeout: Duration) -> Result<Client> {
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let what = || {
            format!(
                "cannot connect to the server of '{name}' at {}",
                path.display()
            )
        };
        let address = UnixAddr::new(path).map_err(|errno| Error::os(what(), errno))?;
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Unix, SockType::Stream, flags, None)
            .map_err(|errno| Error::os("cannot make a socket", errno))?;
        let end = Instant::now() + timeout;
        loop {
            match connect(socket.as_raw_fd(), &address) {
                Ok(()) => break,
                Err(Errno::EINTR) => {}
                // A unix socket connects at once or not at all: this is a full backlog.
                Err(Errno::EAGAIN) if Instant::now() < end => std::thread::sleep(RETRY_PAUSE),
                Err(Errno::EAGAIN) => {
                    return Err(timed_out(&name, "take a connection", timeout));
                }
                Err(Errno::ENOENT | Errno::ECONNREFUSED) => {
                    return Err(Error::new(
                        ErrorKind::NotFound,
                        format!(
                            "no server of a device '{name}' is running (nobody listens at {}): \
                             see `vramctl list`",
                            path.display()
                        ),
                    ));
                }
                Err(Errno::EACCES | Errno::EPERM) => return Err(needs_root(&name)),
                Err(errno) => return Err(Error::os(what(), errno)),
            }
        }
        Ok(Client {
            stream: UnixStream::from(socket),
            name,
            received: Vec::new(),
            broken: false,
        })
    }

    /// Sends one call and waits for its answer, for at most `timeout` in all.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] naming what was waited for, or what went wrong with the connection.
    /// An error that the server answered is in the [`Reply`].
    pub fn call(&mut self, call: &Call, timeout: Duration) -> Result<Reply> {
        if self.broken {
            return Err(self.lost("an earlier call on this connection failed"));
        }
        self.broken = true;
        let reply = self.exchange(call, timeout)?;
        self.broken = false;
        Ok(reply)
    }

    fn exchange(&mut self, call: &Call, timeout: Duration) -> Result<Reply> {
        let text = serde_json::to_value(call).map_err(|error| self.lost(error))?;
        let method = text
            .get("method")
            .and_then(|method| method.as_str())
            .unwrap_or_default();
        let method = method
            .strip_prefix(METHOD_PREFIX)
            .unwrap_or(method)
            .to_owned();
        let mut message = serde_json::to_vec(&text).map_err(|error| self.lost(error))?;
        message.push(0);
        let deadline = Deadline {
            end: Instant::now() + timeout,
            timeout,
        };
        self.send(&message, &deadline, &format!("take the call {method}"))?;
        let answer = self.receive(&deadline, &format!("answer {method}"))?;
        serde_json::from_slice(&answer).map_err(|error| {
            self.lost(format!(
                "its answer to {method} is not understood ({error})"
            ))
        })
    }

    fn send(&mut self, mut message: &[u8], deadline: &Deadline, step: &str) -> Result<()> {
        while !message.is_empty() {
            match self.stream.write(message) {
                Ok(count) => message = message.get(count..).unwrap_or_default(),
                Err(error) => match error.kind() {
                    std::io::ErrorKind::Interrupted => {}
                    std::io::ErrorKind::WouldBlock => {
                        self.wait(PollFlags::POLLOUT, deadline, step)?;
                    }
                    std::io::ErrorKind::BrokenPipe => return Err(self.closed()),
                    _ => return Err(self.lost(error)),
                },
            }
        }
        Ok(())
    }

    /// The bytes up to the next NUL.
    fn receive(&mut self, deadline: &Deadline, step: &str) -> Result<Vec<u8>> {
        let mut buffer = [0u8; READ_BYTES];
        let mut searched = 0;
        loop {
            let fresh = self.received.get(searched..).unwrap_or_default();
            if let Some(end) = fresh.iter().position(|&byte| byte == 0) {
                let rest = self.received.split_off(searched + end + 1);
                let mut answer = std::mem::replace(&mut self.received, rest);
                answer.pop();
                return Ok(answer);
            }
            searched = self.received.len();
            if searched > MAX_MESSAGE {
                return Err(self.lost(format!("its answer is over {MAX_MESSAGE} bytes long")));
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => return Err(self.closed()),
                Ok(count) => {
                    self.received
                        .extend_from_slice(buffer.get(..count).unwrap_or_default());
                }
                Err(error) => match error.kind() {
                    std::io::ErrorKind::Interrupted => {}
                    std::io::ErrorKind::WouldBlock => {
                        self.wait(PollFlags::POLLIN, deadline, step)?;
                    }
                    std::io::ErrorKind::ConnectionReset => return Err(self.closed()),
                    _ => return Err(self.lost(error)),
                },
            }
        }
    }

    fn wait(&self, flags: PollFlags, deadline: &Deadline, step: &str) -> Result<()> {
        loop {
            let left = deadline.end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(timed_out(&self.name, step, deadline.timeout));
            }
            // Rounded up, so that the last fraction of a millisecond is slept and not spun.
            let millis = left.as_millis().saturating_add(1).min(1000);
            let mut fds = [PollFd::new(self.stream.as_fd(), flags)];
            match poll(
                &mut fds,
                PollTimeout::try_from(millis).unwrap_or(PollTimeout::ZERO),
            ) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(()),
                Err(errno) => return Err(self.lost(errno)),
            }
        }
    }

    /// The server ended the connection without an answer: it lets in only root, or it is gone.
    fn closed(&self) -> Error {
        if !nix::unistd::geteuid().is_root() {
            return needs_root(&self.name);
        }
        Error::new(
            ErrorKind::Io,
            format!(
                "the server of '{}' closed the connection without an answer: \
                 see whether it is still there with `vramctl list`",
                self.name
            ),
        )
    }

    fn lost(&self, why: impl std::fmt::Display) -> Error {
        Error::new(
            ErrorKind::Io,
            format!("cannot speak to the server of '{}': {why}", self.name),
        )
    }
}

struct Deadline {
    end: Instant,
    timeout: Duration,
}

fn needs_root(name: &str) -> Error {
    Error::new(
        ErrorKind::Permission,
        format!("control of '{name}' needs root"),
    )
}

fn timed_out(name: &str, step: &str, timeout: Duration) -> Error {
    Error::new(
        ErrorKind::Timeout,
        format!(
            "the server of '{name}' did not {step} within {} s: it is still busy, or hangs \
             (its log may say why)",
            timeout.as_secs_f32()
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::thread;

    const SHORT: Duration = Duration::from_millis(100);
    const LONG: Duration = Duration::from_secs(10);

    /// A server at `x.sock` that does `act` with each connection.
    fn server(act: impl Fn(UnixStream) + Send + 'static) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("x.sock")).unwrap();
        thread::spawn(move || listener.incoming().for_each(|stream| act(stream.unwrap())));
        dir
    }

    fn client(dir: &tempfile::TempDir) -> Client {
        Client::connect(&dir.path().join("x.sock"), SHORT).unwrap()
    }

    fn read_call(stream: &mut UnixStream) -> String {
        let mut text = Vec::new();
        let mut byte = [0u8];
        while stream.read(&mut byte).unwrap_or(0) == 1 && byte[0] != 0 {
            text.push(byte[0]);
        }
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn calls_get_their_answers_in_order() {
        let dir = server(|mut stream| {
            for n in 0..3 {
                assert!(read_call(&mut stream).contains("ublk_vram.Show"));
                // In pieces, with a pause: an answer need not come in one read.
                stream.write_all(b"{\"parameters\":").unwrap();
                thread::sleep(Duration::from_millis(20));
                stream.write_all(format!("{n}}}\0").as_bytes()).unwrap();
            }
        });
        let mut client = client(&dir);
        for n in 0..3 {
            let reply = client.call(&Call::Show {}, LONG).unwrap();
            assert_eq!(reply.into_result::<u32>().unwrap(), n);
        }
    }

    #[test]
    fn nobody_there_is_not_found() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("gone.sock");
        let error = Client::connect(&path, SHORT).unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound);
        assert!(error.message.contains("'gone'"), "{error}");
        // A socket file that a dead server left behind refuses.
        drop(UnixListener::bind(&path).unwrap());
        assert_eq!(
            Client::connect(&path, SHORT).unwrap_err().kind,
            ErrorKind::NotFound
        );
    }

    #[test]
    fn a_server_that_hangs_is_a_timeout_that_names_the_step() {
        let dir = server(|stream| {
            thread::sleep(LONG);
            drop(stream);
        });
        let mut client = client(&dir);
        let error = client
            .call(&Call::Remove { force: false }, SHORT)
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Timeout);
        assert!(
            error.message.contains("answer Remove within 0.1 s"),
            "{error}"
        );
        let error = client.call(&Call::Show {}, SHORT).unwrap_err();
        assert!(error.message.contains("earlier call"), "{error}");
    }

    #[test]
    fn a_listener_that_accepts_nobody_is_a_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sock");
        let listener = UnixListener::bind(&path).unwrap();
        nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
        let mut waiting = Vec::new();
        let error = loop {
            match Client::connect(&path, SHORT) {
                Ok(client) => waiting.push(client),
                Err(error) => break error,
            }
            assert!(waiting.len() < 100);
        };
        assert_eq!(error.kind, ErrorKind::Timeout);
        assert!(error.message.contains("take a connection"), "{error}");
    }

    #[test]
    fn a_server_that_reads_nothing_is_a_timeout() {
        let dir = server(|stream| {
            thread::sleep(LONG);
            drop(stream);
        });
        let mut client = client(&dir);
        let deadline = Deadline {
            end: Instant::now() + SHORT,
            timeout: SHORT,
        };
        let error = client
            .send(&vec![b'x'; 8 << 20], &deadline, "take the call X")
            .unwrap_err();
        assert!(error.message.contains("take the call X"), "{error}");
    }

    #[test]
    fn an_answer_without_an_end_is_cut_off() {
        let dir = server(|mut stream| {
            read_call(&mut stream);
            let _ = stream.write_all(&vec![b' '; MAX_MESSAGE + (1 << 20)]);
        });
        let error = client(&dir).call(&Call::Show {}, LONG).unwrap_err();
        assert!(error.message.contains("over 262144 bytes"), "{error}");
    }

    #[test]
    fn garbage_and_a_closed_connection_are_errors() {
        let dir = server(|mut stream| {
            read_call(&mut stream);
            stream.write_all(b"garbage\0").unwrap();
        });
        let error = client(&dir).call(&Call::Show {}, LONG).unwrap_err();
        assert!(
            error.message.contains("answer to Show is not understood"),
            "{error}"
        );
        let dir = server(drop);
        let error = client(&dir).call(&Call::Show {}, LONG).unwrap_err();
        if nix::unistd::geteuid().is_root() {
            assert!(error.message.contains("closed the connection"), "{error}");
        } else {
            assert_eq!(error.kind, ErrorKind::Permission);
        }
    }
}
