//! Measures writes of 256-byte values to a replicated store, from many concurrent clients. In a group
//! of controllers, each write is an apply that changes two labels of the client's own function; in etcd,
//! each write is a put of the client's own key. The same client program drives both, so the comparison
//! is between the stores. `benches/control_plane.py` runs this program; alone:
//!
//! ```text
//! cargo run --release -p millrace-controller --example write_load -- \
//!     millrace|etcd ADDRESS CLIENTS SECONDS
//! ```
//!
//! The output is a line of JSON: writes per second, and the latency in microseconds.

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a measurement: it may panic and reads the clock"
)]

use std::collections::HashMap;
use std::time::{Duration, Instant};

use millrace_proto::admin::admin_client::AdminClient;
use millrace_proto::admin::upload_artifact_request::Part;
use millrace_proto::admin::{ApplyFunctionRequest, Artifact, FunctionSpec, UploadArtifactRequest};
use millrace_types::Digest;
use tonic::client::Grpc;
use tonic::transport::Channel;

const VALUE_BYTES: usize = 256;
/// Time before the measurement, in which connections are made and each client's key is created.
const WARM_UP: Duration = Duration::from_millis(500);
/// The maximum number of connections. etcd's own benchmark opens a connection per client by default;
/// beyond this number, more connections measure the kernel.
const CONNECTIONS_MAX: usize = 16;

/// The fields of etcd's `PutRequest` that a put needs. `PutDone` stands for etcd's `PutResponse`.
#[derive(Clone, PartialEq, prost::Message)]
struct Put {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct PutDone {}

#[derive(Clone)]
enum Store {
    Millrace { admin: AdminClient<Channel>, digest: String },
    Etcd(Grpc<Channel>),
}

impl Store {
    async fn write(&mut self, client: usize, n: u64) {
        let value = format!("{n:0VALUE_BYTES$}");
        match self {
            Self::Millrace { admin, digest } => {
                // A label has at most 253 bytes, so that two labels share the value.
                let (first, second) = value.split_at(VALUE_BYTES / 2);
                let labels = [("first", first), ("second", second)];
                let spec = FunctionSpec {
                    name: format!("f{client}"),
                    labels: HashMap::from(labels.map(|(key, value)| (key.to_owned(), value.to_owned()))),
                    idempotent: true,
                    ..FunctionSpec::default()
                };
                let request =
                    ApplyFunctionRequest { spec: Some(spec), digest: digest.clone(), ..Default::default() };
                admin.apply_function(request).await.unwrap();
            }
            Self::Etcd(grpc) => {
                grpc.ready().await.unwrap();
                let put = Put { key: format!("f{client}").into_bytes(), value: value.into_bytes() };
                let path = "/etcdserverpb.KV/Put".parse().unwrap();
                let codec = tonic_prost::ProstCodec::<Put, PutDone>::default();
                grpc.unary(tonic::Request::new(put), path, codec).await.unwrap();
            }
        }
    }
}

async fn connect(address: &str) -> Channel {
    let endpoint = Channel::from_shared(format!("http://{address}")).unwrap();
    endpoint.tcp_nodelay(true).connect().await.unwrap()
}

/// Uploads the model that all functions share.
async fn upload(admin: &mut AdminClient<Channel>) -> String {
    let model = millrace_model::synth::mlp();
    let digest = Digest::of(&model).to_string();
    let header = Artifact { digest: digest.clone(), bytes: model.len() as u64 };
    let parts = [Part::Header(header), Part::Data(model.into())];
    let messages = parts.map(|part| UploadArtifactRequest { part: Some(part) });
    admin.upload_artifact(futures::stream::iter(messages)).await.unwrap();
    digest
}

#[tokio::main]
async fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [kind, address, clients, seconds] = args.try_into().expect("millrace|etcd ADDRESS CLIENTS SECONDS");
    let clients: usize = clients.parse().unwrap();
    let seconds: f64 = seconds.parse().unwrap();
    let mut stores = Vec::new();
    for _ in 0..clients.min(CONNECTIONS_MAX) {
        let channel = connect(&address).await;
        stores.push(match kind.as_str() {
            "etcd" => Store::Etcd(Grpc::new(channel)),
            _ => {
                let mut admin = AdminClient::new(channel);
                Store::Millrace { digest: upload(&mut admin).await, admin }
            }
        });
    }
    let start = Instant::now() + WARM_UP;
    let end = start + Duration::from_secs_f64(seconds);
    let tasks = (0..clients).map(|client| {
        let mut store = stores[client % stores.len()].clone();
        tokio::spawn(async move {
            let mut took = Vec::new();
            for n in 0.. {
                let sent = Instant::now();
                if sent >= end {
                    break;
                }
                store.write(client, n).await;
                if sent >= start {
                    took.push(sent.elapsed().as_secs_f64() * 1e6);
                }
            }
            took
        })
    });
    let mut took = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        took.extend(task.await.unwrap());
    }
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    let rate = took.len() as f64 / (Instant::now() - start).as_secs_f64();
    println!(r#"{{"rate": {rate:.1}, "p50_us": {:.1}, "p99_us": {:.1}}}"#, at(0.5), at(0.99));
}
