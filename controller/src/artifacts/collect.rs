//! Collects model files that nothing uses. The leader forgets records that no revision referred to
//! for a grace period of the cluster's time, and holders that are no members any more; every
//! controller then removes its own files that have had no record for as long, whether one went or
//! never came (a crash, or an upload that failed elsewhere).
//!
//! How long a file has had none is counted here, by the monotonic clock, from when it was first seen
//! so: another controller may be about to record a file that it was given to hold, and no wall clock
//! that jumps, nor what one wrote into the folder, must make that file look old.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use millrace_cluster_state::{Caller, Command, ControllerId, State, UnixMillis};
use millrace_types::{Digest, Failure};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Artifacts, blocking};

/// Files collected in one round, so that a round never holds up uploads for long.
const COLLECTED_PER_ROUND_MAX: usize = 64;
/// Files without a record that are watched at a time.
const ORPHANS_MAX: usize = 10_000;
/// Records of holders that left, forgotten in one round: each is a write.
const FORGOTTEN_PER_ROUND_MAX: usize = 1_024;

/// Since when each file has been seen without a record.
#[derive(Debug, Default)]
pub(super) struct Orphans(Mutex<BTreeMap<Digest, Instant>>);

impl Orphans {
    /// Takes in which files have no record now. Returns those that had none for a grace period.
    pub(super) fn see(&self, now_without: &[Digest], now: Instant, grace: Duration) -> Vec<Digest> {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::take(&mut *since);
        let begun = |digest: &Digest| before.get(digest).copied().unwrap_or(now);
        let watched = now_without.iter().take(ORPHANS_MAX);
        *since = watched.map(|digest| (*digest, begun(digest))).collect();
        let old = since.iter().filter(|(_, begun)| now - **begun >= grace);
        old.map(|(digest, _)| *digest).take(COLLECTED_PER_ROUND_MAX).collect()
    }

    /// A file was asked for: its record may be on its way, and its time begins anew.
    pub(super) fn forget(&self, digest: &Digest) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(digest);
    }

    fn watch(&self, digest: &Digest) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains_key(digest)
    }
}

impl Artifacts {
    /// Collects every so often until stopped.
    pub(crate) async fn collect_until(&self, stop: CancellationToken) {
        while stop.run_until_cancelled(tokio::time::sleep(self.limits.collect_every)).await.is_some() {
            // Given up when told to stop: a round may wait for an object store that is down.
            let Some(collected) = stop.run_until_cancelled(self.collect()).await else { return };
            match collected {
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
        // Last: it may be down.
        if self.replica.leading_term().is_some() {
            collected += self.collect_shared().await?;
            self.move_to_store().await?;
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

    /// Forgets holders that are no members any more.
    async fn forget_strangers(&self) -> Result<(), Failure> {
        let members: BTreeSet<u64> = self.replica.membership().nodes().map(|(&id, _)| id).collect();
        for (digest, holder) in strangers(&self.replica.state(), &members) {
            let command = Command::RemoveArtifactHolder { digest, holder };
            match self.replica.propose(Caller("collector".into()), None, command).await {
                Err(failure) if failure.retryable => return Err(failure),
                // Or refused: the others let go of it since this round began.
                _ => tracing::info!(%digest, %holder, "a model file's holder has left the group"),
            }
        }
        Ok(())
    }

    /// Files that have had no record for the grace period.
    async fn unrecorded(&self) -> Result<Vec<Digest>, Failure> {
        let store = self.store.clone();
        let files = blocking(move || store.list()).await?;
        // After the list: what was recorded meanwhile is no orphan.
        let state = self.replica.state();
        let mut files: Vec<Digest> = files.into_iter().map(|file| file.digest).collect();
        files.retain(|digest| state.artifact(digest).is_none());
        Ok(self.orphans.see(&files, Instant::now(), self.limits.artifact_grace))
    }

    async fn collect_unrecorded(&self, digest: Digest) -> Result<bool, Failure> {
        let _changing = self.changing.lock(digest).await;
        // Another controller may have given it to this one since the files were listed, to record it,
        // or an upload may have recorded it.
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

/// Holders that are no members, of files that somebody else holds: who alone has a file may still be
/// asked for it by hand.
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
    fn holders_that_left_are_forgotten_unless_they_hold_alone() {
        let mut state = State::default();
        let mut apply = |command| {
            let caller = Caller("test".into());
            state.apply(1, &Proposal { stamp: UnixMillis(1), caller, idempotency: None, command }).unwrap();
        };
        apply(Command::InitCluster { cluster_id: ClusterId("test".into()) });
        let files: [(&[u8], &[u64]); 4] =
            [(b"all", &[1, 2, 3]), (b"left", &[3, 4]), (b"store", &[0, 4]), (b"here", &[1, 2])];
        for (file, holders) in files {
            for &holder in holders {
                let (weights, parameters, launches, inputs, outputs) = (Bytes(1), 1, 1, vec![], vec![]);
                let model = ModelSummary { weights, parameters, launches, inputs, outputs };
                let (digest, holder) = (Digest::of(file), ControllerId(holder));
                apply(Command::AddArtifact { digest, bytes: Bytes(1), model, holder });
            }
        }
        let mut expected =
            vec![(Digest::of(b"all"), ControllerId(3)), (Digest::of(b"store"), ControllerId(4))];
        expected.sort_unstable();
        assert_eq!(strangers(&state, &BTreeSet::from([1, 2])), expected);
        assert_eq!(strangers(&state, &BTreeSet::from([1, 2, 3, 4])), vec![]);
    }

    #[test]
    fn a_file_is_an_orphan_once_it_had_no_record_for_the_whole_grace_period() {
        let [a, b] = [b"a", b"b"].map(|name| Digest::of(name));
        let (grace, start) = (Duration::from_secs(10), Instant::now());
        let orphans = Orphans::default();
        let see = |files: &[Digest], at: u64| orphans.see(files, start + Duration::from_secs(at), grace);
        assert_eq!(see(&[a, b], 0), vec![]);
        assert_eq!(see(&[a], 9), vec![], "b has a record now");
        assert_eq!(see(&[a, b], 10), vec![a]);
        assert_eq!(see(&[a, b], 19), vec![a], "b counts from when it lost its record");
        let mut both = vec![a, b];
        both.sort_unstable();
        assert_eq!(see(&[a, b], 20), both);
        orphans.forget(&a);
        assert!(!orphans.watch(&a) && orphans.watch(&b));
        assert_eq!(see(&[a, b], 29), vec![b], "its time began anew");
    }
}
