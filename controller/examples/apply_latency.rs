//! Measures the latency of an upload and of writes through the admin API's gRPC, alternating with the
//! latency of disk syncs on the same machine: `cargo run --release -p millrace-controller --example
//! apply_latency`

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a measurement: it may panic and reads the clock"
)]

use std::io::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_controller::{ControllerConfig, RaftRuntime, Tcp};
use millrace_proto::admin::admin_client::AdminClient;
use millrace_proto::admin::upload_artifact_request::Part;
use millrace_proto::admin::{ApplyFunctionRequest, Artifact, FunctionSpec, UploadArtifactRequest};
use millrace_types::Digest;
use tonic::transport::Channel;

const ROUNDS: u32 = 5;
const WRITES: u32 = 200;
const CHUNK_BYTES: usize = 1 << 20;

fn request(name: String, timeout_s: i64, digest: &str) -> ApplyFunctionRequest {
    let timeout = Some(prost_types::Duration { seconds: timeout_s, nanos: 0 });
    let spec = FunctionSpec { name, timeout, idempotent: true, ..FunctionSpec::default() };
    ApplyFunctionRequest { spec: Some(spec), digest: digest.into(), ..ApplyFunctionRequest::default() }
}

async fn upload(admin: &mut AdminClient<Channel>, model: Vec<u8>) -> String {
    let digest = Digest::of(&model).to_string();
    let header = Artifact { digest: digest.clone(), bytes: model.len() as u64 };
    let mut parts = vec![Part::Header(header)];
    let model = bytes::Bytes::from(model);
    let starts = (0..model.len()).step_by(CHUNK_BYTES);
    parts.extend(starts.map(|at| Part::Data(model.slice(at..model.len().min(at + CHUNK_BYTES)))));
    let messages = parts.into_iter().map(|part| UploadArtifactRequest { part: Some(part) });
    let began = Instant::now();
    admin.upload_artifact(futures::stream::iter(messages)).await.unwrap();
    println!(
        "upload of {} bytes, received, compiled, durable and recorded: {:?}",
        model.len(),
        began.elapsed()
    );
    digest
}

/// Applies changes with `clients` concurrent clients. Returns the latency of each change, and the total
/// time.
async fn apply(
    admin: &AdminClient<Channel>,
    digest: &str,
    clients: u32,
    round: u32,
) -> (Vec<Duration>, Duration) {
    let began = Instant::now();
    let tasks = (0..clients).map(|client| {
        let mut admin = admin.clone();
        let digest = digest.to_owned();
        tokio::spawn(async move {
            let mut took = Vec::new();
            for n in 0..WRITES / clients {
                let seconds = i64::from(1 + (round * WRITES + n) % 3600);
                let sent = Instant::now();
                admin.apply_function(request(format!("f{client}"), seconds, &digest)).await.unwrap();
                took.push(sent.elapsed());
            }
            took
        })
    });
    let mut all = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        all.extend(task.await.unwrap());
    }
    (all, began.elapsed())
}

fn syncs(file: &mut std::fs::File) -> Vec<Duration> {
    let sync = |_| {
        let began = Instant::now();
        file.write_all(&[7; 512]).unwrap();
        file.sync_data().unwrap();
        began.elapsed()
    };
    (0..WRITES).map(sync).collect()
}

fn report(what: &str, mut took: Vec<Duration>, all: Duration) {
    took.sort();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    let rate = took.len() as f64 / all.as_secs_f64();
    println!("{what}: p50 {:?}  p99 {:?}  {rate:.0}/s", at(0.5), at(0.99));
}

#[tokio::main]
async fn main() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = ControllerConfig::new(dir.path().join("controller"), 1);
    config.client_listen.set_port(0);
    config.internal_listen.set_port(0);
    // By default Raft has its own runtime, as in a real process; `shared` measures without that
    // runtime.
    let raft = RaftRuntime::start().unwrap();
    config.raft_runtime = std::env::args().all(|arg| arg != "shared").then(|| raft.handle());
    let began = Instant::now();
    let controller = millrace_controller::start(config.clone(), Arc::new(Tcp)).await.unwrap();
    println!("first start {:?}", began.elapsed());
    let address = format!("http://{}", controller.client_addr());
    let mut admin =
        AdminClient::new(Channel::from_shared(address).unwrap().tcp_nodelay(true).connect().await.unwrap());
    upload(&mut admin, millrace_model::synth::resnet50_like()).await;
    let digest = upload(&mut admin, millrace_model::synth::mlp()).await;
    let mut file = std::fs::File::create(dir.path().join("syncs")).unwrap();
    for round in 0..ROUNDS {
        for clients in [1, 8, 50] {
            let (took, all) = apply(&admin, &digest, clients, round).await;
            report(&format!("round {round}, {clients:2} clients, apply"), took, all);
        }
        let began = Instant::now();
        let took = syncs(&mut file);
        report(&format!("round {round}, append and fdatasync"), took, began.elapsed());
    }
    drop(admin);
    let began = Instant::now();
    controller.shutdown(Duration::from_secs(5)).await;
    println!("shutdown {:?}", began.elapsed());
    let began = Instant::now();
    let controller = millrace_controller::start(config, Arc::new(Tcp)).await.unwrap();
    println!("second start {:?}", began.elapsed());
    controller.shutdown(Duration::ZERO).await;
}
