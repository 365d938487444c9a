//! Garbage collection of model files. The leader removes records without a revision after a grace
//! period of the cluster's time, and holders that are no longer members. Every controller then removes
//! the local files that have been without a record for the grace period, whether the record was removed
//! or never made (after a crash, or an upload that failed elsewhere).
//!
//! Each controller measures the time without a record by a monotonic clock, from the first look at the
//! file without a record. Another controller may be about to record a file that this controller was
//! given to hold. A jump of a wall clock, or a timestamp in the folder, must not make such a file look
//! old.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_cluster_state::{CallerName, ControllerId, State, StateCommand, UnixMillis};
use millrace_types::{Digest, Failure};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::blocking::blocking;
use super::orphans::COLLECTED_PER_ROUND_MAX;
use super::service::ArtifactService;

/// Former holders removed in one round: each removal is a write.
const FORGOTTEN_PER_ROUND_MAX: usize = 1_024;

impl ArtifactService {
    /// Collects at intervals until stopped.
    pub(crate) async fn collect_until(&self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(self.limits.collect_every)).await.is_some() {
            // Abandon the round on a stop, because the round may wait for an object store that is down.
            let Some(collected) = stop.run_until_cancelled(self.collect()).await else { return };
            match collected {
                Ok(0) => {}
                Ok(collected) => tracing::info!(collected, "collected unused model files"),
                Err(failure) => {
                    tracing::warn!(
                        error = failure.message,
                        "cannot collect unused model files: trying again in the next round"
                    );
                }
            }
        }
    }

    /// Runs one round. Returns the number of removed files.
    pub(crate) async fn collect(&self) -> Result<usize, Failure> {
        let grace = self.limits.artifact_grace;
        let unused_since = UnixMillis(self.replica.now().0.saturating_sub(millis(grace)));
        let mut collected = 0;
        if self.replica.leading_term().is_some() {
            for digest in unused(&self.replica.state(), unused_since) {
                self.forget(digest, unused_since).await?;
            }
            self.forget_strangers().await?;
        }
        for digest in self.unrecorded().await? {
            collected += usize::from(self.collect_unrecorded(digest).await?);
        }
        self.trim_cache().await?;
        // Use the object store last, because the store may be down.
        if self.replica.leading_term().is_some() {
            collected += self.collect_shared().await?;
            self.move_to_store().await?;
        }
        Ok(collected)
    }

    async fn forget(&self, digest: Digest, unused_since: UnixMillis) -> Result<(), Failure> {
        let _changing = self.changing.lock(digest).await;
        let command = StateCommand::RemoveArtifact { digest, unused_since };
        let collector = CallerName("collector".into());
        match self.replica.propose(collector, None, command).await {
            Err(failure) if failure.retryable => Err(failure),
            // A refusal means that the file was used or removed since this round began.
            _ => Ok(()),
        }
    }

    /// Removes holders that are no longer members from the records.
    async fn forget_strangers(&self) -> Result<(), Failure> {
        let members: BTreeSet<u64> = self.replica.membership().nodes().map(|(&id, _)| id).collect();
        for (digest, holder) in strangers(&self.replica.state(), &members) {
            let command = StateCommand::RemoveArtifactHolder { digest, holder };
            match self.replica.propose(CallerName("collector".into()), None, command).await {
                Err(failure) if failure.retryable => return Err(failure),
                // A refusal means that the other holders lost the file since this round began.
                _ => {
                    tracing::info!(%digest, %holder, "removed a holder that has left the group from a model file")
                }
            }
        }
        Ok(())
    }

    /// Returns the files that have been without a record for the grace period.
    async fn unrecorded(&self) -> Result<Vec<Digest>, Failure> {
        let store = self.store.clone();
        let files = blocking(move || store.list()).await?;
        // Read the state after the list, so that a file recorded meanwhile does not count as an orphan.
        let state = self.replica.state();
        let mut files: Vec<Digest> = files.into_iter().map(|file| file.digest).collect();
        files.retain(|digest| state.artifact(digest).is_none());
        Ok(self.orphans.see(&files, Instant::now(), self.limits.artifact_grace))
    }

    async fn collect_unrecorded(&self, digest: Digest) -> Result<bool, Failure> {
        let _changing = self.changing.lock(digest).await;
        // Since the listing, another controller may have sent the file to record it, or an upload may
        // have added a record.
        if !self.orphans.watch(&digest) || self.replica.linearizable().await?.artifact(&digest).is_some() {
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

/// Returns holders that are not members, for files with another holder. A sole holder stays recorded,
/// because an operator may still recover the file there.
fn strangers(state: &State, members: &BTreeSet<u64>) -> Vec<(Digest, ControllerId)> {
    let stays = |holder: &ControllerId| *holder == ControllerId::OBJECT_STORE || members.contains(&holder.0);
    let safe = state.artifacts().filter(|artifact| artifact.holders.iter().any(stays));
    let left = safe.flat_map(|artifact| {
        let left = artifact.holders.iter().filter(move |holder| !stays(holder));
        left.map(|holder| (artifact.digest, *holder))
    });
    left.take(FORGOTTEN_PER_ROUND_MAX).collect()
}

fn millis(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use millrace_cluster_state::{ModelSummary, Proposal};
    use millrace_types::{Bytes, ClusterId};

    use super::*;

    #[test]
    fn former_members_are_removed_as_holders_unless_they_are_the_only_holder() {
        let mut state = State::default();
        let mut apply = |command| {
            let caller = CallerName("test".into());
            state.apply(1, &Proposal { stamp: UnixMillis(1), caller, idempotency: None, command }).unwrap();
        };
        apply(StateCommand::InitCluster { cluster_id: ClusterId("test".into()) });
        let files: [(&[u8], &[u64]); 4] =
            [(b"all", &[1, 2, 3]), (b"left", &[3, 4]), (b"store", &[0, 4]), (b"here", &[1, 2])];
        for (file, holders) in files {
            for &holder in holders {
                let weights = Bytes(1);
                let inputs = vec![];
                let outputs = vec![];
                let model = ModelSummary { weights, parameters: 1, launches: 1, inputs, outputs };
                let digest = Digest::of(file);
                let holder = ControllerId(holder);
                apply(StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder });
            }
        }
        let mut expected =
            vec![(Digest::of(b"all"), ControllerId(3)), (Digest::of(b"store"), ControllerId(4))];
        expected.sort_unstable();
        assert_eq!(strangers(&state, &BTreeSet::from([1, 2])), expected);
        assert_eq!(strangers(&state, &BTreeSet::from([1, 2, 3, 4])), vec![]);
    }
}
