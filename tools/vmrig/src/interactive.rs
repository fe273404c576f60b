//! A person at the guest's console: raw terminal, keys in, everything out.

use std::{
    io::stdin,
    os::fd::AsFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use anyhow::Context;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr},
};

use crate::{Out, Result, Vm, protocol::Request, vm::finished};

/// Puts the terminal back when it goes out of scope.
struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    fn enter() -> Result<Self> {
        let before = tcgetattr(stdin()).context("standard input is not a terminal")?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(stdin(), SetArg::TCSADRAIN, &raw)
            .context("cannot set the terminal to raw mode")?;
        Ok(Self { before })
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = tcsetattr(stdin(), SetArg::TCSADRAIN, &self.before);
    }
}

impl Vm {
    /// Gives this process's terminal a shell on the guest's console until that shell ends.
    ///
    /// # Errors
    /// When standard input is no terminal, or as [`Vm::sh`].
    pub fn interactive_shell(&self) -> Result<Out> {
        let terminal = RawTerminal::enter()?;
        let (rows, columns) = window_size();
        let stop = Arc::new(AtomicBool::new(false));
        let keys = {
            let (machine, stop) = (self.machine.clone(), stop.clone());
            thread::spawn(move || {
                let mut buffer = [0; 256];
                while !stop.load(Ordering::Relaxed) {
                    let input = stdin();
                    let mut ready = [PollFd::new(input.as_fd(), PollFlags::POLLIN)];
                    if !matches!(poll(&mut ready, PollTimeout::from(100_u8)), Ok(1..)) {
                        continue;
                    }
                    // Not through std's buffer, in which poll would not see what is left.
                    match nix::unistd::read(&input, &mut buffer) {
                        Ok(length @ 1..) => {
                            let typed = buffer.get(..length).unwrap_or_default();
                            if machine.console.write(typed).is_err() {
                                break;
                            }
                        }
                        _ => break,
                    }
                }
            })
        };
        self.machine.console.tee(true);
        let request = Request::Shell { rows, columns };
        let answer = self
            .machine
            .call("the interactive shell", request, &[], Duration::MAX);
        // The last line is under way on another channel than the answer.
        self.machine
            .console
            .settle(Duration::from_millis(100), Duration::from_secs(1));
        self.machine.console.tee(false);
        stop.store(true, Ordering::Relaxed);
        let _ = keys.join();
        drop(terminal);
        finished("the interactive shell", answer?)
    }
}

fn window_size() -> (u16, u16) {
    let mut size = libc::winsize {
        ws_row: 24,
        ws_col: 80,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the pointer is to a whole winsize, which the call fills or leaves alone.
    unsafe { libc::ioctl(libc::STDIN_FILENO, libc::TIOCGWINSZ, &mut size) };
    (size.ws_row.max(1), size.ws_col.max(1))
}
