//! How long runs take, by what was seen: the router weighs a wait against a swap with it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use millrace_policy::router::RUN_GUESS;
use millrace_types::RevisionKey;

/// Revisions that are remembered. When there are more, all are learned again.
const REVISIONS_MAX: usize = 100_000;
/// A run counts for one part in this many of the estimate.
const WEIGHT: u64 = 8;

/// One revision's estimate, in nanoseconds; 0 before its first run.
#[derive(Debug, Default)]
pub(super) struct Run(AtomicU64);

impl Run {
    pub(super) fn estimate(&self) -> Duration {
        match self.0.load(Ordering::Relaxed) {
            0 => RUN_GUESS,
            nanos => Duration::from_nanos(nanos),
        }
    }

    /// Two runs that end at once may lose one of them: it is an estimate.
    pub(super) fn took(&self, run: Duration) {
        let nanos = u64::try_from(run.as_nanos()).unwrap_or(u64::MAX).max(1);
        let known = self.0.load(Ordering::Relaxed);
        let next = if known == 0 { nanos } else { known - known / WEIGHT + nanos / WEIGHT };
        self.0.store(next.max(1), Ordering::Relaxed);
    }
}

/// Every revision's estimate. Read on every request and written on a revision's first, hence the
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_begins_with_the_first_run_and_follows_the_later_ones() {
        let run = Run::default();
        assert_eq!(run.estimate(), RUN_GUESS);
        run.took(Duration::from_millis(80));
        assert_eq!(run.estimate(), Duration::from_millis(80));
        run.took(Duration::from_millis(160));
        assert_eq!(run.estimate(), Duration::from_millis(90));
        for _ in 0..100 {
            run.took(Duration::from_millis(160));
        }
        assert!(run.estimate() > Duration::from_millis(159));
    }
}
