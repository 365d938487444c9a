//! Handles lost copies: files that are recorded as held here but missing on disk. The finder removes
//! this holder from the record, and the file is fetched again like any missing file.

use std::sync::Arc;

use millrace_cluster_state::{Artifact, CallerName, State, StateCommand};
use millrace_types::{Digest, Failure};

use super::blocking::blocking;
use super::service::ArtifactService;

impl ArtifactService {
    /// Removes a damaged file. The only copy is set aside for manual recovery instead; a damaged copy
    /// in place would block the upload of a sound copy.
    pub(super) async fn drop_damaged(self: &Arc<Self>, digest: Digest) {
        let changing = self.changing.lock(digest).await;
        let elsewhere = self.held_elsewhere(&self.replica.state(), digest);
        let store = self.store.clone();
        let gone = blocking(move || if elsewhere { store.remove(digest) } else { store.set_aside(digest) });
        match gone.await {
            Ok(()) if elsewhere => {
                tracing::error!(%digest, "a model file is damaged on this controller's disk: fetching it again");
            }
            Ok(()) => {
                tracing::error!(%digest, "the only copy of a model file is damaged and was set aside: upload the model again");
            }
            Err(failure) => tracing::error!(error = failure.message, "cannot remove a damaged model file"),
        }
        drop(changing);
        self.report_lost(digest);
    }

    /// Reports in the background that a file is missing here, because that may take long without a
    /// leader.
    pub(super) fn report_lost(self: &Arc<Self>, digest: Digest) {
        let artifacts = self.clone();
        tokio::spawn(async move {
            if let Err(failure) = artifacts.disown(digest).await {
                tracing::warn!(%digest, error = failure.message, "cannot record the loss of a model file: the file still counts as held here");
            }
        });
    }

    /// Removes this holder from a file's record if the file is recorded but missing. If the file
    /// returns meanwhile, the next round records the file again.
    pub(super) async fn disown(&self, digest: Digest) -> Result<(), Failure> {
        let state = self.replica.state();
        let recorded = |it: &&Arc<Artifact>| it.holders.contains(&self.holder);
        let Some(artifact) = state.artifact(&digest).filter(recorded) else { return Ok(()) };
        let store = self.store.clone();
        let bytes = artifact.bytes;
        if blocking(move || Ok(store.has(digest, bytes))).await? {
            return Ok(());
        }
        let command = StateCommand::RemoveArtifactHolder { digest, holder: self.holder };
        match self.replica.propose(CallerName("controller".into()), None, command).await {
            Err(failure) if failure.retryable => Err(failure),
            Err(failure) => {
                // The record was removed meanwhile, or this was the last copy, which no other holder
                // can provide.
                tracing::error!(%digest, error = failure.message, "a model file is lost: upload the model again");
                Ok(())
            }
            Ok(_) => {
                tracing::warn!(%digest, "a model file of this controller is missing: fetching it again");
                Ok(())
            }
        }
    }

    /// Whether the object store or another member holds the file, by the state.
    fn held_elsewhere(&self, state: &State, digest: Digest) -> bool {
        let membership = self.replica.membership();
        state.artifact(&digest).is_some_and(|artifact| {
            let mut others = artifact.holders.iter().filter(|holder| **holder != self.holder);
            artifact.in_store() || others.any(|holder| membership.get_node(&holder.0).is_some())
        })
    }
}
