//! A stub worker, with the controller-facing side of a real one.

use std::time::Duration;

use futures::StreamExt as _;
use millrace_proto::activity::Activity;
use millrace_proto::log::{Page, Query};
use millrace_proto::parts::{ItemSet, PartAssembler, PartMessage as _};
use millrace_proto::trace::wire::Spans;
use millrace_proto::worker as wire;
use millrace_proto::worker::Part;
use millrace_proto::worker::worker_control_client::WorkerControlClient;
use millrace_proto::worker::worker_server::{Worker, WorkerServer};
use millrace_proto::worker::{controller_message, worker_message};
use millrace_types::Reason;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::support::{Cluster, channel, reason, soon, until};

/// A request that a stub worker received.
pub(crate) struct Call {
    pub(crate) request: wire::InvokeRequest,
    /// The sender of the answer. The channel is closed when the caller goes away.
    pub(crate) answer: oneshot::Sender<Result<wire::InvokeResponse, Status>>,
}

impl Call {
    /// Answers with zeros as the MLP's output.
    pub(crate) fn answer(self) {
        let output = wire::InferTensor {
            name: "y".into(),
            datatype: "FP32".into(),
            shape: vec![1, 64],
            data: vec![0; 256].into(),
            parts: Vec::new(),
        };
        let split = wire::Split { queue_ns: 1, swap_ns: 2, run_ns: 3, total_ns: 6, ..wire::Split::default() };
        let response = wire::InvokeResponse {
            outputs: vec![output],
            split: Some(split),
            attempts: 1,
            ..Default::default()
        };
        self.answer.send(Ok(response)).unwrap();
    }

    pub(crate) fn refuse(self, reason: Reason) {
        let failure = millrace_types::Failure::new(reason, "as requested by the test");
        self.answer.send(Err(millrace_proto::status::to_status(&failure))).unwrap();
    }
}

/// The worker's service, which passes every call to the test.
#[derive(Clone)]
pub(crate) struct StubService {
    pub(crate) calls: mpsc::UnboundedSender<Call>,
    /// The object ids that the worker is asked to release.
    pub(crate) released: mpsc::UnboundedSender<Vec<wire::DataId>>,
}

#[tonic::async_trait]
impl Worker for StubService {
    async fn invoke(
        &self,
        request: Request<wire::InvokeRequest>,
    ) -> Result<Response<wire::InvokeResponse>, Status> {
        let (answer, answered) = oneshot::channel();
        let call = Call { request: request.into_inner(), answer };
        self.calls.send(call).map_err(|_| Status::internal("the test is over"))?;
        answered.await.map_err(|_| Status::internal("the test gave no answer"))?.map(Response::new)
    }

    async fn run_trial(
        &self,
        _request: Request<wire::RunTrialRequest>,
    ) -> Result<Response<wire::RunTrialResponse>, Status> {
        Err(Status::unimplemented("the stub runs no trials"))
    }

    async fn inject_fault(
        &self,
        _request: Request<wire::InjectFaultRequest>,
    ) -> Result<Response<wire::InjectFaultResponse>, Status> {
        Ok(Response::new(wire::InjectFaultResponse {}))
    }

    async fn release_objects(
        &self,
        request: Request<wire::ReleaseObjectsRequest>,
    ) -> Result<Response<wire::ReleaseObjectsResponse>, Status> {
        // The receiver is dropped in tests that do not check releases.
        drop(self.released.send(request.into_inner().ids));
        Ok(Response::new(wire::ReleaseObjectsResponse {}))
    }

    async fn get_spans(&self, _request: Request<wire::GetSpansRequest>) -> Result<Response<Spans>, Status> {
        Ok(Response::new(Spans::default()))
    }

    async fn get_logs(&self, _request: Request<Query>) -> Result<Response<Page>, Status> {
        Ok(Response::new(Page::default()))
    }

    async fn get_activity(
        &self,
        _request: Request<wire::GetActivityRequest>,
    ) -> Result<Response<Activity>, Status> {
        Ok(Response::new(Activity::default()))
    }
}

