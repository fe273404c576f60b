//! /proc/swaps: what the kernel swaps to.
//!
//! A disk that went away while it was swap is still listed, as `/dev/ublkb0\040(deleted)`: a ghost.
//! `swapoff /dev/ublkb0` cannot reach it any more, and its memory must not be reused, so the suffix
//! is understood here and nowhere else.

use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use super::root::{DeviceNumber, Root, unescape};
use crate::error::{Error, ErrorKind, Result};

/// One line of /proc/swaps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapEntry {
    /// The device or file, unescaped and without the ` (deleted)` suffix.
    pub path: PathBuf,
    /// Whether its directory entry is gone: for a device, the device itself is.
    pub deleted: bool,
    /// `partition` (any block device) or `file`.
    pub kind: String,
    /// Bytes.
    pub size: u64,
    /// Bytes in use.
    pub used: u64,
    /// The higher, the earlier used; negative where the kernel chose it.
    pub priority: i32,
}

impl SwapEntry {
    /// Whether this entry is a ublk disk that is gone.
    pub fn is_ghost(&self) -> bool {
        self.deleted && self.path.as_os_str().as_bytes().starts_with(b"/dev/ublkb")
    }

    /// Whether this entry is the block device with this number and kernel name.
    ///
    /// The number of the node decides. Only where no node can be looked at, because the device is
    /// a ghost or was swapped on in another mount namespace, the last part of the path does.
    pub fn is_on(&self, root: &Root, number: DeviceNumber, kname: &str) -> bool {
        if self.kind == "file" {
            return false;
        }
        let node = if self.deleted {
            None
        } else {
            root.block_device(&self.path)
        };
        match node {
            Some(node) => node == number,
            None => self.path.file_name().is_some_and(|name| name == kname),
        }
    }
}

/// The entries of /proc/swaps.
///
/// # Errors
/// The file cannot be read or understood. A kernel built without swap has no such file: that is an
/// empty list, but only if /proc shows its other files (it hides them with `subset=pid`).
pub fn read_swaps(root: &Root) -> Result<Vec<SwapEntry>> {
    match root.read("/proc/swaps") {
        Ok(bytes) => parse_swaps(bytes),
        Err(e) if e.kind == ErrorKind::NotFound && root.path("/proc/meminfo").exists() => {
            Ok(Vec::new())
        }
        Err(e) => Err(e),
    }
}

/// The ublk disks among `entries` that are gone.
pub fn ghosts(entries: &[SwapEntry]) -> Vec<&SwapEntry> {
    entries.iter().filter(|entry| entry.is_ghost()).collect()
}

/// Reads the text of /proc/swaps (mm/swapfile.c, swap_show: sizes in KiB, path escaped).
///
/// # Errors
/// [`ErrorKind::Io`] with the line that is not one of /proc/swaps.
pub fn parse_swaps(text: impl AsRef<[u8]>) -> Result<Vec<SwapEntry>> {
    text.as_ref()
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty() && !line.starts_with(b"Filename"))
        .map(|line| {
            parse_line(line).ok_or_else(|| {
                Error::new(
                    ErrorKind::Io,
                    format!(
                        "/proc/swaps: cannot understand '{}'",
                        String::from_utf8_lossy(line)
                    ),
                )
            })
        })
        .collect()
}

fn parse_line(line: &[u8]) -> Option<SwapEntry> {
    let mut fields = line
        .split(|byte| *byte == b' ' || *byte == b'\t')
        .filter(|field| !field.is_empty());
    let mut path = unescape(fields.next()?).into_os_string().into_vec();
    let mut text = || std::str::from_utf8(fields.next()?).ok();
    let deleted = path.ends_with(b" (deleted)");
    if deleted {
        path.truncate(path.len() - b" (deleted)".len());
    }
    Some(SwapEntry {
        path: Path::new(std::ffi::OsStr::from_bytes(&path)).to_path_buf(),
        deleted,
        kind: text()?.to_owned(),
        size: text()?.parse::<u64>().ok()?.checked_mul(1024)?,
        used: text()?.parse::<u64>().ok()?.checked_mul(1024)?,
        priority: text()?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safety::fixture::Tree;
    use proptest::prelude::*;

    const SWAPS: &str = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n\
        /dev/ublkb0\\040(deleted)                 partition\t4194300\t\t38092\t\t100\n\
        /swap\\040files/one                      file    \t1048572\t\t0\t\t-2\n\
        /dev/dm-1                               partition\t8388604\t\t12\t\t-3\n";

    #[test]
    fn ghosts_escapes_and_priorities() {
        let entries = parse_swaps(SWAPS).unwrap();
        assert_eq!(entries.len(), 3);
        assert_eq!(
            entries[0],
            SwapEntry {
                path: "/dev/ublkb0".into(),
                deleted: true,
                kind: "partition".into(),
                size: 4_194_300 << 10,
                used: 38092 << 10,
                priority: 100,
            }
        );
        assert_eq!(entries[1].path, Path::new("/swap files/one"));
        assert_eq!((entries[2].priority, entries[2].deleted), (-3, false));
        assert_eq!(ghosts(&entries), [&entries[0]]);
    }

    #[test]
    fn a_line_that_is_none_is_an_error_not_no_swap() {
        for text in ["/dev/sda1 partition 12\n", "/dev/sda1 partition x 0 -2\n"] {
            let error = parse_swaps(text).unwrap_err();
            assert!(error.message.contains("/dev/sda1 partition"), "{error}");
        }
        assert!(
            parse_swaps("Filename Type Size Used Priority\n")
                .unwrap()
                .is_empty()
        );
    }

    #[test]
    fn the_number_of_the_node_decides_not_its_name() {
        let tree = Tree::new();
        tree.block("/dev/ublkb0", (259, 0));
        tree.block("/dev/other-name", (259, 7));
        let entry = |path: &str, deleted, kind: &str| SwapEntry {
            path: path.into(),
            deleted,
            kind: kind.into(),
            size: 0,
            used: 0,
            priority: 0,
        };
        let on = |entry: &SwapEntry, number, kname| entry.is_on(&tree.root(), number, kname);
        assert!(on(
            &entry("/dev/other-name", false, "partition"),
            (259, 7),
            "ublkb7"
        ));
        assert!(!on(
            &entry("/dev/ublkb0", false, "partition"),
            (259, 7),
            "ublkb0"
        ));
        assert!(
            on(&entry("/dev/ublkb0", true, "partition"), (259, 7), "ublkb0"),
            "a ghost"
        );
        assert!(on(
            &entry("/other/dev/ublkb7", false, "partition"),
            (259, 7),
            "ublkb7"
        ));
        assert!(
            !on(&entry("/mnt/ublkb7", false, "file"), (259, 7), "ublkb7"),
            "a swap file"
        );
    }

    #[test]
    fn no_swap_in_the_kernel_is_no_entry_but_a_hidden_file_is_an_error() {
        let tree = Tree::new();
        assert_eq!(
            read_swaps(&tree.root()).unwrap_err().kind,
            ErrorKind::NotFound
        );
        tree.file("/proc/meminfo", "MemTotal: 1 kB\n");
        assert!(read_swaps(&tree.root()).unwrap().is_empty());
        tree.file("/proc/swaps", SWAPS);
        assert_eq!(read_swaps(&tree.root()).unwrap().len(), 3);
        read_swaps(&Root::default()).unwrap();
    }

    proptest! {
        #[test]
        fn any_bytes_are_entries_or_an_error(bytes: Vec<u8>) {
            let _ = parse_swaps(bytes);
        }
    }
}
