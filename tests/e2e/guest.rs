//! A guest with the built programs in it, and the words the cases are written in.

use std::fs::OpenOptions;
use std::ops::Deref;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use vmrig::{Device, Kernel, Out, Vm, VmBuilder};

/// Longest time an `add` of a test's device may take under emulation.
const ADD_LIMIT: Duration = Duration::from_secs(90);

/// A running guest. Device 0, where there is one, is a memory-class function whose BAR is a file.
pub struct Guest {
    vm: Vm,
    _files: tempfile::TempDir,
    /// The file behind the BAR of device 0.
    pub bar_file: PathBuf,
}

impl Deref for Guest {
    type Target = Vm;

    fn deref(&self) -> &Vm {
        &self.vm
    }
}

/// The directory the built programs are in: that of this package's own program.
fn programs() -> Result<[PathBuf; 3]> {
    let own = Path::new(env!("CARGO_BIN_EXE_vramtest"));
    let beside = |name: &str| -> Result<PathBuf> {
        let path = own.with_file_name(name);
        ensure!(
            path.exists(),
            "{} is not built: `cargo build` first, or run `cargo xtask test`",
            path.display()
        );
        Ok(path)
    };
    Ok([own.to_owned(), beside("ublk-vram")?, beside("vramctl")?])
}

impl Guest {
    /// Boots a guest with a BAR of `bar_mib` MiB that is a file of the host, and what `more` adds.
    pub fn boot(
        kernel: &Kernel,
        name: &str,
        bar_mib: u64,
        more: impl FnOnce(VmBuilder) -> VmBuilder,
    ) -> Result<Guest> {
        let files = tempfile::tempdir()?;
        let bar_file = files.path().join("bar");
        let mut builder = VmBuilder::new(kernel)
            .name(name)
            .memory(512)
            .device(Device::Ivshmem {
                size_mib: bar_mib,
                file: bar_file.clone(),
            })
            .module("ublk_drv")
            .tools(&["mkswap", "swapon", "swapoff"]);
        for program in programs()? {
            builder = builder.program(program);
        }
        let vm = more(builder).boot()?;
        Ok(Guest {
            vm,
            _files: files,
            bar_file,
        })
    }

    /// Changes what is in the BAR of device 0, from outside. The file keeps its length at every moment:
    /// QEMU, which maps it, would die of a SIGBUS.
    pub fn overwrite_bar(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let file = OpenOptions::new().write(true).open(&self.bar_file)?;
        Ok(file.write_all_at(bytes, offset)?)
    }

    /// Runs a command that must succeed; its standard output, trimmed.
    pub fn must(&self, script: &str) -> Result<String> {
        Ok(self.vm.sh(script)?.ok()?.stdout.trim().to_owned())
    }

    /// As [`Guest::must`], with a time limit of its own.
    pub fn must_within(&self, script: &str, seconds: u64) -> Result<String> {
        let out = self.vm.sh_timeout(script, Duration::from_secs(seconds))?;
        Ok(out.ok()?.stdout.trim().to_owned())
    }

    /// Adds a device; `options` come after its name. The path that was printed.
    pub fn add(&self, name: &str, options: &str) -> Result<String> {
        let script = format!("vramctl add {name} {options}");
        let path = self.vm.sh_timeout(&script, ADD_LIMIT)?.ok()?.stdout;
        ensure!(
            path.starts_with("/dev/ublkb") && path.ends_with('\n') && path.lines().count() == 1,
            "add must print the path and nothing else, not {path:?}"
        );
        Ok(path.trim().to_owned())
    }

    /// The options that put a device on the BAR of PCI device `index`.
    pub fn gpu(&self, index: usize) -> String {
        format!("--gpu {}", self.vm.pci_address(index))
    }

    /// The device that `vramctl show NAME --json` shows.
    pub fn show(&self, name: &str) -> Result<Value> {
        let text = self.must(&format!("vramctl show {name} --json"))?;
        let mut shown: Value = serde_json::from_str(&text)
            .with_context(|| format!("show --json of {name}: {text}"))?;
        ensure!(shown["version"] == 1, "{text}");
        Ok(shown["device"].take())
    }

