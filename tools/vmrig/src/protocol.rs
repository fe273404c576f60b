//! What the host and the guest agent say to each other over the virtio-serial port.
//!
//! A frame is two little-endian `u32` (length of the head, length of the payload), the head as
//! JSON, and the payload as raw bytes: outputs and file contents need no encoding. Requests carry
//! an id that their reply repeats, so several may be under way. The guest speaks first, with
//! [`Reply::Hello`] and id 0.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Name of the virtio-serial port.
pub const PORT: &str = "vmrig";
/// I/O port of the isa-debug-exit device.
pub const EXIT_PORT: u16 = 0xf4;
/// What the agent writes to [`EXIT_PORT`] at an orderly end; QEMU then exits with twice that plus
/// one.
pub const EXIT_CLEAN: u8 = 21;
/// Exit code of QEMU after an orderly end.
pub const QEMU_EXIT_CLEAN: i32 = 2 * EXIT_CLEAN as i32 + 1;
/// Where the agent finds the modules to load, one `PATH [PARAMETERS]` a line, in order.
pub const MODULE_LIST: &str = "/etc/vmrig/modules";
/// Where the agent finds the environment of every command, one `NAME=VALUE` a line.
pub const ENVIRONMENT: &str = "/etc/vmrig/environment";

/// Longest head that is believed.
const MAX_HEAD: u32 = 16 << 20;
/// Longest payload that is believed.
const MAX_PAYLOAD: u32 = 1 << 30;

/// The head of every frame.
#[derive(Debug, Serialize, Deserialize)]
pub struct Envelope<T> {
    /// Ties a reply to its request.
    pub id: u64,
    /// The request or reply.
    pub body: T,
}

/// A command to run.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Command {
    /// Program and arguments; the program is looked up in the guest's `PATH`.
    pub argv: Vec<String>,
    /// Added to the guest's default environment.
    pub env: Vec<(String, String)>,
}

/// What the host asks for.
#[derive(Debug, Serialize, Deserialize)]
pub enum Request {
    /// Run to the end; the payload is standard input. Answer: [`Reply::Finished`].
    Run {
        /// What to run.
        command: Command,
        /// Kill its session after so many milliseconds.
        timeout_ms: u64,
    },
    /// Start in the background; the payload is standard input. Answer: [`Reply::Spawned`].
    Spawn {
        /// What to run.
        command: Command,
    },
    /// Wait for a background process. Answer: [`Reply::Finished`] once, or [`Reply::StillRunning`].
    Wait {
        /// Its handle.
        process: u64,
        /// How long to wait, in milliseconds.
        timeout_ms: u64,
    },
    /// What a background process printed so far. Answer: [`Reply::Output`].
    Peek {
        /// Its handle.
        process: u64,
    },
    /// Send a signal to a background process alone, or to its whole group. Answer: [`Reply::Done`].
    Kill {
        /// Its handle.
        process: u64,
        /// Signal number.
        signal: i32,
        /// Send it to the process group.
        group: bool,
    },
    /// Read a whole file. Answer: [`Reply::Output`], content in `stdout_len`.
    ReadFile {
        /// Absolute path.
        path: String,
    },
    /// Make or replace a file with the payload. Answer: [`Reply::Done`].
    WriteFile {
        /// Absolute path.
        path: String,
        /// Permission bits.
        mode: u32,
    },
    /// Read through a shared mapping, the only way into a PCI BAR of sysfs. Answer:
    /// [`Reply::Output`].
    ReadMapping {
        /// Absolute path.
        path: String,
        /// First byte.
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Write the payload through a shared mapping. Answer: [`Reply::Done`].
    WriteMapping {
        /// Absolute path.
        path: String,
        /// First byte.
        offset: u64,
    },
    /// An interactive shell on the console. Answer, at its end: [`Reply::Finished`].
    Shell {
        /// Terminal rows.
        rows: u16,
        /// Terminal columns.
        columns: u16,
    },
    /// Sync and end the machine. No answer.
    PowerOff,
}

/// How a process ended; the payload is its standard output, then its standard error.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Finished {
    /// Exit code, if it ended by itself.
    pub rc: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// It was killed by the time limit.
    pub timed_out: bool,
    /// It is still there after SIGKILL.
    pub stuck: bool,
    /// From start to end, in milliseconds.
    pub duration_ms: u64,
    /// Bytes of standard output in the payload.
    pub stdout_len: u64,
}

