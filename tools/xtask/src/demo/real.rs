//! The story on the machine at hand, and the promise that it is left as it was found.
//!
//! What the demo makes are a device named `demo`, its swap, and one cgroup. Guards take them away on
//! every way out that a process has: the end, an error, a signal, a panic. They are made before what
//! they guard could be half there, and a device that was there before is never theirs.

use std::{
    env,
    io::{Write, stderr},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};

use super::{
    cgroup::Cgroup,
    local::{Local, catch_signals, go_on, run_whole},
    story::{MIB, Pressure, Story, mib, number_of, tell},
};
use crate::cargo;

const NAME: &str = "demo";
/// Before all other swap: only so is it ours that is measured.
const PRIORITY: u16 = 32767;
const ROUNDS: u32 = 2;
/// The program is not larger than this, so that the demo ends soon on a large device.
const MOST_MIB: u64 = 8192;
/// What the machine keeps for itself.
const SPARE_MIB: u64 = 256;
const LIMIT: Duration = Duration::from_secs(1800);

/// What the user asked for.
pub struct Wish<'a> {
    pub size: &'a str,
    pub gpu: Option<&'a str>,
    pub backend: Option<&'a str>,
}

/// Checks the machine, swaps on it, and leaves it as it was.
///
/// # Errors
/// When the machine cannot have a device, a step fails, a byte is wrong or a signal came.
pub fn run(wish: &Wish<'_>) -> Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!("a demo on this machine makes a block device and swaps to it: run it as root");
    }
    let vramctl = quoted(&find_vramctl()?);
    let check = run_whole(&format!("{vramctl} check"), LIMIT)?;
    if check.rc != 0 {
        print!("{}", check.stdout);
        bail!("this machine cannot have a device: see the lines above");
    }
    refuse_if_there(&vramctl)?;
    catch_signals()?;
    tell_machine()?;
    let machine = Local;
    let story = Story {
        machine: &machine,
        name: NAME,
        vramctl: vramctl.clone(),
    };
    // Dropped last: the program ends first, then the device can go.
    let mut device = Device {
        vramctl,
        there: false,
    };
    // A failed add leaves nothing that is ours.
    let added = story.add(&options(wish), LIMIT)?;
    device.there = true;
    go_on()?;
    story.tell_device(&added)?;
    story.swap_on(PRIORITY)?;
    let plan = plan(story.show()?["size"].as_u64().context("no size in show")?)?;
    let cgroup = Cgroup::new(plan.limit_mib * MIB)?;
    story.press(
        &Pressure {
            prelude: format!("echo 1000 > /proc/self/oom_score_adj; {}", cgroup.enter()),
            xtask: quoted(&env::current_exe().context("cannot tell where this program is")?),
            mib: plan.hog_mib,
            rounds: ROUNDS,
            ram: format!("a limit of {} MiB of RAM", plan.limit_mib),
        },
        LIMIT,
    )?;
    drop(cgroup);
    go_on()?;
    story.remove(LIMIT)?;
    device.there = false;
    Ok(ExitCode::SUCCESS)
}

/// The device of this demo; dropping it takes it away if it is still there.
struct Device {
    vramctl: String,
    there: bool,
}

impl Drop for Device {
    fn drop(&mut self) {
        // A signal may have come just after the story removed it.
        if !self.there || is_there(&self.vramctl).is_ok_and(|there| !there) {
            return;
        }
        let _ = writeln!(stderr(), "xtask: removing the device {NAME}");
        let script = format!("{} remove {NAME} --swapoff", self.vramctl);
        let outcome = match run_whole(&script, LIMIT) {
            Ok(ran) if ran.rc == 0 => return,
            Ok(ran) => ran.said(),
            Err(error) => format!("{error:#}"),
        };
        let _ = writeln!(
            stderr(),
            "xtask: the device {NAME} is still there; `vramctl remove {NAME} --swapoff` said: {outcome}"
        );
    }
}

fn options(wish: &Wish<'_>) -> String {
    let mut options = format!("--size {}", quoted(Path::new(wish.size)));
    for (option, value) in [("--gpu", wish.gpu), ("--backend", wish.backend)] {
        if let Some(value) = value {
            options.push_str(&format!(" {option} {}", quoted(Path::new(value))));
        }
    }
    options
}

