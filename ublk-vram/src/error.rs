//! One error for everything a user can see: a stable kind, one sentence, and the cause below it.
//!
//! The kind decides the exit code and the errno in one place each. The message says what failed, on
//! what, why, and what to do; it is complete on its own, because it crosses two process borders
//! (server -> start pipe or control socket -> `vramctl`) as text.

use serde::{Deserialize, Serialize};

/// What sort of failure it was: stable, and the only thing code may branch on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ErrorKind {
    /// The command line or a value on it is wrong.
    Usage,
    /// The named device, GPU or PCI function is not there.
    NotFound,
    /// The name, the device or the memory is taken, or the device is in use.
    Busy,
    /// A privilege is missing.
    Permission,
    /// The kernel, the driver or the hardware cannot do it.
    Unsupported,
    /// Not enough memory of the kind that was asked for.
    NoSpace,
    /// A protection that swap needs (memory lock, IO_FLUSHER, OOM score) could not be had.
    Unsafe,
    /// Something did not answer in its time.
    Timeout,
    /// A system call or a copy failed.
    Io,
}

impl ErrorKind {
    /// The exit status of a command that ends with this error: 2 for usage, 3 for "not found or
    /// not active", 1 for the rest (docs/guide.md, "Exit status").
    pub fn exit_code(self) -> u8 {
        match self {
            ErrorKind::Usage => 2,
            ErrorKind::NotFound => 3,
            _ => 1,
        }
    }

    /// The errno a block request gets when it meets this error.
    pub fn errno(self) -> i32 {
        match self {
            ErrorKind::Usage => libc::EINVAL,
            ErrorKind::NotFound => libc::ENODEV,
            ErrorKind::Busy => libc::EBUSY,
            ErrorKind::Permission => libc::EACCES,
            ErrorKind::Unsupported => libc::EOPNOTSUPP,
            ErrorKind::NoSpace => libc::ENOMEM,
            ErrorKind::Timeout => libc::ETIMEDOUT,
            ErrorKind::Unsafe | ErrorKind::Io => libc::EIO,
        }
    }
}

/// A failure with its kind and one clear sentence.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct Error {
    /// The stable kind.
    pub kind: ErrorKind,
    /// One sentence: what, on what, why, what to do.
    pub message: String,
}

/// The crate's result.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` with its sentence.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Error {
            kind,
            message: message.into(),
        }
    }

    /// A wrong value on the command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Error::new(ErrorKind::Usage, message)
    }

    /// A failed system call: `what` names the call and its object, the errno gives kind and cause.
    pub fn os(what: impl std::fmt::Display, source: impl Into<std::io::Error>) -> Self {
        let source = source.into();
        let kind = match source.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => ErrorKind::NotFound,
            Some(libc::EBUSY | libc::EEXIST) => ErrorKind::Busy,
            Some(libc::EACCES | libc::EPERM) => ErrorKind::Permission,
            Some(libc::ENOMEM | libc::ENOSPC) => ErrorKind::NoSpace,
            Some(libc::EOPNOTSUPP | libc::ENOSYS) => ErrorKind::Unsupported,
            Some(libc::ETIMEDOUT | libc::ETIME) => ErrorKind::Timeout,
            _ => ErrorKind::Io,
        };
        Error::new(kind, format!("{what}: {source}"))
    }
}
