//! The `FaaSTube` paper's experiments, on the simulation of flows (`millrace_sim::passing`): a server of
//! eight V100, a server of eight A100, four servers of eight V100, and a server of four A10.
//!
//! | module | experiments |
//! |---|---|
//! | [`overall`] | the text's shares of data passing, and H18: against the three baselines |
//! | [`parts`] | H19 to H21 and the text's interference: the gain of each part |
//! | [`memory`] | H22, H23: the elastic store and its pool |
//! | [`scale`] | H24 to H26: four nodes, no NVLink, and the topology |

mod memory;
mod overall;
mod parts;
mod scale;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_device::topology::TopologyDescription;
use millrace_sim::passing::{
    ArrivalProcess, DataflowOutcome, DataflowSetup, ModelledWorkflow, ServedWorkflow, System, run,
};
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_types::topology::Topology;

use crate::figures::{PaperFigure, PolicyOrder, SeedValues, Unit};
use crate::{Effort, Experiment};

pub const EXPERIMENTS: [Experiment; 11] = [
    Experiment { id: "F2.2", title: "FaaSTube: the share of data passing in INFless+", run: overall::shares },
    Experiment {
        id: "F3.2",
        title: "FaaSTube: the loads of driving beside video, on DeepPlan+",
        run: parts::interference,
    },
    Experiment { id: "H18", title: "FaaSTube against its baselines", run: overall::overall },
    Experiment { id: "H19", title: "FaaSTube: its parts, one by one", run: parts::ablation },
    Experiment { id: "H20", title: "FaaSTube: PCIe scheduling", run: parts::isolation },
    Experiment { id: "H21", title: "FaaSTube: NVLink scheduling", run: parts::nvlink },
    Experiment { id: "H22", title: "FaaSTube: the elastic store's parts", run: memory::store },
    Experiment { id: "H23", title: "FaaSTube: pools", run: memory::pools },
    Experiment { id: "H24", title: "FaaSTube: four nodes", run: scale::nodes },
    Experiment { id: "H25", title: "FaaSTube: four A10 without NVLink", run: scale::without_nvlink },
    Experiment { id: "H26", title: "FaaSTube: the topology of DGX-V100", run: scale::topology },
];

/// The extent of a band beyond the paper's range, as a share of a latency.
const SLACK: f64 = 0.05;
/// The number of requests of a run.
const REQUESTS: usize = 400;
/// The load, as a share of INFless+'s capacity.
const LOAD: f64 = 0.4;
/// The usual burst: the number of requests, and the time between two requests.
const BURST: (u32, Duration) = (8, Duration::from_millis(5));

/// A GPU server.
#[derive(Debug, Clone)]
struct Server {
    name: &'static str,
    topology: Topology,
    /// The computing time of functions, as a multiple of that on a V100.
    compute: f64,
}

impl Server {
    fn named(name: &'static str, preset: &str, compute: f64) -> Result<Self> {
        Ok(Self { name, topology: TopologyDescription::preset(preset)?.build(), compute })
    }

    fn v100() -> Result<Self> {
        Self::named("8xV100", "dgx-v100", 1.0)
    }

    fn a100() -> Result<Self> {
        Self::named("8xA100", "dgx-a100", 0.5)
    }

    fn a10() -> Result<Self> {
        Self::named("4xA10", "a10x4", 1.0)
    }

    /// Returns a workflow with as many replicas as the server has GPUs for.
    fn app(&self, workflow: &ModelledWorkflow) -> ServedWorkflow {
        let replicas = (self.topology.gpus.len() / workflow.functions.len()).max(1);
        ServedWorkflow { workflow: workflow.clone(), replicas, is_cut: false }
    }

