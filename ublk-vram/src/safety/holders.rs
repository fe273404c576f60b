//! Who uses a block device: the question before every removal.
//!
//! The memory of a disk may go only when nobody can still ask for what is in it: no swap (ghosts
//! included), no mount in any mount namespace, nothing stacked on it, no open file. The server lives
//! in a mount namespace of its own where the host's mounts do not show, so they are looked up
//! through the other processes.
//!
//! What cannot be seen from /proc and /sys at all: a mount namespace that only an open file keeps
//! alive, a device that is open only inside an io_uring, by a memory mapping, or by a kernel target
//! (LIO, nvmet). The kernel's own answer (TRY_STOP_DEV, or O_EXCL before 7.0) therefore has the last
//! word; this room says who it is.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::mounts::{self, Mount, hidepid, read_mounts};
use super::privileges::Privileges;
use super::root::{DeviceNumber, Root, parse_device_number};
use super::swaps::read_swaps;
use crate::error::{Error, ErrorKind, Result};

/// One user of a block device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// The kernel swaps to it.
    Swap {
        /// As /proc/swaps names it.
        path: PathBuf,
        /// Bytes in use.
        used: u64,
        /// Its node went away while it was swap, as it does with the disk.
        ghost: bool,
    },
    /// It is mounted.
    Mount {
        /// Where.
        dir: PathBuf,
        /// A process that sees the mount.
        pid: i32,
        /// Whether that is another mount namespace than that of process 1.
        other_namespace: bool,
    },
    /// Another block device, or a filesystem over several devices, is built on it.
    Stacked {
        /// `dm-0`, `md0`, `loop3`, `btrfs`.
        kname: String,
        /// The name its users know (of a device-mapper device; the UUID of a btrfs).
        name: Option<String>,
    },
    /// A process has it open.
    Process {
        /// Process id, in the PID namespace of /proc.
        pid: i32,
        /// Its name (/proc/PID/comm).
        comm: String,
        /// How many of its file descriptors are the device.
        fds: usize,
    },
}

/// What [`holders`] found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Survey {
    /// Who uses the device: swap first, then mounts, stacked devices, processes.
    pub holders: Vec<Holder>,
    /// Why there may be more than was found, one sentence each; empty if everything was seen.
    pub blind: Vec<String>,
}

impl Survey {
    /// Whether nothing that could be seen uses the device.
    pub fn is_free(&self) -> bool {
        self.holders.is_empty()
    }
}

/// Finds who uses the block device `number`, whose kernel name is `kname` (`ublkb0`), or one of its
/// partitions. This process and those in `skip` do not count as openers.
///
/// # Errors
/// /proc/swaps, /proc or /sys/block cannot be read at all: then nothing is known, and the device
/// counts as in use.
pub fn holders(root: &Root, number: DeviceNumber, kname: &str, skip: &[i32]) -> Result<Survey> {
    let mut skip = skip.to_vec();
    skip.push(nix::unistd::getpid().as_raw());
    survey(root, number, kname, &skip)
}

fn survey(root: &Root, number: DeviceNumber, kname: &str, skip: &[i32]) -> Result<Survey> {
    let looked = |what: &str, e: io::Error| Error::os(format_args!("cannot list {what}"), e);
    let targets = Target::all(root, number, kname).map_err(|e| looked("/sys/block", e))?;
    let mut survey = Survey::default();
    for entry in read_swaps(root)? {
        if targets
            .iter()
            .any(|t| entry.is_on(root, t.number, &t.kname))
        {
            survey.holders.push(Holder::Swap {
                path: entry.path,
                used: entry.used,
                ghost: entry.deleted,
            });
        } else if entry.deleted && !entry.is_ghost() && entry.kind != "file" {
            survey.blind.push(format!(
                "the device node of the swap device {} is gone, so which device that is cannot be seen",
                entry.path.display()
            ));
        }
    }
    let mut pids: Vec<i32> = root
        .names("/proc")
        .map_err(|e| looked("/proc", e))?
        .iter()
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect();
    pids.sort_unstable();
    if pids.is_empty() {
        return Err(Error::new(
            ErrorKind::Io,
            "/proc shows no process: is it mounted?",
        ));
    }
    find_mounts(root, &targets, &pids, &mut survey);
    find_stacked(root, &targets, &mut survey).map_err(|e| looked("/sys/block", e))?;
    find_processes(root, &targets, &pids, skip, &mut survey);
    note_hidden_processes(root, &mut survey);
    Ok(survey)
}

