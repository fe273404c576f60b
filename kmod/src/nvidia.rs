// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Memory that the NVIDIA driver pinned for us (its `nv-p2p.h`).
//!
//! The driver is looked up by symbol when a region is made, and held until it ends: the module loads
//! without it and in any order. Symbols that are not GPL exports are not found, so the driver must be
//! the open one, 550.40.07 or later.
//!
//! Two ways to pin. Persistent: the driver holds the memory until it is put, whatever becomes of its
//! process. Otherwise it may take the memory back at any moment, by a callback, even before the call
//! that pins has returned: `Pin::state` orders the two. The callback waits for that lock, so it is
//! never held across a call into the driver. From the callback on the page table belongs to the
//! driver again: addresses are copied while the lock is held, and nothing is put.

use crate::{
    region::{Region, Source, MAX_SIZE},
    registry, uapi,
    window::Extent,
};
use core::mem::transmute;
use kernel::{
    bindings,
    error::to_result,
    ffi::c_void,
    new_mutex,
    page::PAGE_SIZE,
    prelude::*,
    str::CStr,
    sync::{
        atomic::{AtomicFlag, Relaxed},
        Arc, Mutex,
    },
    types::ForeignOwnable,
};

/// Addresses and lengths are multiples of it, as the driver demands.
const GPU_PAGE: u64 = 64 << 10;
/// More runs than this are refused: each has a mapping and a memory type reservation of its own.
const MAX_EXTENTS: usize = 1 << 16;
/// In a table of version 2: the CPU may cache the pages. Only on machines whose CPU and GPU are one.
const TABLE_CACHEABLE: u32 = 1 << 0;

/// `struct nvidia_p2p_page`.
#[repr(C)]
struct Page {
    physical_address: u64,
    registers: [u32; 6],
}

/// `struct nvidia_p2p_page_table`, versions 1.x and 2.x.
#[repr(C)]
struct PageTable {
    version: u32,
    page_size: u32,
    pages: *mut *mut Page,
    entries: u32,
    gpu_uuid: *mut u8,
    /// From version 2.0 on.
    flags: u32,
}

type Callback = unsafe extern "C" fn(*mut c_void);
type GetPages = unsafe extern "C" fn(
    token: u64,
    va_space: u32,
    address: u64,
    length: u64,
    table: *mut *mut PageTable,
    callback: Callback,
    data: *mut c_void,
) -> c_int;
type PutPages =
    unsafe extern "C" fn(token: u64, va_space: u32, address: u64, table: *mut PageTable) -> c_int;
type GetPagesPersistent = unsafe extern "C" fn(
    address: u64,
    length: u64,
    table: *mut *mut PageTable,
    flags: u32,
) -> c_int;
type PutPagesPersistent =
    unsafe extern "C" fn(address: u64, table: *mut PageTable, flags: u32) -> c_int;

/// A function of another module, held while this lives.
///
/// # Invariants
///
/// `address` is what `__symbol_get(name)` returned, not null.
struct Symbol {
    name: &'static CStr,
    address: *mut c_void,
}

// SAFETY: A function's address is the same on every CPU, and nothing is written.
unsafe impl Send for Symbol {}
// SAFETY: As above.
unsafe impl Sync for Symbol {}

impl Symbol {
    fn find(name: &'static CStr) -> Option<Self> {
        // SAFETY: The name ends with NUL.
        let address = unsafe { bindings::__symbol_get(name.as_char_ptr()) };
        // A `Symbol` that is made is dropped, and puts what was not got: none is made of null.
        // INVARIANT: It was returned just now and is not null.
        (!address.is_null()).then(|| Symbol { name, address })
    }
}

impl Drop for Symbol {
    fn drop(&mut self) {
        // SAFETY: By the invariant, a reference is held.
        unsafe { bindings::__symbol_put(self.name.as_char_ptr()) };
    }
}

/// What a pin is doing.
enum State {
    /// The driver was asked, or the table is being read.
    Pinning,
    Pinned {
        table: *mut PageTable,
        region: Option<Arc<Region>>,
    },
    /// The driver is being told to let go.
    Releasing,
    /// Nothing is pinned.
    Gone,
}

// SAFETY: The table is only read while pinned, by whoever holds the lock.
unsafe impl Send for State {}

/// A range of GPU memory that is pinned, or was.
#[pin_data]
pub(crate) struct Pin {
    address: u64,
    length: u64,
    persistent: bool,
    get: Symbol,
    put: Symbol,
    #[pin]
    state: Mutex<State>,
}

