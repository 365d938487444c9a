//! Model files in the object store that the controllers share, if they were started with one.
//!
//! ```text
//! upload: as ever ─► put ─► AddArtifact{OBJECT_STORE}      the local file is a cache from then on
//! fetch:  here ─► from the store, kept here on its way ─► from another controller's cache
//! ```
//! The leader puts there what a majority held before, and collects what nothing refers to.

use std::sync::Arc;

use bytes::Bytes as Chunk;
use futures::stream::BoxStream;
use futures::{StreamExt as _, stream};
use millrace_cluster_state::{Artifact, Caller, ControllerId, State};
use millrace_types::digest::Hasher;
use millrace_types::{Digest, Failure, Reason};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use super::bucket::Bucket;
use super::spread::{Held, pieces};
use super::store::Incoming;
use super::{Artifacts, blocking};

/// Files on their way from the store to whoever asked, at a time: each has a few parts in memory.
pub(super) const STREAMS_MAX: usize = 16;
/// Files put in the store in one round of those that were there before it.
const MOVED_PER_ROUND_MAX: usize = 64;
/// Files looked for in the store at a time.
const LOOKS_IN_FLIGHT: usize = 8;

/// What is done about a file that the store lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// The other controllers are asked for it.
    Mend,
    /// Nothing: it is another controller that asks.
    Leave,
}

impl Artifacts {
    /// The store, where a file is in it.
    pub(super) fn shared_with(&self, artifact: &Artifact) -> Option<&Bucket> {
        self.shared.as_ref().filter(|_| artifact.in_store())
    }

    /// Puts a file that is here into the store.
    pub(super) async fn put(&self, bucket: &Bucket, digest: Digest) -> Result<(), Failure> {
        bucket.claim(self.replica.state().artifacts().any(|artifact| artifact.in_store())).await?;
        let store = self.store.clone();
        let file = blocking(move || store.open_file(digest)).await?;
        bucket.put(digest, pieces(file)).await
    }

    /// Makes sure that a file that was just recorded is still there: a leader that did not know of it
    /// yet may have collected what was left of an earlier one.
    pub(super) async fn confirm(&self, bucket: &Bucket, held: Held) -> Result<(), Failure> {
        if bucket.has(held.digest, held.bytes).await? {
            return Ok(());
        }
        self.put(bucket, held.digest).await
    }

    /// Of these, those that the store really has. While it is down its files count as there.
    pub(super) async fn still_shared(&self, bucket: &Bucket, files: Vec<Held>) -> Vec<Held> {
        let looked = stream::iter(files).map(async |held| match bucket.has(held.digest, held.bytes).await {
            Ok(has) => has.then_some(held),
            Err(error) => {
                tracing::warn!(%error, "a model file is not looked for");
                Some(held)
            }
        });
        looked.buffered(LOOKS_IN_FLIGHT).filter_map(std::future::ready).collect().await
    }

    /// A file from the store, checked as it is read and kept here on its way. Begun with its first
    /// bytes, so that a store that is down is an error and not the stream's.
    pub(super) async fn read_shared(
        self: &Arc<Self>,
        held: Held,
        loss: Loss,
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
        let (store, Held { digest, bytes }) = (self.store.clone(), held);
        let cache = blocking(move || store.begin(digest, bytes)).await;
        let cache = cache.inspect_err(|failure| not_kept(&failure.message)).ok();
        let (artifacts, hasher) = (self.clone(), Hasher::default());
        let mut passing = Passing { artifacts, bucket, held, chunks, hasher, cache, loss, _permit: permit };
        let first = passing.next().await?;
        let rest = stream::try_unfold(passing, async |mut passing| {
            Ok(passing.next().await?.map(|chunk| (chunk, passing)))
        });
        Ok(stream::iter(first.map(Ok)).chain(rest).boxed())
    }

