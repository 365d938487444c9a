//! The choice of a node for each request, as in a controller's gateway: the pure router over the latest
//! telemetry, which arrives every 100 ms. Two details are simpler than in the gateway. A request that was
//! answered since the last report counts as unseen until the next report. A function's only node gets all its
//! requests, even without a GPU that is up.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_nodes::router::{
    self, MachineRunTimes, MachineType, MeasuredLoads, ModelResidency, RouteRequest, WorkerCandidate,
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
    assigned: Duration,
    waiting: Duration,
    held: BTreeMap<Digest, ModelResidency>,
    /// Most free memory of a GPU.
    room: Bytes,
}

/// The nodes, and the nodes that serve each function.
#[derive(Debug, Default)]
pub struct SimulatedRouter {
    nodes: BTreeMap<usize, Known>,
    /// The observed run times of each function.
    runs: BTreeMap<u32, MachineRunTimes>,
    serving: BTreeMap<u32, Vec<usize>>,
    /// Measured load times of models.
    loads: BTreeMap<Digest, Duration>,
    /// Weights of the requested models.
    weights: BTreeMap<Digest, Bytes>,
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
            assigned: Duration::ZERO,
            waiting: Duration::ZERO,
            held: BTreeMap::new(),
            room: topology.gpus.iter().map(|gpu| gpu.memory).max().unwrap_or_default(),
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
        let (idle, busy): (Vec<_>, Vec<_>) = up.partition(|gpu| gpu.running.is_empty());
        let count = |gpus: usize| u32::try_from(gpus).unwrap_or(u32::MAX);
        known.gpus_up = count(idle.len() + busy.len());
        known.gpus_idle = count(idle.len());
        known.gpus_coming = count(coming);
        (known.queued, known.unseen) = (said.queued, 0);
        known.held.clear();
        let free_in =
            |gpu: &GpuSnapshot| said.work.assigned.get(gpu.index.0 as usize).copied().unwrap_or_default();
        let on_idle = idle.iter().map(|&gpu| (gpu, ModelResidency::OnIdleGpu));
        let on_busy = busy.iter().map(|&gpu| (gpu, ModelResidency::OnBusyGpu { free_in: free_in(gpu) }));
        for (gpu, here) in on_idle.chain(on_busy) {
            for model in &gpu.models {
                let held = known.held.entry(model.digest).or_insert(here);
                *held = here.min(*held);
            }
        }
        known.assigned = said.work.assigned.iter().sum();
        known.waiting = said.work.waiting;
        let free = |gpu: &&GpuSnapshot| Bytes(gpu.memory.get().saturating_sub(gpu.used.get()));
        known.room = idle.iter().chain(&busy).map(free).max().unwrap_or_default();
        self.loads.extend(said.loads.iter().map(|(digest, load)| (*digest, *load)));
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
        self.weights.insert(digest, request.weights);
        let mut measured = MeasuredLoads::default();
        for (digest, load) in &self.loads {
            measured.add(self.weights.get(digest).copied().unwrap_or_default(), *load);
        }
        let runs = self.runs.entry(function).or_default();
        let candidate = |&node: &usize| {
            let known = self.nodes.get(&node)?;
            let load = self.loads.get(&digest).copied();
            Some(WorkerCandidate {
                worker: node,
                gpus_up: known.gpus_up,
                gpus_idle: known.gpus_idle,
                gpus_coming: known.gpus_coming,
                queued: known.queued,
                unseen: known.unseen,
                run: runs.estimate(&known.machine),
                held: known.held.get(&digest).copied().unwrap_or(ModelResidency::InHost),
                assigned: known.assigned,
                waiting: known.waiting,
                load: load.unwrap_or_else(|| request.assumed_load(measured)),
                has_room: known.room >= request.memory,
                // A simulated request carries its inputs, so no node has to fetch any.
                missing: Bytes::ZERO,
            })
        };
        let chosen = router::choose(serving.iter().filter_map(candidate))?;
        self.nodes.get_mut(&chosen)?.unseen += 1;
        Some(chosen)
    }
}