/// A stub worker: a stream and a service in a separate runtime, so that a test can kill the worker like
/// a process.
pub(crate) struct Stub {
    runtime: Option<Runtime>,
    pub(crate) hello: wire::ControllerHello,
    pub(crate) desired: watch::Receiver<wire::DesiredState>,
    /// The last epoch that the worker was told.
    pub(crate) epoch: watch::Receiver<u64>,
    pub(crate) leadership: watch::Receiver<wire::Leadership>,
    pub(crate) acks: mpsc::UnboundedReceiver<wire::CheckpointAck>,
    pub(crate) calls: mpsc::UnboundedReceiver<Call>,
    pub(crate) released: mpsc::UnboundedReceiver<Vec<wire::DataId>>,
    /// The sender of the stream. Dropping the stub ends the stream but not the service.
    pub(crate) out: Option<mpsc::Sender<wire::WorkerMessage>>,
    /// Whether the worker sends signs of life.
    pub(crate) alive: watch::Sender<bool>,
}

pub(crate) fn hello(name: &str, instance: &str, address: &str) -> wire::WorkerHello {
    wire::WorkerHello {
        cluster_id: String::new(),
        protocol_version: millrace_proto::PROTOCOL_VERSION,
        build: "stub".into(),
        node: name.into(),
        instance: instance.into(),
        address: address.into(),
        gpus: vec![wire::GpuCapacity { index: 0, gpu_type: "stub".into(), memory_bytes: 1 << 30 }],
        host_memory_bytes: 8 << 30,
        topology: "stub".into(),
        seen_epoch: 0,
        runs_programs: false,
        stream_break: None,
    }
}

/// The stub's reports about the functions of its desired state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prepares {
    AtOnce,
    Never,
}

impl Stub {
    /// Starts a worker that reports every function ready at once.
    pub(crate) async fn start(cluster: &Cluster, name: &str) -> Self {
        Self::start_as(cluster, name, "first", Prepares::AtOnce).await.unwrap()
    }

    pub(crate) async fn start_as(
        cluster: &Cluster,
        name: &str,
        instance: &str,
        prepares: Prepares,
    ) -> Result<Self, Status> {
        Self::start_at(cluster.controller.internal_addr(), name, instance, prepares).await
    }

