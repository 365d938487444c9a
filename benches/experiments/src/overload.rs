//! `unified` against every other policy with equal functions, from light load to overload, beyond the papers'
//! experiments. Just below the capacity of the GPUs, Torpor's rule has fewer requests in time than `fifo`.
//! Above the capacity, `fifo` is late for all requests.

use std::time::Duration;

use anyhow::Result;
use millrace_memory::eviction::Eviction;
use millrace_scheduling::dispatch::PolicyConfig;
use millrace_sim::report::format_percent;
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
use millrace_sim::workload::MINUTE;
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_sim::{SimulationOutcome, models};
use millrace_types::Slo;
use millrace_types::policy::GpuSharingName;

use crate::effort::Effort;
use crate::experiment::Experiment;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;
use crate::seeds::Summaries;
use crate::torpor::v100;
use crate::versus::Quantity;

pub const EXPERIMENTS: [Experiment; 2] = [
    Experiment { id: "OVERLOAD", title: "Equal functions, from light load to overload", run: overload },
    Experiment { id: "SLICES-COMPUTE", title: "Equal functions on shared GPUs", run: slices },
];

const FUNCTIONS: usize = 200;
/// The load in percent at which Torpor's rule loses to FIFO.
const LOSES_AT: u32 = 90;
/// The objective of the functions that have one.
pub const OBJECTIVE: Slo = Slo { deadline: Duration::from_millis(200), percentile: 0.98 };

/// Returns the share of all requests that were answered within the deadline of [`OBJECTIVE`].
#[must_use]
pub fn in_time_of(outcome: &SimulationOutcome) -> f64 {
    let met = outcome.records.iter().filter(|it| it.answered() && it.latency() <= OBJECTIVE.deadline);
    met.count() as f64 / outcome.records.len().max(1) as f64
}

fn unanswered(outcome: &SimulationOutcome) -> f64 {
    let unanswered = outcome.records.iter().filter(|it| !it.answered()).count();
    unanswered as f64 / outcome.records.len().max(1) as f64
}

/// Returns equal functions of ResNet-50 on the Torpor node. `load` is the share of the four GPUs' time that
/// runs without swaps would take, in percent.
#[must_use]
pub fn equal(
    dispatch: PolicyConfig,
    objective: Option<Slo>,
    load: u32,
    seed: u64,
    span: Duration,
) -> ClusterScenario {
    let model = models::torpor().swap_remove(4);
    let rate = 4.0 / model.run.as_secs_f64() * f64::from(load) / 100.0 / FUNCTIONS as f64;
    let mean_gap = Duration::from_secs_f64(1.0 / rate);
    let arrivals = patterns::arrivals(&[WorkloadPattern::Sporadic { mean_gap }; FUNCTIONS], span, seed);
    let functions = vec![SimulatedFunction::new(model, objective); FUNCTIONS];
    let node = SimulatedNode { eviction: Eviction::Torpor, ..SimulatedNode::new(v100(4), dispatch) };
    ClusterScenario {
        timeout: MINUTE,
        warmed: true,
        ..ClusterScenario::new(vec![node], functions, arrivals, seed)
    }
}

