//! openraft's calls to the other controllers. A group of one makes no calls.

#![allow(clippy::result_large_err, reason = "openraft's error types")]

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::stream;
use futures::{Stream, StreamExt as _};
use millrace_proto::raft::Message;
use millrace_proto::raft::raft_client::RaftClient;
use millrace_raft_store::{ClusterConfig, DirectoryOwner, GroupMember, SnapshotFile};
use millrace_types::{Failure, Reason};
use openraft::error::{
    Fatal, NetworkError, RPCError, RaftError, RemoteError, ReplicationClosed, StreamingError, Unreachable,
};
use openraft::network::{Backoff, RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, SnapshotResponse, VoteRequest, VoteResponse,
};
use openraft::{OptionalSend, Snapshot, Vote};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tonic::transport::Channel;
use tonic::{Code, Request, Status};

use super::codec::{self, MessageReceiver};
use super::leader_gate::LeaderGate;
use super::outages::ReplicationOutages;
use super::peers::{PeerClient, RaftPeerConnections, TrafficClass};

/// Bytes of a snapshot sent at a time.
const CHUNK_BYTES: usize = 1 << 20;

/// The pause before another call to an unreachable member. The pause is well below the election
/// timeout: a member that returns must hear the leader before the election timeout.
const UNREACHABLE_PAUSE: Duration = Duration::from_millis(100);

type CallError = RPCError<u64, GroupMember, RaftError<u64>>;

/// Creates openraft's clients for the members of one cluster.
#[derive(Debug, Clone)]
pub(crate) struct Network {
    pub(crate) peers: RaftPeerConnections,
}

/// openraft's client for one member.
#[derive(Debug)]
pub(crate) struct RaftMemberClient {
    log: PeerClient,
    bulk: PeerClient,
    voice: LeaderGate,
    silences: ReplicationOutages,
}

impl RaftNetworkFactory<ClusterConfig> for Network {
    type Network = RaftMemberClient;

    async fn new_client(&mut self, target: u64, member: &GroupMember) -> RaftMemberClient {
        RaftMemberClient {
            log: self.peers.peer(target, member, TrafficClass::Log),
            bulk: self.peers.peer(target, member, TrafficClass::Bulk),
            voice: self.peers.voice.clone(),
            silences: self.peers.silences.clone(),
        }
    }
}

/// A call without an answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Failed(String);

/// Converts a status. openraft pauses before it calls an unreachable peer again, and calls again at
/// once after other errors.
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

impl RaftMemberClient {
    fn client(&self) -> Result<RaftClient<Channel>, CallError> {
        let no_address = |reason: &String| RPCError::Unreachable(Unreachable::new(&Failed(reason.clone())));
        self.log.client.clone().map_err(|reason| no_address(&reason))
    }

    fn request<T: Serialize>(&self, value: &T, option: &RPCOption) -> Result<Request<Message>, CallError> {
        let message = codec::encode(&self.log.own, &self.log.to, value);
        let mut request = Request::new(message.map_err(|error| codec_error(&error))?);
        request.set_timeout(option.hard_ttl());
        Ok(request)
    }

    fn answer<T: DeserializeOwned>(&self, message: &Message) -> Result<T, CallError> {
        let answer: Result<T, RaftError<u64>> =
            codec::decode(&self.log.own, message).map_err(|error| codec_error(&error))?;
        answer.map_err(|error| RPCError::RemoteError(RemoteError::new(self.log.to.id, error)))
    }
}

impl RaftNetwork<ClusterConfig> for RaftMemberClient {
    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<ClusterConfig>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<u64>, CallError> {
        if self.voice.is_silent() {
            let why = Failed("no majority answers this controller: another controller may lead".to_owned());
            return Err(RPCError::Unreachable(Unreachable::new(&why)));
        }
        let request = self.request(&rpc, &option)?;
        let mut client = self.client()?;
        let call = self.silences.call(self.log.to.id, &self.log.address);
        let answer = client.append_entries(request).await;
        call.ended(&answer);
        let answer = answer.map_err(|status| call_error(&status))?;
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

    fn backoff(&self) -> Backoff {
        Backoff::new(std::iter::repeat(UNREACHABLE_PAUSE))
    }

    async fn full_snapshot(
        &mut self,
        vote: Vote<u64>,
        snapshot: Snapshot<ClusterConfig>,
        cancel: impl Future<Output = ReplicationClosed> + OptionalSend + 'static,
        _option: RPCOption,
    ) -> Result<SnapshotResponse<u64>, StreamingError<ClusterConfig, Fatal<u64>>> {
        let unreachable = |text: String| StreamingError::Unreachable(Unreachable::new(&Failed(text)));
        let PeerClient { own, to, client, .. } = self.bulk.clone();
        let header = codec::encode(&own, &to, &(vote, &snapshot.meta))
            .map_err(|failure| unreachable(failure.message))?;
        let file = chunks(own.clone(), to, *snapshot.snapshot);
        let messages = stream::once(async { header }).chain(file);
        let mut client = client.map_err(unreachable)?;
        tokio::select! {
            closed = cancel => Err(StreamingError::Closed(closed)),
            answer = client.snapshot(messages) => {
                let answer = answer.map_err(|status| unreachable(status.message().to_owned()))?;
                let answer: Result<SnapshotResponse<u64>, Fatal<u64>> = codec::decode(&own, answer.get_ref())
                    .map_err(|failure| unreachable(failure.message))?;
                answer.map_err(|error| StreamingError::RemoteError(RemoteError::new(self.bulk.to.id, error)))
            }
        }
    }
}

/// Returns the file in pieces. After a read error the stream ends early, and the receiver's checksum
/// refuses the file.
fn chunks(
    own: Arc<DirectoryOwner>,
    to: MessageReceiver,
    file: SnapshotFile,
) -> impl Stream<Item = Message> + Send + 'static {
    stream::unfold((file, 0u64), move |(file, offset)| {
        let own = own.clone();
        let to = to.clone();
        async move {
            match read(file, offset).await {
                Ok((_, bytes)) if bytes.is_empty() => None,
                Ok((file, bytes)) => {
                    let next = offset + bytes.len() as u64;
                    Some((codec::message(&own, &to, bytes), (file, next)))
                }
                Err(failure) => {
                    tracing::error!(error = failure.message, "cannot read a snapshot to send");
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
