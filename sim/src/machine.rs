//! One machine of a scenario: modelled links and GPUs, and the worker's real actors above them.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec, Revision, RevisionKey};
use millrace_worker::clock::Clock;
use millrace_worker::handle::NodeHandle;
use millrace_worker::install::{FunctionConfig, PreparedModel, Profile};
use millrace_worker::node::{NodeConfig, NodeContext, SharedTrace, start_here};
use millrace_worker::port::model::{ExecutorBehaviour, RunEnd, RunModel};
use millrace_worker::port::modelled::ModelledMachine;

use crate::control::{digest, function_key};
use crate::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};

/// The limit of requests of a node and of a function: more than any scenario has, so that no limit refuses a
/// request.
const REQUESTS_MAX: u32 = 1 << 28;

pub(crate) struct SimulatedMachine {
    pub(crate) handle: NodeHandle,
    pub(crate) executors: ModelledMachine,
    pub(crate) trace: Option<SharedTrace>,
    /// The rate at which weights reach the first GPU from host memory.
    host_rate: BytesPerSec,
}

impl SimulatedMachine {
    /// Starts the actors of a node, in the runtime of this thread.
    pub(crate) fn start(
        scenario: &ClusterScenario,
        node: &SimulatedNode,
        place: usize,
        clock: &Arc<dyn Clock>,
    ) -> Self {
        let behaviour = |gpu: &millrace_types::topology::TopologyGpu| {
            let run = |(place, function): (usize, &SimulatedFunction)| {
                let model = &function.model;
                let run = RunModel {
                    takes: paced(scenario, &gpu.gpu_type, model.run),
                    by_member: paced(scenario, &gpu.gpu_type, function.by_member),
                    tail: paced(scenario, &gpu.gpu_type, model.tail),
                    start: model.start,
                    keeps: Bytes::ZERO,
                    curve: model.shared.curve,
                    demand: model.shared.demand,
                    end: RunEnd::Done,
                };
                (model_name(place), run)
            };
            ExecutorBehaviour {
                start: scenario.executor_start,
                process_start: if node.isolation.per_model() {
                    scenario.process_start
                } else {
                    Duration::ZERO
                },
                // Without a limit of its own, a copy is as fast as its links.
                copy_rate: BytesPerSec(u64::MAX),
                copy_fails_every: None,
                ties: scenario.ties,
                runs: scenario.functions.iter().enumerate().map(run).collect(),
            }
        };
        let behaviours = node.topology.gpus.iter().map(behaviour).collect();
        let executors = ModelledMachine::new(Arc::clone(clock), behaviours).with_links(&node.topology);
        let trace = scenario.traced.then(SharedTrace::default);
        let mut config = NodeConfig::new(node.topology.clone());
        (config.dispatch, config.eviction, config.isolation) = (node.dispatch, node.eviction, node.isolation);
        config.sharing = node.sharing;
        config.host_links = node.host_links;
        config.gpu_sharing = node.gpu_sharing;
        (config.requests_max, config.in_flight_max) = (REQUESTS_MAX, REQUESTS_MAX);
        let seed = scenario.seed.wrapping_add(place as u64);
        let context = NodeContext::new(seed, Box::new(executors.clone())).with_clock(Arc::clone(clock));
        let context = match &trace {
            Some(trace) => context.with_trace(Arc::clone(trace)),
            None => context,
        };
        Self { handle: start_here(config, context), executors, trace, host_rate: host_rate(node) }
    }

    /// Returns the configuration of a function for this node. The profile's load time comes from the rate of
    /// host memory; no swap time is known in advance.
    pub(crate) fn config(
        &self,
        scenario: &ClusterScenario,
        node: &SimulatedNode,
        place: usize,
    ) -> FunctionConfig {
        let function = &scenario.functions[place];
        let load = self.host_rate.time_for(function.model.weights).max(function.model.start);
        let mut types: Vec<_> = node.topology.gpus.iter().map(|gpu| gpu.gpu_type.clone()).collect();
        types.sort_unstable();
        types.dedup();
        let profile = |gpu_type: String| {
            let run = paced(scenario, &gpu_type, function.model.run);
            Profile { gpu_type, load, swap: None, run }
        };
        FunctionConfig {
            key: revision(place, function),
            slo: function.slo,
            idempotent: true,
            gpu_memory: Some(function.model.memory),
            serving: function.serving,
            profiles: types.into_iter().map(profile).collect(),
        }
    }
}

/// Returns the key of a function's only revision on its nodes.
pub(crate) fn revision(place: usize, function: &SimulatedFunction) -> RevisionKey {
    RevisionKey { function: function_key(place, function), revision: Revision::FIRST }
}

fn model_name(place: usize) -> String {
    format!("m{place}")
}

/// Returns the models for the nodes. The models have names and sizes, but share one empty memfd.
pub(crate) fn models(functions: &[SimulatedFunction]) -> io::Result<Vec<Arc<PreparedModel>>> {
    let fd = rustix::fs::memfd_create("simulated", rustix::fs::MemfdFlags::CLOEXEC);
    let file: Arc<OwnedFd> = Arc::new(fd?);
    let model = |(place, function): (usize, &SimulatedFunction)| {
        Arc::new(PreparedModel {
            digest: digest(place),
            name: model_name(place),
            graph: Arc::clone(&file),
            graph_bytes: Bytes::ZERO,
            weights: Arc::clone(&file),
            weights_bytes: function.model.weights,
            group_bytes: millrace_types::Bytes::mib(2),
            launches: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        })
    };
    Ok(functions.iter().enumerate().map(model).collect())
}

/// Returns the duration of a computation on a type of GPU, by the pace that the scenario sets for the type.
fn paced(scenario: &ClusterScenario, gpu_type: &str, span: Duration) -> Duration {
    span * scenario.pace.get(gpu_type).copied().unwrap_or(100) / 100
}

/// Returns the rate at which a model is copied to the first GPU of a node: that of the slowest link on the
/// path.
fn host_rate(node: &SimulatedNode) -> BytesPerSec {
    let path = node.topology.gpus.first().map(|gpu| gpu.host_path.as_slice()).unwrap_or_default();
    let rates = path.iter().map(|link| node.topology.links[link.0 as usize].rate);
    rates.min().unwrap_or(BytesPerSec(u64::MAX))
}
