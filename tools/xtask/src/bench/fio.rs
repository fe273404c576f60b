//! What is measured, and fio's answer to it.

use anyhow::{Context, Result, bail};
use serde_json::Value;

/// One access pattern.
pub struct Job {
    /// As the table names it.
    pub name: &'static str,
    rw: &'static str,
    block: &'static str,
    depth: u32,
    /// What a row's figures are.
    pub unit: Unit,
}

/// What counts: operations for small blocks, bytes for large ones.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Unit {
    Iops,
    Megabytes,
}

const fn small(name: &'static str, rw: &'static str, depth: u32) -> Job {
    Job {
        name,
        rw,
        block: "4k",
        depth,
        unit: Unit::Iops,
    }
}

const fn large(name: &'static str, rw: &'static str, depth: u32) -> Job {
    Job {
        name,
        rw,
        block: "1M",
        depth,
        unit: Unit::Megabytes,
    }
}

pub const JOBS: [Job; 8] = [
    small("4 KiB random read, depth 1", "randread", 1),
    small("4 KiB random write, depth 1", "randwrite", 1),
    small("4 KiB random read, depth 32", "randread", 32),
    small("4 KiB random write, depth 32", "randwrite", 32),
    large("1 MiB sequential read, depth 1", "read", 1),
    large("1 MiB sequential write, depth 1", "write", 1),
    large("1 MiB sequential read, depth 32", "read", 32),
    large("1 MiB sequential write, depth 32", "write", 32),
];

impl Job {
    /// The command line on a device.
    pub fn command(&self, device: &str, seconds: u32) -> String {
        let engine = if self.depth == 1 { "psync" } else { "io_uring" };
        format!(
            "fio --name=bench --filename={device} --direct=1 --ioengine={engine} --iodepth={} \
             --rw={} --bs={} --norandommap --ramp_time=1 --runtime={seconds} --time_based \
             --thread --output-format=json",
            self.depth, self.rw, self.block
        )
    }

    /// The figure in fio's JSON.
    ///
    /// # Errors
    /// When fio had an I/O error or said something else than JSON.
    pub fn figure(&self, output: &str) -> Result<f64> {
        // Notes may come first.
        let json = output.find('{').and_then(|start| output.get(start..));
        let report: Value = serde_json::from_str(json.unwrap_or_default())
            .with_context(|| format!("fio printed no JSON: {output}"))?;
        let job = &report["jobs"][0];
        if job["error"] != 0 {
            bail!("fio saw error {}: {}", job["error"], self.name);
        }
        let side = if self.rw.contains("read") {
            "read"
        } else {
            "write"
        };
        let number = |key: &str| {
            job[side][key]
                .as_f64()
                .filter(|figure| *figure > 0.0)
                .with_context(|| format!("fio's JSON has no {side} {key} above 0"))
        };
        Ok(match self.unit {
            Unit::Iops => number("iops")?,
            Unit::Megabytes => number("bw_bytes")? / 1e6,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_right_side() {
        let output = "fio: a note\n{\"jobs\":[{\"error\":0,\
                      \"read\":{\"iops\":12.5,\"bw_bytes\":51200},\
                      \"write\":{\"iops\":7,\"bw_bytes\":2000000}}]}";
        assert_eq!(JOBS[0].figure(output).unwrap(), 12.5);
        assert_eq!(JOBS[5].figure(output).unwrap(), 2.0);
    }

    #[test]
    fn an_error_or_silence_is_no_figure() {
        let failed = "{\"jobs\":[{\"error\":5,\"read\":{\"iops\":1}}]}";
        assert!(JOBS[0].figure(failed).is_err());
        assert!(JOBS[0].figure("").is_err());
        let nothing = "{\"jobs\":[{\"error\":0,\"read\":{\"iops\":0}}]}";
        assert!(JOBS[0].figure(nothing).is_err());
    }

    #[test]
    fn depth_one_is_a_plain_system_call() {
        assert!(JOBS[0].command("/dev/x", 4).contains("psync"));
        assert!(JOBS[2].command("/dev/x", 4).contains("io_uring"));
    }
}
