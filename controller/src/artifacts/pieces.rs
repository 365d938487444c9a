//! Reads model files in pieces.

use futures::{Stream, stream};
use millrace_types::Failure;

use super::blocking::blocking;
use millrace_storage::FileReader;

/// The maximum size of a chunk, in bytes.
pub(super) const CHUNK_BYTES: usize = millrace_proto::parts::CHUNK_BYTES_MAX;

/// Returns a file's bytes in order. If the contents do not match the digest, an error follows the last
/// byte.
pub(super) fn pieces(file: FileReader) -> impl Stream<Item = Result<Vec<u8>, Failure>> + Send + 'static {
    stream::try_unfold(file, async |mut file: FileReader| {
        let (chunk, file) = blocking(move || file.read(CHUNK_BYTES).map(|chunk| (chunk, file))).await?;
        Ok(chunk.map(|chunk| (chunk, file)))
    })
}
