//! The service for the other controllers: the calls of the Raft group, and reads of logs, spans,
//! activity, traffic and model files.

use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use millrace_proto::raft::{JoinRequest, JoinResponse, Message, raft_server};
use millrace_proto::trace::SpanRing;
use prost::Message as _;
use tonic::{Request, Response, Status, Streaming};

use super::activity::GatewayActivity;
use super::{logs, traces};
use crate::artifacts::{ArtifactFile, ArtifactService};
use crate::passed::TrafficMatrix;
use crate::raft::Replica;
use crate::raft::codec::{self, MessageReceiver};
use crate::raft::peers::MESSAGE_BYTES_MAX;
use crate::raft::service::{Answer, GroupService, header};

/// Answers the other controllers as one member of one cluster.
#[derive(Debug, Clone)]
pub(crate) struct PeerService {
    group: GroupService,
    replica: Replica,
    artifacts: Arc<ArtifactService>,
    shown: ReadableParts,
}

/// The parts of this process that other controllers may read.
#[derive(Debug, Clone, Default)]
pub(crate) struct ReadableParts {
    /// The spans that this process keeps.
    pub(crate) kept: Option<SpanRing>,
    /// The activity counts of this controller's gateway.
    pub(crate) doors: GatewayActivity,
    /// The traffic of the workflow runs that this controller drives.
    pub(crate) passed: TrafficMatrix,
}

impl PeerService {
    /// Returns a service for the member with this replica and these files.
    pub(crate) fn new(replica: Replica, artifacts: Arc<ArtifactService>) -> Self {
        let group = GroupService::new(replica.clone());
        Self { group, replica, artifacts, shown: ReadableParts::default() }
    }

    /// Returns the service with these readable parts.
    pub(crate) fn showing(self, shown: ReadableParts) -> Self {
        Self { shown, ..self }
    }

    /// Returns the service with message limits.
    pub(crate) fn server(self) -> raft_server::RaftServer<Self> {
        raft_server::RaftServer::new(self)
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
    }
}

#[tonic::async_trait]
impl raft_server::Raft for PeerService {
    type GiveArtifactStream = BoxStream<'static, Result<Message, Status>>;

    async fn give_artifact(
        &self,
        request: Request<Message>,
    ) -> Result<Response<Self::GiveArtifactStream>, Status> {
        let digest = self.group.decode(request.get_ref())?;
        let own = self.replica.own().clone();
        let to = MessageReceiver::sender(request.get_ref());
        let chunks = self.artifacts.clone().give_out(digest).await.map_err(codec::status)?;
        let messages = chunks
            .map(move |chunk| chunk.map(|chunk| codec::message(&own, &to, chunk)).map_err(codec::status));
        Ok(Response::new(messages.boxed()))
    }

    async fn append_entries(&self, request: Request<Message>) -> Answer {
        self.group.append_entries(request).await
    }

    async fn vote(&self, request: Request<Message>) -> Answer {
        self.group.vote(request).await
    }

    async fn pre_vote(&self, request: Request<Message>) -> Answer {
        self.group.pre_vote(request).await
    }

    async fn snapshot(&self, request: Request<Streaming<Message>>) -> Answer {
        self.group.snapshot(request).await
    }

    async fn propose(&self, request: Request<Message>) -> Answer {
        self.group.propose(request).await
    }

    async fn read_index(&self, request: Request<Message>) -> Answer {
        self.group.read_index(request).await
    }

    async fn change_group(&self, request: Request<Message>) -> Answer {
        self.group.change_group(request).await
    }

    async fn transfer(&self, request: Request<Message>) -> Answer {
        self.group.transfer(request).await
    }

    async fn take_over(&self, request: Request<Message>) -> Answer {
        self.group.take_over(request).await
    }

    async fn get_status(&self, request: Request<Message>) -> Answer {
        self.group.get_status(request).await
    }

    async fn get_spans(&self, request: Request<Message>) -> Answer {
        let id: String = self.group.decode(request.get_ref())?;
        self.group.answer(request.get_ref(), &traces::given(self.shown.kept.as_ref(), &id))
    }

    async fn get_logs(&self, request: Request<Message>) -> Answer {
        let query: Vec<u8> = self.group.decode(request.get_ref())?;
        self.group.answer(request.get_ref(), &logs::given(query))
    }

    async fn get_activity(&self, request: Request<Message>) -> Answer {
        let tenant: String = self.group.decode(request.get_ref())?;
        self.group.answer(request.get_ref(), &self.shown.doors.told(&tenant).encode_to_vec())
    }

    async fn get_passed(&self, request: Request<Message>) -> Answer {
        let () = self.group.decode(request.get_ref())?;
        self.group.answer(request.get_ref(), &self.shown.passed.told(&self.replica.state()))
    }

    async fn hold_artifact(&self, request: Request<Streaming<Message>>) -> Answer {
        let mut messages = request.into_inner();
        let header = header(&mut messages).await?;
        let held: ArtifactFile = self.group.decode(&header)?;
        let own = self.replica.own().clone();
        let chunks = messages.map(move |message| {
            let message = message.map_err(|status| millrace_proto::status::from_status(&status))?;
            codec::check(&own, &message)?;
            Ok(message.payload)
        });
        self.artifacts.hold(held, chunks).await.map_err(codec::status)?;
        self.group.answer(&header, &())
    }

    async fn join(&self, request: Request<JoinRequest>) -> Result<Response<JoinResponse>, Status> {
        self.group.join(request).await
    }
}
