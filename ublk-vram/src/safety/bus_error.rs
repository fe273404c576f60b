//! SIGBUS from device memory: an error of one copy, and not the end of the process.
//!
//! A mapping of device memory can lose what is behind it: a driver or a module takes it away
//! (`unmap_mapping_range`), a GPU's driver cannot bring it back, a memfd is truncated. The CPU's next
//! access then raises SIGBUS, whose default is to kill the process, its disk with it. With the
//! device's ranges [`watch`]ed, and every access to them made inside [`guarded`], the access ends with
//! an error instead.
//!
//! # How, and why it is sound
//! [`guarded`] calls the access through a few instructions that save the callee-saved registers and
//! the stack pointer. The handler, which runs on the thread that faulted, looks whether the address is
//! a watched one and whether this thread is inside `guarded`; if so, it changes the interrupted context
//! to continue behind that call with the saved stack pointer, and returns. The kernel restores signal
//! mask and registers from the context as after any handler. The frames that are left behind are
//! those of the access alone, and hold nothing that needs to be dropped: `guarded` takes only a
//! closure that is `Copy`, which the copy routines' are. So this is a `longjmp` over plain frames, which Rust allows
//! (RFC 2945, "plain old frames"). Nothing is mapped, allocated or locked on the way, so it works where
//! memory is out.
//!
//! Any other SIGBUS (a poisoned page of system memory, a truncated file) goes to the handler that was
//! there before.
//!
//! Only x86-64 has those instructions here; elsewhere `guarded` is a plain call, and SIGBUS kills.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, Once};

use crate::error::{Error, ErrorKind};

/// An access to device memory that raised SIGBUS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("device memory was taken away: SIGBUS at address {address:#x}")]
pub struct BusError {
    /// The address of the access.
    pub address: usize,
}

impl From<BusError> for Error {
    fn from(error: BusError) -> Error {
        Error::new(ErrorKind::Io, error.to_string())
    }
}

/// Where a thread continues after a SIGBUS, and what the handler tells it.
#[repr(C)]
struct Landing {
    stack: usize,
    instruction: usize,
    address: usize,
}

/// First byte, and one past the last.
type Range = (usize, usize);

/// The watched ranges: a list that is only ever replaced by a longer one, and never freed, because a
/// handler may be reading it.
static WATCHED: AtomicPtr<Vec<Range>> = AtomicPtr::new(std::ptr::null_mut());

thread_local! {
    /// The innermost `guarded` of this thread. Constant and without a destructor, so that it is a plain
    /// load in the handler.
    static CURRENT: Cell<*mut Landing> = const { Cell::new(std::ptr::null_mut()) };
}

/// Watches these ranges of device memory (first byte, bytes) from now on, for the life of the process.
/// It allocates: not for a queue thread.
pub fn watch(ranges: impl IntoIterator<Item = (usize, usize)>) {
    static HANDLER: Once = Once::new();
    static CHANGE: Mutex<()> = Mutex::new(());
    HANDLER.call_once(install);
    let _one_at_a_time = CHANGE.lock();
    let old = WATCHED.load(Ordering::Acquire);
    // SAFETY: the pointer is null or that of a list which is never freed or changed.
    let mut list = unsafe { old.as_ref() }.cloned().unwrap_or_default();
    list.extend(
        ranges
            .into_iter()
            .map(|(first, bytes)| (first, first.saturating_add(bytes))),
    );
    // The old list stays for a handler that reads it.
    WATCHED.store(Box::into_raw(Box::new(list)), Ordering::Release);
}

/// Runs an access to device memory.
///
/// # Errors
/// That the access raised SIGBUS at a watched address; how far it came is not known.
#[inline]
pub fn guarded<R: Copy + Default, F: FnOnce() -> R + Copy>(access: F) -> Result<R, BusError> {
    let mut call = Call {
        access,
        result: R::default(),
    };
    let mut landing = Landing {
        stack: 0,
        instruction: 0,
        address: 0,
    };
    let outer = CURRENT.replace(&raw mut landing);
    // SAFETY: `run` is given what it takes, and `landing` is this frame's, which outlives the call. If
    // the access faults, frames above this one end without being unwound; they own nothing (`Copy`).
    let is_whole = unsafe {
        call_guarded(
            &raw mut landing,
            run::<R, F>,
            (&raw mut call).cast::<c_void>(),
        )
    } == 0;
    CURRENT.set(outer);
    if is_whole {
        Ok(call.result)
    } else {
        // SAFETY: `landing` is ours; volatile because the handler wrote it, which the compiler does not see.
        let address = unsafe { (&raw const landing.address).read_volatile() };
        Err(BusError { address })
    }
}

