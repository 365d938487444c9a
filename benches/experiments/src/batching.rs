//! What running requests together gains (dynamic batching, after Triton's; the papers profile batches,
//! L15, and do not form them): throughput in overload, and how much load is served in time.

use std::time::Duration;

use anyhow::Result;
use millrace_policy::gpu::Eviction;
use millrace_sim::outcome::percentile;
use millrace_sim::report::percent;
use millrace_sim::scenario::{Function, NodeSpec, Scenario};
use millrace_sim::workload::MINUTE;
use millrace_sim::workload::patterns::{self, Pattern};
use millrace_sim::{Outcome, models, run_each};
use millrace_types::{Batching, Serving, Slo};

use crate::figures::{Figure, Order, Spread, Unit};
use crate::report::Report;
use crate::torpor::v100;
use crate::versus::Quantity;
use crate::{Effort, Experiment};

/// The experiments of this module.
pub const EXPERIMENTS: [Experiment; 1] =
    [Experiment { id: "BATCHING", title: "What running requests together gains", run: batching }];

const FUNCTIONS: usize = 8;
const GPUS: u32 = 2;
const POLICIES: [&str; 2] = ["fifo", "unified"];
/// What each further request of a run adds, in percent of a run alone.
const BY_MEMBER: [u32; 3] = [10, 25, 50];
const SIZES: [u32; 2] = [8, 32];
/// Of what GPUs compute one by one, in percent: more than any size of batch serves.
const OVERLOAD: u32 = 1000;
const LOADS: [u32; 5] = [60, 90, 150, 200, 250];
/// Why runs together gain a hundredth or two more than they should.
const OWN_MICROSECOND: &str = "in virtual time each executor is heard of at a microsecond of its own in every 256 (`millrace_worker::clock`): a run alone of 9 ms takes 9.216, one of eight requests 15.36 ms in place of 15.3";
const DEADLINE: Duration = Duration::from_millis(100);

/// How requests run.
#[derive(Debug, Clone, Copy)]
struct Mode {
    size: Option<u32>,
    by_member: u32,
}

impl Mode {
    const ALONE: Self = Self { size: None, by_member: 100 };

    /// What full batches compute by what single runs do.
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
    (seed, effort): (u64, Effort),
) -> Result<Scenario> {
    let model = models::torpor().swap_remove(4);
    let rate = f64::from(GPUS) / model.run.as_secs_f64() * f64::from(load) / 100.0 / FUNCTIONS as f64;
    let span = if effort.short { MINUTE / 60 } else { MINUTE / 4 };
    let pattern = Pattern::Sporadic { mean_gap: Duration::from_secs_f64(1.0 / rate) };
    let arrivals = patterns::arrivals(&[pattern; FUNCTIONS], span, seed);
    let batching = mode.size.map(|max_size| Batching { max_size, max_wait: Duration::ZERO });
    let function = Function {
        by_member: model.run * mode.by_member / 100,
        serving: Serving { batching, ..Serving::default() },
        ..Function::new(model, slo.then_some(Slo { deadline: DEADLINE, percentile: 0.98 }))
    };
    let functions = vec![function; FUNCTIONS];
    let node =
        NodeSpec { eviction: Eviction::Torpor, ..NodeSpec::new(v100(GPUS), crate::lalb::policy(policy)?) };
    Ok(Scenario {
        timeout: MINUTE * 10,
        warmed: true,
        ..Scenario::new(vec![node], functions, arrivals, seed)
    })
}

/// What came of one setup with every seed.
#[derive(Debug, Default)]
struct Measured {
    per_second: Spread,
    in_time: Spread,
    p99_ms: Spread,
    /// Requests in a run.
    members: Spread,
    /// How wrong the regression of runs over their sizes is, where there were three (L15).
    held_out: Vec<f64>,
}

fn measure(policy: &str, mode: Mode, load: u32, slo: bool, effort: Effort) -> Result<Measured> {
    let setups = (1..=effort.seeds).map(|seed| scenario(policy, mode, load, slo, (seed, effort)));
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
    let mut measured = Measured::default();
    for (per_second, in_time, p99_ms, members, held_out) in each {
        measured.per_second.0.push(per_second);
        measured.in_time.0.push(in_time);
        measured.p99_ms.0.push(p99_ms);
        measured.members.0.push(members);
        measured.held_out.extend(held_out);
    }
    Ok(measured)
}

fn members(outcome: &Outcome) -> f64 {
    let batches = outcome.nodes.iter().map(|node| node.batches);
    let (batches, together) =
        batches.fold((0, 0), |(all, requests), it| (all + it.batches, requests + it.requests));
    let all = outcome.records.len() as u64;
    all as f64 / (all.saturating_sub(together) + batches).max(1) as f64
}

