//! What a front door counted of each function, for whoever shows it to people as it changes.

use std::collections::BTreeMap;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_types::{FunctionKey, SloCounts};

use crate::meters::Tallies;

/// Buckets of latencies: quarters of an octave, so that a quantile is told within a tenth, from
/// [`FIRST`] to 50 s. The last holds what took longer.
const BUCKETS: usize = 82;
const PER_OCTAVE: i32 = 4;
/// Where the first bucket ends, in seconds.
const FIRST: f64 = 50e-6;

/// Reads what a front door counts. Clones read the same one.
#[derive(Debug, Clone, Default)]
pub struct Activity(pub(crate) Tallies);

/// What was counted of one function, its revisions together, since the front door opened.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FunctionActivity {
    /// Requests answered.
    pub answered: u64,
    /// Requests that ended otherwise, those given up by their client included.
    pub failed: u64,
    /// The score of those that are scored here: workflows'.
    pub score: SloCounts,
    /// Of the answered: seconds and how many took at most so long and longer than the entry before
    /// says. Ascending, without those of which there are none.
    pub latencies: Vec<(f64, u64)>,
}

impl Activity {
    /// Of every function that was invoked.
    #[must_use]
    pub fn functions(&self) -> BTreeMap<FunctionKey, FunctionActivity> {
        let mut functions: BTreeMap<FunctionKey, (FunctionActivity, [u64; BUCKETS])> = BTreeMap::new();
        for (key, tally) in self.0.read().unwrap_or_else(PoisonError::into_inner).iter() {
            let none = || (FunctionActivity::default(), [0; BUCKETS]);
            let (counted, latencies) = functions.entry(key.function.clone()).or_insert_with(none);
            counted.answered += tally.success.read().0;
            counted.failed += tally.fail.read().0;
            counted.score = counted.score.plus(tally.score());
            tally.latencies.add_to(latencies);
        }
        let told = |counts: [u64; BUCKETS]| {
            let ends = (0..).map(end).zip(counts);
            ends.filter(|&(_, count)| count > 0).collect()
        };
        let functions = functions.into_iter();
        functions
            .map(|(key, (counted, counts))| (key, FunctionActivity { latencies: told(counts), ..counted }))
            .collect()
    }
}

/// How many requests took how long.
#[derive(Debug)]
pub(crate) struct Latencies([AtomicU64; BUCKETS]);

impl Default for Latencies {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Latencies {
    pub(crate) fn add(&self, took: Duration) {
        self.0[bucket(took)].fetch_add(1, Ordering::Relaxed);
    }

    fn add_to(&self, counts: &mut [u64; BUCKETS]) {
        for (count, own) in counts.iter_mut().zip(&self.0) {
            *count += own.load(Ordering::Relaxed);
        }
    }
}

/// The bucket of a latency.
fn bucket(took: Duration) -> usize {
    let quarters = (took.as_secs_f64() / FIRST).log2() * f64::from(PER_OCTAVE);
    // What is below the first, 0 s and its infinite logarithm included, saturates to it.
    (quarters.ceil() as usize).min(BUCKETS - 1)
}

/// Where a bucket ends, in seconds.
fn end(bucket: usize) -> f64 {
    match i32::try_from(bucket) {
        Ok(at) if bucket < BUCKETS - 1 => FIRST * 2f64.powf(f64::from(at) / f64::from(PER_OCTAVE)),
        _ => f64::INFINITY,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_latency_is_in_the_bucket_that_ends_after_it(nanos in 0u64..200_000_000_000) {
            let took = Duration::from_nanos(nanos);
            let at = bucket(took);
            // At an edge, rounding may put it on either side.
            let (seconds, tolerance) = (took.as_secs_f64(), 1.0 + 1e-9);
            prop_assert!(seconds <= end(at) * tolerance);
            prop_assert!(at == 0 || seconds * tolerance > end(at - 1));
        }
    }

    #[test]
    fn the_first_and_the_last_take_what_is_beyond() {
        assert_eq!(bucket(Duration::ZERO), 0);
        assert_eq!(bucket(Duration::MAX), BUCKETS - 1);
        assert!((end(BUCKETS - 2) - 52.4288).abs() < 1e-9 && end(BUCKETS - 1).is_infinite());
    }
}
