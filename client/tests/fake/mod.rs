//! A server of the admin and inference APIs small enough to read. Functions lie in a map, two to a
//! page. A function is ready at its third look, except `never`, and `broken`, which cannot be.
//!
//! | model | does |
//! |---|---|
//! | `echo`, `image` | answers its inputs, with a split |
//! | `typed` | answers typed contents |
//! | `silent` | never answers |
//! | `full` | refuses |
//! | `stalls` | echoes, one at a time, and takes [`STALL`] for the [`STALLED`]th |
//! | `once` | as `echo`, and is not idempotent |
//!
//! A server may be told to break ([`Break`]): what it was asked is noted all the same.
#![allow(clippy::unwrap_used)]
#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::Stream;
use millrace_client::Address;
use millrace_proto::admin::{self, admin_server};
use millrace_proto::inference::{self, grpc_inference_service_server as inference_server};
use millrace_proto::status::to_status;
use millrace_types::{Failure, Reason};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

/// How long model `stalls` stalls, and at which request.
pub(crate) const STALL: Duration = Duration::from_millis(300);
pub(crate) const STALLED: usize = 20;
/// Looks at a function before it is ready.
const LOOKS_UNTIL_READY: u64 = 3;

/// How a server fails what it is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Break {
    /// It dies under the next call, with every connection.
    Dies,
    /// So many admin calls are answered with NO_LEADER.
    Unled(u32),
    /// It goes down, and says so.
    GoesDown,
}

#[derive(Default)]
struct State {
    artifacts: Mutex<BTreeMap<String, u64>>,
    functions: Mutex<BTreeMap<String, admin::Function>>,
    pages: AtomicUsize,
    uploads: AtomicUsize,
    looks: Mutex<BTreeMap<String, u64>>,
    traceparents: Mutex<Vec<String>>,
    stalls_served: tokio::sync::Mutex<usize>,
    broken: Mutex<Option<Break>>,
    ids: Mutex<Vec<String>>,
    death: CancellationToken,
    status: Mutex<admin::ClusterStatus>,
    /// What is wished of the node, and how often it was looked at since.
    scheduling: Mutex<(admin::NodeScheduling, u32)>,
}

impl State {
    /// The node: a drain is over at its third look, unless there is a function `never`.
    fn node(&self) -> admin::Node {
        let (scheduling, looks) = *self.scheduling.lock().unwrap();
        let draining = scheduling == admin::NodeScheduling::Draining;
        let stays = self.functions.lock().unwrap().contains_key("never");
        let left = if draining && !stays { 3u32.saturating_sub(looks) } else { 2 };
        admin::Node { scheduling: scheduling.into(), placements: left, ..node() }
    }

    /// Notes a call under its id, and fails it if the server is to.
    async fn enter(&self, id: &str) -> Result<(), Status> {
        self.ids.lock().unwrap().push(id.to_owned());
        let broken = *self.broken.lock().unwrap();
        match broken {
            None | Some(Break::Unled(0)) => Ok(()),
            Some(Break::Dies) => {
                self.death.cancel();
                std::future::pending().await
            }
            Some(Break::Unled(times)) => {
                *self.broken.lock().unwrap() = Some(Break::Unled(times - 1));
                refused(Reason::NoLeader, "no controller leads")
            }
            Some(Break::GoesDown) => refused(Reason::ShuttingDown, "this server goes down"),
        }
    }
}

pub(crate) struct Fake {
    pub(crate) address: Address,
    state: Arc<State>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.state.death.cancel();
    }
}

