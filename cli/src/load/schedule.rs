//! The planned send times of an open loop. Pure logic: offsets from the start of the run.

use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use crate::load::args::ArrivalPattern;

/// An endless series of send times, as offsets from the start of a run.
#[derive(Debug)]
pub(super) struct SendSchedule {
    rate: f64,
    arrival: ArrivalPattern,
    random: SmallRng,
    sent: u64,
    elapsed_s: f64,
}

impl SendSchedule {
    /// Returns a schedule of `rate` requests per second.
    pub(super) fn new(rate: f64, arrival: ArrivalPattern, seed: u64) -> Self {
        Self { rate, arrival, random: SmallRng::seed_from_u64(seed), sent: 0, elapsed_s: 0.0 }
    }
}

impl Iterator for SendSchedule {
    type Item = Duration;
    fn next(&mut self) -> Option<Duration> {
        self.elapsed_s = match self.arrival {
            // Compute from the count: a running sum would drift.
            ArrivalPattern::Uniform => self.sent as f64 / self.rate,
            // The inverse of the exponential distribution. 1 - x is in (0, 1], so the logarithm is
            // finite.
            ArrivalPattern::Poisson => self.elapsed_s - (1.0 - self.random.random::<f64>()).ln() / self.rate,
        };
        self.sent += 1;
        Duration::try_from_secs_f64(self.elapsed_s).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_gaps_are_equal_and_do_not_drift() {
        let mut schedule = SendSchedule::new(1000.0, ArrivalPattern::Uniform, 0);
        assert_eq!(schedule.next(), Some(Duration::ZERO));
        assert_eq!(schedule.next(), Some(Duration::from_millis(1)));
        assert_eq!(schedule.nth(99_998), Some(Duration::from_secs(100)));
    }

    #[test]
    fn poisson_gaps_have_the_rate_as_mean_and_deviation() {
        let moments: Vec<f64> = SendSchedule::new(200.0, ArrivalPattern::Poisson, 7)
            .take(20_001)
            .map(|at| at.as_secs_f64())
            .collect();
        let gaps: Vec<f64> = moments.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
        assert!((mean * 200.0 - 1.0).abs() < 0.03, "mean {mean}");
        assert!((variance.sqrt() * 200.0 - 1.0).abs() < 0.05, "deviation {}", variance.sqrt());
        assert!(gaps.iter().all(|&gap| gap >= 0.0));
    }

    #[test]
    fn equal_seeds_give_equal_series() {
        let series =
            |seed| SendSchedule::new(10.0, ArrivalPattern::Poisson, seed).take(5).collect::<Vec<_>>();
        assert_eq!(series(1), series(1));
        assert_ne!(series(1), series(2));
    }
}
