//! The clocks that the command line reads. No other file of this crate reads a clock.

use std::time::SystemTime;

use tokio::time::Instant;

/// Returns the wall-clock time, for ages in listings.
#[allow(clippy::disallowed_methods, reason = "a person's clock, at the very edge: only printed")]
pub(crate) fn wall() -> SystemTime {
    SystemTime::now()
}

/// Returns the monotonic time, for waiting and for measuring.
pub(crate) fn now() -> Instant {
    Instant::now()
}
