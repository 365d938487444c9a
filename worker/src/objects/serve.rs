//! Sends this worker's objects to other workers, in chunks with checksums. Chunks are read only
//! when the receiver is ready, so a slow receiver costs little memory here. Data on a GPU is copied
//! to the host one window at a time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt as _};
use millrace_proto::convert;
use millrace_proto::status::to_status;
use millrace_proto::worker::{FetchObjectRequest, ObjectChunk};
use millrace_types::{DataId, Failure, Reason, Timestamp};
use tonic::Status;

use super::Contents;
use super::store::{ObjectStore, PIECE};
use crate::clock::Clock;
use crate::object_handle::TransferReader;

/// Maximum bytes of a GPU's object that are copied to the host at a time for one receiver.
const WINDOW: u64 = 16 << 20;

/// A stream of chunks.
pub(crate) type ChunkStream = BoxStream<'static, Result<ObjectChunk, Status>>;

impl ObjectStore {
    /// Returns the requested bytes, in order.
    pub(crate) fn serve(&self, request: FetchObjectRequest) -> Result<ChunkStream, Failure> {
        let FetchObjectRequest { id, offset, bytes, whole, wanted_within_micros } = request;
        let id = convert::data_id(&id.ok_or_else(|| Failure::malformed("the request names no object"))?)?;
        let contents = self
            .find(&id)
            .ok_or_else(|| Failure::new(Reason::DataLost, format!("object {id} is not on this worker")))?;
        let (offset, bytes) = if whole { (0, contents.len()) } else { (offset, bytes) };
        let end = offset.checked_add(bytes).filter(|end| *end <= contents.len());
        end.ok_or_else(|| {
            Failure::malformed(format!(
                "object {id} has {} bytes, and the request is for {bytes} from {offset}",
                contents.len()
            ))
        })?;
        let end = offset + bytes;
        let id = Arc::new(id);
        let total = whole.then_some(bytes);
        let clock = Arc::clone(&self.0.clock);
        let by = wanted_within_micros.map(|within| clock.now() + Duration::from_micros(within));
        let serving = Serving { contents, at: offset, end, window: None, total, by, clock };
        let chunks = stream::try_unfold(serving, move |serving| {
            let id = Arc::clone(&id);
            async move { serving.next().await.map_err(|failure| to_status(&failure.of(&id))) }
        });
        Ok(chunks.boxed())
    }
}

/// A range of an object that is being sent.
struct Serving {
    contents: Contents,
    at: u64,
    end: u64,
    /// The part of the range that is on the host: its memory, the offset of the next byte there,
    /// and the part's end in the object.
    window: Option<(Contents, u64, u64)>,
    /// Size of the object, until the first chunk has reported it.
    total: Option<u64>,
    /// Deadline of the whole range, if the receiver has one.
    by: Option<Timestamp>,
    clock: Arc<dyn Clock>,
}

/// Returns the deadline of a window of `bytes` bytes if the `left` remaining bytes have the
/// deadline `by`. Each window is a separate transfer, and later windows need a share of the time.
fn window_by(now: Timestamp, by: Timestamp, bytes: u64, left: u64) -> Timestamp {
    let span = by.since(now).as_nanos() * u128::from(bytes) / u128::from(left.max(1));
    now + Duration::from_nanos(u64::try_from(span).unwrap_or(u64::MAX))
}

/// The reason why sending stops.
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
            // An empty object has one chunk too, which reports its size.
            let empty = ObjectChunk { crc32: crc32fast::hash(&[]), ..ObjectChunk::default() };
            return Ok(total.map(|_| (empty, self)));
        }
        if self.window.as_ref().is_none_or(|(.., end)| *end == self.at) {
            let left = self.end - self.at;
            let bytes = left.min(WINDOW);
            let by = self.by.map(|by| window_by(self.clock.now(), by, bytes, left));
            let reader = by.map_or(TransferReader::None, TransferReader::Elsewhere);
            let found = self.contents.on_host(self.at, bytes, reader).await;
            let (here, at) = found.map_err(|_lost| Stop::Lost)?;
            self.window = Some((here, at, self.at + bytes));
        }
        let Some((here, at, end)) = &mut self.window else { return Ok(None) };
        let piece = (*end - self.at).min(PIECE as u64);
        let data = here.read(*at, piece as usize).map_err(Stop::Unreadable)?;
        *at += piece;
        self.at += piece;
        let chunk = ObjectChunk { crc32: crc32fast::hash(&data), data, total_bytes: total.unwrap_or(0) };
        Ok(Some((chunk, self)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_share_the_remaining_time() {
        let ms = |ms: u64| Timestamp(ms * 1_000_000);
        assert_eq!(window_by(ms(100), ms(500), 16, 64), ms(200));
        assert_eq!(window_by(ms(250), ms(500), 16, 16), ms(500), "the last window has all of the time");
        assert_eq!(window_by(ms(600), ms(500), 16, 64), ms(600), "the deadline has passed");
        assert_eq!(window_by(ms(0), Timestamp::MAX, 1 << 40, 1 << 40), Timestamp::MAX);
    }
}
