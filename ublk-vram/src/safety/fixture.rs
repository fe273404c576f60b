//! What the tests of this room share: a tree of plain files that stands for `/`, and a child process
//! to try things in that must not happen to the test process.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, alarm, fork};

use super::root::{DeviceNumber, Root};

pub(super) struct Tree {
    directory: tempfile::TempDir,
}

impl Tree {
    pub(super) fn new() -> Self {
        Tree {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    pub(super) fn root(&self) -> Root {
        Root::at(self.directory.path())
    }

    pub(super) fn file(&self, path: &str, content: &str) {
        let path = self.root().path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }

    pub(super) fn block(&self, path: &str, number: DeviceNumber) {
        self.file(path, &format!("block {}:{}\n", number.0, number.1));
    }

    pub(super) fn directory(&self, path: &str) {
        fs::create_dir_all(self.root().path(path)).unwrap();
    }

    pub(super) fn link(&self, path: &str, target: impl AsRef<Path>) {
        let path = self.root().path(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }
}

/// Runs `body` in a forked child and gives back the text it ends with; a panic in it, its death, or
/// half a minute without an end fails the test.
pub(super) fn in_child(body: impl FnOnce() -> String) -> String {
    let (mut reader, mut writer) = std::io::pipe().unwrap();
    // SAFETY: the child is a copy of this thread only. It takes no lock of the test harness (it
    // writes to its pipe and leaves by _exit), glibc makes malloc usable after fork, and an alarm
    // ends it should another thread have held something else.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            alarm::set(30);
            drop(reader);
            let (text, code) = match catch_unwind(AssertUnwindSafe(body)) {
                Ok(text) => (text, 0),
                Err(panic) => {
                    let text = panic
                        .downcast_ref::<String>()
                        .cloned()
                        .or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                    (text.unwrap_or_default(), 101)
                }
            };
            let _ = writer.write_all(text.as_bytes());
            // SAFETY: _exit only ends the process.
            unsafe { libc::_exit(code) }
        }
        ForkResult::Parent { child } => {
            drop(writer);
            let mut text = String::new();
            reader.read_to_string(&mut text).unwrap();
            let status = waitpid(child, None).unwrap();
            assert_eq!(
                status,
                WaitStatus::Exited(child, 0),
                "the child said: {text}"
            );
            text
        }
    }
}
