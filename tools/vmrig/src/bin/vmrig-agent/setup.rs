//! What PID 1 does before the first request.

use std::{
    ffi::CString,
    fs::{self, File, OpenOptions},
    io,
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use nix::mount::{MsFlags, mount};
use vmrig::protocol::{ENVIRONMENT, MODULE_LIST, PORT};

/// How long the virtio-serial port may take to appear.
const PORT_LIMIT: Duration = Duration::from_secs(20);
/// Console log level: everything but debug messages.
const LOG_LEVEL: libc::c_int = 7;
/// `syslog(2)`'s action that sets the console log level.
const SYSLOG_ACTION_CONSOLE_LEVEL: libc::c_int = 8;

/// Sets the system up and returns what went wrong.
pub fn all() -> Vec<String> {
    let mut problems = Vec::new();
    mounts(&mut problems);
    protect(&mut problems);
    // SAFETY: the action takes no buffer.
    unsafe { libc::klogctl(SYSLOG_ACTION_CONSOLE_LEVEL, std::ptr::null_mut(), LOG_LEVEL) };
    modules(&mut problems);
    environment();
    problems
}

fn mounts(problems: &mut Vec<String>) {
    let must = [
        ("proc", "/proc", "proc"),
        ("sysfs", "/sys", "sysfs"),
        ("devtmpfs", "/dev", "devtmpfs"),
    ];
    let may = [
        ("devpts", "/dev/pts", "devpts"),
        ("cgroup2", "/sys/fs/cgroup", "cgroup2"),
        ("debugfs", "/sys/kernel/debug", "debugfs"),
        ("tracefs", "/sys/kernel/tracing", "tracefs"),
    ];
    for (source, target, kind) in must {
        if let Err(error) = mount(
            Some(source),
            target,
            Some(kind),
            MsFlags::empty(),
            None::<&str>,
        ) {
            problems.push(format!("cannot mount {target}: {error}"));
        }
    }
    for directory in ["/dev/pts", "/dev/shm"] {
        let _ = fs::create_dir(directory);
    }
    for (source, target, kind) in may {
        let _ = mount(
            Some(source),
            target,
            Some(kind),
            MsFlags::empty(),
            None::<&str>,
        );
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = std::os::unix::fs::symlink(target, link);
    }
    for controller in ["memory", "io", "pids", "cpu"] {
        let _ = fs::write(
            "/sys/fs/cgroup/cgroup.subtree_control",
            format!("+{controller}"),
        );
    }
    let _ = nix::unistd::sethostname("guest");
    for directory in ["/tmp", "/run/vmrig"] {
        let _ = fs::create_dir_all(directory);
    }
}

fn protect(problems: &mut Vec<String>) {
    // One arena: every further one would reserve 64 MiB of locked address space for each thread.
    // SAFETY: the call only sets a parameter of the allocator, and no other thread exists.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
    let flags =
        nix::sys::mman::MlockAllFlags::MCL_CURRENT | nix::sys::mman::MlockAllFlags::MCL_FUTURE;
    if let Err(error) = nix::sys::mman::mlockall(flags) {
        problems.push(format!("cannot lock the agent's memory: {error}"));
    }
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-1000") {
        problems.push(format!(
            "cannot exempt the agent from the OOM killer: {error}"
        ));
    }
}

fn modules(problems: &mut Vec<String>) {
    for line in fs::read_to_string(MODULE_LIST).unwrap_or_default().lines() {
        let (path, parameters) = line.split_once(' ').unwrap_or((line, ""));
        if let Err(error) = load(path, parameters) {
            problems.push(format!("cannot load {path}: {error}"));
        }
    }
}

fn load(path: &str, parameters: &str) -> io::Result<()> {
    let file = File::open(path)?;
    let parameters = CString::new(parameters)?;
    // SAFETY: the descriptor is open and the string ends with NUL; the kernel copies both.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_finit_module,
            file.as_raw_fd(),
            parameters.as_ptr(),
            0_i32,
        )
    };
    let error = io::Error::last_os_error();
    if rc != 0 && error.raw_os_error() != Some(libc::EEXIST) {
        return Err(error);
    }
    Ok(())
}

fn environment() {
    let text = fs::read_to_string(ENVIRONMENT).unwrap_or_default();
    let variables = text.lines().filter_map(|line| line.split_once('='));
    let fixed = [
        (
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        ),
        ("HOME", "/root"),
        ("LC_ALL", "C"),
        ("TERM", "linux"),
    ];
    for (name, value) in fixed.into_iter().chain(variables) {
        // SAFETY: no other thread exists yet.
        unsafe { std::env::set_var(name, value) };
    }
}

/// `uname -r`.
pub fn release() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// Opens the port on which the host speaks.
pub fn open_port() -> io::Result<File> {
    let deadline = Instant::now() + PORT_LIMIT;
    loop {
        if let Some(path) = find_port()
            && let Ok(port) = OpenOptions::new().read(true).write(true).open(path)
        {
            return Ok(port);
        }
        if Instant::now() > deadline {
            let message = format!("no virtio-serial port named {PORT}");
            return Err(io::Error::new(io::ErrorKind::NotFound, message));
        }
        thread::sleep(Duration::from_millis(20));
    }
}

fn find_port() -> Option<PathBuf> {
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    ports.flatten().find_map(|port| {
        let name = fs::read_to_string(port.path().join("name")).ok()?;
        (name.trim() == PORT).then(|| Path::new("/dev").join(port.file_name()))
    })
}
