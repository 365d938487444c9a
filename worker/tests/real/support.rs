//! Helpers of the tests: they start workers and call them.

use std::ffi::OsString;
use std::future::Future;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_client::WorkerClient;
use millrace_proto::worker::worker_server::WorkerServer;
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, DataId, Epoch, Failure, GpuIndex, NodeName};
use millrace_worker::process_port::ExecutorCommand;
use millrace_worker::service::{InjectedFaults, ServiceLimits, WorkerService};
use millrace_worker::start::{
    DataConfig, ExecutorDevice, ExecutorEngine, ExecutorIsolation, LookupOrder, ProgramLauncher,
    RunningWorker, SchedulingPolicy, WorkerConfig, start,
};
use rustix::process::{Pid, Signal, kill_process};

use crate::controller::Controller;

pub(crate) const EXECUTOR_VARIABLE: &str = "MILLRACE_TEST_EXECUTOR";
pub(crate) const WORKER_VARIABLE: &str = "MILLRACE_TEST_WORKER";
pub(crate) const LAUNCHER_VARIABLE: &str = "MILLRACE_TEST_LAUNCHER";
pub(crate) const FUNCTION_VARIABLE: &str = "MILLRACE_TEST_FUNCTION";
/// Longest wait for an event, enough on any machine that makes progress.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for an event. Fails the test after [`PATIENCE`].
pub(crate) async fn within<T>(what: &str, event: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, event).await.unwrap_or_else(|_| panic!("not within {PATIENCE:?}: {what}"))
}

pub(crate) fn be_an_executor() {
    // The worker passes this stream on, so a failed test shows what its executors said.
    tracing_subscriber::fmt().with_max_level(tracing::Level::INFO).with_writer(std::io::stderr).init();
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    millrace_executor::run(socket).unwrap();
}

/// Serves as a worker of the controller named in the variable, until it is killed.
pub(crate) fn be_a_worker() {
    let text = std::env::var(WORKER_VARIABLE).unwrap();
    let mut words = text.split('|');
    let mut word = || words.next().unwrap();
    let dir = word();
    let controller = word();
    let isolation = word();
    let mut config = config(Path::new(dir), &[controller.parse().unwrap()], 2);
    config.isolation = isolation.parse().unwrap();
    config.programs = Some(launcher());
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let _worker = start(config).await.unwrap();
        std::future::pending::<()>().await;
    });
}

/// Returns the command that starts this program again and runs one of its tests.
pub(crate) fn this_program_as(test: &str) -> (std::path::PathBuf, Vec<OsString>) {
    let args = ["--exact", test, "--nocapture", "--test-threads=1"];
    (std::env::current_exe().unwrap(), args.into_iter().map(Into::into).collect())
}

/// Returns a launcher of programs: this program, as one of its tests.
pub(crate) fn launcher() -> ProgramLauncher {
    let (program, args) = this_program_as("launcher_child");
    ProgramLauncher { program, args, envs: vec![(LAUNCHER_VARIABLE.into(), "1".into())] }
}

/// Returns a script that runs this program as a function.
pub(crate) fn script() -> Vec<u8> {
    let (program, args) = this_program_as("function_child");
    let args: Vec<_> = args.iter().map(|arg| arg.to_str().unwrap()).collect();
    format!("#!/bin/sh\n{FUNCTION_VARIABLE}=1 exec {} {}\n", program.display(), args.join(" ")).into_bytes()
}

pub(crate) fn topology(gpus: u32) -> Topology {
    let gpu = |index| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "test".into(),
        memory: Bytes::mib(64),
        host_path: vec![LinkId(index)],
    };
    let link = TopologyLink { kind: LinkKind::Pcie, rate: BytesPerSec::gb(1) };
    Topology { name: "test".into(), gpus: (0..gpus).map(gpu).collect(), links: vec![link; gpus as usize] }
}

/// Logs to standard error, with the filter in `RUST_LOG`.
fn log() {
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    // Another test of this process may have set the logger first.
    drop(tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init());
}

pub(crate) fn config(dir: &Path, controllers: &[SocketAddr], gpus: u32) -> WorkerConfig {
    log();
    let (program, args) = this_program_as("executor_child");
    WorkerConfig {
        node: NodeName::new("w1").unwrap(),
        data_dir: dir.to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        advertise: None,
        controllers: controllers.iter().map(ToString::to_string).collect(),
        topology: topology(gpus),
        host_memory: Bytes::mib(256),
        object_memory: Bytes::mib(256),
        gpu_data: DataConfig::default(),
        model_storage: Bytes::ZERO,
        executor: ExecutorCommand { program, args, envs: vec![(EXECUTOR_VARIABLE.into(), "1".into())] },
        programs: None,
        policy: SchedulingPolicy::default(),
        isolation: ExecutorIsolation::default(),
        engine: ExecutorEngine::default(),
        device: ExecutorDevice::default(),
        lookup: LookupOrder::default(),
        executor_threads: 1,
        faults: InjectedFaults::Obey,
        seed: 1,
        limits: ServiceLimits::default(),
        kept: None,
    }
}

