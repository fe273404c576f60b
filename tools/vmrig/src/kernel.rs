//! Finds the kernel to boot: a Debian suite's cloud kernel by package name, or files the caller
//! names.
//!
//! A suite is resolved anew once a day, so a test follows the kernels its users get. Everything is
//! made in a temporary directory and renamed into place: what is in the cache is complete. Without
//! a network the cached kernel is used, with a note.

use std::{
    convert::Infallible,
    fs::{self, File},
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    str::FromStr,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, bail};
use nix::fcntl::{Flock, FlockArg};

use crate::{
    apt::{Apt, release_of},
    vmlinux, workspace,
};

/// Debian's kernel for virtual machines: the smallest, and everything this crate needs is in it.
const FLAVOUR: &str = "cloud-amd64";
/// How long a resolved suite is taken as current.
const FRESH: Duration = Duration::from_secs(24 * 3600);

/// Which kernel to boot.
#[derive(Debug, Clone)]
pub enum KernelSpec {
    /// The newest cloud kernel of a Debian suite, such as `trixie` (6.12) or `trixie-backports`
    /// (7.x).
    Suite(String),
    /// A kernel from anywhere.
    Files {
        /// bzImage or vmlinux.
        image: PathBuf,
        /// Its `/lib/modules/RELEASE` directory.
        modules: PathBuf,
    },
    /// What `cargo xtask kmod debug-kernel` left: a directory with `vmlinux` and `modules/RELEASE`.
    Debug(PathBuf),
}

/// A kernel that can be booted.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// What `uname -r` says in the guest.
    pub release: String,
    /// The uncompressed ELF kernel.
    pub image: PathBuf,
    /// Its module directory.
    pub modules: PathBuf,
    /// Whether it checks whatever it does: machines with it get more memory and more time.
    pub debug: bool,
}

impl FromStr for KernelSpec {
    type Err = Infallible;

    fn from_str(suite: &str) -> Result<Self, Infallible> {
        Ok(Self::Suite(suite.to_owned()))
    }
}

impl KernelSpec {
    /// Makes the kernel available on this machine, downloading it if need be.
    ///
    /// # Errors
    /// When neither the network nor the cache has it, or a file is not what it should be.
    pub fn resolve(&self) -> crate::Result<Kernel> {
        Ok(match self {
            Self::Suite(suite) => resolve_suite(suite)?,
            Self::Files { image, modules } => resolve_files(image, modules)?,
            Self::Debug(dir) => resolve_debug(dir)?,
        })
    }
}

fn resolve_suite(suite: &str) -> Result<Kernel> {
    let valid = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
    if suite.is_empty() || !suite.chars().all(valid) {
        bail!("`{suite}` is not the name of a Debian suite");
    }
    let dir = workspace::cache_dir()?.join("kernels").join(suite);
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let _lock = lock(&dir)?;
    let current = dir.join("current");
    if is_fresh(&current)
        && let Some(kernel) = cached(&dir)
    {
        return Ok(kernel);
    }
    match fetch(&dir, suite) {
        Ok(kernel) => Ok(kernel),
        Err(error) => {
            let Some(kernel) = cached(&dir) else {
                return Err(error.context(format!("cannot fetch a kernel of Debian {suite}")));
            };
            eprintln!(
                "vmrig: using the cached kernel {}: {error:#}",
                kernel.release
            );
            Ok(kernel)
        }
    }
}

fn resolve_files(image: &Path, modules: &Path) -> Result<Kernel> {
    if !modules.join("kernel").is_dir() && !modules.join("modules.builtin").exists() {
        bail!(
            "{} is not a /lib/modules/RELEASE directory",
            modules.display()
        );
    }
    let modules = modules.canonicalize()?;
    let release = modules
        .file_name()
        .context("the module directory has no name")?;
    let release = release.to_string_lossy().into_owned();
    let metadata =
        fs::metadata(image).with_context(|| format!("cannot read {}", image.display()))?;
    let mut hasher = DefaultHasher::new();
    (image.canonicalize()?, metadata.len(), metadata.modified()?).hash(&mut hasher);
    let dir = workspace::cache_dir()?.join("kernels/files");
    fs::create_dir_all(&dir)?;
    let vmlinux = dir.join(format!("{:016x}", hasher.finish()));
    let _lock = lock(&dir)?;
    if !vmlinux.exists() {
        extract_to(image, &vmlinux)?;
    }
    Ok(Kernel {
        release,
        image: vmlinux,
        modules,
        debug: false,
    })
}

