//! Local or shared files without a record, and since when.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use millrace_types::Digest;
use tokio::time::Instant;

/// Files collected in one round, so that a round does not delay uploads for long.
pub(super) const COLLECTED_PER_ROUND_MAX: usize = 64;
/// Files without a record that are tracked at a time.
const ORPHANS_MAX: usize = 10_000;

/// The time since when each file has been without a record.
#[derive(Debug, Default)]
pub(super) struct Orphans(Mutex<BTreeMap<Digest, Instant>>);

impl Orphans {
    /// Updates the files that have no record now. Returns the files without a record for the whole
    /// grace period.
    pub(super) fn see(&self, now_without: &[Digest], now: Instant, grace: Duration) -> Vec<Digest> {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::take(&mut *since);
        let begun = |digest: &Digest| before.get(digest).copied().unwrap_or(now);
        let watched = now_without.iter().take(ORPHANS_MAX);
        *since = watched.map(|digest| (*digest, begun(digest))).collect();
        let old = since.iter().filter(|(_, begun)| now - **begun >= grace);
        old.map(|(digest, _)| *digest).take(COLLECTED_PER_ROUND_MAX).collect()
    }

    /// Restarts the time of a file that was requested, because a record may be in progress.
    pub(super) fn forget(&self, digest: &Digest) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(digest);
    }

    /// Whether the file is known to be without a record.
    pub(super) fn watch(&self, digest: &Digest) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_an_orphan_after_the_whole_grace_period_without_a_record() {
        let [a, b] = [b"a", b"b"].map(|name| Digest::of(name));
        let grace = Duration::from_secs(10);
        let start = Instant::now();
        let orphans = Orphans::default();
        let see = |files: &[Digest], at: u64| orphans.see(files, start + Duration::from_secs(at), grace);
        assert_eq!(see(&[a, b], 0), vec![]);
        assert_eq!(see(&[a], 9), vec![], "b has a record now");
        assert_eq!(see(&[a, b], 10), vec![a]);
        assert_eq!(see(&[a, b], 19), vec![a], "b counts from the loss of its record");
        let mut both = vec![a, b];
        both.sort_unstable();
        assert_eq!(see(&[a, b], 20), both);
        orphans.forget(&a);
        assert!(!orphans.watch(&a) && orphans.watch(&b));
        assert_eq!(see(&[a, b], 29), vec![b], "its time restarted");
    }
}
