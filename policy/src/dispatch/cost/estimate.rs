//! One number from the last few of a kind, of which some lie.

/// How many of the last are looked at: enough to throw two away, few enough to follow a change.
const WINDOW: usize = 5;

/// The mean of the last five but the least and the largest. Of two the lesser: what is odd about a
/// first run or load, a cold cache or a queue that was not seen, makes it longer.
#[derive(Debug, Default, Clone)]
pub(super) struct Estimate {
    last: [u64; WINDOW],
    seen: u8,
    next: u8,
    value: u64,
}

impl Estimate {
    /// What a profile says: worth two of those that come, so that the first cannot put it aside.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outliers_do_not_count_and_a_change_does_after_a_few() {
        let mut estimate = Estimate::default();
        let mut after = |sample| {
            estimate.add(sample);
            estimate.get().unwrap()
        };
        assert_eq!(after(900), 900);
        assert_eq!(after(100), 100, "the first was a cold one");
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
