//! The command line's only looks at a clock.

use std::time::SystemTime;

use tokio::time::Instant;

/// The wall clock, for ages in listings.
#[allow(clippy::disallowed_methods, reason = "a person's clock, at the very edge: only printed")]
pub(crate) fn wall() -> SystemTime {
    SystemTime::now()
}

/// The monotonic clock, for waiting and for measuring.
pub(crate) fn now() -> Instant {
    Instant::now()
}
