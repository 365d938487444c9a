//! Model files: content-addressed, verified at each write and read, and collected after a grace period
//! without use.
//!
//! ```text
//! upload: receive ─► fsync ─► digest ─► inspect ─► rename ─► fsync dir
//!                 ─► the same on a majority of the voters ─► AddArtifact in Raft, once per holder
//! ```
//! The file is durable before the state records the holder, and is removed only after the state has
//! removed the holder. An upload that ends early leaves neither a file nor a record.
//!
//! If the controllers share an object store, the store holds the files: see [`pool`].

mod bucket;
mod collect;
mod fetch;
mod locks;
mod loss;
mod place;
mod pool;
mod spread;
mod store;
mod transfer;
mod upload;

use std::sync::Arc;

use millrace_cluster_state::{Artifact, ControllerId};
use millrace_types::{Bytes, Digest, Failure, Reason};
use tokio::sync::Semaphore;

use crate::config::{ControllerLimits, INSPECTION_MEMORY};
use crate::inspection::{Inspection, Inspector};
use crate::raft::Replica;
pub(crate) use bucket::Bucket;
use collect::Orphans;
use locks::Locks;
pub use place::{ObjectStoreUrl, SharedPlaceError};
pub(crate) use spread::ArtifactFile;
pub(crate) use store::{ArtifactStore, Verified};
use upload::Uploads;

/// The model files of this controller.
#[derive(Debug)]
pub(crate) struct ArtifactService {
    store: Arc<ArtifactStore>,
    /// The object store that all controllers share, if configured.
    shared: Option<Bucket>,
    replica: Replica,
    holder: ControllerId,
    limits: ControllerLimits,
    uploads: Uploads,
    inspector: Inspector,
    /// Locks held while a file and a record change together.
    changing: Locks,
    /// Permits for fetches from other controllers.
    fetches: Semaphore,
    /// Permits for streams from the object store.
    streams: Arc<Semaphore>,
    /// Permits for reads of local files for others.
    reads: Arc<Semaphore>,
    /// Local files without a record.
    orphans: Orphans,
    /// Files without a record in the object store.
    shared_orphans: Orphans,
}

impl ArtifactService {
    pub(crate) fn new(
        store: ArtifactStore,
        shared: Option<Bucket>,
        replica: Replica,
        limits: ControllerLimits,
        inspection: Inspection,
    ) -> Self {
        if let Some(bucket) = &shared {
            replica.shares_models_at(bucket.place().to_string());
        }
        let holder = replica.id();
        let changing = Locks::default();
        let fetches = Semaphore::new(spread::FETCHES_MAX);
        let streams = Arc::new(Semaphore::new(pool::STREAMS_MAX));
        let reads = Arc::new(Semaphore::new(fetch::READS_MAX));
        let orphans = Orphans::default();
        let shared_orphans = Orphans::default();
        let store = Arc::new(store);
        let uploads = Uploads::new(store.clone(), limits.clone());
        let inspector = Inspector::new(inspection, INSPECTION_MEMORY);
        Self {
            store,
            shared,
            replica,
            holder,
            limits,
            uploads,
            inspector,
            changing,
            fetches,
            streams,
            reads,
            orphans,
            shared_orphans,
        }
    }

    /// Returns the files among `digests` that are stored safely, with sizes: by a majority of the
    /// voters, or by the object store. For records of this controller and of the object store, the
    /// files themselves are checked.
    pub(crate) async fn find(&self, digests: Vec<Digest>) -> Result<Vec<(Digest, Bytes)>, Failure> {
        let state = self.replica.linearizable().await?;
        let voters = self.voters();
        let own = self.holder;
        let found = digests.iter().filter_map(|digest| state.artifact(digest));
        let safe = found.filter(|artifact| spread::is_safe(artifact, &voters));
        let (shared, others): (Vec<_>, Vec<_>) =
            safe.partition(|artifact| self.shared_with(artifact).is_some());
        let held = |artifact: &Arc<Artifact>| ArtifactFile { digest: artifact.digest, bytes: artifact.bytes };
        let others: Vec<_> = others.into_iter().map(|it| (held(it), it.holders.contains(&own))).collect();
        let store = self.store.clone();
        let there = move |&(held, here): &(ArtifactFile, bool)| !here || store.has(held.digest, held.bytes);
        let mut there: Vec<ArtifactFile> =
            blocking(move || Ok(others.into_iter().filter(there).map(|(held, _)| held).collect())).await?;
        if let Some(bucket) = &self.shared {
            there.extend(self.still_shared(bucket, shared.into_iter().map(held).collect()).await);
        }
        Ok(there.into_iter().map(|held| (held.digest, held.bytes)).collect())
    }
}

/// Runs a file operation on a blocking thread.
async fn blocking<T, F>(work: F) -> Result<T, Failure>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T, store::Error> + Send + 'static,
{
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.map_err(Failure::from),
        Err(error) => {
            Err(Failure::new(Reason::Internal, format!("a file operation did not finish: {error}")))
        }
    }
}
