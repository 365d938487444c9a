//! A controller in a temporary directory, clients of it, and stub workers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::StreamExt as _;
use millrace_controller::clock::WallClock;
use millrace_controller::{Connector, Controller, ControllerConfig, Tcp};
use millrace_policy::lease::Limits;
use millrace_proto::activity::Activity;
use millrace_proto::admin::admin_client::AdminClient;
use millrace_proto::admin::upload_artifact_request::Part;
use millrace_proto::admin::{self as api};
use millrace_proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use millrace_proto::status::from_status;
use millrace_proto::trace::wire::Spans;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_control_client::WorkerControlClient;
use millrace_proto::worker::worker_server::{Worker, WorkerServer};
use millrace_proto::worker::{controller_message, worker_message};
use millrace_types::{Digest, Reason};
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot, watch};
use tonic::transport::{Channel, Server};
use tonic::{Request, Response, Status};

/// Waits longer than anything here should take, so that a hang is a failure.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen"))
}

/// A clock that stands until it is moved.
#[derive(Debug)]
pub(crate) struct ManualClock(AtomicU64);

impl Default for ManualClock {
    fn default() -> Self {
        Self(AtomicU64::new(1_700_000_000_000))
    }
}

impl ManualClock {
    pub(crate) fn advance(&self, span: Duration) {
        self.0.fetch_add(u64::try_from(span.as_millis()).unwrap(), Ordering::Relaxed);
    }
}

impl WallClock for ManualClock {
    fn now(&self) -> millrace_cluster_state::UnixMillis {
        millrace_cluster_state::UnixMillis(self.0.load(Ordering::Relaxed))
    }
}

/// A controller, and where it keeps its data.
pub(crate) struct Cluster {
    pub(crate) controller: Controller,
    pub(crate) dir: TempDir,
}

pub(crate) fn config(dir: &Path) -> ControllerConfig {
    let mut config = ControllerConfig::new(dir.to_owned(), 7);
    config.client_listen.set_port(0);
    config.internal_listen.set_port(0);
    config
}

/// A lease short enough to wait for, and long enough for a busy machine to keep.
pub(crate) fn short_lease(config: &mut ControllerConfig) {
    config.limits.lease = Limits { lease: Duration::from_millis(400), grace: Duration::from_millis(100) };
}

impl Cluster {
    pub(crate) async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    pub(crate) async fn start_with(edit: impl FnOnce(&mut ControllerConfig)) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), edit, Arc::new(Tcp)).await
    }

    pub(crate) async fn start_in(
        dir: TempDir,
        edit: impl FnOnce(&mut ControllerConfig),
        connector: Arc<dyn Connector>,
    ) -> Self {
        let mut config = config(dir.path());
        edit(&mut config);
        let controller = millrace_controller::start(config, connector).await.unwrap();
        Self { controller, dir }
    }

    /// Shuts down in order, and starts again on the same data.
    pub(crate) async fn restart(self) -> Self {
        let Self { controller, dir } = self;
        controller.shutdown(Duration::from_secs(5)).await;
        Self::start_in(dir, |_| {}, Arc::new(Tcp)).await
    }

    pub(crate) fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(channel(self.controller.client_addr().to_string()))
    }

    pub(crate) fn inference(&self) -> GrpcInferenceServiceClient<Channel> {
        GrpcInferenceServiceClient::new(channel(self.controller.client_addr().to_string()))
    }

    pub(crate) fn control(&self) -> WorkerControlClient<Channel> {
        WorkerControlClient::new(channel(self.controller.internal_addr().to_string()))
    }

    /// Uploads a model and applies a function of it.
    pub(crate) async fn deploy(&self, name: &str, model: &[u8]) -> api::Function {
        self.deploy_on(name, model, 1).await
    }

    /// Uploads a model and applies a function of it that wants so many replicas.
    pub(crate) async fn deploy_on(&self, name: &str, model: &[u8], replicas: u32) -> api::Function {
        let mut admin = self.admin();
        upload(&mut admin, model).await.unwrap();
        let mut request = apply_request(name, model);
        request.spec.as_mut().unwrap().replicas = replicas;
        admin.apply_function(request).await.unwrap().into_inner().function.unwrap()
    }

    /// Every file under the artifacts' directory.
    pub(crate) fn files(&self) -> Vec<String> {
        let dir = self.dir.path().join("artifacts");
        let mut names = Vec::new();
        for dir in [dir.clone(), dir.join("incoming")] {
            for entry in std::fs::read_dir(dir).unwrap() {
                let entry = entry.unwrap();
                if entry.metadata().unwrap().is_file() {
                    names.push(entry.file_name().into_string().unwrap());
                }
            }
        }
        names.sort();
        names
    }
}

pub(crate) fn channel(address: String) -> Channel {
    Channel::from_shared(format!("http://{address}")).unwrap().tcp_nodelay(true).connect_lazy()
}

