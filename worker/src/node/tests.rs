//! A node in virtual time, over executors that keep what runs give.

mod to_host;

use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt as _;
use millrace_policy::index::LookupOrder;
use millrace_policy::prewarm::Prewarm;
use millrace_proto::executor::command::Command;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_server::Worker as _;
use millrace_types::topology::{Gpu, Link, LinkId, LinkKind, Topology};
use millrace_types::workflow::Signature;
use millrace_types::{
    Bytes, BytesPerSec, DataType, Digest, FunctionKey, FunctionName, GpuIndex, Incarnation, NodeName, Reason,
    RequestId, Revision, RevisionKey, Serving, TenantName, TensorSpec,
};
use tokio::sync::watch;
use tracing::span;

use crate::activity;
use crate::clock::{Clock, VirtualClock};
use crate::control::index::IndexFeed;
use crate::handle::NodeHandle;
use crate::hints::{Followed, Hints};
use crate::host_tier::gate::Gate;
use crate::host_tier::{self, Reader};
use crate::install::{FunctionConfig, PreparedModel};
use crate::node::{NodeConfig, NodeContext, REQUESTS_MAX, start_here};
use crate::objects::{Objects, Whereabouts, memory};
use crate::port::model::{Behaviour, RunModel};
use crate::port::modelled::ModelledMachine;
use crate::port::{Descriptor, ExecutorPort, PortSink, Spawner};
use crate::programs::{Launcher, Program, Programs};
use crate::request::{Invocation, OnGpus};
use crate::seams::LETTERS_PER_REQUEST;
use crate::service::{Faults, Limits, WorkerService};

const MINUTE: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(1);
/// What a run leaves on its GPU.
const OUTPUT: Bytes = Bytes::mib(8);

fn in_virtual_time<F: Future>(test: F) -> F::Output {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    actix::System::with_tokio_rt(runtime).block_on(test)
}

/// Modelled executors.
struct Dying {
    machine: ModelledMachine,
    /// Whether the next copy to the host is the end of the one that is to make it.
    dies: Arc<AtomicBool>,
}

struct DyingPort {
    inner: Box<dyn ExecutorPort>,
    dies: Arc<AtomicBool>,
}

impl Spawner for Dying {
    fn port(&mut self, gpu: GpuIndex, sink: PortSink) -> Box<dyn ExecutorPort> {
        Box::new(DyingPort { inner: self.machine.port(gpu, sink), dies: Arc::clone(&self.dies) })
    }
}

impl ExecutorPort for DyingPort {
    fn start(&mut self, incarnation: Incarnation) {
        self.inner.start(incarnation);
    }
    fn send(&mut self, command: Command, descriptors: Vec<Descriptor>) {
        match command {
            Command::CopyOut(_) if self.dies.swap(false, Ordering::Relaxed) => self.inner.kill(),
            command => self.inner.send(command, descriptors),
        }
    }
    fn kill(&mut self) {
        self.inner.kill();
    }
}

/// One GPU of 64 MiB.
fn topology() -> Topology {
    let gpu = Gpu {
        index: GpuIndex(0),
        gpu_type: "modelled".to_owned(),
        memory: Bytes::mib(64),
        host_path: vec![LinkId(0)],
    };
    let link = Link { kind: LinkKind::Pcie, rate: BytesPerSec::gb(10) };
    Topology { name: "test".to_owned(), gpus: vec![gpu], links: vec![link] }
}

fn node() -> NodeHandle {
    node_that(Arc::default())
}

/// A node whose executor dies at a copy to the host, if it is told to.
fn node_that(dies: Arc<AtomicBool>) -> NodeHandle {
    let run = RunModel { keeps: OUTPUT, ..RunModel::new(Duration::from_millis(5)) };
    let behaviour = Behaviour {
        start: Duration::from_millis(8),
        process_start: Duration::ZERO,
        copy_rate: BytesPerSec::gb(10),
        copy_fails_every: None,
        ties: 0,
        runs: [("model".to_owned(), run)].into(),
    };
    let clock = clock();
    let machine = ModelledMachine::new(Arc::clone(&clock), vec![behaviour]);
    let context = NodeContext::new(1, Box::new(Dying { machine, dies })).with_clock(clock);
    start_here(NodeConfig::new(topology()), context)
}

fn clock() -> Arc<dyn Clock> {
    Arc::new(VirtualClock::starting_at(tokio::time::Instant::now()))
}

fn prepared() -> Arc<PreparedModel> {
    Arc::new(PreparedModel {
        digest: Digest::of(b"model"),
        name: "model".to_owned(),
        graph: memfd(),
        graph_bytes: Bytes::ZERO,
        weights: memfd(),
        weights_bytes: Bytes::mib(4),
        group_bytes: Bytes::mib(2),
        launches: Vec::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
    })
}

