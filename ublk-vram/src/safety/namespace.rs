//! A mount namespace of the server's own, in which its disk is never mounted.
//!
//! A process that is the last of a mount namespace unmounts what is mounted there when it ends. If
//! that is a filesystem on the disk it serves, the flush waits for the process that is ending: it
//! hangs for ever. So the server leaves its caller's namespace, with propagation cut (a slave would
//! still receive the host's later mounts), and lets go of every mount it does not need, which
//! also keeps it from pinning filesystems the host wants to unmount.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use super::memory::read_status;
use super::mounts::{Mount, read_mounts};
use super::root::Root;
use crate::error::{Error, ErrorKind, Result};

/// Mount points that stay, whatever the caller keeps.
const STAY: [&str; 5] = ["/", "/proc", "/sys", "/dev", "/run"];

/// And this one with everything below it.
const STAY_BELOW: &str = "/sys/fs/cgroup";

/// Where programs and libraries live on the usual distributions: what a server keeps that will still
/// load a library or start a helper.
pub const PROGRAM_DIRECTORIES: [&str; 8] = [
    "/usr",
    "/lib",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc",
    "/nix/store",
    "/gnu/store",
];

/// Moves the process into a private mount namespace and lets go of every mount but `/`, `/proc`,
/// `/sys`, `/dev`, `/run`, what is at or below `/sys/fs/cgroup`, and those that `keep` lies on
/// (links are followed). Mounts that do not come off are left.
///
/// It must be called while the process has one thread: the namespace belongs to a thread, and only
/// those started later inherit it.
///
/// # Errors
/// CAP_SYS_ADMIN is missing, there is a second thread, or `/` is no mount point (a plain chroot).
pub fn enter_private_mount_namespace(keep: &[&Path]) -> Result<()> {
    let root = Root::default();
    let threads = read_status(&root)?.threads;
    if threads != 1 {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!(
                "cannot enter a private mount namespace: the process has {threads} threads already, \
                 and only the calling one would enter it"
            ),
        ));
    }
    unshare(CloneFlags::CLONE_NEWNS).map_err(|e| {
        Error::os(
            "cannot enter a private mount namespace (it needs CAP_SYS_ADMIN): unshare",
            e,
        )
    })?;
    let none: Option<&str> = None;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).map_err(|e| {
        Error::os(
            "cannot cut the mount namespace from the host's: making / private",
            e,
        )
    })?;
    let keep: Vec<PathBuf> = keep
        .iter()
        .map(|p| p.canonicalize().unwrap_or_else(|_| p.to_path_buf()))
        .collect();
    let keep: Vec<&Path> = keep.iter().map(PathBuf::as_path).collect();
    // A mount may hide others below its mount point: they show when it is gone, so again until
    // nothing more comes off.
    let mut left = usize::MAX;
    loop {
        let detach = mounts_to_detach(&read_mounts(&root, "self")?, &keep);
        if detach.is_empty() || detach.len() >= left {
            return Ok(());
        }
        left = detach.len();
        for mount_point in detach {
            // What is locked by a user namespace, or hidden, stays: it cannot be our disk, which
            // does not exist yet.
            let _ = umount2(
                &mount_point,
                MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW,
            );
        }
    }
}

