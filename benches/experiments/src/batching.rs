//! The gain of dynamic batching, which follows Triton's: throughput in overload, and the requests in time by
//! load. The papers profile batches (L15), but do not form batches.

use std::time::Duration;

use anyhow::Result;
use millrace_memory::eviction::Eviction;
use millrace_sim::outcome::percentile;
use millrace_sim::report::format_percent;
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
use millrace_sim::workload::MINUTE;
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_sim::{SimulationOutcome, models, run_each};
use millrace_types::{BatchingOptions, SchedulingOptions, Slo};

use crate::effort::Effort;
use crate::experiment::Experiment;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;
use crate::torpor::v100;
use crate::versus::Quantity;

pub const EXPERIMENTS: [Experiment; 1] =
    [Experiment { id: "BATCHING", title: "Throughput and latency of batched requests", run: batching }];

const FUNCTIONS: usize = 8;
const GPUS: u32 = 2;
const POLICIES: [&str; 2] = ["fifo", "unified"];
/// The time that each further request adds to a run, in percent of a single run.
const BY_MEMBER: [u32; 3] = [10, 25, 50];
const SIZES: [u32; 2] = [8, 32];
/// The load of the throughput experiment, in percent of the capacity with single runs. No size of batch can
/// serve this load.
const OVERLOAD: u32 = 1000;
const LOADS: [u32; 5] = [60, 90, 150, 200, 250];
/// The cause of a gain that is up to 2% higher than the ideal gain.
const OWN_MICROSECOND: &str = "in virtual time each executor reports only at its own microsecond of every 256 (`millrace_worker::clock`): a single run of 9 ms takes 9.216 ms, and a run of eight requests 15.36 ms instead of 15.3 ms";
const DEADLINE: Duration = Duration::from_millis(100);

/// The batching of an experiment.
#[derive(Debug, Clone, Copy)]
struct Mode {
    size: Option<u32>,
    by_member: u32,
}

impl Mode {
    const ALONE: Self = Self { size: None, by_member: 100 };

    /// Returns the throughput of full batches, as a multiple of the throughput of single runs.
    fn ideal(self) -> f64 {
        let size = f64::from(self.size.unwrap_or(1));
        size / (1.0 + (size - 1.0) * f64::from(self.by_member) / 100.0)
    }

    fn name(self) -> String {
        self.size.map_or_else(|| "alone".to_owned(), |size| format!("up to {size}"))
    }
}

fn scenario(
    policy: &str,
    mode: Mode,
    load: u32,
    slo: bool,
    seed: u64,
    effort: Effort,
) -> Result<ClusterScenario> {
    let model = models::torpor().swap_remove(4);
    let rate = f64::from(GPUS) / model.run.as_secs_f64() * f64::from(load) / 100.0 / FUNCTIONS as f64;
    let span = if effort.short { MINUTE / 60 } else { MINUTE / 4 };
    let pattern = WorkloadPattern::Sporadic { mean_gap: Duration::from_secs_f64(1.0 / rate) };
    let arrivals = patterns::arrivals(&[pattern; FUNCTIONS], span, seed);
    let batching = mode.size.map(|max_size| BatchingOptions { max_size, max_wait: Duration::ZERO });
    let function = SimulatedFunction {
        by_member: model.run * mode.by_member / 100,
        serving: SchedulingOptions { batching, ..SchedulingOptions::default() },
        ..SimulatedFunction::new(model, slo.then_some(Slo { deadline: DEADLINE, percentile: 0.98 }))
    };
    let functions = vec![function; FUNCTIONS];
    let node = SimulatedNode {
        eviction: Eviction::Torpor,
        ..SimulatedNode::new(v100(GPUS), crate::lalb::policy(policy)?)
    };
    Ok(ClusterScenario {
        timeout: MINUTE * 10,
        warmed: true,
        ..ClusterScenario::new(vec![node], functions, arrivals, seed)
    })
}

/// The results of one setup with every seed.
#[derive(Debug, Default)]
struct BatchingResult {
    per_second: SeedValues,
    in_time: SeedValues,
    p99_ms: SeedValues,
    /// The mean number of requests in a run.
    members: SeedValues,
    /// The error of the regression of run times over batch sizes, in percent, of nodes with at least three
    /// sizes (L15).
    held_out: Vec<f64>,
}

fn measure(policy: &str, mode: Mode, load: u32, slo: bool, effort: Effort) -> Result<BatchingResult> {
    let setups = effort.each_seed().map(|seed| scenario(policy, mode, load, slo, seed, effort));
    let setups = setups.collect::<Result<Vec<_>>>()?;
    let each = run_each(&setups, |_, outcome| {
        let latencies = outcome.latencies_of(|_| true);
        let in_time = latencies.iter().filter(|latency| **latency <= DEADLINE).count();
        (
            latencies.len() as f64 / outcome.span.as_secs_f64(),
            in_time as f64 / outcome.records.len().max(1) as f64,
            percentile(&latencies, 99.0).as_secs_f64() * 1e3,
            members(&outcome),
            outcome.nodes.iter().find_map(|node| node.dispatch.held_out),
        )
    })?;
    let mut measured = BatchingResult::default();
    for (per_second, in_time, p99_ms, members, held_out) in each {
        measured.per_second.0.push(per_second);
        measured.in_time.0.push(in_time);
        measured.p99_ms.0.push(p99_ms);
        measured.members.0.push(members);
        measured.held_out.extend(held_out);
    }
    Ok(measured)
}

