//! Fixtures: a controller in a temporary directory, clients, and stub workers.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_controller::clock::WallClock;
use millrace_controller::{Connector, ControllerConfig, RunningController, Tcp};
use millrace_nodes::lease::LeaseLimits;
use millrace_proto::admin::admin_client::AdminClient;
use millrace_proto::admin::upload_artifact_request::Part;
use millrace_proto::admin::{self as api};
use millrace_proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use millrace_proto::status::from_status;
use millrace_proto::worker::worker_control_client::WorkerControlClient;
use millrace_types::{Digest, Reason};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tonic::Status;
use tonic::transport::Channel;

/// Waits with a timeout longer than any step should take, so that a hang fails the test.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen"))
}

/// A clock that only tests move.
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

/// A controller and the data directory.
pub(crate) struct Cluster {
    pub(crate) controller: RunningController,
    pub(crate) dir: TempDir,
}

pub(crate) fn config(dir: &Path) -> ControllerConfig {
    let mut config = ControllerConfig::new(dir.to_owned(), 7);
    config.client_listen.set_port(0);
    config.internal_listen.set_port(0);
    config
}

/// Sets a lease short enough to wait for, and long enough for a busy machine to keep.
pub(crate) fn short_lease(config: &mut ControllerConfig) {
    config.limits.lease =
        LeaseLimits { lease: Duration::from_millis(400), grace: Duration::from_millis(100) };
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

    /// Restarts the controller on the same data.
    pub(crate) async fn restart(self) -> Self {
        let Self { controller, dir } = self;
        controller.shutdown(Duration::from_secs(5)).await;
        Self::start_in(dir, |_| {}, Arc::new(Tcp)).await
    }

    /// Returns a scrape of the metrics on the client port.
    pub(crate) async fn metrics(&self) -> String {
        let mut stream = TcpStream::connect(self.controller.client_addr()).await.unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).await.unwrap();
        text
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

    /// Uploads a model and applies a function with that model.
    pub(crate) async fn deploy(&self, name: &str, model: &[u8]) -> api::Function {
        self.deploy_on(name, model, 1).await
    }

    /// Uploads a model and applies a function with that model and the given number of replicas.
    pub(crate) async fn deploy_on(&self, name: &str, model: &[u8], replicas: u32) -> api::Function {
        let mut admin = self.admin();
        upload(&mut admin, model).await.unwrap();
        let mut request = apply_request(name, model);
        request.spec.as_mut().unwrap().replicas = replicas;
        admin.apply_function(request).await.unwrap().into_inner().function.unwrap()
    }

    /// Returns the names of all files in the artifacts' directory.
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

/// Returns a function without conditions, which are not part of the record.
pub(crate) fn record(function: api::Function) -> api::Function {
    api::Function { conditions: Vec::new(), ..function }
}

pub(crate) async fn nodes(admin: &mut AdminClient<Channel>) -> Vec<api::Node> {
    admin.list_nodes(api::ListNodesRequest::default()).await.unwrap().into_inner().nodes
}

/// Asks repeatedly until the answer is as expected.
pub(crate) async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    soon(what, async {
        loop {
            if let Some(answer) = ask().await {
                return answer;
            }
            // Yield the processor to the asked process, because `ask` itself may return at once.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await
}