/// The mount points to detach, deepest first (of several at one place, the last mounted first), for
/// [`enter_private_mount_namespace`].
pub fn mounts_to_detach(mounts: &[Mount], keep: &[&Path]) -> Vec<PathBuf> {
    // A kept path lies on the mounts at its ancestors. Detaching a mount takes those on it along,
    // so the ancestors of a mount that stays do too, by mount id.
    let stays = |m: &Mount| {
        STAY.iter().any(|stay| m.mount_point == Path::new(stay))
            || m.mount_point.starts_with(STAY_BELOW)
            || keep.iter().any(|path| path.starts_with(&m.mount_point))
    };
    let mut staying: HashSet<u64> = HashSet::new();
    for kept in mounts.iter().filter(|m| stays(m)) {
        let mut next = Some(kept);
        while let Some(mount) = next
            && staying.insert(mount.mount_id)
        {
            next = mounts.iter().find(|m| m.mount_id == mount.parent);
        }
    }
    let mut detach: Vec<&Mount> = mounts
        .iter()
        .rev()
        .filter(|m| !staying.contains(&m.mount_id))
        .collect();
    // The sort is stable: later mounts of the same depth stay in front of earlier ones.
    detach.sort_by_key(|m| std::cmp::Reverse(m.mount_point.components().count()));
    detach.into_iter().map(|m| m.mount_point.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safety::fixture::in_child;
    use crate::safety::mounts::parse_mountinfo;

    const MOUNTINFO: &str = "\
22 27 0:21 / /proc rw - proc proc rw
23 27 0:22 / /sys rw - sysfs sysfs rw
24 27 0:6 / /dev rw - devtmpfs devtmpfs rw
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw
27 1 254:0 / / rw - ext4 /dev/vda rw
31 23 0:28 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw
33 23 0:30 / /sys/kernel/tracing rw - tracefs tracefs rw
34 27 0:31 / /run rw - tmpfs tmpfs rw
35 34 0:32 / /run/user/1000 rw - tmpfs tmpfs rw
36 27 8:1 / /home rw - ext4 /dev/sda1 rw
37 36 8:2 / /home/me/disk rw - ext4 /dev/sda2 rw
38 36 8:3 / /home/me rw - ext4 /dev/sda3 rw
39 27 8:4 / /mnt/deep/er rw - ext4 /dev/sdb rw
40 39 8:5 / /mnt/deep/er rw - ext4 /dev/sdc rw
41 27 8:6 / /homes rw - ext4 /dev/sdd rw
";

    fn detached(keep: &[&str]) -> Vec<String> {
        let keep: Vec<&Path> = keep.iter().map(Path::new).collect();
        mounts_to_detach(&parse_mountinfo(MOUNTINFO).unwrap(), &keep)
            .iter()
            .map(|p| p.to_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn deepest_first_and_the_kernels_own_stay() {
        assert_eq!(
            detached(&[]),
            [
                "/mnt/deep/er",
                "/mnt/deep/er",
                "/home/me/disk",
                "/run/user/1000",
                "/sys/kernel/tracing",
                "/home/me",
                "/dev/shm",
                "/homes",
                "/home",
            ]
        );
    }

    #[test]
    fn what_a_kept_path_lies_on_stays() {
        assert_eq!(
            detached(&["/home/me/bin/ublk-vram", "/mnt/deep/er"]),
            [
                "/home/me/disk",
                "/run/user/1000",
                "/sys/kernel/tracing",
                "/dev/shm",
                "/homes"
            ]
        );
        assert!(
            detached(&["/homestead"]).contains(&"/home".to_owned()),
            "whole names only"
        );
    }

    #[test]
    fn a_loop_of_parents_ends() {
        let mounts = parse_mountinfo("1 2 0:1 / / rw - a b c\n2 1 0:2 / /x rw - a b c\n").unwrap();
        assert_eq!(mounts_to_detach(&mounts, &[]), Vec::<PathBuf>::new());
    }

    #[test]
    fn for_real_and_nothing_of_it_outside() {
        let before = read_mounts(&Root::default(), "self").unwrap();
        let said = in_child(|| {
            let keep = [Path::new("/usr")];
            if let Err(e) = enter_private_mount_namespace(&keep) {
                return e.message;
            }
            let mounts = read_mounts(&Root::default(), "self").unwrap();
            assert!(mounts.iter().any(|m| m.mount_point == Path::new("/proc")));
            assert!(
                mounts.iter().all(|m| m.propagation.is_empty()),
                "{mounts:?}"
            );
            format!("left: {:?}", mounts_to_detach(&mounts, &keep))
        });
        assert_eq!(read_mounts(&Root::default(), "self").unwrap(), before);
        let privileges = super::super::Privileges::read(&Root::default()).unwrap();
        if privileges.sys_admin {
            assert_eq!(said, "left: []");
        } else {
            assert!(
                said.contains("CAP_SYS_ADMIN") || said.starts_with("left:"),
                "{said}"
            );
        }
    }

    #[test]
    fn a_second_thread_is_refused() {
        // The test harness has more than one.
        let error = std::thread::spawn(|| enter_private_mount_namespace(&[]))
            .join()
            .unwrap()
            .unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(error.message.contains("threads"), "{error}");
    }
}
