//! Figures as Markdown, and their place in a document.

use std::{fmt::Write as _, path::Path};

use anyhow::{Context, Result};

use super::fio::Unit;
use crate::demo::story::grouped;

const BEGIN: &str = "<!-- begin: written by cargo xtask bench -->";
const END: &str = "<!-- end: written by cargo xtask bench -->";

/// Figures of one job, one for each device.
pub struct Row {
    pub name: &'static str,
    pub unit: Unit,
    pub figures: Vec<f64>,
}

/// A table whose first device is what the others are compared with.
pub fn table(devices: &[&str], rows: &[Row]) -> String {
    let mut text = String::from("| job | unit |");
    for device in devices {
        let _ = write!(text, " {device} |");
    }
    text.push_str("\n| --- | --- |");
    text.push_str(&" ---: |".repeat(devices.len()));
    text.push('\n');
    for row in rows {
        let unit = match row.unit {
            Unit::Iops => "IOPS",
            Unit::Megabytes => "MB/s",
        };
        let _ = write!(text, "| {} | {unit} |", row.name);
        for (index, figure) in row.figures.iter().enumerate() {
            let whole = grouped(figure.round() as u64);
            match row.figures.first() {
                Some(first) if index > 0 => {
                    let _ = write!(text, " {whole} ({:.2}) |", figure / first);
                }
                _ => {
                    let _ = write!(text, " {whole} |");
                }
            }
        }
        text.push('\n');
    }
    text
}

/// What one server takes of the machine's memory, in bytes.
pub struct Cost {
    pub what: String,
    pub cost: u64,
    pub arena: u64,
    pub locked: u64,
    pub resident: u64,
}

/// A table of what servers cost.
pub fn costs(costs: &[Cost]) -> String {
    let mut text = String::from(
        "| device | cost | I/O buffers | rest | locked | resident |\n\
         | --- | ---: | ---: | ---: | ---: | ---: |\n",
    );
    let mib = |bytes: u64| format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20));
    for cost in costs {
        let figures = [
            cost.cost,
            cost.arena,
            cost.cost.saturating_sub(cost.arena),
            cost.locked,
            cost.resident,
        ];
        let _ = writeln!(text, "| {} | {} |", cost.what, figures.map(mib).join(" | "));
    }
    text
}

/// Puts `section` between the two markers of a document.
///
/// # Errors
/// When the document cannot be read or written, or lacks a marker.
pub fn write(path: &Path, section: &str) -> Result<()> {
    let document =
        std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let document = replaced(&document, section).with_context(|| {
        format!(
            "{} lacks the lines `{BEGIN}` and `{END}`, in this order",
            path.display()
        )
    })?;
    std::fs::write(path, document).with_context(|| format!("cannot write {}", path.display()))
}

fn replaced(document: &str, section: &str) -> Option<String> {
    let (before, rest) = document.split_once(BEGIN)?;
    let (_, after) = rest.split_once(END)?;
    Some(format!(
        "{before}{BEGIN}\n\n{}\n\n{END}{after}",
        section.trim()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_to_the_first_device() {
        let rows = [Row {
            name: "reads",
            unit: Unit::Iops,
            figures: vec![10000.0, 2500.4],
        }];
        let expected = "| job | unit | brd | ours |\n| --- | --- | ---: | ---: |\n\
                        | reads | IOPS | 10 000 | 2 500 (0.25) |\n";
        assert_eq!(table(&["brd", "ours"], &rows), expected);
    }

    #[test]
    fn a_section_is_replaced_and_the_rest_kept() {
        let document = format!("a\n{BEGIN}\nold\n{END}\nb\n");
        let once = replaced(&document, "new\n").unwrap();
        assert_eq!(once, format!("a\n{BEGIN}\n\nnew\n\n{END}\nb\n"));
        assert_eq!(replaced(&once, "new").unwrap(), once);
        assert!(replaced("no markers", "new").is_none());
        assert!(replaced(&format!("{END}{BEGIN}"), "new").is_none());
    }
}
