//! Measures the cost of passing an object on: from one run to the next on a GPU, over one worker's
//! host memory, and between two workers. A copy of as much memory, and a plain TCP stream from
//! memory to memory, run in turns with the requests. The bench prints and asserts nothing: `cargo
//! bench -p millrace-worker --bench objects`.
//!
//! Executors are this program started again, as in the tests, which share their controller.

#![allow(clippy::unwrap_used, reason = "a measurement that meets the unexpected ends")]
#![allow(dead_code, reason = "the tests use more of what they share")]

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use millrace_device::monotonic_now;
use millrace_proto::worker as wire;
use millrace_proto::worker::tensor_part::Part;
use millrace_proto::worker::worker_client::WorkerClient;
use millrace_proto::worker::worker_server::WorkerServer;
use millrace_types::{Bytes, NodeName};
use millrace_worker::service::WorkerService;
use millrace_worker::start::{DataConfig, RunningWorker, WorkerConfig, start};
use rustix::fs::{MemfdFlags, memfd_create};

#[path = "../tests/real/controller.rs"]
mod controller;
#[path = "../tests/real/ledger.rs"]
mod ledger;
#[path = "../tests/real/support.rs"]
mod support;

use controller::Controller;
use support::{all_up, config, request, row};

/// Number of rows of 64 floats: 100 MiB.
const ROWS: u64 = 409_600;
const BYTES: u64 = ROWS * 64 * 4;
const ROUNDS: usize = 9;
const PIECE: usize = 1 << 20;

fn main() {
    if std::env::var_os(support::EXECUTOR_VARIABLE).is_some() {
        return support::be_an_executor();
    }
    tokio::runtime::Runtime::new().unwrap().block_on(hand_on());
}

/// Starts a worker with `on_gpu` bytes for objects on its GPU.
async fn serving(dir: &std::path::Path, name: &str, on_gpu: Bytes) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(&dir.join(name), &[controller.addr], 1);
    config.topology.gpus[0].memory = Bytes::gib(2);
    let gpu_data = DataConfig { memory: on_gpu, ..DataConfig::default() };
    let object_memory = Bytes::gib(1);
    let config = WorkerConfig { node: NodeName::new(name).unwrap(), object_memory, gpu_data, ..config };
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    let digest = controller.publish(&millrace_model::synth::mlp());
    controller.desire(&[("mlp", digest)]);
    controller.ready("mlp").await;
    (worker, controller)
}

fn tensor(data: bytes::Bytes, parts: Vec<wire::TensorPart>) -> wire::InferTensor {
    wire::InferTensor { name: "x".into(), datatype: "FP32".into(), shape: vec![ROWS as i64, 64], data, parts }
}

async fn ask(worker: &RunningWorker, input: wire::InferTensor, keep: bool) -> wire::InvokeResponse {
    let time = prost_types::Duration { seconds: 600, nanos: 0 };
    let hold = keep.then(|| wire::Hold { time: Some(time), answered: Vec::new() });
    let request = wire::InvokeRequest { inputs: vec![input], hold, ..request("mlp", 1, &[]) };
    client(worker).invoke(request).await.unwrap().into_inner()
}

/// Returns a client of the worker's service without a socket, for messages of any size.
fn client(worker: &RunningWorker) -> WorkerClient<WorkerServer<WorkerService>> {
    let server = WorkerServer::new(worker.service()).max_decoding_message_size(usize::MAX);
    WorkerClient::new(server.max_encoding_message_size(usize::MAX)).max_decoding_message_size(usize::MAX)
}

/// Returns the only object of an answer, with the address that other workers need.
fn held(response: &wire::InvokeResponse, home: &RunningWorker) -> wire::HeldPart {
    let Some(Part::Held(mut held)) = response.outputs[0].parts[0].part.clone() else { panic!("not kept") };
    let object = held.object.as_mut().unwrap();
    object.address = home.addr().to_string();
    held
}

/// A worker with an object, and the costs of passing objects on.
struct ObjectHolder {
    worker: RunningWorker,
    _controller: Controller,
    input: wire::HeldPart,
    /// Times to find or fetch the object.
    fetches: Vec<Duration>,
    /// Times of requests without waiting and computing: to find the input and store the output.
    passes: Vec<Duration>,
}

impl ObjectHolder {
    async fn new(dir: &std::path::Path, name: &str, on_gpu: Bytes, data: &[u8]) -> Self {
        let (worker, controller) = serving(dir, name, on_gpu).await;
        let kept = ask(&worker, tensor(data.to_vec().into(), Vec::new()), true).await;
        let input = held(&kept, &worker);
        Self { worker, _controller: controller, input, fetches: Vec::new(), passes: Vec::new() }
    }