    /// Starts a worker with a stream to the controller at this address.
    pub(crate) async fn start_at(
        internal: std::net::SocketAddr,
        name: &str,
        instance: &str,
        prepares: Prepares,
    ) -> Result<Self, Status> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (give_call, calls) = mpsc::unbounded_channel();
        let (give_ids, released) = mpsc::unbounded_channel();
        let name = name.to_owned();
        let instance = instance.to_owned();
        let internal = internal.to_string();
        let started = runtime.spawn(async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let incoming = tonic::transport::server::TcpIncoming::from(listener);
            let service = StubService { calls: give_call, released: give_ids };
            let server = Server::builder().add_service(WorkerServer::new(service));
            tokio::spawn(server.serve_with_incoming(incoming));
            attach(internal, hello(&name, &instance, &address), prepares).await
        });
        match started.await.unwrap() {
            Ok(attached) => {
                let Attached { hello, desired, epoch, leadership, acks, out, alive } = attached;
                let runtime = Some(runtime);
                let out = Some(out);
                Ok(Self { runtime, hello, desired, epoch, leadership, acks, calls, released, out, alive })
            }
            Err(status) => {
                runtime.shutdown_background();
                Err(status)
            }
        }
    }

    /// Starts a worker as soon as the name is free.
    pub(crate) async fn start_when_free(cluster: &Cluster, name: &str, instance: &str) -> Self {
        until("the name to be free", async || {
            match Self::start_as(cluster, name, instance, Prepares::AtOnce).await {
                Ok(stub) => Some(stub),
                Err(status) => {
                    assert_eq!(reason(&status), Reason::NodeNameTaken, "{status}");
                    None
                }
            }
        })
        .await
    }

    /// Waits for the next request.
    pub(crate) async fn call(&mut self) -> Call {
        soon("a call", self.calls.recv()).await.unwrap()
    }

    /// Waits until the desired state has exactly these functions, as name@revision.
    pub(crate) async fn told(&mut self, wanted: &[&str]) {
        let told = |state: &wire::DesiredState| {
            let names: Vec<_> =
                state.functions.iter().map(|it| format!("{}@{}", it.name, it.revision)).collect();
            names == wanted
        };
        soon("the desired state", self.desired.wait_for(told)).await.unwrap();
    }

    pub(crate) async fn report(&self, telemetry: wire::Telemetry) {
        self.send(worker_message::Message::Telemetry(telemetry)).await;
    }

    pub(crate) async fn send(&self, message: worker_message::Message) {
        let message = wire::WorkerMessage { message: Some(message) };
        self.out.as_ref().unwrap().send(message).await.unwrap();
    }

    /// Ends the worker like kill -9: every connection breaks without a message.
    pub(crate) fn kill(mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// The stub's end of an attached stream.
struct Attached {
    hello: wire::ControllerHello,
    desired: watch::Receiver<wire::DesiredState>,
    epoch: watch::Receiver<u64>,
    leadership: watch::Receiver<wire::Leadership>,
    acks: mpsc::UnboundedReceiver<wire::CheckpointAck>,
    out: mpsc::Sender<wire::WorkerMessage>,
    alive: watch::Sender<bool>,
}

async fn attach(internal: String, hello: wire::WorkerHello, prepares: Prepares) -> Result<Attached, Status> {
    let (out, outgoing) = mpsc::channel(16);
    let first = wire::WorkerMessage { message: Some(worker_message::Message::Hello(hello)) };
    out.send(first).await.unwrap();
    let outgoing = tokio_stream::wrappers::ReceiverStream::new(outgoing);
    let mut incoming = WorkerControlClient::new(channel(internal)).attach(outgoing).await?.into_inner();
    let Some(controller_message::Message::Hello(greeting)) = incoming.message().await?.unwrap().message
    else {
        panic!("no hello");
    };
    let (told, desired) = watch::channel(wire::DesiredState::default());
    let (registered, epoch) = watch::channel(greeting.epoch);
    let (led, leadership) = watch::channel(wire::Leadership::default());
    let (give_ack, acks) = mpsc::unbounded_channel();
    let alive = watch::Sender::new(true);
    // Hold a weak sender: the test's sender decides when the stream ends.
    let reports = out.downgrade();
    let mut parts = PartAssembler::default();
    let mut complete = ItemSet::<wire::DesiredState>::default();
    tokio::spawn(give_signs_of_life(out.downgrade(), alive.subscribe()));
    tokio::spawn(async move {
        while let Some(Ok(message)) = incoming.next().await {
            match message.message.unwrap() {
                controller_message::Message::DesiredState(part) => {
                    let Some(update) = parts.take(part).unwrap() else { continue };
                    complete.apply(update).unwrap();
                    let whole = Part { set: 0, number: 0, last: true, changes: false };
                    let items = complete.items().to_vec();
                    let state = wire::DesiredState::compose(complete.head(), whole, items, Vec::new());
                    if let (Prepares::AtOnce, Some(out)) = (prepares, reports.upgrade()) {
                        let functions = state.functions.iter().map(ready).collect();
                        let statuses = worker_message::Message::FunctionStatuses(statuses(functions));
                        out.send(wire::WorkerMessage { message: Some(statuses) }).await.ok();
                    }
                    told.send_replace(state);
                }
                controller_message::Message::Registration(it) => drop(registered.send_replace(it.epoch)),
                controller_message::Message::Leadership(it) => drop(led.send_replace(it)),
                // The receiver is dropped in tests that do not check acknowledgements.
                controller_message::Message::CheckpointAck(it) => drop(give_ack.send(it)),
                controller_message::Message::Hello(_) => panic!("a second hello"),
            }
        }
    });
    Ok(Attached { hello: greeting, desired, epoch, leadership, acks, out, alive })
}

/// Sends telemetry at a worker's interval, under an outdated epoch: signs of life without contents.
async fn give_signs_of_life(out: mpsc::WeakSender<wire::WorkerMessage>, alive: watch::Receiver<bool>) {
    let mut beat = tokio::time::interval(Duration::from_millis(100));
    loop {
        beat.tick().await;
        let Some(out) = out.upgrade() else { return };
        let sign = worker_message::Message::Telemetry(wire::Telemetry::default());
        if *alive.borrow() && out.send(wire::WorkerMessage { message: Some(sign) }).await.is_err() {
            return;
        }
    }
}

/// Returns the statuses of all functions in one message.
pub(crate) fn statuses(functions: Vec<wire::FunctionStatus>) -> wire::FunctionStatuses {
    wire::FunctionStatuses { functions, ..wire::FunctionStatuses::default() }
}

pub(crate) fn ready(function: &wire::DesiredFunction) -> wire::FunctionStatus {
    wire::FunctionStatus {
        tenant: function.tenant.clone(),
        name: function.name.clone(),
        revision: function.revision,
        phase: wire::FunctionPhase::Ready.into(),
        message: String::new(),
    }
}
