//! Tests of a node in virtual time, with modelled executors that keep the outputs of their runs.

mod to_host;

use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt as _;
use millrace_nodes::index::LookupOrder;
use millrace_proto::executor::command::Command;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_server::Worker as _;
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::workflow::Signature;
use millrace_types::{
    Bytes, BytesPerSec, DataType, Digest, FunctionKey, FunctionName, GpuIndex, Incarnation, NodeName, Reason,
    RequestId, Revision, RevisionKey, SchedulingOptions, TenantName, TensorSpec,
};
use millrace_workflow::hints::Prewarm;
use tokio::sync::watch;
use tracing::span;

use crate::activity;
use crate::actor_runtime::LETTERS_PER_REQUEST;
use crate::clock::{Clock, VirtualClock};
use crate::handle::NodeHandle;
use crate::host_tier::gate::HostMemoryGate;
use crate::index_feed::IndexFeed;
use crate::install::{FunctionConfig, PreparedModel};
use crate::node::{NodeConfig, NodeContext, REQUESTS_MAX, start_here};
use crate::objects::{DirectoryClient, ObjectStore, memory};
use crate::port::model::{ExecutorBehaviour, RunModel};
use crate::port::modelled::ModelledMachine;
use crate::port::{Descriptor, ExecutorPort, PortFactory, PortSink};
use crate::prewarming::{HintFollower, HintOutcomes};
use crate::programs::{HostedProgram, ProgramLauncher, ProgramStore};
use crate::request::{Attempt, OnGpus};
use crate::service::{InjectedFaults, ServiceLimits, WorkerService};
use crate::signature::{FunctionSignature, InputReader, Signatures};

const MINUTE: Duration = Duration::from_secs(60);
const MOMENT: Duration = Duration::from_millis(1);
/// Output that a run leaves on its GPU.
const OUTPUT: Bytes = Bytes::mib(8);

fn in_virtual_time<F: Future>(test: F) -> F::Output {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    actix::System::with_tokio_rt(runtime).block_on(test)
}

/// Spawns modelled executors that can die during a copy to the host.
struct Dying {
    machine: ModelledMachine,
    /// Whether the next copy to the host kills its executor.
    dies: Arc<AtomicBool>,
}

struct DyingPort {
    inner: Box<dyn ExecutorPort>,
    dies: Arc<AtomicBool>,
}

