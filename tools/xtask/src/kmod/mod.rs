//! `cargo xtask kmod`: builds the kernel module for the kernel that the test machines boot.
//!
//! Debian's header packages leave out the kernel's compiled Rust crates, and a module must be built
//! with the very compilers that made the kernel, which this machine need not have. So a Debian tree
//! with those compilers is unpacked beside the cached kernels, `kmod/tools/rust-tree` makes the crates
//! in it, once for each kernel, and modules are built inside it. Paths inside are always the same, and
//! so are the modules' bytes.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use clap::Subcommand;
use nix::fcntl::{Flock, FlockArg};
use vmrig::{Kernel, KernelSpec, workspace};

use crate::deps;

/// The Debian release whose compilers make the kernels of its backports.
const RELEASE: &str = "trixie";
/// Where the kernels come from.
const SUITE: &str = "trixie-backports";
/// What the tree has beside the kernel's headers, which bring make and pahole.
const PACKAGES: &str =
    "gcc-14,make,rustc,rust-src,rust-clippy,rustfmt,bindgen,kmod,xz-utils,linux-libc-dev";
/// The modules: directory below `kmod/`, name.
const MODULES: [(&str, &str); 2] = [("", "ublk_vram"), ("mock", "nvidia_mock")];
/// Where things are inside the tree.
const SOURCE: &str = "/kmod";
const RUST: &str = "/kbuild";

/// Commands of `cargo xtask kmod`.
#[derive(Subcommand)]
pub enum Commands {
    /// Build the module, and the mocks of the tests, for the newest test kernel
    Build,
    /// Check format and lints as the kernel does, then build
    Check,
}

