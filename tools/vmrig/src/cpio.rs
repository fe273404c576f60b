//! A writer of "newc" cpio archives, the only format that the kernel unpacks as an initramfs.
//!
//! Each archive ends with its trailer and is padded to 512 bytes, so archives can be concatenated:
//! the kernel unpacks one after the other, later entries replacing earlier ones.

use std::{
    collections::BTreeSet,
    io::{self, Write},
};

const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const S_IFLNK: u32 = 0o120_000;
const S_IFCHR: u32 = 0o020_000;

/// Writes entries to `W`; parent directories are made when a path first needs them.
pub(crate) struct Writer<W: Write> {
    out: W,
    written: u64,
    next_inode: u32,
    seen: BTreeSet<String>,
}

impl<W: Write> Writer<W> {
    pub(crate) fn new(out: W) -> Self {
        Self {
            out,
            written: 0,
            next_inode: 1,
            seen: BTreeSet::new(),
        }
    }

    /// Whether an entry of that path was written already.
    pub(crate) fn contains(&self, path: &str) -> bool {
        self.seen.contains(path.trim_start_matches('/'))
    }

    pub(crate) fn directory(&mut self, path: &str, mode: u32) -> io::Result<()> {
        self.entry(path, S_IFDIR | mode, (0, 0), &[])
    }

    pub(crate) fn file(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.entry(path, S_IFREG | mode, (0, 0), data)
    }

    pub(crate) fn symlink(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, S_IFLNK | 0o777, (0, 0), target.as_bytes())
    }

    pub(crate) fn char_device(
        &mut self,
        path: &str,
        mode: u32,
        node: (u32, u32),
    ) -> io::Result<()> {
        self.entry(path, S_IFCHR | mode, node, &[])
    }

    /// Writes the trailer and returns the number of bytes of the archive.
    pub(crate) fn finish(mut self) -> io::Result<u64> {
        self.next_inode = 0;
        self.raw("TRAILER!!!", 0, (0, 0), &[])?;
        self.pad(512)?;
        self.out.flush()?;
        Ok(self.written)
    }

    fn entry(&mut self, path: &str, mode: u32, node: (u32, u32), data: &[u8]) -> io::Result<()> {
        let path = path.trim_start_matches('/');
        if let Some((parent, _)) = path.rsplit_once('/')
            && !self.seen.contains(parent)
        {
            self.directory(parent, 0o755)?;
        }
        if !self.seen.insert(path.to_owned()) {
            return Ok(());
        }
        self.raw(path, mode, node, data)
    }

    fn raw(&mut self, name: &str, mode: u32, node: (u32, u32), data: &[u8]) -> io::Result<()> {
        let size = u32::try_from(data.len()).map_err(|_| {
            io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("{name}: larger than 4 GiB"),
            )
        })?;
        let links = 1;
        let inode = self.next_inode;
        self.next_inode += 1;
        let header = format!(
            "070701{inode:08X}{mode:08X}{uid:08X}{gid:08X}{links:08X}{mtime:08X}{size:08X}\
             {major:08X}{minor:08X}{rmajor:08X}{rminor:08X}{namesize:08X}{check:08X}{name}\0",
            uid = 0,
            gid = 0,
            mtime = 0,
            major = 0,
            minor = 0,
            rmajor = node.0,
            rminor = node.1,
            namesize = name.len() + 1,
            check = 0,
        );
        self.put(header.as_bytes())?;
        self.pad(4)?;
        self.put(data)?;
        self.pad(4)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.out.write_all(bytes)
    }

    fn pad(&mut self, unit: u64) -> io::Result<()> {
        let missing = self.written.next_multiple_of(unit) - self.written;
        for _ in 0..missing {
            self.put(&[0])?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn sample() -> Vec<u8> {
        let mut out = Vec::new();
        let mut writer = Writer::new(&mut out);
        writer.file("/usr/bin/a", 0o755, b"hello").unwrap();
        writer.file("/usr/bin/a", 0o755, b"a second time").unwrap();
        writer.symlink("/bin", "usr/bin").unwrap();
        writer.char_device("/dev/console", 0o600, (5, 1)).unwrap();
        assert!(writer.contains("/usr/bin/a") && !writer.contains("/usr/bin/b"));
        let length = writer.finish().unwrap();
        assert_eq!(length, out.len() as u64);
        out
    }

    #[test]
    fn layout_is_newc() {
        let archive = sample();
        assert_eq!(archive.len() % 512, 0);
        assert!(archive.starts_with(b"07070100000001000041ED"));
        let text = String::from_utf8_lossy(&archive);
        assert_eq!(text.matches("usr/bin/a\0").count(), 1);
        assert!(text.contains("TRAILER!!!\0"));
    }

    #[test]
    fn cpio_lists_it() {
        let Ok(mut child) = Command::new("cpio")
            .args(["-t", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
        else {
            return; // The tool is not a requirement.
        };
        child.stdin.take().unwrap().write_all(&sample()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        let names = String::from_utf8(output.stdout).unwrap();
        assert_eq!(names, "usr\nusr/bin\nusr/bin/a\nbin\ndev\ndev/console\n");
    }
}
