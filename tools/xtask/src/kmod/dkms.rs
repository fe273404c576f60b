//! `cargo xtask kmod dkms`: what an administrator does by docs/kmod.md, on a Debian that has nothing but
//! what is said there, and whether the module loads.

use std::{fs, time::Instant};

use anyhow::{Context, Result, ensure};
use vmrig::{Kernel, VmBuilder, workspace};

use super::chroot::{Chroot, SOURCE, SUITE, strip};

const MODULE: &str = concat!("ublk-vram/", env!("CARGO_PKG_VERSION"));
/// What is kept for the next module of the same kernel.
const CACHE: &str = "/var/cache/ublk-vram";

pub fn run(kernel: &Kernel) -> Result<()> {
    let release = &kernel.release;
    let debian = Chroot {
        root: workspace::cache_dir()?.join("kmod/dkms"),
    };
    debian.unpack(&format!(
        "dkms,linux-headers-{release}/{SUITE},rustc,rust-src,bindgen"
    ))?;
    debian.run(&["dkms", "add", SOURCE])?;
    // DKMS has a copy: the checkout may go.
    fs::remove_dir_all(debian.inside(SOURCE))?;
    let started = Instant::now();
    debian
        .show(&["dkms", "install", MODULE, "-k", release])
        .with_context(|| {
            let log = format!("/var/lib/dkms/{MODULE}/build/make.log");
            format!("see {}", debian.inside(&log).display())
        })?;
    eprintln!(
        "xtask: dkms install took {:.0} s",
        started.elapsed().as_secs_f64()
    );

    let updates = debian.inside(&format!("/lib/modules/{release}/updates"));
    let installed = fs::read_dir(updates.join("dkms"))
        .context("DKMS installed nothing")?
        .next()
        .context("DKMS installed nothing")??;
    let name = installed.file_name().to_string_lossy().into_owned();
    if let Some(name) = name.strip_suffix(".xz") {
        let path = format!("/lib/modules/{release}/updates/dkms/{name}");
        debian.run(&["xz", "--decompress", "--keep", &format!("{path}.xz")])?;
        fs::rename(debian.inside(&path), debian.inside("/root/ublk_vram.ko"))?;
    } else {
        fs::copy(installed.path(), debian.inside("/root/ublk_vram.ko"))?;
    }
    let stripped = debian.inside("/root/stripped.ko");
    strip(&debian.inside("/root/ublk_vram.ko"), &stripped)?;
    let vm = VmBuilder::new(kernel)
        .name("xtask-dkms")
        .file("/root/ublk_vram.ko", 0o644, fs::read(stripped)?)
        .boot()?;
    vm.sh("insmod /root/ublk_vram.ko && [ -c /dev/ublk-vram ] && rmmod ublk_vram")?
        .ok()?;
    vm.shutdown()?;
    eprintln!("xtask: the module that DKMS installed loads");

    debian.show(&["dkms", "remove", MODULE, "--all"])?;
    ensure!(!updates.exists(), "dkms remove left {}", updates.display());
    ensure!(!debian.inside(CACHE).exists(), "dkms remove left {CACHE}");
    debian.remove()
}