fn resolve_debug(dir: &Path) -> Result<Kernel> {
    let what = || format!("{} holds no debug kernel", dir.display());
    let modules = fs::read_dir(dir.join("modules"))
        .ok()
        .and_then(|mut entries| entries.next())
        .with_context(what)??;
    let release = modules.file_name().to_string_lossy().into_owned();
    let kernel = kernel_in(&dir.canonicalize().with_context(what)?, release);
    Ok(Kernel {
        debug: true,
        ..kernel
    })
}

fn lock(dir: &Path) -> Result<Flock<File>> {
    let file = File::create(dir.join(".lock"))
        .with_context(|| format!("cannot write in {}", dir.display()))?;
    Flock::lock(file, FlockArg::LockExclusive)
        .map_err(|(_, errno)| errno)
        .with_context(|| format!("cannot lock {}", dir.display()))
}

/// Whether the file was written within the last day; a date in the future is not believed.
fn is_fresh(path: &Path) -> bool {
    let written = fs::metadata(path).and_then(|metadata| metadata.modified());
    written
        .ok()
        .and_then(|written| SystemTime::now().duration_since(written).ok())
        .is_some_and(|age| age < FRESH)
}

/// The kernel that was current at the last successful look.
fn cached(dir: &Path) -> Option<Kernel> {
    let release = fs::read_to_string(dir.join("current"))
        .ok()?
        .trim()
        .to_owned();
    let kernel = kernel_in(&dir.join(&release), release);
    (kernel.image.exists() && kernel.modules.is_dir()).then_some(kernel)
}

fn kernel_in(dir: &Path, release: String) -> Kernel {
    Kernel {
        image: dir.join("vmlinux"),
        modules: dir.join("modules").join(&release),
        release,
        debug: false,
    }
}

fn fetch(dir: &Path, suite: &str) -> Result<Kernel> {
    let work = tempfile::Builder::new().prefix(".fetch-").tempdir_in(dir)?;
    let apt = Apt::update(&work.path().join("apt"), suite)?;
    let meta = format!("linux-image-{FLAVOUR}");
    let release = release_of(&apt.depends(&meta)?)
        .with_context(|| format!("the package {meta} of {suite} depends on no kernel"))?;
    let kernel = kernel_in(&dir.join(&release), release.clone());
    if !kernel.image.exists() {
        eprintln!("vmrig: fetching kernel {release} of Debian {suite}");
        let packages: Vec<String> = ["image", "binary", "modules", "base"]
            .map(|part| format!("linux-{part}-{release}"))
            .into_iter()
            .filter(|package| apt.knows(package))
            .collect();
        let tree = work.path().join("tree");
        fs::create_dir(&tree)?;
        apt.unpack(&packages, &tree)?;
        install(&tree, &release, &dir.join(&release))?;
    }
    let note = work.path().join("current");
    fs::write(&note, &release)?;
    fs::rename(&note, dir.join("current"))?;
    Ok(kernel)
}

/// Takes kernel and modules out of unpacked packages, whose layout differs between suites.
fn install(tree: &Path, release: &str, destination: &Path) -> Result<()> {
    let modules = ["usr/lib/modules", "lib/modules"]
        .map(|place| tree.join(place).join(release))
        .into_iter()
        .find(|path| path.join("kernel").is_dir())
        .context("the packages hold no modules")?;
    let image = [
        tree.join(format!("boot/vmlinuz-{release}")),
        modules.join("vmlinuz"),
    ]
    .into_iter()
    .find(|path| path.exists())
    .context("the packages hold no vmlinuz")?;
    let ready = tree.join("ready");
    fs::create_dir_all(ready.join("modules"))?;
    extract_to(&image, &ready.join("vmlinux"))?;
    fs::rename(&modules, ready.join("modules").join(release))?;
    fs::rename(&ready, destination)
        .with_context(|| format!("cannot move the kernel to {}", destination.display()))
}

fn extract_to(image: &Path, destination: &Path) -> Result<()> {
    let data = fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    let vmlinux = vmlinux::extract(&data)
        .with_context(|| format!("cannot take the kernel out of {}", image.display()))?;
    let partial = destination.with_extension("partial");
    fs::write(&partial, vmlinux)?;
    fs::rename(&partial, destination)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suite_name_is_not_a_path() {
        for name in ["", "../x", "a b", "x/y"] {
            assert!(resolve_suite(name).is_err(), "{name}");
        }
    }

    #[test]
    fn a_half_made_cache_is_not_taken() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("current"), "9.9\n").unwrap();
        assert!(cached(dir.path()).is_none());
        fs::create_dir_all(dir.path().join("9.9/modules/9.9")).unwrap();
        assert!(cached(dir.path()).is_none());
        fs::write(dir.path().join("9.9/vmlinux"), "").unwrap();
        assert_eq!(cached(dir.path()).unwrap().release, "9.9");
    }
}
