//! Gives a model file to a worker, checked as it is read.

use std::sync::Arc;

use futures::{Stream, StreamExt as _};
use millrace_proto::status::to_status;
use millrace_proto::worker::ArtifactChunk;
use millrace_types::{Digest, Failure, Reason};
use tonic::Status;

use super::spread::{Held, pieces};
use super::{Artifacts, blocking};

impl Artifacts {
    /// The file's bytes in order, fetched from another controller if it is not here yet. An error
    /// ends the stream of a file that is not what its name says, after its last byte: the receiver
    /// checks the digest too. A damaged file goes if another controller holds a sound one.
    pub(crate) async fn fetch(
        self: Arc<Self>,
        digest: Digest,
    ) -> Result<impl Stream<Item = Result<ArtifactChunk, Status>> + Send + use<>, Failure> {
        let state = self.replica.state();
        let missing = || Failure::new(Reason::ArtifactNotFound, format!("no artifact {digest}"));
        let artifact = state.artifact(&digest).ok_or_else(missing)?;
        self.obtain(Held { digest, bytes: artifact.bytes }).await?;
        let chunks = self.read(digest).await?;
        Ok(chunks.then(move |chunk| {
            let artifacts = self.clone();
            async move {
                match chunk {
                    Ok(chunk) => Ok(ArtifactChunk { data: chunk.into() }),
                    Err(failure) => {
                        if failure.reason == Reason::DigestMismatch {
                            artifacts.drop_damaged(digest).await;
                        }
                        Err(to_status(&failure))
                    }
                }
            }
        }))
    }

    /// Removes a damaged file that others hold: the next one who asks gets theirs.
    async fn drop_damaged(&self, digest: Digest) {
        let _changing = self.changing.lock(digest).await;
        let state = self.replica.state();
        let membership = self.replica.membership();
        let elsewhere = state.artifact(&digest).is_some_and(|artifact| {
            let others = artifact.holders.iter().filter(|holder| **holder != self.holder);
            others.into_iter().any(|holder| membership.get_node(&holder.0).is_some())
        });
        if !elsewhere {
            return;
        }
        tracing::error!(%digest, "a model file is damaged on this controller's disk: it is fetched anew");
        let store = self.store.clone();
        if let Err(failure) = blocking(move || store.remove(digest)).await {
            tracing::error!(error = failure.message, "the damaged file stays");
        }
    }

    /// A file as it is here.
    pub(crate) async fn read(
        &self,
        digest: Digest,
    ) -> Result<impl Stream<Item = Result<Vec<u8>, Failure>> + Send + use<>, Failure> {
        let store = self.store.clone();
        let file = blocking(move || store.open_file(digest)).await?;
        Ok(pieces(file))
    }
}