fn is_there(vramctl: &str) -> Result<bool> {
    let list = run_whole(&format!("{vramctl} list -n -o NAME"), LIMIT)?;
    ensure!(list.rc == 0, "`vramctl list` failed: {}", list.said());
    Ok(list.stdout.lines().any(|name| name.trim() == NAME))
}

fn refuse_if_there(vramctl: &str) -> Result<()> {
    if is_there(vramctl)? {
        bail!("a device named {NAME} exists already, and a demo touches only what it made");
    }
    Ok(())
}

struct Plan {
    hog_mib: u64,
    limit_mib: u64,
}

/// A program that fits onto the device almost whole, and into RAM by a quarter.
fn plan(device: u64) -> Result<Plan> {
    let hog_mib = (device / MIB * 7 / 8).min(MOST_MIB);
    let limit_mib = (hog_mib / 4).max(32);
    ensure!(
        hog_mib >= 2 * limit_mib,
        "a device of {} is too small to show anything: 128M is enough",
        mib(device)
    );
    let memory = std::fs::read_to_string("/proc/meminfo")?;
    let available = number_of(&memory, "MemAvailable").context("no MemAvailable")? >> 10;
    ensure!(
        available >= limit_mib + SPARE_MIB,
        "{available} MiB of RAM are available, and {} are needed",
        limit_mib + SPARE_MIB
    );
    Ok(Plan { hog_mib, limit_mib })
}

/// Built now, where cargo runs this; else beside this program, or in `PATH`.
fn find_vramctl() -> Result<PathBuf> {
    if env::var_os("CARGO").is_some() {
        crate::deps::ensure_build_tools()?;
        return Ok(cargo::build_release()?.join("vramctl"));
    }
    let own = env::current_exe().context("cannot tell where this program is")?;
    let beside = own.with_file_name("vramctl");
    if beside.exists() {
        return Ok(beside);
    }
    vmrig::workspace::which("vramctl").with_context(|| {
        format!(
            "vramctl is neither beside {} nor in PATH: install it first",
            own.display()
        )
    })
}

fn tell_machine() -> Result<()> {
    let uname = nix::sys::utsname::uname()?;
    let memory = std::fs::read_to_string("/proc/meminfo")?;
    let cpus = std::thread::available_parallelism()?;
    tell(
        "machine",
        &format!(
            "Linux {}, {cpus} CPUs, {} of RAM",
            uname.release().to_string_lossy(),
            mib(number_of(&memory, "MemTotal").context("no MemTotal")? / 1024 * MIB)
        ),
    );
    Ok(())
}

/// A word of a shell.
fn quoted(path: &Path) -> String {
    let text = path.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-:%".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        return text.into_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt, panic};

    use super::*;

    #[test]
    fn a_panic_takes_the_device_away() {
        let dir = tempfile::tempdir().unwrap();
        let (vramctl, calls) = (dir.path().join("vramctl"), dir.path().join("calls"));
        let script = format!(
            "#!/bin/sh\ncase $1 in list) echo demo;; *) echo \"$@\" >> {};; esac\n",
            calls.display()
        );
        fs::write(&vramctl, script).unwrap();
        fs::set_permissions(&vramctl, fs::Permissions::from_mode(0o755)).unwrap();
        for there in [true, false] {
            let device = Device {
                vramctl: quoted(&vramctl),
                there,
            };
            let ended = panic::catch_unwind(panic::AssertUnwindSafe(move || {
                let _device = device;
                panic!("as a test");
            }));
            assert!(ended.is_err());
        }
        assert_eq!(
            fs::read_to_string(calls).unwrap(),
            "remove demo --swapoff\n"
        );
    }

    #[test]
    fn words_of_a_shell() {
        assert_eq!(quoted(Path::new("0000:03:00.0")), "0000:03:00.0");
        assert_eq!(quoted(Path::new("a b'c")), r"'a b'\''c'");
        assert_eq!(quoted(Path::new("")), "''");
    }

    #[test]
    fn the_program_fits_onto_the_device() {
        let plan = plan(256 * MIB).unwrap();
        assert_eq!((plan.hog_mib, plan.limit_mib), (224, 56));
        assert!(super::plan(32 * MIB).is_err());
    }
}