/// What the guest answers.
#[derive(Debug, Serialize, Deserialize)]
pub enum Reply {
    /// The agent is up.
    Hello {
        /// `uname -r`.
        release: String,
        /// What went wrong on the way, such as a module that did not load.
        problems: Vec<String>,
    },
    /// A process ended.
    Finished(Finished),
    /// A background process was started.
    Spawned {
        /// Handle for later requests.
        process: u64,
        /// Process id in the guest.
        pid: i32,
    },
    /// A background process did not end in time.
    StillRunning,
    /// Bytes are in the payload.
    Output {
        /// Bytes of standard output (or of the file) in the payload; the rest is standard error.
        stdout_len: u64,
    },
    /// It was done.
    Done,
    /// It could not be done.
    Error {
        /// Why.
        message: String,
    },
}

/// Writes one frame.
///
/// # Errors
/// Those of the writer, and `InvalidInput` for a frame that is too long.
pub fn write_frame<T: Serialize>(
    writer: &mut impl Write,
    id: u64,
    body: T,
    payload: &[u8],
) -> io::Result<()> {
    let head = serde_json::to_vec(&Envelope { id, body })?;
    let too_long = |_| io::Error::new(io::ErrorKind::InvalidInput, "frame is too long");
    let head_len = u32::try_from(head.len()).map_err(too_long)?;
    let payload_len = u32::try_from(payload.len()).map_err(too_long)?;
    if head_len > MAX_HEAD || payload_len > MAX_PAYLOAD {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "frame is too long",
        ));
    }
    let mut start = Vec::with_capacity(8 + head.len());
    start.extend_from_slice(&head_len.to_le_bytes());
    start.extend_from_slice(&payload_len.to_le_bytes());
    start.extend_from_slice(&head);
    writer.write_all(&start)?;
    writer.write_all(payload)?;
    writer.flush()
}

/// Reads one frame.
///
/// # Errors
/// Those of the reader, and `InvalidData` for a frame that cannot be one.
pub fn read_frame<T: DeserializeOwned>(
    reader: &mut impl Read,
) -> io::Result<(Envelope<T>, Vec<u8>)> {
    let mut lengths = [0; 8];
    reader.read_exact(&mut lengths)?;
    let [a, b, c, d, e, f, g, h] = lengths;
    let head_len = u32::from_le_bytes([a, b, c, d]);
    let payload_len = u32::from_le_bytes([e, f, g, h]);
    if head_len > MAX_HEAD || payload_len > MAX_PAYLOAD {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "frame lengths are not credible",
        ));
    }
    let mut head = vec![0; head_len as usize];
    reader.read_exact(&mut head)?;
    let mut payload = vec![0; payload_len as usize];
    reader.read_exact(&mut payload)?;
    Ok((serde_json::from_slice(&head)?, payload))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_a_round_trip() {
        let mut wire = Vec::new();
        write_frame(
            &mut wire,
            7,
            Request::ReadFile { path: "/x".into() },
            b"\0\xff",
        )
        .unwrap();
        write_frame(&mut wire, 8, Request::PowerOff, b"").unwrap();
        let mut reader = wire.as_slice();
        let (head, payload) = read_frame::<Request>(&mut reader).unwrap();
        assert_eq!(head.id, 7);
        assert!(matches!(head.body, Request::ReadFile { path } if path == "/x"));
        assert_eq!(payload, b"\0\xff");
        let (head, payload) = read_frame::<Request>(&mut reader).unwrap();
        assert!(matches!(head.body, Request::PowerOff) && payload.is_empty());
    }

    #[test]
    fn garbage_is_refused() {
        let error = read_frame::<Request>(&mut [0xff_u8; 64].as_slice()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
