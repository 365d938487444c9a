//! What is remembered of each revision while requests are sent to workers: how long its runs take, by which
//! the router weighs a wait against a swap and a faster machine against a slower one, and how many refused
//! requests may still be sent to another worker.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use millrace_policy::retries::RetryCredits;
use millrace_policy::router::{self, MachineType};
use millrace_types::RevisionKey;

/// Revisions that are remembered. When there are more, all are learned again.
const REVISIONS_MAX: usize = 100_000;

/// One revision's estimates and retries.
#[derive(Debug)]
pub(super) struct Run {
    /// Read for every request and written for every answer, each in a moment.
    estimates: RwLock<router::Runs>,
    /// [`RetryCredits`]. For each revision alone, so that an overloaded function leaves the others theirs.
    retry_credits: AtomicU32,
}

impl Default for Run {
    fn default() -> Self {
        Self { estimates: RwLock::default(), retry_credits: AtomicU32::new(RetryCredits::FULL.0) }
    }
}

impl Run {
    /// What is known now.
    pub(super) fn estimates(&self) -> router::Runs {
        self.estimates.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn took(&self, machine: &MachineType, run: Duration) {
        self.estimates.write().unwrap_or_else(PoisonError::into_inner).took(machine, run);
    }

    /// Counts a request, which earns its part of a retry.
    pub(super) fn count_request(&self) {
        // Relaxed: the count guards no other memory.
        self.retry_credits
            .update(Ordering::Relaxed, Ordering::Relaxed, |credits| RetryCredits(credits).after_request().0);
    }

    /// Takes one retry. Returns whether one was left.
    pub(super) fn take_retry(&self) -> bool {
        let left = |credits| RetryCredits(credits).after_retry().map(|left| left.0);
        self.retry_credits.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
    }
}

/// Every revision's run. Read on every request and written on a revision's first, hence the
/// lock.
#[derive(Debug, Default)]
pub(super) struct Runs(RwLock<HashMap<RevisionKey, Arc<Run>>>);

impl Runs {
    pub(super) fn of(&self, key: &RevisionKey) -> Arc<Run> {
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
