//! Gives a model file to a worker, checked as it is read.

use futures::Stream;
use millrace_proto::status::to_status;
use millrace_proto::worker::ArtifactChunk;
use millrace_types::{Digest, Failure, Reason};
use tonic::Status;

use super::{Artifacts, blocking};

/// The most bytes of a chunk.
const CHUNK_BYTES: usize = 1 << 20;

impl Artifacts {
    /// The file's bytes in order. An error ends the stream of a file that is not what its name
    /// says, after its last byte: the receiver checks the digest too.
    pub(crate) async fn fetch(
        &self,
        digest: Digest,
    ) -> Result<impl Stream<Item = Result<ArtifactChunk, Status>> + Send + use<>, Failure> {
        if self.replica.state().artifact(&digest).is_none() {
            return Err(Failure::new(Reason::ArtifactNotFound, format!("no artifact {digest}")));
        }
        let store = self.store.clone();
        let mut file = blocking(move || store.open_file(digest)).await?;
        Ok(async_stream::try_stream! {
            loop {
                let read = blocking(move || file.read(CHUNK_BYTES).map(|chunk| (chunk, file))).await;
                let (chunk, rest) = read.map_err(|failure| to_status(&failure))?;
                let Some(chunk) = chunk else { break };
                yield ArtifactChunk { data: chunk.into() };
                file = rest;
            }
        })
    }
}
