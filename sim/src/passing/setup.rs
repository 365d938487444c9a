//! The input of a simulation, and the placement of functions on GPUs.

use millrace_transfers::paths::{DataEdge, place};
use millrace_types::topology::Topology;
use millrace_types::{Bytes, GpuIndex, Timestamp};
use rand::seq::SliceRandom as _;

use super::error::Error;
use super::fabric::GpuSite;
use super::system::{Costs, Placing, System};
use super::workflow::ModelledWorkflow;
use crate::workload::{RequestArrival, random};

/// A workflow that the simulated cluster serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServedWorkflow {
    pub workflow: ModelledWorkflow,
    /// The number of instances of each function. Each instance has a GPU of its own.
    pub replicas: usize,
    /// Whether each replica is cut into two nodes, where the least data passes (§9.3).
    pub is_cut: bool,
}

/// The arrivals of requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArrivalProcess {
    /// Requests arrive at given times. [`RequestArrival::function`] is the index of the app.
    Open(Vec<RequestArrival>),
    /// A constant number of requests of the first app is under way, until all requests were made.
    Closed {
        /// The number of requests under way.
        outstanding: usize,
        /// The number of requests in all.
        total: usize,
    },
}

/// The input of a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct DataflowSetup {
    /// The GPUs and links of one node. All nodes are alike.
    pub topology: Topology,
    /// The number of nodes.
    pub nodes: usize,
    pub apps: Vec<ServedWorkflow>,
    /// The system that is simulated.
    pub system: System,
    pub costs: Costs,
    /// The computing time of functions, as a multiple of that on a V100.
    pub compute: f64,
    /// The most memory of a GPU that stored data may take (D26).
    pub store_cap: Bytes,
    /// The least and the greatest factor by which a request's sizes are multiplied (§3.2, challenge 3).
    pub sizes: (f64, f64),
    pub arrivals: ArrivalProcess,
    /// The seed of all random choices.
    pub seed: u64,
    /// Whether the use of every link is measured at every event, for tests.
    pub is_audited: bool,
}

impl DataflowSetup {
    /// Returns a setup of one node with one app, and defaults for the rest.
    #[must_use]
    pub fn new(
        topology: Topology,
        app: ServedWorkflow,
        system: System,
        arrivals: ArrivalProcess,
        seed: u64,
    ) -> Self {
        Self {
            topology,
            nodes: 1,
            apps: vec![app],
            system,
            costs: Costs::default(),
            compute: 1.0,
            store_cap: millrace_memory::elastic::STORE_CAP,
            sizes: (0.8, 1.2),
            arrivals,
            seed,
            is_audited: false,
        }
    }

    /// Returns the arrivals that depend on no earlier request: all requests of an open loop, and the first
    /// requests of a closed loop.
    pub(super) fn open(&self) -> Vec<RequestArrival> {
        match &self.arrivals {
            ArrivalProcess::Open(arrivals) => arrivals.clone(),
            ArrivalProcess::Closed { outstanding, total } => {
                vec![RequestArrival { at: Timestamp::ZERO, function: 0 }; (*outstanding).min(*total)]
            }
        }
    }

    /// Returns the GPU of each function, by app and replica.
    pub(super) fn sites(&self) -> Result<Vec<Vec<Vec<GpuSite>>>, Error> {
        let gpus = || self.topology.gpus.iter().map(|gpu| gpu.index).collect::<Vec<_>>();
        let mut free: Vec<Vec<GpuIndex>> = (0..self.nodes).map(|_| gpus()).collect();
        if self.system.placing == Placing::Blind {
            let mut rng = random(self.seed, 1);
            free.iter_mut().for_each(|free| free.shuffle(&mut rng));
        }
        let mut sites = Vec::new();
        let mut turn = 0;
        for app in &self.apps {
            let mut replicas = Vec::new();
            for _ in 0..app.replicas {
                let cut = if app.is_cut { cut(&app.workflow) } else { app.workflow.functions.len() };
                let first = turn % self.nodes;
                let second = (turn + 1) % self.nodes;
                let mut replica = self.part(&app.workflow, 0..cut, first, &mut free[first])?;
                let rest = cut..app.workflow.functions.len();
                replica.extend(self.part(&app.workflow, rest, second, &mut free[second])?);
                replicas.push(replica);
                turn += 1;
            }
            sites.push(replicas);
        }
        Ok(sites)
    }

    /// Places a range of a workflow's functions on the free GPUs of a node.
    fn part(
        &self,
        workflow: &ModelledWorkflow,
        functions: std::ops::Range<usize>,
        node: usize,
        free: &mut Vec<GpuIndex>,
    ) -> Result<Vec<GpuSite>, Error> {
        let count = functions.len();
        if count > free.len() {
            return Err(Error::NoRoom { functions: count, free: free.len() });
        }
        let gpus = match self.system.placing {
            Placing::Blind => free[..count].to_vec(),
            Placing::Mapa => {
                let inside =
                    |(a, b, _): &(usize, usize, Bytes)| functions.contains(a) && functions.contains(b);
                let edge = |(a, b, size): (usize, usize, Bytes)| {
                    let weight = u32::try_from(size.0 / 1_000_000).unwrap_or(u32::MAX);
                    DataEdge { a: a - functions.start, b: b - functions.start, weight }
                };
                let edges: Vec<_> = workflow.edges().filter(inside).map(edge).collect();
                place(&self.topology, count, &edges, free)?
            }
        };
        free.retain(|gpu| !gpus.contains(gpu));
        Ok(gpus.into_iter().map(|gpu| GpuSite { node, gpu }).collect())
    }
}

/// Returns the function at which a workflow is cut in two: where the least data passes, the first of equals.
fn cut(workflow: &ModelledWorkflow) -> usize {
    let across = |at: &usize| -> u64 {
        workflow.edges().filter(|(from, to, _)| from < at && to >= at).map(|(_, _, size)| size.0).sum()
    };
    (1..workflow.functions.len()).min_by_key(across).unwrap_or(1)
}
