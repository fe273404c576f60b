//! `cargo xtask kmod debug-kernel`: a kernel with KASAN and lockdep, and the modules for it.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, ensure};
use vmrig::workspace;

use super::{
    MODULES,
    chroot::{Chroot, SOURCE, SUITE, strip},
};

/// What kmod/tools/debug-kernel needs.
const PACKAGES: &str = "clang,lld,llvm,gcc,libc6-dev,make,rustc,rust-src,bindgen,flex,bison,bc,libelf-dev,\
                        libssl-dev,kmod,xz-utils";
/// Where it works inside.
const WORK: &str = "/debug";

/// Builds them; the directory that has the kernel.
pub fn build() -> Result<PathBuf> {
    let dir = workspace::cache_dir()?.join("kernels/debug");
    fs::create_dir_all(&dir)?;
    let debian = Chroot {
        root: dir.join("tree"),
    };
    // Kept: a module that has changed is built in seconds.
    let unpacked = dir.join("unpacked");
    if unpacked.exists() {
        debian.copy_source()?;
    } else {
        debian.unpack(&format!("linux-source/{SUITE},{PACKAGES}"))?;
        fs::write(unpacked, "")?;
    }
    debian.show(&[&format!("{SOURCE}/tools/debug-kernel"), WORK])?;

    let made = debian.inside(WORK).join("out");
    let release = fs::read_dir(made.join("modules"))?
        .next()
        .context("the debug kernel has no module directory")??;
    for what in ["vmlinux", "config", "modules"] {
        let status = Command::new("cp")
            .args(["-r", "--no-target-directory"])
            .arg(made.join(what))
            .arg(dir.join(what))
            .status()
            .context("cannot run cp")?;
        ensure!(status.success(), "cannot copy {what}");
    }
    let modules = workspace::kmod_dir(&release.file_name().to_string_lossy())?;
    fs::create_dir_all(&modules)?;
    for (_, name) in MODULES {
        let file = format!("{name}.ko");
        strip(&made.join(&file), &modules.join(&file))?;
    }
    Ok(dir)
}
