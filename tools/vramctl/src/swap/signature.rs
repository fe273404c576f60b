//! What is written on a disk: `swap on` must not overwrite somebody's file system.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use ublk_vram::{Error, Result};

use super::tool;

/// Where file systems and partition tables keep what they are known by, mostly.
const LOOKED_AT: u64 = 64 << 10;
/// The signature of mkswap, in the last 10 bytes of the first page.
const SWAP_SIGNATURE: &[u8] = b"SWAPSPACE2";

/// What a disk holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// A swap signature for this machine's page size.
    Swap,
    /// Nothing that anybody would miss.
    Nothing,
    /// Something else, in words.
    Other(String),
}

/// Looks at a disk.
///
/// # Errors
/// It cannot be read.
pub fn look(disk: &Path) -> Result<Content> {
    let what = || format!("cannot read {}", disk.display());
    let mut head = Vec::new();
    let file = File::open(disk).map_err(|error| Error::os(what(), error))?;
    file.take(LOOKED_AT)
        .read_to_end(&mut head)
        .map_err(|error| Error::os(what(), error))?;
    if is_swap(&head, page_bytes()) {
        return Ok(Content::Swap);
    }
    // wipefs knows signatures that lie at the disk's end, and their names.
    Ok(match wipefs(disk) {
        Some(found) if found.is_empty() => Content::Nothing,
        Some(found) => Content::Other(format!("a {} signature", found.join(" and a "))),
        None if head.iter().all(|&byte| byte == 0) => Content::Nothing,
        None => {
            Content::Other("data in its first 64K (wipefs, which could name it, is missing)".into())
        }
    })
}

fn is_swap(head: &[u8], page: usize) -> bool {
    page.checked_sub(SWAP_SIGNATURE.len())
        .and_then(|from| head.get(from..page))
        == Some(SWAP_SIGNATURE)
}

fn page_bytes() -> usize {
    nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)
        .ok()
        .flatten()
        .and_then(|bytes| usize::try_from(bytes).ok())
        .unwrap_or(4096)
}

/// The types of all signatures on a disk; `None` if wipefs is not there or could not look.
fn wipefs(disk: &Path) -> Option<Vec<String>> {
    let output = Command::new(tool("wipefs")?)
        .args(["--noheadings", "--output", "TYPE"])
        .arg(disk)
        .stdin(Stdio::null())
        .output()
        .ok()
        .filter(|output| output.status.success())?;
    let text = String::from_utf8_lossy(&output.stdout);
    let mut types: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
    types.dedup();
    Some(types)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_swap_signature_ends_the_first_page() {
        let mut head = vec![0; 65536];
        head[4086..4096].copy_from_slice(b"SWAPSPACE2");
        assert!(is_swap(&head, 4096));
        assert!(!is_swap(&head, 65536), "of another page size it is none");
        assert!(!is_swap(&head[..4095], 4096));
        assert!(!is_swap(&[], 4096));
    }

    #[test]
    fn blank_foreign_and_swap() {
        let mut disk = tempfile::NamedTempFile::new().unwrap();
        disk.write_all(&vec![0; 1 << 20]).unwrap();
        assert_eq!(look(disk.path()).unwrap(), Content::Nothing);

        let fs = tempfile::NamedTempFile::new().unwrap();
        let mut bytes = vec![0u8; 1 << 20];
        // The magic of ext2 in its superblock, and enough of it to be believed.
        bytes[1024..1028].copy_from_slice(&128u32.to_le_bytes());
        bytes[1028..1032].copy_from_slice(&1024u32.to_le_bytes());
        bytes[1080..1082].copy_from_slice(&[0x53, 0xef]);
        std::fs::write(fs.path(), &bytes).unwrap();
        assert!(matches!(look(fs.path()).unwrap(), Content::Other(_)));

        if page_bytes() == 4096 {
            bytes[4086..4096].copy_from_slice(SWAP_SIGNATURE);
            std::fs::write(fs.path(), &bytes).unwrap();
            assert_eq!(look(fs.path()).unwrap(), Content::Swap);
        }
    }
}
