//! Waits between retries. The waits double from a base to a ceiling, and each wait is drawn from
//! the upper half of its step, so that tries that failed together are not repeated together. The
//! same seed gives the same waits.
//!
//! [`BackoffDelays`] only computes waits, for callers that count failures themselves. [`Backoff`] restarts
//! a process: at once after its first death, and again at once after a stable life.

use std::time::Duration;

use millrace_types::Timestamp;

/// The waits between tries.
#[derive(Debug, Clone)]
pub struct BackoffDelays {
    base: Duration,
    ceiling: Duration,
    seed: u64,
}

impl BackoffDelays {
    /// Returns waits that double from `base` up to `ceiling`.
    #[must_use]
    pub fn new(base: Duration, ceiling: Duration, seed: u64) -> Self {
        Self { base, ceiling, seed }
    }

    /// Returns the wait after a failure, given the number of earlier failures.
    pub fn after(&mut self, failures: u32) -> Duration {
        // The exponent is capped: 2^20 times any sensible base is beyond any sensible ceiling.
        let step = self.base.saturating_mul(1 << failures.min(20)).min(self.ceiling);
        let half = u64::try_from(step.as_nanos() / 2).unwrap_or(u64::MAX / 2);
        step.saturating_sub(Duration::from_nanos(self.draw() % (half + 1)))
    }

    /// Returns the next number of SplitMix64.
    fn draw(&mut self) -> u64 {
        self.seed = self.seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.seed ^ (self.seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Timing of restarts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RestartLimits {
    /// Wait before the second restart; the first restart is immediate.
    pub base: Duration,
    /// Longest wait.
    pub ceiling: Duration,
    /// Lifetime after which the next death counts as the first again.
    pub stable: Duration,
}

/// Restart state of one process.
#[derive(Debug, Clone)]
pub struct Backoff {
    stable: Duration,
    deaths: u32,
    waits: BackoffDelays,
}

impl Backoff {
    /// Starts with no death counted. The same seed gives the same waits.
    #[must_use]
    pub fn new(limits: RestartLimits, seed: u64) -> Self {
        Self {
            stable: limits.stable,
            deaths: 0,
            waits: BackoffDelays::new(limits.base, limits.ceiling, seed),
        }
    }

    /// Counts a death and returns the time of the next start. `alive_since` is `None` if the
    /// process never became ready.
    pub fn died(&mut self, now: Timestamp, alive_since: Option<Timestamp>) -> Timestamp {
        if alive_since.is_some_and(|since| now.since(since) >= self.stable) {
            self.deaths = 0;
        }
        self.deaths = self.deaths.saturating_add(1);
        if self.deaths == 1 {
            return now;
        }
        now + self.waits.after(self.deaths - 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RestartLimits = RestartLimits {
        base: Duration::from_millis(100),
        ceiling: Duration::from_secs(1),
        stable: Duration::from_secs(10),
    };

    #[test]
    fn the_first_restart_is_immediate_and_later_waits_double_to_the_ceiling() {
        let mut backoff = Backoff::new(LIMITS, 7);
        assert_eq!(backoff.died(Timestamp(5), None), Timestamp(5));
        for step_ms in [100, 200, 400, 800, 1000, 1000, 1000] {
            let wait = backoff.died(Timestamp::ZERO, None).since(Timestamp::ZERO);
            let step = Duration::from_millis(step_ms);
            assert!(wait >= step / 2 && wait <= step, "{wait:?} of {step:?}");
        }
    }

    #[test]
    fn a_stable_life_resets_the_backoff() {
        let mut backoff = Backoff::new(LIMITS, 7);
        let late = Timestamp::ZERO + LIMITS.stable;
        for _ in 0..4 {
            backoff.died(Timestamp::ZERO, Some(Timestamp::ZERO));
        }
        assert_eq!(backoff.died(late, Some(Timestamp::ZERO)), late);
        assert!(backoff.died(late, Some(late)) > late);
    }

    #[test]
    fn the_same_seed_gives_the_same_waits() {
        let waits = |seed| {
            let mut backoff = Backoff::new(LIMITS, seed);
            (0..6).map(|_| backoff.died(Timestamp::ZERO, None)).collect::<Vec<_>>()
        };
        assert_eq!(waits(1), waits(1));
        assert_ne!(waits(1), waits(2));
    }
    #[test]
    fn waits_double_to_the_ceiling_and_never_overflow() {
        let mut waits = BackoffDelays::new(LIMITS.base, LIMITS.ceiling, 7);
        for (failures, step_ms) in [(0, 100), (1, 200), (2, 400), (3, 800), (4, 1000), (u32::MAX, 1000)] {
            let wait = waits.after(failures);
            let step = Duration::from_millis(step_ms);
            assert!(wait >= step / 2 && wait <= step, "{wait:?} of {step:?}");
        }
    }
}
