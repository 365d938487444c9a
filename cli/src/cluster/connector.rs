//! The connector of a controller to workers in its own process, which calls the workers' service
//! directly. The workers start after the controller, so a call waits until its worker's service
//! runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_controller::{ConnectError, Connector, Tcp, Transport};
use millrace_proto::activity::Activity;
use millrace_proto::log::{Page, Query};
use millrace_proto::trace::wire::Spans;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_server::Worker;
use millrace_types::NodeName;
use millrace_worker::service::WorkerService;
use tokio::sync::watch;
use tonic::{Request, Response, Status};

type Place = watch::Receiver<Option<WorkerService>>;

/// A connector to the workers of this process without a socket, and to other workers over TCP.
#[derive(Debug)]
pub(super) struct InProcessConnector(BTreeMap<NodeName, Place>);

/// The slots into which each worker's service is put once the service runs.
#[derive(Debug)]
pub(super) struct ServiceSlots(BTreeMap<NodeName, watch::Sender<Option<WorkerService>>>);

/// A worker of this process.
struct InProcessWorker(Place);

impl InProcessConnector {
    pub(super) fn of(names: &[NodeName]) -> (Self, ServiceSlots) {
        let mut neighbours = BTreeMap::new();
        let mut places = BTreeMap::new();
        for name in names {
            let (sender, receiver) = watch::channel(None);
            neighbours.insert(name.clone(), receiver);
            places.insert(name.clone(), sender);
        }
        (Self(neighbours), ServiceSlots(places))
    }
}

impl ServiceSlots {
    pub(super) fn settle(&self, name: &NodeName, service: WorkerService) {
        if let Some(place) = self.0.get(name) {
            place.send_replace(Some(service));
        }
    }
}

impl Connector for InProcessConnector {
    fn connect(&self, name: &NodeName, address: &str) -> Result<Transport, ConnectError> {
        match self.0.get(name) {
            Some(place) => Ok(Arc::new(InProcessWorker(place.clone()))),
            None => Tcp.connect(name, address),
        }
    }
}

impl InProcessWorker {
    async fn service(&self) -> Result<WorkerService, Status> {
        let mut place = self.0.clone();
        // An error means that the starting task ended, so the service will never run.
        let service = place.wait_for(Option::is_some).await.ok().and_then(|service| service.clone());
        service.ok_or_else(|| Status::unavailable("the worker did not start"))
    }
}

#[tonic::async_trait]
impl Worker for InProcessWorker {
    async fn invoke(
        &self,
        request: Request<wire::InvokeRequest>,
    ) -> Result<Response<wire::InvokeResponse>, Status> {
        self.service().await?.invoke(request).await
    }

    async fn release_objects(
        &self,
        request: Request<wire::ReleaseObjectsRequest>,
    ) -> Result<Response<wire::ReleaseObjectsResponse>, Status> {
        self.service().await?.release_objects(request).await
    }

    async fn run_trial(
        &self,
        request: Request<wire::RunTrialRequest>,
    ) -> Result<Response<wire::RunTrialResponse>, Status> {
        self.service().await?.run_trial(request).await
    }

    async fn inject_fault(
        &self,
        request: Request<wire::InjectFaultRequest>,
    ) -> Result<Response<wire::InjectFaultResponse>, Status> {
        self.service().await?.inject_fault(request).await
    }

    async fn get_spans(&self, request: Request<wire::GetSpansRequest>) -> Result<Response<Spans>, Status> {
        self.service().await?.get_spans(request).await
    }

    async fn get_logs(&self, request: Request<Query>) -> Result<Response<Page>, Status> {
        self.service().await?.get_logs(request).await
    }

    async fn get_activity(
        &self,
        request: Request<wire::GetActivityRequest>,
    ) -> Result<Response<Activity>, Status> {
        self.service().await?.get_activity(request).await
    }
}
