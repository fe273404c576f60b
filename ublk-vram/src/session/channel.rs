//! Messages and descriptors between the processes of a server.
//!
//! A pair of SOCK_SEQPACKET unix sockets: messages keep their borders, and the end of the other
//! process is an end of file. A message is JSON; descriptors beyond what one system call takes go
//! ahead of it. Sending never waits: the receiver reads whenever it is alive, and one that is not
//! must not hold up the other.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::cmsg_space;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, recvmsg,
    sendmsg, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind, Result};

/// Descriptors of one system call; the kernel's limit is 253 (SCM_MAX_FD, include/net/scm.h).
const MOST_FDS: usize = 128;
/// Longest message in bytes: a specification and some strings.
const MAX_MESSAGE: usize = 64 << 10;
/// A packet that only carries descriptors of the message that follows.
const AHEAD: &[u8] = b"+";

/// One end. Used by one reader; senders share it.
pub struct Channel {
    socket: OwnedFd,
    buffer: Box<[u8]>,
}

impl Channel {
    /// Two ends that are connected to each other.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn pair() -> Result<(Channel, OwnedFd)> {
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .map_err(|errno| Error::os("socketpair", errno))?;
        Ok((Channel::new(ours), theirs))
    }

    /// The end that a descriptor is.
    pub fn new(socket: OwnedFd) -> Channel {
        Channel {
            socket,
            buffer: vec![0; MAX_MESSAGE].into_boxed_slice(),
        }
    }

    /// A second handle on the same end, to send by.
    ///
    /// # Errors
    /// There are no descriptors left.
    pub fn sender(&self) -> Result<Sender> {
        let socket = self.socket.try_clone();
        socket
            .map(Sender)
            .map_err(|error| Error::os("dup of a channel", error))
    }

    /// Sends a message with descriptors.
    ///
    /// # Errors
    /// As [`Sender::send`].
    pub fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<()> {
        send(self.socket.as_fd(), message, fds)
    }

    /// Ends the connection: the other process sees the end of it, whoever else has this descriptor.
    pub fn close(&self) {
        // SAFETY: shutdown takes a descriptor, which is open, and a number.
        unsafe { libc::shutdown(self.socket.as_raw_fd(), libc::SHUT_RDWR) };
    }

    /// Waits for a message; `None` when the other process is gone.
    ///
    /// # Errors
    /// The message is not understood, or the socket fails.
    pub fn receive<T: DeserializeOwned>(&mut self) -> Result<Option<(T, Vec<OwnedFd>)>> {
        let mut fds = Vec::new();
        loop {
            let Some(length) = self.packet(&mut fds)? else {
                return Ok(None);
            };
            let text = self.buffer.get(..length).unwrap_or_default();
            if text == AHEAD {
                continue;
            }
            let message = serde_json::from_slice(text).map_err(|error| {
                Error::new(
                    ErrorKind::Io,
                    format!("a message within the server is not understood: {error}"),
                )
            })?;
            return Ok(Some((message, fds)));
        }
    }

    fn packet(&mut self, fds: &mut Vec<OwnedFd>) -> Result<Option<usize>> {
        let failed = |errno: Errno| Error::os("cannot receive within the server", errno);
        loop {
            let mut space = cmsg_space!([RawFd; MOST_FDS]);
            let mut slices = [IoSliceMut::new(&mut self.buffer)];
            let flags = MsgFlags::MSG_CMSG_CLOEXEC;
            let got = recvmsg::<()>(
                self.socket.as_raw_fd(),
                &mut slices,
                Some(&mut space),
                flags,
            );
            let got = match got {
                Ok(got) => got,
                Err(Errno::EINTR) => continue,
                Err(Errno::ECONNRESET) => return Ok(None),
                Err(errno) => return Err(failed(errno)),
            };
            for message in got.cmsgs().map_err(failed)? {
                if let ControlMessageOwned::ScmRights(raw) = message {
                    // SAFETY: the kernel has just made these descriptors for this process.
                    fds.extend(
                        raw.into_iter()
                            .map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }),
                    );
                }
            }
            if got
                .flags
                .intersects(MsgFlags::MSG_TRUNC | MsgFlags::MSG_CTRUNC)
            {
                return Err(Error::new(
                    ErrorKind::Io,
                    "a message within the server was cut off: too long, or too many descriptors",
                ));
            }
            return Ok((got.bytes > 0).then_some(got.bytes));
        }
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The sending half of an end.
pub struct Sender(OwnedFd);

impl Sender {
    /// Sends a message with descriptors.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the other process is gone, [`ErrorKind::Busy`] if it does not read.
    pub fn send(&self, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<()> {
        send(self.0.as_fd(), message, fds)
    }
}

fn send(socket: BorrowedFd<'_>, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> Result<()> {
    let text = serde_json::to_vec(message)
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot write JSON: {error}")))?;
    if text.len() > MAX_MESSAGE {
        return Err(Error::new(
            ErrorKind::Io,
            format!("a message of {} bytes within the server", text.len()),
        ));
    }
    let raw: Vec<RawFd> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
    let mut rest = raw.as_slice();
    while let Some((now, later)) = rest.split_at_checked(MOST_FDS) {
        packet(socket, AHEAD, now)?;
        rest = later;
    }
    packet(socket, &text, rest)
}

fn packet(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[RawFd]) -> Result<()> {
    let rights = [ControlMessage::ScmRights(fds)];
    let control: &[ControlMessage<'_>] = if fds.is_empty() { &[] } else { &rights };
    let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
    loop {
        let slices = [IoSlice::new(bytes)];
        match sendmsg::<()>(socket.as_raw_fd(), &slices, control, flags, None) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN) => {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    "the other process of the server is gone",
                ));
            }
            Err(Errno::EAGAIN) => {
                return Err(Error::new(
                    ErrorKind::Busy,
                    "the other process of the server takes no messages",
                ));
            }
            Err(errno) => return Err(Error::os("cannot send within the server", errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};

    #[test]
    fn messages_carry_any_number_of_descriptors() {
        let (ours, theirs) = Channel::pair().unwrap();
        let mut theirs = Channel::new(theirs);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"here").unwrap();
        for count in [0, 1, MOST_FDS, 2 * MOST_FDS + 3] {
            let fds = vec![file.as_fd(); count];
            ours.send(&("n", count), &fds).unwrap();
            let ((word, told), got): ((String, usize), _) = theirs.receive().unwrap().unwrap();
            assert_eq!((word.as_str(), told, got.len()), ("n", count, count));
            if let Some(fd) = got.into_iter().last() {
                let mut copy = std::fs::File::from(fd);
                copy.rewind().unwrap();
                let mut text = String::new();
                copy.read_to_string(&mut text).unwrap();
                assert_eq!(text, "here");
            }
        }
        drop(ours);
        assert!(theirs.receive::<u32>().unwrap().is_none(), "the end");
        assert_eq!(theirs.send(&1, &[]).unwrap_err().kind, ErrorKind::NotFound);
    }

    #[test]
    fn a_reader_that_does_not_read_holds_nobody_up() {
        let (ours, _theirs) = Channel::pair().unwrap();
        let error = (0..100_000).find_map(|n| ours.send(&n, &[]).err()).unwrap();
        assert_eq!(error.kind, ErrorKind::Busy);
    }
}
