//! What the driver can do, asked of the driver and never derived from a kernel version.

use std::time::Duration;

use libublk::sys;
use serde::Serialize;

use super::command::{Command, send};
use crate::error::{Error, ErrorKind, Result};

/// Names of the feature bits (include/uapi/linux/ublk_cmd.h of Linux 7.3), by bit number.
const NAMES: [&str; 21] = [
    "SUPPORT_ZERO_COPY",
    "URING_CMD_COMP_IN_TASK",
    "NEED_GET_DATA",
    "USER_RECOVERY",
    "USER_RECOVERY_REISSUE",
    "UNPRIVILEGED_DEV",
    "CMD_IOCTL_ENCODE",
    "USER_COPY",
    "ZONED",
    "USER_RECOVERY_FAIL_IO",
    "UPDATE_SIZE",
    "AUTO_BUF_REG",
    "QUIESCE",
    "PER_IO_DAEMON",
    "BUF_REG_OFF_DAEMON",
    "BATCH_IO",
    "INTEGRITY",
    "SAFE_STOP_DEV",
    "NO_AUTO_PART_SCAN",
    "SHMEM_ZC",
    "IO_DESC_SIZE",
];

/// A request's pages can be a fixed buffer of a ring, and the server never has an address of them.
pub const SUPPORT_ZERO_COPY: u64 = 1;
/// The driver itself registers them before it hands a request over, and takes them back when it ends.
pub const AUTO_BUF_REG: u64 = 1 << 11;
/// What zero copy takes (Linux 6.16).
pub const ZERO_COPY: u64 = SUPPORT_ZERO_COPY | AUTO_BUF_REG;

/// The disk outlives its server, and requests wait for the next one.
pub const USER_RECOVERY: u64 = 1 << 3;
/// Requests that the dead server had are issued again, not failed.
pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
/// QUIESCE_DEV is there: a server can be replaced without being killed.
pub const QUIESCE: u64 = 1 << 12;

/// Each tag can have a server of its own. Not used; but from the release before it (Linux 6.15) drivers recover
/// in more moments, and this bit tells them from others (`ublk/release.rs`, `supervisor/takeover.rs`).
pub const PER_IO_DAEMON: u64 = 1 << 13;

/// TRY_STOP_DEV is there: the driver itself refuses to stop a disk that somebody has open.
pub const SAFE_STOP_DEV: u64 = 1 << 17;

/// The driver's features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Features {
    /// The bits; `None` from drivers before Linux 6.5, which cannot be asked.
    pub bits: Option<u64>,
}

impl Features {
    /// Whether a feature bit is set.
    pub fn has(self, bit: u64) -> bool {
        self.bits.is_some_and(|bits| bits & bit != 0)
    }

    /// Whether the driver can do zero copy; else an error that says so.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if it cannot, or cannot be asked.
    pub fn check_zero_copy(self) -> Result<()> {
        if self.bits.unwrap_or(0) & ZERO_COPY == ZERO_COPY {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Unsupported,
            "this kernel's ublk driver cannot register the buffers of requests by itself \
             (UBLK_F_AUTO_BUF_REG, Linux 6.16 and later): leave out --zero-copy",
        ))
    }

    /// The names of the set bits.
    pub fn names(self) -> Vec<String> {
        names(self.bits.unwrap_or(0))
    }
}

/// Names of the bits set in `bits`; `bit N` for those this program does not know.
pub fn names(bits: u64) -> Vec<String> {
    (0..64u32)
        .filter(|bit| bits & (1 << bit) != 0)
        .map(|bit| {
            NAMES
                .get(bit as usize)
                .map_or_else(|| format!("bit {bit}"), |&name| name.to_owned())
        })
        .collect()
}

/// Asks the driver (GET_FEATURES).
///
/// # Errors
/// That the driver is not loaded, or may not be asked.
pub fn probe() -> Result<Features> {
    let command = Command {
        op: sys::UBLK_U_CMD_GET_FEATURES,
        device: u32::MAX,
        data: 0,
        buffer: Some(Box::new(0u64)),
    };
    let answer = send(command, "GET_FEATURES", Duration::from_secs(10))?;
    Ok(Features {
        bits: answer
            .buffer
            .filter(|_| answer.result >= 0)
            .map(|bits| *bits),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_have_the_kernels_names() {
        assert_eq!(
            names(1 << 3 | 1 << 17 | 1 << 40),
            ["USER_RECOVERY", "SAFE_STOP_DEV", "bit 40"]
        );
        assert_eq!(
            names(USER_RECOVERY | USER_RECOVERY_REISSUE | QUIESCE),
            ["USER_RECOVERY", "USER_RECOVERY_REISSUE", "QUIESCE"]
        );
        assert_eq!(names(ZERO_COPY), ["SUPPORT_ZERO_COPY", "AUTO_BUF_REG"]);
        assert_eq!(
            NAMES.get(SAFE_STOP_DEV.trailing_zeros() as usize),
            Some(&"SAFE_STOP_DEV")
        );
    }
    #[test]
    fn zero_copy_needs_both_bits() {
        let check = |bits| Features { bits }.check_zero_copy();
        assert!(check(Some(ZERO_COPY | USER_RECOVERY)).is_ok());
        // Linux 6.0 to 6.15 have the first one alone.
        for bits in [None, Some(0), Some(SUPPORT_ZERO_COPY), Some(AUTO_BUF_REG)] {
            assert_eq!(check(bits).unwrap_err().kind, ErrorKind::Unsupported);
        }
    }
}
