// SPDX-License-Identifier: GPL-2.0 OR MIT

//! One region: its memory, and how it is taken away.
//!
//! Taking away ([`Region::revoke`]) may happen at any moment: the PCI function is unbound or
//! unplugged, the NVIDIA driver calls back, the region is destroyed. When it returns, no CPU has the
//! memory mapped, none will insert a page of it, and no read or write is under way in it:
//!
//! 1. `dead` becomes true. Page faults insert pages only while they hold a lock under which it was
//!    false.
//! 2. All user mappings are zapped; what a fault inserted before step 1 is among them.
//! 3. The window is revoked: an RCU grace period waits for copies, which never sleep inside.
//! 4. The claim on the range goes back.

use crate::{
    nvidia, pci, shim, uapi,
    window::{self, Extent, Speed, Window},
};
use core::ptr::NonNull;
use kernel::{
    bindings,
    error::from_err_ptr,
    new_mutex,
    prelude::*,
    revocable::{Revocable, RevocableGuard},
    sync::{
        atomic::{Atomic, AtomicFlag, Relaxed},
        Arc, Mutex,
    },
};

/// A region's id stands above these bits of an mmap offset: its bytes lie below.
pub(crate) const SPACE_SHIFT: u32 = 40;
/// The largest region, in bytes.
pub(crate) const MAX_SIZE: u64 = 1 << SPACE_SHIFT;

/// The inode whose address space all openers share, as a number: 0 when there is none.
static SPACE: Atomic<usize> = Atomic::new(0);

/// Owns the shared address space for as long as the module is loaded.
pub(crate) struct SpaceOwner(NonNull<bindings::inode>);

// SAFETY: The inode is only handed back to the C side, which may happen on any thread.
unsafe impl Send for SpaceOwner {}
// SAFETY: As above.
unsafe impl Sync for SpaceOwner {}

impl SpaceOwner {
    pub(crate) fn open() -> Result<Self> {
        // SAFETY: Called once, by the module's initialiser.
        let inode = from_err_ptr(unsafe { shim::uvram_space_open() })?;
        SPACE.store(inode as usize, Relaxed);
        Ok(SpaceOwner(NonNull::new(inode).ok_or(ENOMEM)?))
    }
}

impl Drop for SpaceOwner {
    fn drop(&mut self) {
        SPACE.store(0, Relaxed);
        // SAFETY: It is the inode that was opened, and no file refers to it: open files hold the
        // module.
        unsafe { shim::uvram_space_close(self.0.as_ptr()) };
    }
}

/// The inode of the shared address space. It is there whenever a file can be opened.
pub(crate) fn space() -> *mut bindings::inode {
    SPACE.load(Relaxed) as *mut bindings::inode
}

/// A claim on a range of physical addresses in `/proc/iomem`.
pub(crate) struct Claim {
    start: u64,
    len: u64,
}

impl Claim {
    /// Claims a range inside a PCI BAR; [`EBUSY`] if somebody has a part of it.
    pub(crate) fn new(start: u64, len: u64) -> Result<Self> {
        // SAFETY: The function has no preconditions.
        kernel::error::to_result(unsafe { shim::uvram_claim(start, len) })?;
        Ok(Claim { start, len })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // SAFETY: The range was claimed by `new`.
        unsafe { shim::uvram_unclaim(self.start, self.len) };
    }
}

/// Where a region's memory comes from.
pub(crate) enum Source {
    /// A part of a BAR, from byte `start` on.
    Bar {
        function: Arc<pci::Function>,
        bar: u8,
        start: u64,
    },
    /// Pages that the NVIDIA driver pinned.
    Nvidia(Arc<nvidia::Pin>),
}

/// One region.
#[pin_data]
pub(crate) struct Region {
    pub(crate) id: u32,
    /// Bytes.
    pub(crate) size: u64,
    /// In the order of their starts, without gaps.
    pub(crate) extents: KVVec<Extent>,
    pub(crate) source: Source,
    /// Thread group of the maker, in the initial namespace.
    maker: u32,
    mode: u32,
    speed: Speed,
    #[pin]
    window: Revocable<Window>,
    /// Whether the memory is gone, or going. Set under `inserting`, read without it too: whoever asks
    /// must not wait for a page fault, which may wait for a disk that this very region serves.
    dead: AtomicFlag,
    /// Held while a page fault inserts pages.
    #[pin]
    inserting: Mutex<()>,
    /// Held while the memory is taken away, so that whoever wants the same waits for it.
    #[pin]
    teardown: Mutex<Option<Claim>>,
}

