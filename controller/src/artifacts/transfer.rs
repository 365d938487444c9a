//! Transfers of model files between controllers: the calls of the controller that sends or asks.

use std::time::Duration;

use bytes::Bytes as Chunk;
use futures::{Stream, StreamExt as _, stream};
use millrace_types::{Digest, Failure};

use super::file::ArtifactFile;
use crate::raft::PeerClient;

impl PeerClient {
    /// Sends a model file to the member to store. The member answers after the check and the sync of
    /// the file.
    ///
    /// # Errors
    /// The peer's own failure, or `NO_LEADER` if the peer did not answer.
    pub(super) async fn hold_artifact(
        &self,
        timeout: Duration,
        held: &ArtifactFile,
        chunks: impl Stream<Item = Vec<u8>> + Send + 'static,
    ) -> Result<(), Failure> {
        let chunks = self.messages(chunks);
        self.call(timeout, held, async |mut client, header| {
            client.hold_artifact(stream::once(async { header.into_inner() }).chain(chunks)).await
        })
        .await
    }

    /// Fetches a model file from the member. The bytes are unverified, so the receiver must check the
    /// digest.
    ///
    /// # Errors
    /// `ARTIFACT_NOT_FOUND` if the member lacks the file, or `NO_LEADER` if no answer arrived.
    pub(super) async fn give_artifact(
        &self,
        timeout: Duration,
        digest: &Digest,
    ) -> Result<impl Stream<Item = Result<Chunk, Failure>> + Send + use<>, Failure> {
        self.stream(timeout, digest, async |mut client, request| client.give_artifact(request).await).await
    }
}
