//! What can go wrong between a test and its guest, as types a test can match on.

use std::time::Duration;

use crate::out::Out;

/// Result of everything that touches a virtual machine.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a virtual machine, or a request to it, failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The guest did not answer within the host's time limit. The stacks of its tasks were asked
    /// for first: they are in the console text.
    #[error("the guest did not answer to {what} within {limit:?}\n--- console ---\n{console}")]
    NoAnswer {
        /// The request that went unanswered.
        what: String,
        /// The host's time limit: the guest's own plus a grace.
        limit: Duration,
        /// The end of the console.
        console: String,
    },
    /// The guest kernel panicked.
    #[error("the guest kernel panicked during {what}: {message}\n--- console ---\n{console}")]
    Panic {
        /// The request under way.
        what: String,
        /// The kernel's own words after "Kernel panic - not syncing:".
        message: String,
        /// The end of the console.
        console: String,
    },
    /// QEMU ended without a panic and without having been asked to.
    #[error("QEMU ended during {what} ({status})\n{stderr}\n--- console ---\n{console}")]
    Died {
        /// The request under way.
        what: String,
        /// How the process ended.
        status: String,
        /// What QEMU said on stderr.
        stderr: String,
        /// The end of the console.
        console: String,
    },
    /// The guest agent could not do what it was asked: no such program, no such file.
    #[error("the guest could not do {what}: {message}")]
    Refused {
        /// The request.
        what: String,
        /// The guest's reason.
        message: String,
    },
    /// A command ran and did not end as the caller demanded.
    #[error("{0}")]
    Command(Box<Out>),
    /// A background process was still running at the end of a wait.
    #[error("{what} is still running after {limit:?}")]
    StillRunning {
        /// The command.
        what: String,
        /// How long it was waited for.
        limit: Duration,
    },
    /// Something on the host: a missing tool, a download, a file.
    #[error(transparent)]
    Host(#[from] anyhow::Error),
}

impl Error {
    /// Whether the guest kernel panicked.
    pub fn is_panic(&self) -> bool {
        matches!(self, Self::Panic { .. })
    }

    /// Whether the guest stopped answering.
    pub fn is_no_answer(&self) -> bool {
        matches!(self, Self::NoAnswer { .. })
    }
}

impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Self {
        Self::Host(error.into())
    }
}
