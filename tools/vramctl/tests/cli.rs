//! `vramctl` from outside: exit status, standard output, standard error. No device is made: where a
//! server is needed a few lines of shell stand in for it, to see what `vramctl` makes of them.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// An empty run directory, and a server that is none.
struct Bench {
    dir: TempDir,
}

struct Said {
    status: i32,
    out: String,
    err: String,
}

impl Bench {
    fn new() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("run")).unwrap();
        Bench { dir }
    }

    fn run_file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.dir.path().join("run").join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// Writes a script that stands in for the server; `$3` is the number of the start pipe.
    fn server(&self, script: &str) {
        let path = self.dir.path().join("server");
        let mut file = File::create(&path).unwrap();
        write!(file, "#!/bin/bash\n{script}\n").unwrap();
        file.set_permissions(Permissions::from_mode(0o755)).unwrap();
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vramctl"));
        command
            .args(args)
            .env("UBLK_VRAM_RUN_DIR", self.dir.path().join("run"))
            .env("UBLK_VRAM_SERVER", self.dir.path().join("server"))
            .stdin(Stdio::null());
        command
    }

    fn vramctl(&self, args: &[&str]) -> Said {
        let Output {
            status,
            stdout,
            stderr,
        } = self.command(args).output().unwrap();
        Said {
            status: status.code().unwrap_or(-1),
            out: String::from_utf8(stdout).unwrap(),
            err: String::from_utf8(stderr).unwrap(),
        }
    }

    /// `add` with the stand-in.
    fn add(&self, script: &str, more: &[&str]) -> Said {
        self.server(script);
        let args = ["add", "x", "--size", "64M", "--backend", "host"];
        self.vramctl(&[&args[..], more].concat())
    }
}

impl Said {
    /// One sentence of `vramctl` on standard error, nothing on standard output.
    #[track_caller]
    fn fails(&self, status: i32, part: &str) {
        assert_eq!(self.status, status, "{}", self.err);
        assert_eq!(self.out, "");
        assert!(self.err.starts_with("vramctl: error: "), "{}", self.err);
        assert!(self.err.contains(part), "'{part}' is not in: {}", self.err);
    }

    #[track_caller]
    fn fails_with_one_sentence(&self, status: i32, part: &str) {
        self.fails(status, part);
        assert_eq!(self.err.lines().count(), 1, "{}", self.err);
    }
}

const NOTE: &str = r#"{"name":"old","device":"/dev/ublkb4000","id":4000,"major":259,"minor":4000,
    "size":8589934592,"backend":"pci","gpu":"0000:03:00.0","uuid":"u","queues":2,"depth":64,
    "max_io":262144,"chunk_size":1073741824,"chunks":9,"features":[],"copy":"avx2","pid":4000000,
    "since":0}"#;

#[test]
fn help_has_examples_and_goes_to_standard_output() {
    let bench = Bench::new();
    for args in [
        &["--help"][..],
        &["add", "--help"],
        &["list", "--help"],
        &["remove", "--help"],
    ] {
        let said = bench.vramctl(args);
        assert_eq!((said.status, said.err.as_str()), (0, ""), "{args:?}");
        assert!(said.out.contains("EXAMPLES"), "{args:?}");
        assert!(!said.out.contains("--lab-"), "hidden: {args:?}");
        assert!(
            said.out.lines().all(|line| line.chars().count() <= 100),
            "{}",
            said.out
        );
    }
    assert_eq!(bench.vramctl(&["--version"]).status, 0);
}

#[test]
fn wrong_sizes_are_one_sentence_and_status_2() {
    let bench = Bench::new();
    bench.server("echo started > ${0%server}started");
    for size in ["2Q", "", "-1", "1e400", "0", "5000", "0%", "101%", "16E"] {
        let said = bench.vramctl(&["add", "x", "--size", size, "--backend", "host"]);
        said.fails_with_one_sentence(2, "size");
    }
    assert!(
        !bench.dir.path().join("started").exists(),
        "nothing is started"
    );
}

