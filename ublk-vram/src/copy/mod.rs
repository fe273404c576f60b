//! Moving bytes between RAM and a write-combined mapping of GPU memory (a PCI BAR).
//!
//! Why not `memcpy`: write-combined (WC) memory is not cached. Plain loads from it cross the bus
//! one after the other, with nothing prefetched and nothing overlapped: 66 us for 4 KiB on an H200,
//! where streaming loads of whole 64-byte lines take 4 us. Stores are posted and collect in the
//! CPU's write-combining buffers: whole lines, written by streaming stores, leave as whole bus
//! packets, and nothing is ever read to fill a line.
//!
//! What the module promises:
//! - The WC side is never read by a store, never touched outside the 64-byte lines that hold the
//!   range, and never read in pieces smaller than the widest streaming load of the instruction set.
//! - Any length (0 too) and any alignment of both sides is right; 4 KiB pages are fast.
//! - No routine allocates, panics, takes a lock or makes a system call.
//! - The instruction set is chosen once ([`CopyRoutines::best`]); a call is one indirect jump.
//!
//! # Ordering
//! Streaming stores and WC stores are weakly ordered: [`CopyRoutines::store`] and
//! [`CopyRoutines::fill_zero`] return while bytes still sit in this CPU's buffers. The queue thread
//! calls [`CopyRoutines::store_fence`] once for all writes of a batch, before it completes any of
//! them. Only then may another thread, another path (a copy engine) or another process look.
//!
//! Streaming loads are weakly ordered too, and may run ahead of the loads before them: the load by
//! which a queue thread learned of a request does not hold them back, and a line fetched earlier
//! may still lie in a streaming load buffer, which nobody snoops. The Intel SDM (MOVNTDQA; volume
//! 1, "Streaming Load Hint Instruction") therefore asks for a fence, MFENCE, wherever reads must be
//! ordered after other agents' writes. Every read of a block device must: it has to see each write
//! that completed before it arrived, whichever thread or engine did it. So [`CopyRoutines::load`]
//! and [`CopyRoutines::is_zero`] begin with that fence, one for each call, and no caller can forget
//! it. Nothing is needed after them: the bytes are in RAM by ordinary stores, which x86 makes
//! visible in order and never before the loads they depend on.
//!
//! Streaming loads are speculative: the mapping must be memory (VRAM is), not device registers.

mod frame;
pub mod planner;
mod portable;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

use frame::Lines;

/// Bytes in a line: the unit of a write-combining buffer, a streaming load buffer and a transfer on
/// the bus. A mapping begins and ends at a multiple of it.
pub const LINE: usize = 64;

/// An instruction set that has copy routines, the fastest on WC memory first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// A line in one register (AVX-512 F): one bus read for each load.
    Avx512,
    /// Half a line in a register.
    Avx2,
    /// A quarter of a line in a register: the oldest streaming load there is.
    Sse41,
    /// Eight bytes at a time, by plain loads and stores: right everywhere, very slow to read WC
    /// memory.
    Portable,
}

impl Isa {
    /// Every instruction set, the best first.
    pub const ALL: [Isa; 4] = [Isa::Avx512, Isa::Avx2, Isa::Sse41, Isa::Portable];

    /// Whether this CPU and this kernel can run it.
    pub fn is_supported(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => is_x86_feature_detected!("avx512f"),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Isa::Sse41 => is_x86_feature_detected!("sse4.1"),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 | Isa::Sse41 => false,
            Isa::Portable => true,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Sse41 => "sse41",
            Isa::Portable => "portable",
        })
    }
}

/// The copy routines of one instruction set, chosen at start: plain function pointers, so that the
/// queue thread decides nothing for each request.
#[derive(Debug, Clone, Copy)]
pub struct CopyRoutines {
    // INVARIANT: the CPU supports `isa`, and every pointer is of that instruction set.
    isa: Isa,
    store: unsafe fn(*mut u8, *const u8, usize),
    load: unsafe fn(*mut u8, *const u8, usize),
    fill_zero: unsafe fn(*mut u8, usize),
    is_zero: unsafe fn(*const u8, usize) -> bool,
    store_fence: fn(),
}

impl CopyRoutines {
    /// The routines of the widest instruction set that this CPU has.
    pub fn best() -> CopyRoutines {
        Isa::ALL
            .into_iter()
            .find_map(CopyRoutines::for_isa)
            .unwrap_or_else(|| CopyRoutines::of::<portable::Portable>(Isa::Portable))
    }