struct Call<R, F> {
    access: F,
    result: R,
}

/// # Safety
/// `call` is a `Call<R, F>`.
unsafe extern "C" fn run<R: Copy, F: FnOnce() -> R + Copy>(call: *mut c_void) {
    let call = call.cast::<Call<R, F>>();
    // SAFETY: the caller's; nobody else uses it.
    unsafe { (*call).result = ((*call).access)() };
}

/// Calls `run(data)`; 0 when it returned, 1 when the handler ended it.
///
/// # Safety
/// `run` may be called with `data`, and may be left without being unwound; `landing` is writable and
/// stays so.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn call_guarded(
    landing: *mut Landing,
    run: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> u64 {
    // What the System V ABI has a callee save (rbx, rbp, r12 to r15) goes to the stack; seven words and the
    // return address keep it aligned. At 2 the handler comes in: rsp is the saved one, the rest of the
    // registers is whatever the access left, the direction flag perhaps too.
    std::arch::naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "sub rsp, 8",
        "mov [rdi], rsp",
        "lea rax, [rip + 2f]",
        "mov [rdi + 8], rax",
        "mov rdi, rdx",
        "call rsi",
        "xor eax, eax",
        "jmp 3f",
        "2:",
        "cld",
        "mov eax, 1",
        "3:",
        "add rsp, 8",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
    )
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn call_guarded(
    _landing: *mut Landing,
    run: unsafe extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> u64 {
    // SAFETY: the caller's.
    unsafe { run(data) };
    0
}

/// The handler that was there before: that of the standard library, which tells a stack overflow.
static PREVIOUS: AtomicPtr<libc::sigaction> = AtomicPtr::new(std::ptr::null_mut());

fn install() {
    // SAFETY: all-zero bytes are a valid `sigaction`; both calls take pointers to such.
    unsafe {
        let mut previous: libc::sigaction = std::mem::zeroed();
        libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut previous);
        PREVIOUS.store(Box::into_raw(Box::new(previous)), Ordering::Release);
        let mut action: libc::sigaction = std::mem::zeroed();
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) = on_bus_error;
        action.sa_sigaction = handler as usize;
        // On the thread's alternate stack where it has one, as the standard library's handler.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        libc::sigemptyset(&mut action.sa_mask);
        // It fails only for a signal number that is none.
        libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut());
    }
}

extern "C" fn on_bus_error(signal: i32, information: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a siginfo of a SIGBUS.
    let address = unsafe { (*information).si_addr() } as usize;
    let landing = CURRENT.get();
    if !landing.is_null() && is_watched(address) && divert(landing, address, context) {
        return;
    }
    // SAFETY: null, or the one that `install` leaked.
    let previous = unsafe { PREVIOUS.load(Ordering::Acquire).as_ref() };
    // SAFETY: what was installed before is called as it was installed, or becomes the handler again:
    // the access is then repeated when this returns, and ends the process as it would have.
    unsafe {
        match previous {
            Some(old)
                if old.sa_flags & libc::SA_SIGINFO != 0
                    && ![libc::SIG_DFL, libc::SIG_IGN].contains(&old.sa_sigaction) =>
            {
                let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut c_void) =
                    std::mem::transmute(old.sa_sigaction);
                handler(signal, information, context);
            }
            _ => {
                libc::signal(libc::SIGBUS, libc::SIG_DFL);
            }
        }
    }
}

fn is_watched(address: usize) -> bool {
    // SAFETY: null, or a list that is never freed or changed.
    let list = unsafe { WATCHED.load(Ordering::Acquire).as_ref() };
    list.is_some_and(|list| {
        list.iter()
            .any(|&(first, end)| (first..end).contains(&address))
    })
}

/// Makes the interrupted thread continue at its landing.
#[cfg(target_arch = "x86_64")]
fn divert(landing: *mut Landing, address: usize, context: *mut c_void) -> bool {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the landing is that of a `guarded` of this thread which has not returned, and filled, as
    // only `run` below `call_guarded` touches watched memory; the context is the kernel's, of this thread.
    unsafe {
        if (*landing).instruction == 0 {
            return false;
        }
        (*landing).address = address;
        let registers = &mut (*context).uc_mcontext.gregs;
        let to = [
            (libc::REG_RSP, (*landing).stack),
            (libc::REG_RIP, (*landing).instruction),
        ];
        for (register, value) in to {
            if let Some(register) = registers.get_mut(register as usize) {
                *register = value as i64;
            }
        }
    }
    true
}