impl Fake {
    pub(crate) async fn start() -> Self {
        let state = Arc::new(State::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = address_of(&listener);
        let listener = listener.into_std().unwrap();
        let limit = 64 << 20;
        let router = tonic::transport::Server::builder()
            .add_service(admin_server::AdminServer::new(Service(state.clone())))
            .add_service(
                inference_server::GrpcInferenceServiceServer::new(Service(state.clone()))
                    .max_decoding_message_size(limit),
            );
        let death = state.death.clone();
        // Connections have tasks of their own: what ends them is the end of their runtime.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let served = router.serve_with_incoming(TcpListenerStream::new(listener));
                death.run_until_cancelled(served).await
            });
            runtime.shutdown_background();
        });
        Self { address, state }
    }

    /// The same, failing what it is asked.
    pub(crate) async fn broken(how: Break) -> Self {
        let fake = Self::start().await;
        *fake.state.broken.lock().unwrap() = Some(how);
        fake
    }

    /// The ids and idempotency keys of what it was asked, in order.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.state.ids.lock().unwrap().clone()
    }

    /// What it says of its group.
    pub(crate) fn set_status(&self, status: admin::ClusterStatus) {
        *self.state.status.lock().unwrap() = status;
    }

    pub(crate) fn pages_asked(&self) -> usize {
        self.state.pages.load(Ordering::Relaxed)
    }

    pub(crate) fn uploads(&self) -> usize {
        self.state.uploads.load(Ordering::Relaxed)
    }

    /// The trace context of every inference that had one.
    pub(crate) fn traceparents(&self) -> Vec<String> {
        self.state.traceparents.lock().unwrap().clone()
    }

    pub(crate) fn function_names(&self) -> Vec<String> {
        self.state.functions.lock().unwrap().keys().cloned().collect()
    }
}

/// An address where nothing listens.
pub(crate) async fn dead_address() -> Address {
    address_of(&TcpListener::bind("127.0.0.1:0").await.unwrap())
}

/// A server that reads a little of each connection and hangs up.
pub(crate) async fn hangs_up_in_the_middle() -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = address_of(&listener);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            // The preface and settings, then at least the head of a request.
            let mut seen = 0;
            let mut buffer = [0; 4096];
            while seen < 100 {
                seen += socket.read(&mut buffer).await.unwrap();
            }
        }
    });
    address
}

fn address_of(listener: &TcpListener) -> Address {
    listener.local_addr().unwrap().to_string().parse().unwrap()
}

#[derive(Clone)]
struct Service(Arc<State>);

fn refused<T>(reason: Reason, message: &str) -> Result<T, Status> {
    Err(to_status(&Failure::new(reason, message)))
}

#[tonic::async_trait]
impl admin_server::Admin for Service {
    async fn find_artifacts(
        &self,
        request: Request<admin::FindArtifactsRequest>,
    ) -> Result<Response<admin::FindArtifactsResponse>, Status> {
        let known = self.0.artifacts.lock().unwrap();
        let found = request.into_inner().digests.into_iter().filter_map(|digest| {
            known.get(&digest).map(|&bytes| admin::Artifact { digest: digest.clone(), bytes })
        });
        Ok(Response::new(admin::FindArtifactsResponse { found: found.collect() }))
    }

    async fn upload_artifact(
        &self,
        request: Request<Streaming<admin::UploadArtifactRequest>>,
    ) -> Result<Response<admin::UploadArtifactResponse>, Status> {
        let mut parts = request.into_inner();
        let mut artifact = admin::Artifact::default();
        let mut hasher = millrace_types::digest::Hasher::default();
        let mut bytes = 0;
        while let Some(part) = parts.message().await? {
            match part.part {
                Some(admin::upload_artifact_request::Part::Header(header)) => artifact = header,
                Some(admin::upload_artifact_request::Part::Data(data)) => {
                    hasher.update(&data);
                    bytes += data.len() as u64;
                }
                None => {}
            }
        }
        if hasher.finish().to_string() != artifact.digest || bytes != artifact.bytes {
            return refused(Reason::DigestMismatch, "the bytes are not the header's");
        }
        self.0.uploads.fetch_add(1, Ordering::Relaxed);
        self.0.artifacts.lock().unwrap().insert(artifact.digest.clone(), bytes);
        Ok(Response::new(admin::UploadArtifactResponse { artifact: Some(artifact), model: None }))
    }

