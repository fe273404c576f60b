use super::*;
use crate::safety::fixture::{Tree, in_child};

const STATUS: &str = "Name:\tublk-vram\nThreads:\t7\nVmPeak:\t  300000 kB\nVmLck:\t  250000 kB\n\
    VmRSS:\t   60000 kB\nRssAnon:\t   20000 kB\nRssFile:\t    8000 kB\nRssShmem:\t   32000 kB\n\
    VmPTE:\t     500 kB\nVmSwap:\t       0 kB\nCapEff:\t0000000000000000\n";

#[test]
fn status_lines_are_kib() {
    let status = parse_status(STATUS).unwrap();
    assert_eq!(status.locked, 250_000 << 10);
    assert_eq!(status.resident, 60_000 << 10);
    assert_eq!((status.swapped, status.threads), (0, 7));
    assert_eq!(status.cost(), (20_000 + 8_000 + 32_000 + 500) << 10);
    let unlocked = ProcessStatus {
        locked: 0,
        ..status
    };
    assert_eq!(
        unlocked.cost(),
        (20_000 + 32_000 + 500) << 10,
        "file pages can be dropped"
    );
}

#[test]
fn a_missing_line_is_not_taken_for_zero() {
    let text = STATUS.replace("VmSwap", "VmSwop");
    let error = parse_status(&text).unwrap_err();
    assert!(error.message.contains("'VmSwap'"), "{error}");
    assert!(parse_status("VmLck:\t\n").is_err());
}

#[test]
fn available_memory_is_kib() {
    let text = "MemTotal:  100 kB\nMemFree: 5 kB\nMemAvailable:     64 kB\n";
    assert_eq!(mem_available(text).unwrap(), 65536);
    assert!(mem_available("MemTotal: 1 kB\n").is_err());
    assert!(mem_available("MemAvailable: x kB\n").is_err());
    assert!(available_memory(&Root::default()).unwrap() > 0);
}

#[test]
fn this_process_has_memory() {
    let info = memory_info(&[nix::unistd::getpid().as_raw()], 4096).unwrap();
    assert_eq!(info.arena, 4096);
    assert!(info.resident > 0 && info.cost > 0);
}

#[test]
fn the_message_names_the_limit_and_the_capability() {
    let error = lock_failure(nix::Error::ENOMEM, 8 << 20, false);
    assert_eq!(error.kind, ErrorKind::Unsafe);
    assert_eq!(
        error.message,
        "cannot lock the server's memory (mlockall): Cannot allocate memory (os error 12); \
         RLIMIT_MEMLOCK is 8388608 bytes (8M) and CAP_IPC_LOCK is missing: run as root, or give \
         CAP_IPC_LOCK or LimitMEMLOCK=infinity"
    );
    let error = lock_failure(nix::Error::EPERM, RLIM_INFINITY, true);
    assert!(
        error.message.contains("RLIMIT_MEMLOCK is unlimited"),
        "{error}"
    );
    assert!(error.message.contains("CAP_IPC_LOCK is present"), "{error}");
}

#[test]
fn wsl2_is_refused_with_the_reason() {
    let tree = Tree::new();
    refuse_wsl2(&tree.root()).unwrap();
    tree.file("/dev/dxg", "");
    let error = refuse_wsl2(&tree.root()).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsafe);
    assert!(error.message.contains("WSL2"), "{error}");
}

#[test]
fn lock_all_memory_for_real() {
    let said = in_child(|| {
        let expected = can_lock_memory();
        match lock_memory() {
            Ok(()) => {
                let before = read_status(&Root::default()).unwrap();
                // Future mappings are populated at once: 8 MiB more are resident before a touch.
                let block = std::hint::black_box(Vec::<u8>::with_capacity(8 << 20));
                let after = read_status(&Root::default()).unwrap();
                let grown = after.anonymous.saturating_sub(before.anonymous);
                assert!(grown >= 8 << 20, "{grown} bytes became resident");
                assert_eq!(after.swapped, 0);
                drop(block);
                "locked".to_owned()
            }
            Err(e) => {
                assert!(expected.is_err(), "{e}");
                e.message
            }
        }
    });
    if has_ipc_lock(&Root::default()) {
        assert_eq!(said, "locked");
    } else {
        let limit = said.contains("RLIMIT_MEMLOCK is") && said.contains("CAP_IPC_LOCK is missing");
        assert!(said == "locked" || limit, "{said}");
    }
}