    /// A command that must fail with `rc` and say, in one line on standard error, something that
    /// contains each of `words`.
    pub fn refused(&self, script: &str, rc: i32, words: &[&str]) -> Result<Out> {
        let out = self.vm.sh_timeout(script, ADD_LIMIT)?.expect_rc(rc)?;
        ensure!(
            out.stdout.is_empty(),
            "a refusal prints nothing on stdout: {out}"
        );
        ensure!(
            out.stderr.trim().lines().count() == 1,
            "a refusal is one sentence: {out}"
        );
        for word in words {
            ensure!(out.stderr.contains(word), "'{word}' is not said: {out}");
        }
        Ok(out)
    }

    /// Nothing of any device is left: no node, no server, no file, no cgroup, no swap.
    pub fn nothing_left(&self) -> Result<()> {
        let left = self.must(
            "ls /dev | grep ^ublkb; ls /dev | grep ^ublkc[0-9]; ls /run/ublk-vram 2>/dev/null; \
             grep -lx ublk-vram /proc/[0-9]*/comm 2>/dev/null; \
             ls -d /sys/fs/cgroup/ublk-vram/*/ 2>/dev/null; tail -n +2 /proc/swaps; \
             grep -l . /sys/bus/pci/devices/*/driver_override | xargs grep -l ublk-vram; true",
        )?;
        ensure!(left.is_empty(), "left behind: {left}");
        Ok(())
    }

    /// Ends the guest; the kernel must not have complained of anything.
    pub fn end(self) -> Result<()> {
        self.end_but(None)
    }

    /// As [`Guest::end`], for a kernel with a fault of its own that makes it say `known`.
    pub fn end_but(self, known: Option<&str>) -> Result<()> {
        // A failed allocation of the kernel's own under a swap storm prints a stack, no more: what
        // matters has a line of its own (BUG, WARNING, Oops, hung task, stall).
        let mut complaints = self.vm.kernel_complaints();
        complaints.retain(|line| !line.contains("Call Trace:"));
        complaints.retain(|line| !known.is_some_and(|known| line.contains(known)));
        if !complaints.is_empty() {
            bail!("the kernel complained: {complaints:#?}");
        }
        Ok(self.vm.shutdown()?)
    }

    /// Writes `mib` MiB that no two blocks of are alike to the beginning of a disk, and keeps them in
    /// /tmp/data.
    pub fn fill(&self, path: &str, mib: u32) -> Result<()> {
        let script = format!(
            "dd if=/dev/urandom of=/tmp/data bs=1M count={mib} 2>/dev/null \
             && dd if=/tmp/data of={path} bs=1M oflag=direct 2>/dev/null"
        );
        self.must_within(&script, 60).map(drop)
    }

    /// Waits until a storm has swapped pages out.
    pub fn wait_storm(&self) -> Result<()> {
        let swapped = "$(grep '^pswpout ' /proc/vmstat | cut -d' ' -f2)";
        let script = format!("until [ {swapped} -gt 2000 ]; do sleep 0.5; done");
        self.must_within(&script, 120).map(drop)
    }

    /// A number in /proc/vmstat.
    pub fn vmstat(&self, key: &str) -> Result<u64> {
        let text = self.must(&format!("grep '^{key} ' /proc/vmstat"))?;
        text.split_whitespace()
            .nth(1)
            .and_then(|n| n.parse().ok())
            .context("vmstat")
    }

