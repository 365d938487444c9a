//! The setup that the experiments share: the node of four V100, the compared systems, the published
//! functions and the rates of requests, and the assumptions.

use std::time::Duration;

use anyhow::Result;
use millrace_memory::eviction::Eviction;
use millrace_scheduling::dispatch::{PolicyConfig, TorporConfig, TorporGpuChoice, TorporOrder as QueueOrder};
use millrace_sim::models::{self, ModelFigures, TORPOR_PCIE};
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
use millrace_sim::workload::{MINUTE, minutes, rates};
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{BytesPerSec, GpuIndex, Slo};

use crate::effort::Effort;
use crate::lalb::policy;

pub(super) use millrace_sim::models::TORPOR_GPU_MEMORY as GPU_MEMORY;

/// The rate of a PCIe switch's uplink, at which two simultaneous swaps of Bert-qa last as long as in table 3.
const UPLINK: BytesPerSec = BytesPerSec(11_650_000_000);
/// The share of a function's requests that must be in time.
pub(crate) const PERCENTILE: f64 = 0.98;

/// Returns the first `gpus` of the four GPUs of table 4's machine.
pub(crate) fn v100(gpus: u32) -> Topology {
    let gpu = |index: u32| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "V100".to_owned(),
        memory: GPU_MEMORY,
        host_path: vec![LinkId(index), LinkId(gpus + index / 2)],
    };
    let link = |kind, rate| TopologyLink { kind, rate };
    let own = (0..gpus).map(|_| link(LinkKind::Pcie, TORPOR_PCIE));
    let uplinks = (0..gpus.div_ceil(2)).map(|_| link(LinkKind::PcieUplink, UPLINK));
    // The pairs are those of the artifact (T22).
    let pairs = [(0, 3, 48), (1, 2, 48), (2, 3, 48), (0, 1, 24), (0, 2, 24), (1, 3, 24)];
    let nvlinks = pairs
        .into_iter()
        .filter(|&(a, b, _)| a < gpus && b < gpus)
        .map(|(a, b, gb)| link(LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) }, BytesPerSec::gb(gb)));
    Topology {
        name: "v100".to_owned(),
        gpus: (0..gpus).map(gpu).collect(),
        links: own.chain(uplinks).chain(nvlinks).collect(),
    }
}

/// A compared system.
#[derive(Debug, Clone)]
pub struct ComparedSystem {
    pub(super) name: &'static str,
    pub(super) dispatch: PolicyConfig,
    pub(super) eviction: Eviction,
    /// The time of allocating memory for each of the eight models in a swap, besides the copy. Empty if
    /// allocation takes no time.
    pub(super) allocation: Vec<Duration>,
}

impl ComparedSystem {
    /// Returns a system that needs no time to allocate.
    #[must_use]
    pub fn new(name: &'static str, dispatch: PolicyConfig, eviction: Eviction) -> Self {
        Self { name, dispatch, eviction, allocation: Vec::new() }
    }

    pub(super) fn node(&self, gpus: u32) -> SimulatedNode {
        SimulatedNode { eviction: self.eviction, ..SimulatedNode::new(v100(gpus), self.dispatch) }
    }
}

pub(super) fn systems() -> Result<Vec<ComparedSystem>> {
    let torpor = TorporConfig::default();
    let by_age = TorporConfig { order: QueueOrder::Arrival, ..torpor };
    let at_random = TorporConfig { choice: TorporGpuChoice::Random, ..torpor };
    let system = |name, config, eviction| ComparedSystem::new(name, PolicyConfig::Torpor(config), eviction);
    Ok(vec![
        system("torpor", torpor, Eviction::Torpor),
        system("torpor-fifo", by_age, Eviction::Torpor),
        system("torpor-random", at_random, Eviction::Torpor),
        system("torpor-lru", torpor, Eviction::Lru),
        named("unified", Eviction::Torpor)?,
    ])
}

/// Returns the paper's objective of a model: 80 ms, and 200 ms for Bert-qa.
pub(super) fn slo(model: &ModelFigures) -> Slo {
    Slo { deadline: models::torpor_deadline(model), percentile: PERCENTILE }
}

pub(super) fn minutes_of(effort: Effort) -> usize {
    if effort.short { 1 } else { 15 }
}

/// Returns a node of `gpus` GPUs, and `functions` functions over the eight models in turn, at the rates of
/// the paper's artifact.
#[must_use]
pub fn mixed(
    system: &ComparedSystem,
    gpus: u32,
    functions: usize,
    seed: u64,
    effort: Effort,
) -> ClusterScenario {
    let table = models::torpor();
    let model = |place: usize| {
        let kind = place % table.len();
        let start = system.allocation.get(kind).copied().unwrap_or_default();
        ModelFigures { start, ..table[kind].clone() }
    };
    let published = (0..functions).map(model).map(|model| {
        let slo = slo(&model);
        SimulatedFunction::new(model, Some(slo))
    });
    let counts = counts(functions, minutes_of(effort), seed);
    at_counts(vec![system.node(gpus)], published.collect(), &counts, seed)
}

/// Returns the numbers of requests by minute at the artifact's rates. The seed sets the first function of the
/// artifact.
pub(super) fn counts(functions: usize, minutes: usize, seed: u64) -> Vec<Vec<u32>> {
    let first = usize::try_from(seed * 31).unwrap_or(0);
    rates::by_minute(&rates::torpor(), functions, minutes, first)
}

/// Returns a scenario with these numbers of requests by minute. Every function is warmed up, and clients
/// wait for one minute.
pub(super) fn at_counts(
    nodes: Vec<SimulatedNode>,
    published: Vec<SimulatedFunction>,
    counts: &[Vec<u32>],
    seed: u64,
) -> ClusterScenario {
    let arrivals = minutes::arrivals(counts, seed);
    ClusterScenario {
        timeout: MINUTE,
        warmed: true,
        ..ClusterScenario::new(nodes, published, arrivals, seed)
    }
}

pub(crate) fn assumed() -> Vec<String> {
    [
        "Four V100 with 25 of 32 GB for models; PCIe at 10 GB/s, each switch's uplink at 11.65 GB/s, NVLink at 48 and 24 GB/s between the artifact's pairs. At these rates a single swap lasts as long as in table 4, and two swaps of Bert-qa at once as long as in table 3.",
        "A model occupies the memory of its published weights (single precision). Activations of one run at a time are in the remaining 7 GB. Every run lasts as long as in table 4 with GPU remoting.",
        "Rates are those of the artifact's 203 functions over 30 minutes, in turn, from a function that the seed sets. Their means are 5 to 15 a minute, although §7.3 states 5 to 30. Requests arrive at random times of their minute. Every function is requested once before; clients wait for 60 s.",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Returns the system with the dispatch policy of this name.
///
/// # Errors
/// Returns an error if no policy has the name.
pub fn named(name: &'static str, eviction: Eviction) -> Result<ComparedSystem> {
    Ok(ComparedSystem::new(name, policy(name)?, eviction))
}
