//! Fetches objects from other workers. A fetch asks one worker, checks each chunk, and continues
//! after a broken connection at the byte that it reached, a bounded number of times.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use millrace_proto::convert::data_id_wire;
use millrace_proto::parts::objects_client;
use millrace_proto::status::from_status;
use millrace_proto::worker::{FetchObjectRequest, ObjectChunk};
use millrace_types::{DataId, Reason, Timestamp};
use tonic::transport::Channel;

use crate::clock::Clock;
use crate::endpoint::endpoint;

/// Longest silence of a worker, before its response and between two chunks.
const SILENCE_MAX: Duration = Duration::from_secs(2);
/// Maximum number of streams of one fetch, continuations included.
const TRIES_MAX: u32 = 3;
/// Maximum number of open connections. Beyond this number all connections are closed and reopened
/// on demand. The bound exceeds the nodes of a cluster, so the surplus can only be old addresses.
const CONNECTIONS_MAX: usize = 8192;

/// Flow-control window of one stream, in bytes. With a smaller window, a sender would wait for
/// round trips.
const STREAM_WINDOW: u32 = 8 << 20;
/// Flow-control window of all streams from one worker, in bytes.
const CONNECTION_WINDOW: u32 = 32 << 20;
/// Largest HTTP/2 frame, in bytes. With the default of 16 KiB, half of the time is spent on frames.
const FRAME: u32 = 1 << 20;

/// Connections to other workers, opened on demand.
#[derive(Debug, Clone, Default)]
pub(crate) struct PeerConnections(Arc<Mutex<HashMap<String, Channel>>>);

/// The reason why an object could not be fetched from a worker.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// The worker does not have the object.
    #[error("the worker no longer holds the object")]
    Gone,
    /// The worker does not answer, or sends damaged data.
    #[error("the worker cannot be reached: {0}")]
    Unreachable(String),
    /// The worker reports that the object never had these bytes.
    #[error("{0}")]
    Refused(String),
    /// The sink did not accept the bytes.
    #[error(transparent)]
    Sink(io::Error),
}

impl PeerConnections {
    fn channel(&self, address: &str) -> Result<Channel, PeerError> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = open.get(address) {
            return Ok(channel.clone());
        }
        let endpoint = endpoint(address).map_err(|error| PeerError::Unreachable(error.to_string()))?;
        let channel = endpoint
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(FRAME)
            .connect_lazy();
        if open.len() >= CONNECTIONS_MAX {
            open.clear();
        }
        open.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// Fetches bytes of an object from a worker, in order, from `offset` on. With `bytes` of
    /// `None`, fetches the whole object. `by` is the deadline of the request that needs the bytes,
    /// on `clock`.
    pub(super) async fn fetch(
        &self,
        id: &DataId,
        address: &str,
        offset: u64,
        bytes: Option<u64>,
        (by, clock): (Option<Timestamp>, &dyn Clock),
        sink: &mut (dyn FnMut(&[u8]) -> io::Result<()> + Send),
    ) -> Result<(), PeerError> {
        let channel = self.channel(address)?;
        let mut progress = FetchProgress { wanted: bytes, had: 0 };
        let mut last = PeerError::Unreachable("it was not asked".to_owned());
        for _ in 0..TRIES_MAX {
            let FetchProgress { wanted, had } = progress;
            let rest = FetchObjectRequest {
                id: Some(data_id_wire(id)),
                offset: offset + had,
                bytes: wanted.map_or(0, |wanted| wanted - had),
                whole: wanted.is_none(),
                wanted_within_micros: by
                    .map(|by| u64::try_from(by.since(clock.now()).as_micros()).unwrap_or(u64::MAX)),
            };
            last = match stream(channel.clone(), rest, &mut progress, sink).await {
                Ok(()) if progress.wanted == Some(progress.had) => return Ok(()),
                Ok(()) => PeerError::Unreachable(format!("the stream ended after {} bytes", progress.had)),
                Err(PeerError::Unreachable(why)) => PeerError::Unreachable(why),
                Err(error) => return Err(error),
            };
        }
        Err(last)
    }
}

/// The progress of a fetch.
#[derive(Debug, Clone, Copy)]
struct FetchProgress {
    /// Number of bytes to fetch; `None` until the worker reports the object's size.
    wanted: Option<u64>,
    had: u64,
}

/// Receives the chunks of one stream until it ends.
async fn stream(
    channel: Channel,
    request: FetchObjectRequest,
    progress: &mut FetchProgress,
    sink: &mut (dyn FnMut(&[u8]) -> io::Result<()> + Send),
) -> Result<(), PeerError> {
    let silent = |_| PeerError::Unreachable(format!("no data for {SILENCE_MAX:?}"));
    let broken = |status: tonic::Status| match from_status(&status).reason {
        Reason::DataLost => PeerError::Gone,
        Reason::MalformedRequest => PeerError::Refused(status.message().to_owned()),
        _ => PeerError::Unreachable(status.message().to_owned()),
    };
    let mut client = objects_client(channel);
    let answer = tokio::time::timeout(SILENCE_MAX, client.fetch_object(request)).await.map_err(silent)?;
    let mut chunks = answer.map_err(broken)?.into_inner();
    loop {
        let next = tokio::time::timeout(SILENCE_MAX, chunks.message()).await.map_err(silent)?;
        let Some(ObjectChunk { data, crc32, total_bytes }) = next.map_err(broken)? else { return Ok(()) };
        // A request for the whole object is sent only before its first chunk, so the total is set
        // once.
        let wanted = *progress.wanted.get_or_insert(total_bytes);
        if data.len() as u64 > wanted - progress.had || crc32fast::hash(&data) != crc32 {
            return Err(PeerError::Unreachable("a chunk is damaged".to_owned()));
        }
        sink(&data).map_err(PeerError::Sink)?;
        progress.had += data.len() as u64;
    }
}
