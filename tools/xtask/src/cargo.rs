//! Runs cargo from a program that cargo runs.
//!
//! `cargo run` tells its program about the package it belongs to. Handed on, those variables would
//! make build scripts of other packages believe that something changed.

use std::{
    env,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use vmrig::workspace;

/// A cargo command in the workspace's root, without standard input.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    let of_this_package = |name: &str| {
        name.starts_with("CARGO_PKG_")
            || name.starts_with("CARGO_MANIFEST_")
            || ["CARGO_BIN_NAME", "CARGO_CRATE_NAME", "OUT_DIR"].contains(&name)
    };
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(of_this_package) {
            command.env_remove(name);
        }
    }
    command
        .args(arguments)
        .current_dir(workspace::root())
        .stdin(Stdio::null());
    command
}

/// Builds what users install, optimised, and returns the directory it is in.
///
/// # Errors
/// When the build fails; cargo's messages are on standard error.
pub fn build_release() -> Result<PathBuf> {
    let status = cargo(&["build", "--quiet", "--release"])
        .status()
        .context("cannot run cargo")?;
    if !status.success() {
        bail!("cannot build the programs: see cargo's messages above");
    }
    Ok(workspace::target_dir()?.join("release"))
}
