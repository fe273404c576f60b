//! `vramctl swap on|off NAME`.

use std::path::Path;

use ublk_vram::backend::vulkan::Residency;
use ublk_vram::device::DeviceName;
use ublk_vram::size::human;
use ublk_vram::{Error, ErrorKind, Result};

use super::dead;
use crate::args::{SwapOffArgs, SwapOnArgs, SwapVerb};
use crate::devices::{Device, Devices};
use crate::output;
use crate::swap::{SwapOn, swap_off, swap_on};

pub fn run(verb: &SwapVerb) -> Result<()> {
    match verb {
        SwapVerb::On(args) => on(args),
        SwapVerb::Off(args) => off(args),
    }
}

fn on(args: &SwapOnArgs) -> Result<()> {
    let device = Devices::system()?.find(&args.name)?;
    if device.is_dead() {
        return Err(dead(&args.name));
    }
    let disk = device.disk()?;
    if let Some(swap) = &device.swap {
        return Err(Error::new(
            ErrorKind::Busy,
            format!(
                "'{}' is swap already, with priority {}",
                args.name, swap.priority
            ),
        ));
    }
    if !args.allow_evictable && disk.residency.as_deref() == Some(Residency::Evictable.as_str()) {
        return Err(evictable(&args.name));
    }
    if disk.zero_copy {
        return Err(zero_copy(&args.name));
    }
    let how = SwapOn {
        priority: args.priority,
        discard: args.discard,
        force: args.force,
    };
    swap_on(Path::new(&disk.device), how)
}

/// Why a device is no swap.
pub fn evictable(name: &DeviceName) -> Error {
    Error::new(
        ErrorKind::Unsafe,
        format!(
            "'{name}' is no safe swap: its GPU's driver may move the memory to system memory, and \
             takes memory to do so, which can hang the machine; --allow-evictable swaps to it all the \
             same"
        ),
    )
}

/// Why a device with zero copy is no swap.
pub fn zero_copy(name: &DeviceName) -> Error {
    Error::new(
        ErrorKind::Unsafe,
        format!(
            "'{name}' is no safe swap with zero copy: the kernel allocates memory for requests on their way, \
             which under swap can fail or wait for itself; leave out --zero-copy for swap"
        ),
    )
}

fn off(args: &SwapOffArgs) -> Result<()> {
    let devices = Devices::system()?;
    let device = devices.find(&args.name)?;
    if device.swap.is_none() {
        return Err(Error::new(
            ErrorKind::NotFound,
            format!("'{}' is not used as swap", args.name),
        ));
    }
    off_if_on(&devices, &device)
}

/// Swaps a device off if it is swap.
pub fn off_if_on(devices: &Devices, device: &Device) -> Result<()> {
    let Some(swap) = &device.swap else {
        return Ok(());
    };
    say_begin(&device.name, swap.used);
    swap_off(swap, devices.swaps())
}

fn say_begin(name: &DeviceName, used: u64) {
    // Below this it is over before it is read.
    if used >= 64 << 20 {
        output::say(&format!("swapping off '{name}': {} to move", human(used)));
    }
}
