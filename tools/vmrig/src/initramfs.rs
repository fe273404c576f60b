//! Packs the guest's root file system: an initramfs of busybox, the guest agent, host programs with
//! their libraries, modules and files.
//!
//! It is made anew for every machine, in well under a second, as a sequence of cpio archives in one
//! unlinked file that QEMU gets as a descriptor: nothing is left behind however the test ends. Host
//! programs lie at their host paths; busybox applets fill the gaps. `/bin/sh` and the programs that
//! start other programs are the host's: those of busybox run its own applets in preference to what
//! is in `PATH`, so that `timeout 5 swapon` would not run the real swapon.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{BufWriter, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result, bail};

use crate::{
    closure,
    cpio::Writer,
    modules::Module,
    protocol::{ENVIRONMENT, MODULE_LIST},
    workspace,
};

/// In every guest when the host has it: the shell, and what starts other programs.
const LAUNCHERS: [&str; 7] = ["env", "timeout", "nice", "nohup", "setsid", "xargs", "find"];
/// Directories that programs expect.
const DIRECTORIES: [(&str, u32); 14] = [
    ("usr/bin", 0o755),
    ("usr/sbin", 0o755),
    ("usr/lib64", 0o755),
    ("proc", 0o555),
    ("sys", 0o555),
    ("dev", 0o755),
    ("run/lock", 0o755),
    ("tmp", 0o1777),
    ("var/tmp", 0o1777),
    ("var/lib", 0o755),
    ("root", 0o700),
    ("mnt", 0o755),
    ("etc/vmrig", 0o755),
    ("run/blkid", 0o755),
];
const LINKS: [(&str, &str); 6] = [
    ("bin", "usr/bin"),
    ("sbin", "usr/sbin"),
    ("lib", "usr/lib"),
    ("lib64", "usr/lib64"),
    ("var/run", "/run"),
    ("etc/mtab", "/proc/self/mounts"),
];
const FILES: [(&str, &str); 5] = [
    (
        "etc/passwd",
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/bin/false\n",
    ),
    ("etc/group", "root:x:0:\ndisk:x:6:\nnogroup:x:65534:\n"),
    ("etc/fstab", ""),
    ("etc/hostname", "guest\n"),
    ("etc/hosts", "127.0.0.1 localhost guest\n"),
];

/// Everything that goes into a guest's root file system.
#[derive(Debug, Default, Clone)]
pub(crate) struct Contents {
    pub(crate) modules: Vec<(String, String)>,
    pub(crate) tools: BTreeSet<String>,
    pub(crate) programs: Vec<PathBuf>,
    /// Host paths of libraries that are opened at run time.
    pub(crate) libraries: Vec<PathBuf>,
    pub(crate) files: BTreeMap<String, (u32, Vec<u8>)>,
    pub(crate) environment: Vec<(String, String)>,
}

/// Writes the archives and returns the file and its length in bytes.
pub(crate) fn build(contents: &Contents, modules: &[Module]) -> Result<(File, u64)> {
    let dir = workspace::cache_dir()?;
    let file = tempfile::tempfile_in(&dir)
        .with_context(|| format!("cannot make the initramfs in {}", dir.display()))?;
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let mut length = base(&mut out, contents)?;
    length += programs(&mut out, contents)?;
    length += module_files(&mut out, contents, modules)?;
    let file = out.into_inner().map_err(|error| error.into_error())?;
    Ok((file, length))
}

fn base(out: &mut impl Write, contents: &Contents) -> Result<u64> {
    let mut cpio = Writer::new(out);
    for (path, mode) in DIRECTORIES {
        cpio.directory(path, mode)?;
    }
    for (path, target) in LINKS {
        cpio.symlink(path, target)?;
    }
    cpio.char_device("dev/console", 0o600, (5, 1))?;
    cpio.char_device("dev/null", 0o666, (1, 3))?;
    for (path, (mode, data)) in &contents.files {
        cpio.file(path, *mode, data)?;
    }
    for (path, text) in FILES {
        cpio.file(path, 0o644, text.as_bytes())?;
    }
    for path in ["/etc/ld.so.cache", "/etc/mke2fs.conf"] {
        if let Ok(data) = fs::read(path) {
            cpio.file(path, 0o644, &data)?;
        }
    }
    let environment: String = contents
        .environment
        .iter()
        .map(|(name, value)| format!("{name}={value}\n"))
        .collect();
    cpio.file(ENVIRONMENT, 0o644, environment.as_bytes())?;
    Ok(cpio.finish()?)
}

fn programs(out: &mut impl Write, contents: &Contents) -> Result<u64> {
    let mut cpio = Writer::new(out);
    let busybox = workspace::which("busybox")
        .context("busybox is not installed: install the package busybox-static")?;
    add_program(&mut cpio, &busybox, "usr/bin/busybox")?;
    add_program(&mut cpio, &workspace::agent()?, "init")?;
    let shell = workspace::which("dash").or_else(|| workspace::which("bash"));
    let shell = shell.context("neither dash nor bash is installed: one is the guest's /bin/sh")?;
    add_program(&mut cpio, &shell, "usr/bin/sh")?;
    for tool in &contents.tools {
        let path = workspace::which(tool).with_context(|| {
            format!("the program `{tool}` is not on this host: install it, the guest is to have it")
        })?;
        add_program(&mut cpio, &path, &guest_path(&path)?)?;
    }
    for tool in LAUNCHERS
        .iter()
        .filter(|tool| !contents.tools.contains(**tool))
    {
        if let Some(path) = workspace::which(tool) {
            add_program(&mut cpio, &path, &guest_path(&path)?)?;
        }
    }
    for program in &contents.programs {
        let name = program
            .file_name()
            .context("a program for the guest has no name")?;
        add_program(
            &mut cpio,
            program,
            &format!("usr/bin/{}", name.to_string_lossy()),
        )?;
    }
    for library in &contents.libraries {
        add_program(&mut cpio, library, &guest_path(library)?)?;
    }
    for applet in applets(&busybox)?.lines() {
        let taken = ["usr/bin", "usr/sbin"]
            .iter()
            .any(|dir| cpio.contains(&format!("{dir}/{applet}")));
        if !taken {
            cpio.symlink(&format!("usr/bin/{applet}"), "busybox")?;
        }
    }
    Ok(cpio.finish()?)
}

