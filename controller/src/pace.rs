//! How slowly bytes may come from somebody else. A sender that is silent, or slow over its whole length,
//! loses its place: otherwise a byte now and then would hold the place for ever.

use std::time::Duration;

use millrace_types::{Failure, Reason};
use tokio::time::Instant;

/// What is demanded of a sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PaceLimits {
    /// How long nothing may come. The rate counts from then on.
    pub(crate) idle: Duration,
    /// Bytes a second, over the whole length.
    pub(crate) bytes_per_sec_min: u64,
}

/// A sender's pace so far.
#[derive(Debug)]
pub(crate) struct Pace {
    limits: PaceLimits,
    begun: Instant,
    received: u64,
}

impl Pace {
    /// Begins to receive now.
    pub(crate) fn begin(limits: PaceLimits) -> Self {
        Self { limits, begun: Instant::now(), received: 0 }
    }

    /// Counts what came.
    pub(crate) fn count(&mut self, bytes: usize) {
        self.received += bytes as u64;
    }

    /// Waits for what comes next, as long as the limits allow.
    ///
    /// # Errors
    /// [`Reason::TimedOut`], which says which limit was met.
    pub(crate) async fn next<T>(&self, next: impl Future<Output = T>) -> Result<T, Failure> {
        let PaceLimits { idle, bytes_per_sec_min } = self.limits;
        let silent = Instant::now() + idle;
        // The rate is kept as long as the bytes so far pay for the time since the beginning.
        let paid = Duration::from_secs_f64(self.received as f64 / bytes_per_sec_min as f64);
        let too_slow = self.begun + idle + paid;
        tokio::time::timeout_at(silent.min(too_slow), next).await.map_err(|_| {
            let message = match too_slow < silent {
                true => format!(
                    "{} bytes came in {:?}, and at least {bytes_per_sec_min} bytes/s must: send it again over a faster connection",
                    self.received,
                    self.begun.elapsed()
                ),
                false => format!("nothing came for {idle:?}: send it again"),
            };
            Failure::new(Reason::TimedOut, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: PaceLimits = PaceLimits { idle: Duration::from_secs(30), bytes_per_sec_min: 1_000 };

    /// When a sender of so many bytes every so often is given up, and why.
    async fn given_up(bytes: usize, every: Duration) -> (Duration, String) {
        let mut pace = Pace::begin(LIMITS);
        for _ in 0..1_000 {
            match pace.next(tokio::time::sleep(every)).await {
                Ok(()) => pace.count(bytes),
                Err(failure) => return (pace.begun.elapsed(), failure.message),
            }
        }
        (Duration::ZERO, String::new())
    }

    #[tokio::test(start_paused = true)]
    async fn a_sender_is_given_up_when_it_is_silent_or_slow_over_its_whole_length() {
        let (after, why) = given_up(1, Duration::from_secs(29)).await;
        assert!(after < Duration::from_secs(31), "{after:?}");
        assert!(why.contains("1 bytes came in 30") && why.contains("at least 1000 bytes/s"), "{why}");
        let (after, why) = given_up(1_000_000, Duration::from_secs(31)).await;
        assert!(after < Duration::from_secs(31) && why.contains("nothing came for 30s"), "{after:?} {why}");
        assert_eq!(given_up(1_000, Duration::from_secs(1)).await.0, Duration::ZERO, "just fast enough");
        let (after, _) = given_up(900, Duration::from_secs(1)).await;
        assert!(
            (290..310).contains(&after.as_secs()),
            "a tenth too slow, after ten times the idle time: {after:?}"
        );
    }
}
