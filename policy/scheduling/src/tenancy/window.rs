//! Recent GPU time of a tenant, and its recent peak of GPUs in use at once.

use std::time::Duration;

use millrace_types::Timestamp;

/// Period over which GPU time counts towards a share.
pub const WINDOW: Duration = Duration::from_secs(10);
/// Number of steps in the window, which moves by one step at a time so that its cost is constant.
const STEPS: usize = 20;
const STEP_NS: u64 = WINDOW.as_nanos() as u64 / STEPS as u64;

/// GPU time by step; the newest step is still in progress.
#[derive(Debug, Clone, Default)]
pub(super) struct GpuTimeWindow {
    steps: [u64; STEPS],
    /// Number of the newest step since time 0.
    newest: u64,
    total: u64,
}

impl GpuTimeWindow {
    fn advance(&mut self, now: Timestamp) {
        let newest = now.0 / STEP_NS;
        let passed = newest.saturating_sub(self.newest).min(STEPS as u64);
        for number in (newest + 1).saturating_sub(passed)..=newest {
            let step = &mut self.steps[(number % STEPS as u64) as usize];
            if passed > 0 {
                self.total -= std::mem::take(step);
            }
        }
        self.newest = self.newest.max(newest);
    }

    /// Adds the work of a GPU from `from` until `now`. Time before the window does not count.
    pub(super) fn add(&mut self, from: Timestamp, now: Timestamp) {
        self.advance(now);
        let oldest = self.newest.saturating_sub(STEPS as u64 - 1);
        for number in (from.0 / STEP_NS).max(oldest)..=now.0 / STEP_NS {
            let begins = from.0.max(number * STEP_NS);
            let ends = now.0.min((number + 1) * STEP_NS);
            let ns = ends.saturating_sub(begins);
            self.steps[(number % STEPS as u64) as usize] += ns;
            self.total += ns;
        }
    }

    /// Returns the GPU time in the window.
    pub(super) fn total(&mut self, now: Timestamp) -> Duration {
        self.advance(now);
        Duration::from_nanos(self.total)
    }
}

/// Maximum of a count, by step.
#[derive(Debug, Clone, Default)]
pub(super) struct PeakWindow {
    steps: [u32; STEPS],
    /// Number of the newest step since time 0.
    newest: u64,
    count: u32,
}

impl PeakWindow {
    fn advance(&mut self, now: Timestamp) {
        let newest = now.0 / STEP_NS;
        let passed = newest.saturating_sub(self.newest).min(STEPS as u64);
        for number in (newest + 1).saturating_sub(passed)..=newest {
            self.steps[(number % STEPS as u64) as usize] = self.count;
        }
        self.newest = self.newest.max(newest);
    }

    /// Sets the count from now on.
    pub(super) fn set(&mut self, now: Timestamp, count: u32) {
        self.advance(now);
        self.count = count;
        let step = &mut self.steps[(self.newest % STEPS as u64) as usize];
        *step = count.max(*step);
    }

    /// Returns the maximum at any moment of the window.
    pub(super) fn most(&mut self, now: Timestamp) -> u32 {
        self.advance(now);
        self.steps.iter().copied().max().unwrap_or(0)
    }
}

/// Returns when the window next moves.
pub(super) fn moves_on(now: Timestamp) -> Timestamp {
    Timestamp((now.0 / STEP_NS + 1) * STEP_NS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn at(ms: u64) -> Timestamp {
        Timestamp(ms * 1_000_000)
    }

    #[test]
    fn gpu_time_counts_until_the_window_has_moved_past_it() {
        let mut window = GpuTimeWindow::default();
        window.add(at(1_000), at(3_000));
        assert_eq!(window.total(at(3_000)), Duration::from_secs(2));
        assert_eq!(window.total(at(10_900)), Duration::from_secs(2));
        assert_eq!(window.total(at(12_000)), Duration::from_secs(1) - Duration::from_millis(500));
        assert_eq!(window.total(at(60_000)), Duration::ZERO);
        window.add(at(60_000), at(100_000));
        assert!(window.total(at(100_000)) <= WINDOW, "a long run fills the window at most");
    }

    #[test]
    fn a_peak_counts_until_the_window_has_moved_past_it() {
        let mut peak = PeakWindow::default();
        peak.set(at(1_000), 3);
        peak.set(at(1_100), 1);
        assert_eq!((peak.most(at(1_100)), peak.most(at(10_900))), (3, 3));
        assert_eq!(peak.most(at(11_000)), 1, "the present count remains");
        peak.set(at(11_200), 0);
        assert_eq!((peak.most(at(21_400)), peak.most(at(90_000))), (0, 0));
    }

    proptest! {
        /// Slices only blur the beginning of the window.
        #[test]
        fn total_matches_the_window_to_within_a_slice(
            turns in prop::collection::vec((0u64..3_000, 0u64..20_000), 1..40),
        ) {
            let mut window = GpuTimeWindow::default();
            let mut now = 0;
            let mut intervals = Vec::new();
            for (gap, length) in turns {
                let from = now + gap;
                now = from + length;
                window.add(at(from), at(now));
                intervals.push((from, now));
                let since = |begin: u64| {
                    intervals.iter().map(|&(from, to): &(u64, u64)| to.saturating_sub(from.max(begin))).sum::<u64>()
                };
                let begin = now.saturating_sub(10_000);
                let total = window.total(at(now)).as_millis();
                prop_assert!(total <= u128::from(since(begin)));
                prop_assert!(total >= u128::from(since(begin + 500)));
            }
        }
    }
}
