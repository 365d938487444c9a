//! Opaque programs through a node (T06): their weights come in the order in which an executor recorded
//! that they are read.
//!
//! One is made of a model whose launches' reads are kept back at loading and come with each request, as
//! the calls of a redirected client would bring them. Behind its weights are blocks that nothing reads
//! unless a request says so. What is copied is seen between the node and its executors, which are real.

use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes as Buffer;
use millrace_device::{HostRegion, HostRegionBuilder};
use millrace_model::{Compiled, synth};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::tensor::Contents;
use millrace_proto::executor::{ByteRange, Launch, LaunchReads, Tensor, TensorSpec};
use millrace_types::topology::{Gpu, Link, LinkId, LinkKind, Topology};
use millrace_types::{
    Bytes, BytesPerSec, Digest, FunctionKey, FunctionName, GpuIndex, Incarnation, RequestId, Revision,
    RevisionKey, Serving, TenantName,
};
use millrace_worker::handle::NodeHandle;
use millrace_worker::install::{FunctionConfig, PreparedModel};
use millrace_worker::node::{NodeConfig, NodeContext, start};
use millrace_worker::port::{Descriptor, ExecutorPort, Lent, PortEvent, PortSink, Spawner};
use millrace_worker::process_port::{ExecutorCommand, ProcessSpawner};
use millrace_worker::request::{Invocation, OnGpus};
use millrace_worker::snapshot::ReadOrders;
use tokio::sync::watch;

use crate::support::{EXECUTOR_VARIABLE, kill_9, row, this_program_as, within};

const BLOCK: u64 = 1 << 20;
/// Of the program. Its model's own weights are in the first.
const BLOCKS: u64 = 24;
const OPAQUE: &str = "opaque";
/// A model of the same size that declares what it reads. The GPU has room for one of the two.
const OTHER: &str = "other";

/// What is seen of the copies of the opaque program.
#[derive(Default)]
struct Seen {
    program: Option<u64>,
    /// The blocks that its executor was told to copy since it was last mapped, in order. One of which a
    /// copy came too late is asked for again, and is where it was at first.
    blocks: Vec<u64>,
}

impl Seen {
    fn sent(&mut self, command: &Command) {
        match command {
            Command::LoadProgram(load) if load.name == OPAQUE => self.program = Some(load.program),
            Command::Map(map) if self.program == Some(map.program) => self.blocks.clear(),
            Command::Copy(copy) if self.program == Some(copy.program) => {
                for ByteRange { offset, bytes } in &copy.ranges {
                    assert!(offset.is_multiple_of(BLOCK) && bytes.is_multiple_of(BLOCK), "{copy:?}");
                    for block in offset / BLOCK..(offset + bytes) / BLOCK {
                        if !self.blocks.contains(&block) {
                            self.blocks.push(block);
                        }
                    }
                }
            }
            _ => {}
        }
    }

    fn is_all(&self) -> bool {
        self.blocks.len() as u64 == BLOCKS
    }
}

/// Real executors, of which it is seen what they are told.
struct Watched {
    executors: ProcessSpawner,
    seen: Arc<watch::Sender<Seen>>,
}

struct WatchedPort {
    executor: Box<dyn ExecutorPort>,
    seen: Arc<watch::Sender<Seen>>,
}

impl Spawner for Watched {
    fn port(&mut self, gpu: GpuIndex, sink: PortSink) -> Box<dyn ExecutorPort> {
        Box::new(WatchedPort { executor: self.executors.port(gpu, sink), seen: Arc::clone(&self.seen) })
    }
}

impl ExecutorPort for WatchedPort {
    fn start(&mut self, incarnation: Incarnation) {
        self.executor.start(incarnation);
    }
    fn send(&mut self, command: Command, descriptors: Vec<Descriptor>) {
        self.seen.send_modify(|seen| seen.sent(&command));
        self.executor.send(command, descriptors);
    }
    fn memory(&self) -> Option<Lent> {
        self.executor.memory()
    }
    fn kill(&mut self) {
        self.executor.kill();
    }
    fn heard(&mut self, event: PortEvent) -> Option<PortEvent> {
        self.executor.heard(event)
    }
}

