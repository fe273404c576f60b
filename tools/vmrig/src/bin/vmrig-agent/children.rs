//! Processes that the host asked for, and the orphans that PID 1 inherits.
//!
//! One thread reaps. Output goes to files on the ramfs rather than through pipes: a command has
//! ended when its own process has, even if it left a daemon behind that still holds its outputs.

use std::{
    collections::HashMap,
    fs::{self, File},
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::PathBuf,
    process::{Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use vmrig::protocol;

/// Where outputs are kept until they were sent.
const DIRECTORY: &str = "/run/vmrig";

/// All children that somebody waits for.
pub struct Children {
    table: Arc<Table>,
}

#[derive(Default)]
struct Table {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    ended: HashMap<i32, Option<ExitStatus>>,
    background: HashMap<u64, Arc<Child>>,
}

/// One child.
pub struct Child {
    /// Its process id, which is also that of its session and group.
    pub pid: i32,
    started: Instant,
    stdin: PathBuf,
    stdout: PathBuf,
    stderr: PathBuf,
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reap(&self) {
        loop {
            let mut info: libc::siginfo_t = nothing();
            // Only waits: the child is reaped below, under the lock, so that its id cannot be taken
            // by another process while somebody sends it a signal, and so that a child is always in
            // the table before its end is seen. SAFETY: the pointer is to a whole siginfo_t.
            let rc =
                unsafe { libc::waitid(libc::P_ALL, 0, &mut info, libc::WEXITED | libc::WNOWAIT) };
            if rc != 0 {
                // No child at all: wait for the next one.
                let state = self.lock();
                drop(self.changed.wait_timeout(state, Duration::from_millis(200)));
                continue;
            }
            let mut state = self.lock();
            loop {
                let mut status = 0;
                // SAFETY: the pointer is to a whole c_int.
                let pid = unsafe { libc::waitpid(-1, &mut status, libc::WNOHANG) };
                if pid <= 0 {
                    break;
                }
                if let Some(slot) = state.ended.get_mut(&pid) {
                    *slot = Some(ExitStatus::from_raw(status));
                }
            }
            self.changed.notify_all();
        }
    }
}

/// A siginfo_t for the kernel to fill.
fn nothing() -> libc::siginfo_t {
    // SAFETY: siginfo_t is plain data for which all zeroes is a value.
    unsafe { std::mem::zeroed() }
}

impl Children {
    /// Starts the thread that reaps.
    pub fn start() -> io::Result<Self> {
        let table = Arc::new(Table::default());
        let reaper = table.clone();
        thread::Builder::new()
            .stack_size(crate::STACK)
            .spawn(move || reaper.reap())?;
        Ok(Self { table })
    }

    /// Starts a command with its outputs in files.
    pub fn spawn(&self, command: &protocol::Command, stdin: &[u8]) -> io::Result<Child> {
        let name = {
            let mut state = self.table.lock();
            state.next += 1;
            state.next
        };
        let file = |what: &str| PathBuf::from(format!("{DIRECTORY}/{name}.{what}"));
        let (input, stdout, stderr) = (file("in"), file("out"), file("err"));
        let mut process = prepare(command)?;
        if stdin.is_empty() {
            process.stdin(Stdio::null());
        } else {
            fs::write(&input, stdin)?;
            process.stdin(File::open(&input)?);
        }
        process
            .stdout(File::create(&stdout)?)
            .stderr(File::create(&stderr)?);
        let pid = self.start_process(&mut process)?;
        Ok(Child {
            pid,
            started: Instant::now(),
            stdin: input,
            stdout,
            stderr,
        })
    }

    /// Starts a shell that owns the console.
    pub fn spawn_on(&self, console: &File, command: &protocol::Command) -> io::Result<Child> {
        let mut process = prepare(command)?;
        process
            .stdin(console.try_clone()?)
            .stdout(console.try_clone()?)
            .stderr(console.try_clone()?);
        // SAFETY: the closure makes one system call and allocates nothing.
        unsafe {
            process.pre_exec(|| match libc::ioctl(0, libc::TIOCSCTTY, 1) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
        }
        let pid = self.start_process(&mut process)?;
        let none = PathBuf::new;
        Ok(Child {
            pid,
            started: Instant::now(),
            stdin: none(),
            stdout: none(),
            stderr: none(),
        })
    }

    fn start_process(&self, process: &mut Command) -> io::Result<i32> {
        // A failed exec is reaped by `spawn` itself, which must find its child: the reaper waits
        // for the lock.
        let mut state = self.table.lock();
        let pid = process.spawn()?.id() as i32;
        state.ended.insert(pid, None);
        self.table.changed.notify_all();
        Ok(pid)
    }

    /// Waits for a child's end.
    pub fn wait(&self, child: &Child, limit: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now().checked_add(limit);
        let mut state = self.table.lock();
        loop {
            if let Some(status) = state.ended.get(&child.pid).copied().flatten() {
                return Some(status);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return None;
            }
            let left = left.unwrap_or(Duration::from_secs(3600));
            state = self
                .table
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Sends a signal to a child, or to its whole group (which may outlive it).
    pub fn kill(&self, child: &Child, signal: i32, group: bool) -> io::Result<()> {
        let state = self.table.lock();
        if !group && state.ended.get(&child.pid).is_none_or(Option::is_some) {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                "the process has ended",
            ));
        }
        let target = if group { -child.pid } else { child.pid };
        // SAFETY: kill has no memory to be safe about; the lock keeps the id from being reused.
        match unsafe { libc::kill(target, signal) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Forgets a child that was waited for, and its files.
    pub fn forget(&self, child: &Child) {
        self.table.lock().ended.remove(&child.pid);
        for file in [&child.stdin, &child.stdout, &child.stderr] {
            let _ = fs::remove_file(file);
        }
    }

    /// Keeps a child for later requests and returns its handle.
    pub fn keep(&self, child: Child) -> u64 {
        let mut state = self.table.lock();
        state.next += 1;
        let handle = state.next;
        state.background.insert(handle, Arc::new(child));
        handle
    }

    /// The child behind a handle.
    pub fn get(&self, handle: u64) -> io::Result<Arc<Child>> {
        let child = self.table.lock().background.get(&handle).cloned();
        child.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such background process"))
    }

    /// Ends the life of a handle.
    pub fn release(&self, handle: u64) {
        self.table.lock().background.remove(&handle);
    }
}

impl Child {
    /// Time since its start.
    pub fn age(&self) -> Duration {
        self.started.elapsed()
    }

    /// What it printed so far: both outputs after each other, and the length of the first.
    pub fn output(&self) -> (Vec<u8>, u64) {
        let mut bytes = fs::read(&self.stdout).unwrap_or_default();
        let length = bytes.len() as u64;
        bytes.extend(fs::read(&self.stderr).unwrap_or_default());
        (bytes, length)
    }
}

fn prepare(command: &protocol::Command) -> io::Result<Command> {
    let no_program = || io::Error::new(io::ErrorKind::InvalidInput, "the command is empty");
    let (program, arguments) = command.argv.split_first().ok_or_else(no_program)?;
    let mut process = Command::new(program);
    process.args(arguments).current_dir("/root");
    process.envs(command.env.iter().map(|(name, value)| (name, value)));
    // SAFETY: the closure makes only async-signal-safe system calls and allocates nothing.
    unsafe {
        process.pre_exec(|| {
            if libc::setsid() < 0 {
                return Err(io::Error::last_os_error());
            }
            let fd = libc::open(
                c"/proc/self/oom_score_adj".as_ptr(),
                libc::O_WRONLY | libc::O_CLOEXEC,
            );
            if fd < 0 || libc::write(fd, c"0".as_ptr().cast(), 1) != 1 {
                return Err(io::Error::last_os_error());
            }
            libc::close(fd);
            Ok(())
        });
    }
    Ok(process)
}