#[test]
fn wrong_names_and_words_are_status_2() {
    let bench = Bench::new();
    bench
        .vramctl(&["show", "a/b"])
        .fails_with_one_sentence(2, "device name 'a/b'");
    bench
        .vramctl(&["remove", ""])
        .fails_with_one_sentence(2, "must not be empty");
    bench
        .vramctl(&["frobnicate"])
        .fails_with_one_sentence(2, "frobnicate");
    bench.vramctl(&["list", "--colour"]).fails(2, "--colour");
    bench
        .vramctl(&["add", "x"])
        .fails_with_one_sentence(2, "--size");
    bench
        .vramctl(&["remove", "x", "--forse"])
        .fails_with_one_sentence(2, "a similar argument exists: '--force'");
    assert_eq!(bench.vramctl(&["swap"]).status, 2);
    bench
        .vramctl(&["list", "-o", "COLOUR"])
        .fails_with_one_sentence(2, "no column 'COLOUR'");
    let args = ["add", "x", "--size", "1G", "--gpu", "nvidia"];
    bench.vramctl(&args).fails_with_one_sentence(2, "nvidia");
    let args = ["add", "x", "--size", "1G", "--gpu", "4000"];
    bench
        .vramctl(&args)
        .fails_with_one_sentence(3, "no GPU with index 4000");
}

#[test]
fn no_devices() {
    let bench = Bench::new();
    let said = bench.vramctl(&["list"]);
    assert_eq!((said.status, said.err.as_str()), (0, ""));
    assert!(
        said.out
            .starts_with("NAME  DEVICE  STATE  SIZE  SWAP  BACKEND  GPU"),
        "{}",
        said.out
    );
    assert_eq!(said.out, bench.vramctl(&[]).out, "list is the default");
    assert_eq!(bench.vramctl(&["list", "-n"]).out, "");
    let json: serde_json::Value =
        serde_json::from_str(&bench.vramctl(&["ls", "--json"]).out).unwrap();
    assert_eq!(json["version"], 1);
    assert_eq!(json["devices"], serde_json::json!([]));
    bench
        .vramctl(&["show", "nope"])
        .fails_with_one_sentence(3, "no device 'nope'");
    bench
        .vramctl(&["remove", "nope"])
        .fails_with_one_sentence(3, "no device 'nope'");
    bench
        .vramctl(&["remove", "nope", "--force"])
        .fails_with_one_sentence(3, "no device 'nope'");
    bench
        .vramctl(&["swap", "on", "nope"])
        .fails_with_one_sentence(3, "no device 'nope'");
    bench
        .vramctl(&["swap", "off", "nope"])
        .fails_with_one_sentence(3, "no device 'nope'");
    bench
        .vramctl(&["fault", "nope", "fail"])
        .fails_with_one_sentence(3, "no device 'nope'");
}

#[test]
fn a_run_directory_that_is_not_there_is_no_device() {
    let bench = Bench::new();
    std::fs::remove_dir(bench.dir.path().join("run")).unwrap();
    assert_eq!(bench.vramctl(&["list", "-n"]).status, 0);
}

#[test]
fn a_dead_device_is_shown_and_cleaned_up() {
    let bench = Bench::new();
    let lock = bench.run_file("old.lock", "");
    let note = bench.run_file("old.json", NOTE);
    let said = bench.vramctl(&["list", "-n", "-o", "NAME,STATE,DEVICE,SIZE,READS,PID"]);
    assert_eq!(said.out, "old  dead  /dev/ublkb4000  8G  -  4000000\n");
    let said = bench.vramctl(&["show", "old"]);
    assert!(
        said.status == 0 && said.out.contains("state:           dead\n"),
        "{}",
        said.out
    );
    bench
        .vramctl(&["remove", "old"])
        .fails_with_one_sentence(1, "--force");
    bench
        .vramctl(&["swap", "on", "old"])
        .fails_with_one_sentence(1, "--force");
    bench
        .vramctl(&["fault", "old", "fail"])
        .fails_with_one_sentence(1, "--force");
    assert!(lock.exists() && note.exists());

    let said = bench.vramctl(&["remove", "old", "--force"]);
    assert_eq!(said.status, 0, "{}", said.err);
    assert!(!lock.exists() && !note.exists(), "nothing is left behind");
    bench.vramctl(&["show", "old"]).fails(3, "no device 'old'");
}

#[test]
fn a_name_whose_lock_is_held_is_alive() {
    let bench = Bench::new();
    let lock = bench.run_file("busy.lock", "");
    let file = File::open(&lock).unwrap();
    let _server =
        nix::fcntl::Flock::lock(file, nix::fcntl::FlockArg::LockExclusiveNonblock).unwrap();
    let said = bench.vramctl(&["list", "-n", "-o", "NAME,STATE"]);
    assert_eq!(said.out, "busy  creating\n");
    let said = bench.vramctl(&["remove", "busy", "--force"]);
    assert_ne!(said.status, 0);
    assert!(lock.exists(), "never cleaned up behind somebody who lives");
}

