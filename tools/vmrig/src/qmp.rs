//! QEMU's control protocol: JSON lines over a socket, used for hotplug and to reach a guest that
//! answers nothing else.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader, ErrorKind, Write},
    os::unix::net::UnixStream,
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

/// QEMU answers at once or not at all.
const LIMIT: Duration = Duration::from_secs(10);

/// A connection to QEMU's monitor.
pub(crate) struct Qmp {
    session: Mutex<Session>,
}

struct Session {
    reader: BufReader<UnixStream>,
    partial: String,
    events: VecDeque<Value>,
    ready: bool,
}

impl Qmp {
    pub(crate) fn new(stream: UnixStream) -> Self {
        let reader = BufReader::new(stream);
        let session = Session {
            reader,
            partial: String::new(),
            events: VecDeque::new(),
            ready: false,
        };
        Self {
            session: Mutex::new(session),
        }
    }

    /// Runs one command and returns what is in its `return`.
    pub(crate) fn execute(&self, command: &str, arguments: Value) -> Result<Value> {
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        session.handshake()?;
        session.execute(command, arguments)
    }

    /// Takes the first event of that name out of the queue, waiting for it if need be.
    pub(crate) fn event(&self, name: &str, limit: Duration) -> Result<Value> {
        let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
        session.handshake()?;
        let deadline = Instant::now() + limit;
        loop {
            let place = session
                .events
                .iter()
                .position(|event| event["event"] == name);
            if let Some(event) = place.and_then(|place| session.events.remove(place)) {
                return Ok(event);
            }
            let message = session
                .message(deadline)
                .with_context(|| format!("QEMU reported no {name} within {limit:?}"))?;
            session.events.push_back(message);
        }
    }
}

impl Session {
    fn handshake(&mut self) -> Result<()> {
        if !self.ready {
            self.message(Instant::now() + LIMIT)
                .context("QEMU's monitor sent no greeting")?;
            self.execute("qmp_capabilities", json!({}))?;
            self.ready = true;
        }
        Ok(())
    }

    fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let request = json!({ "execute": command, "arguments": arguments });
        writeln!(self.reader.get_mut(), "{request}").context("QEMU's monitor is gone")?;
        let deadline = Instant::now() + LIMIT;
        loop {
            let message = self
                .message(deadline)
                .with_context(|| format!("QEMU did not answer `{command}` within {LIMIT:?}"))?;
            if let Some(result) = message.get("return") {
                return Ok(result.clone());
            }
            if let Some(error) = message.get("error") {
                let reason = error["desc"].as_str().unwrap_or("unknown reason");
                bail!("QEMU refused `{command}`: {reason}");
            }
            self.events.push_back(message);
        }
    }

    fn message(&mut self, deadline: Instant) -> Result<Value> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                bail!("time limit reached");
            }
            self.reader
                .get_ref()
                .set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            match self.reader.read_line(&mut self.partial) {
                Ok(0) => bail!("the monitor is closed"),
                Ok(_) if self.partial.ends_with('\n') => {
                    let line = std::mem::take(&mut self.partial);
                    return serde_json::from_str(&line).context("QEMU sent no JSON");
                }
                Ok(_) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error).context("cannot read from QEMU's monitor"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn events_are_kept_while_a_command_waits() {
        let (host, qemu) = UnixStream::pair().unwrap();
        let fake = thread::spawn(move || {
            let mut reader = BufReader::new(qemu);
            let say = |reader: &mut BufReader<UnixStream>, text: &str| {
                reader.get_mut().write_all(text.as_bytes()).unwrap();
            };
            let mut line = String::new();
            say(&mut reader, "{\"QMP\": {}}\r\n");
            reader.read_line(&mut line).unwrap();
            say(&mut reader, "{\"return\": {}}\r\n");
            reader.read_line(&mut line).unwrap();
            say(
                &mut reader,
                "{\"event\": \"A\"}\r\n{\"event\": \"B\"}\r\n{\"return\": 5}\r\n",
            );
            reader.read_line(&mut line).unwrap();
            say(
                &mut reader,
                "{\"error\": {\"desc\": \"no such thing\"}}\r\n",
            );
            line
        });
        let qmp = Qmp::new(host);
        assert_eq!(qmp.execute("x", json!({})).unwrap(), 5);
        assert_eq!(qmp.event("B", LIMIT).unwrap()["event"], "B");
        let error = qmp.execute("y", json!({})).unwrap_err().to_string();
        assert!(error.contains("no such thing"), "{error}");
        assert!(qmp.event("C", Duration::from_millis(20)).is_err());
        assert!(fake.join().unwrap().contains("qmp_capabilities"));
    }
}
