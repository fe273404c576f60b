//! A cgroup of its own for the program, so that it swaps on a machine that has memory enough.

use std::{
    fs,
    io::{Write, stderr},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

const ROOT: &str = "/sys/fs/cgroup";
const NAME: &str = "ublk-vram-demo";
/// The program ends within this once it is killed: it may have much memory to give back.
const END_LIMIT: Duration = Duration::from_secs(60);

/// A cgroup with a memory limit; dropping it kills what is in it and removes it.
pub struct Cgroup {
    path: PathBuf,
    /// The memory controller was off for the root's children before.
    enabled_memory: bool,
}

impl Cgroup {
    /// Makes it.
    ///
    /// # Errors
    /// When cgroup v2 is not mounted or has no memory controller, or an earlier demo's cgroup is
    /// still there.
    pub fn new(limit: u64) -> Result<Self> {
        let root = Path::new(ROOT);
        let read = |name: &str| fs::read_to_string(root.join(name));
        let has = |text: &str| text.split_whitespace().any(|word| word == "memory");
        let controllers =
            read("cgroup.controllers").with_context(|| format!("{ROOT} is no cgroup v2"))?;
        if !has(&controllers) {
            bail!("cgroup v2 has no memory controller here");
        }
        let path = root.join(NAME);
        if path.exists() {
            bail!(
                "{} exists already: is another demo running? If not, remove it with rmdir",
                path.display()
            );
        }
        let control = root.join("cgroup.subtree_control");
        let enabled_memory = !has(&fs::read_to_string(&control)?);
        if enabled_memory {
            fs::write(&control, "+memory").context("cannot turn the memory controller on")?;
        }
        // From here on the guard undoes it all.
        let cgroup = Self {
            path,
            enabled_memory,
        };
        fs::create_dir(&cgroup.path)
            .with_context(|| format!("cannot make {}", cgroup.path.display()))?;
        fs::write(cgroup.path.join("memory.max"), limit.to_string())
            .context("cannot limit memory")?;
        // Compressed pages in RAM would not reach the device.
        let zswap = cgroup.path.join("memory.zswap.max");
        if zswap.exists() {
            fs::write(&zswap, "0").context("cannot keep zswap out")?;
        }
        Ok(cgroup)
    }

    /// Puts a shell into it.
    pub fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs && ", self.path.display())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
        let end = Instant::now() + END_LIMIT;
        let mut removed = fs::remove_dir(&self.path);
        while self.path.exists() && removed.is_err() && Instant::now() < end {
            thread::sleep(Duration::from_millis(50));
            removed = fs::remove_dir(&self.path);
        }
        if self.path.exists() {
            let _ = writeln!(stderr(), "xtask: cannot remove {}", self.path.display());
        } else if self.enabled_memory {
            let _ = fs::write(Path::new(ROOT).join("cgroup.subtree_control"), "-memory");
        }
    }
}
