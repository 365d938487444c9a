//! Model files in the object store that the controllers share, if configured.
//!
//! ```text
//! upload: receive ─► put ─► AddArtifact{OBJECT_STORE}      the local file is a cache from then on
//! fetch:  here ─► from the store, cached on the way ─► from another controller's cache
//! ```
//! The leader moves older files that only controllers hold into the store, and collects files without a
//! record.

use std::sync::Arc;

use bytes::Bytes as Chunk;
use futures::stream::BoxStream;
use futures::{StreamExt as _, stream};
use millrace_cluster_state::{Artifact, CallerName, ControllerId, State};
use millrace_types::digest::Hasher;
use millrace_types::{Digest, Failure, Reason};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::blocking::blocking;
use super::bucket::Bucket;
use super::file::ArtifactFile;
use super::pieces::pieces;
use super::service::{ArtifactService, STREAMS_MAX};
use millrace_storage::FileWriter;

/// Older files that a round moves into the store.
const MOVED_PER_ROUND_MAX: usize = 64;
/// Concurrent look-ups in the store.
const LOOKS_IN_FLIGHT: usize = 8;

/// The reaction to a file that is missing in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StoreLossReaction {
    /// Fetch the file from another controller and store it again.
    Mend,
    /// Leave the loss to the controller that asks.
    Leave,
}

impl ArtifactService {
    /// Returns the store if the file is there.
    pub(super) fn shared_with(&self, artifact: &Artifact) -> Option<&Bucket> {
        self.shared.as_ref().filter(|_| artifact.in_store())
    }

    /// Copies a local file into the store.
    pub(super) async fn put(&self, bucket: &Bucket, digest: Digest) -> Result<(), Failure> {
        bucket.claim(self.replica.state().artifacts().any(|artifact| artifact.in_store())).await?;
        let store = self.store.clone();
        let file = blocking(move || store.open_file(digest)).await?;
        bucket.put(digest, pieces(file)).await
    }

    /// Checks that a newly recorded file is still in the store, and writes the file again otherwise: a
    /// leader without the record yet may have collected an older copy.
    pub(super) async fn confirm(&self, bucket: &Bucket, held: ArtifactFile) -> Result<(), Failure> {
        if bucket.has(held.digest, held.bytes).await? {
            return Ok(());
        }
        self.put(bucket, held.digest).await
    }

    /// Returns the files that the store really has. While the store is down, all files count as
    /// present.
    pub(super) async fn still_shared(&self, bucket: &Bucket, files: Vec<ArtifactFile>) -> Vec<ArtifactFile> {
        let looked = stream::iter(files).map(async |held| match bucket.has(held.digest, held.bytes).await {
            Ok(has) => has.then_some(held),
            Err(error) => {
                tracing::warn!(%error, "cannot look for a model file in the object store: assuming that it is there");
                Some(held)
            }
        });
        looked.buffered(LOOKS_IN_FLIGHT).filter_map(std::future::ready).collect().await
    }