    /// Puts a file into the store again that it lost or damaged, if a controller still has it, while
    /// the caller goes on.
    fn mend(self: &Arc<Self>, held: Held, loss: Loss) {
        if loss == Loss::Leave {
            return;
        }
        let artifacts = self.clone();
        tokio::spawn(async move {
            let Some(bucket) = &artifacts.shared else { return };
            let mended = async {
                artifacts.obtain(held).await?;
                artifacts.put(bucket, held.digest).await
            };
            let (digest, place) = (held.digest, bucket.place());
            match mended.await {
                Ok(()) => tracing::warn!(%digest, %place, "a model file was put into the object store again"),
                Err(failure) => {
                    let error = failure.message;
                    tracing::error!(%digest, %place, error, "the object store lost a model file: upload it again");
                }
            }
        });
    }

    async fn set_shared_aside(self: &Arc<Self>, bucket: &Bucket, held: Held, loss: Loss) {
        let (digest, place) = (held.digest, bucket.place());
        tracing::error!(%digest, %place, "a model file in the object store is damaged");
        if let Err(error) = bucket.set_aside(digest).await {
            tracing::error!(%error, "the damaged file stays");
            return;
        }
        self.mend(held, loss);
    }

    /// Puts files into the store that are held by controllers only. The leader does.
    pub(super) async fn move_to_store(&self) -> Result<(), Failure> {
        let Some(bucket) = &self.shared else { return Ok(()) };
        let state = self.replica.state();
        let outside = state.artifacts().filter(|artifact| !artifact.in_store());
        let (mut moved, mut missed) = (0, Ok(()));
        for artifact in outside {
            if moved == MOVED_PER_ROUND_MAX {
                break;
            }
            match self.move_one(bucket, artifact).await {
                Ok(()) => moved += 1,
                // The others would fail as this one did.
                Err(failure) if failure.reason == Reason::StoreUnavailable => return Err(failure),
                // One that nobody can give must not keep the rest back.
                Err(failure) => missed = Err(failure),
            }
        }
        missed
    }

    async fn move_one(&self, bucket: &Bucket, artifact: &Artifact) -> Result<(), Failure> {
        let held = Held { digest: artifact.digest, bytes: artifact.bytes };
        self.obtain(held).await?;
        self.put(bucket, held.digest).await?;
        self.record_holder(Caller("controller".into()), artifact, ControllerId::OBJECT_STORE).await
    }

    /// Removes files from the store that have had no record for the grace period, by this
    /// controller's own count: what the store says of their age is its clock's. The leader does.
    pub(super) async fn collect_shared(&self) -> Result<usize, Failure> {
        let Some(bucket) = &self.shared else { return Ok(0) };
        let mut files = bucket.list().await?;
        // After the list: what was recorded meanwhile is no orphan.
        let state = self.replica.state();
        files.retain(|digest| state.artifact(digest).is_none());
        let mut collected = 0;
        for digest in self.shared_orphans.see(&files, Instant::now(), self.limits.artifact_grace) {
            let _changing = self.changing.lock(digest).await;
            // An upload may have recorded it since the files were listed.
            if self.replica.linearizable().await?.artifact(&digest).is_none() {
                bucket.remove(digest).await?;
                collected += 1;
            }
        }
        Ok(collected)
    }

    /// Removes the oldest files that are only a cache of the store, down to the limit.
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

/// Whether a file here is a copy of the store's that nobody counts on.
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
    tracing::warn!(error, "a model file from the object store is not kept here");
}

/// A file on its way from the store.
struct Passing {
    artifacts: Arc<Artifacts>,
    bucket: Bucket,
    held: Held,
    chunks: BoxStream<'static, Result<Chunk, Failure>>,
    hasher: Hasher,
    /// The copy that is kept here; `None` once it cannot be.
    cache: Option<Incoming>,
    loss: Loss,
    _permit: OwnedSemaphorePermit,
}

impl Passing {
    /// The next bytes; `None` at the end of a sound file.
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
