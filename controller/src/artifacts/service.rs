//! The model files of this controller, with the permits and locks of the operations on them.

use std::sync::Arc;

use millrace_cluster_state::{Artifact, ControllerId};
use millrace_types::{Bytes, Digest, Failure};
use tokio::sync::Semaphore;

use super::blocking::blocking;
use super::bucket::Bucket;
use super::file::{ArtifactFile, is_safe};
use super::inspection::Inspector;
use super::locks::Locks;
use super::orphans::Orphans;
use super::receive::Uploads;
use crate::config::{ControllerLimits, INSPECTION_MEMORY, Inspection};
use crate::raft::Replica;
use millrace_storage::FileStore;

/// Concurrent reads of local files for workers and other controllers, each with an open file and a
/// piece in memory. Further readers wait.
const READS_MAX: usize = 64;
/// Concurrent streams from the store: each holds a few parts in memory.
pub(super) const STREAMS_MAX: usize = 16;
/// Concurrent fetches of files from other controllers.
const FETCHES_MAX: usize = 2;

/// The model files of this controller.
#[derive(Debug)]
pub(crate) struct ArtifactService {
    pub(super) store: Arc<FileStore>,
    /// The object store that all controllers share, if configured.
    pub(super) shared: Option<Bucket>,
    pub(super) replica: Replica,
    pub(super) holder: ControllerId,
    pub(super) limits: ControllerLimits,
    pub(super) uploads: Uploads,
    pub(super) inspector: Inspector,
    /// Locks held while a file and a record change together.
    pub(super) changing: Locks,
    /// Permits for fetches from other controllers.
    pub(super) fetches: Semaphore,
    /// Permits for streams from the object store.
    pub(super) streams: Arc<Semaphore>,
    /// Permits for reads of local files for others.
    pub(super) reads: Arc<Semaphore>,
    /// Local files without a record.
    pub(super) orphans: Orphans,
    /// Files without a record in the object store.
    pub(super) shared_orphans: Orphans,
}

impl ArtifactService {
    pub(crate) fn new(
        store: FileStore,
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
        let fetches = Semaphore::new(FETCHES_MAX);
        let streams = Arc::new(Semaphore::new(STREAMS_MAX));
        let reads = Arc::new(Semaphore::new(READS_MAX));
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
        let safe = found.filter(|artifact| is_safe(artifact, &voters));
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
