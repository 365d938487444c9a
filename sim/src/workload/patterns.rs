//! Shapes of arrivals (D32): sporadic, periodic, bursty.

use std::time::Duration;

use millrace_types::Timestamp;
use rand::Rng as _;
use rand_chacha::ChaCha12Rng;
use rand_distr::{Distribution as _, Exp};

use super::{RequestArrival, random};

/// The pattern of a function's arrivals.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WorkloadPattern {
    /// Requests arrive at random, independently of each other (Poisson).
    Sporadic {
        /// The mean time between two requests.
        mean_gap: Duration,
    },
    /// Requests arrive periodically, each a little early or late.
    Periodic {
        /// The time from a request to the next, without jitter.
        period: Duration,
        /// The most that a request is early or late, as a share of the period.
        jitter: f64,
    },
    /// Requests arrive in bursts, without requests in between.
    Bursty {
        /// The mean time between the beginnings of two bursts.
        mean_gap: Duration,
        /// The number of requests in a burst.
        size: u32,
        /// The time between two requests of a burst.
        apart: Duration,
    },
}

/// Returns the arrivals of functions, one pattern for each function, over a span.
#[must_use]
pub fn arrivals(patterns: &[WorkloadPattern], span: Duration, seed: u64) -> Vec<RequestArrival> {
    let end = Timestamp::ZERO + span;
    let mut arrivals = Vec::new();
    for (function, pattern) in (0u32..).zip(patterns) {
        let mut rng = random(seed, u64::from(function) + 2);
        let times = times(*pattern, end, &mut rng);
        arrivals.extend(times.into_iter().filter(|&at| at < end).map(|at| RequestArrival { at, function }));
    }
    arrivals.sort_unstable();
    arrivals
}

fn times(pattern: WorkloadPattern, end: Timestamp, rng: &mut ChaCha12Rng) -> Vec<Timestamp> {
    let mut times = Vec::new();
    let mut at = Timestamp::ZERO;
    match pattern {
        WorkloadPattern::Sporadic { mean_gap } => {
            at = at + gap(mean_gap, rng);
            while at < end {
                times.push(at);
                at = at + gap(mean_gap, rng);
            }
        }
        WorkloadPattern::Periodic { period, jitter } => {
            at = at + period.mul_f64(rng.random::<f64>());
            while at < end {
                let late = period.mul_f64(jitter * 2.0 * rng.random::<f64>());
                let beat = at + late;
                times.push(Timestamp(beat.0.saturating_sub(period.mul_f64(jitter).as_nanos() as u64)));
                at = at + period.max(Duration::from_micros(1));
            }
        }
        WorkloadPattern::Bursty { mean_gap, size, apart } => {
            at = at + gap(mean_gap, rng);
            while at < end {
                times.extend((0..size).map(|number| at + apart * number));
                at = at + gap(mean_gap, rng);
            }
        }
    }
    times
}

/// Draws an exponentially distributed gap of at least a microsecond.
fn gap(mean: Duration, rng: &mut ChaCha12Rng) -> Duration {
    let rate = 1.0 / mean.as_secs_f64().max(1e-6);
    let seconds = Exp::new(rate).map_or(0.0, |gaps| gaps.sample(rng));
    Duration::from_secs_f64(seconds).max(Duration::from_micros(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Returns the arrivals of one function in 1,000 seconds.
    fn one(pattern: WorkloadPattern) -> Vec<Timestamp> {
        arrivals(&[pattern], SECOND * 1000, 7).into_iter().map(|arrival| arrival.at).collect()
    }

    #[test]
    fn each_pattern_has_its_rate_and_shape() {
        let sporadic = one(WorkloadPattern::Sporadic { mean_gap: SECOND });
        assert!((900..1100).contains(&sporadic.len()), "{}", sporadic.len());
        let periodic = one(WorkloadPattern::Periodic { period: SECOND, jitter: 0.1 });
        assert_eq!(periodic.len(), 1000);
        let steady = |pair: &[Timestamp]| pair[1].since(pair[0]) <= SECOND.mul_f64(1.2);
        assert!(periodic.windows(2).all(steady));
        let apart = Duration::from_millis(1);
        let bursty = one(WorkloadPattern::Bursty { mean_gap: SECOND * 10, size: 10, apart });
        let close = bursty.windows(2).filter(|pair| pair[1].since(pair[0]) <= apart).count();
        assert!(close * 10 >= bursty.len() * 8, "{close} of {}", bursty.len());
    }

    #[test]
    fn another_function_does_not_change_the_arrivals_of_the_first_two() {
        let pattern = WorkloadPattern::Sporadic { mean_gap: SECOND };
        let mut more = arrivals(&[pattern; 3], SECOND * 60, 1);
        more.retain(|arrival| arrival.function < 2);
        assert_eq!(arrivals(&[pattern; 2], SECOND * 60, 1), more);
    }
}
