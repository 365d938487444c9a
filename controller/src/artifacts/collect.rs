//! Collects model files that nothing uses. The leader forgets records that no revision referred to
//! for a grace period; every controller then removes its own files that have no record and are as
//! old, whether a record went or never came (a crash, or an upload that failed elsewhere).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use millrace_cluster_state::{Caller, Command, State, UnixMillis};
use millrace_types::{Digest, Failure};
use tokio_util::sync::CancellationToken;

use super::{Artifacts, blocking};

/// Files collected in one round, so that a round never holds up uploads for long.
const COLLECTED_PER_ROUND_MAX: usize = 64;

impl Artifacts {
    /// Collects every so often until stopped.
    pub(crate) async fn collect_until(&self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(self.limits.collect_every)).await.is_some() {
            match self.collect().await {
                Ok(0) => {}
                Ok(collected) => tracing::info!(collected, "collected unused model files"),
                Err(failure) => {
                    tracing::warn!(error = failure.message, "unused model files are not collected for now");
                }
            }
        }
    }

    /// One round. Says how many files went.
    pub(crate) async fn collect(&self) -> Result<usize, Failure> {
        let now = self.clock.now();
        let unused_since = UnixMillis(now.0.saturating_sub(millis(self.limits.artifact_grace)));
        let mut collected = 0;
        if self.replica.leading_term().is_some() {
            for digest in unused(&self.replica.state(), unused_since) {
                self.forget(digest, unused_since).await?;
            }
        }
        for digest in self.unrecorded(unused_since).await? {
            collected += usize::from(self.collect_unrecorded(digest).await?);
        }
        Ok(collected)
    }

    async fn forget(&self, digest: Digest, unused_since: UnixMillis) -> Result<(), Failure> {
        let _changing = self.changing.lock(digest).await;
        let command = Command::RemoveArtifact { digest, unused_since };
        let collector = Caller("collector".into());
        match self.replica.propose(collector, None, command).await {
            Err(failure) if failure.retryable => Err(failure),
            // Or refused: it was used or removed since this round began.
            _ => Ok(()),
        }
    }

    /// Files without a record that were last written before `unused_since`.
    async fn unrecorded(&self, unused_since: UnixMillis) -> Result<Vec<Digest>, Failure> {
        let store = self.store.clone();
        let state = self.replica.state();
        let before = UNIX_EPOCH + Duration::from_millis(unused_since.0);
        let orphan = move |&(digest, written): &(Digest, SystemTime)| {
            written <= before && state.artifact(&digest).is_none()
        };
        let files = blocking(move || store.list()).await?;
        Ok(files.into_iter().filter(orphan).map(|(digest, _)| digest).take(COLLECTED_PER_ROUND_MAX).collect())
    }

    async fn collect_unrecorded(&self, digest: Digest) -> Result<bool, Failure> {
        let _changing = self.changing.lock(digest).await;
        // An upload may have recorded it since the files were listed.
        if self.replica.linearizable().await?.artifact(&digest).is_some() {
            return Ok(false);
        }
        let store = self.store.clone();
        blocking(move || store.remove(digest)).await?;
        Ok(true)
    }
}

fn unused(state: &State, unused_since: UnixMillis) -> Vec<Digest> {
    let unused = state.artifacts().filter(|it| it.uses == 0 && it.touched_at <= unused_since);
    unused.map(|artifact| artifact.digest).take(COLLECTED_PER_ROUND_MAX).collect()
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
