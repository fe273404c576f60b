//! A control group of the server's own (cgroup v2), so that no limit of its caller's is its limit.
//!
//! A server started from a login session would be charged to that session: its memory.max would
//! make the server reclaim its own caches inside a request, its end could kill it. In its own group
//! the server has no limit, and what mlockall does not cover is kept out of swap and zswap too.
//! Pages stay charged to the group in which they were first touched, so this comes first.
//!
//! A server that a service manager started stays where it is: its unit is its group (the unit sets
//! MemorySwapMax=0 and MemoryZSwapMax=0), and a manager loses a process that leaves.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use super::root::Root;
use crate::error::{Error, Result};

/// The group above the servers' groups.
const PARENT: &str = "ublk-vram";

/// Where the server is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CgroupOutcome {
    /// In a group of its own.
    Own {
        /// The group's directory.
        path: PathBuf,
        /// Whether the memory controller is on and this group was kept out of swap with it.
        memory_controlled: bool,
    },
    /// Where its caller was.
    LeftInPlace {
        /// Why.
        reason: String,
    },
}

/// Moves this process, with all its threads, into the group `ublk-vram/NAME`.
///
/// Not being able to is no error: see [`CgroupOutcome::LeftInPlace`].
///
/// # Errors
/// [`crate::error::ErrorKind::Usage`] if `name` is no single directory name.
pub fn leave_caller_cgroup(name: &str) -> Result<CgroupOutcome> {
    leave_at(&Root::default(), name, std::process::id())
}

fn leave_at(root: &Root, name: &str, pid: u32) -> Result<CgroupOutcome> {
    check_name(name)?;
    let Some(top) = hierarchy(root) else {
        return Ok(CgroupOutcome::LeftInPlace {
            reason: "no cgroup v2 hierarchy is mounted on /sys/fs/cgroup".to_owned(),
        });
    };
    let parent = top.join(PARENT);
    let path = parent.join(name);
    let failed = |what: &str, path: &Path, e: io::Error| CgroupOutcome::LeftInPlace {
        reason: format!("cannot {what} {}: {e}", path.display()),
    };
    // Where the controller cannot be had, the group still has no limit.
    let _ = fs::write(top.join("cgroup.subtree_control"), "+memory");
    if let Err(e) = make_directory(&parent) {
        return Ok(failed("make", &parent, e));
    }
    let _ = fs::write(parent.join("cgroup.subtree_control"), "+memory");
    if let Err(e) = make_directory(&path) {
        return Ok(failed("make", &path, e));
    }
    let procs = path.join("cgroup.procs");
    if let Err(e) = fs::write(&procs, pid.to_string()) {
        remove_directories(&top, name);
        return Ok(failed("move the server to", &path, e));
    }
    let swap = forbid(&path.join("memory.swap.max"));
    // Kernels before 6.8 or without zswap have no such file; then there is nothing to forbid.
    let zswap = forbid(&path.join("memory.zswap.max"));
    Ok(CgroupOutcome::Own {
        path,
        memory_controlled: swap == Some(true) && zswap != Some(false),
    })
}

/// Removes the group of a server that ended, and the one above if it was the last. A caller that is
/// in it itself is moved to the top group first.
///
/// Best effort: whatever is still in the group keeps it.
///
/// # Errors
/// [`crate::error::ErrorKind::Usage`] if `name` is no single directory name.
pub fn remove_cgroup(name: &str) -> Result<()> {
    remove_at(&Root::default(), name, std::process::id())
}

fn remove_at(root: &Root, name: &str, pid: u32) -> Result<()> {
    check_name(name)?;
    let Some(top) = hierarchy(root) else {
        return Ok(());
    };
    let own = format!("/{PARENT}/{name}");
    let is_inside = root.read_text("/proc/self/cgroup").is_ok_and(|groups| {
        groups
            .lines()
            .any(|line| line.strip_prefix("0::") == Some(&own))
    });
    if is_inside {
        let _ = fs::write(top.join("cgroup.procs"), pid.to_string());
    }
    remove_directories(&top, name);
    Ok(())
}

fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0', '\n']) {
        return Err(Error::usage(format!(
            "'{name}' cannot be the name of a control group"
        )));
    }
    Ok(())
}

/// The top of the v2 hierarchy: all of /sys/fs/cgroup, or its part `unified` beside v1 controllers.
fn hierarchy(root: &Root) -> Option<PathBuf> {
    ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .into_iter()
        .map(|top| root.path(top))
        .find(|top| top.join("cgroup.controllers").exists())
}

