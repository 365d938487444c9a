//! A function's latencies, counted in buckets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number of latency buckets. The buckets are quarters of an octave from [`FIRST`] to 52 s, so a
/// quantile is known within a tenth. The last bucket counts all longer latencies.
pub(crate) const BUCKETS: usize = 82;
const PER_OCTAVE: i32 = 4;
/// Upper end of the first bucket, in seconds.
const FIRST: f64 = 50e-6;

/// Number of requests in each latency bucket.
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

    pub(crate) fn add_to(&self, counts: &mut [u64; BUCKETS]) {
        for (count, own) in counts.iter_mut().zip(&self.0) {
            *count += own.load(Ordering::Relaxed);
        }
    }
}

/// Returns the bucket of a latency.
fn bucket(took: Duration) -> usize {
    let quarters = (took.as_secs_f64() / FIRST).log2() * f64::from(PER_OCTAVE);
    // The cast saturates to 0 for latencies below the first bucket, including the infinite logarithm of 0 s.
    (quarters.ceil() as usize).min(BUCKETS - 1)
}

/// Returns the upper end of a bucket, in seconds.
pub(crate) fn end(bucket: usize) -> f64 {
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
        fn a_latency_is_in_the_first_bucket_that_ends_after_the_latency(nanos in 0u64..200_000_000_000) {
            let took = Duration::from_nanos(nanos);
            let at = bucket(took);
            // At an edge, rounding may select either bucket.
            let seconds = took.as_secs_f64();
            let tolerance = 1.0 + 1e-9;
            prop_assert!(seconds <= end(at) * tolerance);
            prop_assert!(at == 0 || seconds * tolerance > end(at - 1));
        }
    }

    #[test]
    fn latencies_out_of_range_are_in_the_first_and_last_bucket() {
        assert_eq!(bucket(Duration::ZERO), 0);
        assert_eq!(bucket(Duration::MAX), BUCKETS - 1);
        assert!((end(BUCKETS - 2) - 52.4288).abs() < 1e-9 && end(BUCKETS - 1).is_infinite());
    }
}
