//! This machine as the place of a story: commands that a signal to the demo does not reach.
//!
//! Each runs in a process group of its own, so that Ctrl-C reaches the demo alone. The demo ends the
//! command that may end (the program that fills memory) and waits for those that must not be torn
//! apart (adding, removing); then it undoes what it did.

use std::{
    fs::File,
    io::{Read, Seek},
    os::unix::process::{CommandExt, ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    errno::Errno,
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction},
    unistd::Pid,
};

use super::machine::{Machine, Ran};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note(_signal: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// From now on a signal that asks this process to end is noted, and ends nothing by itself.
///
/// # Errors
/// When the kernel refuses a handler.
pub fn catch_signals() -> Result<()> {
    let action = SigAction::new(
        SigHandler::Handler(note),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    for signal in [
        Signal::SIGINT,
        Signal::SIGTERM,
        Signal::SIGHUP,
        Signal::SIGQUIT,
    ] {
        // SAFETY: the handler stores to an atomic, which is async-signal-safe.
        unsafe { sigaction(signal, &action) }.context("cannot catch signals")?;
    }
    Ok(())
}

/// Fails once a signal came.
///
/// # Errors
/// See above.
pub fn go_on() -> Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("interrupted");
    }
    Ok(())
}

/// This machine.
pub struct Local;

impl Machine for Local {
    fn sh(&self, script: &str, limit: Duration) -> Result<Ran> {
        let ran = run(script, limit, &|| INTERRUPTED.load(Ordering::Relaxed))?;
        go_on()?;
        Ok(ran)
    }

    fn sh_whole(&self, script: &str, limit: Duration) -> Result<Ran> {
        run_whole(script, limit)
    }
}

/// Runs a script to its end, signal or not: for undoing.
///
/// # Errors
/// When it cannot be started or does not end within `limit`.
pub fn run_whole(script: &str, limit: Duration) -> Result<Ran> {
    run(script, limit, &|| false)
}

fn run(script: &str, limit: Duration, interrupted: &dyn Fn() -> bool) -> Result<Ran> {
    // Files, because nobody would drain a pipe here.
    let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
    let started = Instant::now();
    let mut child = Command::new("/bin/sh")
        .args(["-c", script])
        .stdin(Stdio::null())
        .stdout(stdout.try_clone()?)
        .stderr(stderr.try_clone()?)
        .process_group(0)
        .spawn()
        .context("cannot run /bin/sh")?;
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if interrupted() {
            end(&mut child)?;
            bail!("interrupted");
        }
        if started.elapsed() > limit {
            end(&mut child)?;
            bail!("`{script}` did not end within {} s", limit.as_secs());
        }
        thread::sleep(Duration::from_millis(20));
    };
    Ok(Ran {
        rc: code(status),
        took: started.elapsed(),
        stdout: text(&mut stdout)?,
        stderr: text(&mut stderr)?,
    })
}

/// Kills a child's process group and collects the child.
fn end(child: &mut Child) -> Result<()> {
    let group = Pid::from_raw(-i32::try_from(child.id())?);
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        match kill(group, signal) {
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(errno) => bail!("cannot kill process group {group}: {errno}"),
        }
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            if child.try_wait()?.is_some() {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
    bail!("process {} survives SIGKILL", child.id())
}

fn code(status: ExitStatus) -> i32 {
    let signal = status.signal().map(|signal| 128 + signal);
    status.code().or(signal).unwrap_or(-1)
}

fn text(file: &mut File) -> Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outputs_and_codes_are_told_apart() {
        let ran = run_whole("echo out; echo err >&2; exit 7", Duration::from_secs(10)).unwrap();
        assert_eq!(
            (ran.rc, ran.stdout.as_str(), ran.stderr.as_str()),
            (7, "out\n", "err\n")
        );
        let killed = run_whole("kill -9 $$", Duration::from_secs(10)).unwrap();
        assert_eq!(killed.rc, 137);
    }

    #[test]
    fn a_command_ends_at_its_limit_and_when_interrupted() {
        let started = Instant::now();
        assert!(run_whole("sleep 60", Duration::from_millis(200)).is_err());
        let error = run("sleep 60 & wait", Duration::from_secs(60), &|| true).unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}
