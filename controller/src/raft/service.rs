//! What the other controllers call.

use futures::TryFutureExt as _;
use millrace_proto::raft::Message;
use millrace_proto::raft::raft_server;
use millrace_raft_store::{SnapshotFile, SnapshotMeta, Vote};
use millrace_types::{ClusterId, Failure, Reason};
use openraft::Snapshot;
use tonic::{Request, Response, Status, Streaming};

use super::{Raft, codec};

/// Answers for one member of one cluster.
#[derive(Clone)]
pub(crate) struct Service {
    raft: Raft,
    cluster: ClusterId,
}

impl Service {
    /// The service, with its limits.
    pub(crate) fn server(raft: Raft, cluster: ClusterId) -> raft_server::RaftServer<Self> {
        raft_server::RaftServer::new(Self { raft, cluster })
            .max_decoding_message_size(super::network::MESSAGE_BYTES_MAX)
            .max_encoding_message_size(super::network::MESSAGE_BYTES_MAX)
    }

    fn decode<T: serde::de::DeserializeOwned>(&self, message: &Message) -> Result<T, Status> {
        codec::decode(&self.cluster, message).map_err(codec::status)
    }

    fn answer<T: serde::Serialize>(&self, value: &T) -> Result<Response<Message>, Status> {
        codec::encode(&self.cluster, value).map(Response::new).map_err(codec::status)
    }

    /// Receives a snapshot, whole and sound: openraft halts on one that does not install.
    async fn receive(
        &self,
        mut messages: Streaming<Message>,
    ) -> Result<(Vote, Snapshot<millrace_raft_store::ClusterConfig>), Status> {
        let malformed =
            || codec::status(Failure::new(Reason::MalformedRequest, "a snapshot begins with its header"));
        let header = messages.message().await?.ok_or_else(malformed)?;
        let (vote, meta): (Vote, SnapshotMeta) = self.decode(&header)?;
        let received = self.raft.begin_receiving_snapshot().await;
        let mut file = received.map_err(|error| internal(error.to_string()))?;
        while let Some(message) = messages.message().await? {
            codec::check(&self.cluster, &message).map_err(codec::status)?;
            file = blocking(move || file.append(&message.payload).map(|()| file)).await?;
        }
        let file = blocking(move || file.verify().map(|()| file)).await?;
        Ok((vote, Snapshot { meta, snapshot: file }))
    }
}

async fn blocking<E, F>(work: F) -> Result<Box<SnapshotFile>, Status>
where
    E: std::fmt::Display + Send + 'static,
    F: FnOnce() -> Result<Box<SnapshotFile>, E> + Send + 'static,
{
    let done = tokio::task::spawn_blocking(work).map_err(|error| internal(error.to_string()));
    done.await?.map_err(|error| internal(error.to_string()))
}

fn internal(message: String) -> Status {
    codec::status(Failure::new(Reason::Internal, message))
}

#[tonic::async_trait]
impl raft_server::Raft for Service {
    async fn append_entries(&self, request: Request<Message>) -> Result<Response<Message>, Status> {
        let rpc = self.decode(request.get_ref())?;
        self.answer(&self.raft.append_entries(rpc).await)
    }

    async fn vote(&self, request: Request<Message>) -> Result<Response<Message>, Status> {
        let rpc = self.decode(request.get_ref())?;
        self.answer(&self.raft.vote(rpc).await)
    }

    async fn snapshot(&self, request: Request<Streaming<Message>>) -> Result<Response<Message>, Status> {
        let (vote, snapshot) = self.receive(request.into_inner()).await?;
        self.answer(&self.raft.install_full_snapshot(vote, snapshot).await)
    }
}
