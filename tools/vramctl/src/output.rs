//! Standard output is data, standard error is messages.
//!
//! Data is built whole and written at once, so that a failure half-way leaves no half of a table, and
//! a reader that goes away (`vramctl list | head -1`) ends the output quietly.

use std::io::{ErrorKind as IoKind, Write};

use serde::Serialize;
use ublk_vram::{Error, ErrorKind, Result};

/// Writes data.
///
/// # Errors
/// Standard output cannot be written to (a full disk); a reader that is gone is none.
pub fn data(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != IoKind::BrokenPipe => {
            Err(Error::os("cannot write to standard output", error))
        }
        _ => Ok(()),
    }
}

/// Writes a value as JSON, for people too: indented, and with a line break at its end.
///
/// # Errors
/// As [`data`].
pub fn json(value: &impl Serialize) -> Result<()> {
    data(&json_text(value)?)
}

/// The text [`json`] writes.
///
/// # Errors
/// The value has no JSON form.
pub fn json_text(value: &impl Serialize) -> Result<String> {
    let mut text = serde_json::to_string_pretty(value)
        .map_err(|error| Error::new(ErrorKind::Io, format!("cannot write JSON: {error}")))?;
    text.push('\n');
    Ok(text)
}

/// Says why the command failed.
pub fn error(message: &str) {
    say(&format!("error: {message}"));
}

/// Says what the user should know although the command goes on.
pub fn warning(message: &str) {
    say(&format!("warning: {message}"));
}

/// Says something.
pub fn say(message: &str) {
    // Standard error may be closed or full; there is nobody left to tell.
    let _ = writeln!(std::io::stderr(), "vramctl: {message}");
}
