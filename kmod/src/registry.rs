// SPDX-License-Identifier: GPL-2.0 OR MIT

//! All regions, who is attached to which, and when one ends.
//!
//! A region ends when no file is attached to it and (its maker's file is closed and it is not sticky,
//! or its memory is gone), or by DESTROY. What has ended is taken out of the table under its lock and
//! released outside of it: releasing calls other drivers.

use crate::{region::Region, uapi};
use kernel::{bindings, module::this_module, prelude::*, sync::Arc};

/// Ids are below: they stand in the upper bits of a file offset, which is a signed number.
const MAX_ID: u32 = 1 << 23;
/// More regions than anybody needs. The table has room for all from the start: nothing is allocated
/// under its lock.
const MAX_REGIONS: usize = 1024;

kernel::sync::global_lock! {
    // SAFETY: Initialised by the module's initialiser before anything is registered.
    pub(crate) unsafe(uninit) static REGISTRY: Mutex<Registry> = Registry::new();
}

/// Keeps the module loaded.
struct ModuleRef;

impl ModuleRef {
    fn new() -> Self {
        // SAFETY: The caller runs in an ioctl of an open file, which holds the module.
        unsafe { bindings::__module_get(this_module::<crate::LocalModule>().as_ptr()) };
        ModuleRef
    }
}

impl Drop for ModuleRef {
    fn drop(&mut self) {
        // SAFETY: `new` took the reference. The code that runs here is in a file operation, whose
        // file holds the module, or in the removal of a PCI function, which unloading waits for.
        unsafe { bindings::module_put(this_module::<crate::LocalModule>().as_ptr()) };
    }
}

/// One region and its users.
struct Entry {
    region: Arc<Region>,
    attached: u32,
    exclusive: bool,
    /// The file that made it, while that is open.
    maker: Option<u64>,
    /// The region is sticky.
    sticky: Option<ModuleRef>,
}

impl Entry {
    fn has_ended(&self) -> bool {
        let wanted = self.maker.is_some() || self.sticky.is_some();
        self.attached == 0 && (!wanted || self.region.is_dead())
    }

    fn describe(&self) -> uapi::Region {
        let mut out = self.region.describe();
        out.attached = self.attached;
        if self.exclusive {
            out.flags |= uapi::REGION_EXCLUSIVE;
        }
        if self.sticky.is_some() {
            out.flags |= uapi::REGION_STICKY;
        }
        out
    }
}

/// The table of regions.
pub(crate) struct Registry {
    entries: KVVec<Entry>,
    last_id: u32,
    last_file: u64,
}

impl Registry {
    const fn new() -> Self {
        Registry {
            entries: KVVec::new(),
            last_id: 0,
            last_file: 0,
        }
    }

    /// Makes room for all regions there may be.
    fn reserve(&mut self) -> Result {
        Ok(self.entries.reserve(MAX_REGIONS, GFP_KERNEL)?)
    }

    fn find(&mut self, id: u32) -> Result<(usize, &mut Entry)> {
        let found = self.entries.iter_mut().enumerate();
        let mut found = found.filter(|(_, entry)| entry.region.id == id);
        found.next().ok_or(ENOENT)
    }
}

/// Owns the table's memory: a static is never dropped.
pub(crate) struct Owner;

impl Owner {
    /// Makes the table. Called once, by the module's initialiser, before anything else here.
    pub(crate) fn new() -> Result<Self> {
        REGISTRY.lock().reserve()?;
        Ok(Owner)
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Empty: every region has a file or a sticky reference, and either keeps the module loaded.
        let table = core::mem::replace(&mut *REGISTRY.lock(), Registry::new());
        drop(table);
    }
}

/// A number for a file that was just opened.
pub(crate) fn new_file() -> u64 {
    let mut registry = REGISTRY.lock();
    registry.last_file += 1;
    registry.last_file
}

/// An id that no region has. Ids are not used again before all others were: whoever kept an old one
/// gets an error, not somebody else's memory.
pub(crate) fn new_id() -> Result<u32> {
    let mut registry = REGISTRY.lock();
    if registry.entries.len() >= MAX_REGIONS {
        return Err(ENOSPC);
    }
    loop {
        let id = registry.last_id % (MAX_ID - 1) + 1;
        registry.last_id = id;
        if registry.find(id).is_err() {
            return Ok(id);
        }
    }
}

/// Enters a region that the file `maker` made.
pub(crate) fn insert(region: &Arc<Region>, maker: u64, sticky: bool) -> Result {
    let mut registry = REGISTRY.lock();
    let entry = Entry {
        region: region.clone(),
        attached: 0,
        exclusive: false,
        maker: Some(maker),
        sticky: sticky.then(ModuleRef::new),
    };
    registry
        .entries
        .push_within_capacity(entry)
        .map_err(|_| ENOSPC)
}

/// Attaches a file to a region.
pub(crate) fn attach(id: u32, exclusive: bool) -> Result<Arc<Region>> {
    let mut registry = REGISTRY.lock();
    let (_, entry) = registry.find(id)?;
    if entry.region.is_dead() {
        return Err(ENODEV);
    }
    if entry.exclusive || (exclusive && entry.attached > 0) {
        return Err(EBUSY);
    }
    entry.attached = entry.attached.checked_add(1).ok_or(EBUSY)?;
    entry.exclusive = exclusive;
    Ok(entry.region.clone())
}

/// Detaches a file; the region may end with it.
pub(crate) fn detach(region: &Region) {
    if let Ok((_, entry)) = REGISTRY.lock().find(region.id) {
        entry.attached = entry.attached.saturating_sub(1);
        entry.exclusive = false;
    }
    sweep();
}

/// The file `maker` is closed; regions that it made may end with it.
pub(crate) fn close(maker: u64) {
    for entry in &mut REGISTRY.lock().entries {
        if entry.maker == Some(maker) {
            entry.maker = None;
        }
    }
    sweep();
}

/// Ends a region to which nobody is attached.
pub(crate) fn destroy(id: u32) -> Result {
    let entry = {
        let mut registry = REGISTRY.lock();
        let (index, entry) = registry.find(id)?;
        if entry.attached > 0 {
            return Err(EBUSY);
        }
        registry.entries.remove(index).map_err(|_| ENOENT)?
    };
    Region::release(&entry.region);
    Ok(())
}

/// Releases all regions that have ended.
pub(crate) fn sweep() {
    loop {
        let entry = {
            let mut registry = REGISTRY.lock();
            let ended = registry.entries.iter().position(Entry::has_ended);
            let Some(Ok(entry)) = ended.map(|index| registry.entries.remove(index)) else {
                return;
            };
            entry
        };
        Region::release(&entry.region);
    }
}

/// Describes one region.
pub(crate) fn stat(id: u32) -> Result<uapi::Region> {
    Ok(REGISTRY.lock().find(id)?.1.describe())
}

/// Describes all regions.
pub(crate) fn list() -> Result<KVVec<uapi::Region>> {
    let mut out = KVVec::with_capacity(MAX_REGIONS, GFP_KERNEL)?;
    for entry in &REGISTRY.lock().entries {
        out.push_within_capacity(entry.describe())
            .map_err(|_| ENOSPC)?;
    }
    Ok(out)
}

/// How many regions there are.
pub(crate) fn count() -> usize {
    REGISTRY.lock().entries.len()
}
