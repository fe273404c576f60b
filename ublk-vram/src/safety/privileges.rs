//! Which of the privileges a device needs this process has.

use super::root::Root;
use crate::error::{Error, ErrorKind, Result};

/// Numbers of include/uapi/linux/capability.h.
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_PTRACE: u32 = 19;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_RESOURCE: u32 = 24;

/// The privileges of this process that count on the host: in a user namespace, none do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Privileges {
    /// Effective user id.
    pub euid: u32,
    /// ublk's control commands, mount namespaces.
    pub sys_admin: bool,
    /// Locking memory beyond RLIMIT_MEMLOCK.
    pub ipc_lock: bool,
    /// PR_SET_IO_FLUSHER, a negative OOM score, raising RLIMIT_MEMLOCK.
    pub sys_resource: bool,
    /// Seeing the open files and namespaces of every process: wanted, not needed.
    pub sys_ptrace: bool,
    /// Whether this is not the first user namespace. The capabilities a process has there do not
    /// pass the kernel's checks for ublk, PR_SET_IO_FLUSHER and locked memory.
    pub user_namespace: bool,
}

/// PROC_USER_INIT_INO (include/uapi/linux/nsfs.h in 6.18, include/linux/proc_ns.h before).
const FIRST_USER_NAMESPACE: &str = "user:[4026531837]";

impl Privileges {
    /// Those of the calling process.
    ///
    /// # Errors
    /// /proc/self/status cannot be read or has no CapEff.
    pub fn read(root: &Root) -> Result<Self> {
        let status = root.read_text("/proc/self/status")?;
        let own = root.read_link("/proc/self/ns/user");
        let user_namespace = own.is_ok_and(|own| own.as_os_str() != FIRST_USER_NAMESPACE);
        Self::parse(&status, user_namespace)
            .ok_or_else(|| Error::new(ErrorKind::Io, "/proc/self/status has no CapEff line"))
    }

    fn parse(status: &str, user_namespace: bool) -> Option<Self> {
        let line = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
        let bits = u64::from_str_radix(line("CapEff:")?.trim(), 16).ok()?;
        let effective = if user_namespace { 0 } else { bits };
        let has = |capability: u32| effective >> capability & 1 == 1;
        let euid = line("Uid:").and_then(|ids| ids.split_ascii_whitespace().nth(1)?.parse().ok());
        Some(Privileges {
            euid: euid.unwrap_or(u32::MAX),
            sys_admin: has(CAP_SYS_ADMIN),
            ipc_lock: has(CAP_IPC_LOCK),
            sys_resource: has(CAP_SYS_RESOURCE),
            sys_ptrace: has(CAP_SYS_PTRACE),
            user_namespace,
        })
    }

    /// What is missing for a device that is safe as swap, one item each with what it is for.
    pub fn missing(&self) -> Vec<String> {
        if self.user_namespace {
            return vec![
                "the host's user namespace (capabilities in another one do not count for ublk, \
                 PR_SET_IO_FLUSHER and locked memory)"
                    .to_owned(),
            ];
        }
        [
            (self.sys_admin, "CAP_SYS_ADMIN (to add a ublk device)"),
            (self.ipc_lock, "CAP_IPC_LOCK (to lock the server's memory)"),
            (
                self.sys_resource,
                "CAP_SYS_RESOURCE (for PR_SET_IO_FLUSHER and the OOM score)",
            ),
        ]
        .into_iter()
        .filter(|(has, _)| !has)
        .map(|(_, what)| what.to_owned())
        .collect()
    }
}

/// What this process lacks for a device that is safe as swap; empty if it lacks nothing.
pub fn missing_privileges() -> Vec<String> {
    match Privileges::read(&Root::default()) {
        Ok(privileges) => privileges.missing(),
        Err(e) => vec![format!("knowledge of the own capabilities ({e})")],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safety::fixture::Tree;

    #[test]
    fn bits_of_cap_eff() {
        let tree = Tree::new();
        let read = |caps: &str| {
            tree.file(
                "/proc/self/status",
                &format!("Name:\tx\nUid:\t1000\t1001\t0\t0\nCapEff:\t{caps}\n"),
            );
            Privileges::read(&tree.root()).unwrap()
        };
        let all = read("000001ffffffffff");
        assert_eq!(
            (all.euid, all.sys_ptrace, all.missing().len()),
            (1001, true, 0)
        );
        let none = read("0000000000000000");
        assert_eq!(none.missing().len(), 3);
        // The capabilities of the systemd unit: ADMIN, IPC_LOCK, RESOURCE, NICE.
        let unit = read(&format!(
            "{:016x}",
            1u64 << 21 | 1 << 14 | 1 << 24 | 1 << 23
        ));
        assert_eq!((unit.sys_ptrace, unit.missing().len()), (false, 0));
        let one = read(&format!("{:016x}", 1u64 << 21 | 1 << 24));
        assert_eq!(
            one.missing(),
            ["CAP_IPC_LOCK (to lock the server's memory)"]
        );
    }

    #[test]
    fn a_user_namespace_is_not_the_host() {
        let tree = Tree::new();
        tree.file("/proc/self/status", "CapEff:\t000001ffffffffff\n");
        tree.link("/proc/self/ns/user", "user:[4026532000]");
        let privileges = Privileges::read(&tree.root()).unwrap();
        assert!(privileges.user_namespace && !privileges.sys_admin);
        assert!(privileges.missing()[0].contains("user namespace"));
    }

    #[test]
    fn this_process() {
        let privileges = Privileges::read(&Root::default()).unwrap();
        assert_eq!(privileges.euid, nix::unistd::geteuid().as_raw());
        assert_eq!(missing_privileges(), privileges.missing());
        assert!(Privileges::read(&Tree::new().root()).is_err());
    }
}