fn memfd() -> Descriptor {
    Arc::new(memory("test").unwrap().into())
}

fn revision() -> RevisionKey {
    revision_of("f")
}

fn revision_of(name: &str) -> RevisionKey {
    let name = FunctionName::new(name).unwrap();
    RevisionKey { function: FunctionKey { tenant: TenantName::default(), name }, revision: Revision::FIRST }
}

/// No controller that knows where other workers are.
fn nowhere() -> Whereabouts {
    Whereabouts::new(Vec::new(), watch::Sender::new(BTreeSet::new()).subscribe())
}

fn place() -> activity::Place {
    activity::Place {
        node: NodeName::new("node").unwrap(),
        instance: String::new(),
        topology: Arc::new(topology()),
    }
}

fn function() -> FunctionConfig {
    FunctionConfig {
        key: revision(),
        slo: None,
        idempotent: false,
        gpu_memory: None,
        serving: Serving::default(),
        profiles: Vec::new(),
    }
}

fn request(timeout: Duration) -> Invocation {
    Invocation {
        request_id: RequestId::new("request").unwrap(),
        attempts_left: 3,
        revision: revision(),
        timeout,
        priority: 0,
        objective: None,
        next: Vec::new(),
        inputs: Vec::new(),
        descriptors: Vec::new(),
        on_gpus: OnGpus { objects: Vec::new(), keep: vec!["run".to_owned()] },
        outputs: Vec::new(),
        cold: Duration::ZERO,
        behind: Duration::ZERO,
        counted: false,
    }
}

#[test]
fn a_request_is_refused_while_the_node_has_too_many_letters_to_read() {
    in_virtual_time(async {
        let node = node();
        node.install(function(), prepared()).await.unwrap();
        // Nothing is awaited here, so that no actor reads a letter.
        for _ in 0..=LETTERS_PER_REQUEST * REQUESTS_MAX as usize {
            node.cap(Arc::default());
        }
        let refused = node.invoke(request(MINUTE)).now_or_never().expect("an answer at once");
        assert_eq!(refused.unwrap_err().reason, Reason::QueueFull);
        // Answered after all letters before it were read.
        node.snapshot().await;
        node.invoke(request(MINUTE)).await.unwrap();
    });
}

/// No object of the host's has room: outputs are answered, from the GPU's memory.
#[test]
fn a_request_whose_outputs_are_lost_before_they_are_answered_is_run_again_if_it_may_be() {
    for idempotent in [true, false] {
        in_virtual_time(async {
            let node = node_that(Arc::new(AtomicBool::new(true)));
            node.install(FunctionConfig { idempotent, ..function() }, prepared()).await.unwrap();
            let signatures = watch::Sender::new(Arc::default()).subscribe();
            let objects =
                Objects::new(Bytes::ZERO, IndexFeed::unheard(), nowhere(), LookupOrder::default(), clock());
            let known = (signatures, Gate::new(clock()));
            let service =
                WorkerService::new(node, place(), known, objects.clone(), Limits::default(), Faults::Refuse);
            let gathered =
                objects.gather(Vec::new(), Reader::Gpu, objects.asker(revision(), None, None)).await.unwrap();
            let hold = Some(wire::Hold::default());
            let answer = service.answered(request(MINUTE), gathered, (hold, None)).await;
            if idempotent {
                let answer = answer.unwrap();
                assert_eq!((answer.outputs[0].data.len() as u64, answer.attempts), (OUTPUT.get(), 2));
            } else {
                let failure = answer.unwrap_err();
                assert_eq!((failure.reason, failure.may_have_executed), (Reason::ExecutorLost, true));
            }
        });
    }
}

/// D29: not before its own model is there, and not at all where it is refused for want of that.
#[test]
fn what_a_request_hints_at_comes_after_its_own_model() {
    in_virtual_time(async {
        let node = node();
        node.install(function(), prepared()).await.unwrap();
        let output = TensorSpec { name: "run".to_owned(), datatype: DataType::Uint64, shape: Vec::new() };
        let signature = |digest| {
            let (inputs, outputs, reader) = (Vec::new(), vec![output.clone()], Reader::Gpu);
            Arc::new(host_tier::Signature { digest, inputs, outputs, reader, state: None })
        };
        let [own, next] = [b"model", b"other"].map(|model| Digest::of(model));
        let known = [(revision(), signature(own)), (revision_of("next"), signature(next))];
        let signatures = watch::Sender::new(Arc::new(host_tier::Signatures::from(known))).subscribe();
        let gate = Gate::new(clock());
        gate.arrived(next);
        let hints = Hints::new(Prewarm::On, signatures.clone(), gate.clone(), clock());
        let objects =
            Objects::new(Bytes::ZERO, IndexFeed::unheard(), nowhere(), LookupOrder::default(), clock());
        let (known, limits) = ((signatures, gate.clone()), Limits::default());
        let service = WorkerService::new(node, place(), known, objects, limits, Faults::Refuse);
        let service = service.following(hints.clone());
        let ask = async || {
            let to = wire::WarmTo::Host.into();
            let asked = wire::InvokeRequest {
                request_id: "request".to_owned(),
                tenant: "default".to_owned(),
                function: "f".to_owned(),
                revision: 1,
                hold: Some(wire::Hold::default()),
                next: vec![wire::Likely { function: "next".to_owned(), revision: 1, to }],
                ..wire::InvokeRequest::default()
            };
            service.invoke(tonic::Request::new(asked)).await
        };
        ask().await.unwrap_err();
        assert_eq!(hints.followed(), Followed::default());
        gate.arrived(own);
        ask().await.unwrap();
        assert_eq!(hints.followed(), Followed { there: 1, ..Followed::default() });
    });
}