impl Pin {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn is_persistent(&self) -> bool {
        self.persistent
    }

    fn new(create: &uapi::CreateNvidia) -> Result<Arc<Self>> {
        let persistent = create.flags & uapi::CREATE_PERSISTENT != 0;
        let (get, put) = if persistent {
            (
                c"nvidia_p2p_get_pages_persistent",
                c"nvidia_p2p_put_pages_persistent",
            )
        } else {
            (c"nvidia_p2p_get_pages", c"nvidia_p2p_put_pages")
        };
        let (Some(get), Some(put)) = (Symbol::find(get), Symbol::find(put)) else {
            static SAID: AtomicFlag = AtomicFlag::new(false);
            if !SAID.xchg(true, Relaxed) {
                pr_warn!(
                    "no nvidia driver that can be used is loaded: it must be the open kernel \
                     module, 550.40.07 or later\n"
                );
            }
            return Err(EOPNOTSUPP);
        };
        Arc::pin_init(
            try_pin_init!(Pin {
                address: create.address,
                length: create.length,
                persistent,
                get,
                put,
                state <- new_mutex!(State::Pinning, "nvidia::Pin"),
            }),
            GFP_KERNEL,
        )
    }

    /// Asks the driver. With a callback, the driver holds a reference to the pin from now on, which
    /// goes with the callback or with [`Pin::put_table`].
    fn get_table(this: &Arc<Self>) -> Result<*mut PageTable> {
        let mut table = core::ptr::null_mut();
        if this.persistent {
            // SAFETY: The symbol has this type (nv-p2p.h).
            let get = unsafe { transmute::<*mut c_void, GetPagesPersistent>(this.get.address) };
            // SAFETY: The range is checked by the driver; `table` is ours.
            to_result(unsafe { get(this.address, this.length, &mut table, 0) })?;
            return Ok(table);
        }
        // SAFETY: The symbol has this type (nv-p2p.h).
        let get = unsafe { transmute::<*mut c_void, GetPages>(this.get.address) };
        let data = this.clone().into_foreign();
        // SAFETY: As above; `data` is a reference for the callback.
        let rc = unsafe { get(0, 0, this.address, this.length, &mut table, freed, data) };
        if rc != 0 {
            this.take_back(data);
        }
        to_result(rc)?;
        Ok(table)
    }

    /// Drops the callback's reference, unless the callback has come and taken it.
    fn take_back(&self, data: *mut c_void) {
        if !matches!(*self.state.lock(), State::Gone) {
            // SAFETY: `data` is what `into_foreign` gave; the driver promises that no callback comes
            // after a get that failed or a put that returned.
            drop(unsafe { <Arc<Self> as ForeignOwnable>::from_foreign(data) });
        }
    }

    fn put_table(this: &Arc<Self>, table: *mut PageTable) {
        let rc = if this.persistent {
            // SAFETY: The symbol has this type (nv-p2p.h).
            let put = unsafe { transmute::<*mut c_void, PutPagesPersistent>(this.put.address) };
            // SAFETY: The table is the one that was got, and nobody uses its pages any more.
            unsafe { put(this.address, table, 0) }
        } else {
            // SAFETY: The symbol has this type (nv-p2p.h).
            let put = unsafe { transmute::<*mut c_void, PutPages>(this.put.address) };
            // SAFETY: As above. If the callback comes at the same time the driver orders the two.
            let rc = unsafe { put(0, 0, this.address, table) };
            // All references to one object have the same foreign pointer.
            let data = this.clone().into_foreign();
            // SAFETY: It takes back what the line above gave.
            drop(unsafe { <Arc<Self> as ForeignOwnable>::from_foreign(data) });
            this.take_back(data);
            rc
        };
        if rc != 0 {
            pr_warn!("the nvidia driver did not let go of pages: {rc}\n");
        }
    }

    /// Lets go of the memory. The region, if there is one, was taken away from everybody.
    pub(crate) fn release(self: &Arc<Self>) {
        let (table, region) = {
            let mut state = self.state.lock();
            match core::mem::replace(&mut *state, State::Releasing) {
                State::Pinned { table, region } => (table, region),
                other => {
                    *state = other;
                    return;
                }
            }
        };
        drop(region);
        Self::put_table(self, table);
        *self.state.lock() = State::Gone;
    }

