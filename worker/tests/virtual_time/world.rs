//! A node in virtual time, and the helpers of its tests.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::scenario::model_name;
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{
    Bytes, BytesPerSec, Digest, Failure, FunctionKey, FunctionName, GpuIndex, Reason, RequestId, Revision,
    RevisionKey, SchedulingOptions, Slo, TenantName, Timestamp,
};
use millrace_worker::clock::{Clock, VirtualClock};
use millrace_worker::handle::NodeHandle;
use millrace_worker::install::{FunctionConfig, PreparedModel};
use millrace_worker::node::{NodeConfig, NodeContext, SharedTrace, start_here};
use millrace_worker::port::model::{ExecutorBehaviour, RunModel};
use millrace_worker::port::modelled::ModelledMachine;
use millrace_worker::port::{Descriptor, PortFactory};
use millrace_worker::request::{Attempt, AttemptOutcome, OnGpus};
use tokio::task::JoinHandle;

/// Latency objective of the functions.
pub(crate) const OBJECTIVE: Duration = Duration::from_millis(25);
/// Time from an executor's start until it is ready.
pub(crate) const START: Duration = Duration::from_millis(8);

pub(crate) type Answer = Result<AttemptOutcome, Failure>;

/// Runs a test in paused time, which advances whenever every task waits.
pub(crate) fn in_virtual_time<F: Future>(test: F) -> F::Output {
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    actix::System::with_tokio_rt(runtime).block_on(test)
}

/// Returns a topology of GPUs with 64 MiB, each behind a separate link.
pub(crate) fn gpus(count: u32) -> Topology {
    let gpu = |index: u32| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "modelled".to_owned(),
        memory: Bytes::mib(64),
        host_path: vec![LinkId(index)],
    };
    let link = TopologyLink { kind: LinkKind::Pcie, rate: BytesPerSec::gb(10) };
    Topology {
        name: "test".to_owned(),
        gpus: (0..count).map(gpu).collect(),
        links: vec![link; count as usize],
    }
}

/// Returns executors that run each model for the given milliseconds, by the model's number.
pub(crate) fn behaviour(takes_ms: &[u64]) -> ExecutorBehaviour {
    let run = |&ms: &u64| RunModel::new(Duration::from_millis(ms));
    ExecutorBehaviour {
        start: START,
        process_start: Duration::ZERO,
        copy_rate: BytesPerSec::gb(10),
        copy_fails_every: None,
        ties: 0,
        runs: (0..).map(model_name).zip(takes_ms.iter().map(run)).collect(),
    }
}

pub(crate) struct World {
    pub(crate) node: NodeHandle,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) machine: ModelledMachine,
    pub(crate) trace: SharedTrace,
}

impl World {
    pub(crate) fn start(topology: Topology, behaviour: &ExecutorBehaviour) -> Self {
        Self::start_with(NodeConfig::new(topology), behaviour, 1, |machine| Box::new(machine))
    }

    pub(crate) fn start_with(
        config: NodeConfig,
        behaviour: &ExecutorBehaviour,
        seed: u64,
        spawner: impl FnOnce(ModelledMachine) -> Box<dyn PortFactory>,
    ) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(VirtualClock::starting_at(tokio::time::Instant::now()));
        let behaviours = vec![behaviour.clone(); config.topology.gpus.len()];
        let machine = ModelledMachine::new(Arc::clone(&clock), behaviours);
        let trace = SharedTrace::default();
        let context = NodeContext::new(seed, spawner(machine.clone()))
            .with_clock(Arc::clone(&clock))
            .with_trace(Arc::clone(&trace));
        Self { node: start_here(config, context), clock, machine, trace }
    }

    /// Installs function `number` with the model of the same number.
    pub(crate) async fn install(&self, number: usize, weights: Bytes) -> Arc<PreparedModel> {
        let model = prepare(number, weights);
        self.node.install(function(number), Arc::clone(&model)).await.unwrap();
        model
    }

    pub(crate) async fn until(&self, at: Timestamp) {
        tokio::time::sleep(self.clock.sleep_for(at.since(self.clock.now()))).await;
    }

    pub(crate) async fn pass(&self, span: Duration) {
        self.until(self.clock.now() + span).await;
    }

    pub(crate) async fn pass_ms(&self, ms: u64) {
        self.pass(Duration::from_millis(ms)).await;
    }

    /// Sends a request without waiting. The handle returns its answer.
    pub(crate) fn ask(&self, invocation: Attempt) -> JoinHandle<Answer> {
        let node = self.node.clone();
        actix_rt::spawn(async move { node.invoke(invocation).await })
    }
}

pub(crate) fn revision(function: usize) -> RevisionKey {
    let name = FunctionName::new(&format!("f{function}")).unwrap();
    RevisionKey { function: FunctionKey { tenant: TenantName::default(), name }, revision: Revision::FIRST }
}

pub(crate) fn function(number: usize) -> FunctionConfig {
    FunctionConfig {
        key: revision(number),
        slo: Some(Slo { deadline: OBJECTIVE, percentile: 0.98 }),
        idempotent: true,
        gpu_memory: None,
        serving: SchedulingOptions::default(),
        profiles: Vec::new(),
    }
}

pub(crate) fn prepare(number: usize, weights: Bytes) -> Arc<PreparedModel> {
    let memfd = || -> Descriptor {
        Arc::new(rustix::fs::memfd_create("model", rustix::fs::MemfdFlags::CLOEXEC).unwrap())
    };
    Arc::new(PreparedModel {
        digest: Digest::of(&[u8::try_from(number).unwrap()]),
        name: model_name(u32::try_from(number).unwrap()),
        graph: memfd(),
        graph_bytes: Bytes(0),
        weights: memfd(),
        weights_bytes: weights,
        group_bytes: Bytes::mib(2),
        launches: Vec::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
    })
}

/// Returns a request of a function with a timeout of a minute.
pub(crate) fn request(function: usize) -> Attempt {
    Attempt {
        cold: Duration::ZERO,
        behind: Duration::ZERO,
        counted: false,
        trial: None,
        request_id: RequestId::new("request").unwrap(),
        attempts_left: 3,
        revision: revision(function),
        timeout: Duration::from_secs(60),
        objective: None,
        priority: 0,
        inputs: Vec::new(),
        descriptors: Vec::new(),
        on_gpus: OnGpus::default(),
        next: Vec::new(),
        outputs: Vec::new(),
    }
}

/// Returns the request with this timeout.
pub(crate) fn within(timeout_ms: u64, invocation: Attempt) -> Attempt {
    Attempt { timeout: Duration::from_millis(timeout_ms), ..invocation }
}

pub(crate) async fn reason(answer: JoinHandle<Answer>) -> (Reason, bool) {
    let failure = answer.await.unwrap().unwrap_err();
    assert!(!failure.message.is_empty());
    assert_eq!(failure.retryable, failure.reason.retryable());
    (failure.reason, failure.may_have_executed)
}