#[test]
fn add_prints_the_device_and_nothing_else() {
    let bench = Bench::new();
    let said = bench.add(
        r#"spec=$(cat); [[ $1 == serve && $2 == --start-pipe ]] || exit 9
        [[ $spec == *'"name":"x"'*'"bytes":67108864'* ]] || exit 8
        echo noise; echo "log line" >&2
        printf '{"ready":{"name":"x","device":"/dev/ublkb7","id":7,"major":259,"minor":7,"size":67108864,
        "backend":"host","gpu":null,"uuid":"u","queues":1,"depth":64,"max_io":65536,"chunk_size":67108864,
        "chunks":2,"features":[],"copy":"avx2","pid":1,"since":0},"warnings":["beware of this"]}' |
        tr -d '\n' >&$3; echo >&$3"#,
        &[],
    );
    assert_eq!(
        (said.status, said.out.as_str()),
        (0, "/dev/ublkb7\n"),
        "{}",
        said.err
    );
    assert_eq!(said.err, "vramctl: warning: beware of this\n");
}

#[test]
fn the_servers_reason_is_what_the_user_reads() {
    let bench = Bench::new();
    let failed = |kind: &str| {
        let line =
            format!(r#"{{"failed":{{"kind":"{kind}","message":"the moon is in the way"}}}}"#);
        bench.add(
            &format!("cat > /dev/null; echo '{line}' >&$3; echo other >&2; exit 1"),
            &[],
        )
    };
    for (kind, status) in [("busy", 1), ("usage", 2), ("not-found", 3), ("no-space", 1)] {
        let said = failed(kind);
        said.fails_with_one_sentence(status, "the moon is in the way");
        assert_eq!(said.err, "vramctl: error: the moon is in the way\n");
    }
}

#[test]
fn a_server_that_dies_without_a_word_leaves_its_last_ones() {
    let bench = Bench::new();
    let said = bench.add(
        "echo first >&2; echo 'cannot open the moon' >&2; exit 7",
        &[],
    );
    said.fails_with_one_sentence(1, "exit status 7");
    assert!(
        said.err.contains("first / cannot open the moon"),
        "{}",
        said.err
    );
    bench
        .add("cat > /dev/null; kill -SEGV $$", &[])
        .fails_with_one_sentence(1, "SIGSEGV");
    // More on standard error than a pipe holds must not block the server.
    let said = bench.add(
        "head -c 1000000 /dev/zero | tr '\\0' x >&2; echo >&2; echo end >&2; exit 1",
        &[],
    );
    said.fails_with_one_sentence(1, "exit status 1");
    assert!(said.err.trim_end().ends_with("/ end") && said.err.len() < 10_000);
}

#[test]
fn a_server_that_says_nothing_is_a_timeout_and_is_asked_to_end() {
    let bench = Bench::new();
    let mark = bench.dir.path().join("ended");
    let begin = Instant::now();
    let script = format!(
        "trap 'echo > {}; exit 1' TERM; cat > /dev/null; while :; do sleep 0.05; done",
        mark.display()
    );
    let said = bench.add(&script, &["--timeout", "0.5"]);
    said.fails_with_one_sentence(
        1,
        "did not become usable within 0.5 s; its server has ended",
    );
    assert!(begin.elapsed() < Duration::from_secs(10) && mark.exists());
}

#[test]
fn a_start_that_is_called_off_ends_the_server() {
    let bench = Bench::new();
    let mark = bench.dir.path().join("ended");
    let up = bench.dir.path().join("up");
    bench.server(&format!(
        "trap 'echo > {}; exit 1' TERM; cat > /dev/null; echo > {}; while :; do sleep 0.05; done",
        mark.display(),
        up.display()
    ));
    let args = ["add", "x", "--size", "64M", "--backend", "host"];
    let child = bench.command(&args).stderr(Stdio::piped()).spawn().unwrap();
    while !up.exists() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("called off by a signal"), "{said}");
    assert!(mark.exists());
}

#[test]
fn a_first_line_that_is_no_start_line_is_an_error() {
    let bench = Bench::new();
    bench
        .add("cat > /dev/null; echo hello >&$3", &[])
        .fails_with_one_sentence(1, "not understood");
    let said = bench.add("cat > /dev/null; printf '{\"ready\":' >&$3", &[]);
    said.fails_with_one_sentence(1, "not understood");
}

#[test]
fn a_server_that_is_no_program_is_said_so() {
    let bench = Bench::new();
    let args = ["add", "x", "--size", "64M", "--backend", "host"];
    bench
        .vramctl(&args)
        .fails_with_one_sentence(1, "is no program");
}