fn batching(effort: Effort) -> Result<Report> {
    let mut report = Report::default();
    report.assumed.push(format!(
        "{FUNCTIONS} functions of ResNet-50 (9 ms), which stay on {GPUS} V100, requests at random moments for 15 s, one row each. The papers do not say what a batch takes: here each further request of a run adds 10%, 25% or 50% of a run alone. The nodes are told the first row's time alone and learn the others. *Overload* is ten times what single runs compute, no objective, every request waited for; *in time* is {DEADLINE:?}, and is the functions' objective. No request is held back for others (`maxWait` 0)."
    ));
    throughput(effort, &mut report)?;
    in_time(effort, &mut report)?;
    Ok(report)
}

fn throughput(effort: Effort, report: &mut Report) -> Result<()> {
    let (kinds, sizes) =
        if effort.short { (&BY_MEMBER[..1], &SIZES[..1]) } else { (&BY_MEMBER[..], &SIZES[..]) };
    let mut rows = Vec::new();
    for policy in POLICIES {
        let alone = measure(policy, Mode::ALONE, OVERLOAD, false, effort)?.per_second;
        for &by_member in kinds {
            for &size in sizes {
                let mode = Mode { size: Some(size), by_member };
                let it = measure(policy, mode, OVERLOAD, false, effort)?;
                let by =
                    Spread(it.per_second.0.iter().zip(&alone.0).map(|(ours, alone)| ours / alone).collect());
                let held_out = Spread(it.held_out);
                rows.push(vec![
                    policy.to_owned(),
                    format!("{by_member}%"),
                    mode.name(),
                    format!("{:.0}", alone.mean()),
                    format!("{:.0}", it.per_second.mean()),
                    format!("{} ± {}", Unit::Times.show(by.mean()), Unit::Times.show(by.half())),
                    Unit::Times.show(mode.ideal()),
                    format!("{:.1}", it.members.mean()),
                    if held_out.0.is_empty() { "-".to_owned() } else { format!("{:.1}%", held_out.mean()) },
                ]);
                report.figures.push(Figure {
                    what: format!(
                        "{policy}, {by_member}% for each further, {}: throughput by that alone",
                        mode.name()
                    ),
                    paper: format!("{} (full batches)", Unit::Times.show(mode.ideal())),
                    ours: by.clone(),
                    unit: Unit::Times,
                    band: mode.ideal() * 0.9..=mode.ideal() * 1.01,
                    cause: (by.mean() > mode.ideal()).then_some(OWN_MICROSECOND),
                });
            }
        }
    }
    let header = [
        "policy",
        "each further adds",
        "runs",
        "alone, requests/s",
        "together",
        "by",
        "full batches",
        "requests a run",
        "regression off by",
    ];
    report.tables.push(("Overload:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(())
}

fn in_time(effort: Effort, report: &mut Report) -> Result<()> {
    let mode = Mode { size: Some(8), by_member: 25 };
    let mut rows = Vec::new();
    let loads = if effort.short { &LOADS[..1] } else { &LOADS[..] };
    let mut by_policy: Vec<Vec<Spread>> = Vec::new();
    for policy in POLICIES {
        let mut in_time = Vec::new();
        for &load in loads {
            let alone = measure(policy, Mode::ALONE, load, true, effort)?;
            let together = measure(policy, mode, load, true, effort)?;
            for (mode, it) in [("alone", &alone), ("together", &together)] {
                let setup = format!("{mode}, load {load}%");
                report.versus.add(&setup, policy, Quantity::IN_TIME, it.in_time.clone());
                report.versus.add(&setup, policy, Quantity::P99, it.p99_ms.clone());
            }
            rows.push(vec![
                policy.to_owned(),
                format!("{load}%"),
                percent(alone.in_time.mean()),
                percent(together.in_time.mean()),
                Unit::Millis.show(alone.p99_ms.mean()),
                Unit::Millis.show(together.p99_ms.mean()),
                format!("{:.1}", together.members.mean()),
            ]);
            let what = format!("{policy}, requests in time at {load}%: together at least alone");
            let by = together.in_time.less(&alone.in_time);
            report.orders.push(Order { what, by, cause: None });
            in_time.push(together.in_time);
        }
        by_policy.push(in_time);
    }
    if let [fifo, unified] = &by_policy[..] {
        for ((&load, theirs), ours) in loads.iter().zip(fifo).zip(unified) {
            let what = format!("requests in time together at {load}%: unified at least fifo");
            report.orders.push(Order { what, by: ours.less(theirs), cause: None });
        }
    }
    let header = ["policy", "load", "in time alone", "together", "p99 alone", "together", "requests a run"];
    let title = "Up to 8 together, each further adds 25%; the load is by what single runs compute:";
    report.tables.push((title.to_owned(), header.map(String::from).to_vec(), rows));
    Ok(())
}