    /// Returns the bytes of a file in the store, verified during the read and cached locally. The first
    /// bytes are read before the return, so that a store that is down yields an error instead of a
    /// broken stream.
    pub(super) async fn read_shared(
        self: &Arc<Self>,
        held: ArtifactFile,
        loss: StoreLossReaction,
    ) -> Result<BoxStream<'static, Result<Vec<u8>, Failure>>, Failure> {
        let Some(bucket) = self.shared.clone() else {
            return Err(no_store(held.digest));
        };
        let Ok(permit) = self.streams.clone().try_acquire_owned() else {
            let message = format!("{STREAMS_MAX} model files are being read already: try again soon");
            return Err(Failure::new(Reason::QueueFull, message));
        };
        let chunks = match bucket.read(held.digest, held.bytes).await {
            Ok(chunks) => chunks.boxed(),
            Err(error) => {
                let failure = Failure::from(error);
                if failure.reason != Reason::StoreUnavailable {
                    self.mend(held, loss);
                }
                return Err(failure);
            }
        };
        let ArtifactFile { digest, bytes } = held;
        let store = self.store.clone();
        let cache = blocking(move || store.begin(digest, bytes)).await;
        let cache = cache.inspect_err(|failure| not_kept(&failure.message)).ok();
        let artifacts = self.clone();
        let hasher = Hasher::default();
        let mut passing =
            CachingStream { artifacts, bucket, held, chunks, hasher, cache, loss, _permit: permit };
        let first = passing.next().await?;
        let rest = stream::try_unfold(passing, async |mut passing| {
            Ok(passing.next().await?.map(|chunk| (chunk, passing)))
        });
        Ok(stream::iter(first.map(Ok)).chain(rest).boxed())
    }

    /// Restores a lost or damaged file of the store in the background, if a controller still has a
    /// copy.
    fn mend(self: &Arc<Self>, held: ArtifactFile, loss: StoreLossReaction) {
        if loss == StoreLossReaction::Leave {
            return;
        }
        let artifacts = self.clone();
        tokio::spawn(async move {
            let Some(bucket) = &artifacts.shared else { return };
            let mended = async {
                artifacts.obtain(held).await?;
                artifacts.put(bucket, held.digest).await
            };
            let digest = held.digest;
            let place = bucket.place();
            match mended.await {
                Ok(()) => tracing::warn!(%digest, %place, "restored a model file in the object store"),
                Err(failure) => {
                    let error = failure.message;
                    tracing::error!(%digest, %place, error, "the object store lost a model file: upload the model again");
                }
            }
        });
    }

    async fn set_shared_aside(
        self: &Arc<Self>,
        bucket: &Bucket,
        held: ArtifactFile,
        loss: StoreLossReaction,
    ) {
        let digest = held.digest;
        let place = bucket.place();
        tracing::error!(%digest, %place, "a model file in the object store is damaged");
        if let Err(error) = bucket.set_aside(digest).await {
            tracing::error!(%error, "cannot set a damaged model file aside");
            return;
        }
        self.mend(held, loss);
    }

    /// Moves files that only controllers hold into the store. Called by the leader.
    pub(super) async fn move_to_store(&self) -> Result<(), Failure> {
        let Some(bucket) = &self.shared else { return Ok(()) };
        let state = self.replica.state();
        let outside = state.artifacts().filter(|artifact| !artifact.in_store());
        let mut moved = 0;
        let mut missed = Ok(());
        for artifact in outside {
            if moved == MOVED_PER_ROUND_MAX {
                break;
            }
            match self.move_one(bucket, artifact).await {
                Ok(()) => moved += 1,
                // The store is down, so the remaining files would fail too.
                Err(failure) if failure.reason == Reason::StoreUnavailable => return Err(failure),
                // A file without any source must not block the remaining files.
                Err(failure) => missed = Err(failure),
            }
        }
        missed
    }

    async fn move_one(&self, bucket: &Bucket, artifact: &Artifact) -> Result<(), Failure> {
        let held = ArtifactFile { digest: artifact.digest, bytes: artifact.bytes };
        self.obtain(held).await?;
        self.put(bucket, held.digest).await?;
        self.record_holder(CallerName("controller".into()), artifact, ControllerId::OBJECT_STORE).await
    }

    /// Removes files from the store that have been without a record for the grace period. This
    /// controller measures the time, because the file ages in the store come from the store's clock.
    /// Called by the leader.
    pub(super) async fn collect_shared(&self) -> Result<usize, Failure> {
        let Some(bucket) = &self.shared else { return Ok(0) };
        let mut files = bucket.list().await?;
        // Read the state after the list, so that a file recorded meanwhile does not count as an orphan.
        let state = self.replica.state();
        files.retain(|digest| state.artifact(digest).is_none());
        let mut collected = 0;
        for digest in self.shared_orphans.see(&files, Instant::now(), self.limits.artifact_grace) {
            let _changing = self.changing.lock(digest).await;
            // An upload may have recorded the file since the listing.
            if self.replica.linearizable().await?.artifact(&digest).is_none() {
                bucket.remove(digest).await?;
                collected += 1;
            }
        }
        Ok(collected)
    }

    /// Removes the oldest local copies of files in the store, down to the cache's limit.
    pub(super) async fn trim_cache(&self) -> Result<(), Failure> {
        let store = self.store.clone();
        let mut files = blocking(move || store.list()).await?;
        let state = self.replica.state();
        files.retain(|file| cached(&state, self.holder, &file.digest));
        files.sort_unstable_by_key(|file| file.written);
        let mut kept: u64 = files.iter().map(|file| file.bytes).sum();
        for file in files {
            if kept <= self.limits.artifact_cache.get() {
                break;
            }
            let _changing = self.changing.lock(file.digest).await;
            let store = self.store.clone();
            blocking(move || store.remove(file.digest)).await?;
            kept -= file.bytes;
        }
        Ok(())
    }
}

/// Whether a local file is a copy of a file in the store and not recorded as held here.
fn cached(state: &State, own: ControllerId, digest: &Digest) -> bool {
    state.artifact(digest).is_some_and(|artifact| artifact.in_store() && !artifact.holders.contains(&own))
}

fn no_store(digest: Digest) -> Failure {
    let message = format!(
        "model file {digest} is in an object store, and this controller was started without one: start every controller with the same --artifacts URL"
    );
    Failure::new(Reason::StoreUnavailable, message)
}

fn not_kept(error: &str) {
    tracing::warn!(error, "cannot cache a model file from the object store");
}

/// A stream of a file from the store.
struct CachingStream {
    artifacts: Arc<ArtifactService>,
    bucket: Bucket,
    held: ArtifactFile,
    chunks: BoxStream<'static, Result<Chunk, Failure>>,
    hasher: Hasher,
    /// The local copy in progress; `None` after a failed write.
    cache: Option<FileWriter>,
    loss: StoreLossReaction,
    _permit: OwnedSemaphorePermit,
}

impl CachingStream {
    /// Returns the next bytes; `None` at the end of a sound file.
    async fn next(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        if let Some(chunk) = self.chunks.next().await.transpose()? {
            self.hasher.update(&chunk);
            self.keep(&chunk).await;
            return Ok(Some(chunk.into()));
        }
        if self.hasher.clone().finish() != self.held.digest {
            self.artifacts.set_shared_aside(&self.bucket, self.held, self.loss).await;
            return Err(self.bucket.damaged(self.held.digest));
        }
        if let Some(cache) = self.cache.take() {
            let store = self.artifacts.store.clone();
            let kept = blocking(move || cache.finish().and_then(|verified| store.publish(&verified))).await;
            if let Err(failure) = kept {
                not_kept(&failure.message);
            }
        }
        Ok(None)
    }

    async fn keep(&mut self, chunk: &Chunk) {
        let Some(mut cache) = self.cache.take() else { return };
        let chunk = chunk.clone();
        match blocking(move || cache.write(&chunk).map(|()| cache)).await {
            Ok(cache) => self.cache = Some(cache),
            Err(failure) => not_kept(&failure.message),
        }
    }
}
