//! A Debian of the release whose compilers make the kernels of the tests, unpacked in a directory.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail, ensure};
use vmrig::workspace;

use crate::deps;

/// The Debian release whose compilers make the kernels of its backports.
pub const RELEASE: &str = "trixie";
/// Where the kernels come from.
pub const SUITE: &str = "trixie-backports";
/// Where the module's source is inside.
pub const SOURCE: &str = "/kmod";

/// An unpacked Debian.
pub struct Chroot {
    pub root: PathBuf,
}

impl Chroot {
    /// Unpacks it anew, with these packages and a fresh copy of the module's source.
    pub fn unpack(&self, packages: &str) -> Result<()> {
        deps::ensure_programs(&[&deps::KMOD])?;
        self.remove()?;
        let mirror = vmrig::debian_mirror()?;
        let source =
            |suite: &str| format!("deb [signed-by={}] {mirror} {suite} main", deps::KEYRING.0);
        let output = Command::new("mmdebstrap")
            .args(["--variant=apt", "--mode=root", "--quiet"])
            .arg("--aptopt=APT::Install-Recommends \"false\"")
            .arg(format!("--include={packages}"))
            .arg(RELEASE)
            .arg(&self.root)
            .args([source(RELEASE), source(SUITE)])
            .stdin(Stdio::null())
            .output()
            .context("cannot run mmdebstrap")?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let tail: Vec<&str> = text.lines().rev().take(8).collect();
            bail!(
                "cannot unpack Debian {RELEASE} with {packages}: {}",
                tail.into_iter().rev().collect::<Vec<_>>().join("; ")
            );
        }
        let _ = fs::copy("/etc/resolv.conf", self.root.join("etc/resolv.conf"));
        self.copy_source()?;
        // The lists that mmdebstrap removed; the kernel's source is found in them.
        self.run(&["apt-get", "update", "-qq"])
    }

    /// Removes it. Nothing is mounted in it: mounts end with the program that they were made for.
    pub fn remove(&self) -> Result<()> {
        if self.root.exists() {
            fs::remove_dir_all(&self.root)
                .with_context(|| format!("cannot remove {}", self.root.display()))?;
        }
        Ok(())
    }

    /// The module's source as it is now.
    pub fn copy_source(&self) -> Result<()> {
        let inside = self.inside(SOURCE);
        if inside.exists() {
            fs::remove_dir_all(&inside)?;
        }
        let status = Command::new("cp")
            .arg("-a")
            .arg(workspace::root().join("kmod"))
            .arg(&inside)
            .status()
            .context("cannot run cp")?;
        ensure!(
            status.success(),
            "cannot copy kmod/ to {}",
            inside.display()
        );
        Ok(())
    }

    /// Runs a program inside, with its own /proc and /dev, which end with it.
    pub fn run(&self, argv: &[&str]) -> Result<()> {
        self.run_to(argv, Stdio::null())
    }

    /// As [`Chroot::run`]; what the program prints is shown.
    pub fn show(&self, argv: &[&str]) -> Result<()> {
        self.run_to(argv, Stdio::inherit())
    }

    fn run_to(&self, argv: &[&str], stdout: Stdio) -> Result<()> {
        let script = "mount -t proc proc \"$0/proc\" && mount --rbind /dev \"$0/dev\" && \
                      exec chroot \"$0\" \"$@\"";
        let status = Command::new("unshare")
            .args(["--mount", "--propagation=private", "sh", "-c", script])
            .arg(&self.root)
            .args(argv)
            .env("LC_ALL", "C.UTF-8")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null())
            .stdout(stdout)
            .status()
            .context("cannot run unshare")?;
        ensure!(status.success(), "`{}` failed: see above", argv.join(" "));
        Ok(())
    }

    /// What is at `path` inside.
    pub fn inside(&self, path: &str) -> PathBuf {
        self.root.join(Path::new(path.trim_start_matches('/')))
    }
}

/// Copies a module without its debug information, which would fill the memory of the test machines;
/// the copy is there whole or not at all.
pub fn strip(made: &Path, to: &Path) -> Result<()> {
    let partial = to.with_extension("partial");
    let status = Command::new("strip")
        .arg("--strip-debug")
        .arg("-o")
        .arg(&partial)
        .arg(made)
        .status()
        .context("cannot run strip")?;
    ensure!(status.success(), "cannot strip {}", made.display());
    Ok(fs::rename(&partial, to)?)
}