pub(crate) fn reason(status: &Status) -> Reason {
    from_status(status).reason
}

pub(crate) fn mlp() -> Vec<u8> {
    millrace_model::synth::mlp()
}

pub(crate) fn cnn() -> Vec<u8> {
    millrace_model::synth::tiny_cnn()
}

pub(crate) fn header(digest: &str, bytes: usize) -> api::UploadArtifactRequest {
    let header = api::Artifact { digest: digest.into(), bytes: bytes as u64 };
    api::UploadArtifactRequest { part: Some(Part::Header(header)) }
}

pub(crate) fn data(bytes: &[u8]) -> api::UploadArtifactRequest {
    api::UploadArtifactRequest { part: Some(Part::Data(bytes.to_vec().into())) }
}

pub(crate) async fn upload(
    admin: &mut AdminClient<Channel>,
    model: &[u8],
) -> Result<api::UploadArtifactResponse, Status> {
    let mut messages = vec![header(&Digest::of(model).to_string(), model.len())];
    messages.extend(model.chunks(64 << 10).map(data));
    Ok(admin.upload_artifact(futures::stream::iter(messages)).await?.into_inner())
}

pub(crate) fn spec(name: &str) -> api::FunctionSpec {
    api::FunctionSpec { name: name.into(), idempotent: true, ..api::FunctionSpec::default() }
}

pub(crate) fn apply_request(name: &str, model: &[u8]) -> api::ApplyFunctionRequest {
    api::ApplyFunctionRequest {
        spec: Some(spec(name)),
        digest: Digest::of(model).to_string(),
        ..api::ApplyFunctionRequest::default()
    }
}

pub(crate) async fn apply(
    admin: &mut AdminClient<Channel>,
    name: &str,
    model: &[u8],
) -> Result<api::ApplyFunctionResponse, Status> {
    Ok(admin.apply_function(apply_request(name, model)).await?.into_inner())
}

pub(crate) async fn get(admin: &mut AdminClient<Channel>, name: &str) -> Result<api::Function, Status> {
    let request = api::GetFunctionRequest { name: name.into(), ..Default::default() };
    Ok(admin.get_function(request).await?.into_inner())
}

pub(crate) async fn list(admin: &mut AdminClient<Channel>) -> Vec<api::Function> {
    admin.list_functions(api::ListFunctionsRequest::default()).await.unwrap().into_inner().functions
}

/// A function without its conditions, which are of now and not of the record.
pub(crate) fn record(function: api::Function) -> api::Function {
    api::Function { conditions: Vec::new(), ..function }
}

pub(crate) async fn nodes(admin: &mut AdminClient<Channel>) -> Vec<api::Node> {
    admin.list_nodes(api::ListNodesRequest::default()).await.unwrap().into_inner().nodes
}

/// Asks again until the answer is as wanted.
pub(crate) async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    soon(what, async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            // What is asked may wait for nothing, and whoever is asked needs the processor.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
}

/// A request that a stub worker was sent.
pub(crate) struct Call {
    pub(crate) request: wire::InvokeRequest,
    /// Closed when the caller went away.
    pub(crate) answer: oneshot::Sender<Result<wire::InvokeResponse, Status>>,
}

impl Call {
    /// Answers with zeros of the MLP's output.
    pub(crate) fn answer(self) {
        let output = wire::InferTensor {
            name: "y".into(),
            datatype: "FP32".into(),
            shape: vec![1, 64],
            data: vec![0; 256].into(),
        };
        let split = wire::Split { queue_ns: 1, swap_ns: 2, run_ns: 3, total_ns: 6, ..wire::Split::default() };
        let response =
            wire::InvokeResponse { outputs: vec![output], split: Some(split), gpu: 0, attempts: 1 };
        self.answer.send(Ok(response)).unwrap();
    }

    pub(crate) fn refuse(self, reason: Reason) {
        let failure = millrace_types::Failure::new(reason, "as the test wants it");
        self.answer.send(Err(millrace_proto::status::to_status(&failure))).unwrap();
    }
}

/// The worker's service: hands every call to the test.
#[derive(Clone)]
pub(crate) struct StubService(pub(crate) mpsc::UnboundedSender<Call>);

#[tonic::async_trait]
impl Worker for StubService {
    async fn invoke(
        &self,
        request: Request<wire::InvokeRequest>,
    ) -> Result<Response<wire::InvokeResponse>, Status> {
        let (answer, answered) = oneshot::channel();
        let call = Call { request: request.into_inner(), answer };
        self.0.send(call).map_err(|_| Status::internal("the test is over"))?;
        answered.await.map_err(|_| Status::internal("the test gave no answer"))?.map(Response::new)
    }

    async fn inject_fault(
        &self,
        _request: Request<wire::InjectFaultRequest>,
    ) -> Result<Response<wire::InjectFaultResponse>, Status> {
        Ok(Response::new(wire::InjectFaultResponse {}))
    }

