//! The setup that the experiments share: the servers, the shapes of arrivals, and the assumptions.

use std::time::Duration;

use anyhow::Result;
use millrace_device::topology::TopologyDescription;
use millrace_sim::passing::{ArrivalProcess, DataflowSetup, ModelledWorkflow, ServedWorkflow, System};
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_types::topology::Topology;

use crate::effort::Effort;

/// The number of requests of a run.
const REQUESTS: usize = 400;
/// The load, as a share of INFless+'s capacity.
pub(super) const LOAD: f64 = 0.4;
/// The usual burst: the number of requests, and the time between two requests.
const BURST: (u32, Duration) = (8, Duration::from_millis(5));

/// A GPU server.
#[derive(Debug, Clone)]
pub(super) struct Server {
    pub(super) name: &'static str,
    pub(super) topology: Topology,
    /// The computing time of functions, as a multiple of that on a V100.
    pub(super) compute: f64,
}

impl Server {
    fn named(name: &'static str, preset: &str, compute: f64) -> Result<Self> {
        Ok(Self { name, topology: TopologyDescription::preset(preset)?.build(), compute })
    }

    pub(super) fn v100() -> Result<Self> {
        Self::named("8xV100", "dgx-v100", 1.0)
    }

    pub(super) fn a100() -> Result<Self> {
        Self::named("8xA100", "dgx-a100", 0.5)
    }

    pub(super) fn a10() -> Result<Self> {
        Self::named("4xA10", "a10x4", 1.0)
    }

    /// Returns a workflow with as many replicas as the server has GPUs for.
    pub(super) fn app(&self, workflow: &ModelledWorkflow) -> ServedWorkflow {
        let replicas = (self.topology.gpus.len() / workflow.functions.len()).max(1);
        ServedWorkflow { workflow: workflow.clone(), replicas, is_cut: false }
    }

    pub(super) fn setup(
        &self,
        workflow: &ModelledWorkflow,
        system: System,
        arrivals: ArrivalProcess,
        seed: u64,
    ) -> DataflowSetup {
        let setup = DataflowSetup::new(self.topology.clone(), self.app(workflow), system, arrivals, seed);
        DataflowSetup { compute: self.compute, ..setup }
    }
}

/// The shapes of arrivals (D32).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Shape {
    Sporadic,
    Periodic,
    Bursty,
}

impl Shape {
    pub(super) const ALL: [Self; 3] = [Self::Sporadic, Self::Periodic, Self::Bursty];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Sporadic => "sporadic",
            Self::Periodic => "periodic",
            Self::Bursty => "bursty",
        }
    }

    /// Returns the pattern of arrivals at a rate in requests a second.
    fn pattern(self, rate: f64) -> WorkloadPattern {
        let gap = Duration::from_secs_f64(1.0 / rate);
        match self {
            Self::Sporadic => WorkloadPattern::Sporadic { mean_gap: gap },
            Self::Periodic => WorkloadPattern::Periodic { period: gap, jitter: 0.1 },
            Self::Bursty => bursts(BURST.0, BURST.1, rate),
        }
    }
}

/// Returns bursts of `size` requests, `apart` from each other, at a rate in requests a second.
pub(super) fn bursts(size: u32, apart: Duration, rate: f64) -> WorkloadPattern {
    WorkloadPattern::Bursty { mean_gap: Duration::from_secs_f64(f64::from(size) / rate), size, apart }
}

pub(super) fn requests(effort: Effort) -> usize {
    if effort.short { 40 } else { REQUESTS }
}

/// Returns the arrivals of several apps, each at its rate.
pub(super) fn open(shape: Shape, rates: &[f64], seed: u64, effort: Effort) -> ArrivalProcess {
    let patterns: Vec<_> = rates.iter().map(|&rate| shape.pattern(rate)).collect();
    open_as(&patterns, rates, seed, effort)
}

/// Returns the arrivals of several apps, each with its pattern. The rates set the span for the number of
/// requests.
pub(super) fn open_as(
    patterns: &[WorkloadPattern],
    rates: &[f64],
    seed: u64,
    effort: Effort,
) -> ArrivalProcess {
    let span = requests(effort) as f64 / rates.iter().sum::<f64>();
    let arrivals = patterns::arrivals(patterns, Duration::from_secs_f64(span), seed);
    ArrivalProcess::Open(arrivals)
}

/// Returns a closed loop with enough requests under way to keep every function of every replica busy.
pub(super) fn closed(app: &ServedWorkflow, effort: Effort) -> ArrivalProcess {
    let functions = app.replicas * app.workflow.functions.len();
    ArrivalProcess::Closed { outstanding: 3 * functions, total: requests(effort) }
}

/// Returns the assumptions that the other experiments share with H18.
pub(super) fn as_h18() -> Vec<String> {
    vec![AS_H18.to_owned()]
}

const AS_H18: &str = "Systems, costs, sizes and arrivals are those of H18 unless stated otherwise.";

/// Returns the assumptions of all experiments of this module.
pub(super) fn assumed() -> Vec<String> {
    vec![
        "The simulation has flows instead of chunks: bytes move at rates that the cores compute at each event. Added are the time of a chunk for each further stage, and a new copy's wait for one batch (D08, D12, D13). PCIe shares come from `transfers::rates`, NVLink paths and placement from `transfers::paths`, stores and pools from `memory::elastic`, each with the options of the simulated system.".to_owned(),
        format!("The paper does not state sizes and times of inference. Ours are calibrated only on the share of data passing in INFless+ (F2.2): batches of 10 to 60 MB between functions, ±20% by request, and 2 to 10 ms of inference on a V100, half of that on an A100. Requests arrive at {:.0}% of INFless+'s capacity, the same for every system; bursts have {} requests {} ms apart; {REQUESTS} requests a run.", LOAD * 100.0, BURST.0, BURST.1.as_millis()),
        "Each function has a GPU of its own, and as many replicas as the server has GPUs for. An instance serves one request at a time, and is busy while it fetches inputs. INFless+, DeepPlan+, FaaSTube* and UCX place functions on GPUs at random, the other systems by MAPA's rule.".to_owned(),
        "INFless+, DeepPlan+ and FaaSTube* pin host memory for each copy (70 ms for 100 MB, §3.2): in §9.3 INFless+ and DeepPlan+ are equal on a server with one PCIe link, so they differ only in links. The paper allows two readings of pinning. *by link*: a thread for each link pins the part of the link, as each GPU has a daemon thread (§8). *whole*: one call pins all memory. Figures are for *by link*, which was chosen by the paper's results: with *whole* the number of links would hardly matter, and DeepPlan+ would save 8% of a copy, whereas in the paper a copy takes less than half of INFless+'s time.".to_owned(),
        "Without a pool, an output's memory in the store is allocated, mapped and released (§7.1). On another GPU, the output is copied into a transfer buffer that is mapped once (§8). A native allocation or release takes 1 ms (\"millisecond-level\"), an IPC operation 0.3 ms (GMLake's 45 ms divided by the 150 blocks of 300 MB), a remote call 0.3 ms and a call through a pipe 0.02 ms (both assumed).".to_owned(),
        "Some assumptions changed after the first run, to follow the text of the paper; no size, time or band changed. Without a pool only the store's memory is allocated (before: also the buffer that receives a copy). UCX places no functions (before: as MAPA). Two nodes pin at the same time (before: one after the other). The loads of H20, H22 and H23 also changed, because at the first loads no copies met, no objects migrated, and no pool grew.".to_owned(),
    ]
}
