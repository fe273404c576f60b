//! Device memory outlives the process that made it: with real processes, one of which is killed.

use std::io::Write;
use std::process::{Command, Stdio};

fn handover(backend: &str) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ublk-vram"))
        .arg("handover")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let spec = format!(
        r#"{{"name":"t","size":{{"bytes":50331648}},"chunk":16777216,"backend":{backend}}}"#
    );
    let mut input = child.stdin.take().unwrap();
    input.write_all(spec.as_bytes()).unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn host_memory_outlives_its_maker() {
    let text = handover(r#"{"kind":"host"}"#);
    assert!(text.starts_with("48M in 4 chunks"), "{text}");
    let read = text.lines().filter(|line| line.contains("12288 pages"));
    assert_eq!(read.count(), 2, "{text}");
}

/// Chunks of both kinds: two that the CPU maps, and two that only the engines reach.
#[test]
fn vulkan_memory_outlives_its_maker() {
    let text = handover(r#"{"kind":"vulkan","gpu":"0","allow-cpu-device":true,"mapped":33554432}"#);
    assert!(
        text.starts_with("48M in 4 chunks, 2 of them mapped"),
        "{text}"
    );
    let twice = |part: &str| text.matches(part).count() == 2;
    assert!(twice(" s, 2 mapped") && twice("12288 pages"), "{text}");
}
