//! Where the messages of a server's processes go.

use std::fs::OpenOptions;
use std::path::Path;
use std::sync::Mutex;

use tracing_subscriber::filter::{EnvFilter, LevelFilter};
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

use crate::device::DeviceSpec;
use crate::error::{Error, Result};

/// Messages go to standard error until the device is live, and to the lab's file if there is one.
/// Warnings and errors go to the kernel's log as well: it is the one place that works early in boot,
/// under memory pressure, and when the server has no standard error any more.
///
/// libublk speaks through the `log` crate, which nobody listens to here: its messages are about single
/// requests, on the I/O path.
///
/// # Errors
/// The lab's file cannot be opened.
pub fn start(spec: &DeviceSpec) -> Result<()> {
    let open = |path: &Path| OpenOptions::new().create(true).append(true).open(path);
    let filter =
        EnvFilter::try_from_env("UBLK_VRAM_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lab_file = match &spec.lab.log_file {
        Some(path) => Some(
            open(path)
                .map_err(|error| Error::os(format!("cannot open {}", path.display()), error))?,
        ),
        None => None,
    };
    // Without the right to write there, its messages are lost and nothing else.
    let kernel_log = OpenOptions::new().write(true).open("/dev/kmsg").ok();
    let kernel_log = kernel_log.map(|file| {
        let layer = fmt::layer().with_ansi(false).without_time();
        layer
            .with_writer(Mutex::new(file))
            .with_filter(LevelFilter::WARN)
    });
    let lab_log = lab_file.map(|file| fmt::layer().with_ansi(false).with_writer(Mutex::new(file)));
    // A second start in one process (a test) keeps the first one's places.
    let _ = tracing_subscriber::registry()
        .with(fmt::layer().with_ansi(false).with_writer(std::io::stderr))
        .with(lab_log)
        .with(kernel_log)
        .with(filter)
        .try_init();
    Ok(())
}
