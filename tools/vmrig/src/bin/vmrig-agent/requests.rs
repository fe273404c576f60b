//! What the host can ask for.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{
        fd::AsRawFd,
        unix::{fs::PermissionsExt, process::ExitStatusExt},
    },
    path::Path,
    process::ExitStatus,
    thread,
    time::Duration,
};

use vmrig::protocol::{Command, EXIT_CLEAN, EXIT_PORT, Finished, Reply, Request};

use crate::{
    children::{Child, Children},
    mapping,
};

/// How long SIGKILL may take; a task that is blocked in the kernel does not end by it.
const KILL_LIMIT: Duration = Duration::from_secs(5);
/// How long the last sync may take: a dead disk must not keep the machine from ending.
const SYNC_LIMIT: Duration = Duration::from_secs(5);

/// Does one request.
pub fn handle(children: &Children, request: Request, payload: &[u8]) -> (Reply, Vec<u8>) {
    let result = match request {
        Request::Run {
            command,
            timeout_ms,
        } => run(children, &command, timeout_ms, payload),
        Request::Spawn { command } => spawn(children, &command, payload),
        Request::Wait {
            process,
            timeout_ms,
        } => wait(children, process, timeout_ms),
        Request::Peek { process } => children.get(process).map(|child| {
            let (bytes, stdout_len) = child.output();
            (Reply::Output { stdout_len }, bytes)
        }),
        Request::Kill {
            process,
            signal,
            group,
        } => children
            .get(process)
            .and_then(|child| children.kill(&child, signal, group))
            .map(|()| (Reply::Done, Vec::new())),
        Request::ReadFile { path } => fs::read(path).map(|bytes| {
            let stdout_len = bytes.len() as u64;
            (Reply::Output { stdout_len }, bytes)
        }),
        Request::WriteFile { path, mode } => {
            write_file(&path, mode, payload).map(|()| (Reply::Done, Vec::new()))
        }
        Request::ReadMapping {
            path,
            offset,
            length,
        } => mapping::read(&path, offset, length)
            .map(|bytes| (Reply::Output { stdout_len: length }, bytes)),
        Request::WriteMapping { path, offset } => {
            mapping::write(&path, offset, payload).map(|()| (Reply::Done, Vec::new()))
        }
        Request::Shell { rows, columns } => shell(children, rows, columns),
        Request::PowerOff => power_off(),
    };
    result.unwrap_or_else(|error| {
        (
            Reply::Error {
                message: error.to_string(),
            },
            Vec::new(),
        )
    })
}

fn run(
    children: &Children,
    command: &Command,
    timeout_ms: u64,
    stdin: &[u8],
) -> io::Result<(Reply, Vec<u8>)> {
    let child = children.spawn(command, stdin)?;
    let mut status = children.wait(&child, Duration::from_millis(timeout_ms));
    let timed_out = status.is_none();
    if timed_out {
        let _ = children.kill(&child, libc::SIGKILL, true);
        status = children.wait(&child, KILL_LIMIT);
    }
    Ok(collect(children, &child, status, timed_out))
}

fn spawn(children: &Children, command: &Command, stdin: &[u8]) -> io::Result<(Reply, Vec<u8>)> {
    let child = children.spawn(command, stdin)?;
    let pid = child.pid;
    Ok((
        Reply::Spawned {
            process: children.keep(child),
            pid,
        },
        Vec::new(),
    ))
}

fn wait(children: &Children, process: u64, timeout_ms: u64) -> io::Result<(Reply, Vec<u8>)> {
    let child = children.get(process)?;
    match children.wait(&child, Duration::from_millis(timeout_ms)) {
        None => Ok((Reply::StillRunning, Vec::new())),
        status => {
            children.release(process);
            Ok(collect(children, &child, status, false))
        }
    }
}

fn collect(
    children: &Children,
    child: &Child,
    status: Option<ExitStatus>,
    timed_out: bool,
) -> (Reply, Vec<u8>) {
    let (bytes, stdout_len) = child.output();
    children.forget(child);
    let finished = Finished {
        rc: status.and_then(|status| status.code()),
        signal: status.and_then(|status| status.signal()),
        timed_out,
        stuck: status.is_none(),
        duration_ms: u64::try_from(child.age().as_millis()).unwrap_or(u64::MAX),
        stdout_len,
    };
    (Reply::Finished(finished), bytes)
}

fn write_file(path: &str, mode: u32, content: &[u8]) -> io::Result<()> {
    if let Some(parent) = Path::new(path).parent()
        && !parent.exists()
    {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, content)?;
    // Not for /proc, /sys and devices, whose modes are not the caller's.
    if fs::metadata(path)?.is_file() && !path.starts_with("/proc") && !path.starts_with("/sys") {
        fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

fn shell(children: &Children, rows: u16, columns: u16) -> io::Result<(Reply, Vec<u8>)> {
    let active = fs::read_to_string("/sys/class/tty/console/active")?;
    let name = active.split_whitespace().last().unwrap_or("ttyS0");
    let console = OpenOptions::new()
        .read(true)
        .write(true)
        .open(Path::new("/dev").join(name))?;
    set_size(&console, rows, columns);
    let shell = ["/usr/bin/bash", "/bin/sh"]
        .into_iter()
        .find(|shell| Path::new(shell).exists());
    let argv = vec![shell.unwrap_or("/bin/sh").to_owned(), "-i".to_owned()];
    let child = children.spawn_on(
        &console,
        &Command {
            argv,
            env: Vec::new(),
        },
    )?;
    let status = children.wait(&child, Duration::MAX);
    Ok(collect(children, &child, status, false))
}

fn set_size(console: &File, rows: u16, columns: u16) {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the descriptor is open and the pointer is to a whole winsize.
    unsafe { libc::ioctl(console.as_raw_fd(), libc::TIOCSWINSZ, &size) };
}

/// Ends the machine with an exit code that nothing else makes.
fn power_off() -> io::Result<(Reply, Vec<u8>)> {
    let (done, wait) = std::sync::mpsc::channel();
    thread::Builder::new()
        .stack_size(crate::STACK)
        .spawn(move || {
            nix::unistd::sync();
            let _ = done.send(());
        })?;
    let _ = wait.recv_timeout(SYNC_LIMIT);
    // SAFETY: the port is that of a device that only this program knows.
    if unsafe { libc::ioperm(libc::c_ulong::from(EXIT_PORT), 1, 1) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: this thread may use the port; writing to it ends the machine.
    unsafe {
        std::arch::asm!(
            "out dx, al",
            in("dx") EXIT_PORT,
            in("al") EXIT_CLEAN,
            options(nomem, nostack, preserves_flags)
        );
    }
    Err(io::Error::other(
        "the machine survived its end: it has no isa-debug-exit device",
    ))
}
