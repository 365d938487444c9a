//! Bounds on the work that refusals for lack of room may add. A request that a worker refuses
//! because its queue is full may find room at another. But when every worker is full, each retry
//! only adds load, with all bytes of the request.
//!
//! Two bounds apply. A request asks at most [`OTHER_WORKERS_MAX`] other workers. Each request
//! earns one credit in its [`RetryCredits`], a retry costs [`REQUESTS_PER_RETRY`] credits, and at most
//! [`RETRY_BURST_MAX`] retries can be saved up. Retries after the loss of a worker are not counted here: their number of
//! attempts bounds them.

/// Other workers that a request is sent to after the first refusal for lack of room.
pub const OTHER_WORKERS_MAX: u32 = 2;

/// Requests that earn one retry: retries are at most 10% of requests.
pub const REQUESTS_PER_RETRY: u32 = 10;

/// Retries that may follow each other at once, before requests have earned them again.
pub const RETRY_BURST_MAX: u32 = 10;

/// Credits for retries. A retry costs [`REQUESTS_PER_RETRY`]. A plain value, which a caller can store
/// in an atomic number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RetryCredits(pub u32);

impl RetryCredits {
    /// Maximum credits, and the credits of a budget that no request has used.
    pub const FULL: Self = Self(RETRY_BURST_MAX * REQUESTS_PER_RETRY);

    /// Returns the credits after one more request.
    #[must_use]
    pub fn after_request(self) -> Self {
        Self(self.0.saturating_add(1).min(Self::FULL.0))
    }

    /// Returns the credits after one more retry, or `None` if no retry is left.
    #[must_use]
    pub fn after_retry(self) -> Option<Self> {
        self.0.checked_sub(REQUESTS_PER_RETRY).map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the retries of `requests` requests that would each retry `wanted` times.
    fn retries(requests: u32, wanted: u32) -> u32 {
        let mut credits = RetryCredits::FULL;
        let mut made = 0;
        for _ in 0..requests {
            credits = credits.after_request();
            for _ in 0..wanted {
                if let Some(left) = credits.after_retry() {
                    credits = left;
                    made += 1;
                }
            }
        }
        made
    }

    #[test]
    fn retries_are_a_tenth_of_the_requests_after_a_burst() {
        assert_eq!(retries(1, 2), 2);
        // The first request finds all credits and earns none.
        assert_eq!(retries(101, 2), RETRY_BURST_MAX + 10);
        assert_eq!(retries(10_001, 9), RETRY_BURST_MAX + 1_000);
    }

    #[test]
    fn credits_never_exceed_a_burst() {
        let credits = (0..1_000).fold(RetryCredits::FULL, |credits, _| credits.after_request());
        assert_eq!(credits, RetryCredits::FULL);
    }
}
