//! CLOCK_MONOTONIC, which the worker and the executors of a machine share, and the time windows of grants.

use std::time::Duration;

use millrace_types::Timestamp;
use rustix::time::{ClockId, clock_gettime};

/// Reads CLOCK_MONOTONIC, which is the same clock for all processes of a machine.
#[must_use]
pub fn monotonic_now() -> Timestamp {
    let now = clock_gettime(ClockId::Monotonic);
    // The clock counts from boot, so it is never negative.
    Timestamp(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
}

/// The time window in which a granted copy may start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartWindow {
    /// Earliest start, inclusive.
    pub not_before: Timestamp,
    /// Latest start, inclusive.
    pub not_after: Timestamp,
}

/// Decision of a window for a copy at some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartDecision {
    /// The copy may start after this wait.
    In(Duration),
    /// The copy may start now.
    Now,
    /// The copy must not start: the window closed this long ago.
    Expired(Duration),
}

impl StartWindow {
    /// Returns the decision at `now`.
    #[must_use]
    pub fn at(self, now: Timestamp) -> StartDecision {
        if now > self.not_after {
            StartDecision::Expired(now.since(self.not_after))
        } else if now < self.not_before {
            StartDecision::In(self.not_before.since(now))
        } else {
            StartDecision::Now
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_starts_within_its_window_and_at_both_ends() {
        let window = StartWindow { not_before: Timestamp(10), not_after: Timestamp(20) };
        for (now, expected) in [
            (0, StartDecision::In(Duration::from_nanos(10))),
            (10, StartDecision::Now),
            (20, StartDecision::Now),
            (23, StartDecision::Expired(Duration::from_nanos(3))),
        ] {
            assert_eq!(window.at(Timestamp(now)), expected, "at {now}");
        }
    }

    #[test]
    fn a_window_that_closes_before_it_opens_never_starts() {
        let window = StartWindow { not_before: Timestamp(20), not_after: Timestamp(10) };
        assert_eq!(window.at(Timestamp(15)), StartDecision::Expired(Duration::from_nanos(5)));
    }

    #[test]
    fn monotonic_clock_never_goes_back() {
        let first = monotonic_now();
        assert!(first > Timestamp::ZERO && monotonic_now() >= first);
    }
}
