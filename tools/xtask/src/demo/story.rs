//! The steps that both machines share, and how they are told.
//!
//! Every figure that is printed was read from the kernel, the server or the program during this run.
//! A figure that means failure (a wrong page, an I/O error, a swapped server) ends the story with an
//! error in place of a nice line.

use std::{
    io::{Write, stdout},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::machine::{Machine, Ran};

pub const MIB: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// A command that only looks.
const SHORT: Duration = Duration::from_secs(60);

/// Prints `label  text`. That nobody reads it does not end a demo, which has a device to take away.
pub fn tell(label: &str, text: &str) {
    let _ = writeln!(stdout(), "  {label:<9} {text}");
}

/// Prints a command as it could be typed.
pub fn prompt(command: &str) {
    let _ = writeln!(stdout(), "\n  $ {command}");
}

/// Bytes in MiB: whole ones without a fraction.
pub fn mib(bytes: u64) -> String {
    if bytes.is_multiple_of(MIB) || bytes >= 1000 * MIB {
        format!("{} MiB", (bytes + MIB / 2) / MIB)
    } else {
        format!("{:.1} MiB", bytes as f64 / MIB as f64)
    }
}

/// `1234567` as `1 234 567`.
pub fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(' ');
        }
        text.push(digit);
    }
    text
}

/// A number of the output of `key value` lines, as /proc has them.
pub fn number_of(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()?.trim_end_matches(':') == key).then(|| words.next()?.parse().ok())?
    })
}

/// A story about one device.
pub struct Story<'m> {
    pub machine: &'m dyn Machine,
    pub name: &'static str,
    /// How `vramctl` is called here.
    pub vramctl: String,
}

/// How a program's memory is asked for.
pub struct Pressure {
    /// Runs before the program, in the same shell.
    pub prelude: String,
    /// How `xtask` is called here.
    pub xtask: String,
    pub mib: u64,
    pub rounds: u32,
    /// What keeps the program out of RAM, for the line that tells it.
    pub ram: String,
}

