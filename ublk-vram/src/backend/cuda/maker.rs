//! The process that allocates with CUDA, pins, and exits.
//!
//! Why a process of its own: libcuda maps hundreds of MiB, starts threads and allocates whenever it
//! likes, none of which a server under swap can have; and the memory must not hang on the server's
//! life. The region that it makes is sticky and persistent: it has the memory when the maker is gone.

use std::io::{Read, Write};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::driver::Gpu;
use crate::error::{Error, ErrorKind, Result};
use crate::kmod::{Node, abi};

/// The hidden subcommand the maker runs as.
pub const SUBCOMMAND: &str = "make-cuda-region";

/// The driver pins whole pages of this size.
pub(super) const GPU_PAGE: u64 = 64 << 10;

/// What the maker is to do.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Order {
    /// PCI address of the GPU; absent: the only one.
    pub(super) gpu: Option<String>,
    /// Bytes to allocate, a multiple of [`GPU_PAGE`]; 0: only say what is free.
    pub(super) bytes: u64,
}

/// What it did.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Made {
    /// PCI address of the GPU.
    pub(super) gpu: String,
    /// Bytes that were free before.
    pub(super) free: u64,
    /// The region; 0 if none was asked for.
    pub(super) id: u32,
}

/// Runs a maker to its end.
///
/// # Errors
/// What it said, or that it died.
pub(super) fn order(order: &Order) -> Result<Made> {
    let failed = |error: std::io::Error| Error::os("the process that allocates with CUDA", error);
    // This very program, even where its path is not in our mount namespace or was replaced.
    let mut child = Command::new("/proc/self/exe")
        .arg(SUBCOMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(failed)?;
    let text = serde_json::to_string(order).unwrap_or_default();
    if let Some(mut orders) = child.stdin.take() {
        // One that died already says so by its end.
        let _ = orders.write_all(text.as_bytes());
    }
    let output = child.wait_with_output().map_err(failed)?;
    serde_json::from_slice::<Result<Made>>(&output.stdout).unwrap_or_else(|_| {
        Err(Error::new(
            ErrorKind::Io,
            format!(
                "the process that allocates with CUDA ended without an answer ({})",
                output.status
            ),
        ))
    })
}

/// The maker's own `main`: an order on standard input, what came of it on standard output.
///
/// # Errors
/// If a pipe breaks; all else is in the answer.
pub fn main() -> Result<()> {
    let mut text = String::new();
    let broken = |error| Error::os("the pipes of the process that allocates with CUDA", error);
    std::io::stdin().read_to_string(&mut text).map_err(broken)?;
    let order = serde_json::from_str(&text)
        .map_err(|error| Error::usage(format!("the order is not understood: {error}")));
    let answer: Result<Made> = order.and_then(|order| make(&order));
    let text = serde_json::to_string(&answer).unwrap_or_default();
    println!("{text}");
    Ok(())
}

fn make(order: &Order) -> Result<Made> {
    let gpu = Gpu::open(order.gpu.as_deref())?;
    let free = gpu.free()?;
    let id = if order.bytes == 0 {
        0
    } else {
        pin(gpu.allocate(order.bytes)?, order.bytes, &gpu.address)?
    };
    Ok(Made {
        gpu: gpu.address,
        free,
        id,
    })
}

fn pin(address: u64, length: u64, gpu: &str) -> Result<u32> {
    let node = Node::open()
        .map_err(|error| Error::os(format!("cannot open {}", crate::kmod::NODE), error))?;
    let create = abi::CreateNvidia {
        flags: abi::CREATE_STICKY | abi::CREATE_PERSISTENT,
        address,
        length,
        ..Default::default()
    };
    node.create_nvidia(create).map_err(|error| {
        let (kind, why) = match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => (
                ErrorKind::Unsupported,
                "the loaded NVIDIA driver cannot be used: it must be the open kernel module, \
                 550.40.07 or later, on a GPU with memory of its own"
                    .to_owned(),
            ),
            Some(libc::EINVAL) => (
                ErrorKind::Unsupported,
                "the driver refuses to pin on this GPU: it does so on data-center and RTX \
                 professional ones only"
                    .to_owned(),
            ),
            Some(libc::ENOMEM | libc::ENOSPC) => (
                ErrorKind::NoSpace,
                "BAR1 has no room for it: `nvidia-smi -q -d MEMORY` shows its size, which resizable \
                 BAR makes larger"
                    .to_owned(),
            ),
            _ => (ErrorKind::Io, error.to_string()),
        };
        Error::new(
            kind,
            format!("cannot pin {length} bytes of the NVIDIA GPU {gpu}: {why}"),
        )
    })
}
