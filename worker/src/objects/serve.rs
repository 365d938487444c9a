//! This worker's objects for other workers: chunks with their checksums, read as they are sent, so
//! that a slow receiver takes little memory here. What a GPU has comes to the host a window at a time.

use std::io;
use std::sync::Arc;

use futures::stream::{self, BoxStream, StreamExt as _};
use millrace_proto::convert;
use millrace_proto::status::to_status;
use millrace_proto::worker::{FetchObjectRequest, ObjectChunk};
use millrace_types::{DataId, Failure, Reason};
use tonic::Status;

use super::{Contents, Objects, PIECE};
use crate::actors::node::Reader;

/// What of a GPU's object is copied to the host at a time, for one receiver.
const WINDOW: u64 = 16 << 20;

/// Chunks on their way.
pub(crate) type Chunks = BoxStream<'static, Result<ObjectChunk, Status>>;

impl Objects {
    /// The bytes asked for, in order.
    pub(crate) fn serve(&self, request: FetchObjectRequest) -> Result<Chunks, Failure> {
        let FetchObjectRequest { id, offset, bytes, whole } = request;
        let id = convert::data_id(&id.ok_or_else(|| Failure::malformed("no object is named"))?)?;
        let contents = self.find(&id).ok_or_else(|| {
            Failure::new(Reason::DataLost, format!("object {id} is not held here (any more)"))
        })?;
        let (offset, bytes) = if whole { (0, contents.len()) } else { (offset, bytes) };
        let end = offset.checked_add(bytes).filter(|end| *end <= contents.len());
        end.ok_or_else(|| {
            Failure::malformed(format!(
                "object {id} has {} bytes, and {bytes} from {offset} are asked for",
                contents.len()
            ))
        })?;
        let (end, id, total) = (offset + bytes, Arc::new(id), whole.then_some(bytes));
        let serving = Serving { contents, at: offset, end, window: None, total };
        let chunks = stream::try_unfold(serving, move |serving| {
            let id = Arc::clone(&id);
            async move { serving.next().await.map_err(|failure| to_status(&failure.of(&id))) }
        });
        Ok(chunks.boxed())
    }
}

/// Bytes of an object that are being sent.
struct Serving {
    contents: Contents,
    at: u64,
    end: u64,
    /// What of it is on the host: where that is, where it begins there, and where it ends in the object.
    window: Option<(Contents, u64, u64)>,
    /// How large it is, until that is said.
    total: Option<u64>,
}

/// Why no more is sent.
enum Stop {
    Lost,
    Unreadable(io::Error),
}

impl Stop {
    fn of(self, id: &DataId) -> Failure {
        match self {
            Self::Lost => Failure::new(Reason::DataLost, format!("object {id} was lost")),
            Self::Unreadable(error) => {
                Failure::new(Reason::Internal, format!("object {id} cannot be read: {error}"))
            }
        }
    }
}

impl Serving {
    async fn next(mut self) -> Result<Option<(ObjectChunk, Self)>, Stop> {
        let total = self.total.take();
        if self.at == self.end {
            // One that is empty has a chunk all the same, which says so.
            let empty = ObjectChunk { crc32: crc32fast::hash(&[]), ..ObjectChunk::default() };
            return Ok(total.map(|_| (empty, self)));
        }
        if self.window.as_ref().is_none_or(|(.., end)| *end == self.at) {
            let bytes = (self.end - self.at).min(WINDOW);
            // By when the other worker wants it is not said.
            let found = self.contents.on_host(self.at, bytes, Reader::Nobody).await;
            let (here, at) = found.map_err(|_lost| Stop::Lost)?;
            self.window = Some((here, at, self.at + bytes));
        }
        let Some((here, at, end)) = &mut self.window else { return Ok(None) };
        let piece = (*end - self.at).min(PIECE as u64);
        let data = here.read(*at, piece as usize).map_err(Stop::Unreadable)?;
        (*at, self.at) = (*at + piece, self.at + piece);
        let chunk = ObjectChunk { crc32: crc32fast::hash(&data), data, total_bytes: total.unwrap_or(0) };
        Ok(Some((chunk, self)))
    }
}
