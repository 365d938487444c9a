//! A wait for bytes from another process, at a minimum rate. Without the minimum, a sender of a single
//! byte now and then would occupy a slot forever.

use millrace_transport::{MinimumRate, ProgressClock};
use millrace_types::{Bytes, Failure, Reason};

/// The progress of a sender against the minimum rate.
#[derive(Debug)]
pub(crate) struct TransferPace {
    minimum: MinimumRate,
    clock: ProgressClock,
}

impl TransferPace {
    /// Starts the clock now.
    pub(crate) fn begin(minimum: MinimumRate) -> Self {
        Self { minimum, clock: ProgressClock::begin(minimum) }
    }

    /// Counts received bytes.
    pub(crate) fn count(&mut self, bytes: usize) {
        self.clock.progress(bytes);
    }

    /// Waits for `next`, as long as the minimum rate allows.
    ///
    /// # Errors
    /// [`Reason::TimedOut`] if the sender is too slow.
    pub(crate) async fn next<T>(&mut self, next: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::time::timeout_at(self.clock.until(), next).await.map_err(|_| {
            let MinimumRate { grace, bytes_per_sec } = self.minimum;
            let rate = Bytes(bytes_per_sec);
            let message =
                format!("the sender was slower than {rate} a second for too long (tolerance {grace:?}): retry over a faster connection");
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

    /// Returns after how many seconds a sender of `first` bytes at once, and then `each` bytes a
    /// second, is refused.
    async fn given_up(first: usize, each: usize) -> Option<u64> {
        let mut pace = TransferPace::begin(MINIMUM);
        let began = Instant::now();
        pace.count(first);
        for _ in 0..1_000 {
            match pace.next(tokio::time::sleep(Duration::from_secs(1))).await {
                Ok(()) => pace.count(each),
                Err(failure) => {
                    assert!(failure.message.contains("slower than 1000 B a second"), "{failure}");
                    return Some(began.elapsed().as_secs());
                }
            }
        }
        None
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_sender_is_refused_regardless_of_its_earlier_bytes() {
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
