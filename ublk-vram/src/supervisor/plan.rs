//! The sizes of a device whose memory only a GPU's library can tell of, asked of another process: the
//! supervisor loads no such library.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::backend::MemoryHandles;
use crate::device::DeviceSpec;
use crate::error::{Error, ErrorKind, Result};
use crate::session::plan;
use crate::session::process::OWN_PROGRAM;
use crate::store::Layout;
use crate::ublk::Shape;

/// The hidden subcommand that answers.
pub const SUBCOMMAND: &str = "plan";

type Answer = std::result::Result<(u64, u64, Shape), Error>;

/// The sizes of the device of `spec`.
///
/// # Errors
/// As [`plan`].
pub(super) fn of(spec: &DeviceSpec) -> Result<(Layout, Shape)> {
    if !MemoryHandles::needs_gpu_library(&spec.backend) {
        return plan(spec);
    }
    let failed = |error| Error::os("cannot ask another process for the device's sizes", error);
    let question = serde_json::to_vec(spec)
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot write JSON: {error}")))?;
    let mut child = Command::new(Path::new(OWN_PROGRAM))
        .arg(SUBCOMMAND)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(&question).map_err(failed)?;
    }
    let mut text = Vec::new();
    if let Some(mut output) = child.stdout.take() {
        output.read_to_end(&mut text).map_err(failed)?;
    }
    let ended = child.wait().map_err(failed)?;
    let answer: Answer = serde_json::from_slice(&text).map_err(|_| {
        Error::new(
            ErrorKind::Io,
            format!(
                "the process that was to tell the device's sizes ended without a word ({ended})"
            ),
        )
    })?;
    let (device, chunk, shape) = answer?;
    Ok((Layout::new(device, Some(chunk))?, shape))
}

/// Its `main`: a specification on standard input, the answer on standard output.
///
/// # Errors
/// They cannot be read or written; that a device cannot be had is an answer.
pub fn main() -> Result<()> {
    let mut text = Vec::new();
    std::io::stdin()
        .read_to_end(&mut text)
        .map_err(|error| Error::os("cannot read the specification", error))?;
    let spec: DeviceSpec = serde_json::from_slice(&text)
        .map_err(|error| Error::usage(format!("the specification is not understood: {error}")))?;
    let answer: Answer =
        plan(&spec).map(|(layout, shape)| (layout.device_bytes(), layout.chunk_size(), shape));
    let text = serde_json::to_vec(&answer)
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot write JSON: {error}")))?;
    std::io::stdout()
        .write_all(&text)
        .map_err(|error| Error::os("cannot write the answer", error))
}
