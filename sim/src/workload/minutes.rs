//! Arrivals from a number of requests for each function and minute, in random order (L19: "within each minute
//! we randomly distribute the invocations of different functions").

use std::time::Duration;

use millrace_types::Timestamp;
use rand::Rng as _;

use super::{MINUTE, RequestArrival, random};

/// Returns the arrivals for counts by minute, then by function. Each request arrives at a random time of its
/// minute.
#[must_use]
pub fn arrivals(minutes: &[Vec<u32>], seed: u64) -> Vec<RequestArrival> {
    let mut rng = random(seed, 1);
    let mut arrivals = Vec::new();
    for (minute, counts) in (0u32..).zip(minutes) {
        let begin = Timestamp::ZERO + MINUTE * minute;
        for (function, &count) in (0u32..).zip(counts) {
            let moment = |_| Duration::from_micros(rng.random_range(0..60_000_000));
            arrivals
                .extend((0..count).map(moment).map(|after| RequestArrival { at: begin + after, function }));
        }
    }
    arrivals.sort_unstable();
    arrivals
}
