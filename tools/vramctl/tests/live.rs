//! `vramctl` against a server that lives, as far as can be without a disk: a thread that holds the
//! name's lock and gives canned answers on the control socket.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use nix::fcntl::{Flock, FlockArg};
use tempfile::TempDir;

const INFO: &str = r#"{"name":"fast","device":"/dev/ublkb4000","id":4000,"major":259,"minor":4000,
    "size":8589934592,"backend":"pci","gpu":"0000:03:00.0","uuid":"u","queues":1,"depth":64,
    "max_io":262144,"chunk_size":1073741824,"chunks":9,"features":["SAFE_STOP_DEV"],"copy":"avx2",
    "pid":4711,"since":0,"state":"draining","reason":"waiting: mounted on /mnt",
    "memory":{"cost":46137344,"locked":0,"resident":0,"swapped":0,"arena":33554432},
    "queue":[{"tid":12,"reads":123,"writes":4007,"zeroes":0,"read_bytes":0,"write_bytes":0,
    "zero_bytes":0,"errors":2,"batches":0,"largest_batch":0,"in_flight":0,"most_in_flight":0,
    "swap_writes":0}]}"#;

const BUSY: &str = r#"{"error":"io.github.ublk_vram.Failed","parameters":
    {"kind":"busy","message":"fast (/dev/ublkb4000) cannot be removed: mounted on /mnt"}}"#;

struct Server {
    dir: TempDir,
    calls: Arc<Mutex<Vec<String>>>,
    _name: Flock<File>,
}

impl Server {
    /// A server that answers `Show` with [`INFO`] and everything else with `other`; nothing at all
    /// if that is empty.
    fn start(other: &'static str) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("fast.lock")).unwrap();
        let name = Flock::lock(file, FlockArg::LockExclusiveNonblock).unwrap();
        let listener = UnixListener::bind(dir.path().join("fast.sock")).unwrap();
        let calls = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&calls);
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let heard = Arc::clone(&heard);
                std::thread::spawn(move || {
                    while let Some(call) = read_call(&mut stream) {
                        let answer = match call.contains(".Show") {
                            true => format!("{{\"parameters\":{INFO}}}"),
                            false => other.to_owned(),
                        };
                        heard.lock().unwrap().push(call);
                        if answer.is_empty() {
                            std::thread::sleep(std::time::Duration::from_secs(60));
                        }
                        let _ = stream
                            .write_all(answer.as_bytes())
                            .and(stream.write_all(&[0]));
                    }
                });
            }
        });
        Server {
            dir,
            calls,
            _name: name,
        }
    }

    fn vramctl(&self, args: &[&str]) -> (i32, String, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_vramctl"))
            .args(args)
            .env("UBLK_VRAM_RUN_DIR", self.dir.path())
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (
            output.status.code().unwrap_or(-1),
            text(output.stdout),
            text(output.stderr),
        )
    }

    fn last_call(&self) -> String {
        self.calls
            .lock()
            .unwrap()
            .last()
            .cloned()
            .unwrap_or_default()
    }

    fn lock(&self) -> PathBuf {
        self.dir.path().join("fast.lock")
    }
}

fn read_call(stream: &mut UnixStream) -> Option<String> {
    let mut call = Vec::new();
    let mut byte = [0u8];
    while stream.read(&mut byte).ok()? == 1 {
        if byte[0] == 0 {
            return String::from_utf8(call).ok();
        }
        call.push(byte[0]);
    }
    None
}

#[test]
fn list_and_show_tell_what_the_server_says() {
    let server = Server::start("");
    let (status, out, err) = server.vramctl(&[
        "list",
        "-n",
        "-o",
        "NAME,STATE,SIZE,SWAP,READS,WRITES,ERRORS,COST",
    ]);
    assert_eq!((status, err.as_str()), (0, ""));
    assert_eq!(out, "fast  draining  8G  -  123  4007  2  44M\n");

    let (status, out, _) = server.vramctl(&["show", "fast"]);
    assert_eq!(status, 0);
    for part in [
        "draining",
        "waiting: mounted on /mnt",
        "SAFE_STOP_DEV",
        "44M of system memory",
    ] {
        assert!(out.contains(part), "{part}\n{out}");
    }
    let (_, out, _) = server.vramctl(&["show", "fast", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["device"]["queue"][0]["writes"], 4007);
    assert_eq!(json["device"]["gpu"], "0000:03:00.0");
}

#[test]
fn remove_asks_the_server_and_gives_its_answer() {
    let server = Server::start(r#"{"parameters":{}}"#);
    assert_eq!(
        server.vramctl(&["remove", "fast"]),
        (0, String::new(), String::new())
    );
    assert!(server.last_call().contains("io.github.ublk_vram.Remove"));

    let server = Server::start(BUSY);
    // Not even --force goes against a server that lives.
    for args in [
        &["remove", "fast"][..],
        &["rm", "fast", "--force", "--swapoff"],
    ] {
        let (status, out, err) = server.vramctl(args);
        assert_eq!((status, out.as_str()), (1, ""));
        assert_eq!(
            err,
            "vramctl: error: fast (/dev/ublkb4000) cannot be removed: mounted on /mnt\n"
        );
    }
    assert!(server.lock().exists());
}

#[test]
fn a_server_that_does_not_answer_is_not_waited_for_for_ever() {
    let server = Server::start("");
    let (status, _, err) = server.vramctl(&["remove", "fast", "--timeout", "0.3"]);
    assert_eq!(status, 1);
    assert!(
        err.contains("'fast' did not answer Remove within 0.3 s"),
        "{err}"
    );
}

#[test]
fn fault_and_release_speak_the_protocol() {
    let server = Server::start(r#"{"parameters":null}"#);
    let args = [
        "fault", "fast", "delay", "--writes", "--from", "4K", "--to", "1M", "--count", "3",
    ];
    let (status, _, err) = server.vramctl(&[&args[..], &["--delay-ms", "20"]].concat());
    assert_eq!(status, 0, "{err}");
    let call: serde_json::Value = serde_json::from_str(&server.last_call()).unwrap();
    assert_eq!(
        call["parameters"]["rule"],
        serde_json::json!({ "action": "delay", "reads": false, "from": 4096, "to": 1 << 20,
                            "count": 3, "delay-ms": 20 })
    );
    assert_eq!(server.vramctl(&["release", "fast", "--reverse"]).0, 0);
    let call: serde_json::Value = serde_json::from_str(&server.last_call()).unwrap();
    assert_eq!(call["parameters"]["reverse"], true);
}

#[test]
fn what_is_no_swap_is_not_swapped_off() {
    let server = Server::start("");
    let (status, _, err) = server.vramctl(&["swap", "off", "fast"]);
    assert_eq!(
        (status, err.as_str()),
        (3, "vramctl: error: 'fast' is not used as swap\n")
    );
}
