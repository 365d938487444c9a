//! The choice of a node for each request, as in a controller's gateway: the pure router over the latest
//! telemetry, which arrives every 100 ms, and an assumed rate of every host link. Two details are simpler
//! than in the gateway. A request that was answered since the last report counts as unseen until the next
//! report. A function's only node gets all its requests, even without a GPU that is up.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_nodes::router::{
    self, HOST_RATE, MachineRunTimes, MachineType, ModelResidency, RouteRequest, WorkerCandidate,
};
use millrace_types::topology::Topology;
use millrace_types::{Bytes, Digest};
use millrace_worker::snapshot::{GpuHealth, GpuSnapshot, NodeSnapshot};

/// The interval at which nodes report their state.
pub const TELEMETRY_EVERY: Duration = Duration::from_millis(100);

/// The last reported state of a node.
#[derive(Debug, Clone)]
struct Known {
    machine: MachineType,
    gpus_up: u32,
    gpus_idle: u32,
    gpus_coming: u32,
    queued: u32,
    /// Requests that were sent to the node after its last report.
    unseen: u32,
    on_idle: BTreeSet<Digest>,
    on_busy: BTreeSet<Digest>,
}

/// The nodes, and the nodes that serve each function.
#[derive(Debug, Default)]
pub struct SimulatedRouter {
    nodes: BTreeMap<usize, Known>,
    /// The observed run times of each function.
    runs: BTreeMap<u32, MachineRunTimes>,
    serving: BTreeMap<u32, Vec<usize>>,
}

impl SimulatedRouter {
    /// Adds a node, of which only the GPUs are known.
    pub fn add_node(&mut self, node: usize, topology: &Topology) {
        let gpus = topology.gpus.len() as u32;
        let known = Known {
            machine: MachineType::of(topology.gpus.iter().map(|gpu| gpu.gpu_type.as_str())),
            gpus_up: gpus,
            gpus_idle: gpus,
            gpus_coming: 0,
            queued: 0,
            unseen: 0,
            on_idle: BTreeSet::new(),
            on_busy: BTreeSet::new(),
        };
        self.nodes.insert(node, known);
    }

    /// Records that a node serves a function from now on.
    pub fn add_server(&mut self, node: usize, function: u32) {
        self.serving.entry(function).or_default().push(node);
    }

    /// Records the state that a node reports, which makes all requests sent before the report seen.
    pub fn record_snapshot(&mut self, node: usize, said: &NodeSnapshot) {
        let Some(known) = self.nodes.get_mut(&node) else { return };
        let coming = |gpu: &&GpuSnapshot| matches!(gpu.health, GpuHealth::Starting | GpuHealth::Restarting);
        let coming = said.gpus.iter().filter(coming).count();
        let up = said.gpus.iter().filter(|gpu| gpu.health == GpuHealth::Up);
        let (idle, busy): (Vec<_>, Vec<_>) = up.partition(|gpu| gpu.running.is_none());
        let held = |gpus: &[&GpuSnapshot]| {
            gpus.iter().flat_map(|gpu| gpu.models.iter().map(|model| model.digest)).collect()
        };
        let count = |gpus: usize| u32::try_from(gpus).unwrap_or(u32::MAX);
        known.gpus_up = count(idle.len() + busy.len());
        known.gpus_idle = count(idle.len());
        known.gpus_coming = count(coming);
        (known.queued, known.unseen) = (said.queued, 0);
        (known.on_idle, known.on_busy) = (held(&idle), held(&busy));
    }

    /// Records the duration of a run of a function on a node.
    pub fn record_run(&mut self, node: usize, function: u32, run: Duration) {
        if let Some(known) = self.nodes.get(&node) {
            self.runs.entry(function).or_default().record_run(&known.machine, run);
        }
    }

    /// Chooses the node for a request. Returns `None` if no node with a GPU serves the function.
    pub fn choose(&mut self, function: u32, digest: Digest, request: &RouteRequest) -> Option<usize> {
        let serving = self.serving.get(&function)?;
        // A function's only node is chosen regardless of its reports.
        if let [only] = serving[..] {
            return Some(only);
        }
        let runs = self.runs.entry(function).or_default();
        let candidate = |&node: &usize| {
            let known = self.nodes.get(&node)?;
            let held = match () {
                () if known.on_idle.contains(&digest) => ModelResidency::OnIdleGpu,
                () if known.on_busy.contains(&digest) => ModelResidency::OnBusyGpu,
                () => ModelResidency::InHost,
            };
            Some(WorkerCandidate {
                worker: node,
                gpus_up: known.gpus_up,
                gpus_idle: known.gpus_idle,
                gpus_coming: known.gpus_coming,
                queued: known.queued,
                unseen: known.unseen,
                run: runs.estimate(&known.machine),
                held,
                host_rate: HOST_RATE,
                // A simulated request carries its inputs, so no node has to fetch any.
                missing: Bytes::ZERO,
            })
        };
        let chosen = router::choose(serving.iter().filter_map(candidate), request)?;
        self.nodes.get_mut(&chosen)?.unseen += 1;
        Some(chosen)
    }
}