    /// The routines of `isa`, or `None` if this CPU cannot run them.
    pub fn for_isa(isa: Isa) -> Option<CopyRoutines> {
        if !isa.is_supported() {
            return None;
        }
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Some(CopyRoutines::of::<x86::Avx512>(isa)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Some(CopyRoutines::of::<x86::Avx2>(isa)),
            #[cfg(target_arch = "x86_64")]
            Isa::Sse41 => Some(CopyRoutines::of::<x86::Sse41>(isa)),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 | Isa::Sse41 => None,
            Isa::Portable => Some(CopyRoutines::of::<portable::Portable>(isa)),
        }
    }

    /// The routines of every instruction set that this CPU has, the widest first: for tests, and
    /// for a calibration that prefers measuring to guessing.
    pub fn all_supported() -> Vec<(Isa, CopyRoutines)> {
        Isa::ALL
            .into_iter()
            .filter_map(|isa| Some((isa, CopyRoutines::for_isa(isa)?)))
            .collect()
    }

    fn of<L: Lines>(isa: Isa) -> CopyRoutines {
        CopyRoutines {
            isa,
            store: frame::store::<L>,
            load: frame::load::<L>,
            fill_zero: frame::fill_zero::<L>,
            is_zero: frame::is_zero::<L>,
            store_fence: L::store_fence,
        }
    }

    /// The instruction set these routines use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Writes `len` bytes of RAM at `src` to WC memory at `dst`.
    ///
    /// Whole lines go by streaming stores, the edges of the range by ordinary stores of 1 to 8
    /// bytes, each naturally aligned; the WC side is never read. The bytes may still be in this
    /// CPU's buffers on return: see [`CopyRoutines::store_fence`].
    ///
    /// # Safety
    /// - `src` is valid for reads of `len` bytes and nobody changes them during the call.
    /// - `dst` is valid for writes of `len` bytes, mapped memory without side effects. Others (the
    ///   GPU, other threads through these routines) may access it meanwhile; which bytes win is
    ///   then open.
    /// - The ranges do not overlap. With `len` 0 the pointers are not looked at.
    #[inline]
    pub unsafe fn store(&self, dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the caller vouches for the ranges, the struct's invariant for the CPU.
        unsafe { (self.store)(dst, src, len) }
    }

    /// Reads `len` bytes of WC memory at `src` into RAM at `dst`, after a fence: what was written
    /// and fenced by anybody before the call is seen.
    ///
    /// Only whole lines are loaded, by streaming loads with at least eight in flight, those at the
    /// edges of the range into a bounce buffer on the stack.
    ///
    /// # Safety
    /// - `src` is valid for reads from `src` rounded down to a multiple of [`LINE`] up to
    ///   `src + len` rounded up to one, mapped memory without side effects on reads. As a mapping
    ///   is made of pages, a range inside a mapping never leaves it by this rounding. Others may
    ///   access it meanwhile; bytes that they write during the call are read old, new or mixed.
    /// - `dst` is valid for writes of `len` bytes and nobody else accesses them during the call.
    /// - The two (with `src` rounded) do not overlap. With `len` 0 the pointers are not looked at.
    #[inline]
    pub unsafe fn load(&self, dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: the caller vouches for the ranges, the struct's invariant for the CPU.
        unsafe { (self.load)(dst, src, len) }
    }

    /// Writes `len` zero bytes to WC memory at `dst`, as [`CopyRoutines::store`] does.
    ///
    /// # Safety
    /// As for `dst` of [`CopyRoutines::store`].
    #[inline]
    pub unsafe fn fill_zero(&self, dst: *mut u8, len: usize) {
        // SAFETY: the caller vouches for the range, the struct's invariant for the CPU.
        unsafe { (self.fill_zero)(dst, len) }
    }

    /// Whether all `len` bytes of WC memory at `src` are zero (true for none), read as
    /// [`CopyRoutines::load`] does and given up soon after the first that is not.
    ///
    /// # Safety
    /// As for `src` of [`CopyRoutines::load`].
    #[inline]
    #[must_use]
    pub unsafe fn is_zero(&self, src: *const u8, len: usize) -> bool {
        // SAFETY: the caller vouches for the range, the struct's invariant for the CPU.
        unsafe { (self.is_zero)(src, len) }
    }

    /// Orders every store this thread made before it, streaming or not, before every store after it
    /// (`sfence`), and empties this CPU's write-combining buffers towards the bus.
    ///
    /// To be called after the stores of a write and before its completion is published; once for
    /// many writes is enough.
    #[inline]
    pub fn store_fence(&self) {
        (self.store_fence)();
    }
}
