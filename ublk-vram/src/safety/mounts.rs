//! /proc/PID/mountinfo: what is mounted where, in the mount namespace of that process.

use std::path::{Path, PathBuf};

use super::root::{DeviceNumber, Root, parse_device_number, unescape};
use crate::error::{Error, ErrorKind, Result};

/// One line of mountinfo (Documentation/filesystems/proc.rst, section 3.5).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Unique on the whole machine, not only in one mount namespace.
    pub mount_id: u64,
    /// The mount it is mounted on.
    pub parent: u64,
    /// The device of its files. Filesystems that span devices (btrfs, bcachefs) have a number of
    /// their own here, with major 0, and only [`Mount::source`] names a disk.
    pub dev: DeviceNumber,
    /// Which part of the filesystem: `/` unless it is a bind mount.
    pub root: PathBuf,
    /// Where, as seen from the root directory of the process that reads.
    pub mount_point: PathBuf,
    /// `shared:N`, `master:N`, ...
    pub propagation: Vec<String>,
    /// `ext4`, `tmpfs`, ...
    pub fs_type: String,
    /// What was given to mount(2) as the source: a device, a server, or anything at all.
    pub source: PathBuf,
    /// Options of the filesystem, separated by commas.
    pub super_options: String,
}

impl Mount {
    /// Whether this is a mount of the block device with this number and kernel name.
    ///
    /// The source is looked at only where the number says nothing, and only if it looks like a
    /// device node: stat(2) of any path could wait for a server that is gone.
    pub fn is_of(&self, root: &Root, number: DeviceNumber, kname: &str) -> bool {
        if self.dev.0 != 0 {
            return self.dev == number;
        }
        if !self.source.is_absolute() {
            return false;
        }
        let same_name = self.source.file_name().is_some_and(|name| name == kname);
        if !same_name && !self.source.starts_with("/dev") {
            return false;
        }
        root.block_device(&self.source)
            .map_or(same_name, |node| node == number)
    }
}

/// The mounts in the mount namespace of process `pid` (`self` and `thread-self` are fine too).
///
/// # Errors
/// The file cannot be read (the process is gone: [`ErrorKind::NotFound`]) or understood.
pub fn read_mounts(root: &Root, pid: impl std::fmt::Display) -> Result<Vec<Mount>> {
    parse_mountinfo(root.read(format!("/proc/{pid}/mountinfo"))?)
}

/// Reads the text of a mountinfo file.
///
/// # Errors
/// [`ErrorKind::Io`] with the line that is not one of mountinfo.
pub fn parse_mountinfo(text: impl AsRef<[u8]>) -> Result<Vec<Mount>> {
    text.as_ref()
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            parse_line(line).ok_or_else(|| {
                Error::new(
                    ErrorKind::Io,
                    format!(
                        "mountinfo: cannot understand '{}'",
                        String::from_utf8_lossy(line)
                    ),
                )
            })
        })
        .collect()
}

fn parse_line(line: &[u8]) -> Option<Mount> {
    // One space between fields: a source may be empty, so two spaces are an empty field.
    let mut fields = line.split(|byte| *byte == b' ');
    let text = |field: Option<&[u8]>| String::from_utf8(field?.to_vec()).ok();
    let mount_id = text(fields.next())?.parse().ok()?;
    let parent = text(fields.next())?.parse().ok()?;
    let dev = parse_device_number(&text(fields.next())?)?;
    let root = unescape(fields.next()?);
    let mount_point = unescape(fields.next()?);
    let _mount_options = fields.next()?;
    let mut propagation = Vec::new();
    loop {
        match text(fields.next())? {
            end if end == "-" => break,
            field => propagation.push(field),
        }
    }
    Some(Mount {
        mount_id,
        parent,
        dev,
        root,
        mount_point,
        propagation,
        fs_type: unescape(fields.next()?).to_string_lossy().into_owned(),
        source: unescape(fields.next()?),
        super_options: String::from_utf8_lossy(fields.next().unwrap_or_default()).into_owned(),
    })
}