    async fn apply_function(
        &self,
        request: Request<admin::ApplyFunctionRequest>,
    ) -> Result<Response<admin::ApplyFunctionResponse>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        let spec = request.spec.unwrap();
        if spec.name == "refused" {
            return refused(Reason::InvalidSpec, "this name is refused");
        }
        let mut functions = self.0.functions.lock().unwrap();
        let before = functions.get(&spec.name);
        let outcome = match before {
            None => admin::ApplyOutcome::Created,
            Some(before) if before.spec.as_ref() == Some(&spec) => admin::ApplyOutcome::Unchanged,
            Some(_) => admin::ApplyOutcome::Configured,
        };
        let name = spec.name.clone();
        let generation = before.map_or(0, |before| before.generation) + 1;
        let artifact = admin::Artifact { digest: request.digest, bytes: 34_000 };
        let revision = admin::Revision { number: generation, artifact: Some(artifact), ..Default::default() };
        let function = admin::Function {
            spec: Some(spec),
            generation,
            enabled: true,
            revisions: vec![revision],
            conditions: vec![condition(&name, 0)],
            ..Default::default()
        };
        if !request.dry_run {
            functions.insert(name, function.clone());
        }
        Ok(Response::new(admin::ApplyFunctionResponse { outcome: outcome.into(), function: Some(function) }))
    }

    async fn get_function(
        &self,
        request: Request<admin::GetFunctionRequest>,
    ) -> Result<Response<admin::Function>, Status> {
        let name = request.into_inner().name;
        let Some(mut function) = self.0.functions.lock().unwrap().get(&name).cloned() else {
            return refused(Reason::FunctionNotFound, &format!("there is no function {name:?}"));
        };
        let mut looks = self.0.looks.lock().unwrap();
        let looks = looks.entry(name.clone()).or_default();
        *looks += 1;
        function.conditions = vec![condition(&name, *looks)];
        Ok(Response::new(function))
    }

    async fn list_functions(
        &self,
        request: Request<admin::ListFunctionsRequest>,
    ) -> Result<Response<admin::ListFunctionsResponse>, Status> {
        self.0.pages.fetch_add(1, Ordering::Relaxed);
        let from = request.into_inner().page_token;
        let functions = self.0.functions.lock().unwrap();
        let mut rest = functions.range(from..);
        let page: Vec<_> = rest.by_ref().take(2).map(|(_, function)| function.clone()).collect();
        let next_page_token = rest.next().map(|(name, _)| name.clone()).unwrap_or_default();
        Ok(Response::new(admin::ListFunctionsResponse { functions: page, next_page_token }))
    }

    async fn delete_function(
        &self,
        request: Request<admin::DeleteFunctionRequest>,
    ) -> Result<Response<admin::DeleteFunctionResponse>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        let mut functions = self.0.functions.lock().unwrap();
        if !functions.contains_key(&request.name) {
            return refused(Reason::FunctionNotFound, &format!("there is no function {:?}", request.name));
        }
        if !request.dry_run {
            functions.remove(&request.name);
        }
        Ok(Response::new(admin::DeleteFunctionResponse {}))
    }

    async fn list_nodes(
        &self,
        _: Request<admin::ListNodesRequest>,
    ) -> Result<Response<admin::ListNodesResponse>, Status> {
        self.0.scheduling.lock().unwrap().1 += 1;
        Ok(Response::new(admin::ListNodesResponse { nodes: vec![self.0.node()] }))
    }

    async fn get_version(
        &self,
        _: Request<admin::GetVersionRequest>,
    ) -> Result<Response<admin::GetVersionResponse>, Status> {
        Ok(Response::new(admin::GetVersionResponse { version: "fake".into(), ..Default::default() }))
    }

    async fn inject_fault(
        &self,
        _: Request<admin::InjectFaultRequest>,
    ) -> Result<Response<admin::InjectFaultResponse>, Status> {
        refused(Reason::PermissionDenied, "faults are not allowed here")
    }

    async fn set_node_scheduling(
        &self,
        request: Request<admin::SetNodeSchedulingRequest>,
    ) -> Result<Response<admin::Node>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        if request.name != "node-0" {
            return refused(Reason::NodeNotFound, &format!("there is no node {:?}", request.name));
        }
        *self.0.scheduling.lock().unwrap() = (request.scheduling(), 0);
        Ok(Response::new(self.0.node()))
    }

    async fn remove_node(
        &self,
        request: Request<admin::RemoveNodeRequest>,
    ) -> Result<Response<admin::RemoveNodeResponse>, Status> {
        let request = request.into_inner();
        self.0.enter(&request.idempotency_key).await?;
        match request.name.as_str() {
            "lost" => Ok(Response::new(admin::RemoveNodeResponse {})),
            _ => refused(Reason::NodeState, "it is live: drain and stop it first"),
        }
    }

    async fn get_scaling_signal(
        &self,
        _: Request<admin::GetScalingSignalRequest>,
    ) -> Result<Response<admin::ScalingSignal>, Status> {
        Err(Status::unimplemented("the fake has no planner"))
    }

    async fn lookup_data(
        &self,
        _: Request<admin::LookupDataRequest>,
    ) -> Result<Response<admin::LookupDataResponse>, Status> {
        Err(Status::unimplemented("the fake has no data"))
    }

    async fn get_cluster_status(
        &self,
        _: Request<admin::GetClusterStatusRequest>,
    ) -> Result<Response<admin::ClusterStatus>, Status> {
        Ok(Response::new(self.0.status.lock().unwrap().clone()))
    }

    async fn promote_controller(
        &self,
        request: Request<admin::PromoteControllerRequest>,
    ) -> Result<Response<admin::ChangeMembershipResponse>, Status> {
        let id = request.into_inner().id;
        self.0.enter(&format!("promote {id}")).await?;
        let mut status = self.0.status.lock().unwrap();
        let Some(controller) = status.controllers.iter_mut().find(|it| it.id == id) else {
            return refused(Reason::MembershipRefused, &format!("controller {id} is no member"));
        };
        controller.voter = true;
        Ok(Response::new(members(&status)))
    }

    async fn remove_controller(
        &self,
        request: Request<admin::RemoveControllerRequest>,
    ) -> Result<Response<admin::ChangeMembershipResponse>, Status> {
        let id = request.into_inner().id;
        self.0.enter(&format!("remove {id}")).await?;
        let mut status = self.0.status.lock().unwrap();
        status.controllers.retain(|it| it.id != id);
        Ok(Response::new(members(&status)))
    }

    async fn transfer_leadership(
        &self,
        request: Request<admin::TransferLeadershipRequest>,
    ) -> Result<Response<admin::TransferLeadershipResponse>, Status> {
        let id = request.into_inner().id;
        self.0.enter(&format!("transfer {id}")).await?;
        let mut status = self.0.status.lock().unwrap();
        (status.leader, status.term) = (id, status.term + 1);
        Ok(Response::new(admin::TransferLeadershipResponse { leader: id, term: status.term }))
    }
}

