//! Measures the cost of soft state for a group of three controllers: the time until the leader has
//! committed and acknowledged 100,000 index entries of workers, and the stalls of writes during
//! snapshots of a large state. The controllers run in this process; the workers are stubs on real
//! streams: `cargo run --release -p millrace-controller --example soft_state -- 30`

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a measurement: it may panic and reads the clock"
)]

mod group;

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use millrace_proto::admin as api;
use millrace_proto::admin::admin_client::AdminClient;
use millrace_proto::parts::control_client;
use millrace_proto::worker as wire;
use millrace_proto::worker::controller_message::Message as Heard;
use millrace_proto::worker::worker_message::Message as Said;
use millrace_types::checkpoint::SYNC_ITEMS_MAX;
use millrace_types::{Bytes, DataId, Digest, Epoch, NodeDelta, NodeName, SyncBatch, SyncPart, SyncPortion};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use group::{Member, admin, write};

const FUNCTIONS: usize = 1_000;
const NODES: u64 = 100;
const ENTRIES: u64 = 100_000;
/// Rounds of each kind of sync.
const ROUNDS: usize = 5;
/// The telemetry interval, which renews a lease of 2 s.
const HEARTBEAT: Duration = Duration::from_millis(500);

/// A stub worker, controlled by the measurement.
struct Stub {
    name: NodeName,
    epoch: u64,
    seq: u64,
    say: mpsc::Sender<wire::WorkerMessage>,
    acks: mpsc::Receiver<wire::CheckpointAck>,
}

impl Stub {
    async fn attach(leader: &Member, number: u64) -> Self {
        let address = format!("http://{}", leader.config.internal_listen);
        let channel = Channel::from_shared(address).unwrap().tcp_nodelay(true).connect().await.unwrap();
        let name = NodeName::new(&format!("n{number}")).unwrap();
        let (say, said) = mpsc::channel(16);
        let gpus = (0..4).map(|index| wire::GpuCapacity {
            index,
            gpu_type: "V100".into(),
            memory_bytes: Bytes::gib(16).get(),
        });
        let hello = wire::WorkerHello {
            protocol_version: millrace_proto::PROTOCOL_VERSION,
            build: millrace_proto::BUILD.into(),
            node: name.to_string(),
            instance: "stub".into(),
            address: "127.0.0.1:1".into(),
            gpus: gpus.collect(),
            host_memory_bytes: Bytes::gib(64).get(),
            ..wire::WorkerHello::default()
        };
        let message = |it| wire::WorkerMessage { message: Some(it) };
        say.send(message(Said::Hello(hello))).await.unwrap();
        let mut client = control_client(channel);
        let mut heard = client.attach(ReceiverStream::new(said)).await.unwrap().into_inner();
        let greeted = heard.message().await.unwrap().unwrap().message.unwrap();
        let Heard::Hello(greeting) = greeted else { panic!("no hello: {greeted:?}") };
        let (acked, acks) = mpsc::channel(16);
        tokio::spawn(async move {
            while let Some(message) = heard.message().await.unwrap_or(None) {
                if let Some(Heard::CheckpointAck(ack)) = message.message {
                    acked.send(ack).await.unwrap();
                }
            }
        });
        let beat = say.clone();
        tokio::spawn(async move {
            while beat.send(message(Said::Telemetry(wire::Telemetry::default()))).await.is_ok() {
                tokio::time::sleep(HEARTBEAT).await;
            }
        });
        Self { name, epoch: greeting.epoch, seq: 0, say, acks }
    }

    /// Sends a full sync of `entries` entries, and waits for the acknowledgement of each part.
    async fn sync(&mut self, entries: u64) {
        let ids: Vec<u64> = (0..entries).collect();
        let parts: Vec<&[u64]> = match ids.chunks(SYNC_ITEMS_MAX).collect::<Vec<_>>() {
            none if none.is_empty() => vec![&[]],
            parts => parts,
        };
        let last = parts.len() - 1;
        for (at, part) in parts.into_iter().enumerate() {
            let portion = match at {
                _ if last == 0 => SyncPortion::Only,
                0 => SyncPortion::First,
                at if at == last => SyncPortion::Last,
                _ => SyncPortion::Middle,
            };
            self.seq += 1;
            let id = |&counter: &u64| DataId { home: self.name.clone(), epoch: Epoch(self.epoch), counter };
            let entries = part.iter().map(|counter| (id(counter), Bytes(2 << 20))).collect();
            let batch = SyncBatch {
                epoch: Epoch(self.epoch),
                seq: self.seq,
                part: SyncPart::Full(portion),
                delta: NodeDelta { entries, ..NodeDelta::default() },
            };
            let batch = rmp_serde::to_vec_named(&batch).unwrap().into();
            let message = Some(Said::Checkpoint(wire::Checkpoint { batch }));
            self.say.send(wire::WorkerMessage { message }).await.unwrap();
            let ack = self.acks.recv().await.unwrap();
            assert_eq!((ack.seq, ack.full_wanted), (self.seq, false), "{}", self.name);
        }
    }
}

