//! Run estimates and retry credits of each revision. The router weighs a wait against a swap, and a
//! faster machine against a slower one, by the estimated duration of a run. The credits limit how many
//! refused requests are sent to another worker.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use millrace_nodes::retries::RetryCredits;
use millrace_nodes::router::{self, MachineType};
use millrace_types::RevisionKey;

/// Revisions with estimates. When there are more, all estimates are dropped and learned again.
const REVISIONS_MAX: usize = 100_000;

/// The estimates and retry credits of one revision.
#[derive(Debug)]
pub(super) struct RevisionEstimates {
    /// Estimated durations, read for every request and written for every answer; each access is short.
    estimates: RwLock<router::MachineRunTimes>,
    /// The current [`RetryCredits`]. Credits are per revision, so that an overloaded function leaves
    /// the retries of other functions alone.
    retry_credits: AtomicU32,
}

impl Default for RevisionEstimates {
    fn default() -> Self {
        Self { estimates: RwLock::default(), retry_credits: AtomicU32::new(RetryCredits::FULL.0) }
    }
}

impl RevisionEstimates {
    /// Returns the current estimates.
    pub(super) fn estimates(&self) -> router::MachineRunTimes {
        self.estimates.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn took(&self, machine: &MachineType, run: Duration) {
        self.estimates.write().unwrap_or_else(PoisonError::into_inner).record_run(machine, run);
    }

    /// Counts a request, which earns a fraction of a retry.
    pub(super) fn count_request(&self) {
        // Relaxed: the credits guard no other memory.
        self.retry_credits
            .update(Ordering::Relaxed, Ordering::Relaxed, |credits| RetryCredits(credits).after_request().0);
    }

    /// Takes one retry. Returns whether a retry was left.
    pub(super) fn take_retry(&self) -> bool {
        let left = |credits| RetryCredits(credits).after_retry().map(|left| left.0);
        self.retry_credits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
    }
}

/// The runs of all revisions. Every request reads the map and only a revision's first request writes,
/// so a read-write lock guards the map.
#[derive(Debug, Default)]
pub(super) struct RevisionEstimateMap(RwLock<HashMap<RevisionKey, Arc<RevisionEstimates>>>);

impl RevisionEstimateMap {
    pub(super) fn of(&self, key: &RevisionKey) -> Arc<RevisionEstimates> {
        if let Some(run) = self.0.read().unwrap_or_else(PoisonError::into_inner).get(key) {
            return run.clone();
        }
        let mut runs = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if runs.len() >= REVISIONS_MAX {
            runs.clear();
        }
        runs.entry(key.clone()).or_default().clone()
    }
}
