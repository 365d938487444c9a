//! How long runs take, by what was seen: the router weighs a wait against a swap with it, and a faster
//! machine against a slower one.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use millrace_policy::router::{self, MachineType};
use millrace_types::RevisionKey;

/// Revisions that are remembered. When there are more, all are learned again.
const REVISIONS_MAX: usize = 100_000;

/// One revision's estimates. Read for every request and written for every answer, each in a moment.
#[derive(Debug, Default)]
pub(super) struct Run(RwLock<router::Runs>);

impl Run {
    /// What is known now.
    pub(super) fn estimates(&self) -> router::Runs {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn took(&self, machine: &MachineType, run: Duration) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).took(machine, run);
    }
}

/// Every revision's estimates. Read on every request and written on a revision's first, hence the
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
