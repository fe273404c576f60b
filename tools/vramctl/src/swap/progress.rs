//! How a swapoff goes: pure arithmetic over samples of what is left.

use std::collections::VecDeque;
use std::time::Duration;

use ublk_vram::size::human;

/// The rate is that of the last so many samples: swapoff is fast at first and slow at its end.
const WINDOW: usize = 10;

/// What was left when.
#[derive(Debug, Default)]
pub struct Progress {
    total: u64,
    samples: VecDeque<(Duration, u64)>,
}

impl Progress {
    /// A swapoff that begins with `total` bytes in use.
    pub fn new(total: u64) -> Progress {
        Progress {
            total,
            samples: VecDeque::from([(Duration::ZERO, total)]),
        }
    }

    /// Notes that `left` bytes are in use `at` so long after the begin.
    pub fn sample(&mut self, at: Duration, left: u64) {
        // Others may still have swapped in or out before the kernel closed the device for writing.
        self.total = self.total.max(left);
        self.samples.push_back((at, left));
        while self.samples.len() > WINDOW + 1 {
            self.samples.pop_front();
        }
    }

    /// Bytes a second over the window; `None` before there are two samples.
    pub fn rate(&self) -> Option<f64> {
        let ((from, before), (to, after)) = (self.samples.front()?, self.samples.back()?);
        let seconds = to.checked_sub(*from)?.as_secs_f64();
        (seconds > 0.0).then(|| before.saturating_sub(*after) as f64 / seconds)
    }

    /// One line: `481M of 1G left, 78.3 MiB/s, about 7 s`.
    pub fn line(&self) -> String {
        let left = self.samples.back().map_or(0, |(_, left)| *left);
        let mut line = format!("{} of {} left", human(left), human(self.total));
        if let Some(rate) = self.rate() {
            line.push_str(&format!(", {:.1} MiB/s", rate / f64::from(1 << 20)));
            if rate > 0.0 {
                line.push_str(&format!(", about {:.0} s", (left as f64 / rate).ceil()));
            }
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn rate_and_time_left() {
        let mut progress = Progress::new(1000 * MIB);
        assert_eq!(progress.line(), "1000M of 1000M left");
        assert_eq!(progress.rate(), None);
        progress.sample(Duration::from_secs(1), 900 * MIB);
        assert_eq!(
            progress.line(),
            "900M of 1000M left, 100.0 MiB/s, about 9 s"
        );
        progress.sample(Duration::from_secs(2), 850 * MIB);
        assert_eq!(
            progress.line(),
            "850M of 1000M left, 75.0 MiB/s, about 12 s"
        );
    }

    #[test]
    fn the_rate_is_that_of_the_last_seconds() {
        let mut progress = Progress::new(1000 * MIB);
        for second in 1..=5 {
            progress.sample(Duration::from_secs(second), (1000 - 100 * second) * MIB);
        }
        for second in 6..=20 {
            progress.sample(Duration::from_secs(second), 500 * MIB);
        }
        assert_eq!(progress.rate(), Some(0.0));
        assert_eq!(progress.line(), "500M of 1000M left, 0.0 MiB/s");
    }

    #[test]
    fn more_than_at_the_begin_is_no_negative_rate() {
        let mut progress = Progress::new(MIB);
        progress.sample(Duration::from_secs(1), 2 * MIB);
        assert_eq!(progress.line(), "2M of 2M left, 0.0 MiB/s");
        progress.sample(Duration::from_secs(1), MIB);
        assert!(progress.rate().is_some());
    }
}
