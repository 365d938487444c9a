//! How long to wait before trying again: doubling from a base to a ceiling, each wait drawn from
//! the upper half of its step, so that workers which lost the same peer do not return together.
//! Seeded: the same seed gives the same waits.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

/// The waits of one thing that is tried again and again.
#[derive(Debug)]
pub(crate) struct Backoff {
    base: Duration,
    ceiling: Duration,
    failures: u32,
    rng: SmallRng,
}

impl Backoff {
    /// Waits from `base`, doubling up to `ceiling`.
    #[must_use]
    pub(crate) fn new(base: Duration, ceiling: Duration, seed: u64) -> Self {
        Self { base, ceiling, failures: 0, rng: SmallRng::seed_from_u64(seed) }
    }

    /// Counts a failure and gives the wait before the next try.
    pub(crate) fn failed(&mut self) -> Duration {
        let wait = self.draw(self.failures);
        self.failures = self.failures.saturating_add(1);
        wait
    }

    /// The wait after `failures` earlier ones, for whoever counts them itself.
    pub(crate) fn draw(&mut self, failures: u32) -> Duration {
        // 2^20 times any sensible base is beyond any sensible ceiling.
        let step = self.base.saturating_mul(1 << failures.min(20)).min(self.ceiling);
        step.mul_f64(self.rng.random_range(0.5..=1.0))
    }

    /// Begins again at the base.
    pub(crate) fn succeeded(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: Duration = Duration::from_millis(100);
    const CEILING: Duration = Duration::from_secs(2);

    #[test]
    fn doubles_to_the_ceiling_within_the_upper_half_of_each_step() {
        let mut backoff = Backoff::new(BASE, CEILING, 7);
        for step_ms in [100, 200, 400, 800, 1600, 2000, 2000] {
            let step = Duration::from_millis(step_ms);
            let wait = backoff.failed();
            assert!(wait <= step && wait >= step / 2, "{wait:?} for {step:?}");
        }
        backoff.succeeded();
        assert!(backoff.failed() <= BASE);
    }

    #[test]
    fn the_same_seed_gives_the_same_waits_and_another_seed_others() {
        let waits = |seed| {
            let mut backoff = Backoff::new(BASE, CEILING, seed);
            (0..8).map(|_| backoff.failed()).collect::<Vec<_>>()
        };
        assert_eq!(waits(1), waits(1));
        assert_ne!(waits(1), waits(2));
    }

    #[test]
    fn never_overflows() {
        let mut backoff = Backoff::new(Duration::from_secs(1), CEILING, 1);
        assert!(backoff.draw(u32::MAX) <= CEILING);
    }
}
