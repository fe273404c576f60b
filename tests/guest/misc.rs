//! Small actors of the cases: somebody who holds, somebody who swaps, a login session that ends.

use std::ffi::CString;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

pub fn hold(path: &Path, seconds: u64) -> anyhow::Result<()> {
    let _file = File::open(path).with_context(|| format!("opening {}", path.display()))?;
    println!("holding");
    std::thread::sleep(Duration::from_secs(seconds));
    Ok(())
}

pub fn swap_loop(device: &Path, seconds: u64) -> anyhow::Result<()> {
    let path = CString::new(device.as_os_str().as_bytes())?;
    let end = Instant::now() + Duration::from_secs(seconds);
    let (mut on, mut busy, mut pause) = (0u32, 0u32, 0u64);
    loop {
        // SAFETY: a NUL-terminated path that lives through the call.
        if unsafe { libc::swapon(path.as_ptr(), 0) } == 0 {
            on += 1;
            // Pauses of changing length, so that each side sometimes meets the other's every step.
            pause = (pause + 7) % 40;
            std::thread::sleep(Duration::from_millis(pause / 4));
            // SAFETY: as above.
            if unsafe { libc::swapoff(path.as_ptr()) } != 0 {
                bail!("swapoff: {}", std::io::Error::last_os_error());
            }
            std::thread::sleep(Duration::from_millis(pause));
        } else {
            match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::ENOENT | libc::ENXIO | libc::ENODEV) => break,
                Some(libc::EBUSY) => busy += 1,
                // The disk is ending under the read of the swap header; its node goes next.
                Some(libc::EIO | libc::EINVAL) => std::thread::sleep(Duration::from_millis(20)),
                error => bail!("swapon: {error:?}"),
            }
        }
        if Instant::now() >= end {
            bail!("the device is still there after {on} swapons");
        }
    }
    println!("{{\"on\":{on},\"busy\":{busy}}}");
    Ok(())
}

pub fn session(command: &[String]) -> anyhow::Result<()> {
    let cgroup = Path::new("/sys/fs/cgroup/login-session");
    std::fs::create_dir_all(cgroup).context("the session's cgroup")?;
    let pty = nix::pty::openpty(None, None).context("openpty")?;
    let slave = pty.slave;
    let procs = cgroup.join("cgroup.procs");
    let [program, arguments @ ..] = command else {
        bail!("no command")
    };
    let output = std::env::temp_dir().join("session.out");
    let mut child = Command::new(program);
    child
        .args(arguments)
        .stdin(slave.try_clone()?)
        .stdout(File::create(&output)?)
        .stderr(slave);
    let hook = move || {
        std::fs::write(&procs, "0")?;
        nix::unistd::setsid()?;
        // SAFETY: TIOCSCTTY takes an integer; descriptor 0 is the terminal's slave.
        if unsafe { libc::ioctl(0, libc::TIOCSCTTY, 0) } != 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: the hook makes system calls and one small write between fork and exec; this process
    // has one thread.
    let status = unsafe { child.pre_exec(hook) }
        .spawn()
        .context("the session's command")?
        .wait()?;
    print!("{}", std::fs::read_to_string(&output)?);
    // The user logs out: the terminal hangs up, and the session's processes are killed.
    drop(pty.master);
    std::thread::sleep(Duration::from_millis(200));
    std::fs::write(cgroup.join("cgroup.kill"), "1").context("killing the session's cgroup")?;
    std::thread::sleep(Duration::from_millis(500));
    if !status.success() {
        bail!("{program}: {status}");
    }
    Ok(())
}

pub fn unshare(command: &[String]) -> anyhow::Result<()> {
    use nix::mount::{MsFlags, mount};
    use nix::sched::{CloneFlags, unshare};
    unshare(CloneFlags::CLONE_NEWNS).context("unshare")?;
    mount(
        None::<&str>,
        "/",
        None::<&str>,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        None::<&str>,
    )?;
    let [program, arguments @ ..] = command else {
        bail!("no command")
    };
    Err(Command::new(program).args(arguments).exec()).context("exec")
}
