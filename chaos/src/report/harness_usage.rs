//! The harness's own resources. Without these samples, a growing harness would be taken for a
//! growing cluster.

use std::fmt;
use std::time::Duration;

use crate::cluster::ProcessUsage;

/// The resources of the harness at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HarnessUsage {
    /// Time since the start of the harness.
    pub at: Duration,
    /// The resources, or zeros if the system does not report them.
    pub usage: ProcessUsage,
}

impl HarnessUsage {
    /// Returns the present resources.
    #[must_use]
    pub fn now(at: Duration) -> Self {
        // A process that runs can always read its own entries in /proc.
        Self { at, usage: ProcessUsage::of(std::process::id()).unwrap_or_default() }
    }
}

impl fmt::Display for HarnessUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ProcessUsage { private, fds, .. } = self.usage;
        write!(f, "{:.1} MiB and {fds} descriptors", private as f64 / f64::from(1 << 20))
    }
}
