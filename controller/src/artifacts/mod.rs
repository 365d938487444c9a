//! Model files: content-addressed, checked when written and when read, and collected once no
//! function has used them for a while.
//!
//! ```text
//! upload: receive ─► fsync ─► digest ─► compile ─► rename ─► fsync dir ─► AddArtifact in Raft
//! ```
//! The file is durable before the state says that it is held, and goes only after the state says
//! that it is not. Whatever ends an upload early leaves neither a file nor a record.

mod collect;
mod fetch;
mod inspect;
mod store;
mod upload;

use std::sync::Arc;

use millrace_cluster_state::ControllerId;
use millrace_types::{Bytes, Digest, Failure, Reason};
use tokio::sync::{Mutex, Semaphore};

use crate::clock::WallClock;
use crate::config::Limits;
use crate::raft::Replica;
pub(crate) use store::Store;

/// The model files of this controller.
#[derive(Debug)]
pub(crate) struct Artifacts {
    store: Arc<Store>,
    replica: Replica,
    holder: ControllerId,
    clock: Arc<dyn WallClock>,
    limits: Limits,
    /// Uploads at a time, and with them the space that unfinished ones take.
    uploads: Semaphore,
    /// Held while a file and its record change together, so that the collector never removes the
    /// file of a record that an upload is about to make.
    changing: Mutex<()>,
}

impl Artifacts {
    pub(crate) fn new(
        store: Store,
        replica: Replica,
        holder: ControllerId,
        clock: Arc<dyn WallClock>,
        limits: Limits,
    ) -> Self {
        let uploads = Semaphore::new(limits.uploads);
        Self { store: Arc::new(store), replica, holder, clock, limits, uploads, changing: Mutex::new(()) }
    }

    /// Which of these are recorded and here, with their sizes.
    pub(crate) async fn find(&self, digests: Vec<Digest>) -> Result<Vec<(Digest, Bytes)>, Failure> {
        let state = self.replica.linearizable().await?;
        let sized: Vec<_> = digests
            .into_iter()
            .filter_map(|digest| state.artifact(&digest).map(|artifact| (digest, artifact.bytes)))
            .collect();
        let store = self.store.clone();
        blocking(move || Ok(sized.into_iter().filter(|&(digest, bytes)| store.has(digest, bytes)).collect()))
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
