//! Calls to the other controllers. A group of one never makes any.

#![allow(clippy::result_large_err, reason = "openraft's error types")]

use std::future::Future;

use futures::stream;
use futures::{Stream, StreamExt as _};
use millrace_proto::raft::Message;
use millrace_proto::raft::raft_client::RaftClient;
use millrace_raft_store::{ClusterConfig, ENTRY_BYTES_MAX, SnapshotFile};
use millrace_types::{ClusterId, Failure, Reason};
use openraft::error::{
    Fatal, NetworkError, RPCError, RaftError, RemoteError, ReplicationClosed, StreamingError, Unreachable,
};
use openraft::network::{RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
};
use openraft::{BasicNode, OptionalSend, Snapshot, Vote};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use super::codec;
use crate::config::{CONNECT_TIMEOUT, KEEP_ALIVE};

/// The largest message. One read of the log gives a few MiB at most, or else a single entry.
pub(super) const MESSAGE_BYTES_MAX: usize = 16 << 20;
const _: () = assert!(2 * ENTRY_BYTES_MAX < MESSAGE_BYTES_MAX, "an entry and its envelope fit a message");
/// Bytes of a snapshot sent at a time.
const CHUNK_BYTES: usize = 1 << 20;

type CallError = RPCError<u64, BasicNode, RaftError<u64>>;

/// Makes connections to the members of one cluster.
#[derive(Debug, Clone)]
pub(crate) struct Network {
    pub(crate) cluster: ClusterId,
}

/// The connection to one member.
#[derive(Debug)]
pub(crate) struct Peer {
    cluster: ClusterId,
    target: u64,
    /// `None` when its address is none: every call says so.
    client: Result<RaftClient<Channel>, String>,
}

impl RaftNetworkFactory<ClusterConfig> for Network {
    type Network = Peer;

    async fn new_client(&mut self, target: u64, node: &BasicNode) -> Peer {
        let client = channel(&node.addr).map(|channel| {
            RaftClient::new(channel)
                .max_decoding_message_size(MESSAGE_BYTES_MAX)
                .max_encoding_message_size(MESSAGE_BYTES_MAX)
        });
        Peer { cluster: self.cluster.clone(), target, client: client.map_err(|error| error.to_string()) }
    }
}

fn channel(address: &str) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true);
    Ok(endpoint.connect_lazy())
}

/// Why a call gave no answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Failed(String);

/// Openraft waits before it calls an unreachable peer again, and calls again at once otherwise.
fn call_error(status: &Status) -> CallError {
    let failed = Failed(status.message().to_owned());
    match status.code() {
        Code::Unavailable | Code::FailedPrecondition => RPCError::Unreachable(Unreachable::new(&failed)),
        _ => RPCError::Network(NetworkError::new(&failed)),
    }
}

fn codec_error(failure: &Failure) -> CallError {
    RPCError::Unreachable(Unreachable::new(&Failed(failure.message.clone())))
}

impl Peer {
    fn client(&self) -> Result<RaftClient<Channel>, CallError> {
        let no_address = |reason: &String| RPCError::Unreachable(Unreachable::new(&Failed(reason.clone())));
        self.client.clone().map_err(|reason| no_address(&reason))
    }

    fn request<T: Serialize>(&self, value: &T, option: &RPCOption) -> Result<Request<Message>, CallError> {
        let mut request =
            Request::new(codec::encode(&self.cluster, value).map_err(|error| codec_error(&error))?);
        request.set_timeout(option.hard_ttl());
        Ok(request)
    }

    fn answer<T: DeserializeOwned>(&self, message: &Message) -> Result<T, CallError> {
        let answer: Result<T, RaftError<u64>> =
            codec::decode(&self.cluster, message).map_err(|error| codec_error(&error))?;
        answer.map_err(|error| RPCError::RemoteError(RemoteError::new(self.target, error)))
    }
}

impl RaftNetwork<ClusterConfig> for Peer {
    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<ClusterConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<u64>, CallError> {
        let request = self.request(&rpc, &option)?;
        let answer = self.client()?.append_entries(request).await.map_err(|status| call_error(&status))?;
        self.answer(answer.get_ref())
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<u64>,
        option: RPCOption,
    ) -> Result<VoteResponse<u64>, CallError> {
        let request = self.request(&rpc, &option)?;
        let answer = self.client()?.vote(request).await.map_err(|status| call_error(&status))?;
        self.answer(answer.get_ref())
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote<u64>,
        snapshot: Snapshot<ClusterConfig>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<u64>, StreamingError<ClusterConfig, Fatal<u64>>> {
        let unreachable = |text: String| StreamingError::Unreachable(Unreachable::new(&Failed(text)));
        let header = codec::encode(&self.cluster, &(vote, &snapshot.meta))
            .map_err(|failure| unreachable(failure.message))?;
        let file = chunks(self.cluster.clone(), *snapshot.snapshot);
        let messages = stream::once(async { header }).chain(file);
        let mut client = self.client.clone().map_err(unreachable)?;
        tokio::select! {
            closed = cancel => Err(StreamingError::Closed(closed)),
            answer = client.snapshot(messages) => {
                let answer = answer.map_err(|status| unreachable(status.message().to_owned()))?;
                let answer: Result<SnapshotResponse<u64>, Fatal<u64>> = codec::decode(&self.cluster, answer.get_ref())
                    .map_err(|failure| unreachable(failure.message))?;
                answer.map_err(|error| StreamingError::RemoteError(RemoteError::new(self.target, error)))
            }
        }
    }
}

/// The file in pieces. One that cannot be read ends early: the receiver's checksum refuses it then.
fn chunks(cluster: ClusterId, file: SnapshotFile) -> impl Stream<Item = Message> + Send + 'static {
    stream::unfold((file, 0u64), move |(file, offset)| {
        let cluster = cluster.clone();
        async move {
            match read(file, offset).await {
                Ok((_, bytes)) if bytes.is_empty() => None,
                Ok((file, bytes)) => {
                    let next = offset + bytes.len() as u64;
                    Some((codec::message(&cluster, bytes), (file, next)))
                }
                Err(failure) => {
                    tracing::error!(error = failure.message, "a snapshot cannot be read");
                    None
                }
            }
        }
    })
}

async fn read(file: SnapshotFile, offset: u64) -> Result<(SnapshotFile, Vec<u8>), Failure> {
    let internal = |text: String| Failure::new(Reason::Internal, text);
    let work = move || {
        let mut bytes = vec![0; CHUNK_BYTES];
        let read = file.read_at(offset, &mut bytes)?;
        bytes.truncate(read);
        Ok((file, bytes))
    };
    let done = tokio::task::spawn_blocking(work).await.map_err(|error| internal(error.to_string()))?;
    done.map_err(|error: std::io::Error| internal(error.to_string()))
}
