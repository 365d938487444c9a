//! Which node a request goes to, as a gateway has it: the pure router over what telemetry said
//! last, every 100 ms.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_policy::router::{self, Candidate, Held, Request};
use millrace_types::{BytesPerSec, Digest};
use millrace_worker::snapshot::{GpuHealth, NodeSnapshot};

/// How often nodes say how they are.
pub const TELEMETRY_EVERY: Duration = Duration::from_millis(100);

/// What is known of a node.
#[derive(Debug, Clone)]
struct Known {
    gpus_up: u32,
    gpus_idle: u32,
    queued: u32,
    unseen: u32,
    on_idle: BTreeSet<Digest>,
    on_busy: BTreeSet<Digest>,
    host_rate: BytesPerSec,
}

/// The nodes, and which of them serve which function.
#[derive(Debug, Default)]
pub struct Router {
    nodes: BTreeMap<usize, Known>,
    serving: BTreeMap<u32, Vec<usize>>,
}

impl Router {
    /// Takes a node in: nothing is known of it but how fast its models come.
    pub fn join(&mut self, node: usize, gpus: u32, host_rate: BytesPerSec) {
        let known = Known {
            gpus_up: gpus,
            gpus_idle: gpus,
            queued: 0,
            unseen: 0,
            on_idle: BTreeSet::new(),
            on_busy: BTreeSet::new(),
            host_rate,
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
        let up = said.gpus.iter().filter(|gpu| gpu.health == GpuHealth::Up);
        let (idle, busy): (Vec<_>, Vec<_>) = up.partition(|gpu| gpu.running.is_none());
        let held = |gpus: &[&millrace_worker::snapshot::GpuSnapshot]| {
            gpus.iter().flat_map(|gpu| gpu.models.iter().map(|model| model.digest)).collect()
        };
        let count = |gpus: usize| u32::try_from(gpus).unwrap_or(u32::MAX);
        known.gpus_up = count(idle.len() + busy.len());
        known.gpus_idle = count(idle.len());
        (known.queued, known.unseen) = (said.queued, 0);
        (known.on_idle, known.on_busy) = (held(&idle), held(&busy));
    }

    /// The node for a request. `None` where no node with a GPU serves its function.
    pub fn choose(&mut self, function: u32, digest: Digest, request: &Request) -> Option<usize> {
        let serving = self.serving.get(&function)?;
        // One node that serves is the node, whatever it said.
        if let [only] = serving[..] {
            return Some(only);
        }
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
                queued: known.queued,
                unseen: known.unseen,
                held,
                host_rate: known.host_rate,
            })
        };
        let chosen = router::choose(serving.iter().filter_map(candidate), request)?;
        self.nodes.get_mut(&chosen)?.unseen += 1;
        Some(chosen)
    }
}
