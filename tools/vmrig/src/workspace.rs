//! Where things are: the workspace, its target directory, the cache, and the programs that cargo
//! builds.

use std::{
    collections::HashMap,
    env,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, OnceLock, PoisonError},
};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

/// Root of the cargo workspace.
pub fn root() -> PathBuf {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.ancestors().nth(2).unwrap_or(crate_dir).to_owned()
}

/// The target directory that cargo uses here, whichever way it was configured.
///
/// # Errors
/// When `cargo metadata` does not run.
pub fn target_dir() -> Result<PathBuf> {
    let path = metadata()?["target_directory"]
        .as_str()
        .context("cargo names no target directory")?;
    Ok(path.into())
}

/// Whether a package of the workspace has a program of that name.
///
/// # Errors
/// When `cargo metadata` does not run.
pub fn has_program(package: &str, name: &str) -> Result<bool> {
    let list = |value: &'static Value| value.as_array().map(Vec::as_slice).unwrap_or_default();
    let packages = list(&metadata()?["packages"])
        .iter()
        .filter(|found| found["name"] == package);
    let mut targets = packages.flat_map(|package| list(&package["targets"]));
    Ok(targets.any(|target| target["name"] == name && target["kind"][0] == "bin"))
}

fn metadata() -> Result<&'static Value> {
    static METADATA: OnceLock<Value> = OnceLock::new();
    if let Some(metadata) = METADATA.get() {
        return Ok(metadata);
    }
    let output = cargo()
        .args(["metadata", "--no-deps", "--format-version", "1"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run `cargo metadata` to find the target directory")?;
    let metadata = serde_json::from_slice(&output.stdout)
        .context("`cargo metadata` failed: see its message above")?;
    Ok(METADATA.get_or_init(|| metadata))
}

/// Where kernels and other things that are costly to make are kept: `VMRIG_CACHE`, or `vmrig` in
/// the target directory.
///
/// # Errors
/// When the directory cannot be made.
pub fn cache_dir() -> Result<PathBuf> {
    let path = match env::var_os("VMRIG_CACHE") {
        Some(path) if !path.is_empty() => PathBuf::from(path),
        _ => target_dir()?.join("vmrig"),
    };
    std::fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}

/// Where the kernel modules built for a kernel release are kept.
///
/// # Errors
/// As [`cache_dir`].
pub fn kmod_dir(release: &str) -> Result<PathBuf> {
    Ok(cache_dir()?.join("kmod").join(release))
}

/// Builds a program of this workspace (once per process) and returns its path.
///
/// # Errors
/// When the build fails; cargo's messages are on stderr.
pub fn program(package: &str, name: &str) -> Result<PathBuf> {
    static BUILT: Mutex<Option<HashMap<(String, String), PathBuf>>> = Mutex::new(None);
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let built = built.get_or_insert_default();
    let key = (package.to_owned(), name.to_owned());
    if let Some(path) = built.get(&key) {
        return Ok(path.clone());
    }
    let output = cargo()
        .args([
            "build",
            "--quiet",
            "--message-format=json-render-diagnostics",
        ])
        .args(["--package", package, "--bin", name])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    if !output.status.success() {
        bail!("cannot build `{name}` of package `{package}`: see cargo's messages above");
    }
    let path = executable_of(&String::from_utf8_lossy(&output.stdout), name)
        .ok_or_else(|| anyhow!("cargo built package `{package}` but no program `{name}`"))?;
    built.insert(key, path.clone());
    Ok(path)
}

/// The path of the guest agent: `VMRIG_AGENT`, or built now.
pub(crate) fn agent() -> Result<PathBuf> {
    match env::var_os("VMRIG_AGENT") {
        Some(path) if !path.is_empty() => Ok(path.into()),
        _ => program("vmrig", "vmrig-agent"),
    }
}

/// Looks a host program up in `PATH` and the system directories that a user's `PATH` lacks.
pub fn which(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let system = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from);
    env::split_paths(&path)
        .chain(system)
        .map(|directory| directory.join(name))
        .find(|candidate| {
            nix::unistd::access(candidate, nix::unistd::AccessFlags::X_OK).is_ok()
                && candidate.is_file()
        })
}

fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

fn executable_of(messages: &str, name: &str) -> Option<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|message| message["target"]["name"] == name)
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_is_found_in_cargo_messages() {
        let messages = "not json\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"a\"},\"executable\":null}\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"b\"},\"executable\":\"/t/b\"}\n";
        assert_eq!(executable_of(messages, "b"), Some(PathBuf::from("/t/b")));
        assert_eq!(executable_of(messages, "a"), None);
    }

    #[test]
    fn workspace_root_holds_the_manifest() {
        assert!(root().join("Cargo.toml").exists());
    }

    #[test]
    fn system_programs_are_found() {
        assert!(which("sh").is_some());
        assert!(which("no-such-program-at-all").is_none());
    }
}