#[cfg(not(target_arch = "x86_64"))]
fn divert(_landing: *mut Landing, _address: usize, _context: *mut c_void) -> bool {
    false
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use std::os::fd::AsFd;

    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;
    use crate::copy::CopyRoutines;
    use crate::store::shared::SharedMapping;

    const LEN: usize = 64 << 10;

    /// A mapping of which nothing but the first page is still there.
    fn cut() -> SharedMapping {
        let memfd = memfd_create(c"cut", MFdFlags::empty()).unwrap();
        nix::unistd::ftruncate(&memfd, LEN as i64).unwrap();
        let mapping = SharedMapping::new(memfd.as_fd(), LEN).unwrap();
        nix::unistd::ftruncate(&memfd, 4096).unwrap();
        mapping
    }

    #[test]
    fn every_routine_ends_with_an_error_and_works_again() {
        let mapping = cut();
        let base = mapping.as_ptr();
        watch([(base as usize, LEN)]);
        let mut ram = vec![7u8; LEN];
        let to = ram.as_mut_ptr();
        for (isa, routines) in CopyRoutines::all_supported() {
            // SAFETY: all of it is mapped or watched, and nobody else uses it.
            let outcomes = unsafe {
                [
                    guarded(|| routines.load(to, base, LEN)).is_err(),
                    guarded(|| routines.store(base, to, LEN)).is_err(),
                    guarded(|| routines.fill_zero(base, LEN)).is_err(),
                    guarded(|| routines.is_zero(base, LEN)).is_err(),
                ]
            };
            assert_eq!(outcomes, [true; 4], "{isa}");
            // SAFETY: as above.
            let error = guarded(|| unsafe { routines.load(to, base, LEN) }).unwrap_err();
            let at = error.address - base as usize;
            assert!((4096..8192).contains(&at), "{isa}: {at}");
            // SAFETY: the first page is there.
            guarded(|| unsafe { routines.store(base, to, 4096) }).unwrap();
            // SAFETY: as above.
            assert_eq!(guarded(|| unsafe { routines.is_zero(base, 64) }), Ok(true));
        }
    }

    #[test]
    fn every_thread_has_its_own_landing() {
        let mapping = cut();
        let base = mapping.as_ptr() as usize;
        watch([(base, LEN)]);
        let routines = CopyRoutines::best();
        std::thread::scope(|scope| {
            for thread in 0..4usize {
                scope.spawn(move || {
                    let mut page = [0u8; 4096];
                    let to = page.as_mut_ptr();
                    for round in 0..2000usize {
                        let offset = (thread + round) % 2 * 8192;
                        let at = (base + offset) as *const u8;
                        // SAFETY: mapped or watched.
                        let outcome = guarded(|| unsafe { routines.load(to, at, 4096) });
                        assert_eq!(outcome.is_err(), offset != 0);
                    }
                });
            }
        });
    }

    #[test]
    fn memory_that_is_not_watched_still_kills() {
        let mapping = cut();
        watch([]);
        // SAFETY: the child touches only what is there, and the page that kills it.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Child => {
                // Another test's range may have been where this one is now.
                WATCHED.store(std::ptr::null_mut(), Ordering::Release);
                let (at, routines) = (mapping.as_ptr(), CopyRoutines::best());
                let mut page = [0u8; 4096];
                let to = page.as_mut_ptr();
                // SAFETY: mapped, and gone: that is what is tried.
                let _ = guarded(|| unsafe { routines.load(to, at.add(8192), 4096) });
                // SAFETY: _exit only ends the process.
                unsafe { libc::_exit(0) }
            }
            nix::unistd::ForkResult::Parent { child } => {
                let status = nix::sys::wait::waitpid(child, None).unwrap();
                let killed = nix::sys::wait::WaitStatus::Signaled(
                    child,
                    nix::sys::signal::Signal::SIGBUS,
                    false,
                );
                let dumped = nix::sys::wait::WaitStatus::Signaled(
                    child,
                    nix::sys::signal::Signal::SIGBUS,
                    true,
                );
                assert!(status == killed || status == dumped, "{status:?}");
            }
        }
    }
}