async fn publish(admin: &AdminClient<Channel>) {
    let model = millrace_model::synth::mlp();
    let digest = Digest::of(&model).to_string();
    let header = api::Artifact { digest: digest.clone(), bytes: model.len() as u64 };
    let parts = [
        api::upload_artifact_request::Part::Header(header),
        api::upload_artifact_request::Part::Data(model.into()),
    ];
    let messages = parts.map(|part| api::UploadArtifactRequest { part: Some(part) });
    admin.clone().upload_artifact(futures::stream::iter(messages)).await.unwrap();
    let applies = (0..FUNCTIONS).map(|number| {
        let mut admin = admin.clone();
        let digest = digest.clone();
        async move {
            let spec = api::FunctionSpec {
                name: format!("f{number}"),
                idempotent: true,
                ..api::FunctionSpec::default()
            };
            let request = api::ApplyFunctionRequest { spec: Some(spec), digest, ..Default::default() };
            admin.apply_function(request).await.unwrap();
        }
    });
    futures::stream::iter(applies).buffer_unordered(32).collect::<Vec<()>>().await;
}

/// Adds the names of the snapshots in one controller's directory to `seen`.
fn snapshots(member: &Member, seen: &mut BTreeSet<String>) {
    let dir = member.config.data_dir.join("snapshots");
    let names = std::fs::read_dir(dir).into_iter().flatten().flatten();
    seen.extend(
        names.filter_map(|it| it.file_name().into_string().ok()).filter(|it| it.ends_with(".snapshot")),
    );
}

/// Measures a client that writes continuously, beside other clients that make the log grow.
async fn writes(members: &[Member; 3], what: &str, seconds: u64) {
    let leader = admin(&members[0]);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut seen = BTreeSet::new();
    snapshots(&members[0], &mut seen);
    let before = seen.len();
    let others = (0..3).map(|_| {
        let mut client = leader.clone();
        tokio::spawn(async move {
            while Instant::now() < end {
                assert!(write(&mut client).await);
            }
        })
    });
    let others: Vec<_> = others.collect();
    let mut client = leader.clone();
    let mut took = Vec::new();
    while Instant::now() < end {
        let began = Instant::now();
        assert!(write(&mut client).await);
        took.push(began.elapsed());
        snapshots(&members[0], &mut seen);
    }
    for other in others {
        other.await.unwrap();
    }
    took.sort();
    let at = |share: f64| took[((took.len() - 1) as f64 * share) as usize];
    println!(
        "{what}: {} writes of one client beside 3 others: p50 {:?}  p99 {:?}  p99.9 {:?}  max {:?}; {} snapshots by the leader",
        took.len(),
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0),
        seen.len() - before
    );
}

fn state_bytes(dir: &Path) -> u64 {
    let files = std::fs::read_dir(dir.join("snapshots")).into_iter().flatten().flatten();
    files.filter_map(|it| it.metadata().ok()).map(|it| it.len()).max().unwrap_or(0)
}

#[tokio::main]
async fn main() {
    let seconds = std::env::args().nth(1).map_or(30, |seconds| seconds.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let members = group::three(dir.path()).await;
    let leader = admin(&members[0]);
    writes(&members, "nothing in the state", seconds).await;

    publish(&leader).await;
    let mut stubs = Vec::new();
    for number in 1..=NODES {
        stubs.push(Stub::attach(&members[0], number).await);
    }
    println!("{FUNCTIONS} functions and {NODES} nodes are there");
    for round in 0..ROUNDS {
        let began = Instant::now();
        stubs[0].sync(ENTRIES).await;
        let one = began.elapsed();
        stubs[0].sync(0).await;
        let began = Instant::now();
        let all = stubs.iter_mut().map(|stub| stub.sync(ENTRIES / NODES));
        futures::future::join_all(all).await;
        println!(
            "sync {round}: {ENTRIES} entries of one node in {one:?}, of {NODES} nodes at once in {:?}",
            began.elapsed()
        );
    }
    writes(&members, "1,000 functions, 100 nodes, 100,000 entries", seconds).await;
    println!("a snapshot is {} bytes", state_bytes(&members[0].config.data_dir));
    group::end(members);
}
