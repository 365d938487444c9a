//! The harness's only look at a clock: it watches real processes in real time.

use tokio::time::Instant;

/// The monotonic clock.
pub(crate) fn now() -> Instant {
    Instant::now()
}
