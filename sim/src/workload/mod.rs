//! Arrivals of requests: generators, which all use a seed, and readers of traces.
//!
//! | workload | module |
//! |---|---|
//! | popularity by Zipf's law, with a stated share of the most popular | [`zipf`] |
//! | a number of requests each minute, in random order | [`minutes`] |
//! | sporadic, periodic and bursty (D32) | [`patterns`] |
//! | Azure's per-minute trace of 2019 | [`azure`] |
//! | rates by function and minute | [`rates`] |

pub mod azure;
pub mod minutes;
pub mod patterns;
pub mod rates;
pub mod zipf;

use std::time::Duration;

use millrace_types::Timestamp;
use rand::SeedableRng as _;
use rand_chacha::ChaCha12Rng;

/// A request of a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct RequestArrival {
    /// The time since the first moment of the scenario.
    pub at: Timestamp,
    /// The index of the function.
    pub function: u32,
}

pub const MINUTE: Duration = Duration::from_secs(60);

/// Returns the random numbers of a seed for one purpose. Because each purpose has its own stream, one more
/// number drawn for a purpose does not change the numbers of another.
#[must_use]
pub fn random(seed: u64, purpose: u64) -> ChaCha12Rng {
    let mut rng = ChaCha12Rng::seed_from_u64(seed);
    rng.set_stream(purpose);
    rng
}

/// Splits a whole number by shares, so that the parts add up to the number. Parts are rounded down, and the
/// rest is added to the parts with the largest remainders, the first of equals first.
#[must_use]
pub fn apportion(total: u32, shares: &[f64]) -> Vec<u32> {
    let sum: f64 = shares.iter().sum();
    let exact: Vec<f64> = shares.iter().map(|share| f64::from(total) * share / sum).collect();
    let mut parts: Vec<u32> = exact.iter().map(|part| part.floor() as u32).collect();
    let mut order: Vec<usize> = (0..shares.len()).collect();
    order.sort_by(|&a, &b| exact[b].fract().total_cmp(&exact[a].fract()).then(a.cmp(&b)));
    let left = total.saturating_sub(parts.iter().sum()) as usize;
    order.into_iter().take(left).for_each(|place| parts[place] += 1);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apportioned_parts_follow_their_shares_and_add_up_to_the_total() {
        assert_eq!(apportion(10, &[1.0, 1.0, 1.0]), [4, 3, 3]);
        assert_eq!(apportion(325, &[0.5, 0.25, 0.25]), [163, 81, 81]);
        assert_eq!(apportion(0, &[0.5, 0.5]), [0, 0]);
    }
}
