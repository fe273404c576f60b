//! What is told of the copy paths of a device: by `show`, and by `bench engine`.

use ublk_vram::device::PathsInfo;
use ublk_vram::size::human;

use crate::table::{Align, Table};

/// What each path was measured to cost, and what it has carried.
pub fn costs(paths: &PathsInfo) -> String {
    let mut table = Table::new([
        ("COPIES", Align::Left),
        ("BY", Align::Left),
        ("START-US", Align::Right),
        ("4K-US", Align::Right),
        ("GB/S", Align::Right),
        ("CARRIED", Align::Right),
        ("BYTES", Align::Right),
        ("SLOWDOWN", Align::Right),
        ("AVOIDED", Align::Left),
    ]);
    for cost in &paths.costs {
        table.row([
            cost.direction.clone(),
            cost.path.clone(),
            micros(cost.start),
            micros(cost.copy + cost.byte * 4096.0),
            // Bytes in a nanosecond.
            if cost.byte > 0.0 {
                format!("{:.1}", 1.0 / cost.byte)
            } else {
                String::new()
            },
            cost.copies.to_string(),
            human(cost.bytes),
            format!("{:.1}", cost.slowdown),
            cost.avoided.clone().unwrap_or_default(),
        ]);
    }
    table.render(true)
}

/// What is chosen for batches of some sizes.
pub fn choices(paths: &PathsInfo) -> String {
    let mut table = Table::new([
        ("COPIES", Align::Left),
        ("SIZE", Align::Right),
        ("TOGETHER", Align::Right),
        ("BY", Align::Left),
        ("EXPECTED-US", Align::Right),
    ]);
    for choice in &paths.choices {
        table.row([
            choice.direction.clone(),
            human(choice.size),
            choice.copies.to_string(),
            choice.path.clone(),
            micros(choice.expected),
        ]);
    }
    table.render(true)
}

fn micros(nanoseconds: f64) -> String {
    format!("{:.2}", nanoseconds / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ublk_vram::device::{PathChoice, PathCost};

    #[test]
    fn costs_and_choices() {
        let paths = PathsInfo {
            costs: vec![PathCost {
                direction: "read".into(),
                path: "dma".into(),
                start: 9_000.0,
                copy: 1_000.0,
                byte: 0.02,
                copies: 3,
                bytes: 12288,
                slowdown: 1.04,
                avoided: None,
            }],
            choices: vec![PathChoice {
                direction: "read".into(),
                size: 1 << 20,
                copies: 16,
                path: "dma".into(),
                expected: 345_678.0,
            }],
        };
        let words = |text: &str, line: usize| -> Vec<String> {
            let line = text.lines().nth(line).unwrap();
            line.split_whitespace().map(str::to_owned).collect()
        };
        assert_eq!(
            words(&costs(&paths), 1),
            [
                "read", "dma", "9.00", "1.08", "50.0", "3", "12K", "1.0", "-"
            ]
        );
        assert_eq!(
            words(&choices(&paths), 1),
            ["read", "1M", "16", "dma", "345.68"]
        );
    }
}