    /// The (min_flt, maj_flt) of each of a device's queue threads.
    pub fn queue_faults(&self, name: &str) -> Result<Vec<(u64, u64)>> {
        let show = self.show(name)?;
        let pid = &show["server"]["worker"];
        let queues = show["queue"].as_array().context("no queues in show")?;
        queues
            .iter()
            .map(|queue| {
                let stat = self.must(&format!("cat /proc/{pid}/task/{}/stat", queue["tid"]))?;
                let fields: Vec<&str> = stat
                    .rsplit(") ")
                    .next()
                    .unwrap_or_default()
                    .split(' ')
                    .collect();
                // Fields 10 and 12 of proc_pid_stat(5); the first after the name is field 3.
                Ok((fields[7].parse()?, fields[9].parse()?))
            })
            .collect()
    }

    /// The process ids of a device's server: supervisor, worker, standby (0: there is none).
    pub fn processes(&self, name: &str) -> Result<[i64; 3]> {
        let show = self.show(name)?;
        let pid = |key: &str| {
            show["server"][key]
                .as_i64()
                .with_context(|| format!("no {key}"))
        };
        Ok([pid("supervisor")?, pid("worker")?, pid("standby")?])
    }

    /// Waits until all processes of a server are there.
    pub fn wait_whole(&self, name: &str) -> Result<[i64; 3]> {
        for _ in 0..300 {
            let processes = self.processes(name)?;
            let show = self.show(name)?;
            let is_served = show["state"] == "live"
                || (show["state"] == "degraded" && show["residency"] == "evictable");
            if processes.iter().all(|&pid| pid > 0) && is_served {
                return Ok(processes);
            }
            std::thread::sleep(Duration::from_millis(200));
        }
        bail!("the server is not whole: {}", self.show(name)?)
    }

    /// Kills every process of a server at once; the disk is an orphan then.
    pub fn kill_all(&self, name: &str) -> Result<()> {
        let [supervisor, worker, standby] = self.wait_whole(name)?;
        self.must(&format!("kill -9 {supervisor} {worker} {standby}"))?;
        self.wait_state(name, "orphan", 30)
    }

    /// Waits until `list` shows `name` in a state.
    pub fn wait_state(&self, name: &str, state: &str, seconds: u64) -> Result<()> {
        let seen = format!("vramctl list -n -o NAME,STATE | grep -qx '{name} *{state}'");
        self.must_within(&format!("until {seen}; do sleep 0.1; done"), seconds)
            .map(drop)
            .with_context(|| format!("'{name}' never was {state}"))
    }

    /// Every thread of every process of the server allocates without I/O, is locked, and nothing of it
    /// is swapped.
    pub fn server_is_protected(&self, name: &str) -> Result<()> {
        for pid in self.wait_whole(name)? {
            self.process_is_protected(pid)?;
        }
        Ok(())
    }

    fn process_is_protected(&self, pid: i64) -> Result<()> {
        // PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE (include/linux/sched.h): what IO_FLUSHER sets.
        const FLUSHER: u64 = 0x0008_0000 | 0x0010_0000;
        let stats = self.must(&format!("cat /proc/{pid}/task/*/stat"))?;
        ensure!(
            stats.lines().count() >= 3,
            "loop, control and chores, or lifecycle, orders, signals and queues: {stats}"
        );
        for line in stats.lines() {
            let flags: u64 = line
                .rsplit(") ")
                .next()
                .and_then(|rest| rest.split(' ').nth(6)?.parse().ok())
                .with_context(|| format!("flags in {line}"))?;
            ensure!(
                flags & FLUSHER == FLUSHER,
                "a thread is no IO flusher: {line}"
            );
        }
        let status = self.must(&format!("cat /proc/{pid}/status"))?;
        let kib = |key: &str| -> Option<u64> {
            status
                .lines()
                .find_map(|l| l.strip_prefix(key)?.split_whitespace().next()?.parse().ok())
        };
        ensure!(kib("VmSwap:") == Some(0), "the server is swapped: {status}");
        ensure!(
            kib("VmLck:") > Some(0),
            "the server is not locked: {status}"
        );
        let score = self.must(&format!("cat /proc/{pid}/oom_score_adj"))?;
        ensure!(score == "-1000", "OOM score {score}");
        Ok(())
    }
}
