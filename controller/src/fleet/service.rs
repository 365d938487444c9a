//! The service to which workers attach, and which serves model files.

use futures::stream::BoxStream;
use futures::{StreamExt as _, TryFutureExt as _};
use millrace_cluster_state::DataLocation;
use millrace_proto::status::to_status;
use millrace_proto::worker::worker_control_server::WorkerControl;
use millrace_proto::{convert, worker as wire};
use millrace_types::{Failure, NodeName};
use tonic::{Request, Response, Status, Streaming};

use super::control::WorkerControlService;
use super::session;

/// The maximum number of holders in a response: a worker asks only a few holders.
const HOLDERS_MAX: usize = 8;

#[tonic::async_trait]
impl WorkerControl for WorkerControlService {
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
        let digest = request.into_inner().digest.parse().map_err(|error| malformed(format!("{error}")))?;
        let chunks = self.artifacts.clone().fetch(digest).await.map_err(|failure| to_status(&failure))?;
        Ok(Response::new(chunks.boxed()))
    }

    async fn find_node(
        &self,
        request: Request<wire::FindNodeRequest>,
    ) -> Result<Response<wire::FindNodeResponse>, Status> {
        let name = NodeName::new(&request.get_ref().node).map_err(|error| malformed(error.to_string()))?;
        let address = self.fleet.worker(&name).map(|worker| worker.hello.address.clone()).unwrap_or_default();
        Ok(Response::new(wire::FindNodeResponse { address }))
    }

    /// Answers from the locally applied state. A worker that gets an outdated holder asks again.
    async fn locate_data(
        &self,
        request: Request<wire::LocateDataRequest>,
    ) -> Result<Response<wire::LocateDataResponse>, Status> {
        let id = request.into_inner().id.ok_or_else(|| malformed("the request names no data".to_owned()))?;
        let id = convert::data_id(&id).map_err(|failure| to_status(&failure))?;
        let (mut holders, lost) = match self.replica.state().locate(&id) {
            DataLocation::Held { home, holders, .. } => {
                let others = holders.iter().filter(|holder| **holder != home).map(ToString::to_string);
                (std::iter::once(home.to_string()).chain(others).collect(), false)
            }
            DataLocation::Lost { .. } => (Vec::new(), true),
            DataLocation::Unknown => (Vec::new(), false),
        };
        holders.truncate(HOLDERS_MAX);
        Ok(Response::new(wire::LocateDataResponse { holders, lost }))
    }
}

fn malformed(message: String) -> Status {
    to_status(&Failure::malformed(message))
}