/// Runs loads from below to above the capacity of four GPUs.
fn overload(effort: Effort) -> Result<ExperimentReport> {
    let loads: &[u32] = if effort.short { &[110] } else { &[60, 90, 100, 105, 110, 130] };
    let mut report = ExperimentReport::default();
    report.assumed.push(format!(
        "{FUNCTIONS} equal functions of ResNet-50 (9 ms) on the Torpor node, for 5 minutes. Requests arrive at random times, with a deadline of 200 ms at 98%. The load is the share of four GPUs' time that runs without swaps would take, so above about 90% no policy can serve all requests in time."
    ));
    let mut rows = Vec::new();
    for &load in loads {
        let mut in_time = Vec::new();
        for name in ["fifo", "lalb-o3", "torpor", "unified"] {
            let dispatch = crate::lalb::policy(name)?;
            let span = if effort.short { MINUTE / 20 } else { MINUTE * 5 };
            let setup = |seed: u64| equal(dispatch, Some(OBJECTIVE), load, seed, span);
            let scenarios: Vec<_> = effort.each_seed().map(setup).collect();
            let measured = millrace_sim::run_each(&scenarios, |scenario, outcome| {
                (in_time_of(&outcome), (unanswered(&outcome), outcome.summary(&scenario.functions)))
            })?;
            let (shares, rest): (Vec<_>, Vec<_>) = measured.into_iter().unzip();
            let (unanswered, summaries): (Vec<_>, Vec<_>) = rest.into_iter().unzip();
            let shares = SeedValues(shares);
            let summaries = Summaries(summaries);
            let setup = format!("load {load}%");
            report.versus.add_summaries(&setup, name, &summaries);
            report.versus.add(&setup, name, Quantity::IN_TIME, shares.clone());
            rows.push(vec![
                format!("{load}%"),
                name.to_owned(),
                format_percent(shares.mean()),
                format_percent(summaries.spread(millrace_sim::RunSummary::compliance).mean()),
                format_percent(SeedValues(unanswered).mean()),
                Unit::Millis.show(summaries.mean_ms().mean()),
                Unit::Millis.show(summaries.spread(|it| it.p99.as_secs_f64() * 1e3).mean()),
            ]);
            in_time.push((name, shares));
        }
        let of = |name: &str| in_time.iter().find(|(it, _)| *it == name).map(|(_, it)| it.clone());
        if load == LOSES_AT
            && let (Some(fifo), Some(torpor)) = (of("fifo"), of("torpor"))
        {
            let what = format!("requests in time: fifo at least the paper's rule (torpor), load {load}%");
            report.orders.push(PolicyOrder { what, by: fifo.differences(&torpor), cause: None });
        }
        for other in ["fifo", "lalb-o3", "torpor"] {
            if let (Some(ours), Some(theirs)) = (of("unified"), of(other)) {
                let what = format!("requests in time: unified at least {other}, load {load}%");
                report.orders.push(PolicyOrder { what, by: ours.differences(&theirs), cause: None });
            }
        }
    }
    let header = [
        "load",
        "policy",
        "requests in time",
        "functions that comply",
        "unanswered after 60 s",
        "mean latency",
        "p99",
    ];
    report.tables.push((String::new(), header.map(String::from).to_vec(), rows));
    Ok(report)
}

/// Runs loads from below to far above the capacity of four GPUs that are not shared, with shared GPUs and
/// without.
fn slices(effort: Effort) -> Result<ExperimentReport> {
    let loads: &[u32] = if effort.short { &[200] } else { &[60, 100, 150, 200, 300, 400] };
    let mut report = ExperimentReport::default();
    report.assumed.push(format!(
        "The {FUNCTIONS} functions of OVERLOAD for 10 seconds, under `unified`. The speed of ResNet-50 on a part of the SMs is fitted to FaST-GShare's figures 8 and 10, and not judged: eight runs at once have 4.16 times the throughput of one. A launch is slowed by the launches under way at its begin, and not by later ones."
    ));
    let mut rows = Vec::new();
    for &load in loads {
        for sharing in [GpuSharingName::Off, GpuSharingName::Slices] {
            let span = if effort.short { MINUTE / 20 } else { MINUTE / 6 };
            let setup = |seed: u64| {
                let mut scenario = equal(PolicyConfig::default(), Some(OBJECTIVE), load, seed, span);
                scenario.nodes.iter_mut().for_each(|node| node.gpu_sharing = sharing);
                scenario
            };
            let scenarios: Vec<_> = effort.each_seed().map(setup).collect();
            let measured = millrace_sim::run_each(&scenarios, |scenario, outcome| {
                (in_time_of(&outcome), outcome.summary(&scenario.functions))
            })?;
            let (shares, summaries): (Vec<_>, Vec<_>) = measured.into_iter().unzip();
            let shares = SeedValues(shares);
            let summaries = Summaries(summaries);
            rows.push(vec![
                format!("{load}%"),
                sharing.to_string(),
                format_percent(shares.mean()),
                Unit::Millis.show(summaries.mean_ms().mean()),
                Unit::Millis.show(summaries.spread(|it| it.p99.as_secs_f64() * 1e3).mean()),
            ]);
            if sharing == GpuSharingName::Slices && load == 200 {
                report.figures.push(Figure {
                    what: "requests in time on shared GPUs at twice the load of OVERLOAD's 100%".to_owned(),
                    claim: Claim::goal("at least 98%".to_owned(), Bound::AtLeast(0.98)),
                    ours: shares,
                    unit: Unit::Percent,
                    cause: None,
                });
            }
        }
    }
    let header = ["load", "GPU sharing", "requests in time", "mean latency", "p99"];
    report.tables.push((String::new(), header.map(String::from).to_vec(), rows));
    Ok(report)
}