#[test]
fn a_limit_that_is_too_low_is_refused_for_real() {
    let said = in_child(|| {
        setrlimit(Resource::RLIMIT_MEMLOCK, 64 << 10, 64 << 10).unwrap();
        drop_all_capabilities();
        let early = can_lock_memory().unwrap_err().message;
        let late = lock_memory().unwrap_err().message;
        format!("{early}\n{late}")
    });
    for line in said.lines() {
        assert!(
            line.contains("RLIMIT_MEMLOCK is 65536 bytes (64K)"),
            "{line}"
        );
        assert!(line.contains("CAP_IPC_LOCK is missing"), "{line}");
    }
    assert_eq!(said.lines().count(), 2);
}

fn drop_all_capabilities() {
    #[repr(C)]
    struct Header {
        version: u32,
        pid: i32,
    }
    let header = Header {
        version: 0x2008_0522,
        pid: 0,
    };
    let none = [0u32; 6];
    // SAFETY: capset reads a version 3 header and two empty sets of three words, as laid out here.
    let rc = unsafe { libc::syscall(libc::SYS_capset, &raw const header, none.as_ptr()) };
    assert_eq!(rc, 0);
}

/// Runs `body` in a thread of a child process whose stack is new: glibc reuses the stacks of threads
/// that ended, but none that is so much smaller.
fn on_new_stack(body: fn() -> String) -> String {
    in_child(move || {
        std::thread::Builder::new()
            .stack_size(32 << 20)
            .spawn(body)
            .unwrap()
            .join()
            .unwrap()
    })
}

#[test]
fn a_prefaulted_stack_faults_no_more() {
    on_new_stack(|| {
        let tid = nix::unistd::gettid().as_raw();
        let start = thread_faults(tid).unwrap().0;
        assert_eq!(prefault_stack(8 << 20), 8 << 20);
        let touched = thread_faults(tid).unwrap().0;
        assert!(touched > start, "the stack was met for the first time");
        touch_frames(stack_pointer() - (8 << 20));
        let now = thread_faults(tid).unwrap().0;
        assert!(
            now - touched <= 4,
            "{} faults on a stack that was touched",
            now - touched
        );
        String::new()
    });
}

#[test]
fn a_stack_is_never_overrun() {
    let all = on_new_stack(|| prefault_stack(usize::MAX).to_string());
    assert!(
        (31 << 20..32 << 20).contains(&all.parse::<usize>().unwrap()),
        "{all}"
    );
    // The first thread of a process has a stack that grows, as far as RLIMIT_STACK.
    let said = in_child(|| prefault_stack(1 << 20).to_string());
    assert_eq!(said, (1 << 20).to_string());
}

#[test]
fn the_allocator_keeps_what_is_freed() {
    let said = in_child(|| {
        let took = settle_allocator();
        let use_and_free = || {
            let mut block = vec![1u8; 48 << 20];
            std::hint::black_box(&mut block);
        };
        use_and_free();
        let tid = nix::unistd::gettid().as_raw();
        let before = thread_faults(tid).unwrap().0;
        use_and_free();
        let faults = thread_faults(tid).unwrap().0 - before;
        assert!(
            !took || faults < 50,
            "{faults} faults for memory that was there before"
        );
        took.to_string()
    });
    assert_eq!(said, cfg!(target_env = "gnu").to_string());
}

#[test]
fn threads_whose_maker_asks_for_no_stack_get_small_ones() {
    unsafe extern "C" {
        fn pthread_getattr_default_np(attributes: *mut libc::pthread_attr_t) -> libc::c_int;
    }
    let said = in_child(|| {
        let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
        let made = limit_thread_stacks();
        let mut size = 0;
        // SAFETY: pthread_getattr_default_np initialises what the others read.
        unsafe {
            assert_eq!(pthread_getattr_default_np(attributes.as_mut_ptr()), 0);
            libc::pthread_attr_getstacksize(attributes.as_ptr(), &mut size);
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
        }
        format!("{made} {size}")
    });
    assert_eq!(said, format!("true {}", 1 << 20));
}