/// Runs a command.
///
/// # Errors
/// When something is missing, or a build fails: its messages are on standard error.
pub fn run(command: &Commands) -> Result<ExitCode> {
    if !nix::unistd::geteuid().is_root() {
        bail!(
            "the kernel module is built in a tree of Debian {RELEASE} with the kernel's own compilers, \
             and only root can make and enter one: run this as root, or `make -C kmod` where the \
             running kernel has its Rust crates"
        );
    }
    let kernel = KernelSpec::Suite(SUITE.to_owned()).resolve()?;
    let tree = Tree::prepare(&kernel)?;
    if matches!(command, Commands::Check) {
        tree.check()?;
    }
    for path in tree.build()? {
        println!("{}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// An unpacked Debian with the compilers and the kernel's Rust crates.
struct Tree {
    root: PathBuf,
    /// Where finished modules go.
    out: PathBuf,
    _lock: Flock<fs::File>,
}

impl Tree {
    /// Makes the tree for `kernel`, if it is not there yet.
    fn prepare(kernel: &Kernel) -> Result<Tree> {
        let out = workspace::kmod_dir(&kernel.release)?;
        fs::create_dir_all(&out)?;
        let lock = fs::File::create(out.join(".lock"))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
        let tree = Tree {
            root: out.join("tree"),
            out,
            _lock: lock,
        };
        let ready = tree.out.join("ready");
        let recipe = tree.recipe()?;
        if fs::read_to_string(&ready).is_ok_and(|made| made == recipe) {
            tree.copy_source()?;
            return Ok(tree);
        }
        let started = Instant::now();
        eprintln!(
            "xtask: making the Rust crates of kernel {}, once: about two minutes and 3 GB",
            kernel.release
        );
        let _ = fs::remove_file(&ready);
        tree.unpack(&kernel.release)?;
        tree.copy_source()?;
        // The lists that mmdebstrap removed; the kernel's source is found in them.
        tree.run(&["apt-get", "update", "-qq"])?;
        tree.run(&[&format!("{SOURCE}/tools/rust-tree"), &kernel.release, RUST])?;
        tree.run(&["apt-get", "clean"])?;
        fs::write(&ready, recipe)?;
        tree.remove_others();
        eprintln!(
            "xtask: the Rust crates took {:.0} s",
            started.elapsed().as_secs_f64()
        );
        Ok(tree)
    }

    /// Trees of kernels that the tests do not boot any more: their modules stay.
    fn remove_others(&self) {
        let siblings = self.out.parent().map(fs::read_dir);
        for other in siblings.into_iter().flatten().flatten().flatten() {
            if other.path() != self.out {
                let _ = fs::remove_file(other.path().join("ready"));
                let _ = fs::remove_dir_all(other.path().join("tree"));
            }
        }
    }

    /// What a tree is made from: another recipe makes another tree.
    fn recipe(&self) -> Result<String> {
        let script = fs::read(workspace::root().join("kmod/tools/rust-tree"))?;
        let mut hasher = DefaultHasher::new();
        (PACKAGES, script).hash(&mut hasher);
        Ok(format!("{:016x}", hasher.finish()))
    }

    fn unpack(&self, release: &str) -> Result<()> {
        deps::ensure_programs(&[&deps::KMOD])?;
        if self.root.exists() {
            fs::remove_dir_all(&self.root)
                .with_context(|| format!("cannot remove {}", self.root.display()))?;
        }
        let mirror = vmrig::debian_mirror()?;
        let source =
            |suite: &str| format!("deb [signed-by={}] {mirror} {suite} main", deps::KEYRING.0);
        let output = Command::new("mmdebstrap")
            .args(["--variant=apt", "--mode=root", "--quiet"])
            .arg("--aptopt=APT::Install-Recommends \"false\"")
            .arg(format!(
                "--include=linux-headers-{release}/{SUITE},{PACKAGES}"
            ))
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
                "cannot unpack Debian {RELEASE} with the headers of {release}: {}",
                tail.into_iter().rev().collect::<Vec<_>>().join("; ")
            );
        }
        let _ = fs::copy("/etc/resolv.conf", self.root.join("etc/resolv.conf"));
        Ok(())
    }

    /// The module's source as it is now.
    fn copy_source(&self) -> Result<()> {
        let inside = self.root.join(SOURCE.trim_start_matches('/'));
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
    fn run(&self, argv: &[&str]) -> Result<()> {
        let script = "mount -t proc proc \"$0/proc\" && mount --rbind /dev \"$0/dev\" && \
                      exec chroot \"$0\" \"$@\"";
        let status = Command::new("unshare")
            .args(["--mount", "--propagation=private", "sh", "-c", script])
            .arg(&self.root)
            .args(argv)
            .env("LC_ALL", "C.UTF-8")
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .context("cannot run unshare")?;
        ensure!(status.success(), "`{}` failed: see above", argv.join(" "));
        Ok(())
    }

    fn build_module(&self, dir: &str, out: &str, more: &[&str]) -> Result<()> {
        let (source, out) = (join(SOURCE, dir), join(out, dir));
        let program = format!("{SOURCE}/tools/build-module");
        let mut argv = vec![program.as_str(), RUST, &source, &out];
        argv.extend(more);
        self.run(&argv)
    }

    /// Builds the modules; where they are.
    fn build(&self) -> Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        for (dir, name) in MODULES {
            self.build_module(dir, "/out", &[])?;
            let made = self.inside(&join("/out", dir)).join(format!("{name}.ko"));
            let to = self.out.join(format!("{name}.ko"));
            let partial = self.out.join(format!(".{name}.ko"));
            // Debug information would fill the memory of the test machines.
            let status = Command::new("strip")
                .arg("--strip-debug")
                .arg("-o")
                .arg(&partial)
                .arg(&made)
                .status()
                .context("cannot run strip")?;
            ensure!(status.success(), "cannot strip {}", made.display());
            fs::rename(&partial, &to)?;
            paths.push(to);
        }
        Ok(paths)
    }

    /// Format and lints.
    fn check(&self) -> Result<()> {
        let main = format!("{SOURCE}/src/main.rs");
        self.run(&["rustfmt", "--edition", "2021", "--check", &main])?;
        // Never the modules that are shipped: clippy's object files differ.
        let out = "/out-clippy";
        let _ = fs::remove_dir_all(self.inside(out));
        self.build_module("", out, &["CLIPPY=1", "KRUSTFLAGS=-Dwarnings"])
    }

    fn inside(&self, path: &str) -> PathBuf {
        self.root.join(Path::new(path.trim_start_matches('/')))
    }
}

fn join(base: &str, dir: &str) -> String {
    if dir.is_empty() {
        base.to_owned()
    } else {
        format!("{base}/{dir}")
    }
}
