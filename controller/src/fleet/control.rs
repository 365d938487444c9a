//! The service that workers attach to and fetch model files from.

use std::sync::Arc;

use futures::stream::BoxStream;
use futures::{StreamExt as _, TryFutureExt as _};
use millrace_proto::status::to_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_control_server::WorkerControl;
use millrace_types::{ClusterId, Failure, Reason};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

use super::{Fleet, session};
use crate::artifacts::Artifacts;
use crate::connector::Connector;
use crate::leader::Outlook;
use crate::raft::Replica;

/// What the service answers from.
#[derive(Debug, Clone)]
pub(crate) struct Control {
    pub(crate) cluster_id: ClusterId,
    pub(crate) replica: Replica,
    pub(crate) fleet: Fleet,
    pub(crate) artifacts: Arc<Artifacts>,
    pub(crate) connector: Arc<dyn Connector>,
    pub(crate) outlook: Outlook,
    /// Ends every stream.
    pub(crate) stop: CancellationToken,
}

#[tonic::async_trait]
impl WorkerControl for Control {
    type AttachStream = BoxStream<'static, Result<wire::ControllerMessage, Status>>;
    type FetchArtifactStream = BoxStream<'static, Result<wire::ArtifactChunk, Status>>;

    async fn attach(
        &self,
        request: Request<Streaming<wire::WorkerMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let messages =
            session::attach(self.clone(), request.into_inner()).map_err(|failure| to_status(&failure));
        Ok(Response::new(messages.await?.boxed()))
    }

    async fn fetch_artifact(
        &self,
        request: Request<wire::FetchArtifactRequest>,
    ) -> Result<Response<Self::FetchArtifactStream>, Status> {
        let digest = request
            .into_inner()
            .digest
            .parse()
            .map_err(|error| to_status(&Failure::new(Reason::MalformedRequest, format!("{error}"))))?;
        let chunks = self.artifacts.clone().fetch(digest).await.map_err(|failure| to_status(&failure))?;
        Ok(Response::new(chunks.boxed()))
    }
}