impl Story<'_> {
    fn look(&self, script: &str) -> Result<String> {
        Ok(self.machine.must(script, SHORT)?.stdout)
    }

    fn vmstat(&self, key: &str) -> Result<u64> {
        number_of(&self.look("cat /proc/vmstat")?, key)
            .with_context(|| format!("no {key} in /proc/vmstat"))
    }

    /// What `vramctl show --json` says of the device.
    pub fn show(&self) -> Result<Value> {
        let text = self.look(&format!("{} show {} --json", self.vramctl, self.name))?;
        let mut shown: Value = serde_json::from_str(&text).context("show --json")?;
        Ok(shown["device"].take())
    }

    /// Adds the device; `options` follow its name. When this fails there is none.
    pub fn add(&self, options: &str, limit: Duration) -> Result<Ran> {
        prompt(&format!("vramctl add {} {options}", self.name));
        let script = format!("{} add {} {options}", self.vramctl, self.name);
        self.machine.sh_whole(&script, limit)?.ok(&script)
    }

    /// Tells what was added and what it costs.
    pub fn tell_device(&self, added: &Ran) -> Result<()> {
        let show = self.show()?;
        let size = show["size"].as_u64().context("no size in show")?;
        tell(
            "device",
            &format!(
                "{}, {}, usable after {:.1} s: allocated, zeroed and read back",
                added.stdout.trim(),
                mib(size),
                added.took.as_secs_f64()
            ),
        );
        let memory = |key: &str| show["memory"][key].as_u64().unwrap_or(0);
        tell(
            "costs",
            &format!(
                "{} of RAM, locked: {} I/O buffers, {} the server",
                mib(memory("cost")),
                mib(memory("arena")),
                mib(memory("cost").saturating_sub(memory("arena")))
            ),
        );
        Ok(())
    }

    /// Makes it swap, before all other swap.
    pub fn swap_on(&self, priority: u16) -> Result<()> {
        prompt(&format!("vramctl swap on {} -p {priority}", self.name));
        self.look(&format!(
            "{} swap on {} -p {priority}",
            self.vramctl, self.name
        ))?;
        let show = self.show()?;
        let size = show["swap"]["size"].as_u64().context("it is no swap")?;
        tell(
            "swap",
            &format!(
                "{} of {}, priority {}",
                show["device"].as_str().unwrap_or("?"),
                mib(size),
                show["swap"]["priority"]
            ),
        );
        Ok(())
    }

    /// Runs the program that needs more than there is, and tells what moved and what was checked.
    pub fn press(&self, pressure: &Pressure, limit: Duration) -> Result<()> {
        let Pressure { mib: size, .. } = pressure;
        let before = (self.vmstat("pswpout")?, self.vmstat("pswpin")?);
        let hog = format!(
            "{} hog --mib {size} --rounds {}",
            pressure.xtask, pressure.rounds
        );
        prompt(&format!(
            "xtask hog --mib {size} --rounds {}",
            pressure.rounds
        ));
        let ran = self
            .machine
            .must(&format!("{}exec {hog}", pressure.prelude), limit)?;
        let moved = (
            (self.vmstat("pswpout")? - before.0) * PAGE,
            (self.vmstat("pswpin")? - before.1) * PAGE,
        );
        let report: Value = serde_json::from_str(ran.stdout.lines().last().unwrap_or_default())
            .with_context(|| format!("the program said {:?}", ran.stdout))?;
        let number = |key: &str| report[key].as_u64().with_context(|| format!("no {key}"));
        let seconds = ran.took.as_secs_f64();
        tell(
            "program",
            &format!(
                "filled and checked {size} MiB {} times in {seconds:.1} s with {}",
                pressure.rounds, pressure.ram
            ),
        );
        ensure!(
            moved.0 > size * MIB / 16,
            "only {} were swapped out: this was no pressure",
            mib(moved.0)
        );
        tell(
            "swapped",
            &format!(
                "{} out and {} in, {} a second together",
                mib(moved.0),
                mib(moved.1),
                mib(((moved.0 + moved.1) as f64 / seconds) as u64 / MIB * MIB)
            ),
        );
        let (pages, bad) = (number("pages")? * number("rounds")?, number("bad")?);
        ensure!(bad == 0, "{bad} of {pages} pages were wrong");
        tell(
            "checked",
            &format!("{} pages, every byte: {bad} wrong", grouped(pages)),
        );
        self.server_is_well()
    }

    fn server_is_well(&self) -> Result<()> {
        let show = self.show()?;
        let queues = show["queue"].as_array().context("no queues in show")?;
        let sum =
            |key: &str| -> u64 { queues.iter().filter_map(|queue| queue[key].as_u64()).sum() };
        let status = self.look(&format!("cat /proc/{}/status", show["pid"]))?;
        let swapped = number_of(&status, "VmSwap").context("no VmSwap of the server")?;
        let errors = sum("errors");
        if swapped > 0 || errors > 0 {
            bail!(
                "{errors} I/O errors, and {swapped} kB of the server are swapped: both must be 0"
            );
        }
        tell(
            "server",
            &format!(
                "{} reads and {} writes, {errors} errors; {swapped} bytes of it swapped",
                grouped(sum("reads")),
                grouped(sum("writes"))
            ),
        );
        Ok(())
    }

    /// Takes the swap off and the device away.
    pub fn remove(&self, limit: Duration) -> Result<()> {
        prompt(&format!("vramctl remove {} --swapoff", self.name));
        let script = format!("{} remove {} --swapoff", self.vramctl, self.name);
        let ran = self.machine.sh_whole(&script, limit)?.ok(&script)?;
        let left = self.look(&format!("{} list -n -o NAME", self.vramctl))?;
        ensure!(
            !left.lines().any(|name| name.trim() == self.name),
            "{} is still there",
            self.name
        );
        tell(
            "removed",
            &format!(
                "in {:.1} s: swapped off, disk gone, memory wiped",
                ran.took.as_secs_f64()
            ),
        );
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_for_people() {
        assert_eq!(mib(512 * MIB), "512 MiB");
        assert_eq!(mib(MIB * 3 / 2), "1.5 MiB");
        assert_eq!(mib(1500 * MIB + 1), "1500 MiB");
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(123_456), "123 456");
        assert_eq!(grouped(1_234_567), "1 234 567");
    }

    #[test]
    fn proc_files_are_read_by_key() {
        let text = "VmSwap:\t       0 kB\npswpin 12\npswpin_x 13\n";
        assert_eq!(number_of(text, "VmSwap"), Some(0));
        assert_eq!(number_of(text, "pswpin"), Some(12));
        assert_eq!(number_of(text, "none"), None);
    }
}
