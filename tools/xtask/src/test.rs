//! `cargo xtask test`: everything that must hold before a change is taken, cheapest first, up to the
//! first failure. The kernel module is built beside what comes before it: that waits for downloads and for
//! one compiler at a time.
//!
//! It is what CI runs (`.ci/run`) and what a developer runs: there is no second list of checks.

use std::{
    env,
    fs::File,
    io::{self, Seek},
    process::{Child, Command, ExitCode, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{cargo::cargo, deps};

/// One step: cargo with some arguments.
struct Stage {
    name: &'static str,
    arguments: &'static [&'static str],
    /// Variable and value that the step needs.
    environment: Option<(&'static str, &'static str)>,
}

const fn stage(name: &'static str, arguments: &'static [&'static str]) -> Stage {
    Stage {
        name,
        arguments,
        environment: None,
    }
}

/// The stage that is started before its turn.
const KMOD: &str = "kmod";

const STAGES: [Stage; 8] = [
    stage("fmt", &["fmt", "--all", "--check"]),
    stage(
        "clippy",
        &["clippy", "--workspace", "--all-targets", "--", "-Dwarnings"],
    ),
    Stage {
        environment: Some(("RUSTDOCFLAGS", "-Dwarnings")),
        ..stage("doc", &["doc", "--workspace", "--no-deps"])
    },
    stage(
        "unit",
        &[
            "test",
            "--workspace",
            "--exclude=ublk-vram-tests",
            "--",
            "--skip=safety::",
        ],
    ),
    // They fork, lock memory and count page faults: one at a time, in a process with no other threads.
    stage(
        "safety",
        &[
            "test",
            "--package=ublk-vram",
            "--lib",
            "safety::",
            "--",
            "--test-threads=1",
        ],
    ),
    // The end-to-end cases put these into their guests.
    stage(
        "build",
        &[
            "build",
            "--bins",
            "--package=ublk-vram",
            "--package=vramctl",
            "--package=vmrig",
            "--package=ublk-vram-tests",
        ],
    ),
    // So do those of the kernel module put what this builds.
    stage(KMOD, &["xtask", "kmod", "check"]),
    stage(
        "e2e",
        &["test", "--package=ublk-vram-tests", "--test=e2e", "--"],
    ),
];

/// Arguments of `cargo xtask test`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Run one stage: fmt, clippy, doc, unit, safety, build, kmod, e2e (which builds first)
    #[arg(long, value_name = "STAGE", value_parser = stage_name)]
    only: Option<&'static str>,
    /// Run the end-to-end cases whose name contains this, and nothing else unless --only says so
    #[arg(long, value_name = "NAME")]
    filter: Option<String>,
}

fn stage_name(text: &str) -> Result<&'static str, String> {
    let names = STAGES.iter().map(|stage| stage.name);
    names.clone().find(|name| *name == text).ok_or_else(|| {
        let names: Vec<&str> = names.collect();
        format!("there are the stages {}", names.join(", "))
    })
}

/// Which stages run.
fn chosen(only: Option<&str>, filter: Option<&str>) -> Vec<&'static Stage> {
    let only = only.or(filter.map(|_| "e2e"));
    let wanted = |stage: &&Stage| match only {
        // The kernel module takes minutes where it was never built.
        Some("e2e") if stage.name == KMOD => filter.is_none_or(|name| name.contains("kmod")),
        Some("e2e") => ["build", "e2e"].contains(&stage.name),
        Some(only) => stage.name == only,
        None => true,
    };
    STAGES.iter().filter(wanted).collect()
}

/// Runs the stages.
///
/// # Errors
/// When something that a stage needs cannot be installed.
pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let stages = chosen(arguments.only, arguments.filter.as_deref());
    prepare(&stages)?;
    let mut done: Vec<(&str, Duration)> = Vec::new();
    let mut failed = None;
    let begin = Instant::now();
    let kmod = stages.iter().find(|stage| stage.name == KMOD);
    let mut early = kmod.map(|stage| Early::start(stage)).transpose()?;
    for stage in stages {
        let started = Instant::now();
        let ok = match early.take_if(|_| stage.name == KMOD) {
            Some(early) => succeeded(stage, early.finish()?)?,
            None => run_stage(stage, arguments.filter.as_deref())?,
        };
        let took = started.elapsed();
        let word = if ok { "ok" } else { "FAILED" };
        eprintln!("xtask: {} {word}, {:.1} s", stage.name, took.as_secs_f64());
        done.push((stage.name, took));
        if !ok {
            failed = Some(stage.name);
            break;
        }
    }
    drop(early);
    eprintln!();
    for (name, took) in &done {
        let word = if failed == Some(*name) {
            "FAILED"
        } else {
            "ok"
        };
        eprintln!("{name:<8}{word:<8}{:>8.1} s", took.as_secs_f64());
    }
    let total = begin.elapsed();
    eprintln!("{:<16}{:>8.1} s", "total", total.as_secs_f64());
    Ok(match failed {
        Some(name) => {
            eprintln!("xtask: stage {name} failed; again: `cargo xtask test --only {name}`");
            ExitCode::FAILURE
        }
        None => ExitCode::SUCCESS,
    })
}

