//! The harness's only access to a clock: it watches real processes in real time.

use tokio::time::Instant;

/// Returns the monotonic time.
pub(crate) fn now() -> Instant {
    Instant::now()
}
