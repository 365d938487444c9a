//! Copies that are recorded here and not there any more: whoever finds one says so, and it is
//! fetched anew like any file that this controller does not hold.

use std::sync::Arc;

use millrace_cluster_state::{Artifact, Caller, Command, State};
use millrace_types::{Digest, Failure};

use super::{Artifacts, blocking};

impl Artifacts {
    /// Takes a damaged file away. The only copy is kept aside, for whoever can mend it: as it is it
    /// would only keep a sound one from being uploaded.
    pub(super) async fn drop_damaged(self: &Arc<Self>, digest: Digest) {
        let changing = self.changing.lock(digest).await;
        let elsewhere = self.held_elsewhere(&self.replica.state(), digest);
        let store = self.store.clone();
        let gone = blocking(move || if elsewhere { store.remove(digest) } else { store.set_aside(digest) });
        match gone.await {
            Ok(()) if elsewhere => {
                tracing::error!(%digest, "a model file is damaged on this controller's disk: it is fetched anew");
            }
            Ok(()) => {
                tracing::error!(%digest, "the only copy of a model file is damaged and was set aside: upload the model again");
            }
            Err(failure) => tracing::error!(error = failure.message, "a damaged model file stays"),
        }
        drop(changing);
        self.report_lost(digest);
    }

    /// Says that a file is not here, while the caller goes on: without a leader that may take long.
    pub(super) fn report_lost(self: &Arc<Self>, digest: Digest) {
        let artifacts = self.clone();
        tokio::spawn(async move {
            if let Err(failure) = artifacts.disown(digest).await {
                tracing::warn!(%digest, error = failure.message, "a lost model file still counts as held here");
            }
        });
    }

    /// Records that a file is not held here, if that is recorded and not so. If it comes back
    /// meanwhile, the next round records that again.
    pub(super) async fn disown(&self, digest: Digest) -> Result<(), Failure> {
        let state = self.replica.state();
        let recorded = |it: &&Arc<Artifact>| it.holders.contains(&self.holder);
        let Some(artifact) = state.artifact(&digest).filter(recorded) else { return Ok(()) };
        let (store, bytes) = (self.store.clone(), artifact.bytes);
        if blocking(move || Ok(store.has(digest, bytes))).await? {
            return Ok(());
        }
        let command = Command::RemoveArtifactHolder { digest, holder: self.holder };
        match self.replica.propose(Caller("controller".into()), None, command).await {
            Err(failure) if failure.retryable => Err(failure),
            Err(failure) => {
                // Removed meanwhile, or the last copy: nobody else can give it.
                tracing::error!(%digest, error = failure.message, "a model file is lost: upload the model again");
                Ok(())
            }
            Ok(_) => {
                tracing::warn!(%digest, "a model file that this controller held is gone: it is fetched anew");
                Ok(())
            }
        }
    }

    /// Whether the state names another member that holds the file.
    fn held_elsewhere(&self, state: &State, digest: Digest) -> bool {
        let membership = self.replica.membership();
        state.artifact(&digest).is_some_and(|artifact| {
            let mut others = artifact.holders.iter().filter(|holder| **holder != self.holder);
            artifact.in_store() || others.any(|holder| membership.get_node(&holder.0).is_some())
        })
    }
}
