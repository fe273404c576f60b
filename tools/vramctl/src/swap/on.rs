//! swapon(2), and `mkswap` before it where that is safe.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use ublk_vram::{Error, ErrorKind, Result};

use super::child;
use super::signature::{Content, look};
use super::tool;

/// Flags of swapon(2) (include/linux/swap.h).
const SWAP_FLAG_PREFER: i32 = 0x8000;
const SWAP_FLAG_PRIO_MASK: i32 = 0x7fff;
const SWAP_FLAG_DISCARD: i32 = 0x10000;

/// Reading and writing the first pages of a disk takes no longer unless the disk does not answer.
const LIMIT: Duration = Duration::from_secs(60);

/// How to swap on.
#[derive(Debug, Clone, Copy)]
pub struct SwapOn {
    /// 0 to 32767.
    pub priority: u16,
    /// Tell the device which blocks are no longer used.
    pub discard: bool,
    /// Overwrite what is on the device.
    pub force: bool,
}

impl SwapOn {
    fn flags(self) -> i32 {
        let discard = if self.discard { SWAP_FLAG_DISCARD } else { 0 };
        SWAP_FLAG_PREFER | (i32::from(self.priority) & SWAP_FLAG_PRIO_MASK) | discard
    }
}

/// Swaps to `disk`; makes the swap signature if there is none.
///
/// # Errors
/// Something else is on the disk and `force` is not said; or why it could not be done.
pub fn swap_on(disk: &Path, how: SwapOn) -> Result<()> {
    limited(disk, || look_and_swap_on(disk, how))
}

fn limited(disk: &Path, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let what = format!("making {} swap", disk.display());
    child::limited(&what, LIMIT, work)
}

fn look_and_swap_on(disk: &Path, how: SwapOn) -> Result<()> {
    match look(disk)? {
        Content::Swap => activate(disk, how),
        Content::Other(what) if !how.force => Err(Error::new(
            ErrorKind::Busy,
            format!(
                "{} holds {what}: it is overwritten only with --force",
                disk.display()
            ),
        )),
        Content::Nothing | Content::Other(_) => make_and_activate(disk, how),
    }
}

/// Makes the swap signature, and swaps to `disk`.
///
/// # Errors
/// Why it could not be done.
pub fn make_and_swap_on(disk: &Path, how: SwapOn) -> Result<()> {
    limited(disk, || make_and_activate(disk, how))
}

fn make_and_activate(disk: &Path, how: SwapOn) -> Result<()> {
    make(disk, how.force)?;
    activate(disk, how)
}

fn make(disk: &Path, force: bool) -> Result<()> {
    let program = tool("mkswap").ok_or_else(|| {
        Error::new(
            ErrorKind::Unsupported,
            format!(
                "cannot make {} swap: the program mkswap is missing: install util-linux",
                disk.display()
            ),
        )
    })?;
    let output = Command::new(&program)
        .args(force.then_some("--force"))
        .arg(disk)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| Error::os(format!("cannot run {}", program.display()), error))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().rfind(|line| !line.trim().is_empty());
    Err(Error::new(
        ErrorKind::Io,
        match said {
            Some(said) => format!("cannot make {} swap: {}", disk.display(), said.trim()),
            None => format!(
                "cannot make {} swap: mkswap: {}",
                disk.display(),
                output.status
            ),
        },
    ))
}

fn activate(disk: &Path, how: SwapOn) -> Result<()> {
    let path = c_path(disk)?;
    // SAFETY: a system call that reads the NUL-terminated path, which outlives it.
    let result = unsafe { libc::swapon(path.as_ptr(), how.flags()) };
    Errno::result(result).map(drop).map_err(|errno| {
        let what = format!("cannot swap to {}", disk.display());
        match errno {
            Errno::EPERM => Error::new(ErrorKind::Permission, format!("{what}: that needs root")),
            Errno::EBUSY => Error::new(ErrorKind::Busy, format!("{what}: it is in use")),
            Errno::EINVAL => Error::new(
                ErrorKind::Unsupported,
                format!("{what}: the kernel does not take its swap signature (`dmesg` says why)"),
            ),
            errno => Error::os(what, errno),
        }
    })
}

/// A path for a system call.
pub(super) fn c_path(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Error::usage(format!("the path {} holds a NUL", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_swapon() {
        let how = SwapOn {
            priority: 50,
            discard: false,
            force: false,
        };
        assert_eq!(how.flags(), 0x8032);
        assert_eq!(
            SwapOn {
                priority: 32767,
                discard: true,
                ..how
            }
            .flags(),
            0x1ffff
        );
        assert_eq!(SwapOn { priority: 0, ..how }.flags(), 0x8000);
    }

    #[test]
    fn what_is_on_a_disk_is_not_overwritten() {
        let disk = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(disk.path(), vec![1u8; 1 << 20]).unwrap();
        let how = SwapOn {
            priority: 0,
            discard: false,
            force: false,
        };
        // Random bytes are no signature to wipefs; without wipefs they are refused.
        if super::super::tool("wipefs").is_none() {
            assert_eq!(swap_on(disk.path(), how).unwrap_err().kind, ErrorKind::Busy);
        }
        let error = make_and_swap_on(Path::new("/dev/null"), how).unwrap_err();
        assert!(
            error.message.starts_with("cannot make /dev/null swap: "),
            "{error}"
        );
    }
}
