//! Keeping the machine alive.
//!
//! The server is what the kernel waits for when memory is short: to swap a page out or in, it hands
//! a request to this process and waits for the answer. Whatever this process waits for in turn, the
//! whole machine waits for. If that is a page of its own that was swapped out, free memory that only
//! swapping can make, or a filesystem on the very disk it serves, nobody ever moves again; and if
//! the server is killed, every page that was swapped is gone.
//!
//! The invariant, from the fetch of a request to its commit: **no page fault and no allocation**.
//! Each part of this room holds up a piece of it, or what surrounds it:
//!
//! - [`lock_memory`], [`prefault_stack`], [`settle_allocator`]: every page of the server is in RAM,
//!   was touched before the device is live, and stays. [`thread_faults`] is the proof.
//! - [`set_io_flusher`]: what the kernel allocates for the server in a system call is taken without
//!   I/O, so without waiting for the server. [`tasks_without_io_flusher`] is the proof.
//! - [`protect_from_oom_killer`]: when memory is out, somebody else is killed.
//! - [`leave_caller_cgroup`], [`detach_from_caller`]: nobody's limit, terminal or session ends the
//!   server.
//! - [`enter_private_mount_namespace`]: the server never sees its own disk mounted, so its exit does
//!   not flush to itself.
//! - [`read_swaps`], [`holders()`]: a device goes only when nobody can ask for its contents again.
//! - [`bus_error`]: device memory that is taken away is an error of one copy, not the server's death.
//! - [`kernel_warning`], [`missing_privileges`]: said before a device is made, not after.
//!
//! The order in a server: [`settle_allocator`], [`detach_from_caller`], [`leave_caller_cgroup`],
//! [`enter_private_mount_namespace`], [`block_termination_signals`], [`protect`], all in the first
//! thread before there is a second; then the GPU; then [`lock_memory`]; then the device. A process that opens
//! a GPU says [`limit_thread_stacks`] before, and [`unlock_files`] after its queues are ready.
//!
//! swapoff(2) is not here, on purpose: the process that calls it becomes the OOM killer's first
//! choice, so it is never the server.

pub mod bus_error;
mod cgroup;
mod describe;
mod holders;
mod io_flusher;
mod kernels;
mod memory;
mod mounts;
mod namespace;
mod oom;
mod privileges;
mod process;
mod root;
mod smaps;
mod swaps;
mod task_stat;
mod unlock;
mod urgent;

#[cfg(test)]
mod fixture;

pub use cgroup::{CgroupOutcome, leave_caller_cgroup, remove_cgroup};
pub use describe::describe;
pub use holders::{Holder, Survey, holders};
pub use io_flusher::{clear_io_flusher, is_io_flusher, set_io_flusher, tasks_without_io_flusher};
pub use kernels::kernel_warning;
pub use memory::{
    ProcessStatus, available_memory, can_lock_memory, limit_thread_stacks, lock_memory,
    memory_info, parse_status, pin_programs, prefault_stack, read_status, reserve_heap,
    settle_allocator, thread_faults,
};
pub use mounts::{Mount, parse_mountinfo, read_mounts};
pub use namespace::{PROGRAM_DIRECTORIES, enter_private_mount_namespace, mounts_to_detach};
pub use oom::{expose_to_oom_killer, protect_from_oom_killer};
pub use privileges::{Privileges, missing_privileges};
pub use process::{
    abort_on_panic, allow_open_files, block_termination_signals, check_open_files,
    detach_from_caller, forbid_core_dump, name_process, redirect_stdio_to_null,
};
pub use root::{DeviceNumber, Root};
pub use smaps::{Mapped, read_smaps};
pub use swaps::{SwapEntry, ghosts, parse_swaps, read_swaps};
pub use unlock::unlock_files;
pub use urgent::Urgent;

use crate::error::{Error, ErrorKind, Result};

/// Protects the process from what can be protected against before the GPU is open: makes it an IO
/// flusher, takes it from the OOM killer's list, forbids core dumps, and looks whether [`lock_memory`] will work. To be
/// called in the first thread, before there is a second.
///
/// What is missing ends the start with one sentence that names all of it; with `allow_unsafe` it is
/// given back as warnings instead. `lab_no_memory_lock` says that memory is not going to be locked:
/// always a warning.
///
/// # Errors
/// [`ErrorKind::Unsafe`] unless `allow_unsafe`.
pub fn protect(allow_unsafe: bool, lab_no_memory_lock: bool) -> Result<Vec<String>> {
    let lock = if lab_no_memory_lock {
        Ok(())
    } else {
        can_lock_memory()
    };
    let mut warnings = judge(
        [
            set_io_flusher(),
            protect_from_oom_killer(),
            forbid_core_dump(),
            lock,
        ],
        allow_unsafe,
    )?;
    if lab_no_memory_lock {
        warnings.push(
            "the server's memory is not locked (lab switch no-memory-lock): \
             under memory pressure this machine will hang"
                .to_owned(),
        );
    }
    Ok(warnings)
}

fn judge<const N: usize>(results: [Result<()>; N], allow_unsafe: bool) -> Result<Vec<String>> {
    let missing: Vec<String> = results
        .into_iter()
        .filter_map(|result| result.err())
        .map(|e| e.message)
        .collect();
    if missing.is_empty() || allow_unsafe {
        return Ok(missing);
    }
    Err(Error::new(
        ErrorKind::Unsafe,
        format!(
            "the device would not be safe as swap: {}. For a laboratory, --allow-unsafe starts it \
             all the same",
            missing.join("; and ")
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fixture::in_child;

    #[test]
    fn everything_that_is_missing_at_once() {
        let missing = |what: &str| Err(Error::new(ErrorKind::Unsafe, what));
        assert_eq!(
            judge([Ok(()), Ok(())], false).unwrap(),
            Vec::<String>::new()
        );
        let error = judge([missing("a"), Ok(()), missing("b")], false).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsafe);
        assert_eq!(
            error.message,
            "the device would not be safe as swap: a; and b. For a laboratory, --allow-unsafe starts \
             it all the same"
        );
        assert_eq!(
            judge([missing("a"), missing("b")], true).unwrap(),
            ["a", "b"]
        );
    }

    #[test]
    fn for_real() {
        let said = in_child(|| match protect(false, false) {
            Ok(warnings) => {
                let own = nix::unistd::getpid().as_raw();
                assert_eq!(tasks_without_io_flusher(own).unwrap(), [] as [i32; 0]);
                assert_eq!(
                    protect(false, true).unwrap().len(),
                    1,
                    "the lab switch is said"
                );
                format!("safe {}", warnings.len())
            }
            Err(e) => {
                assert_eq!(e.kind, ErrorKind::Unsafe);
                assert!(!protect(true, false).unwrap().is_empty());
                e.message
            }
        });
        if missing_privileges().is_empty() {
            assert_eq!(said, "safe 0");
        } else {
            assert!(
                said.starts_with("the device would not be safe as swap: "),
                "{said}"
            );
            assert!(said.contains("CAP_"), "{said}");
        }
    }
}
