//! The guest's console: kept whole in memory, with a time on each line in a file, and watched for a
//! panic.

use std::{
    fs::File,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

/// What the kernel prints first when it gives up.
const PANIC: &str = "Kernel panic - not syncing: ";
/// How much of the console goes into an error.
const TAIL: usize = 12_000;

/// The host's end of the serial console.
pub(crate) struct Console {
    input: UnixStream,
    state: Arc<Mutex<State>>,
    log: PathBuf,
    reader: Mutex<Option<JoinHandle<()>>>,
}

struct State {
    text: String,
    line_start: usize,
    last_byte: Instant,
    panic: Option<String>,
    log: File,
    started: Instant,
    tee: bool,
}

impl Console {
    /// Reads `stream` until QEMU closes it.
    pub(crate) fn start(stream: UnixStream, log: &Path) -> Result<Self> {
        if let Some(parent) = log.parent() {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("cannot make {}", parent.display()))?;
        }
        let file =
            File::create(log).with_context(|| format!("cannot write the log {}", log.display()))?;
        let state = Arc::new(Mutex::new(State {
            text: String::new(),
            line_start: 0,
            last_byte: Instant::now(),
            panic: None,
            log: file,
            started: Instant::now(),
            tee: false,
        }));
        let input = stream
            .try_clone()
            .context("cannot copy the console's descriptor")?;
        let shared = state.clone();
        let reader = thread::Builder::new()
            .name("vmrig-console".into())
            .spawn(move || read_all(stream, &shared))
            .context("cannot start a thread")?;
        Ok(Self {
            input,
            state,
            log: log.to_owned(),
            reader: Mutex::new(Some(reader)),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All that was printed so far.
    pub(crate) fn text(&self) -> String {
        self.state().text.clone()
    }

    /// Whether `needle` was printed.
    pub(crate) fn contains(&self, needle: &str) -> bool {
        self.state().text.contains(needle)
    }

    /// The last part, for an error.
    pub(crate) fn tail(&self) -> String {
        let state = self.state();
        let mut start = state.text.len().saturating_sub(TAIL);
        while !state.text.is_char_boundary(start) {
            start += 1;
        }
        let tail = state.text.get(start..).unwrap_or_default().trim_end();
        format!("{tail}\n--- whole console: {} ---", self.log.display())
    }

    /// The kernel's reason, once it panicked.
    pub(crate) fn panic(&self) -> Option<String> {
        self.state().panic.clone()
    }

    /// Types `bytes` on the console.
    pub(crate) fn write(&self, bytes: &[u8]) -> std::io::Result<()> {
        (&self.input).write_all(bytes)
    }

    /// Writes a remark of the host's into the log: what happened when, seen from outside.
    pub(crate) fn note(&self, remark: &str) {
        let mut state = self.state();
        let seconds = state.started.elapsed().as_secs_f64();
        let line: String = remark
            .trim()
            .lines()
            .next()
            .unwrap_or_default()
            .chars()
            .take(200)
            .collect();
        let _ = writeln!(state.log, "[{seconds:10.3}] host: {line}");
    }

    /// Copies what comes from now on to stdout as well.
    pub(crate) fn tee(&self, on: bool) {
        self.state().tee = on;
    }

    /// Waits until nothing was printed for `gap`, or for `limit`.
    pub(crate) fn settle(&self, gap: Duration, limit: Duration) {
        let deadline = Instant::now() + limit;
        thread::sleep(gap);
        while self.state().last_byte.elapsed() < gap && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits for the last byte; only after QEMU ended.
    pub(crate) fn join(&self) {
        let reader = self
            .reader
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(reader) = reader {
            let _ = reader.join();
        }
    }

    /// Where the log is.
    pub(crate) fn log_path(&self) -> &Path {
        &self.log
    }
}

fn read_all(mut stream: UnixStream, state: &Mutex<State>) {
    let mut buffer = [0; 4096];
    loop {
        let bytes = match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => buffer.get(..length).unwrap_or_default(),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(_) => break,
        };
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.tee {
            let mut stdout = std::io::stdout();
            let _ = stdout.write_all(bytes).and_then(|()| stdout.flush());
        }
        state.take(bytes);
    }
    state
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .end_line();
}

impl State {
    fn take(&mut self, bytes: &[u8]) {
        self.last_byte = Instant::now();
        for character in String::from_utf8_lossy(bytes).chars() {
            match character {
                '\r' => {}
                '\n' => {
                    self.end_line();
                    self.text.push('\n');
                    self.line_start = self.text.len();
                }
                _ => self.text.push(character),
            }
        }
    }

    fn end_line(&mut self) {
        let line = self.text.get(self.line_start..).unwrap_or_default();
        if line.is_empty() {
            return;
        }
        if self.panic.is_none()
            && let Some((_, reason)) = line.split_once(PANIC)
        {
            self.panic = Some(reason.to_owned());
        }
        let _ = writeln!(
            self.log,
            "[{:10.3}] {line}",
            self.started.elapsed().as_secs_f64()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_stamped_and_a_panic_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let (host, mut qemu) = UnixStream::pair().unwrap();
        let console = Console::start(host, &dir.path().join("logs/x.log")).unwrap();
        qemu.write_all(b"[    1.0] hello\r\n[    2.0] Kernel panic - not syncing: sysrq")
            .unwrap();
        qemu.write_all(b" triggered crash\r\nlast").unwrap();
        drop(qemu);
        console.join();
        assert_eq!(console.panic().as_deref(), Some("sysrq triggered crash"));
        assert!(console.contains("hello\n[    2.0]"));
        let log = std::fs::read_to_string(console.log_path()).unwrap();
        assert_eq!(log.lines().count(), 3);
        assert!(log.starts_with("[     0.") && log.trim_end().ends_with("last"));
    }
}
