//! Memory that was locked with everything else and that no request needs: programs' text that a GPU's
//! driver brought along.
//!
//! Only pages that are exactly what their file holds are given back, so one that is needed all the same
//! is read from the disk again. Nothing else may depend on that never happening.

use super::smaps::{Mapped, read_smaps};
use crate::error::Result;

/// Unlocks, and gives back, what is mapped of files whose name (without its directories) begins with one
/// of `names`: private mappings that nobody can write to and that hold no page of this process's own
/// (relocated ones). Bytes that were in memory; other processes may keep them there.
///
/// # Errors
/// /proc/self/smaps cannot be read: nothing was changed.
pub fn unlock_files(names: &[&str]) -> Result<u64> {
    let mut bytes = 0;
    if names.is_empty() {
        return Ok(bytes);
    }
    for mapped in read_smaps()?.iter().filter(|mapped| is_cold(mapped, names)) {
        let at = std::ptr::without_provenance_mut(mapped.range.start);
        // SAFETY: munlock changes no contents. MADV_DONTNEED drops pages that are the file's: the mapping
        // is private, not writable and without pages of its own (`is_cold`), and the dynamic linker, which
        // alone could write to it, is done with libraries that have been used. A later access reads the
        // same bytes from the file (madvise(2)).
        let given_back = unsafe {
            libc::munlock(at, mapped.range.len()) == 0
                && libc::madvise(at, mapped.range.len(), libc::MADV_DONTNEED) == 0
        };
        bytes += if given_back { mapped.resident << 10 } else { 0 };
    }
    Ok(bytes)
}

/// Whether [`unlock_files`] means it.
fn is_cold(mapped: &Mapped, names: &[&str]) -> bool {
    let is_named = names.iter().any(|name| mapped.file.starts_with(name));
    is_named && mapped.is_private && !mapped.is_writable && mapped.anonymous == 0
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::safety::fixture::in_child;
    use crate::safety::smaps::parse_smaps;
    use crate::safety::{Root, lock_memory, read_status};

    const SMAPS: &str = "\
7f00-9f00 r-xp 00000000 fe:00 1  /usr/lib/libcompiler.so.5
Rss:                   8 kB
Anonymous:             0 kB
9f00-af00 r--p 00002000 fe:00 1  /usr/lib/libcompiler.so.5
Rss:                   4 kB
Anonymous:             4 kB
af00-bf00 rw-p 00003000 fe:00 1  /usr/lib/libcompiler.so.5
Rss:                   4 kB
Anonymous:             0 kB
bf00-cf00 r--s 00003000 fe:00 1  /usr/lib/libcompiler.so.5
Rss:                   4 kB
Anonymous:             0 kB
cf00-df00 r-xp 00000000 fe:00 2  /usr/lib/libcore.so.5
Rss:                   4 kB
Anonymous:             0 kB
df00-ef00 r--p 00000000 00:00 0
Rss:                   4 kB
Anonymous:             0 kB
";

    #[test]
    fn only_pages_that_are_the_files_own_are_meant() {
        let cold = |names: &[&str]| -> Vec<Mapped> {
            let all = parse_smaps(SMAPS);
            all.into_iter()
                .filter(|mapped| is_cold(mapped, names))
                .collect()
        };
        let found = cold(&["libcompiler.so", "libother.so"]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            (found[0].range.clone(), found[0].resident),
            (0x7f00..0x9f00, 8)
        );
        assert_eq!(cold(&["lib"]).len(), 2, "text of both libraries");
        assert!(cold(&[]).is_empty());
    }

    #[test]
    fn a_locked_file_is_given_back_and_still_reads_as_it_is() {
        const LEN: usize = 4 << 20;
        let said = in_child(|| {
            let mut file = tempfile::Builder::new().prefix("cold-").tempfile().unwrap();
            file.write_all(&vec![7; LEN]).unwrap();
            lock_memory().unwrap();
            // SAFETY: a new mapping at an address of the kernel's choice.
            let at = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    LEN,
                    libc::PROT_READ,
                    libc::MAP_PRIVATE,
                    file.as_file().as_raw_fd(),
                    0,
                )
            };
            assert_ne!(at, libc::MAP_FAILED);
            let before = read_status(&Root::default()).unwrap();
            assert_eq!(unlock_files(&["other-"]).unwrap(), 0);
            assert_eq!(unlock_files(&["cold-"]).unwrap(), LEN as u64);
            let after = read_status(&Root::default()).unwrap();
            assert_eq!(before.locked - after.locked, LEN as u64);
            assert!(before.resident - after.resident >= LEN as u64);
            // SAFETY: mapped for `LEN` bytes, and read-only.
            let bytes = unsafe { std::slice::from_raw_parts(at.cast::<u8>(), LEN) };
            assert!(bytes.iter().all(|byte| *byte == 7));
            "done".to_owned()
        });
        assert_eq!(said, "done");
    }
}
