//! Where /proc, /sys and /dev are looked for, so that everything that reads them can be tested on a
//! tree of plain files, without root.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Major and minor number of a device node.
pub type DeviceNumber = (u32, u32);

/// The directory that stands for `/`.
///
/// Every path given to its methods is absolute as the host knows it (`/proc/swaps`). Under another
/// root than `/` a plain file that holds `block MAJ:MIN` stands for a block device node, because
/// only root may make real ones.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root(PathBuf);

impl Default for Root {
    fn default() -> Self {
        Root(PathBuf::from("/"))
    }
}

impl Root {
    /// The tree below `directory`.
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Root(directory.into())
    }

    /// Where `path` is in this tree.
    pub fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        let path = path.as_ref();
        self.0.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The bytes of a file.
    ///
    /// # Errors
    /// The error of open(2) or read(2), with the path.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Vec<u8>> {
        let path = self.path(path);
        fs::read(&path).map_err(|e| Error::os(format_args!("cannot read {}", path.display()), e))
    }

    /// The text of a file, without the line break at its end.
    ///
    /// # Errors
    /// As [`Root::read`]; bytes that are not UTF-8 are replaced, not refused.
    pub fn read_text(&self, path: impl AsRef<Path>) -> Result<String> {
        let bytes = self.read(path)?;
        Ok(String::from_utf8_lossy(&bytes)
            .trim_end_matches('\n')
            .to_owned())
    }

    /// The text a symbolic link holds.
    pub(super) fn read_link(&self, path: impl AsRef<Path>) -> io::Result<PathBuf> {
        fs::read_link(self.path(path))
    }

    /// The names in a directory, sorted; none if there is no such directory.
    pub(super) fn names(&self, path: impl AsRef<Path>) -> io::Result<Vec<OsString>> {
        let mut names = match fs::read_dir(self.path(path)) {
            Ok(entries) => entries
                .map(|e| e.map(|e| e.file_name()))
                .collect::<io::Result<Vec<_>>>()?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(e),
        };
        names.sort();
        Ok(names)
    }

    /// The device number of the block device node at `path` (links are followed); `None` for
    /// anything else, and for what cannot be looked at.
    pub fn block_device(&self, path: impl AsRef<Path>) -> Option<DeviceNumber> {
        let path = self.path(path);
        let about = fs::metadata(&path).ok()?;
        if about.file_type().is_block_device() {
            return Some((libc::major(about.rdev()), libc::minor(about.rdev())));
        }
        if self.0 != Path::new("/") && about.is_file() && about.len() < 64 {
            return parse_device_number(fs::read_to_string(&path).ok()?.strip_prefix("block ")?);
        }
        None
    }
}

/// `259:3` as the kernel writes a device number in sysfs and in mountinfo.
pub(super) fn parse_device_number(text: &str) -> Option<DeviceNumber> {
    let (major, minor) = text.trim_end().split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// A path as the kernel escapes it in /proc/swaps and mountinfo: a backslash and three octal digits
/// stand for one byte (seq_path with " \t\n\\" and "#").
pub(super) fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        bytes.push(first);
        if first != b'\\' {
            continue;
        }
        if let Some((digits, after)) = tail.split_first_chunk::<3>() {
            let value = digits.iter().try_fold(0u32, |sum, digit| match digit {
                b'0'..=b'7' => Some(sum * 8 + u32::from(digit - b'0')),
                _ => None,
            });
            if let Some(byte) = value.and_then(|v| u8::try_from(v).ok()) {
                bytes.pop();
                bytes.push(byte);
                rest = after;
            }
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safety::fixture::Tree;

    #[test]
    fn octal_escapes() {
        for (field, path) in [
            (&b"/dev/sda1"[..], "/dev/sda1"),
            (b"/mnt/a\\040b", "/mnt/a b"),
            (b"/mnt/\\134x", "/mnt/\\x"),
            (b"\\040(deleted)", " (deleted)"),
            (b"/a\\04", "/a\\04"),
            (b"/a\\999", "/a\\999"),
            (b"/a\\777", "/a\\777"),
            (b"", ""),
            (b"\\", "\\"),
        ] {
            assert_eq!(unescape(field), Path::new(path));
        }
        assert_eq!(
            unescape(b"/\xff\\012").into_os_string().into_vec(),
            b"/\xff\n"
        );
    }

    #[test]
    fn a_fixture_node_is_a_file_only_below_another_root() {
        let tree = Tree::new();
        tree.block("/dev/ublkb0", (259, 3));
        tree.link("/dev/vram/fast", "../ublkb0");
        tree.file("/dev/null", "");
        assert_eq!(tree.root().block_device("/dev/ublkb0"), Some((259, 3)));
        assert_eq!(tree.root().block_device("/dev/vram/fast"), Some((259, 3)));
        assert_eq!(tree.root().block_device("/dev/null"), None);
        let real = Root::default();
        assert_eq!(real.block_device(tree.root().path("/dev/ublkb0")), None);
        assert_eq!(real.block_device("/dev/null"), None);
    }

    #[test]
    fn a_missing_file_is_named() {
        let tree = Tree::new();
        let error = tree.root().read("/proc/swaps").unwrap_err();
        assert!(error.message.contains("/proc/swaps"), "{error}");
        assert_eq!(error.kind, crate::error::ErrorKind::NotFound);
        assert!(tree.root().names("/sys/block").unwrap().is_empty());
    }
}
