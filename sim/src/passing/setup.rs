//! What is simulated, and where its functions run.

use millrace_policy::paths::{Edge, place};
use millrace_types::topology::Topology;
use millrace_types::{Bytes, GpuIndex, Timestamp};
use rand::seq::SliceRandom as _;

use super::Error;
use super::fabric::Site;
use super::system::{Costs, Placing, System};
use super::workflow::Workflow;
use crate::workload::{Arrival, random};

/// A workflow that is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct App {
    /// Which.
    pub workflow: Workflow,
    /// How many instances there are of each of its functions, each with a GPU of its own.
    pub replicas: usize,
    /// Whether each replica is on two nodes: cut where the least passes (§9.3).
    pub is_cut: bool,
}

/// Who asks when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrivals {
    /// At these times; [`Arrival::function`] is the app's place.
    Open(Vec<Arrival>),
    /// So many requests of the first app are under way at any time, until all were made.
    Closed {
        /// How many at a time.
        outstanding: usize,
        /// How many in all.
        total: usize,
    },
}

/// A simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct Setup {
    /// One node's GPUs and links.
    pub topology: Topology,
    /// How many such nodes.
    pub nodes: usize,
    /// What is served.
    pub apps: Vec<App>,
    /// By which system.
    pub system: System,
    /// What things cost.
    pub costs: Costs,
    /// How long functions compute, by what a V100 takes.
    pub compute: f64,
    /// The most of a GPU that data may have (D26).
    pub store_cap: Bytes,
    /// What requests' sizes are multiplied with, at least and at most (§3.2, challenge 3).
    pub sizes: (f64, f64),
    /// Who asks when.
    pub arrivals: Arrivals,
    /// For what is random.
    pub seed: u64,
    /// Whether every link's use is looked at, at every event: for tests.
    pub is_audited: bool,
}

impl Setup {
    /// One node with one app, and every default.
    #[must_use]
    pub fn new(topology: Topology, app: App, system: System, arrivals: Arrivals, seed: u64) -> Self {
        Self {
            topology,
            nodes: 1,
            apps: vec![app],
            system,
            costs: Costs::default(),
            compute: 1.0,
            store_cap: millrace_policy::elastic::STORE_CAP,
            sizes: (0.8, 1.2),
            arrivals,
            seed,
            is_audited: false,
        }
    }

    /// The requests that come by themselves.
    pub(super) fn open(&self) -> Vec<Arrival> {
        match &self.arrivals {
            Arrivals::Open(arrivals) => arrivals.clone(),
            Arrivals::Closed { outstanding, total } => {
                vec![Arrival { at: Timestamp::ZERO, function: 0 }; (*outstanding).min(*total)]
            }
        }
    }

    /// By app and replica: where each function runs.
    pub(super) fn sites(&self) -> Result<Vec<Vec<Vec<Site>>>, Error> {
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
                let (first, second) = (turn % self.nodes, (turn + 1) % self.nodes);
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

    /// Where some of a workflow's functions run on a node.
    fn part(
        &self,
        workflow: &Workflow,
        functions: std::ops::Range<usize>,
        node: usize,
        free: &mut Vec<GpuIndex>,
    ) -> Result<Vec<Site>, Error> {
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
                    Edge { a: a - functions.start, b: b - functions.start, weight }
                };
                let edges: Vec<_> = workflow.edges().filter(inside).map(edge).collect();
                place(&self.topology, count, &edges, free)?
            }
        };
        free.retain(|gpu| !gpus.contains(gpu));
        Ok(gpus.into_iter().map(|gpu| Site { node, gpu }).collect())
    }
}

/// Where a workflow is cut in two: at its least traffic, the first of equals.
fn cut(workflow: &Workflow) -> usize {
    let across = |at: &usize| -> u64 {
        workflow.edges().filter(|(from, to, _)| from < at && to >= at).map(|(_, _, size)| size.0).sum()
    };
    (1..workflow.functions.len()).min_by_key(across).unwrap_or(1)
}
