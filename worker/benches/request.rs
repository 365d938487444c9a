//! Measures the time that the actors add to a request: ingress, Function, Node, Gpu and Executor
//! actors, and back. The executor is a port that answers at once, so only the worker's own time is
//! measured.
//!
//! One bench sends requests from the actor thread itself, which measures the messages between
//! actors. The other bench sends requests from another thread, which adds the two thread wake-ups
//! of a gRPC request.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use millrace_proto::PROTOCOL_VERSION;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{CopyDone, Ready, RunDone, Tensor, tensor::Contents};
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{
    Bytes, BytesPerSec, Digest, FunctionKey, FunctionName, GpuIndex, Incarnation, RequestId, Revision,
    RevisionKey, SchedulingOptions, TenantName,
};
use millrace_worker::clock::{Clock, MonotonicClock};
use millrace_worker::handle::NodeHandle;
use millrace_worker::install::{FunctionConfig, PreparedModel};
use millrace_worker::node::{NodeConfig, NodeContext, start_here};
use millrace_worker::port::{Descriptor, ExecutorPort, PortEvent, PortEventKind, PortFactory, PortSink};
use millrace_worker::request::{Attempt, OnGpus};
use tokio::sync::oneshot;

/// Spawns ports that answer every command at once.
struct Instant;

struct InstantPort {
    sink: PortSink,
    incarnation: Incarnation,
}

impl PortFactory for Instant {
    fn port(&mut self, _: GpuIndex, sink: PortSink) -> Box<dyn ExecutorPort> {
        Box::new(InstantPort { sink, incarnation: Incarnation(0) })
    }
}

impl InstantPort {
    fn say(&self, event: Event) {
        let kind = PortEventKind::Event(event, Vec::new());
        self.sink.deliver(PortEvent { incarnation: self.incarnation, kind });
    }
}

impl ExecutorPort for InstantPort {
    fn start(&mut self, incarnation: Incarnation) {
        self.incarnation = incarnation;
        self.say(Event::Ready(Ready { protocol_version: PROTOCOL_VERSION, ..Ready::default() }));
    }

    fn send(&mut self, command: Command, _: Vec<Descriptor>) {
        let now = MonotonicClock.now().0;
        match command {
            Command::Copy(copy) => self.say(Event::CopyDone(CopyDone {
                transfer: copy.transfer,
                batch: copy.batch,
                started_ns: now,
                finished_ns: now,
                bytes: copy.ranges[0].bytes,
            })),
            Command::Run(run) => self.say(Event::RunDone(RunDone {
                run: run.run,
                outputs: run.inputs,
                started_ns: now,
                finished_ns: now,
                waited_ns: 0,
                launches: 1,
                launch_times: Vec::new(),
                token_wait_ns: 0,
                sm_ns: 0,
                token: None,
                token_busy_ns: 0,
            })),
            _ => {}
        }
    }

    fn kill(&mut self) {
        self.sink.deliver(PortEvent {
            incarnation: self.incarnation,
            kind: PortEventKind::Exited { status: "killed".to_owned() },
        });
    }
}

fn config() -> NodeConfig {
    let gpu = TopologyGpu {
        index: GpuIndex(0),
        gpu_type: "instant".to_owned(),
        memory: Bytes::gib(1),
        host_path: vec![LinkId(0)],
    };
    let link = TopologyLink { kind: LinkKind::Pcie, rate: BytesPerSec::gb(12) };
    NodeConfig::new(Topology { name: "bench".to_owned(), gpus: vec![gpu], links: vec![link] })
}

fn context() -> NodeContext {
    NodeContext::new(1, Box::new(Instant))
}

fn revision() -> RevisionKey {
    let name = FunctionName::new("bench").expect("a good name");
    RevisionKey { function: FunctionKey { tenant: TenantName::default(), name }, revision: Revision::FIRST }
}

async fn install(node: &NodeHandle) {
    let memfd = || -> Descriptor {
        let memfd = rustix::fs::memfd_create("bench", rustix::fs::MemfdFlags::CLOEXEC);
        Arc::new(memfd.expect("a memfd can be made"))
    };
    let model = PreparedModel {
        digest: Digest::of(b"bench"),
        name: "bench".to_owned(),
        graph: memfd(),
        graph_bytes: Bytes(0),
        weights: memfd(),
        weights_bytes: Bytes::mib(1),
        group_bytes: Bytes::mib(2),
        launches: Vec::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
    };
    let config = FunctionConfig {
        key: revision(),
        slo: None,
        idempotent: true,
        gpu_memory: None,
        serving: SchedulingOptions::default(),
        profiles: Vec::new(),
    };
    node.install(config, Arc::new(model)).await.expect("it fits");
}

/// Returns a request like the MLP's: one row of 64 numbers.
fn invocation() -> Attempt {
    let input = Tensor {
        name: "input".to_owned(),
        datatype: "FP32".to_owned(),
        shape: vec![1, 64],
        contents: Some(Contents::Inline(bytes::Bytes::from_static(&[0; 256]))),
    };
    Attempt {
        cold: Duration::ZERO,
        behind: Duration::ZERO,
        counted: false,
        trial: None,
        request_id: RequestId::new("bench").expect("a good id"),
        attempts_left: 3,
        revision: revision(),
        timeout: Duration::from_secs(60),
        objective: None,
        priority: 0,
        inputs: vec![input],
        descriptors: Vec::new(),
        on_gpus: OnGpus::default(),
        next: Vec::new(),
        outputs: Vec::new(),
    }
}

async fn ask(node: &NodeHandle, times: u64) -> Duration {
    let start = MonotonicClock.now();
    for _ in 0..times {
        node.invoke(invocation()).await.expect("the port answers");
    }
    MonotonicClock.now().since(start)
}

fn request(c: &mut Criterion) {
    c.bench_function("request/through the actors, asked on their thread", |b| {
        b.iter_custom(|times| {
            actix::System::new().block_on(async move {
                let node = start_here(config(), context());
                install(&node).await;
                ask(&node, 100).await;
                ask(&node, times).await
            })
        });
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build();
    let runtime = runtime.expect("a runtime can be made");
    let (started, handle) = mpsc::channel();
    let (stop, stopped) = oneshot::channel::<()>();
    let thread = thread::spawn(move || {
        actix::System::new().block_on(async move {
            started.send(start_here(config(), context())).expect("the bench waits for the node");
            drop(stopped.await);
        });
    });
    let node = handle.recv().expect("the thread starts the node");
    runtime.block_on(install(&node));
    c.bench_function("request/through the actors, asked from another thread", |b| {
        b.iter_custom(|times| {
            let node = node.clone();
            let asked = runtime.spawn(async move { ask(&node, times).await });
            runtime.block_on(asked).expect("asking does not panic")
        });
    });
    runtime.block_on(node.quiesce(Duration::from_secs(1)));
    runtime.block_on(node.stop());
    drop(stop);
    thread.join().expect("the actors end well");
}

criterion_group!(benches, request);
criterion_main!(benches);