/// Returns the mean number of requests in a run.
fn members(outcome: &SimulationOutcome) -> f64 {
    let batches = outcome.nodes.iter().map(|node| node.batches);
    let (batches, together) =
        batches.fold((0, 0), |(all, requests), it| (all + it.batches, requests + it.requests));
    let all = outcome.records.len() as u64;
    all as f64 / (all.saturating_sub(together) + batches).max(1) as f64
}

fn batching(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport::default();
    report.assumed.push(format!(
        "{FUNCTIONS} functions of ResNet-50 (9 ms), which stay on {GPUS} V100. Requests of one row arrive at random times for 15 s. The papers do not state the time of a batch: here each further request of a run adds 10%, 25% or 50% of the time of a single run. At first the nodes know only the time of one row, and learn the times of larger batches. *Overload* is ten times the capacity with single runs, without an objective, and clients wait for every answer. *In time* means within {DEADLINE:?}, which is the functions' objective. No request waits for others to join its batch (`maxWait` 0)."
    ));
    throughput(effort, &mut report)?;
    in_time(effort, &mut report)?;
    Ok(report)
}

fn throughput(effort: Effort, report: &mut ExperimentReport) -> Result<()> {
    let (kinds, sizes) =
        if effort.short { (&BY_MEMBER[..1], &SIZES[..1]) } else { (&BY_MEMBER[..], &SIZES[..]) };
    let mut rows = Vec::new();
    for policy in POLICIES {
        let alone = measure(policy, Mode::ALONE, OVERLOAD, false, effort)?.per_second;
        for &by_member in kinds {
            for &size in sizes {
                let mode = Mode { size: Some(size), by_member };
                let it = measure(policy, mode, OVERLOAD, false, effort)?;
                let by = SeedValues(
                    it.per_second.0.iter().zip(&alone.0).map(|(ours, alone)| ours / alone).collect(),
                );
                let held_out = SeedValues(it.held_out);
                rows.push(vec![
                    policy.to_owned(),
                    format!("{by_member}%"),
                    mode.name(),
                    format!("{:.0}", alone.mean()),
                    format!("{:.0}", it.per_second.mean()),
                    format!("{} ± {}", Unit::Times.show(by.mean()), Unit::Times.show(by.half_interval())),
                    Unit::Times.show(mode.ideal()),
                    format!("{:.1}", it.members.mean()),
                    if held_out.0.is_empty() { "-".to_owned() } else { format!("{:.1}%", held_out.mean()) },
                ]);
                report.figures.push(Figure {
                    what: format!(
                        "{policy}, {by_member}% for each further request, {}: throughput relative to single runs",
                        mode.name()
                    ),
                    claim: Claim::goal(
                        format!("{} (full batches)", Unit::Times.show(mode.ideal())),
                        Bound::About(mode.ideal()),
                    ),
                    ours: by.clone(),
                    unit: Unit::Times,
                    cause: (by.mean() > mode.ideal()).then_some(OWN_MICROSECOND),
                });
            }
        }
    }
    let header = [
        "policy",
        "each further request adds",
        "batches",
        "single runs, requests/s",
        "batched, requests/s",
        "ratio",
        "ratio of full batches",
        "requests a run",
        "regression error",
    ];
    report.tables.push(("Overload:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(())
}

fn in_time(effort: Effort, report: &mut ExperimentReport) -> Result<()> {
    let mode = Mode { size: Some(8), by_member: 25 };
    let mut rows = Vec::new();
    let loads = if effort.short { &LOADS[..1] } else { &LOADS[..] };
    let mut by_policy: Vec<Vec<SeedValues>> = Vec::new();
    for policy in POLICIES {
        let mut in_time = Vec::new();
        for &load in loads {
            let alone = measure(policy, Mode::ALONE, load, true, effort)?;
            let together = measure(policy, mode, load, true, effort)?;
            for (mode, it) in [("single runs", &alone), ("batched", &together)] {
                let setup = format!("{mode}, load {load}%");
                report.versus.add(&setup, policy, Quantity::IN_TIME, it.in_time.clone());
                report.versus.add(&setup, policy, Quantity::P99, it.p99_ms.clone());
            }
            rows.push(vec![
                policy.to_owned(),
                format!("{load}%"),
                format_percent(alone.in_time.mean()),
                format_percent(together.in_time.mean()),
                Unit::Millis.show(alone.p99_ms.mean()),
                Unit::Millis.show(together.p99_ms.mean()),
                format!("{:.1}", together.members.mean()),
            ]);
            let what = format!("{policy}, requests in time at {load}%: batched at least single runs");
            let by = together.in_time.differences(&alone.in_time);
            report.orders.push(PolicyOrder { what, by, cause: None });
            in_time.push(together.in_time);
        }
        by_policy.push(in_time);
    }
    if let [fifo, unified] = &by_policy[..] {
        for ((&load, theirs), ours) in loads.iter().zip(fifo).zip(unified) {
            let what = format!("batched requests in time at {load}%: unified at least fifo");
            report.orders.push(PolicyOrder { what, by: ours.differences(theirs), cause: None });
        }
    }
    let header = ["policy", "load", "in time, single", "batched", "p99, single", "batched", "requests a run"];
    let title = "Batches of up to 8, each further request adds 25%; the load is relative to the capacity with single runs:";
    report.tables.push((title.to_owned(), header.map(String::from).to_vec(), rows));
    Ok(())
}
