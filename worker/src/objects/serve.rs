//! This worker's objects for other workers: chunks with their checksums, read as they are sent, so
//! that a slow receiver takes no memory here.

use futures::stream::{self, BoxStream, StreamExt as _};
use millrace_proto::convert;
use millrace_proto::status::to_status;
use millrace_proto::worker::{FetchObjectRequest, ObjectChunk};
use millrace_types::{Failure, Reason};
use tonic::Status;

use super::{Objects, PIECE};

/// Chunks on their way.
pub(crate) type Chunks = BoxStream<'static, Result<ObjectChunk, Status>>;

impl Objects {
    /// The bytes asked for, in order.
    pub(crate) fn serve(&self, request: FetchObjectRequest) -> Result<Chunks, Failure> {
        let malformed = |message: String| Failure::new(Reason::MalformedRequest, message);
        let FetchObjectRequest { id, offset, bytes } = request;
        let id = convert::data_id(&id.ok_or_else(|| malformed("no object is named".to_owned()))?)?;
        let contents = self.find(&id).ok_or_else(|| {
            Failure::new(Reason::DataLost, format!("object {id} is not held here (any more)"))
        })?;
        let end = offset.checked_add(bytes).filter(|end| *end <= contents.len());
        let end = end.ok_or_else(|| {
            malformed(format!(
                "object {id} has {} bytes, and {bytes} from {offset} are asked for",
                contents.len()
            ))
        })?;
        let chunk = move |at: u64| {
            let piece = (end - at).min(PIECE as u64) as usize;
            let read =
                contents.read(at, piece).map(|data| ObjectChunk { crc32: crc32fast::hash(&data), data });
            read.map_err(|error| {
                to_status(&Failure::new(Reason::Internal, format!("object {id} cannot be read: {error}")))
            })
        };
        Ok(stream::iter((offset..end).step_by(PIECE)).map(chunk).boxed())
    }
}
