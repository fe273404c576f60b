//! What this process has mapped, and how much of it is in memory.

use std::ops::Range;

use super::root::Root;
use crate::error::Result;

/// One mapping, as /proc/PID/smaps tells of it (proc_pid_smaps(5)); sizes are in KiB.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mapped {
    /// Its addresses.
    pub range: Range<usize>,
    /// Nobody else sees what is written to it.
    pub is_private: bool,
    /// It can be written to.
    pub is_writable: bool,
    /// The file's name without its directories; empty if it is no file's.
    pub file: String,
    /// Rss: what is in memory.
    pub resident: u64,
    /// Anonymous: what of it is this process's own, and no file's.
    pub anonymous: u64,
    /// Locked.
    pub locked: u64,
    /// Referenced: what was accessed since the marks were cleared (clear_refs).
    pub referenced: u64,
}

/// The mappings of this process.
///
/// # Errors
/// /proc/self/smaps cannot be read.
pub fn read_smaps() -> Result<Vec<Mapped>> {
    let text = Root::default().read_text("/proc/self/smaps")?;
    Ok(parse_smaps(&text))
}

pub(super) fn parse_smaps(text: &str) -> Vec<Mapped> {
    let mut all: Vec<Mapped> = Vec::new();
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(first), Some(second)) = (words.next(), words.next()) else {
            continue;
        };
        let Some(key) = first.strip_suffix(':') else {
            // address perms offset dev inode path
            let path = words.nth(3).unwrap_or_default();
            let number = |hex| usize::from_str_radix(hex, 16).unwrap_or(0);
            let (start, end) = first.split_once('-').unwrap_or_default();
            all.push(Mapped {
                range: number(start)..number(end),
                is_private: second.ends_with('p'),
                is_writable: second.contains('w'),
                file: path.rsplit('/').next().unwrap_or(path).to_owned(),
                ..Mapped::default()
            });
            continue;
        };
        let Some(mapped) = all.last_mut() else {
            continue;
        };
        let value = match key {
            "Rss" => &mut mapped.resident,
            "Anonymous" => &mut mapped.anonymous,
            "Locked" => &mut mapped.locked,
            "Referenced" => &mut mapped.referenced,
            _ => continue,
        };
        // What is not understood is taken for much, never for none.
        *value = second.parse().unwrap_or(u64::MAX >> 32);
    }
    all
}