fn members(status: &admin::ClusterStatus) -> admin::ChangeMembershipResponse {
    let member = |it: &admin::Controller| admin::Member {
        id: it.id,
        internal_address: it.internal_address.clone(),
        voter: it.voter,
    };
    let warnings = status.warnings.clone();
    admin::ChangeMembershipResponse { members: status.controllers.iter().map(member).collect(), warnings }
}

type StreamOf<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// A whole service: what it serves, and the calls it answers with UNIMPLEMENTED.
macro_rules! inference_service {
    ({ $($served:tt)* } $($method:ident: $request:ident -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl inference_server::GrpcInferenceService for Service {
            $($served)*
            $(async fn $method(
                &self,
                _: Request<inference::$request>,
            ) -> Result<Response<inference::$response>, Status> {
                Err(Status::unimplemented("the fake has no such call"))
            })*
        }
    };
}

inference_service! {
    {
        type ModelStreamInferStream = StreamOf<inference::ModelStreamInferResponse>;

        async fn server_ready(
            &self,
            _: Request<inference::ServerReadyRequest>,
        ) -> Result<Response<inference::ServerReadyResponse>, Status> {
            Ok(Response::new(inference::ServerReadyResponse { ready: true }))
        }

        async fn model_ready(
            &self,
            _: Request<inference::ModelReadyRequest>,
        ) -> Result<Response<inference::ModelReadyResponse>, Status> {
            Ok(Response::new(inference::ModelReadyResponse { ready: true }))
        }

        async fn model_metadata(
            &self,
            request: Request<inference::ModelMetadataRequest>,
        ) -> Result<Response<inference::ModelMetadataResponse>, Status> {
            let name = request.into_inner().name;
            let shape = match name.as_str() {
                "echo" | "full" | "silent" | "stalls" => vec![-1, 2],
                "image" => vec![-1, 1, 2, 2],
                _ => return refused(Reason::FunctionNotFound, &format!("there is no function {name:?}")),
            };
            let tensor = |tensor: &str| inference::model_metadata_response::TensorMetadata {
                name: tensor.into(),
                datatype: "FP32".into(),
                shape: shape.clone(),
            };
            let versions = vec!["1".into()];
            let (inputs, outputs) = (vec![tensor("x")], vec![tensor("x")]);
            let platform = "fake".into();
            let answer = inference::ModelMetadataResponse { name, versions, platform, inputs, outputs };
            Ok(Response::new(answer))
        }

        async fn model_infer(
            &self,
            request: Request<inference::ModelInferRequest>,
        ) -> Result<Response<inference::ModelInferResponse>, Status> {
            let id = request.metadata().get("x-request-id").cloned();
            if let Some(parent) = request.metadata().get("traceparent") {
                self.0.traceparents.lock().unwrap().push(parent.to_str().unwrap().to_owned());
            }
            let request = request.into_inner();
            self.0.enter(&request.id).await?;
            match request.model_name.as_str() {
                "typed" => Ok(Response::new(typed_answer())),
                "silent" => std::future::pending().await,
                "full" => refused(Reason::QueueFull, "the queue is full: 4 of 4 requests wait"),
                "stalls" => {
                    let mut served = self.0.stalls_served.lock().await;
                    *served += 1;
                    if *served == STALLED {
                        tokio::time::sleep(STALL).await;
                    }
                    Ok(Response::new(echo(request)))
                }
                "echo" | "image" | "once" => {
                    let mut answer = Response::new(echo(request));
                    let split = "queue;dur=0.1, swap;dur=0, run;dur=1.5, total;dur=2";
                    answer.metadata_mut().insert("server-timing", split.parse().unwrap());
                    if let Some(id) = id {
                        answer.metadata_mut().insert("x-request-id", id);
                    }
                    Ok(answer)
                }
                name => refused(Reason::FunctionNotFound, &format!("there is no function {name:?}")),
            }
        }

        async fn model_config(
            &self,
            request: Request<inference::ModelConfigRequest>,
        ) -> Result<Response<inference::ModelConfigResponse>, Status> {
            let name = request.into_inner().name;
            let idempotent = inference::ModelParameter { string_value: (name != "once").to_string() };
            let parameters = [("idempotent".to_owned(), idempotent)].into();
            let config = inference::ModelConfig { name, parameters, ..Default::default() };
            Ok(Response::new(inference::ModelConfigResponse { config: Some(config) }))
        }

        async fn model_stream_infer(
            &self,
            _: Request<Streaming<inference::ModelInferRequest>>,
        ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
            Err(Status::unimplemented("the fake has no such call"))
        }
    }
    server_live: ServerLiveRequest -> ServerLiveResponse;
    server_metadata: ServerMetadataRequest -> ServerMetadataResponse;
    model_statistics: ModelStatisticsRequest -> ModelStatisticsResponse;
    repository_index: RepositoryIndexRequest -> RepositoryIndexResponse;
    repository_model_load: RepositoryModelLoadRequest -> RepositoryModelLoadResponse;
    repository_model_unload: RepositoryModelUnloadRequest -> RepositoryModelUnloadResponse;
    system_shared_memory_status: SystemSharedMemoryStatusRequest -> SystemSharedMemoryStatusResponse;
    system_shared_memory_register: SystemSharedMemoryRegisterRequest -> SystemSharedMemoryRegisterResponse;
    system_shared_memory_unregister: SystemSharedMemoryUnregisterRequest -> SystemSharedMemoryUnregisterResponse;
    cuda_shared_memory_status: CudaSharedMemoryStatusRequest -> CudaSharedMemoryStatusResponse;
    cuda_shared_memory_register: CudaSharedMemoryRegisterRequest -> CudaSharedMemoryRegisterResponse;
    cuda_shared_memory_unregister: CudaSharedMemoryUnregisterRequest -> CudaSharedMemoryUnregisterResponse;
    trace_setting: TraceSettingRequest -> TraceSettingResponse;
    log_settings: LogSettingsRequest -> LogSettingsResponse;
}

/// How ready a function is at its so manieth look.
fn condition(name: &str, looks: u64) -> admin::Condition {
    use admin::ConditionStatus::{False, True};
    let (status, reason, message) = match name {
        "broken" => (False, "PrepareFailed", "its weights do not fit"),
        "never" => (False, "NoWorker", "no worker has joined"),
        _ if looks < LOOKS_UNTIL_READY => (False, "Preparing", ""),
        _ => (True, "Prepared", ""),
    };
    let (reason, message) = (reason.into(), message.into());
    admin::Condition { r#type: "Ready".into(), status: status.into(), reason, message }
}

fn node() -> admin::Node {
    let model = admin::ResidentModel {
        functions: vec!["default/echo@1".into()],
        digest: format!("sha256:{}", "ab".repeat(32)),
        bytes: 64 << 20,
        loaded_bytes: 64 << 20,
        idle: Some(Duration::from_secs(5).try_into().unwrap()),
    };
    let gpu = admin::Gpu {
        gpu_type: "emulated".into(),
        health: "Up".into(),
        memory_bytes: 1 << 30,
        used_bytes: 64 << 20,
        models: vec![model],
        executor_pid: 42,
        ..Default::default()
    };
    admin::Node {
        name: "node-0".into(),
        epoch: 1,
        address: "127.0.0.1:7080".into(),
        connected: true,
        topology: "a10x4".into(),
        gpus: vec![gpu],
        host_memory_bytes: 4 << 30,
        host_tier_bytes: 64 << 20,
        ..Default::default()
    }
}

fn echo(request: inference::ModelInferRequest) -> inference::ModelInferResponse {
    let output = |input: inference::model_infer_request::InferInputTensor| {
        let (name, datatype, shape) = (input.name, input.datatype, input.shape);
        inference::model_infer_response::InferOutputTensor { name, datatype, shape, ..Default::default() }
    };
    inference::ModelInferResponse {
        model_name: request.model_name,
        id: request.id,
        outputs: request.inputs.into_iter().map(output).collect(),
        raw_output_contents: request.raw_input_contents,
        ..Default::default()
    }
}

fn typed_answer() -> inference::ModelInferResponse {
    let contents = inference::InferTensorContents { fp32_contents: vec![0.5, 0.25], ..Default::default() };
    let output = inference::model_infer_response::InferOutputTensor {
        name: "y".into(),
        datatype: "FP32".into(),
        shape: vec![1, 2],
        contents: Some(contents),
        ..Default::default()
    };
    inference::ModelInferResponse { outputs: vec![output], ..Default::default() }
}