/// The disk or one of its partitions.
struct Target {
    number: DeviceNumber,
    kname: String,
    /// Its directory in /sys/block.
    sysfs: PathBuf,
}

impl Target {
    fn all(root: &Root, number: DeviceNumber, kname: &str) -> io::Result<Vec<Target>> {
        let sysfs = Path::new("/sys/block").join(kname);
        let mut targets = Vec::new();
        for name in root.names(&sysfs)? {
            let directory = sysfs.join(&name);
            if !root.path(directory.join("partition")).exists() {
                continue;
            }
            let number = root.read_text(directory.join("dev")).ok();
            if let Some(number) = number.as_deref().and_then(parse_device_number) {
                let kname = name.to_string_lossy().into_owned();
                targets.push(Target {
                    number,
                    kname,
                    sysfs: directory,
                });
            }
        }
        targets.insert(
            0,
            Target {
                number,
                kname: kname.to_owned(),
                sysfs,
            },
        );
        Ok(targets)
    }
}

fn find_mounts(root: &Root, targets: &[Target], pids: &[i32], survey: &mut Survey) {
    let namespace = |pid: i32| root.read_link(format!("/proc/{pid}/ns/mnt")).ok();
    let first = namespace(1);
    let mut seen_views = HashSet::new();
    let mut seen_mounts = HashSet::new();
    for &pid in pids {
        // mountinfo shows what is below the root directory of its process, so one that is chrooted
        // does not speak for its namespace. Without the privilege to see a process's namespace its
        // mounts are still readable: then every process is looked at. Mount ids are unique on the
        // machine and tell which mounts were seen before.
        let own = namespace(pid);
        let view = own
            .clone()
            .zip(root.read_link(format!("/proc/{pid}/root")).ok());
        if view.as_ref().is_some_and(|view| seen_views.contains(view)) {
            continue;
        }
        // An error: it is gone, or a zombie. Another process of that namespace will be asked.
        let Ok(mounts) = read_mounts(root, pid) else {
            continue;
        };
        seen_views.extend(view);
        let is_ours = |m: &&Mount| targets.iter().any(|t| m.is_of(root, t.number, &t.kname));
        for mount in mounts.iter().filter(is_ours) {
            if seen_mounts.insert(mount.mount_id) {
                survey.holders.push(Holder::Mount {
                    dir: mount.mount_point.clone(),
                    pid,
                    other_namespace: own.is_some() && own != first,
                });
            }
        }
    }
}

fn find_stacked(root: &Root, targets: &[Target], survey: &mut Survey) -> io::Result<()> {
    for target in targets {
        for name in root.names(target.sysfs.join("holders"))? {
            let kname = name.to_string_lossy().into_owned();
            let name = root.read_text(format!("/sys/block/{kname}/dm/name")).ok();
            survey.holders.push(Holder::Stacked { kname, name });
        }
    }
    // These two open a device without a trace in `holders`: a file name in sysfs is all there is.
    for name in root.names("/sys/block")? {
        let backing = match name.as_bytes() {
            name if name.starts_with(b"loop") => "loop/backing_file",
            name if name.starts_with(b"zram") => "backing_dev",
            _ => continue,
        };
        let path = Path::new("/sys/block").join(&name).join(backing);
        let Ok(path) = root.read_text(path) else {
            continue;
        };
        if targets
            .iter()
            .any(|t| is_node_of(root, Path::new(&path), t))
        {
            let kname = name.to_string_lossy().into_owned();
            survey.holders.push(Holder::Stacked { kname, name: None });
        }
    }
    for uuid in root.names("/sys/fs/btrfs")? {
        let devices = Path::new("/sys/fs/btrfs").join(&uuid).join("devices");
        if targets
            .iter()
            .any(|t| root.path(devices.join(&t.kname)).symlink_metadata().is_ok())
        {
            survey.holders.push(Holder::Stacked {
                kname: "btrfs".to_owned(),
                name: Some(uuid.to_string_lossy().into_owned()),
            });
        }
    }
    Ok(())
}

