//! The wait for bytes that somebody else sends, at a minimum rate: a byte now and then would hold a place
//! for ever.

use millrace_transport::{MinimumRate, ProgressClock};
use millrace_types::{Bytes, Failure, Reason};

/// A sender's pace so far.
#[derive(Debug)]
pub(crate) struct Pace {
    minimum: MinimumRate,
    clock: ProgressClock,
}

impl Pace {
    /// Begins to receive now.
    pub(crate) fn begin(minimum: MinimumRate) -> Self {
        Self { minimum, clock: ProgressClock::begin(minimum) }
    }

    /// Counts what came.
    pub(crate) fn count(&mut self, bytes: usize) {
        self.clock.progress(bytes);
    }

    /// Waits for what comes next, as long as the minimum rate allows.
    ///
    /// # Errors
    /// [`Reason::TimedOut`].
    pub(crate) async fn next<T>(&mut self, next: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::time::timeout_at(self.clock.until(), next).await.map_err(|_| {
            let MinimumRate { grace, bytes_per_sec } = self.minimum;
            let rate = Bytes(bytes_per_sec);
            let message = format!(
                "the bytes are {grace:?} behind {rate} a second: send them again, over a faster connection"
            );
            Failure::new(Reason::TimedOut, message)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;

    const MINIMUM: MinimumRate = MinimumRate { grace: Duration::from_secs(30), bytes_per_sec: 1_000 };

    /// When a sender is given up that sends `first` bytes at once, and then so many every second.
    async fn given_up(first: usize, each: usize) -> Option<u64> {
        let mut pace = Pace::begin(MINIMUM);
        let began = Instant::now();
        pace.count(first);
        for _ in 0..1_000 {
            match pace.next(tokio::time::sleep(Duration::from_secs(1))).await {
                Ok(()) => pace.count(each),
                Err(failure) => {
                    assert!(failure.message.contains("30s behind 1000 B a second"), "{failure}");
                    return Some(began.elapsed().as_secs());
                }
            }
        }
        None
    }

    #[tokio::test(start_paused = true)]
    async fn a_sender_is_given_up_when_it_is_slow_whatever_it_sent_before() {
        assert_eq!(given_up(0, 1_000).await, None, "just fast enough");
        assert_eq!(given_up(0, 0).await, Some(30));
        assert_eq!(given_up(1 << 30, 1).await, Some(30));
        assert_eq!(
            given_up(0, 900).await,
            Some(291),
            "a tenth too slow: within the last second of the grace"
        );
    }
}