    /// Runs a request that reads an object and stores its output, which has the same size.
    async fn take(&mut self, input: wire::HeldPart) {
        let parts = vec![wire::TensorPart { part: Some(Part::Held(input)) }];
        let answer = ask(&self.worker, tensor(bytes::Bytes::new(), parts), true).await;
        self.fetches.push(Duration::from_nanos(answer.fetched[0].took_ns));
        let split = answer.split.unwrap();
        self.passes.push(Duration::from_nanos(split.total_ns - split.queue_ns - split.run_ns));
        let ids = vec![held(&answer, &self.worker).object.unwrap().id.unwrap()];
        client(&self.worker).release_objects(wire::ReleaseObjectsRequest { ids }).await.unwrap();
    }
}

async fn hand_on() {
    let dir = tempfile::tempdir().unwrap();
    let data: Vec<u8> = (0..ROWS).flat_map(row).flat_map(f32::to_le_bytes).collect();
    let mut gpu = ObjectHolder::new(dir.path(), "w1", Bytes::mib(512), &data).await;
    let mut host = ObjectHolder::new(dir.path(), "w2", Bytes::ZERO, &data).await;
    let mut other = ObjectHolder::new(dir.path(), "w3", Bytes::mib(512), &data).await;
    let mut plain = Vec::new();
    let mut copies = Vec::new();
    for _ in 0..ROUNDS {
        let of_gpu = gpu.input.clone();
        let of_host = host.input.clone();
        gpu.take(of_gpu.clone()).await;
        host.take(of_host.clone()).await;
        other.take(of_host).await;
        let data = data.clone();
        let (tcp, copy) =
            tokio::task::spawn_blocking(move || (over_tcp(&data), copied(&data))).await.unwrap();
        plain.push(tcp);
        copies.push(copy);
    }
    println!("{} MiB, {ROUNDS} rounds in turns; median, least and most", BYTES >> 20);
    println!("handed on, computing and waiting left out (the input found, the output kept):");
    println!("{:>34}: {}", "on one GPU", spread(&mut gpu.passes));
    println!("{:>34}: {}", "over one worker's host memory", spread(&mut host.passes));
    println!("{:>34}: {}", "one copy of it, for comparison", spread(&mut copies));
    println!("from one worker to another:");
    println!("{:>34}: {}", "fetched", rate(&mut other.fetches));
    println!("{:>34}: {}", "plain TCP, memory to memory", rate(&mut plain));
    let mut ratios: Vec<f64> = other
        .fetches
        .iter()
        .zip(&plain)
        .map(|(ours, plain)| plain.as_secs_f64() / ours.as_secs_f64())
        .collect();
    ratios.sort_by(f64::total_cmp);
    println!(
        "{:>34}: {:.2} of its speed ({:.2} to {:.2}); to reach: 0.50",
        "ratio",
        ratios[ratios.len() / 2],
        ratios[0],
        ratios[ratios.len() - 1]
    );
    for place in [gpu, host, other] {
        place.worker.shutdown().await;
    }
}

/// Measures one copy of the bytes into memory that is already mapped.
fn copied(data: &[u8]) -> Duration {
    let mut to = vec![1u8; data.len()];
    let began = monotonic_now();
    to.copy_from_slice(data);
    std::hint::black_box(&to);
    monotonic_now().since(began)
}

fn spread(times: &mut [Duration]) -> String {
    times.sort_unstable();
    format!("{:.1?} ({:.1?} to {:.1?})", times[times.len() / 2], times[0], times[times.len() - 1])
}

fn rate(times: &mut [Duration]) -> String {
    let mut sorted = times.to_vec();
    let of = |time: Duration| BYTES as f64 / time.as_secs_f64() / 1e9;
    sorted.sort_unstable();
    let least = of(sorted[sorted.len() - 1]);
    let most = of(sorted[0]);
    format!("{:.2} GB/s ({least:.2} to {most:.2})", of(sorted[sorted.len() / 2]))
}

/// Measures the bytes' way through a socket, from memory into memory that an executor could map.
fn over_tcp(data: &[u8]) -> Duration {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut socket, _) = listener.accept().unwrap();
            let mut piece = vec![0; PIECE];
            for chunk in data.chunks(PIECE) {
                piece[..chunk.len()].copy_from_slice(chunk);
                socket.write_all(&piece[..chunk.len()]).unwrap();
            }
        });
        let began = monotonic_now();
        let mut socket = TcpStream::connect(address).unwrap();
        let mut memory = File::from(memfd_create("plain", MemfdFlags::CLOEXEC).unwrap());
        let mut piece = vec![0; PIECE];
        let mut had = 0;
        while had < data.len() {
            let read = socket.read(&mut piece).unwrap();
            memory.write_all(&piece[..read]).unwrap();
            had += read;
        }
        monotonic_now().since(began)
    })
}
