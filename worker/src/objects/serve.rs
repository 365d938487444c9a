//! This worker's objects for other workers: chunks with their checksums, read as they are sent, so
//! that a slow receiver takes little memory here. What a GPU has comes to the host a window at a time.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, BoxStream, StreamExt as _};
use millrace_proto::convert;
use millrace_proto::status::to_status;
use millrace_proto::worker::{FetchObjectRequest, ObjectChunk};
use millrace_types::{DataId, Failure, Reason, Timestamp};
use tonic::Status;

use super::{Contents, Objects, PIECE};
use crate::actors::node::Reader;
use crate::clock::Clock;

/// What of a GPU's object is copied to the host at a time, for one receiver.
const WINDOW: u64 = 16 << 20;

/// Chunks on their way.
pub(crate) type Chunks = BoxStream<'static, Result<ObjectChunk, Status>>;

impl Objects {
    /// The bytes asked for, in order.
    pub(crate) fn serve(&self, request: FetchObjectRequest) -> Result<Chunks, Failure> {
        let FetchObjectRequest { id, offset, bytes, whole, wanted_within_micros } = request;
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

/// Bytes of an object that are being sent.
struct Serving {
    contents: Contents,
    at: u64,
    end: u64,
    /// What of it is on the host: where that is, where it begins there, and where it ends in the object.
    window: Option<(Contents, u64, u64)>,
    /// How large it is, until that is said.
    total: Option<u64>,
    /// By when all of it is wanted, if that was said.
    by: Option<Timestamp>,
    clock: Arc<dyn Clock>,
}

/// By when the next so many of the bytes that are left are wanted, if all are wanted `by` then: each window is
/// a transfer of its own, and those after it need time as well.
fn window_by(now: Timestamp, by: Timestamp, bytes: u64, left: u64) -> Timestamp {
    let span = by.since(now).as_nanos() * u128::from(bytes) / u128::from(left.max(1));
    now + Duration::from_nanos(u64::try_from(span).unwrap_or(u64::MAX))
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
            let left = self.end - self.at;
            let bytes = left.min(WINDOW);
            let by = self.by.map(|by| window_by(self.clock.now(), by, bytes, left));
            let reader = by.map_or(Reader::Nobody, Reader::Elsewhere);
            let found = self.contents.on_host(self.at, bytes, reader).await;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_share_the_time_that_is_left() {
        let ms = |ms: u64| Timestamp(ms * 1_000_000);
        assert_eq!(window_by(ms(100), ms(500), 16, 64), ms(200));
        assert_eq!(window_by(ms(250), ms(500), 16, 16), ms(500), "the last has all of it");
        assert_eq!(window_by(ms(600), ms(500), 16, 64), ms(600), "late already");
        assert_eq!(window_by(ms(0), Timestamp::MAX, 1 << 40, 1 << 40), Timestamp::MAX);
    }
}
