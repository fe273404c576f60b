//! PR_SET_IO_FLUSHER: what a thread of the server allocates in the kernel must not wait for the
//! server itself.
//!
//! It sets PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE on the calling thread. Threads and processes made
//! afterwards inherit both (kernel/fork.c does not clear them), so it is set once, before there is a
//! second thread, and proven on every thread before the device is live. Whatever the server starts
//! that must be able to reclaim memory by I/O (a helper that calls swapoff) clears it again.

use nix::errno::Errno;

use super::root::Root;
use super::task_stat;
use crate::error::{Error, ErrorKind, Result};

/// include/uapi/linux/prctl.h, since Linux 5.6.
const PR_SET_IO_FLUSHER: i32 = 57;
const PR_GET_IO_FLUSHER: i32 = 58;

/// include/linux/sched.h, the same from 5.7 to 7.3: all allocations are GFP_NOIO.
const PF_MEMALLOC_NOIO: u32 = 0x0008_0000;
/// include/linux/sched.h, the same from 5.8 to 7.3: dirty throttling only against own writes.
const PF_LOCAL_THROTTLE: u32 = 0x0010_0000;

/// Makes the calling thread, and those it will start, IO flushers.
///
/// # Errors
/// [`ErrorKind::Unsafe`]: CAP_SYS_RESOURCE is missing, or the kernel is older than 5.6.
pub fn set_io_flusher() -> Result<()> {
    prctl("PR_SET_IO_FLUSHER", PR_SET_IO_FLUSHER, 1).map(|_| ())
}

/// Makes the calling thread an ordinary one again.
///
/// # Errors
/// As [`set_io_flusher`].
pub fn clear_io_flusher() -> Result<()> {
    prctl("PR_SET_IO_FLUSHER", PR_SET_IO_FLUSHER, 0).map(|_| ())
}

/// Whether the calling thread is an IO flusher.
///
/// # Errors
/// As [`set_io_flusher`]: even asking needs CAP_SYS_RESOURCE.
pub fn is_io_flusher() -> Result<bool> {
    prctl("PR_GET_IO_FLUSHER", PR_GET_IO_FLUSHER, 0).map(|value| value == 1)
}

fn prctl(name: &str, option: i32, value: libc::c_ulong) -> Result<i32> {
    let zero: libc::c_ulong = 0;
    // SAFETY: both options take one integer and demand that the others are 0; no memory is touched.
    let result = unsafe { libc::prctl(option, value, zero, zero, zero) };
    Errno::result(result).map_err(|errno| {
        let why = match errno {
            Errno::EPERM => "CAP_SYS_RESOURCE is missing: run as root or give that capability",
            Errno::EINVAL => "the kernel is older than 5.6: use a newer one",
            _ => "the kernel refuses it",
        };
        let cause = std::io::Error::from(errno);
        Error::new(
            ErrorKind::Unsafe,
            format!("cannot make the server an IO flusher (prctl {name}): {cause}; {why}"),
        )
    })
}

/// The threads of process `pid` that are not IO flushers, by thread id; empty if all are. Reading
/// another process's flags takes no privilege.
///
/// # Errors
/// There is no such process, or its files cannot be understood.
pub fn tasks_without_io_flusher(pid: i32) -> Result<Vec<i32>> {
    tasks_without_io_flusher_at(&Root::default(), pid)
}

fn tasks_without_io_flusher_at(root: &Root, pid: i32) -> Result<Vec<i32>> {
    let directory = format!("/proc/{pid}/task");
    let names = root
        .names(&directory)
        .map_err(|e| Error::os(format_args!("cannot list {directory}"), e))?;
    let both = PF_MEMALLOC_NOIO | PF_LOCAL_THROTTLE;
    let (mut without, mut seen) = (Vec::new(), 0usize);
    for tid in names
        .iter()
        .filter_map(|name| name.to_str()?.parse::<i32>().ok())
    {
        match task_stat::read(root, pid, tid) {
            Ok(stat) => {
                seen += 1;
                if stat.flags & both != both {
                    without.push(tid);
                }
            }
            // It ended: ENOENT at open(2), ESRCH (no kind of its own) at read(2).
            Err(_) if !root.path(format!("{directory}/{tid}")).exists() => {}
            Err(e) => return Err(e),
        }
    }
    if seen == 0 {
        return Err(Error::new(
            ErrorKind::NotFound,
            format!("there is no process {pid}"),
        ));
    }
    without.sort_unstable();
    Ok(without)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safety::fixture::{Tree, in_child};
    use crate::safety::privileges::Privileges;

    #[test]
    fn both_flags_on_every_thread() {
        let tree = Tree::new();
        let thread = |tid: i32, name: &str, flags: u32| {
            tree.file(
                &format!("/proc/77/task/{tid}/stat"),
                &format!("{tid} ({name}) S 1 7108 3744 0 -1 {flags} 101 0 0 0 0 0\n"),
            );
        };
        thread(77, "ublk-vram", 0x0040_0000 | 0x0018_0000);
        thread(78, "queue (0) x", 0x0018_0000);
        assert_eq!(
            tasks_without_io_flusher_at(&tree.root(), 77).unwrap(),
            [] as [i32; 0]
        );
        thread(100, "control", 0x0008_0000);
        thread(79, "iou-wrk-77", 0x0010_0000);
        assert_eq!(
            tasks_without_io_flusher_at(&tree.root(), 77).unwrap(),
            [79, 100]
        );
        let gone = tasks_without_io_flusher_at(&tree.root(), 78).unwrap_err();
        assert_eq!(gone.kind, ErrorKind::NotFound);
        tree.file("/proc/77/task/80/stat", "80 (x");
        assert!(tasks_without_io_flusher_at(&tree.root(), 77).is_err());
    }

    #[test]
    fn for_real_and_inherited_by_threads() {
        let said = in_child(|| {
            let pid = nix::unistd::getpid().as_raw();
            assert_eq!(tasks_without_io_flusher(pid).unwrap(), [pid]);
            if let Err(e) = set_io_flusher() {
                assert_eq!(e.kind, ErrorKind::Unsafe);
                assert_eq!(is_io_flusher().unwrap_err().kind, ErrorKind::Unsafe);
                return e.message;
            }
            assert!(is_io_flusher().unwrap());
            std::thread::spawn(move || {
                assert!(is_io_flusher().unwrap());
                assert_eq!(tasks_without_io_flusher(pid).unwrap(), [] as [i32; 0]);
                clear_io_flusher().unwrap();
                let tid = nix::unistd::gettid().as_raw();
                assert_eq!(tasks_without_io_flusher(pid).unwrap(), [tid]);
            })
            .join()
            .unwrap();
            "done".to_owned()
        });
        if Privileges::read(&Root::default()).unwrap().sys_resource && said == "done" {
            return;
        }
        assert_eq!(
            said,
            "cannot make the server an IO flusher (prctl PR_SET_IO_FLUSHER): Operation not permitted \
             (os error 1); CAP_SYS_RESOURCE is missing: run as root or give that capability"
        );
    }
}
