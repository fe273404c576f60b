//! Memory for those who cannot wait: whoever takes a disk over.
//!
//! Until the disk is served again nobody can swap to it, and an IO flusher's allocation waits for others to
//! free memory, for ever if need be: the kernel does not even call the OOM killer for it (`__GFP_FS` in
//! `__alloc_pages_may_oom`, mm/page_alloc.c). To a real-time thread it gives half of what it keeps below the
//! "min" watermark, and without the boost that fragmentation adds to that (ALLOC_MIN_RESERVE in
//! `gfp_to_alloc_flags` and `zone_watermark_fast`, same file; from Linux 6.12 to 7.3).

use std::marker::PhantomData;

/// The calling thread is a real-time thread as long as this lives; threads that it starts are not.
pub struct Urgent {
    /// Another thread must not drop it.
    _not_send: PhantomData<*const ()>,
}

impl Urgent {
    /// Begins. Where it is not allowed (CAP_SYS_NICE is missing), the thread stays what it is.
    pub fn begin() -> Urgent {
        set_policy(libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, 1);
        Urgent {
            _not_send: PhantomData,
        }
    }
}

impl Drop for Urgent {
    fn drop(&mut self) {
        set_policy(libc::SCHED_OTHER, 0);
    }
}

fn set_policy(policy: i32, priority: i32) {
    let parameters = libc::sched_param {
        sched_priority: priority,
    };
    // SAFETY: a valid parameter block, read during the call; 0 is the calling thread.
    unsafe { libc::sched_setscheduler(0, policy, &raw const parameters) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy() -> i32 {
        // SAFETY: the call only reads; 0 is the calling thread.
        unsafe { libc::sched_getscheduler(0) }
    }

    #[test]
    fn as_long_as_it_lives_and_in_one_thread() {
        let urgent = Urgent::begin();
        let is_allowed = policy() == libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK;
        assert!(is_allowed || policy() == libc::SCHED_OTHER);
        let child = std::thread::spawn(policy).join().unwrap();
        assert_eq!(child, libc::SCHED_OTHER);
        drop(urgent);
        assert_eq!(policy(), libc::SCHED_OTHER);
    }
}