/// A slow link: a transfer of the program takes 0.1 s, in three batches.
fn topology() -> Topology {
    let gpu = Gpu {
        index: GpuIndex(0),
        gpu_type: "test".to_owned(),
        memory: Bytes::mib(40),
        host_path: vec![LinkId(0)],
    };
    let link = Link { kind: LinkKind::Pcie, rate: BytesPerSec(250_000_000) };
    Topology { name: "test".to_owned(), gpus: vec![gpu], links: vec![link] }
}

fn key(function: &str) -> RevisionKey {
    let name = FunctionName::new(function).unwrap();
    RevisionKey { function: FunctionKey { tenant: TenantName::default(), name }, revision: Revision::FIRST }
}

fn byte_range(range: &Range<u64>) -> ByteRange {
    ByteRange { offset: range.start, bytes: range.end - range.start }
}

/// The model in host memory, with its padding; of an opaque program its launches' reads are left out.
fn prepared(
    name: &str,
    compiled: &Compiled,
    onnx: &Buffer,
    opaque_block: Option<NonZeroU64>,
) -> PreparedModel {
    let mut own = vec![0; usize::try_from(compiled.summary.weights_bytes).unwrap()];
    compiled.write_weights(onnx, &mut own).unwrap();
    assert!((own.len() as u64) < BLOCK);
    let mut weights = HostRegionBuilder::new("weights", Bytes(BLOCKS * BLOCK)).unwrap();
    weights.write_at(0, &own).unwrap();
    let weights = weights.finish().unwrap();
    let graph = HostRegion::from_bytes("graph", &compiled.graph).unwrap();
    let launch = |launch: &millrace_model::Launch| Launch {
        writes: launch.writes.clone(),
        args: launch.args.clone(),
        reads: match opaque_block {
            Some(_) => Vec::new(),
            None => launch.reads.iter().map(byte_range).collect(),
        },
    };
    let spec = |spec: &millrace_types::TensorSpec| TensorSpec {
        name: spec.name.clone(),
        datatype: spec.datatype.to_string(),
        shape: spec.wire_shape(),
    };
    PreparedModel {
        digest: Digest::of(name.as_bytes()),
        name: name.to_owned(),
        graph: Arc::new(graph.share().unwrap()),
        graph_bytes: graph.bytes(),
        weights: Arc::new(weights.share().unwrap()),
        weights_bytes: weights.bytes(),
        group_bytes: Bytes::mib(1),
        launches: compiled.launches.iter().map(launch).collect(),
        inputs: compiled.summary.inputs.iter().map(spec).collect(),
        outputs: compiled.summary.outputs.iter().map(spec).collect(),
        opaque_block,
    }
}

struct World {
    node: NodeHandle,
    thread: JoinHandle<()>,
    seen: watch::Receiver<Seen>,
    compiled: Compiled,
}

impl World {
    async fn start() -> Self {
        let (program, args) = this_program_as("executor_child");
        let command = ExecutorCommand { program, args, envs: vec![(EXECUTOR_VARIABLE.into(), "1".into())] };
        let executors = ProcessSpawner::new(command, &topology(), 1, false);
        let (seen_now, seen) = watch::channel(Seen::default());
        let watched = Watched { executors, seen: Arc::new(seen_now) };
        let context = NodeContext::new(1, Box::new(watched));
        let (node, thread) = start(NodeConfig::new(topology()), context).unwrap();
        let onnx = Buffer::from(synth::mlp());
        let compiled = millrace_model::compile(&onnx).unwrap();
        for (name, opaque_block) in [(OPAQUE, NonZeroU64::new(BLOCK)), (OTHER, None)] {
            let function = FunctionConfig {
                key: key(name),
                slo: None,
                idempotent: true,
                gpu_memory: None,
                serving: Serving::default(),
                profiles: Vec::new(),
            };
            let model = prepared(name, &compiled, &onnx, opaque_block);
            node.install(function, Arc::new(model)).await.unwrap();
        }
        Self { node, thread, seen, compiled }
    }

