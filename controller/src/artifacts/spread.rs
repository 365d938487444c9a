//! Copies of model files on the other controllers. An uploaded file is on a majority of the voters
//! before the first record, and each controller fetches missing files in the background.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes as Chunk;
use futures::stream::FuturesUnordered;
use futures::{Stream, StreamExt as _};
use millrace_cluster_state::{Artifact, CallerName, ControllerId, State, StateCommand};
use millrace_transport::MinimumRate;
use millrace_types::{Bytes, Digest, Failure, Reason};
use tokio_util::sync::CancellationToken;

use super::blocking::blocking;
use super::file::{ArtifactFile, is_safe, majority};
use super::pieces::pieces;
use super::service::ArtifactService;
use crate::config::UPLOAD_RATE;
use crate::pace::TransferPace;
use crate::raft::{PeerClient, TrafficClass};
use millrace_storage::FileReader;

/// The minimum rate of another controller that sends or receives a file, in bytes per second. A slower
/// controller, or a controller that does not begin within the grace of [`UPLOAD_RATE`], counts as
/// unreachable.
const BYTES_PER_SEC_MIN: u64 = 8 << 20;
/// The pause between two rounds: each round goes through all records, however many changed.
const ROUND_PAUSE: Duration = Duration::from_millis(100);
/// The pause after a failed round.
const FETCH_RETRY: Duration = Duration::from_secs(1);

impl ArtifactService {
    /// Returns the ids of the voters.
    pub(super) fn voters(&self) -> BTreeSet<u64> {
        self.replica.membership().voter_ids().collect()
    }

    /// Waits until a majority of the voters holds a recorded file, for example after a membership
    /// change. The voters fetch the file by themselves. The caller must check the result.
    pub(crate) async fn copied_within(&self, patience: Duration, digest: &Digest) {
        let waits = || {
            let state = self.replica.state();
            state.artifact(digest).is_some_and(|it: &Arc<Artifact>| !is_safe(it, &self.voters()))
        };
        if !waits() {
            return;
        }
        let mut changes = self.replica.changes();
        let copied = async { while waits() && changes.changed().await.is_ok() {} };
        if tokio::time::timeout(patience, copied).await.is_err() {
            tracing::debug!(%digest, "a model file is not on a majority of the controllers yet");
        }
    }

    /// Sends a local file to other voters until a majority has a copy. Returns the holders, this
    /// controller first.
    pub(super) async fn spread(&self, held: ArtifactFile) -> Result<Vec<ControllerId>, Failure> {
        let voters = self.voters();
        let mut waiting: Vec<PeerClient> = self.replica.others(TrafficClass::Bulk);
        waiting.retain(|peer| voters.contains(&peer.id()));
        let needed = majority(voters.len());
        let mut holders = vec![self.holder];
        let mut holding = usize::from(voters.contains(&self.holder.0));
        let mut giving = FuturesUnordered::new();
        let mut refusals: Vec<Failure> = Vec::new();
        while holding < needed {
            while giving.len() < needed - holding
                && let Some(peer) = waiting.pop()
            {
                giving.push(self.give(peer, held));
            }
            match giving.next().await {
                Some((id, Ok(()))) => {
                    holders.push(ControllerId(id));
                    holding += 1;
                }
                Some((_, Err(failure))) => refusals.push(failure),
                None => {
                    let full = refusals.iter().any(|failure| failure.reason == Reason::StorageFull);
                    let why: Vec<String> = refusals.into_iter().map(|failure| failure.message).collect();
                    let message = format!(
                        "only {holding} of {} controllers hold the model file, and {needed} must: {}",
                        voters.len(),
                        why.join("; ")
                    );
                    let reason = if full { Reason::StorageFull } else { Reason::NoLeader };
                    return Err(Failure::new(reason, message));
                }
            }
        }
        Ok(holders)
    }

    async fn give(&self, peer: PeerClient, held: ArtifactFile) -> (u64, Result<(), Failure>) {
        let given = async {
            let store = self.store.clone();
            let file = blocking(move || store.open_file(held.digest)).await?;
            peer.hold_artifact(self.patience(held.bytes), &held, until_error(file)).await
        };
        let given = given.await;
        (peer.id(), given)
    }

    fn patience(&self, bytes: Bytes) -> Duration {
        UPLOAD_RATE.grace + Duration::from_secs(bytes.get() / BYTES_PER_SEC_MIN)
    }

    /// Receives a file from another controller, verifies the bytes and makes the file durable.
    pub(crate) async fn hold(
        &self,
        held: ArtifactFile,
        chunks: impl Stream<Item = Result<Chunk, Failure>>,
    ) -> Result<(), Failure> {
        if held.bytes > self.limits.artifact_bytes {
            let message = format!(
                "the model file has {}: at most {} are allowed",
                held.bytes, self.limits.artifact_bytes
            );
            return Err(Failure::new(Reason::ModelTooLarge, message));
        }
        let _changing = self.changing.lock(held.digest).await;
        self.take(held, chunks).await?;
        // The sender records the file next, so restart the grace period.
        self.orphans.forget(&held.digest);
        Ok(())
    }

