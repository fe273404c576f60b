// SPDX-License-Identifier: GPL-2.0 OR MIT

//! Regions of GPU memory that do not belong to a process.
//!
//! A region is a part of a PCI BAR whose function is bound to this driver, or memory that the NVIDIA
//! driver pinned. It is made, attached, mapped, read and written through `/dev/ublk-vram`
//! (`uapi/ublk_vram.h`), and may outlive every process.
//!
//! Rooms, those that are used before those that use them; only `region` and the two kinds of memory
//! know each other:
//!
//! | file | what |
//! | --- | --- |
//! | `shim` | the C functions that have no binding |
//! | `uapi` | the structures of the ioctls |
//! | `copy` | streaming loads |
//! | `window` | the kernel's write-combined mapping of a region, and what it measured |
//! | `region` | one region: how it is taken away, who may insert its pages |
//! | `registry` | all regions, who is attached, when one ends |
//! | `pci`, `nvidia` | where regions come from |
//! | `mapping`, `rw` | how user space reaches them |
//! | `ioctl`, `file` | the node |
//!
//! Locks, in the order in which they nest (none is held while user memory is copied, and none while
//! the NVIDIA driver is called, which calls back under its own):
//!
//! mmap lock -> `file::State` -> `registry::REGISTRY`
//! `pci::Function::state` -> `registry::REGISTRY`
//! `nvidia::Pin::state` -> `registry::REGISTRY`
//! mmap lock -> `Region::inserting`
//! `Region::teardown` -> `Region::inserting`
//! NVIDIA driver's own -> `nvidia::Pin::state`, and then, without that, `Region::teardown`
//!
//! Once the module is loaded nothing is allocated under `REGISTRY`: whoever brings a dead server's
//! device back needs it, and reclaim may be waiting for that device. Under `Region::inserting` page
//! tables are.

mod copy;
mod file;
mod ioctl;
mod mapping;
mod nvidia;
mod pci;
mod region;
mod registry;
mod rw;
mod shim;
mod uapi;
mod window;

use kernel::{
    driver,
    miscdevice::{MiscDeviceOptions, MiscDeviceRegistration},
    prelude::*,
};

module! {
    type: UblkVram,
    name: "ublk_vram",
    authors: ["ublk-vram developers"],
    description: "GPU memory regions that outlive processes",
    license: "Dual MIT/GPL",
}

/// The loaded module. Fields are dropped in this order: no new opens, no more functions, and then
/// nothing can have pages of a region mapped.
#[pin_data]
struct UblkVram {
    #[pin]
    _node: MiscDeviceRegistration<file::UvramFile>,
    #[pin]
    _driver: driver::Registration<kernel::pci::Adapter<pci::UvramDriver>>,
    _space: region::SpaceOwner,
    _regions: registry::Owner,
    _functions: pci::Owner,
}

impl kernel::InPlaceModule for UblkVram {
    fn init(module: &'static ThisModule) -> impl PinInit<Self, Error> {
        // SAFETY: Called once, before anything that uses the locks is registered.
        unsafe {
            registry::REGISTRY.init();
            pci::FUNCTIONS.init();
        }
        try_pin_init!(Self {
            _functions: pci::Owner,
            _regions: registry::Owner::new()?,
            _space: region::SpaceOwner::open()?,
            _driver <- driver::Registration::new(c"ublk-vram", module),
            _node <- MiscDeviceRegistration::register(MiscDeviceOptions { name: c"ublk-vram" }),
        })
    }
}
