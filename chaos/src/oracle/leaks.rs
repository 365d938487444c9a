//! The check that a process's resources do not grow: a regression line through the samples rises by
//! no more than noise. The first fifth of the samples is ignored, because caches fill and the
//! allocator finds its size.

use std::time::Duration;

use crate::cluster::ProcessUsage;
use crate::report::PromiseCheck;

/// Minimum span of the samples. A shorter span cannot tell a leak from a start.
const JUDGED_FROM: Duration = Duration::from_secs(60);
const MIB: u64 = 1024 * 1024;

/// The resources of a process at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsageSample {
    /// Time since the start of the timeline.
    pub at: Duration,
    pub usage: ProcessUsage,
}

/// A resource that may not grow. The allowed rise of the line is the greater of two values: some
/// hundredths of the resource's level, and an absolute amount.
struct UsageSeries {
    name: &'static str,
    of: fn(&ProcessUsage) -> u64,
    hundredths: u64,
    at_least: u64,
    unit: u64,
    symbol: &'static str,
}

const SERIES: [UsageSeries; 3] = [
    UsageSeries {
        name: "the worker's own memory is flat",
        of: |usage| usage.private,
        hundredths: 5,
        at_least: 4 * MIB,
        unit: MIB,
        symbol: " MiB",
    },
    UsageSeries {
        name: "the shared memory it mapped is flat",
        of: |usage| usage.shared,
        hundredths: 1,
        at_least: 4 * MIB,
        unit: MIB,
        symbol: " MiB",
    },
    UsageSeries {
        name: "its open files are flat",
        of: |usage| usage.fds,
        hundredths: 2,
        at_least: 4,
        unit: 1,
        symbol: "",
    },
];

/// Judges samples, which are in the order of their times.
#[must_use]
pub fn check(samples: &[UsageSample]) -> Vec<PromiseCheck> {
    SERIES.iter().map(|series| series.check(samples)).collect()
}

impl UsageSeries {
    fn check(&self, samples: &[UsageSample]) -> PromiseCheck {
        let (Some(first), Some(last)) = (samples.first(), samples.last()) else {
            return PromiseCheck::fail(self.name, "no sample was taken", Vec::new());
        };
        let judged = &samples[samples.len() / 5..];
        let show = |value: f64| format!("{:.1}{}", value / self.unit as f64, self.symbol);
        let value = |sample: &UsageSample| (self.of)(&sample.usage) as f64;
        let max = samples.iter().map(value).fold(0.0, f64::max);
        let seen = format!("first {}, last {}, most {}", show(value(first)), show(value(last)), show(max));
        let span = last.at - first.at;
        if span < JUDGED_FROM {
            return PromiseCheck::pass(self.name, format!("{seen}; {} is too short to judge", seconds(span)));
        }
        let (level, rise) =
            line(&judged.iter().map(|it| (it.at.as_secs_f64(), value(it))).collect::<Vec<_>>());
        let allowed = (level * self.hundredths as f64 / 100.0).max(self.at_least as f64);
        let detail = format!(
            "{seen}; a line through the last {} rises by {}, fails beyond {}",
            seconds(last.at - judged[0].at),
            show(rise),
            show(allowed)
        );
        let table = || samples.iter().map(|it| format!("{:>9.3}  {:?}", it.at.as_secs_f64(), it.usage));
        PromiseCheck::of(self.name, detail, if rise > allowed { table().collect() } else { Vec::new() })
    }
}

fn seconds(span: Duration) -> String {
    format!("{:.0} s", span.as_secs_f64())
}

/// Returns the mean of the points, and the rise of the least-squares line from the first to the
/// last point.
fn line(points: &[(f64, f64)]) -> (f64, f64) {
    let count = points.len().max(1) as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let x = mean(|it| it.0);
    let y = mean(|it| it.1);
    let spread: f64 = points.iter().map(|it| (it.0 - x).powi(2)).sum();
    let together: f64 = points.iter().map(|it| (it.0 - x) * (it.1 - y)).sum();
    let slope = if spread > 0.0 { together / spread } else { 0.0 };
    let span = points.last().map_or(0.0, |it| it.0) - points.first().map_or(0.0, |it| it.0);
    (y, slope * span)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::CheckVerdict;

    /// Returns the verdict on the private memory in MiB, with a sample every second.
    fn verdict(seconds: u64, private: impl Fn(u64) -> u64) -> CheckVerdict {
        let sample = |second| UsageSample {
            at: Duration::from_secs(second),
            usage: ProcessUsage { private: private(second) * MIB, shared: 0, fds: 20 },
        };
        let checks = check(&(0..=seconds).map(sample).collect::<Vec<_>>());
        assert!(checks[1..].iter().all(|it| it.verdict == CheckVerdict::Pass), "{checks:?}");
        checks[0].verdict
    }

    #[test]
    fn a_leak_is_told_from_noise_and_from_a_start() {
        assert_eq!(verdict(300, |_| 200), CheckVerdict::Pass, "constant");
        assert_eq!(verdict(300, |second| 200 + second % 7 * 20), CheckVerdict::Pass, "noise");
        assert_eq!(verdict(300, |second| 50 + second.min(55) * 5), CheckVerdict::Pass, "a start");
        assert_eq!(verdict(300, |second| 200 + second / 10), CheckVerdict::Fail, "a leak");
        assert_eq!(verdict(30, |second| 200 + second * 10), CheckVerdict::Pass, "too short to judge");
    }

    #[test]
    fn a_run_without_samples_fails() {
        assert!(check(&[]).iter().all(|it| it.verdict == CheckVerdict::Fail));
    }
}
