//! Locks of model files: a file and its record have at most one change at a time. So the collector
//! never removes a file that an upload is about to record, and each file is fetched once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use millrace_types::Digest;
use tokio::sync::OwnedMutexGuard;

/// The locks that are held or waited for. The outer lock is held only to look up an inner lock, never
/// while waiting for an inner lock.
#[derive(Debug, Default)]
pub(super) struct Locks(Mutex<BTreeMap<Digest, Arc<tokio::sync::Mutex<()>>>>);

impl Locks {
    /// Waits for a file's lock.
    pub(super) async fn lock(&self, digest: Digest) -> OwnedMutexGuard<()> {
        self.of(digest).lock_owned().await
    }

    fn of(&self, digest: Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        locks.retain(|_, lock| Arc::strong_count(lock) > 1);
        locks.entry(digest).or_default().clone()
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn locks_exclude_per_file_and_free_their_entries() {
        let locks = Locks::default();
        let a = Digest::of(b"a");
        let b = Digest::of(b"b");
        let held = locks.lock(a).await;
        assert!(locks.lock(b).now_or_never().is_some());
        assert!(locks.lock(a).now_or_never().is_none());
        drop(held);
        assert!(locks.lock(a).now_or_never().is_some());
        drop(locks.of(b));
        assert_eq!(locks.0.lock().unwrap().len(), 1, "only the lock of the last call");
    }
}