/// Installs what the stages need and this machine lacks.
fn prepare(stages: &[&Stage]) -> Result<()> {
    let has = |name| stages.iter().any(|stage| stage.name == name);
    if has("fmt") {
        deps::ensure_component("rustfmt", "fmt")?;
    }
    if has("clippy") {
        deps::ensure_component("clippy", "clippy")?;
    }
    // `cargo fmt` alone compiles nothing.
    if stages.iter().any(|stage| stage.name != "fmt") {
        deps::ensure_build_tools()?;
    }
    if has(KMOD) {
        deps::ensure_programs(&[&deps::BOOT, &deps::KMOD])?;
    }
    // The unit tests boot machines too: those of vmrig.
    if has("unit") || has("e2e") {
        deps::ensure_vulkan()?;
        deps::ensure_programs(&[&deps::BOOT, &deps::SWAP, &deps::GUEST])?;
    }
    Ok(())
}

fn run_stage(stage: &Stage, filter: Option<&str>) -> Result<bool> {
    let mut command = cargo(stage.arguments);
    command.envs(stage.environment);
    if stage.name == "e2e" {
        command.args(filter);
    }
    eprintln!("xtask: {}: cargo {}", stage.name, stage.arguments.join(" "));
    let status = command
        .status()
        .with_context(|| format!("stage {}: cannot run cargo", stage.name))?;
    succeeded(stage, status)
}

fn succeeded(stage: &Stage, status: ExitStatus) -> Result<bool> {
    if status.code().is_none() {
        bail!("stage {}: cargo was ended by a signal", stage.name);
    }
    Ok(status.success())
}

/// The stage [`KMOD`], beside others. Cargo has a lock that they need, so it goes without.
struct Early {
    child: Child,
    output: File,
}

/// Nothing is killed that has something mounted.
impl Drop for Early {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            eprintln!("xtask: waiting for the end of stage {KMOD}");
        }
        // Whoever drops it does not ask how it ended.
        let _ = self.child.wait();
    }
}

impl Early {
    fn start(stage: &Stage) -> Result<Early> {
        let output = tempfile::tempfile().context("no file for the output of a stage")?;
        eprintln!(
            "xtask: {KMOD}: started beside the stages before it; its output comes in its turn"
        );
        let child = Command::new(env::current_exe().context("where is this program?")?)
            .args(stage.arguments.iter().skip(1))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output.try_clone()?)
            .spawn()
            .with_context(|| format!("stage {KMOD}: cannot run xtask"))?;
        Ok(Early { child, output })
    }

    fn finish(mut self) -> Result<ExitStatus> {
        let status = self.child.wait()?;
        self.output.rewind()?;
        io::copy(&mut self.output, &mut io::stderr())?;
        Ok(status)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(only: Option<&str>, filter: Option<&str>) -> Vec<&'static str> {
        let stages = chosen(only, filter);
        stages.iter().map(|stage| stage.name).collect()
    }

    #[test]
    fn all_stages_unless_told_otherwise() {
        let all = [
            "fmt", "clippy", "doc", "unit", "safety", "build", "kmod", "e2e",
        ];
        assert_eq!(names(None, None), all);
        assert_eq!(names(Some("doc"), None), ["doc"]);
        assert_eq!(names(Some("e2e"), None), ["build", "kmod", "e2e"]);
        assert_eq!(names(None, Some("kmod::")), ["build", "kmod", "e2e"]);
        assert_eq!(names(None, Some("swap::")), ["build", "e2e"]);
        assert_eq!(names(Some("unit"), Some("swap::")), ["unit"]);
    }

    #[test]
    fn an_unknown_stage_is_refused_with_the_known_ones() {
        assert_eq!(stage_name("unit"), Ok("unit"));
        assert!(stage_name("nonsense").unwrap_err().contains("fmt, clippy"));
    }
}
