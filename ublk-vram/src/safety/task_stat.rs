//! /proc/PID/task/TID/stat: the few fields this crate asks for, by their number in proc(5).

use super::root::Root;
use crate::error::{Error, ErrorKind, Result};

/// Fields of one thread's stat file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TaskStat {
    /// Field 9: PF_ flags (include/linux/sched.h).
    pub(super) flags: u32,
    /// Field 10: page faults that needed no disk.
    pub(super) minor_faults: u64,
    /// Field 12: page faults that waited for a disk.
    pub(super) major_faults: u64,
}

/// Reads the stat file of thread `tid` of process `pid` (`self` is fine).
///
/// # Errors
/// The thread is gone, or the file cannot be understood.
pub(super) fn read(root: &Root, pid: impl std::fmt::Display, tid: i32) -> Result<TaskStat> {
    let path = format!("/proc/{pid}/task/{tid}/stat");
    let text = root.read_text(&path)?;
    parse(&text)
        .ok_or_else(|| Error::new(ErrorKind::Io, format!("cannot understand {path}: '{text}'")))
}

fn parse(text: &str) -> Option<TaskStat> {
    // The thread's name is field 2, in parentheses, and may itself hold spaces and parentheses:
    // field 3 begins after the last one that closes.
    let (_, after_name) = text.rsplit_once(')')?;
    let field = |number: usize| after_name.split_ascii_whitespace().nth(number - 3);
    Some(TaskStat {
        flags: field(9)?.parse().ok()?,
        minor_faults: field(10)?.parse().ok()?,
        major_faults: field(12)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_hold_anything() {
        for name in ["cat", "a b", "x) R 1 (y", ")))", ""] {
            let text =
                format!("7112 ({name}) S 1 7108 3744 0 -1 1572928 101 2 3 4 0 0 0 0 20 0 1 0");
            let stat = parse(&text).unwrap();
            assert_eq!(
                stat,
                TaskStat {
                    flags: 1_572_928,
                    minor_faults: 101,
                    major_faults: 3
                }
            );
        }
        assert_eq!(parse("7112 (cat) S 1 2"), None);
        assert_eq!(parse(""), None);
    }

    #[test]
    fn this_thread() {
        let first = nix::unistd::getpid().as_raw();
        assert!(read(&Root::default(), "self", first).unwrap().minor_faults > 0);
        assert_eq!(
            read(&Root::default(), "self", 0).unwrap_err().kind,
            ErrorKind::NotFound
        );
    }
}
