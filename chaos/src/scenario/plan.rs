//! The cluster that a scenario starts, and the functions and workflows that the scenario publishes.

use std::num::NonZeroU32;
use std::path::Path;

use super::options::ScenarioOptions;
use super::spec::{ClusterShape, CodedScenario, CounterSpec, FunctionGroup, ScenarioSpec, WorkflowChain};
use crate::cluster::{ClusterPlan, ConnectionCaps, FaultInjection, Ground, LinkMode, WorkerMachine};
use crate::load::{CounterFunction, SynthModel, TargetFunction, TargetWorkflow};

/// Maximum connections of each port under hostile clients; each address gets a quarter.
const PORT_MAX: NonZeroU32 = NonZeroU32::new(2_048).expect("it is not zero");
/// The soft limit of descriptors with which most systems start a process.
const USUAL_DESCRIPTORS: u64 = 1_024;

/// Returns the cluster to start for a scenario.
pub(super) async fn cluster(spec: &ScenarioSpec, options: &ScenarioOptions) -> ClusterPlan {
    let ClusterShape { controllers, workers, gpus, gpu_memory, host_memory, isolation } =
        spec.cluster.clone();
    let isolation = options.isolation.clone().or_else(|| isolation.map(|it| it.word().to_owned()));
    let mut worker_words = Vec::new();
    worker_words.extend(isolation.into_iter().flat_map(|it| ["--isolation".to_owned(), it]));
    if spec.fails_devices() {
        worker_words.extend(["--allow", "faults"].map(str::to_owned));
    }
    // A single thread keeps the long request running until the cluster has reported the request, on any
    // number of cores.
    if spec.plays == Some(CodedScenario::PoisonRequest) {
        worker_words.extend(["--executor-threads", "1"].map(str::to_owned));
    }
    let attacked = spec.plays == Some(CodedScenario::HostileClients);
    ClusterPlan {
        controllers,
        workers,
        links: links(spec, options.ground.kind),
        injection: if spec.is_injected() { FaultInjection::On } else { FaultInjection::Off },
        machine: WorkerMachine { gpus, gpu_memory: gpu_memory.0, host_memory: host_memory.0 },
        worker_words,
        preset: options.preset.clone(),
        caps: if attacked { caps(&options.program).await } else { None },
        descriptors: attacked.then_some(USUAL_DESCRIPTORS),
    }
}

/// Returns whether proxies are in front of processes: proxies slow links, and cut links if the ground
/// cannot.
fn links(spec: &ScenarioSpec, ground: Ground) -> LinkMode {
    let proxied = spec.slows() || spec.cuts() && ground == Ground::Processes;
    if proxied { LinkMode::Proxied } else { LinkMode::Direct }
}

pub(super) fn chains(workflows: &[WorkflowChain]) -> Vec<TargetWorkflow> {
    let chain = |of: &WorkflowChain| TargetWorkflow {
        name: of.name.clone(),
        steps: of.steps.clone(),
        rows: of.rows.get(),
    };
    workflows.iter().map(chain).collect()
}

pub(super) fn counters(sequences: &[CounterSpec]) -> Vec<CounterFunction> {
    sequences.iter().map(|of| CounterFunction { name: of.name.clone(), width: of.width }).collect()
}

/// Returns the functions of a scenario. `many` replaces the count of functions that have a count
/// above one.
pub(super) fn targets(functions: &[FunctionGroup], many: Option<u32>) -> Vec<TargetFunction> {
    let numbered = |of: &FunctionGroup| {
        let name = of.name.clone();
        let replicas = of.replicas.get();
        let kind = of.model.word();
        match of.count.get() {
            1 => vec![TargetFunction { name, replicas, network: SynthModel { kind, seed: 1 } }],
            count => (1..=many.unwrap_or(count))
                .map(|number| TargetFunction {
                    name: format!("{name}-{number}"),
                    replicas,
                    network: SynthModel { kind, seed: u64::from(number) },
                })
                .collect(),
        }
    };
    functions.iter().flat_map(numbered).collect()
}

/// Returns the connection limits, if the binary under test supports them.
async fn caps(program: &Path) -> Option<ConnectionCaps> {
    ConnectionCaps::known_to(program).await.then(|| ConnectionCaps::of(PORT_MAX))
}