    /// Makes a region of a table that the driver has filled, if it is still good.
    fn build(this: &Arc<Self>, table: *mut PageTable) -> Result<Arc<Region>> {
        let built = {
            // The callback waits for this lock: until it is dropped, table and pages are good.
            let mut state = this.state.lock();
            if matches!(*state, State::Gone) {
                return Err(ENODEV);
            }
            // SAFETY: The driver has filled the table and has not taken it back.
            let built = unsafe { extents(table, this.length) }.and_then(|extents| {
                let source = Source::Nvidia(this.clone());
                Region::new(registry::new_id()?, source, extents, None)
            });
            *state = State::Pinned {
                table,
                region: built.as_ref().ok().cloned(),
            };
            built
        };
        built.inspect_err(|_| this.release())
    }
}

/// The driver takes the memory back: nobody may use it when this returns.
///
/// # Safety
///
/// Called by the driver at most once, with the reference that it was given.
unsafe extern "C" fn freed(data: *mut c_void) {
    // SAFETY: By the caller's promise.
    let pin = unsafe { <Arc<Pin> as ForeignOwnable>::from_foreign(data) };
    let state = core::mem::replace(&mut *pin.state.lock(), State::Gone);
    if let State::Pinned {
        region: Some(region),
        ..
    } = state
    {
        pr_info!(
            "region {}: the nvidia driver takes the memory back\n",
            region.id
        );
        region.revoke();
    }
}

/// The physical runs of a page table.
///
/// # Safety
///
/// `table` was filled by the driver, which does not take it back meanwhile.
unsafe fn extents(table: *const PageTable, length: u64) -> Result<KVVec<Extent>> {
    // SAFETY: By the caller's promise. Fields of later versions are not touched before the version is
    // known.
    let (version, page_size, pages, entries) = unsafe {
        (
            (*table).version,
            (*table).page_size,
            (*table).pages,
            (*table).entries,
        )
    };
    let major = version >> 16;
    if major != 1 && major != 2 {
        pr_warn!("the nvidia driver's page tables have version {version:#x}, not 1 or 2\n");
        return Err(EPROTO);
    }
    // SAFETY: Version 2 has the field.
    if major == 2 && unsafe { (*table).flags } & TABLE_CACHEABLE != 0 {
        return Err(EOPNOTSUPP);
    }
    let page: u64 = match page_size {
        0 => 4 << 10,
        1 => 64 << 10,
        2 => 128 << 10,
        _ => return Err(EPROTO),
    };
    if u64::from(entries) * page != length || pages.is_null() {
        return Err(EPROTO);
    }
    let mut out: KVVec<Extent> = KVVec::new();
    for index in 0..entries as usize {
        // SAFETY: The table has `entries` pointers to pages.
        let phys = unsafe { (**pages.add(index)).physical_address };
        if phys % PAGE_SIZE as u64 != 0 || phys.checked_add(page).is_none() {
            return Err(EPROTO);
        }
        if let Some(last) = out.last_mut().filter(|last| last.phys + last.len == phys) {
            last.len += page;
            continue;
        }
        if out.len() == MAX_EXTENTS {
            return Err(E2BIG);
        }
        let start = index as u64 * page;
        out.push(
            Extent {
                start,
                phys,
                len: page,
            },
            GFP_KERNEL,
        )?;
    }
    for extent in &out {
        // SAFETY: The function has no preconditions.
        let found = unsafe {
            bindings::region_intersects(
                extent.phys,
                extent.len as usize,
                bindings::IORESOURCE_SYSTEM_RAM as usize,
                0, // IORES_DESC_NONE: of any description.
            )
        };
        if found != bindings::REGION_DISJOINT as c_int {
            return Err(EPROTO);
        }
    }
    Ok(out)
}

/// Makes a region of a range of GPU memory of this process; its id.
pub(crate) fn create(create: &uapi::CreateNvidia, maker: u64) -> Result<u32> {
    let sticky = create.flags & uapi::CREATE_STICKY != 0;
    if sticky && create.flags & uapi::CREATE_PERSISTENT == 0 {
        return Err(EINVAL);
    }
    if create.length == 0
        || create.length % GPU_PAGE != 0
        || create.address % GPU_PAGE != 0
        || create.address.checked_add(create.length).is_none()
    {
        return Err(EINVAL);
    }
    if create.length > MAX_SIZE {
        return Err(EFBIG);
    }
    let pin = Pin::new(create)?;
    let table = Pin::get_table(&pin)?;
    let region = Pin::build(&pin, table)?;
    registry::insert(&region, maker, sticky).inspect_err(|_| Region::release(&region))?;
    // The memory may have been taken back since.
    registry::sweep();
    Ok(region.id)
}