    /// What the launches read of the program's weights, the last one these blocks besides.
    fn reads(&self, blocks: &[u64]) -> Vec<LaunchReads> {
        let launches = self.compiled.launches.iter();
        let mut reads: Vec<Vec<Range<u64>>> = launches.map(|launch| launch.reads.clone()).collect();
        reads.last_mut().unwrap().extend(blocks.iter().map(|block| block * BLOCK..(block + 1) * BLOCK));
        reads.iter().map(|reads| LaunchReads { ranges: reads.iter().map(byte_range).collect() }).collect()
    }

    async fn ask(&self, function: &str, reads: Vec<LaunchReads>) -> Buffer {
        let data: Vec<u8> = row(1).iter().flat_map(|value| value.to_le_bytes()).collect();
        let input = Tensor {
            name: "x".to_owned(),
            datatype: "FP32".to_owned(),
            shape: vec![1, 64],
            contents: Some(Contents::Inline(data.into())),
        };
        let invocation = Invocation {
            request_id: RequestId::new("request").unwrap(),
            attempt: 1,
            attempts_left: 3,
            revision: key(function),
            timeout: Duration::from_secs(60),
            objective: None,
            priority: 0,
            inputs: vec![input],
            reads,
            descriptors: Vec::new(),
            on_gpus: OnGpus::default(),
            outputs: Vec::new(),
            next: Vec::new(),
            cold: Duration::ZERO,
            behind: Duration::ZERO,
            counted: false,
        };
        let completion = within("an answer", self.node.invoke(invocation)).await.unwrap();
        let [Tensor { contents: Some(Contents::Inline(bytes)), .. }] = &completion.outputs[..] else {
            panic!("{completion:?}");
        };
        bytes.clone()
    }

    /// Brings the program onto the GPU for a request that reads these blocks besides its own. Gives the
    /// order of the blocks in which it came.
    async fn swap(&mut self, blocks: &[u64]) -> Vec<u64> {
        let expected = self.ask(OTHER, Vec::new()).await;
        assert_eq!(self.ask(OPAQUE, self.reads(blocks)).await, expected);
        // It is answered as soon as what it reads is there.
        within("the rest", self.seen.wait_for(Seen::is_all)).await.unwrap().blocks.clone()
    }

    async fn recorded(&self) -> ReadOrders {
        self.node.snapshot().await.read_orders
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_opaque_program_comes_as_it_was_recorded() {
    let mut world = World::start().await;
    let as_it_lies: Vec<u64> = (0..BLOCKS).collect();
    assert_eq!(world.swap(&[23]).await, as_it_lies);
    assert_eq!(world.recorded().await, ReadOrders { first: 1, changed: 0, same: 0 });

    let first: Vec<u64> = [0, 23].into_iter().chain(1..23).collect();
    assert_eq!(world.swap(&[23]).await, first);
    assert_eq!(world.recorded().await, ReadOrders { first: 1, changed: 0, same: 0 });

    // On a machine that is busy enough all is copied before the run begins, and it runs whole.
    let mut swaps = 0;
    while world.recorded().await.changed == 0 {
        swaps += 1;
        assert!(swaps <= 50, "no run that begins before its copies are done");
        assert_eq!(world.swap(&[23, 12]).await, first, "what has begun keeps its order");
    }
    let again: Vec<u64> = [0, 23, 12].into_iter().chain(1..12).chain(13..23).collect();
    for blocks in [&[23_u64][..], &[23, 12]] {
        assert_eq!(world.swap(blocks).await, again);
    }
    assert_eq!(world.recorded().await, ReadOrders { first: 1, changed: 1, same: 0 });

    // The worker knows it still where its executor does not, and goes on to when that has seen one way only.
    let executor = world.node.snapshot().await.gpus[0].executor_pid.unwrap();
    kill_9(executor);
    assert_eq!(world.swap(&[23]).await, again);
    assert_eq!(world.recorded().await, ReadOrders { first: 1, changed: 1, same: 1 });
    assert_eq!(world.swap(&[23]).await, again);
    world.node.drain(Duration::ZERO).await;
    world.thread.join().unwrap();
}
