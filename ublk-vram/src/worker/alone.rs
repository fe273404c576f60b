//! A worker whose supervisor is gone: I/O does not need one, everything else does.
//!
//! Another supervisor is started at once and handed the session. While that does not work (no memory
//! for a process, say) it is tried again, and this thread answers on the control socket in the
//! meantime: what the device is, and that its supervisor is gone.

use std::io::{ErrorKind as IoKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

use super::orders::Orders;
use crate::control::{Call, MAX_MESSAGE, Reply};
use crate::error::{Error, ErrorKind, Result};
use crate::session::process::{OWN_PROGRAM, Process, Stderr};
use crate::session::{Adopt, Begin, Channel, Order, Role, VERSION};

/// How long a new supervisor may take to take over.
const ADOPTION_LIMIT: Duration = Duration::from_secs(30);
/// Between two attempts.
const PAUSE: Duration = Duration::from_secs(2);
/// How long a caller may take to send its call, and to take the answer.
const CALLER_LIMIT: Duration = Duration::from_secs(1);
/// What is told while there is none.
const WHY: &str = "its supervisor is gone, I/O goes on, and another supervisor is being started";

/// Serves alone until there is a supervisor; the channel to it.
pub(super) fn until_there_is_a_supervisor(orders: &Orders) -> Channel {
    loop {
        match adoption(orders) {
            Ok(channel) => {
                tracing::warn!("there is a supervisor again");
                if let Err(error) = orders.link.replace(&channel) {
                    tracing::error!("{error}");
                }
                return channel;
            }
            Err(error) => tracing::error!("no supervisor yet: {error}"),
        }
        answer_until(orders, Instant::now() + PAUSE);
    }
}

/// Starts a supervisor and hands it the session.
fn adoption(orders: &Orders) -> Result<Channel> {
    let session = orders.session;
    let regions = session.regions.copies()?;
    let exported = session.memory.export();
    let (memory, memory_fds) = match exported {
        Ok(exported) => (Some(exported.description), exported.fds),
        Err(error) if error.kind == ErrorKind::Unsupported => (None, Vec::new()),
        // Of descriptors there may be enough the next time.
        Err(error) => return Err(error),
    };
    let current = orders.shared.status.current();
    let fixed = current.fixed.ok_or_else(|| {
        Error::new(
            ErrorKind::Busy,
            "the disk is not live, so nobody can take it over",
        )
    })?;
    let survives = orders.shared.survives.lock();
    let adopt = Adopt {
        begin: Begin {
            version: VERSION,
            role: Role::Standby { id: fixed.id },
            identity: session.identity().clone(),
            regions: regions.iter().map(|(what, _)| what.clone()).collect(),
            memory,
        },
        worker: i32::try_from(std::process::id()).unwrap_or(0),
        fixed,
        state: current.state,
        reason: current.reason,
        survives: survives
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .clone(),
    };
    let inheritance = &orders.inheritance;
    let mut fds: Vec<BorrowedFd<'_>> = vec![inheritance.name.as_fd(), inheritance.listener.as_fd()];
    fds.extend(regions.iter().map(|(_, fd)| fd.as_fd()));
    fds.extend(memory_fds.iter().map(AsFd::as_fd));
    let arguments = ["serve", "--adopt"];
    let process = Process::start(Path::new(OWN_PROGRAM), &arguments, Stderr::Null)?;
    process.channel.send(&adopt, &fds)?;
    wait_for_word(process)
}

/// Waits for the new supervisor's word that it has taken over.
fn wait_for_word(mut process: Process) -> Result<Channel> {
    let end = Instant::now() + ADOPTION_LIMIT;
    let why = loop {
        if !is_readable(process.channel.as_fd(), end) {
            break format!("did not take over within {} s", ADOPTION_LIMIT.as_secs());
        }
        match process.channel.receive::<Order>()? {
            Some((Order::Adopted, _)) => return Ok(process.channel),
            Some(_) => {}
            None => break "ended before it took over".to_owned(),
        }
    };
    process.kill();
    process.has_ended(Duration::from_secs(1));
    Err(Error::new(
        ErrorKind::Timeout,
        format!("the new supervisor (process {}) {why}", process.pid),
    ))
}

fn is_readable(fd: BorrowedFd<'_>, end: Instant) -> bool {
    loop {
        let left = end.saturating_duration_since(Instant::now()).as_millis();
        let limit = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], limit) {
            Ok(0) => return false,
            Ok(_) => return true,
            Err(_) if Instant::now() >= end => return false,
            Err(_) => {}
        }
    }
}

/// Answers callers, one after the other, until `end` or until one asks for a supervisor.
fn answer_until(orders: &Orders, end: Instant) {
    let listener: &UnixListener = &orders.inheritance.listener;
    while is_readable(listener.as_fd(), end) {
        let Ok((stream, _)) = listener.accept() else {
            // It was another process's caller, or there are no descriptors.
            std::thread::sleep(Duration::from_millis(20));
            continue;
        };
        match answer(orders, stream) {
            Ok(true) => return,
            Ok(false) => {}
            Err(error) => tracing::warn!("a caller was lost: {error}"),
        }
    }
}

/// Answers one caller's calls; whether a supervisor is to be started now.
fn answer(orders: &Orders, mut stream: UnixStream) -> std::io::Result<bool> {
    if getsockopt(&stream, PeerCredentials).is_ok_and(|peer| peer.uid() != 0) {
        return Ok(false);
    }
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(CALLER_LIMIT))?;
    stream.set_write_timeout(Some(CALLER_LIMIT))?;
    let mut received = Vec::new();
    let mut buffer = [0u8; 1024];
    loop {
        while let Some(end) = received.iter().position(|&byte| byte == 0) {
            let message: Vec<u8> = received.drain(..=end).collect();
            let call = serde_json::from_slice(message.get(..end).unwrap_or_default());
            let (reply, is_wanted) = match call {
                Ok(Call::Show {}) => {
                    let info = orders.shared.status.info_alone(WHY);
                    (Reply::from_result(info), false)
                }
                Ok(Call::Recover {}) => (Reply::from_result(Ok(serde_json::json!({}))), true),
                Ok(_) => {
                    let error = Error::new(ErrorKind::Busy, format!("not now: {WHY}"));
                    (Reply::from_result::<()>(Err(error)), false)
                }
                Err(error) => {
                    let error = Error::usage(format!("the call is not understood: {error}"));
                    (Reply::from_result::<()>(Err(error)), false)
                }
            };
            let mut text = serde_json::to_vec(&reply).unwrap_or_default();
            text.push(0);
            stream.write_all(&text)?;
            if is_wanted {
                return Ok(true);
            }
        }
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(false),
            Ok(_) if received.len() > MAX_MESSAGE => return Ok(false),
            Ok(count) => received.extend_from_slice(buffer.get(..count).unwrap_or_default()),
            Err(error) if error.kind() == IoKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        }
    }
}
