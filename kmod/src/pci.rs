// SPDX-License-Identifier: GPL-2.0 OR MIT

//! The PCI driver, and regions of BARs.
//!
//! The driver's table names no device: a function is bound to it by `driver_override` alone, that is,
//! by the administrator. Binding claims nothing yet; a region claims its range of the BAR, which keeps
//! everybody else, `/dev/mem` and sysfs included, out of it. Unbinding cannot be refused: it takes the
//! memory of all regions of the function away.

use crate::{
    region::{Claim, Region, Source},
    registry, shim, uapi,
    window::Extent,
};
use kernel::{
    bindings,
    device::Core,
    new_mutex,
    page::PAGE_SIZE,
    pci,
    prelude::*,
    sync::{aref::ARef, Arc, Mutex},
};

/// BARs of a function; what follows is its ROM.
const BARS: u8 = 6;

kernel::sync::global_lock! {
    // SAFETY: Initialised by the module's initialiser before anything is registered.
    pub(crate) unsafe(uninit) static FUNCTIONS: Mutex<KVec<Arc<Function>>> = KVec::new();
}

/// Owns the list's memory: a static is never dropped.
pub(crate) struct Owner;

impl Drop for Owner {
    fn drop(&mut self) {
        // Empty: the driver is unregistered, and all functions were unbound.
        let list = core::mem::take(&mut *FUNCTIONS.lock());
        drop(list);
    }
}

/// A function that is bound to the driver, or was.
#[pin_data]
pub(crate) struct Function {
    device: ARef<pci::Device>,
    domain: u32,
    bus: u8,
    devfn: u8,
    #[pin]
    state: Mutex<State>,
}

struct State {
    bound: bool,
    /// Regions whose memory is not given back yet.
    regions: KVec<Arc<Region>>,
}

impl Function {
    /// Domain, bus, and device with function.
    pub(crate) fn address(&self) -> (u32, u8, u8) {
        (self.domain, self.bus, self.devfn)
    }

    fn raw(&self) -> *const bindings::pci_dev {
        // `pci::Device` is a transparent wrapper of it.
        core::ptr::from_ref::<pci::Device>(&self.device).cast()
    }

    /// A region has given its memory back.
    pub(crate) fn forget(&self, region: &Arc<Region>) {
        let mut state = self.state.lock();
        let index = state
            .regions
            .iter()
            .position(|held| Arc::ptr_eq(held, region));
        let held = index.map(|index| state.regions.remove(index));
        drop(state);
        drop(held);
    }

    /// The BAR's first byte and length in system address space.
    fn bar(&self, bar: u8) -> Result<(u64, u64)> {
        if bar >= BARS {
            return Err(EINVAL);
        }
        // SAFETY: The device is valid and the index is one of a BAR.
        let flags = unsafe { shim::uvram_pci_flags(self.raw(), c_int::from(bar)) };
        let len = self.device.resource_len(u32::from(bar))?;
        if flags & u64::from(bindings::IORESOURCE_MEM) == 0
            || flags & u64::from(bindings::IORESOURCE_UNSET) != 0
            || len == 0
        {
            return Err(ENXIO);
        }
        // Reads of registers have side effects, and combined writes break them.
        if flags & u64::from(bindings::IORESOURCE_PREFETCH) == 0 {
            return Err(EOPNOTSUPP);
        }
        Ok((self.device.resource_start(u32::from(bar))?, len))
    }
}

/// Finds a bound function by its address.
fn find(domain: u32, bus: u8, devfn: u8) -> Result<Arc<Function>> {
    let functions = FUNCTIONS.lock();
    let mut found = functions.iter();
    let found = found.find(|function| function.address() == (domain, bus, devfn));
    found.cloned().ok_or(ENODEV)
}

