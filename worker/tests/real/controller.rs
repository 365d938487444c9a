//! A controller as workers see it: says what to serve, gives out artifacts, keeps what it is told.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use millrace_proto::status::to_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_control_server::{WorkerControl, WorkerControlServer};
use millrace_proto::worker::{controller_message, worker_message};
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::{Digest, Failure, Reason};
use tokio::sync::{oneshot, watch};
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use crate::support::within;

/// A running controller. Dropped, it is gone, connections included.
pub(crate) struct Controller {
    pub(crate) addr: SocketAddr,
    state: Arc<State>,
    _stop: oneshot::Sender<()>,
}

struct State {
    cluster_id: String,
    epoch: u64,
    artifacts: Mutex<BTreeMap<String, Bytes>>,
    fetches: AtomicUsize,
    desired: watch::Sender<wire::DesiredState>,
    hello: watch::Sender<Option<wire::WorkerHello>>,
    statuses: watch::Sender<Vec<wire::FunctionStatus>>,
    telemetry: watch::Sender<wire::Telemetry>,
}

impl Controller {
    pub(crate) async fn start(cluster_id: &str, epoch: u64) -> Self {
        let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let addr = incoming.local_addr().unwrap();
        let state = Arc::new(State {
            cluster_id: cluster_id.into(),
            epoch,
            artifacts: Mutex::default(),
            fetches: AtomicUsize::new(0),
            desired: watch::Sender::default(),
            hello: watch::Sender::default(),
            statuses: watch::Sender::default(),
            telemetry: watch::Sender::default(),
        });
        let (stop, stopped) = oneshot::channel::<()>();
        let service = WorkerControlServer::new(Service(state.clone()));
        let server = tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming);
        tokio::spawn(async {
            tokio::select! {
                served = server => served.unwrap(),
                _ = stopped => {}
            }
        });
        Self { addr, state, _stop: stop }
    }

    /// Has an artifact to give.
    pub(crate) fn publish(&self, model: &[u8]) -> Digest {
        let digest = Digest::of(model);
        self.publish_as(digest, model);
        digest
    }

    /// Gives out `bytes` as the artifact `digest`, which they need not be.
    pub(crate) fn publish_as(&self, digest: Digest, bytes: &[u8]) {
        let bytes = Bytes::copy_from_slice(bytes);
        self.state.artifacts.lock().unwrap().insert(digest.to_string(), bytes);
    }

    /// Wants these functions served, as (name, digest) at revision 1.
    pub(crate) fn desire(&self, functions: &[(&str, Digest)]) {
        let function = |(name, digest): &(&str, Digest)| wire::DesiredFunction {
            tenant: "default".into(),
            name: (*name).into(),
            revision: 1,
            digest: digest.to_string(),
            artifact_bytes: 1 << 26,
            idempotent: true,
            ..Default::default()
        };
        let functions = functions.iter().map(function).collect();
        self.state.desired.send_modify(|state| {
            *state = wire::DesiredState { term: 1, index: state.index + 1, functions };
        });
    }

    /// Artifacts given out so far.
    pub(crate) fn fetches(&self) -> usize {
        self.state.fetches.load(Ordering::Relaxed)
    }

    pub(crate) async fn hello(&self) -> wire::WorkerHello {
        let mut hello = self.state.hello.subscribe();
        within("a worker's hello", hello.wait_for(Option::is_some)).await.unwrap().clone().unwrap()
    }

    /// Waits until a function is in this phase, and gives its message.
    pub(crate) async fn phase(&self, name: &str, phase: wire::FunctionPhase) -> String {
        let mut statuses = self.state.statuses.subscribe();
        let there = |statuses: &Vec<wire::FunctionStatus>| {
            statuses.iter().any(|status| status.name == name && status.phase() == phase)
        };
        let statuses = within(&format!("{name} {phase:?}"), statuses.wait_for(there)).await.unwrap().clone();
        statuses.into_iter().find(|status| status.name == name).unwrap().message
    }

    pub(crate) async fn ready(&self, name: &str) {
        self.phase(name, wire::FunctionPhase::Ready).await;
    }

    /// What the worker said last.
    pub(crate) fn latest_telemetry(&self) -> wire::Telemetry {
        self.state.telemetry.borrow().clone()
    }

    /// Waits for telemetry that says so.
    pub(crate) async fn telemetry(
        &self,
        what: &str,
        says: impl FnMut(&wire::Telemetry) -> bool,
    ) -> wire::Telemetry {
        let mut telemetry = self.state.telemetry.subscribe();
        within(what, telemetry.wait_for(says)).await.unwrap().clone()
    }
}

struct Service(Arc<State>);

type Messages<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl WorkerControl for Service {
    type AttachStream = Messages<wire::ControllerMessage>;
    type FetchArtifactStream = Messages<wire::ArtifactChunk>;

    async fn attach(
        &self,
        request: Request<Streaming<wire::WorkerMessage>>,
    ) -> Result<Response<Self::AttachStream>, Status> {
        let state = self.0.clone();
        let mut messages = request.into_inner();
        let Some(worker_message::Message::Hello(hello)) =
            messages.message().await?.and_then(|first| first.message)
        else {
            return Err(Status::invalid_argument("a worker greets first"));
        };
        if !hello.cluster_id.is_empty() && hello.cluster_id != state.cluster_id {
            let message = "another cluster's: give it a data directory of its own";
            return Err(to_status(&Failure::new(Reason::PeerMismatch, message)));
        }
        state.hello.send_replace(Some(hello));
        tokio::spawn(async move {
            // Ends with the worker, or with the controller.
            while let Ok(Some(message)) = messages.message().await {
                match message.message.unwrap() {
                    worker_message::Message::Hello(hello) => panic!("greeted twice: {hello:?}"),
                    worker_message::Message::Telemetry(telemetry) => {
                        drop(state.telemetry.send_replace(telemetry))
                    }
                    worker_message::Message::FunctionStatuses(statuses) => {
                        state.statuses.send_replace(statuses.functions);
                    }
                }
            }
        });
        let hello = wire::ControllerHello {
            cluster_id: self.0.cluster_id.clone(),
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.into(),
            epoch: self.0.epoch,
        };
        let hello = stream::iter([controller_message::Message::Hello(hello)]);
        let desired = tokio_stream::wrappers::WatchStream::new(self.0.desired.subscribe());
        let said = desired.filter(|state| std::future::ready(state.index > 0));
        let messages = hello.chain(said.map(controller_message::Message::DesiredState));
        let messages = messages.map(|message| Ok(wire::ControllerMessage { message: Some(message) }));
        Ok(Response::new(Box::pin(messages)))
    }

    async fn fetch_artifact(
        &self,
        request: Request<wire::FetchArtifactRequest>,
    ) -> Result<Response<Self::FetchArtifactStream>, Status> {
        self.0.fetches.fetch_add(1, Ordering::Relaxed);
        let artifacts = self.0.artifacts.lock().unwrap();
        let bytes = artifacts.get(&request.into_inner().digest).cloned();
        let bytes =
            bytes.ok_or_else(|| to_status(&Failure::new(Reason::ArtifactNotFound, "no such artifact")))?;
        let chunks: Vec<_> = bytes.chunks(1 << 20).map(|chunk| bytes.slice_ref(chunk)).collect();
        Ok(Response::new(Box::pin(stream::iter(chunks).map(|data| Ok(wire::ArtifactChunk { data })))))
    }
}