#[test]
fn a_dry_run_starts_nothing_and_prints_the_specification() {
    let bench = Bench::new();
    bench.server("echo started > ${0%server}started");
    let args = [
        "add",
        "x",
        "--size",
        "128M",
        "--backend",
        "host",
        "--dry-run",
        "--id",
        "3",
    ];
    let said = bench.vramctl(&args);
    assert_eq!(said.status, 0, "{}", said.err);
    let spec: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(
        (spec["size"]["bytes"].as_u64(), spec["id"].as_u64()),
        (Some(128 << 20), Some(3))
    );
    assert!(
        said.err.contains("dry run: 'x' would have 128M"),
        "{}",
        said.err
    );
    assert!(!bench.dir.path().join("started").exists());
    let args = [
        "add",
        "x",
        "--size",
        "999T",
        "--backend",
        "host",
        "--dry-run",
    ];
    bench
        .vramctl(&args)
        .fails_with_one_sentence(1, "does not fit");
}

#[test]
fn check_works_anywhere_and_its_status_says_the_verdict() {
    let bench = Bench::new();
    bench.server("");
    let said = bench.vramctl(&["check"]);
    let failed = said.out.lines().any(|line| line.starts_with("FAIL"));
    assert_eq!(said.status, i32::from(failed), "{}{}", said.out, said.err);
    for item in [
        "kernel",
        "ublk driver",
        "io_uring",
        "privileges",
        "memory lock",
        "cost",
    ] {
        assert!(
            said.out.contains(&format!("  {item} ")),
            "{item}\n{}",
            said.out
        );
    }
    let said = bench.vramctl(&["check", "--json"]);
    let json: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    assert_eq!(
        (json["version"].as_i64(), json["ok"].as_bool()),
        (Some(1), Some(!failed))
    );
}

#[test]
fn gpus_is_a_table_or_json() {
    let bench = Bench::new();
    let said = bench.vramctl(&["gpus"]);
    assert!(
        said.status == 0 && said.out.starts_with("INDEX  PCI"),
        "{}",
        said.out
    );
    let json: serde_json::Value =
        serde_json::from_str(&bench.vramctl(&["gpus", "--json"]).out).unwrap();
    assert!(json["gpus"].is_array());
}

#[test]
fn completions() {
    let bench = Bench::new();
    for shell in ["bash", "zsh", "fish"] {
        let said = bench.vramctl(&["completion", shell]);
        assert!(said.status == 0 && said.out.contains("vramctl"), "{shell}");
    }
    bench.vramctl(&["completion", "tcsh"]).fails(2, "tcsh");
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let bench = Bench::new();
    let mut child = bench
        .command(&["completion", "bash"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let full = File::options().write(true).open("/dev/full").unwrap();
    let output = bench
        .command(&["list"])
        .stdout(full)
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot write to standard output"));
}

/// The whole path but the kernel's, on Vulkan in software: memory of both kinds, every byte looked at.
#[test]
fn the_engine_is_measured_on_vulkan_in_software() {
    let bench = Bench::new();
    let said = bench.vramctl(&[
        "bench",
        "engine",
        "--backend",
        "vulkan",
        "--gpu",
        "0",
        "--allow-cpu-device",
        "--size",
        "48M",
        "--chunk",
        "16M",
        "--gpu-mapped",
        "16M",
        "--rw",
        "randread,randwrite,randrw",
        "--block-size",
        "4K,64K",
        "--depth",
        "1,8",
        "--threads",
        "2",
        "--time",
        "0.02",
        "--json",
    ]);
    assert_eq!(said.status, 0, "{}", said.err);
    let shown: serde_json::Value = serde_json::from_str(&said.out).unwrap();
    let rows = shown["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3 * 2 * 2 + 2, "{shown}");
    for row in rows {
        let outcome = &row["outcome"];
        assert_eq!(
            (&outcome["wrong"], &outcome["errors"]),
            (&0.into(), &0.into()),
            "{row}"
        );
        assert!(outcome["requests"].as_u64() > Some(0), "{row}");
    }
    let carried = |path: &str| rows.iter().any(|row| row["taken"][path].as_u64() > Some(0));
    assert!(
        carried("bar-store") && carried("bar-load") && carried("dma"),
        "{shown}"
    );
    let said = bench.vramctl(&[
        "bench",
        "engine",
        "--backend",
        "host",
        "--size",
        "4M",
        "--depth",
        "4096",
    ]);
    assert_eq!(said.status, 2, "{}", said.err);
    assert!(said.err.contains("do not fit"), "{}", said.err);
}