    fn setup(
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
enum Shape {
    Sporadic,
    Periodic,
    Bursty,
}

impl Shape {
    const ALL: [Self; 3] = [Self::Sporadic, Self::Periodic, Self::Bursty];

    fn name(self) -> &'static str {
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
fn bursts(size: u32, apart: Duration, rate: f64) -> WorkloadPattern {
    WorkloadPattern::Bursty { mean_gap: Duration::from_secs_f64(f64::from(size) / rate), size, apart }
}

fn requests(effort: Effort) -> usize {
    if effort.short { 40 } else { REQUESTS }
}

/// Returns the arrivals of several apps, each at its rate.
fn open(shape: Shape, rates: &[f64], seed: u64, effort: Effort) -> ArrivalProcess {
    let patterns: Vec<_> = rates.iter().map(|&rate| shape.pattern(rate)).collect();
    open_as(&patterns, rates, seed, effort)
}

/// Returns the arrivals of several apps, each with its pattern. The rates set the span for the number of
/// requests.
fn open_as(patterns: &[WorkloadPattern], rates: &[f64], seed: u64, effort: Effort) -> ArrivalProcess {
    let span = requests(effort) as f64 / rates.iter().sum::<f64>();
    let arrivals = patterns::arrivals(patterns, Duration::from_secs_f64(span), seed);
    ArrivalProcess::Open(arrivals)
}

/// Returns a closed loop with enough requests under way to keep every function of every replica busy.
fn closed(app: &ServedWorkflow, effort: Effort) -> ArrivalProcess {
    let functions = app.replicas * app.workflow.functions.len();
    ArrivalProcess::Closed { outstanding: 3 * functions, total: requests(effort) }
}

/// Runs a setup with each seed from 1, in parallel.
fn outcomes(effort: Effort, setup: impl Fn(u64) -> DataflowSetup + Sync) -> Result<Vec<DataflowOutcome>> {
    let next = AtomicUsize::new(0);
    let seeds = usize::try_from(effort.seeds)?;
    let results = Mutex::new(BTreeMap::new());
    let work = || {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            if place >= seeds {
                return;
            }
            let result = run(&setup(place as u64 + 1));
            results.lock().unwrap_or_else(PoisonError::into_inner).insert(place, result);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(seeds);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_values().map(|result| result.context("a simulation failed")).collect()
}

fn spread(outcomes: &[DataflowOutcome], of: impl Fn(&DataflowOutcome) -> f64) -> SeedValues {
    SeedValues(outcomes.iter().map(of).collect())
}

/// Returns the capacity of a system for a workflow, in requests a second.
fn throughput(
    server: &Server,
    workflow: &ModelledWorkflow,
    system: System,
    effort: Effort,
) -> Result<SeedValues> {
    let arrivals = closed(&server.app(workflow), effort);
    let runs = outcomes(effort, |seed| server.setup(workflow, system, arrivals.clone(), seed))?;
    Ok(spread(&runs, DataflowOutcome::throughput))
}

/// Returns the capacity of a system for a workflow with the first seed, in requests a second.
fn most(server: &Server, workflow: &ModelledWorkflow, system: System) -> Result<f64> {
    Ok(throughput(server, workflow, system, Effort { seeds: 1, short: false })?.mean())
}

/// Returns the rate of requests for a workflow on a server, the same for every system.
fn load(server: &Server, workflow: &ModelledWorkflow) -> Result<f64> {
    Ok(most(server, workflow, System::INFLESS)? * LOAD)
}

fn p99_latency(outcome: &DataflowOutcome) -> f64 {
    outcome.p99(0, |record| record.latency().as_secs_f64())
}

fn p99_passing(outcome: &DataflowOutcome) -> f64 {
    outcome.p99(0, |record| record.split.passing())
}

fn p99_split(outcome: &DataflowOutcome) -> f64 {
    outcome.p99(0, |record| record.split.total())
}

/// Returns the least and the greatest value of several spreads, seed by seed.
fn range(spreads: &[SeedValues]) -> (SeedValues, SeedValues) {
    let seeds = spreads.iter().map(|spread| spread.0.len()).min().unwrap_or(0);
    let of = |seed: usize, pick: fn(f64, f64) -> f64, from: f64| {
        spreads.iter().map(|spread| spread.0[seed]).fold(from, pick)
    };
    let lowest = (0..seeds).map(|seed| of(seed, f64::min, f64::MAX)).collect();
    let highest = (0..seeds).map(|seed| of(seed, f64::max, f64::MIN)).collect();
    (SeedValues(lowest), SeedValues(highest))
}

/// Returns the mean of several spreads, seed by seed.
fn average(spreads: &[SeedValues]) -> SeedValues {
    let seeds = spreads.iter().map(|spread| spread.0.len()).min().unwrap_or(0);
    let mean = |seed: usize| spreads.iter().map(|spread| spread.0[seed]).sum::<f64>() / spreads.len() as f64;
    SeedValues((0..seeds).map(mean).collect())
}

fn figure(
    what: String,
    paper: &str,
    (ours, unit): (SeedValues, Unit),
    band: (f64, f64),
    cause: Option<&'static str>,
) -> PaperFigure {
    PaperFigure { what, paper: paper.to_owned(), ours, unit, band: band.0..=band.1, cause }
}

fn order(what: String, by: SeedValues, cause: Option<&'static str>) -> PolicyOrder {
    PolicyOrder { what, by, cause }
}

fn ms(seconds: &SeedValues) -> String {
    Unit::Millis.show(seconds.mean() * 1e3)
}

fn header<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(String::from).to_vec()
}

/// Returns the assumptions that the other experiments share with H18.
fn as_h18() -> Vec<String> {
    vec![AS_H18.to_owned()]
}

const AS_H18: &str = "Systems, costs, sizes and arrivals are those of H18 unless stated otherwise.";

/// Returns the assumptions of all experiments of this module.
fn assumed() -> Vec<String> {
    vec![
        "The simulation has flows instead of chunks: bytes move at rates that the cores compute at each event. Added are the time of a chunk for each further stage, and a new copy's wait for one batch (D08, D12, D13). PCIe shares come from `transfers::rates`, NVLink paths and placement from `transfers::paths`, stores and pools from `memory::elastic`, each with the options of the simulated system.".to_owned(),
        format!("The paper does not state sizes and times of inference. Ours are calibrated only on the share of data passing in INFless+ (F2.2): batches of 10 to 60 MB between functions, ±20% by request, and 2 to 10 ms of inference on a V100, half of that on an A100. Requests arrive at {:.0}% of INFless+'s capacity, the same for every system; bursts have {} requests {} ms apart; {REQUESTS} requests a run.", LOAD * 100.0, BURST.0, BURST.1.as_millis()),
        "Each function has a GPU of its own, and as many replicas as the server has GPUs for. An instance serves one request at a time, and is busy while it fetches inputs. INFless+, DeepPlan+, FaaSTube* and UCX place functions on GPUs at random, the other systems by MAPA's rule.".to_owned(),
        "INFless+, DeepPlan+ and FaaSTube* pin host memory for each copy (70 ms for 100 MB, §3.2): in §9.3 INFless+ and DeepPlan+ are equal on a server with one PCIe link, so they differ only in links. The paper allows two readings of pinning. *by link*: a thread for each link pins the part of the link, as each GPU has a daemon thread (§8). *whole*: one call pins all memory. Figures are for *by link*, which was chosen by the paper's results: with *whole* the number of links would hardly matter, and DeepPlan+ would save 8% of a copy, whereas in the paper a copy takes less than half of INFless+'s time.".to_owned(),
        "Without a pool, an output's memory in the store is allocated, mapped and released (§7.1). On another GPU, the output is copied into a transfer buffer that is mapped once (§8). A native allocation or release takes 1 ms (\"millisecond-level\"), an IPC operation 0.3 ms (GMLake's 45 ms divided by the 150 blocks of 300 MB), a remote call 0.3 ms and a call through a pipe 0.02 ms (both assumed).".to_owned(),
        "Some assumptions changed after the first run, to follow the text of the paper; no size, time or band changed. Without a pool only the store's memory is allocated (before: also the buffer that receives a copy). UCX places no functions (before: as MAPA). Two nodes pin at the same time (before: one after the other). The loads of H20, H22 and H23 also changed, because at the first loads no copies met, no objects migrated, and no pool grew.".to_owned(),
    ]
}
