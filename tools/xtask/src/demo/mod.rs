//! `cargo xtask demo`: more memory than there is RAM, on a disk that is GPU memory, told in numbers
//! that were measured on the way.
//!
//! By default everything happens in a virtual machine whose fake GPU is a file of this host, so that
//! the last line can be proof from outside: the file holds the program's bytes while the device is
//! there, and zeroes afterwards. `--host` tells the same story on the machine at hand.

use std::process::ExitCode;

use anyhow::Result;

mod cgroup;
mod local;
mod machine;
mod real;
pub mod story;
mod virtual_machine;

/// Arguments of `cargo xtask demo`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Debian suite whose newest cloud kernel is booted
    #[arg(long, default_value = "trixie-backports", conflicts_with = "host")]
    suite: String,
    /// On this machine, as root, in place of a virtual one
    #[arg(long, requires = "size")]
    host: bool,
    /// Size of the device: 512M, 8G, 50%, max
    #[arg(long, requires = "host")]
    size: Option<String>,
    /// The GPU: its PCI address, or its index in `vramctl gpus`
    #[arg(
        long,
        value_name = "ADDRESS",
        requires = "host",
        conflicts_with = "backend"
    )]
    gpu: Option<String>,
    /// `host` puts the device into system memory
    #[arg(long, value_name = "host|pci", requires = "host")]
    backend: Option<String>,
}

/// Tells the story.
///
/// # Errors
/// When a step fails or a byte is wrong.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.size {
        Some(size) if arguments.host => real::run(&real::Wish {
            size,
            gpu: arguments.gpu.as_deref(),
            backend: arguments.backend.as_deref(),
        }),
        _ => virtual_machine::run(&arguments.suite),
    }
}
