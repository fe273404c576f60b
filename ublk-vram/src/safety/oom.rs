//! The OOM killer: it must never choose the server, and must be able to choose its helpers.

use super::root::Root;
use crate::error::{Error, ErrorKind, Result};

/// OOM_SCORE_ADJ_MIN (include/uapi/linux/oom.h): never chosen.
const NEVER: &str = "-1000";

/// Takes this process from the OOM killer's list.
///
/// It does not help a process that calls swapoff(2): that one is the first choice whatever its score
/// (set_current_oom_origin in mm/swapfile.c), so the server never does.
///
/// # Errors
/// [`ErrorKind::Unsafe`]: CAP_SYS_RESOURCE is missing, or the value does not stick.
pub fn protect_from_oom_killer() -> Result<()> {
    protect_at(&Root::default())
}

fn protect_at(root: &Root) -> Result<()> {
    let path = root.path("/proc/self/oom_score_adj");
    let failed = |why: String| {
        Error::new(
            ErrorKind::Unsafe,
            format!(
                "cannot take the server from the OOM killer's list ({NEVER} in {}): {why}",
                path.display()
            ),
        )
    };
    std::fs::write(&path, NEVER).map_err(|e| match e.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => failed(format!(
            "{e}; CAP_SYS_RESOURCE is missing: run as root or give that capability"
        )),
        _ => failed(e.to_string()),
    })?;
    match root.read_text("/proc/self/oom_score_adj") {
        Ok(value) if value == NEVER => Ok(()),
        Ok(value) => Err(failed(format!("the kernel took it but reads back {value}"))),
        Err(e) => Err(failed(e.message)),
    }
}

/// Gives a child the ordinary score of 0, so that the OOM killer may choose it: it inherited the
/// server's.
///
/// # Errors
/// The child is gone, or belongs to somebody else.
pub fn expose_to_oom_killer(pid: i32) -> Result<()> {
    let path = format!("/proc/{pid}/oom_score_adj");
    std::fs::write(&path, "0").map_err(|e| Error::os(format_args!("cannot write 0 to {path}"), e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safety::fixture::{Tree, in_child};
    use crate::safety::privileges::Privileges;

    #[test]
    fn for_real_and_back() {
        let said = in_child(|| {
            let own = nix::unistd::getpid().as_raw();
            let read = || {
                Root::default()
                    .read_text("/proc/self/oom_score_adj")
                    .unwrap()
            };
            match protect_from_oom_killer() {
                Ok(()) => {
                    assert_eq!(read(), "-1000");
                    expose_to_oom_killer(own).unwrap();
                    assert_eq!(read(), "0");
                    "done".to_owned()
                }
                Err(e) => {
                    assert_eq!(e.kind, ErrorKind::Unsafe);
                    e.message
                }
            }
        });
        let refused = "cannot take the server from the OOM killer's list (-1000 in \
            /proc/self/oom_score_adj): Permission denied (os error 13); CAP_SYS_RESOURCE is missing: \
            run as root or give that capability";
        // A value that was negative already may be set again without the capability.
        let capable = Privileges::read(&Root::default()).unwrap().sys_resource;
        assert!(said == "done" || (!capable && said == refused), "{said}");
    }

    #[test]
    fn a_child_that_is_gone() {
        assert_eq!(
            expose_to_oom_killer(i32::MAX).unwrap_err().kind,
            ErrorKind::NotFound
        );
        let missing = protect_at(&Tree::new().root()).unwrap_err();
        assert_eq!(missing.kind, ErrorKind::Unsafe);
    }
}
