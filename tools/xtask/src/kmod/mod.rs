//! `cargo xtask kmod`: builds the kernel module for the kernel that the test machines boot.
//!
//! Debian's header packages leave out the kernel's compiled Rust crates, and a module must be built
//! with the very compilers that made the kernel, which this machine need not have. So a Debian tree
//! with those compilers is unpacked beside the cached kernels, `kmod/tools/rust-tree` makes the crates
//! in it, once for each kernel, and modules are built inside it. Paths inside are always the same, and
//! so are the modules' bytes.

mod chroot;
mod debug;
mod dkms;

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::PathBuf,
    process::ExitCode,
    time::Instant,
};

use anyhow::{Result, bail};
use chroot::{Chroot, RELEASE, SOURCE, SUITE, strip};
use clap::Subcommand;
use nix::fcntl::{Flock, FlockArg};
use vmrig::{Kernel, KernelSpec, workspace};

/// What the tree has beside the kernel's headers, which bring make and pahole.
const PACKAGES: &str =
    "gcc-14,make,rustc,rust-src,rust-clippy,rustfmt,bindgen,kmod,xz-utils,linux-libc-dev";
/// The modules: directory below `kmod/`, name.
const MODULES: [(&str, &str); 2] = [("", "ublk_vram"), ("mock", "nvidia_mock")];
/// Where the kernel's crates are inside the tree.
const RUST: &str = "/kbuild";

/// Commands of `cargo xtask kmod`.
#[derive(Subcommand)]
pub enum Commands {
    /// Build the module, and the mocks of the tests, for the newest test kernel
    Build,
    /// Check format and lints as the kernel does, then build
    Check,
    /// Install the module by DKMS on a fresh Debian, load it, and remove it
    Dkms,
    /// Build a kernel with KASAN and lockdep, and the module for it: the better part of an hour
    DebugKernel,
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
    if matches!(command, Commands::DebugKernel) {
        println!("E2E_DEBUG_KERNEL={}", debug::build()?.display());
        return Ok(ExitCode::SUCCESS);
    }
    let kernel = KernelSpec::Suite(SUITE.to_owned()).resolve()?;
    if matches!(command, Commands::Dkms) {
        dkms::run(&kernel)?;
        return Ok(ExitCode::SUCCESS);
    }
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
    debian: Chroot,
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
            debian: Chroot {
                root: out.join("tree"),
            },
            out,
            _lock: lock,
        };
        let ready = tree.out.join("ready");
        let recipe = tree.recipe()?;
        if fs::read_to_string(&ready).is_ok_and(|made| made == recipe) {
            tree.debian.copy_source()?;
            return Ok(tree);
        }
        let started = Instant::now();
        eprintln!(
            "xtask: making the Rust crates of kernel {}, once: about two minutes and 3 GB",
            kernel.release
        );
        let _ = fs::remove_file(&ready);
        let debian = &tree.debian;
        debian.unpack(&format!(
            "linux-headers-{}/{SUITE},{PACKAGES}",
            kernel.release
        ))?;
        debian.run(&[&format!("{SOURCE}/tools/rust-tree"), &kernel.release, RUST])?;
        debian.run(&["apt-get", "clean"])?;
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

    fn build_module(&self, dir: &str, out: &str, more: &[&str]) -> Result<()> {
        let (source, out) = (join(SOURCE, dir), join(out, dir));
        let program = format!("{SOURCE}/tools/build-module");
        let mut argv = vec![program.as_str(), RUST, &source, &out];
        argv.extend(more);
        self.debian.run(&argv)
    }

    /// Builds the modules; where they are.
    fn build(&self) -> Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        for (dir, name) in MODULES {
            self.build_module(dir, "/out", &[])?;
            let made = join("/out", dir) + &format!("/{name}.ko");
            let to = self.out.join(format!("{name}.ko"));
            strip(&self.debian.inside(&made), &to)?;
            paths.push(to);
        }
        Ok(paths)
    }

    /// Format and lints.
    fn check(&self) -> Result<()> {
        let main = format!("{SOURCE}/src/main.rs");
        self.debian
            .run(&["rustfmt", "--edition", "2021", "--check", &main])?;
        // Never the modules that are shipped: clippy's object files differ.
        let out = "/out-clippy";
        let _ = fs::remove_dir_all(self.debian.inside(out));
        self.build_module("", out, &["CLIPPY=1", "KRUSTFLAGS=-Dwarnings"])
    }
}

fn join(base: &str, dir: &str) -> String {
    if dir.is_empty() {
        base.to_owned()
    } else {
        format!("{base}/{dir}")
    }
}
