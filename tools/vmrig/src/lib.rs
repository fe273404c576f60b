//! Boots real Debian kernels under QEMU and runs steps in them.
//!
//! A block driver and the memory pressure that kills its servers exist only in a real kernel, and a
//! test that may hang a machine needs a machine of its own. This crate makes one in a few seconds,
//! without root, KVM or a disk image: it fetches a kernel by its package name ([`KernelSpec`]),
//! packs an initramfs of host programs (`initramfs`), starts QEMU with devices whose BARs stand in
//! for GPU memory ([`Device`]), and speaks to a guest agent that is PID 1 over a virtio-serial port
//! ([`Vm`]).
//!
//! ```no_run
//! use std::time::Duration;
//! use vmrig::{Device, KernelSpec, VmBuilder};
//!
//! # fn main() -> vmrig::Result<()> {
//! let kernel = KernelSpec::Suite("trixie-backports".into()).resolve()?;
//! let vm = VmBuilder::new(&kernel)
//!     .name("swap-smoke")
//!     .memory(384)
//!     .device(Device::Qxl { vram_mib: 256 })
//!     .module("ublk_drv")
//!     .tool("mkswap")
//!     .boot()?;
//! let release = vm.sh("uname -r")?.ok()?.stdout;
//! assert_eq!(release.trim(), kernel.release);
//! vm.sh_timeout("sleep 1; false", Duration::from_secs(5))?.expect_rc(1)?;
//! vm.shutdown()?;
//! # Ok(())
//! # }
//! ```
//!
//! What it promises: a request ends within its time limit whatever the guest does; a kernel panic,
//! a hang and a failed command are three different errors; QEMU does not outlive the process that
//! started it; the console of a run that did not end with [`Vm::shutdown`] is kept under
//! `target/vmrig/logs/`.

mod apt;
mod builder;
mod channel;
mod closure;
mod console;
mod cpio;
mod devices;
mod error;
mod hotplug;
mod initramfs;
mod interactive;
mod kernel;
mod machine;
mod modules;
mod out;
mod process;
pub mod protocol;
mod qemu;
mod qmp;
mod vm;
mod vmlinux;
pub mod workspace;

pub use apt::mirror as debian_mirror;
pub use builder::VmBuilder;
pub use devices::Device;
pub use error::{Error, Result};
pub use kernel::{Kernel, KernelSpec};
pub use modules::{Module, ModuleSet};
pub use out::Out;
pub use process::Process;
pub use vm::Vm;
