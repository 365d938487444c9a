//! Sends model files to workers and other controllers, verified during the read.

use std::sync::Arc;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt as _};
use millrace_cluster_state::Artifact;
use millrace_proto::status::to_status;
use millrace_proto::worker::ArtifactChunk;
use millrace_types::{Digest, Failure, Reason};
use tonic::Status;

use super::blocking::blocking;
use super::file::ArtifactFile;
use super::pieces::pieces;
use super::pool::StoreLossReaction;
use super::service::ArtifactService;

impl ArtifactService {
    /// Returns the file's bytes in order: from the local disk; or from the object store; or after
    /// fetching the file from another controller. If the contents do not match the digest, the stream
    /// ends with an error after the last byte. The receiver checks the digest too.
    pub(crate) async fn fetch(
        self: Arc<Self>,
        digest: Digest,
    ) -> Result<impl Stream<Item = Result<ArtifactChunk, Status>> + Send + use<>, Failure> {
        let state = self.replica.state();
        let missing = || Failure::new(Reason::ArtifactNotFound, format!("no artifact {digest}"));
        let artifact = state.artifact(&digest).ok_or_else(missing)?;
        let held = ArtifactFile { digest, bytes: artifact.bytes };
        let chunks = match self.give_as(artifact, StoreLossReaction::Mend).await {
            Ok(chunks) => chunks,
            Err(first) => {
                if let Err(failure) = self.obtain(held).await {
                    self.report_lost(digest);
                    // The object store's error explains more than a controller without the file.
                    return Err(if artifact.in_store() { first } else { failure });
                }
                self.read(digest).await?.boxed()
            }
        };
        Ok(chunks.map(|chunk| match chunk {
            Ok(chunk) => Ok(ArtifactChunk { data: chunk.into() }),
            Err(failure) => Err(to_status(&failure)),
        }))
    }

    /// Returns the file's bytes for another controller. Does not ask other controllers, because the
    /// caller does so itself.
    pub(crate) async fn give_out(
        self: Arc<Self>,
        digest: Digest,
    ) -> Result<BoxStream<'static, Result<Vec<u8>, Failure>>, Failure> {
        match self.replica.state().artifact(&digest) {
            Some(artifact) => self.give_as(artifact, StoreLossReaction::Leave).await,
            None => Ok(self.read(digest).await?.boxed()),
        }
    }

    /// Returns the file's bytes from the local disk, or from the object store.
    async fn give_as(
        self: &Arc<Self>,
        artifact: &Artifact,
        loss: StoreLossReaction,
    ) -> Result<BoxStream<'static, Result<Vec<u8>, Failure>>, Failure> {
        let held = ArtifactFile { digest: artifact.digest, bytes: artifact.bytes };
        let store = self.store.clone();
        let here = blocking(move || Ok(store.has(held.digest, held.bytes))).await?;
        let elsewhere = artifact.in_store() && (self.shared.is_some() || loss == StoreLossReaction::Mend);
        if !here && elsewhere {
            return self.read_shared(held, loss).await;
        }
        Ok(self.read(held.digest).await?.boxed())
    }

    /// Returns the bytes of a local file. A missing or damaged file is removed from this controller's
    /// records.
    async fn read(
        self: &Arc<Self>,
        digest: Digest,
    ) -> Result<impl Stream<Item = Result<Vec<u8>, Failure>> + Send + use<>, Failure> {
        let store = self.store.clone();
        // The semaphore is never closed, so acquiring cannot fail.
        let permit = self.reads.clone().acquire_owned().await.ok();
        let file = match blocking(move || store.open_file(digest)).await {
            Ok(file) => file,
            Err(failure) => {
                self.report_lost(digest);
                return Err(failure);
            }
        };
        let artifacts = self.clone();
        Ok(pieces(file).then(move |chunk| {
            // Move the permit into the stream, to hold the permit until the stream ends.
            let _permit = &permit;
            let artifacts = artifacts.clone();
            async move {
                if chunk.as_ref().is_err_and(|failure| failure.reason == Reason::DigestMismatch) {
                    artifacts.drop_damaged(digest).await;
                }
                chunk
            }
        }))
    }
}