fn make_directory(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Writes 0 to a limit; `None` if the kernel has no such file.
fn forbid(limit: &Path) -> Option<bool> {
    limit.exists().then(|| fs::write(limit, "0").is_ok())
}

fn remove_directories(top: &Path, name: &str) {
    let parent = top.join(PARENT);
    // A process that just ended may be counted for a moment longer.
    for _ in 0..5 {
        match fs::remove_dir(parent.join(name)) {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) => sleep(Duration::from_millis(20)),
            _ => break,
        }
    }
    // Fails while another server has its group there, as it should.
    let _ = fs::remove_dir(parent);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safety::fixture::{Tree, in_child};

    #[test]
    fn a_group_with_the_memory_controller() {
        let tree = Tree::new();
        let top = "/sys/fs/cgroup";
        for file in [
            "cgroup.controllers",
            "cgroup.subtree_control",
            "cgroup.procs",
        ] {
            tree.file(&format!("{top}/{file}"), "");
        }
        // In a real hierarchy the kernel makes these files with the directory.
        for file in ["memory.swap.max", "memory.zswap.max"] {
            tree.file(&format!("{top}/ublk-vram/fast/{file}"), "max\n");
        }
        let outcome = leave_at(&tree.root(), "fast", 812).unwrap();
        let path = tree.root().path("/sys/fs/cgroup/ublk-vram/fast");
        assert_eq!(
            outcome,
            CgroupOutcome::Own {
                path,
                memory_controlled: true
            }
        );
        let read = |file: &str| tree.root().read_text(format!("{top}/{file}")).unwrap();
        assert_eq!(read("cgroup.subtree_control"), "+memory");
        assert_eq!(read("ublk-vram/cgroup.subtree_control"), "+memory");
        assert_eq!(read("ublk-vram/fast/cgroup.procs"), "812");
        assert_eq!(read("ublk-vram/fast/memory.swap.max"), "0");
        assert_eq!(read("ublk-vram/fast/memory.zswap.max"), "0");
    }

    #[test]
    fn beside_version_1_and_without_the_memory_controller() {
        let tree = Tree::new();
        tree.file("/sys/fs/cgroup/unified/cgroup.controllers", "");
        let outcome = leave_at(&tree.root(), "fast", 812).unwrap();
        let path = tree.root().path("/sys/fs/cgroup/unified/ublk-vram/fast");
        assert_eq!(
            outcome,
            CgroupOutcome::Own {
                path,
                memory_controlled: false
            }
        );
    }

    #[test]
    fn no_hierarchy_leaves_the_server_in_place() {
        let CgroupOutcome::LeftInPlace { reason } = leave_at(&Tree::new().root(), "a", 1).unwrap()
        else {
            panic!("there is no hierarchy");
        };
        assert!(reason.contains("/sys/fs/cgroup"), "{reason}");
        remove_at(&Tree::new().root(), "a", 1).unwrap();
    }

    #[test]
    fn names_that_are_no_directory() {
        for name in ["", ".", "..", "a/b", "a\n"] {
            assert!(leave_at(&Tree::new().root(), name, 1).is_err(), "{name:?}");
            assert!(remove_at(&Tree::new().root(), name, 1).is_err(), "{name:?}");
        }
    }

    #[test]
    fn for_real_and_nothing_left_behind() {
        let name = format!("test-{}", std::process::id());
        let said = in_child(|| {
            let outcome = leave_caller_cgroup(&name).unwrap();
            let own = Root::default().read_text("/proc/self/cgroup").unwrap();
            let moved = own
                .lines()
                .any(|l| l.ends_with(&format!("/{PARENT}/{name}")));
            assert_eq!(
                moved,
                matches!(outcome, CgroupOutcome::Own { .. }),
                "{own} {outcome:?}"
            );
            remove_cgroup(&name).unwrap();
            match outcome {
                CgroupOutcome::Own { path, .. } => {
                    assert!(!path.exists(), "{}", path.display());
                    "own".to_owned()
                }
                CgroupOutcome::LeftInPlace { reason } => reason,
            }
        });
        // Which of them depends on the machine: a container may have no writable hierarchy even
        // for root.
        let left = said.starts_with("cannot make /") || said.starts_with("cannot move the server");
        assert!(
            said == "own" || left || said.starts_with("no cgroup v2"),
            "{said}"
        );
        if nix::unistd::geteuid().is_root() && said == "own" {
            let top = hierarchy(&Root::default()).unwrap();
            assert!(!top.join(PARENT).join(&name).exists());
        }
    }
}
