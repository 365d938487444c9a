//! Which node a request goes to, as a controller's gateway has it: the pure router over what telemetry
//! said last, every 100 ms, and the rate it assumes of every link. Two things are simpler: a request
//! that was answered since counts as unseen until the next report, and one node that serves a function
//! is not asked whether it has a GPU.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_policy::router::{self, Candidate, HOST_RATE, Held, MachineType, Request, Runs};
use millrace_types::topology::Topology;
use millrace_types::{Bytes, Digest};
use millrace_worker::snapshot::{GpuHealth, GpuSnapshot, NodeSnapshot};

/// How often nodes say how they are.
pub const TELEMETRY_EVERY: Duration = Duration::from_millis(100);

/// What is known of a node.
#[derive(Debug, Clone)]
struct Known {
    machine: MachineType,
    gpus_up: u32,
    gpus_idle: u32,
    gpus_coming: u32,
    queued: u32,
    unseen: u32,
    on_idle: BTreeSet<Digest>,
    on_busy: BTreeSet<Digest>,
}

/// The nodes, and which of them serve which function.
#[derive(Debug, Default)]
pub struct Router {
    nodes: BTreeMap<usize, Known>,
    /// How long each function's runs were seen to take.
    runs: BTreeMap<u32, Runs>,
    serving: BTreeMap<u32, Vec<usize>>,
}

impl Router {
    /// Takes a node in: nothing is known of it but its GPUs.
    pub fn join(&mut self, node: usize, topology: &Topology) {
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

    /// A node serves a function from now on.
    pub fn serves(&mut self, node: usize, function: u32) {
        self.serving.entry(function).or_default().push(node);
    }

    /// Takes in what a node said of itself.
    pub fn hear(&mut self, node: usize, said: &NodeSnapshot) {
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

    /// A run of a function took so long on a node.
    pub fn ran(&mut self, node: usize, function: u32, run: Duration) {
        if let Some(known) = self.nodes.get(&node) {
            self.runs.entry(function).or_default().took(&known.machine, run);
        }
    }

    /// The node for a request. `None` where no node with a GPU serves its function.
    pub fn choose(&mut self, function: u32, digest: Digest, request: &Request) -> Option<usize> {
        let serving = self.serving.get(&function)?;
        // One node that serves is the node, whatever it said.
        if let [only] = serving[..] {
            return Some(only);
        }
        let runs = self.runs.entry(function).or_default();
        let candidate = |&node: &usize| {
            let known = self.nodes.get(&node)?;
            let held = match () {
                () if known.on_idle.contains(&digest) => Held::OnIdleGpu,
                () if known.on_busy.contains(&digest) => Held::OnBusyGpu,
                () => Held::InHost,
            };
            Some(Candidate {
                worker: node,
                gpus_up: known.gpus_up,
                gpus_idle: known.gpus_idle,
                gpus_coming: known.gpus_coming,
                queued: known.queued,
                unseen: known.unseen,
                run: runs.estimate(&known.machine),
                held,
                host_rate: HOST_RATE,
                // Requests bring their inputs along.
                missing: Bytes::ZERO,
            })
        };
        let chosen = router::choose(serving.iter().filter_map(candidate), request)?;
        self.nodes.get_mut(&chosen)?.unseen += 1;
        Some(chosen)
    }
}