impl PortFactory for Dying {
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

/// Returns a machine with one GPU of 64 MiB.
fn topology() -> Topology {
    let gpu = TopologyGpu {
        index: GpuIndex(0),
        gpu_type: "modelled".to_owned(),
        memory: Bytes::mib(64),
        host_path: vec![LinkId(0)],
    };
    let link = TopologyLink { kind: LinkKind::Pcie, rate: BytesPerSec::gb(10) };
    Topology { name: "test".to_owned(), gpus: vec![gpu], links: vec![link] }
}

fn node() -> NodeHandle {
    node_that(Arc::default())
}

/// Starts a node with an executor that dies at its next copy to the host if `dies` is set.
fn node_that(dies: Arc<AtomicBool>) -> NodeHandle {
    let run = RunModel { keeps: OUTPUT, ..RunModel::new(Duration::from_millis(5)) };
    let behaviour = ExecutorBehaviour {
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

/// Returns a directory client without controllers.
fn nowhere() -> DirectoryClient {
    DirectoryClient::new(Vec::new(), watch::Sender::new(BTreeSet::new()).subscribe())
}

fn place() -> activity::WorkerIdentity {
    activity::WorkerIdentity {
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
        serving: SchedulingOptions::default(),
        profiles: Vec::new(),
    }
}

fn request(timeout: Duration) -> Attempt {
    Attempt {
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
        trial: None,
    }
}

#[test]
fn a_request_is_refused_while_the_node_has_too_many_unread_messages() {
    in_virtual_time(async {
        let node = node();
        node.install(function(), prepared()).await.unwrap();
        // Nothing is awaited here, so that no actor reads a message.
        for _ in 0..=LETTERS_PER_REQUEST * REQUESTS_MAX as usize {
            node.set_quotas(Arc::default());
        }
        let refused = node.invoke(request(MINUTE)).now_or_never().expect("the node should answer at once");
        assert_eq!(refused.unwrap_err().reason, Reason::QueueFull);
        // The snapshot is taken after all earlier messages were read.
        node.snapshot().await;
        node.invoke(request(MINUTE)).await.unwrap();
    });
}

/// The host has no memory for objects, so the outputs are answered from the GPU's memory.
#[test]
fn a_request_with_lost_outputs_runs_again_if_its_function_is_idempotent() {
    for idempotent in [true, false] {
        in_virtual_time(async {
            let node = node_that(Arc::new(AtomicBool::new(true)));
            node.install(FunctionConfig { idempotent, ..function() }, prepared()).await.unwrap();
            let signatures = watch::Sender::new(Arc::default()).subscribe();
            let objects = ObjectStore::new(
                Bytes::ZERO,
                IndexFeed::unheard(),
                nowhere(),
                LookupOrder::default(),
                clock(),
            );
            let gate = HostMemoryGate::new(clock());
            let limits = ServiceLimits::default();
            let service = WorkerService::new(
                node,
                place(),
                signatures,
                gate,
                objects.clone(),
                limits,
                InjectedFaults::Refuse,
            );
            let gathered = objects
                .gather(Vec::new(), InputReader::Gpu, objects.asker(revision(), None, None))
                .await
                .unwrap();
            let hold = Some(wire::Hold::default());
            let answer = service.answered(request(MINUTE), gathered, hold, None).await;
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

/// A hint is not followed before the request's own model is in host memory, and not at all if the
/// request is refused for want of that model (D29).
#[test]
fn hints_of_a_request_are_followed_after_its_own_model_is_loaded() {
    in_virtual_time(async {
        let node = node();
        node.install(function(), prepared()).await.unwrap();
        let output = TensorSpec { name: "run".to_owned(), datatype: DataType::Uint8, shape: Vec::new() };
        let signature = |digest| {
            Arc::new(FunctionSignature {
                digest,
                inputs: Vec::new(),
                outputs: vec![output.clone()],
                reader: InputReader::Gpu,
                state: None,
            })
        };
        let [own, next] = [b"model", b"other"].map(|model| Digest::of(model));
        let known = [(revision(), signature(own)), (revision_of("next"), signature(next))];
        let signatures = watch::Sender::new(Arc::new(Signatures::from(known))).subscribe();
        let gate = HostMemoryGate::new(clock());
        gate.record_loaded(next);
        let hints = HintFollower::new(Prewarm::On, signatures.clone(), gate.clone(), clock());
        let objects =
            ObjectStore::new(Bytes::ZERO, IndexFeed::unheard(), nowhere(), LookupOrder::default(), clock());
        let limits = ServiceLimits::default();
        let service = WorkerService::new(
            node,
            place(),
            signatures,
            gate.clone(),
            objects,
            limits,
            InjectedFaults::Refuse,
        );
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
        assert_eq!(hints.followed(), HintOutcomes::default());
        gate.record_loaded(own);
        ask().await.unwrap();
        assert_eq!(hints.followed(), HintOutcomes { there: 1, ..HintOutcomes::default() });
    });
}

/// The pool keeps memory for as long as requests were apart (D23).
#[test]
fn pool_memory_of_a_function_is_released_when_the_function_retires() {
    in_virtual_time(async {
        let node = node();
        node.install(function(), prepared()).await.unwrap();
        tokio::time::sleep(20 * MOMENT).await;
        // The first object starts the store; the second request after that gives a window.
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
        assert_eq!(data.pool, Bytes::mib(6), "only the floor stays");
    });
}

/// A subscriber that panics once when a Function actor logs an event.
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

/// Returns a program that cannot be started.
fn program(dir: &Path) -> Arc<HostedProgram> {
    let launcher = ProgramLauncher { program: "/nowhere".into(), args: Vec::new(), envs: Vec::new() };
    let objects =
        ObjectStore::new(Bytes::mib(1), IndexFeed::unheard(), nowhere(), LookupOrder::default(), clock());
    let programs = ProgramStore::open(dir, launcher, objects, Bytes::mib(1)).unwrap();
    let declared = Signature { inputs: Vec::new(), outputs: Vec::new() };
    Arc::new(programs.put(Digest::of(b"program"), declared, b"program").unwrap())
}

#[test]
fn the_processes_of_a_program_end_with_its_function() {
    for processes in [0, 2] {
        in_virtual_time(async {
            let node = node();
            let dir = tempfile::tempdir().unwrap();
            let program = program(dir.path());
            node.install_program(function(), Arc::clone(&program), processes).await.unwrap();
            tokio::time::sleep(MOMENT).await;
            assert!(Arc::strong_count(&program) > 1);
            node.retire(revision()).await;
            tokio::time::sleep(MOMENT).await;
            assert_eq!(Arc::strong_count(&program), 1, "{processes} processes");
        });
    }
}

#[test]
fn requests_for_a_program_are_not_run_after_its_function_actor_panicked() {
    // A second subscriber is needed, as in `tests/virtual_time/panics.rs`: tracing would cache the
    // interest of a single subscriber for all threads.
    let _second = tracing::Dispatch::new(Bug(AtomicBool::new(false)));
    let _guard = tracing::subscriber::set_default(Bug(AtomicBool::new(true)));
    in_virtual_time(async {
        let node = node();
        let dir = tempfile::tempdir().unwrap();
        // Without processes, requests wait.
        node.install_program(function(), program(dir.path()), 0).await.unwrap();
        let carried = memfd();
        let ask = |timeout| {
            let invocation = Attempt { descriptors: vec![Arc::clone(&carried)], ..request(timeout) };
            let node = node.clone();
            actix_rt::spawn(async move { node.invoke(invocation).await })
        };
        // The first request times out and is refused, which the actor logs.
        let answers = [MOMENT, MINUTE, MINUTE].map(ask);
        for answer in answers {
            assert_eq!(answer.await.unwrap().unwrap_err().reason, Reason::Internal);
        }
        tokio::time::sleep(MOMENT).await;
        assert_eq!(Arc::strong_count(&carried), 1, "the process pool has dropped all requests");
    });
}
