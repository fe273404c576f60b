//! Swap on a device, on and off.
//!
//! swapoff(2) belongs here and never in the server: it makes its caller's whole process the OOM
//! killer's first choice, and if it is killed the device must still be there.

mod child;
mod off;
mod on;
mod progress;
mod signature;

use std::path::PathBuf;

pub use off::swap_off;
pub use on::{SwapOn, make_and_swap_on, swap_on};

/// A program of util-linux. They live in sbin, which is not in everybody's PATH.
pub fn tool(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/sbin", "/usr/bin", "/bin"].map(PathBuf::from))
        .filter(|dir| dir.is_absolute())
        .map(|dir| dir.join(name))
        .find(|program| is_program(program))
}

/// Whether this is a file that may be run.
pub fn is_program(path: &std::path::Path) -> bool {
    path.is_file() && nix::unistd::access(path, nix::unistd::AccessFlags::X_OK).is_ok()
}