    /// Receives, verifies and syncs a file. The caller holds the file's lock.
    async fn take(
        &self,
        held: ArtifactFile,
        chunks: impl Stream<Item = Result<Chunk, Failure>>,
    ) -> Result<(), Failure> {
        let mut chunks = std::pin::pin!(chunks);
        let grace = UPLOAD_RATE.grace;
        let mut pace = TransferPace::begin(MinimumRate { grace, bytes_per_sec: BYTES_PER_SEC_MIN });
        let store = self.store.clone();
        let mut incoming = blocking(move || store.begin(held.digest, held.bytes)).await?;
        while let Some(chunk) = pace.next(chunks.next()).await? {
            let chunk = chunk?;
            pace.count(chunk.len());
            incoming = blocking(move || incoming.write(&chunk).map(|()| incoming)).await?;
        }
        let store = self.store.clone();
        blocking(move || incoming.finish().and_then(|verified| store.publish(&verified))).await
    }

    fn idle(&self) -> Failure {
        Failure::new(Reason::TimedOut, "the controller did not send the model file in time")
    }

    /// Ensures that a recorded file is on the local disk, with a fetch from a holder if necessary. For
    /// a file in the object store, every controller may have a cached copy.
    pub(super) async fn obtain(&self, held: ArtifactFile) -> Result<(), Failure> {
        let _changing = self.changing.lock(held.digest).await;
        let store = self.store.clone();
        if blocking(move || Ok(store.has(held.digest, held.bytes))).await? {
            return Ok(());
        }
        // The semaphore is never closed, so acquiring cannot fail.
        let _permit = self.fetches.acquire().await;
        let missing = || Failure::new(Reason::ArtifactNotFound, format!("no artifact {}", held.digest));
        let state = self.replica.state();
        let artifact = state.artifact(&held.digest).ok_or_else(missing)?;
        let mut last = missing();
        let mut others = self.replica.others(TrafficClass::Bulk);
        others.retain(|peer| artifact.in_store() || artifact.holders.contains(&ControllerId(peer.id())));
        for peer in others {
            let fetched = async {
                let chunks = peer.give_artifact(UPLOAD_RATE.grace, &held.digest).await?;
                self.take(held, chunks).await
            };
            match tokio::time::timeout(self.patience(held.bytes), fetched).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(failure)) => last = failure,
                Err(_) => last = self.idle(),
            }
        }
        Err(last)
    }

    /// Fetches and records missing files until stopped.
    pub(crate) async fn fetch_until(&self, stop: CancellationToken) {
        // The result is `None` after a stop.
        stop.run_until_cancelled(self.fetch_missing()).await;
    }

    async fn fetch_missing(&self) {
        let mut changes = self.replica.changes();
        // Check the files recorded as held here once, because the disk may have lost files.
        let mut sure = DiskCheck::No;
        loop {
            let state = self.replica.state();
            let failed = self.fetch_round(&state, sure).await;
            if let Some(failure) = &failed {
                tracing::debug!(error = failure.message, "cannot fetch a model file yet");
            } else if state.cluster().is_some() {
                sure = DiskCheck::Yes;
            }
            let retry = async {
                match failed {
                    Some(_) => tokio::time::sleep(FETCH_RETRY).await,
                    None => std::future::pending().await,
                }
            };
            tokio::time::sleep(ROUND_PAUSE).await;
            tokio::select! {
                changed = changes.changed() => if changed.is_err() { return },
                () = retry => {}
            }
        }
    }

    /// Fetches each missing file. Returns a failure if any file failed.
    async fn fetch_round(&self, state: &State, sure: DiskCheck) -> Option<Failure> {
        // A controller that is not a member yet has no use for files, and no leader to record files.
        self.replica.membership().get_node(&self.holder.0)?;
        let mut failed = None;
        for artifact in state.artifacts() {
            let recorded = artifact.holders.contains(&self.holder);
            let needless = self.shared_with(artifact).is_some() && !recorded;
            if needless || (recorded && sure == DiskCheck::Yes) {
                continue;
            }
            if let Err(failure) = self.fetch_one(artifact, recorded).await {
                failed = Some(failure);
            }
        }
        failed
    }

    async fn fetch_one(&self, artifact: &Arc<Artifact>, recorded: bool) -> Result<(), Failure> {
        let held = ArtifactFile { digest: artifact.digest, bytes: artifact.bytes };
        let store = self.store.clone();
        if recorded && !blocking(move || Ok(store.has(held.digest, held.bytes))).await? {
            // Remove this holder from the record first, so that no reader counts on the missing file.
            self.disown(held.digest).await?;
            if self.shared_with(artifact).is_some() {
                return Ok(());
            }
        }
        self.obtain(held).await?;
        // The file's record may have been removed during the fetch. The file is then an orphan.
        let unrecorded = |it: &Arc<Artifact>| !it.holders.contains(&self.holder);
        if !self.replica.state().artifact(&held.digest).is_some_and(unrecorded) {
            return Ok(());
        }
        self.record_holder(CallerName("controller".into()), artifact, self.holder).await
    }

    pub(super) async fn record_holder(
        &self,
        caller: CallerName,
        artifact: &Artifact,
        holder: ControllerId,
    ) -> Result<(), Failure> {
        let Artifact { digest, bytes, model, .. } = artifact;
        let command =
            StateCommand::AddArtifact { digest: *digest, bytes: *bytes, model: model.clone(), holder };
        self.replica.propose(caller, None, command).await.map(|_| ())
    }
}

/// Whether the files recorded as held here were checked on disk since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DiskCheck {
    Yes,
    No,
}

/// Returns a file's bytes. On a read error the stream ends early, so the receiver finds the file too
/// short.
fn until_error(file: FileReader) -> impl Stream<Item = Vec<u8>> + Send + 'static {
    pieces(file).scan((), |(), chunk| {
        if let Err(failure) = &chunk {
            tracing::error!(error = failure.message, "cannot read a model file to send");
        }
        std::future::ready(chunk.ok())
    })
}