/// Whether `path` is a node of `target`. Only what looks like one is stat'ed: stat(2) of an
/// arbitrary path can wait for a file server for ever.
fn is_node_of(root: &Root, path: &Path, target: &Target) -> bool {
    let same_name = path.file_name() == Some(OsStr::new(&target.kname));
    if !same_name && !looks_like_a_node(path) {
        return false;
    }
    root.block_device(path)
        .map_or(same_name, |number| number == target.number)
}

fn looks_like_a_node(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "dev")
}

fn find_processes(
    root: &Root,
    targets: &[Target],
    pids: &[i32],
    skip: &[i32],
    survey: &mut Survey,
) {
    let mut unseen = 0usize;
    for &pid in pids.iter().filter(|pid| !skip.contains(pid)) {
        match count_fds(root, targets, pid) {
            Ok(0) => {}
            Ok(fds) => survey.holders.push(Holder::Process {
                pid,
                comm: root
                    .read_text(format!("/proc/{pid}/comm"))
                    .unwrap_or_default(),
                fds,
            }),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => unseen += 1,
            // The process is gone.
            Err(_) => {}
        }
    }
    if unseen > 0 {
        let processes = if unseen == 1 { "process" } else { "processes" };
        survey.blind.push(format!(
            "the open files of {unseen} {processes} could not be seen: \
             that takes CAP_SYS_PTRACE, CAP_DAC_READ_SEARCH and every capability they have"
        ));
    }
}

fn count_fds(root: &Root, targets: &[Target], pid: i32) -> io::Result<usize> {
    let directory = PathBuf::from(format!("/proc/{pid}/fd"));
    let mut count = 0;
    for fd in root.names(&directory)? {
        let link = directory.join(&fd);
        let path = match root.read_link(&link) {
            Ok(path) => path,
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => return Err(e),
            // Closed in the meantime.
            Err(_) => continue,
        };
        // d_path marks the node of a disk that is gone; its number is still there through the link.
        let text = path.as_os_str().as_bytes();
        let text = text.strip_suffix(b" (deleted)").unwrap_or(text);
        let path = Path::new(OsStr::from_bytes(text));
        let named = |t: &Target| path.file_name() == Some(OsStr::new(&t.kname));
        if !looks_like_a_node(path) && !targets.iter().any(named) {
            continue;
        }
        let Some(number) = root.block_device(&link) else {
            continue;
        };
        if targets.iter().any(|t| t.number == number) && !is_path_only(root, pid, &fd) {
            count += 1;
        }
    }
    Ok(count)
}

/// Whether a file descriptor was opened with O_PATH, which does not open the device.
fn is_path_only(root: &Root, pid: i32, fd: &OsStr) -> bool {
    let path = Path::new("/proc")
        .join(pid.to_string())
        .join("fdinfo")
        .join(fd);
    let Ok(text) = root.read_text(path) else {
        return false;
    };
    text.lines()
        .find_map(|line| line.strip_prefix("flags:"))
        .and_then(|octal| i32::from_str_radix(octal.trim(), 8).ok())
        .is_some_and(|flags| flags & libc::O_PATH != 0)
}

/// PROC_PID_INIT_INO, the inode of the first PID namespace (include/uapi/linux/nsfs.h in 6.18 and
/// later, include/linux/proc_ns.h before).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

fn note_hidden_processes(root: &Root, survey: &mut Survey) {
    if let Ok(own) = root.read_link("/proc/self/ns/pid")
        && own != Path::new(FIRST_PID_NAMESPACE)
    {
        survey.blind.push(
            "this process is in a PID namespace of its own: \
             mounts and open files of processes outside it could not be seen"
                .to_owned(),
        );
    }
    let mounts = mounts::read_mounts(root, "self").unwrap_or_default();
    if let Some(value) = hidepid(&mounts)
        && !Privileges::read(root).is_ok_and(|p| p.sys_ptrace)
    {
        survey.blind.push(format!(
            "/proc is mounted with hidepid={value} and CAP_SYS_PTRACE is missing: \
             processes of other users could not be seen"
        ));
    }
}

#[cfg(test)]
#[path = "holders_tests.rs"]
mod tests;