    async fn get_spans(&self, _request: Request<wire::GetSpansRequest>) -> Result<Response<Spans>, Status> {
        Ok(Response::new(Spans::default()))
    }

    async fn get_activity(
        &self,
        _request: Request<wire::GetActivityRequest>,
    ) -> Result<Response<Activity>, Status> {
        Ok(Response::new(Activity::default()))
    }
}

/// A worker as far as a controller can tell: a stream and a service, in a runtime of their own, so
/// that it can be killed like a process.
pub(crate) struct Stub {
    runtime: Option<Runtime>,
    pub(crate) hello: wire::ControllerHello,
    pub(crate) desired: watch::Receiver<wire::DesiredState>,
    /// The epoch it was last told of.
    pub(crate) epoch: watch::Receiver<u64>,
    pub(crate) leadership: watch::Receiver<wire::Leadership>,
    pub(crate) acks: mpsc::UnboundedReceiver<wire::CheckpointAck>,
    pub(crate) calls: mpsc::UnboundedReceiver<Call>,
    /// Dropping it ends the stream and leaves the service.
    pub(crate) out: Option<mpsc::Sender<wire::WorkerMessage>>,
    /// Whether it gives signs of life.
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
    }
}

/// What a stub reports of the functions it is told to serve.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prepares {
    AtOnce,
    Never,
}

impl Stub {
    /// Starts a worker that reports every function ready as soon as it is told of it.
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

    /// Starts a worker with a stream to the controller of that address.
    pub(crate) async fn start_at(
        internal: std::net::SocketAddr,
        name: &str,
        instance: &str,
        prepares: Prepares,
    ) -> Result<Self, Status> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let (give_call, calls) = mpsc::unbounded_channel();
        let (name, instance) = (name.to_owned(), instance.to_owned());
        let internal = internal.to_string();
        let started = runtime.spawn(async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap().to_string();
            let incoming = tonic::transport::server::TcpIncoming::from(listener);
            let server = Server::builder().add_service(WorkerServer::new(StubService(give_call)));
            tokio::spawn(server.serve_with_incoming(incoming));
            attach(internal, hello(&name, &instance, &address), prepares).await
        });
        match started.await.unwrap() {
            Ok(attached) => {
                let Attached { hello, desired, epoch, leadership, acks, out, alive } = attached;
                let (runtime, out) = (Some(runtime), Some(out));
                Ok(Self { runtime, hello, desired, epoch, leadership, acks, calls, out, alive })
            }
            Err(status) => {
                runtime.shutdown_background();
                Err(status)
            }
        }
    }

    /// Starts a worker as soon as its name is free.
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

    /// The next request it is sent.
    pub(crate) async fn call(&mut self) -> Call {
        soon("a call", self.calls.recv()).await.unwrap()
    }

    /// Waits until it is told to serve exactly these, as name@revision.
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

    /// Ends it like kill -9: every connection breaks, nothing is said.
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

/// What a worker has of its stream.
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
        panic!("no greeting");
    };
    let (told, desired) = watch::channel(wire::DesiredState::default());
    let (registered, epoch) = watch::channel(greeting.epoch);
    let (led, leadership) = watch::channel(wire::Leadership::default());
    let (give_ack, acks) = mpsc::unbounded_channel();
    let alive = watch::Sender::new(true);
    // Weak: the test's end of the channel decides when the stream ends.
    let reports = out.downgrade();
    tokio::spawn(give_signs_of_life(out.downgrade(), alive.subscribe()));
    tokio::spawn(async move {
        while let Some(Ok(message)) = incoming.next().await {
            match message.message.unwrap() {
                controller_message::Message::DesiredState(state) => {
                    if let (Prepares::AtOnce, Some(out)) = (prepares, reports.upgrade()) {
                        let functions = state.functions.iter().map(ready).collect();
                        let statuses =
                            worker_message::Message::FunctionStatuses(wire::FunctionStatuses { functions });
                        out.send(wire::WorkerMessage { message: Some(statuses) }).await.ok();
                    }
                    told.send_replace(state);
                }
                controller_message::Message::Registration(it) => drop(registered.send_replace(it.epoch)),
                controller_message::Message::Leadership(it) => drop(led.send_replace(it)),
                // A test that does not look at them has dropped its end.
                controller_message::Message::CheckpointAck(it) => drop(give_ack.send(it)),
                controller_message::Message::Hello(_) => panic!("greeted twice"),
            }
        }
    });
    Ok(Attached { hello: greeting, desired, epoch, leadership, acks, out, alive })
}

/// Telemetry as often as a worker's, of an epoch that is over: alive, and nothing said.
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

pub(crate) fn ready(function: &wire::DesiredFunction) -> wire::FunctionStatus {
    wire::FunctionStatus {
        tenant: function.tenant.clone(),
        name: function.name.clone(),
        revision: function.revision,
        phase: wire::FunctionPhase::Ready.into(),
        message: String::new(),
    }
}
