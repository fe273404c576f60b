//! What developer commands need of the host, installed on demand: Debian packages with apt-get,
//! toolchain components with rustup.
//!
//! Only what is missing is installed, and one line says so: on a machine that has everything nothing
//! is printed and no network is needed.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use vmrig::workspace::which;

use crate::cargo::cargo;

/// A program and the Debian package it is in.
pub type Program = (&'static str, &'static str);

/// What fetches a kernel, packs its initramfs and boots it.
pub const BOOT: [Program; 10] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("dash", "dash"),
    ("ldd", "libc-bin"),
    ("strip", "binutils"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("lz4", "lz4"),
    ("find", "findutils"),
    ("apt-cache", "apt"),
];
/// What a guest has in it to swap.
pub const SWAP: [Program; 4] = [
    ("mkswap", "util-linux"),
    ("swapon", "mount"),
    ("swapoff", "mount"),
    ("wipefs", "util-linux"),
];
/// What makes a Debian tree to build the kernel module in.
pub const KMOD: [Program; 3] = [
    ("mmdebstrap", "mmdebstrap"),
    ("unshare", "util-linux"),
    ("strip", "binutils"),
];
/// What a guest that measures has in it.
pub const FIO: [Program; 1] = [("fio", "fio")];
/// What the end-to-end cases, and a developer who looks around, have in their guests.
pub const GUEST: [Program; 18] = [
    ("blkdiscard", "util-linux"),
    ("blkid", "util-linux"),
    ("cmp", "diffutils"),
    ("dd", "coreutils"),
    ("dmsetup", "dmsetup"),
    ("e2fsck", "e2fsprogs"),
    ("fio", "fio"),
    ("lsblk", "util-linux"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mount", "mount"),
    ("nsenter", "util-linux"),
    ("prlimit", "util-linux"),
    ("script", "bsdutils"),
    ("setpriv", "util-linux"),
    ("sha256sum", "coreutils"),
    ("taskset", "util-linux"),
    ("umount", "mount"),
    ("unshare", "util-linux"),
];
/// Vulkan in software, which the tests of the Vulkan backend run on, and the compiler of its shader:
/// files and their packages.
const VULKAN: [(&str, &str); 3] = [
    ("libvulkan.so.1", "libvulkan1"),
    ("libvulkan_lvp.so", "mesa-vulkan-drivers"),
    ("glslangValidator", "glslang-tools"),
];
/// Verifies what Debian kernels are fetched with.
pub const KEYRING: (&str, &str) = (
    "/usr/share/keyrings/debian-archive-keyring.gpg",
    "debian-archive-keyring",
);
/// Newer releases keep the device whose BAR stands in for GPU memory in a package of its own.
const QXL_PACKAGE: &str = "qemu-system-modules-spice";

/// Makes sure that virtual machines can be booted and that the host has these programs.
///
/// # Errors
/// When something is missing and cannot be installed; the message names the packages.
pub fn ensure_programs(sets: &[&[Program]]) -> Result<()> {
    install(&missing_packages(sets))?;
    if !qemu_has_qxl()? {
        install(&[QXL_PACKAGE])?;
    }
    let left = missing_packages(sets);
    if !left.is_empty() {
        bail!("still missing after the installation: {}", left.join(" "));
    }
    Ok(())
}

/// Makes sure that the server can be compiled: libublk's bindings are made with libclang.
///
/// # Errors
/// When something is missing and cannot be installed.
pub fn ensure_build_tools() -> Result<()> {
    let mut packages = Vec::new();
    if !has_libclang() {
        packages.push("libclang-dev");
    }
    if which("cc").is_none() {
        packages.push("gcc");
    }
    if !Path::new("/usr/include/linux/types.h").exists() {
        packages.push("libc6-dev");
    }
    install(&packages)
}

/// Makes sure that the toolchain has a component that brings `cargo SUBCOMMAND`.
///
/// # Errors
/// When it is missing and rustup cannot add it.
pub fn ensure_component(component: &str, subcommand: &str) -> Result<()> {
    let works = || {
        cargo(&[subcommand, "--version"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    if works() {
        return Ok(());
    }
    eprintln!("xtask: adding {component} with rustup");
    let added = Command::new("rustup")
        .args(["component", "add", component])
        .output();
    if !works() {
        let reason = match added {
            Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            Err(error) => error.to_string(),
        };
        bail!("the toolchain has no {component} and rustup cannot add it: {reason}");
    }
    Ok(())
}

/// Makes sure that there is Vulkan in software.
///
/// # Errors
/// When it is missing and cannot be installed.
pub fn ensure_vulkan() -> Result<()> {
    let folders = [
        "/usr/lib",
        "/usr/lib64",
        "/usr/lib/x86_64-linux-gnu",
        "/usr/bin",
    ]
    .map(Path::new);
    let is_there = |file: &str| folders.iter().any(|folder| folder.join(file).exists());
    let missing = VULKAN.iter().filter(|(file, _)| !is_there(file));
    let packages: Vec<&str> = missing.map(|(_, package)| *package).collect();
    install(&packages)
}

/// Whether bindgen will find libclang: in `LIBCLANG_PATH`, or where distributions put it.
fn has_libclang() -> bool {
    if std::env::var_os("LIBCLANG_PATH").is_some() {
        return true;
    }
    let list = |dir: &str| std::fs::read_dir(dir).into_iter().flatten().flatten();
    let llvm = list("/usr/lib").filter(|entry| {
        let name = entry.file_name();
        name.to_string_lossy().starts_with("llvm")
    });
    let fixed = ["/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu"].map(PathBuf::from);
    llvm.map(|entry| entry.path().join("lib"))
        .chain(fixed)
        .filter_map(|dir| std::fs::read_dir(dir).ok())
        .flatten()
        .flatten()
        .any(|entry| is_libclang(&entry.file_name().to_string_lossy()))
}

/// Whether a file's name is one of those that clang-sys, below bindgen, loads libclang by. The library of
/// clang's C++ interface is another one, whatever its name.
fn is_libclang(name: &str) -> bool {
    let versioned = name.starts_with("libclang-") && !name.starts_with("libclang-cpp");
    name.starts_with("libclang.so") || versioned && name.contains(".so")
}

fn missing_packages(sets: &[&[Program]]) -> Vec<&'static str> {
    let mut packages: Vec<&str> = sets
        .iter()
        .flat_map(|set| set.iter())
        .filter(|(program, _)| which(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if !Path::new(KEYRING.0).exists() {
        packages.push(KEYRING.1);
    }
    packages.sort_unstable();
    packages.dedup();
    packages
}

fn qemu_has_qxl() -> Result<bool> {
    let output = Command::new("qemu-system-x86_64")
        .args(["-machine", "none", "-device", "help"])
        .output()
        .context("cannot run qemu-system-x86_64")?;
    Ok(String::from_utf8_lossy(&output.stdout).contains("name \"qxl\""))
}

fn install(packages: &[&str]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    let names = packages.join(" ");
    if which("apt-get").is_none() {
        bail!("these Debian packages, or what they are called here, are missing: {names}");
    }
    if !nix::unistd::geteuid().is_root() {
        bail!("missing: run `apt-get install {names}` as root");
    }
    eprintln!("xtask: installing {names} with apt-get");
    // The lists of a fresh machine are empty or old.
    if apt_get(&["install", "--no-install-recommends"], packages).is_err() {
        apt_get(&["update"], &[])?;
        apt_get(&["install", "--no-install-recommends"], packages)?;
    }
    Ok(())
}

fn apt_get(arguments: &[&str], packages: &[&str]) -> Result<()> {
    let output = Command::new("apt-get")
        .args(["-y", "-qq"])
        .args(arguments)
        .args(packages)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null())
        .output()
        .context("cannot run apt-get")?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!(
            "apt-get {} {}: {}",
            arguments.join(" "),
            packages.join(" "),
            stderr.trim()
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_named_once() {
        let nowhere: [Program; 3] = [("no-such-1", "b"), ("no-such-2", "a"), ("no-such-3", "b")];
        let packages = missing_packages(&[&nowhere, &nowhere]);
        let ours: Vec<&str> = packages
            .into_iter()
            .filter(|package| *package != KEYRING.1)
            .collect();
        assert_eq!(ours, ["a", "b"]);
    }

    #[test]
    fn libclang_is_told_from_the_library_of_its_cxx_interface() {
        for name in [
            "libclang.so",
            "libclang.so.1",
            "libclang-14.so.1",
            "libclang-14.so",
        ] {
            assert!(is_libclang(name), "{name}");
        }
        for name in [
            "libclang-cpp.so.14",
            "libclang-cpp14.so",
            "libclang_rt.so",
            "libclang.a",
        ] {
            assert!(!is_libclang(name), "{name}");
        }
    }

    #[test]
    fn a_program_that_is_there_needs_no_package() {
        let there: [Program; 1] = [("sh", "dash")];
        assert!(!missing_packages(&[&there]).contains(&"dash"));
    }
}
