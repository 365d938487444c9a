//! The times that the documents promise.

use std::time::Duration;

/// A promised time, with the document that contains the promise. This machine is shared, and the
/// binary may be a debug build. A run therefore fails only beyond
/// [`ALLOWANCE`](crate::oracle::healthy::ALLOWANCE) times the promise, and reports the measured
/// time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TimedPromise {
    pub(crate) within: Duration,
    pub(crate) source: String,
}

impl TimedPromise {
    /// Returns the promise for writes after the loss of a leader, or of any other controller.
    pub(super) fn writes_resume() -> Self {
        let source = "docs/operate/promises.md, the leader is lost: writes resume within 2 s".to_owned();
        Self { within: Duration::from_secs(2), source }
    }

    /// Returns the promise for a function that lost the only worker: the lease of 2 s and one
    /// second.
    pub(super) fn placed_again() -> Self {
        let source =
            "docs/operate/promises.md, a worker is lost: its functions are served within 3 s".to_owned();
        Self { within: Duration::from_secs(3), source }
    }
}