impl Region {
    /// Maps `extents` and makes a region of them. Nobody else may use the memory meanwhile: its first
    /// page is read, and written back as it was, to measure it.
    pub(crate) fn new(
        id: u32,
        source: Source,
        extents: KVVec<Extent>,
        claim: Option<Claim>,
    ) -> Result<Arc<Self>> {
        let (Some(first), Some(last)) = (extents.first(), extents.last()) else {
            return Err(EINVAL);
        };
        let size = last.start + last.len;
        if size > MAX_SIZE {
            return Err(EFBIG);
        }
        let speed = window::measure(first)?;
        let window = Window::map(&extents)?;
        let mode = window.mode();
        if mode != uapi::MODE_WC {
            pr_warn!(
                "region {id} is not write-combined (memory type {mode}): somebody else has reserved \
                 the range, or the CPU's memory types are off; writes will be slow\n"
            );
        }
        pr_info!(
            "region {id}: {size} bytes in {} runs; MB/s of 4 KiB: {} written uncached, {} written, \
             {} read\n",
            extents.len(),
            speed.uncached_write,
            speed.write,
            speed.read
        );
        let maker = current!().tgid() as u32;
        Arc::pin_init(
            try_pin_init!(Region {
                id,
                size,
                extents,
                source,
                maker,
                mode,
                speed,
                window <- Revocable::new(window),
                dead: AtomicFlag::new(false),
                inserting <- new_mutex!((), "Region::inserting"),
                teardown <- new_mutex!(claim, "Region::teardown"),
            }),
            GFP_KERNEL,
        )
    }

    /// The offset for mmap of the region's first byte.
    pub(crate) fn mmap_offset(&self) -> u64 {
        u64::from(self.id) << SPACE_SHIFT
    }

    /// The kernel's mapping; whoever has the guard must not sleep. `None` once the memory is gone.
    pub(crate) fn window(&self) -> Option<RevocableGuard<'_, Window>> {
        self.window.try_access()
    }

    /// Runs `insert`, which inserts pages of the region into a page table, unless the memory is gone.
    /// The memory is not taken away meanwhile.
    pub(crate) fn while_alive<T>(&self, insert: impl FnOnce(&Self) -> T) -> Option<T> {
        let _inserting = self.inserting.lock();
        (!self.is_dead()).then(|| insert(self))
    }

    /// Whether the memory is gone.
    pub(crate) fn is_dead(&self) -> bool {
        self.dead.load(Relaxed)
    }

    /// Takes the memory away from everybody. Returns when that is done, whoever does it.
    pub(crate) fn revoke(&self) {
        let mut claim = self.teardown.lock();
        {
            let _inserting = self.inserting.lock();
            if self.dead.xchg(true, Relaxed) {
                return;
            }
        }
        // SAFETY: The inode and its address space live until the module's last file is closed and
        // longer; the range is this region's alone.
        unsafe {
            bindings::unmap_mapping_range(
                (*space()).i_mapping,
                self.mmap_offset() as i64,
                MAX_SIZE as i64,
                1,
            )
        };
        self.window.revoke();
        *claim = None;
    }

    /// Takes the memory away and gives it back to where it came from. No file is attached.
    pub(crate) fn release(this: &Arc<Self>) {
        this.revoke();
        match &this.source {
            Source::Bar { function, .. } => function.forget(this),
            Source::Nvidia(pin) => pin.release(),
        }
    }

    /// Describes the region, except for what the registry knows.
    pub(crate) fn describe(&self) -> uapi::Region {
        let mut out = uapi::Region {
            id: self.id,
            flags: if self.is_dead() { uapi::REGION_DEAD } else { 0 },
            size: self.size,
            mmap_offset: self.mmap_offset(),
            extents: self.extents.len() as u32,
            mode: self.mode,
            uncached_write_mbps: self.speed.uncached_write,
            write_mbps: self.speed.write,
            read_mbps: self.speed.read,
            maker: self.maker,
            ..Default::default()
        };
        match &self.source {
            Source::Bar {
                function,
                bar,
                start,
            } => {
                out.kind = uapi::KIND_BAR;
                (out.domain, out.bus, out.devfn) = function.address();
                out.bar = *bar;
                out.start = *start;
            }
            Source::Nvidia(pin) => {
                out.kind = uapi::KIND_NVIDIA;
                out.start = pin.address();
                if pin.is_persistent() {
                    out.flags |= uapi::REGION_PERSISTENT;
                }
            }
        }
        out
    }
}