/// Starts a worker with its executors up, and its controller.
pub(crate) async fn worker(dir: &Path, gpus: u32) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let worker = start(config(dir, &[controller.addr], gpus)).await.unwrap();
    all_up(&controller).await;
    (worker, controller)
}

pub(crate) async fn all_up(controller: &Controller) -> wire::Telemetry {
    let up = |telemetry: &wire::Telemetry| {
        !telemetry.gpus.is_empty() && telemetry.gpus.iter().all(|gpu| gpu.health() == wire::GpuHealth::Up)
    };
    controller.telemetry("every executor up", up).await
}

/// Starts a worker that serves the MLP under these names.
pub(crate) async fn serving_mlp(dir: &Path, gpus: u32, names: &[&str]) -> (RunningWorker, Controller) {
    let (worker, controller) = worker(dir, gpus).await;
    let digest = controller.publish(&millrace_model::synth::mlp());
    controller.desire(&names.iter().map(|name| (*name, digest)).collect::<Vec<_>>());
    for name in names {
        controller.ready(name).await;
    }
    (worker, controller)
}

/// Reports data to a registered worker's index that the worker does not hold.
pub(crate) async fn index_data(worker: &RunningWorker, entries: u64) {
    let index = worker.control().index();
    for counter in 1..=entries {
        let id = DataId { home: NodeName::new("w1").unwrap(), epoch: Epoch(1), counter };
        index.reserve().await.unwrap().stored(id, Bytes(4096));
    }
}

pub(crate) type Client = WorkerClient<WorkerServer<WorkerService>>;

/// Returns a client of the worker's service without a socket.
pub(crate) fn client(worker: &RunningWorker) -> Client {
    let server = WorkerServer::new(worker.service()).max_decoding_message_size(256 << 20);
    WorkerClient::new(server).max_decoding_message_size(256 << 20)
}

/// Returns a row for the MLP with values that depend on `seed`.
pub(crate) fn row(seed: u64) -> Vec<f32> {
    (0..64).map(|column| ((seed * 64 + column) % 97) as f32 / 97.0 - 0.5).collect()
}

pub(crate) fn request(function: &str, id: u64, row: &[f32]) -> wire::InvokeRequest {
    let data: Vec<u8> = row.iter().flat_map(|value| value.to_le_bytes()).collect();
    wire::InvokeRequest {
        request_id: format!("request-{id}"),
        attempt: 1,
        attempts_left: 3,
        tenant: "default".into(),
        function: function.into(),
        revision: 1,
        timeout: Some(prost_types::Duration { seconds: 60, nanos: 0 }),
        priority: 0,
        inputs: vec![wire::InferTensor {
            name: "x".into(),
            datatype: "FP32".into(),
            shape: vec![1, row.len() as i64],
            data: data.into(),
            parts: Vec::new(),
        }],
        outputs: Vec::new(),
        hold: None,
        objective_micros: None,
        next: Vec::new(),
        sequence: None,
    }
}

/// Returns a request of an encoder: `count` texts, all of the same four tokens.
pub(crate) fn texts(function: &str, id: u64, tokens: [i64; 4], count: usize) -> wire::InvokeRequest {
    let text: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    let inputs = vec![wire::InferTensor {
        name: "input_ids".into(),
        datatype: "INT64".into(),
        shape: vec![count as i64, 4],
        data: text.repeat(count).into(),
        parts: Vec::new(),
    }];
    wire::InvokeRequest { inputs, ..request(function, id, &[]) }
}

pub(crate) async fn invoke(
    client: &mut Client,
    function: &str,
    id: u64,
    row: &[f32],
) -> Result<wire::InvokeResponse, Failure> {
    let response = within("an answer", client.invoke(request(function, id, row))).await;
    response.map(tonic::Response::into_inner).map_err(|status| from_status(&status))
}

pub(crate) fn values(response: &wire::InvokeResponse) -> Vec<f32> {
    let [output] = &response.outputs[..] else { panic!("{response:?}") };
    output.data.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

pub(crate) async fn inject(
    client: &mut Client,
    gpu: u32,
    fault: millrace_proto::executor::Fault,
    function: &str,
) {
    let fault = fault as u32;
    let request = wire::InjectFaultRequest { gpu, fault, function: function.into() };
    within("a fault to be injected", client.inject_fault(request)).await.unwrap();
}

/// Returns the failure of a call that has to be refused.
#[track_caller]
pub(crate) fn refusal(answer: Result<wire::InvokeResponse, Failure>) -> Failure {
    match answer {
        Ok(wire::InvokeResponse { attempts, gpu, .. }) => {
            panic!("answered by GPU {gpu} in attempt {attempts}, but had to be refused")
        }
        Err(failure) => failure,
    }
}

pub(crate) fn pid(number: u32) -> Pid {
    Pid::from_raw(number.cast_signed()).unwrap()
}

pub(crate) fn kill_9(number: u32) {
    kill_process(pid(number), Signal::KILL).unwrap();
}