/// Makes a region of a part of a BAR; its id.
pub(crate) fn create(create: &uapi::CreateBar, maker: u64) -> Result<u32> {
    let function = find(create.domain, create.bus, create.devfn)?;
    // Held until the region is known to the function: unbinding waits, and then finds it.
    let mut state = function.state.lock();
    if !state.bound {
        return Err(ENODEV);
    }
    let (base, bar_len) = function.bar(create.bar)?;
    let left = bar_len.checked_sub(create.offset).ok_or(EINVAL)?;
    let len = if create.length == 0 {
        left
    } else {
        create.length
    };
    let page = PAGE_SIZE as u64;
    if len == 0 || len > left || len % page != 0 || create.offset % page != 0 {
        return Err(EINVAL);
    }
    let phys = base + create.offset;
    if phys % page != 0 {
        return Err(EINVAL);
    }
    state.regions.reserve(1, GFP_KERNEL)?;
    let claim = Claim::new(phys, len)?;
    let mut extents = KVVec::new();
    extents.push(
        Extent {
            start: 0,
            phys,
            len,
        },
        GFP_KERNEL,
    )?;
    let source = Source::Bar {
        function: function.clone(),
        bar: create.bar,
        start: create.offset,
    };
    let id = registry::new_id()?;
    let region = Region::new(id, source, extents, Some(claim))?;
    state.regions.push(region.clone(), GFP_KERNEL)?;
    drop(state);
    let sticky = create.flags & uapi::CREATE_STICKY != 0;
    registry::insert(&region, maker, sticky).inspect_err(|_| Region::release(&region))?;
    // The function may have been unbound since.
    registry::sweep();
    Ok(id)
}

/// The driver.
pub(crate) struct UvramDriver;

kernel::pci_device_table!(
    PCI_TABLE,
    <UvramDriver as pci::Driver>::IdInfo,
    // A class has 24 bits: this one is no device's.
    [(pci::DeviceId::from_class(!0, !0), ())]
);

/// A function's binding; it ends in [`UvramDriver::unbind`].
pub(crate) struct Binding(Arc<Function>);

impl pci::Driver for UvramDriver {
    type IdInfo = ();
    type Data<'bound> = Binding;
    const ID_TABLE: pci::IdTable<Self::IdInfo> = &PCI_TABLE;

    fn probe<'bound>(
        pdev: &'bound pci::Device<Core<'_>>,
        _info: Option<&'bound Self::IdInfo>,
    ) -> impl PinInit<Binding, Error> + 'bound {
        bind(pdev)
    }

    fn unbind<'bound>(_pdev: &'bound pci::Device<Core<'_>>, this: Pin<&Binding>) {
        let function = &this.0;
        {
            let mut functions = FUNCTIONS.lock();
            let index = functions
                .iter()
                .position(|held| Arc::ptr_eq(held, function));
            if let Some(index) = index {
                let _ = functions.remove(index);
            }
        }
        let regions = {
            let mut state = function.state.lock();
            state.bound = false;
            core::mem::take(&mut state.regions)
        };
        for region in &regions {
            pr_info!(
                "region {}: its PCI function is unbound, the memory is gone\n",
                region.id
            );
            region.revoke();
        }
        registry::sweep();
        // SAFETY: The function was enabled by `bind`, and its driver is being unbound.
        unsafe { bindings::pci_disable_device(function.raw().cast_mut()) };
    }
}

fn bind(pdev: &pci::Device<Core<'_>>) -> Result<Binding> {
    pdev.enable_device_mem()?;
    let device: &pci::Device = pdev;
    let id = device.dev_id();
    let raw = core::ptr::from_ref(device).cast::<bindings::pci_dev>();
    let undo = |error| {
        // SAFETY: The function is bound to this driver and was enabled above.
        unsafe { bindings::pci_disable_device(raw.cast_mut()) };
        error
    };
    let function = Arc::pin_init(
        try_pin_init!(Function {
            device: ARef::from(device),
            // SAFETY: The device is valid.
            domain: unsafe { shim::uvram_pci_domain(raw) },
            bus: (id >> 8) as u8,
            devfn: id as u8,
            state <- new_mutex!(
                State {
                    bound: true,
                    regions: KVec::new(),
                },
                "Function::state"
            ),
        }),
        GFP_KERNEL,
    )
    .map_err(undo)?;
    FUNCTIONS
        .lock()
        .push(function.clone(), GFP_KERNEL)
        .map_err(|error| undo(error.into()))?;
    Ok(Binding(function))
}
