//! Objects of other workers. A fetch asks the object's home, checks each chunk, and after a broken
//! connection goes on from where it was, a bounded number of times.

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
use crate::control;

/// How long a worker may keep silent, before its answer and between two chunks.
const SILENCE_MAX: Duration = Duration::from_secs(2);
/// How often one fetch is begun, counting those that go on where another broke off.
const TRIES_MAX: u32 = 3;
/// Connections kept open. One more, and all are closed, and opened again as they are needed: more than
/// a cluster has nodes, so that they can only be addresses of days ago.
const CONNECTIONS_MAX: usize = 8192;

/// Bytes of one object that may be on the wire unread, and of all from one worker: a sender would wait
/// for round trips otherwise.
const STREAM_WINDOW: u32 = 8 << 20;
const CONNECTION_WINDOW: u32 = 32 << 20;
/// The largest piece that HTTP/2 sends at a time: at its usual 16 KiB half of the time goes into pieces.
const FRAME: u32 = 1 << 20;

/// Connections to other workers, opened when first needed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Peers(Arc<Mutex<HashMap<String, Channel>>>);

/// Why an object could not be fetched.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// Its home does not have it.
    #[error("its home does not hold it any more")]
    Gone,
    /// Its home does not answer, or sends what is not it.
    #[error("its home cannot be reached: {0}")]
    Unreachable(String),
    /// Its home says that no such bytes were ever in it.
    #[error("{0}")]
    Refused(String),
    /// What came could not be put down.
    #[error(transparent)]
    Sink(io::Error),
}

impl Peers {
    fn channel(&self, address: &str) -> Result<Channel, PeerError> {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = open.get(address) {
            return Ok(channel.clone());
        }
        let endpoint =
            control::endpoint(address).map_err(|error| PeerError::Unreachable(error.to_string()))?;
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

    /// Fetches bytes of an object from its home, in order. From 0 on without a number: all of them. They are
    /// for a request that is to be answered by then, by the node's clock.
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
        let mut progress = Progress { wanted: bytes, had: 0 };
        let mut last = PeerError::Unreachable("it was not asked".to_owned());
        for _ in 0..TRIES_MAX {
            let Progress { wanted, had } = progress;
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
                Ok(()) => PeerError::Unreachable(format!("it broke off after {} bytes", progress.had)),
                Err(PeerError::Unreachable(why)) => PeerError::Unreachable(why),
                Err(error) => return Err(error),
            };
        }
        Err(last)
    }
}

/// How far a fetch is.
#[derive(Debug, Clone, Copy)]
struct Progress {
    /// How many bytes there are; `None` until its home says so.
    wanted: Option<u64>,
    had: u64,
}

/// One stream of chunks, as far as it comes.
async fn stream(
    channel: Channel,
    request: FetchObjectRequest,
    progress: &mut Progress,
    sink: &mut (dyn FnMut(&[u8]) -> io::Result<()> + Send),
) -> Result<(), PeerError> {
    let silent = |_| PeerError::Unreachable(format!("nothing for {SILENCE_MAX:?}"));
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
        // Only what nothing was had of is asked for without a number.
        let wanted = *progress.wanted.get_or_insert(total_bytes);
        if data.len() as u64 > wanted - progress.had || crc32fast::hash(&data) != crc32 {
            return Err(PeerError::Unreachable("a chunk is damaged".to_owned()));
        }
        sink(&data).map_err(PeerError::Sink)?;
        progress.had += data.len() as u64;
    }
}
