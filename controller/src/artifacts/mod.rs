//! Model files: content-addressed, checked when written and when read, and collected once no
//! function has used them for a while.
//!
//! ```text
//! upload: receive ─► fsync ─► digest ─► compile ─► rename ─► fsync dir
//!                 ─► the same on a majority of the voters ─► AddArtifact in Raft, once per holder
//! ```
//! The file is durable before the state says that it is held, and goes only after the state says
//! that it is not. Whatever ends an upload early leaves neither a file nor a record.

mod collect;
mod fetch;
mod inspect;
mod locks;
mod spread;
mod store;
mod upload;

use std::sync::Arc;

use millrace_cluster_state::ControllerId;
use millrace_types::{Bytes, Digest, Failure, Reason};
use tokio::sync::Semaphore;

use crate::config::Limits;
use crate::raft::Replica;
use collect::Orphans;
use locks::Locks;
pub(crate) use spread::Held;
pub(crate) use store::Store;

/// The model files of this controller.
#[derive(Debug)]
pub(crate) struct Artifacts {
    store: Arc<Store>,
    replica: Replica,
    holder: ControllerId,
    limits: Limits,
    /// Uploads at a time, and with them the space that unfinished ones take.
    uploads: Semaphore,
    /// Held while a file and its record change together.
    changing: Locks,
    /// Files being fetched from other controllers.
    fetches: Semaphore,
    orphans: Orphans,
}

impl Artifacts {
    pub(crate) fn new(store: Store, replica: Replica, limits: Limits) -> Self {
        let holder = replica.id();
        let uploads = Semaphore::new(limits.uploads);
        let (changing, fetches) = (Locks::default(), Semaphore::new(spread::FETCHES_MAX));
        let orphans = Orphans::default();
        Self { store: Arc::new(store), replica, holder, limits, uploads, changing, fetches, orphans }
    }

    /// Which of these a majority of the voters holds, with their sizes. Of those that are recorded
    /// here, only those that really are.
    pub(crate) async fn find(&self, digests: Vec<Digest>) -> Result<Vec<(Digest, Bytes)>, Failure> {
        let state = self.replica.linearizable().await?;
        let (voters, own) = (self.voters(), self.holder);
        let found: Vec<_> = digests
            .iter()
            .filter_map(|digest| state.artifact(digest))
            .filter(|artifact| spread::on_majority(artifact, &voters))
            .map(|artifact| (artifact.digest, artifact.bytes, artifact.holders.contains(&own)))
            .collect();
        let store = self.store.clone();
        let there = move |&(digest, bytes, here): &(Digest, Bytes, bool)| !here || store.has(digest, bytes);
        blocking(move || {
            Ok(found.into_iter().filter(there).map(|(digest, bytes, _)| (digest, bytes)).collect())
        })
        .await
    }
}

/// Runs file operations where they may block.
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