fn module_files(out: &mut impl Write, contents: &Contents, modules: &[Module]) -> Result<u64> {
    let mut cpio = Writer::new(out);
    let mut list = String::new();
    for Module { name, data } in modules {
        let path = format!("/lib/modules/{name}.ko");
        cpio.file(&format!("usr{path}"), 0o644, data)?;
        let asked = contents
            .modules
            .iter()
            .find(|(asked, _)| asked.replace('-', "_") == *name);
        let parameters = asked.map_or("", |(_, parameters)| parameters);
        list.push_str(format!("{path} {parameters}").trim_end());
        list.push('\n');
    }
    cpio.file(MODULE_LIST, 0o644, list.as_bytes())?;
    Ok(cpio.finish()?)
}

/// Adds a host program under `guest`, stripped, and the libraries it needs under their own paths.
fn add_program(cpio: &mut Writer<impl Write>, host: &Path, guest: &str) -> Result<()> {
    if cpio.contains(guest) {
        return Ok(());
    }
    let metadata = fs::metadata(host).with_context(|| format!("cannot read {}", host.display()))?;
    cpio.file(
        guest,
        metadata.permissions().mode() & 0o7777,
        &stripped(host)?,
    )?;
    for library in closure::libraries(host)?.iter() {
        let guest = guest_path(library)?;
        if !cpio.contains(&guest) {
            let data =
                fs::read(library).with_context(|| format!("cannot read {}", library.display()))?;
            cpio.file(&guest, 0o755, &data)?;
        }
    }
    Ok(())
}

/// A host path as it is in the guest, where `/bin`, `/sbin` and `/lib*` are links into `/usr`.
fn guest_path(host: &Path) -> Result<String> {
    let path = host
        .to_str()
        .with_context(|| format!("{} is not UTF-8", host.display()))?;
    let path = path.trim_start_matches('/');
    let linked = ["bin/", "sbin/", "lib/", "lib64/"]
        .iter()
        .any(|top| path.starts_with(top));
    Ok(if linked {
        format!("usr/{path}")
    } else {
        path.to_owned()
    })
}

fn applets(busybox: &Path) -> Result<String> {
    let output = Command::new(busybox)
        .arg("--list")
        .output()
        .context("cannot run busybox")?;
    if !output.status.success() {
        bail!("`{} --list` failed: is it busybox?", busybox.display());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The program without symbols and debug information, which would only fill the guest's memory.
fn stripped(path: &Path) -> Result<Arc<Vec<u8>>> {
    type Key = (PathBuf, Option<std::time::SystemTime>);
    static KNOWN: Mutex<BTreeMap<Key, Arc<Vec<u8>>>> = Mutex::new(BTreeMap::new());
    let read = || fs::read(path).with_context(|| format!("cannot read {}", path.display()));
    if path.starts_with("/usr") || path.starts_with("/bin") || path.starts_with("/sbin") {
        return Ok(Arc::new(read()?)); // A distribution strips its own.
    }
    let key = (
        path.to_owned(),
        fs::metadata(path)
            .and_then(|metadata| metadata.modified())
            .ok(),
    );
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(data) = known.get(&key) {
        return Ok(data.clone());
    }
    let target = tempfile::NamedTempFile::new()?;
    let strip = Command::new("strip")
        .arg("-o")
        .arg(target.path())
        .arg(path)
        .output();
    let data = match strip {
        Ok(output) if output.status.success() => fs::read(target.path())?,
        _ => read()?, // A script, or no binutils.
    };
    let data = Arc::new(data);
    known.insert(key, data.clone());
    Ok(data)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_paths_are_merged() {
        for (host, guest) in [
            (
                "/lib64/ld-linux-x86-64.so.2",
                "usr/lib64/ld-linux-x86-64.so.2",
            ),
            ("/sbin/mkswap", "usr/sbin/mkswap"),
            ("/usr/bin/fio", "usr/bin/fio"),
            ("/opt/lib/x.so", "opt/lib/x.so"),
        ] {
            assert_eq!(guest_path(Path::new(host)).unwrap(), guest);
        }
    }

    #[test]
    fn programs_bring_their_libraries_and_replace_applets() {
        let Some(mount) = workspace::which("mount") else {
            return;
        };
        let mut out = Vec::new();
        let mut cpio = Writer::new(&mut out);
        let guest = guest_path(&mount).unwrap();
        add_program(&mut cpio, &mount, &guest).unwrap();
        assert!(cpio.contains(&guest));
        let libraries = closure::libraries(&mount).unwrap();
        assert!(
            libraries
                .iter()
                .all(|library| cpio.contains(&guest_path(library).unwrap()))
        );
    }
}
