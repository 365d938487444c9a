//! What the harness itself takes of this machine: one that grew would be blamed on the cluster.

use std::fmt;
use std::time::Duration;

use crate::cluster::Usage;

/// What it took at some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Own {
    /// Since it began.
    pub at: Duration,
    /// What it took, where the system says.
    pub usage: Usage,
}

impl Own {
    /// What it takes now.
    #[must_use]
    pub fn now(at: Duration) -> Self {
        // A process that asks runs.
        Self { at, usage: Usage::of(std::process::id()).unwrap_or_default() }
    }
}

impl fmt::Display for Own {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Usage { private, fds, .. } = self.usage;
        write!(f, "{:.1} MiB and {fds} descriptors", private as f64 / f64::from(1 << 20))
    }
}