/// How /proc hides processes from this one: the `hidepid` option of the /proc that `mounts` shows,
/// if it is set to anything but off.
pub(super) fn hidepid(mounts: &[Mount]) -> Option<&str> {
    let proc = mounts
        .iter()
        .rev()
        .find(|m| m.fs_type == "proc" && m.mount_point == Path::new("/proc"))?;
    proc.super_options
        .split(',')
        .find_map(|option| option.strip_prefix("hidepid="))
        .filter(|value| !matches!(*value, "0" | "off"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::safety::fixture::Tree;
    use proptest::prelude::*;

    const MOUNTINFO: &str = "\
22 27 0:21 / /proc rw,relatime - proc proc rw,hidepid=invisible\n\
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard\n\
36 27 259:3 /sub\\040dir /mnt/my\\040disk rw,noatime shared:5 master:1 - ext4 /dev/ublkb0 rw\n\
40 27 0:45 / /srv rw - btrfs /dev/vram/fast rw,subvolid=5\n\
41 27 0:46 / /empty rw - tmpfs  rw\n\
42 27 0:47 / /net rw - nfs server:/dev/ublkb0 rw\n";

    #[test]
    fn escapes_optional_fields_and_empty_ones() {
        let mounts = parse_mountinfo(MOUNTINFO).unwrap();
        assert_eq!(mounts.len(), 6);
        assert_eq!(
            mounts[2],
            Mount {
                mount_id: 36,
                parent: 27,
                dev: (259, 3),
                root: "/sub dir".into(),
                mount_point: "/mnt/my disk".into(),
                propagation: vec!["shared:5".into(), "master:1".into()],
                fs_type: "ext4".into(),
                source: "/dev/ublkb0".into(),
                super_options: "rw".into(),
            }
        );
        assert_eq!(mounts[0].propagation, Vec::<String>::new());
        assert_eq!(mounts[4].source, Path::new(""));
        assert_eq!(
            (mounts[4].fs_type.as_str(), mounts[4].super_options.as_str()),
            ("tmpfs", "rw")
        );
        assert_eq!(hidepid(&mounts), Some("invisible"));
        assert_eq!(hidepid(&mounts[1..]), None);
        for off in ["rw", "rw,hidepid=0", "rw,hidepid=off"] {
            let text = format!("22 27 0:21 / /proc rw - proc proc {off}");
            assert_eq!(hidepid(&parse_mountinfo(text).unwrap()), None);
        }
    }

    #[test]
    fn by_number_or_where_there_is_none_by_source() {
        let tree = Tree::new();
        tree.block("/dev/ublkb0", (259, 3));
        tree.link("/dev/vram/fast", "../ublkb0");
        let mounts = parse_mountinfo(MOUNTINFO).unwrap();
        let of = |number, kname| {
            mounts
                .iter()
                .filter(|m| m.is_of(&tree.root(), number, kname))
                .map(|m| m.mount_id)
                .collect::<Vec<_>>()
        };
        assert_eq!(of((259, 3), "ublkb0"), [36, 40]);
        assert_eq!(of((259, 4), "ublkb0"), Vec::<u64>::new());
        assert_eq!(of((254, 0), "vda"), [27]);
    }

    #[test]
    fn a_broken_line_is_an_error() {
        for text in [
            "22 27 0:21 / /proc rw",
            "22 27 21 / / rw - a b c",
            "x 27 0:1 / / rw - a b c",
        ] {
            assert_eq!(
                parse_mountinfo(text).unwrap_err().kind,
                ErrorKind::Io,
                "{text}"
            );
        }
    }

    #[test]
    fn this_machine() {
        let mounts = read_mounts(&Root::default(), "self").unwrap();
        assert!(mounts.iter().any(|m| m.mount_point == Path::new("/proc")));
        let gone = read_mounts(&Root::default(), i32::MAX).unwrap_err();
        assert_eq!(gone.kind, ErrorKind::NotFound);
    }

    proptest! {
        #[test]
        fn any_bytes_are_mounts_or_an_error(bytes: Vec<u8>) {
            let _ = parse_mountinfo(bytes);
        }
    }
}