/// What is reserved holds for as long as requests were apart (D23).
#[test]
fn memory_that_a_function_was_expected_to_need_goes_with_it() {
    in_virtual_time(async {
        let node = node();
        node.install(function(), prepared()).await.unwrap();
        tokio::time::sleep(20 * MOMENT).await;
        // The first object begins the store; a window is known with the second request after that.
        for _ in 0..3 {
            tokio::time::sleep(MINUTE).await;
            drop(node.invoke(request(MINUTE)).await.unwrap());
        }
        tokio::time::sleep(MOMENT).await;
        let data = node.snapshot().await.gpus[0].data;
        assert_eq!((data.used, data.pool), (Bytes::ZERO, OUTPUT));
        node.retire(revision()).await;
        tokio::time::sleep(MOMENT).await;
        let data = node.snapshot().await.gpus[0].data;
        assert_eq!(data.pool, Bytes::mib(6), "the floor alone");
    });
}

/// Panics once when a Function actor says something.
struct Bug(AtomicBool);

impl tracing::Subscriber for Bug {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }
    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}
    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        let spoke = event.metadata().target().ends_with("actors::function");
        assert!(!(spoke && self.0.swap(false, Ordering::Relaxed)), "a bug");
    }
    fn enter(&self, _: &span::Id) {}
    fn exit(&self, _: &span::Id) {}
}

/// A program that cannot be started.
fn program(dir: &Path) -> Arc<Program> {
    let launcher = Launcher { program: "/nowhere".into(), args: Vec::new(), envs: Vec::new() };
    let objects =
        Objects::new(Bytes::mib(1), IndexFeed::unheard(), nowhere(), LookupOrder::default(), clock());
    let programs = Programs::open(dir, launcher, objects, Bytes::mib(1)).unwrap();
    let declared = Signature { inputs: Vec::new(), outputs: Vec::new() };
    Arc::new(programs.put(Digest::of(b"program"), declared, b"program").unwrap())
}

#[test]
fn who_runs_a_program_ends_with_its_function() {
    for processes in [0, 2] {
        in_virtual_time(async {
            let (node, dir) = (node(), tempfile::tempdir().unwrap());
            let program = program(dir.path());
            node.host(function(), Arc::clone(&program), processes).await.unwrap();
            tokio::time::sleep(MOMENT).await;
            assert!(Arc::strong_count(&program) > 1);
            node.retire(revision()).await;
            tokio::time::sleep(MOMENT).await;
            assert_eq!(Arc::strong_count(&program), 1, "{processes} processes");
        });
    }
}

#[test]
fn requests_for_a_program_whose_function_actor_panicked_are_not_run() {
    // As in `tests/virtual_time/panics.rs`: a subscriber alone would be asked once for all threads.
    let _second = tracing::Dispatch::new(Bug(AtomicBool::new(false)));
    let _guard = tracing::subscriber::set_default(Bug(AtomicBool::new(true)));
    in_virtual_time(async {
        let (node, dir) = (node(), tempfile::tempdir().unwrap());
        // Without processes requests wait.
        node.host(function(), program(dir.path()), 0).await.unwrap();
        let carried = memfd();
        let ask = |timeout| {
            let invocation = Invocation { descriptors: vec![Arc::clone(&carried)], ..request(timeout) };
            let node = node.clone();
            actix_rt::spawn(async move { node.invoke(invocation).await })
        };
        // The first is refused for its time is over, which is said.
        let answers = [MOMENT, MINUTE, MINUTE].map(ask);
        for answer in answers {
            assert_eq!(answer.await.unwrap().unwrap_err().reason, Reason::Internal);
        }
        tokio::time::sleep(MOMENT).await;
        assert_eq!(Arc::strong_count(&carried), 1, "the crew has none of them any more");
    });
}
