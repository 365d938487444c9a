//! Robust estimate of a quantity from its last few samples, some of which are outliers.

use std::time::Duration;

/// Number of recent samples: enough to discard two of them, few enough to follow a change.
const WINDOW: usize = 5;

/// Mean of the last five samples without the least and the largest. With two samples, the lesser
/// sample: a cold cache or an unseen queue makes a first run or load longer.
#[derive(Debug, Default, Clone)]
pub(super) struct Estimate {
    last: [u64; WINDOW],
    seen: u8,
    next: u8,
    value: u64,
}

impl Estimate {
    /// Creates an estimate from a profile, which counts as two samples, so that the first
    /// measurement cannot override the profile.
    pub(super) fn profiled(value: u64) -> Self {
        let mut estimate = Self::default();
        (0..2).for_each(|_| estimate.add(value));
        estimate
    }

    pub(super) fn add(&mut self, sample: u64) {
        self.last[usize::from(self.next)] = sample;
        self.next = (self.next + 1) % WINDOW as u8;
        self.seen = (self.seen + 1).min(WINDOW as u8);
        let mut sorted = self.last;
        let sorted = &mut sorted[..usize::from(self.seen)];
        sorted.sort_unstable();
        let kept = match sorted.len() {
            1 | 2 => &sorted[..1],
            more => &sorted[1..more - 1],
        };
        let sum: u128 = kept.iter().map(|&sample| u128::from(sample)).sum();
        self.value = (sum / kept.len() as u128) as u64;
    }

    pub(super) fn get(&self) -> Option<u64> {
        (self.seen > 0).then_some(self.value)
    }
}

/// Returns a time in nanoseconds, the unit of estimates.
pub(super) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_ignores_outliers_and_follows_a_change() {
        let mut estimate = Estimate::default();
        let mut after = |sample| {
            estimate.add(sample);
            estimate.get().unwrap()
        };
        assert_eq!(after(900), 900);
        assert_eq!(after(100), 100, "the first sample was cold");
        assert_eq!(after(102), 102);
        assert_eq!(after(104), 103);
        assert_eq!(after(5000), (900 + 102 + 104) / 3);
        assert_eq!(after(100), (100 + 102 + 104) / 3, "900 is forgotten, 5000 is ignored");
        assert_eq!([after(200), after(200), after(200), after(200)], [135, 168, 200, 200]);
        assert_eq!(after(u64::MAX), 200);
        assert_eq!(Estimate::default().get(), None);
        let mut profiled = Estimate::profiled(60);
        profiled.add(1);
        assert_eq!(profiled.get(), Some(60));
    }
}
