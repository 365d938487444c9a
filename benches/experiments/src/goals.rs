//! Goals of our own for the default policy: functions that comply in the setting of Torpor's paper (`DEFAULT`), and
//! the distance to `fifo` at each load of the GPUs (`LOADS`). Recorded with seeds from 101 on, to which nothing is
//! tuned.

use std::time::Duration;

use anyhow::Result;
use millrace_memory::eviction::Eviction;
use millrace_scheduling::dispatch::PolicyConfig;
use millrace_sim::report::format_percent;
use millrace_sim::run_each;
use millrace_types::Slo;

use crate::effort::Effort;
use crate::experiment::Experiment;
use crate::figures::{Bound, Claim, Figure, SeedValues, Unit};
use crate::lalb::policy;
use crate::overload::{OBJECTIVE, equal};
use crate::report::ExperimentReport;
use crate::seeds::Summaries;
use crate::torpor::{ComparedSystem, PERCENTILE, assumed, mixed};

pub const EXPERIMENTS: [Experiment; 2] = [
    Experiment {
        id: "DEFAULT",
        title: "The default policy: functions that meet their objectives",
        run: compliance,
    },
    Experiment { id: "LOADS", title: "The default policy against `fifo` at each load", run: loads },
];

/// The deadline of every function in the second setting.
const ONE_DEADLINE: Duration = Duration::from_millis(80);
/// The cause of functions that miss one deadline for all.
const SWAP: &str = "nine in ten or more of the functions that miss are Bert-qa, whose swap alone takes 144 ms. Such a function can comply only while 98% of its requests find the model on a GPU";

/// Counts the functions that comply, with the deadlines of the paper and with one deadline for all.
fn compliance(effort: Effort) -> Result<ExperimentReport> {
    let system = ComparedSystem::new("default", PolicyConfig::default(), Eviction::default());
    let mut report = ExperimentReport { assumed: assumed(), ..ExperimentReport::default() };
    report.assumed.push("The policy is that of `millrace up` and `millrace sim` without options.".to_owned());
    let mut rows = Vec::new();
    for (functions, papers, one) in [(480, 0.995, 0.97), (560, 0.985, 0.95)] {
        let functions = if effort.short { functions / 8 } else { functions };
        for (deadlines, least) in [("80 ms, Bert-qa 200 ms", papers), ("80 ms", one)] {
            let is_one = deadlines == "80 ms";
            let scenarios: Vec<_> = effort
                .each_seed()
                .map(|seed| {
                    let mut scenario = mixed(&system, 4, functions, seed, effort);
                    for function in scenario.functions.iter_mut().filter(|_| is_one) {
                        function.slo = Some(Slo { deadline: ONE_DEADLINE, percentile: PERCENTILE });
                    }
                    scenario
                })
                .collect();
            let late_models = run_each(&scenarios, |scenario, outcome| {
                let met = outcome.objectives_met(&scenario.functions);
                let late = met.iter().filter(|(_, met)| !**met);
                let models =
                    late.map(|(function, _)| scenario.functions[*function as usize].model.name.clone());
                (met.len(), models.collect::<Vec<_>>())
            })?;
            let share = |(all, late): &(usize, Vec<String>)| 1.0 - late.len() as f64 / (*all).max(1) as f64;
            let ours = SeedValues(late_models.iter().map(share).collect());
            let late: Vec<_> = late_models.iter().flat_map(|(_, late)| late).collect();
            let of_bert = late.iter().filter(|model| **model == "bert-qa").count();
            // The goal holds for each seed.
            let least_seed = ours.0.iter().copied().fold(f64::INFINITY, f64::min);
            rows.push(vec![
                deadlines.to_owned(),
                functions.to_string(),
                format!("{} ± {}", format_percent(ours.mean()), format_percent(ours.half_interval())),
                format_percent(least_seed),
                format!("{of_bert} of {}", late.len()),
            ]);
            report.figures.push(Figure {
                what: format!("deadlines of {deadlines}: compliant of {functions}, the least of the seeds"),
                claim: Claim::goal(format!("at least {}", Unit::Percent.show(least)), Bound::AtLeast(least)),
                ours: SeedValues(vec![least_seed]),
                unit: Unit::Percent,
                cause: is_one.then_some(SWAP),
            });
        }
    }
    let header =
        ["deadlines", "functions", "compliant", "least of the seeds", "Bert-qa among those that miss"]
            .map(String::from)
            .to_vec();
    report.tables.push(("One node, 15 minutes:".to_owned(), header, rows));
    Ok(report)
}

/// The most by which the p99 may exceed that of `fifo`.
const P99_MAX: f64 = 1.01;
/// The most functions that may comply under `fifo` and not under the default policy.
const FEWER_MAX: f64 = 1.0;

/// The cause of a longer tail where the GPUs are full.
const FULL: &str = "nine turns in ten go to requests that can still be in time, so 163 of 200 functions comply, and under fifo none; the tail is the wait of the other functions";

/// Compares the default policy with `fifo` from 10% to 100% of the capacity of four GPUs.
fn loads(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport::default();
    report.assumed.push(
        "The functions, the node and the objective are those of OVERLOAD. Differences and ratios are taken in each seed, and the table has the means."
            .to_owned(),
    );
    let span = Duration::from_secs(if effort.short { 2 } else { 300 });
    let loads: Vec<u32> = if effort.short { vec![50] } else { (1..=10).map(|tenth| tenth * 10).collect() };
    let mut rows = Vec::new();
    for load in loads {
        let of = |dispatch: PolicyConfig| {
            Summaries::of(effort, |seed| equal(dispatch, Some(OBJECTIVE), load, seed, span))
        };
        let ours = of(PolicyConfig::default())?;
        let fifo = of(policy("fifo")?)?;
        let p99 = |it: &Summaries| it.spread(|summary| summary.p99.as_secs_f64() * 1e3);
        let compliant = |it: &Summaries| it.spread(|summary| summary.compliant as f64);
        let fewer: SeedValues = compliant(&fifo).differences(&compliant(&ours));
        let ratio = p99(&ours).ratio_to(&p99(&fifo));
        rows.push(vec![
            format!("{load}%"),
            format!("{:.1}", compliant(&ours).mean()),
            format!("{:.1}", compliant(&fifo).mean()),
            Unit::Millis.show(p99(&ours).mean()),
            Unit::Millis.show(p99(&fifo).mean()),
        ]);
        report.figures.push(Figure {
            what: format!("load {load}%: functions that comply under fifo and not under the default"),
            claim: Claim::goal("at most 1", Bound::AtMost(FEWER_MAX)),
            ours: fewer,
            unit: Unit::Count,
            cause: None,
        });
        report.figures.push(Figure {
            what: format!("load {load}%: p99 relative to fifo"),
            claim: Claim::goal(format!("at most {P99_MAX}×"), Bound::AtMost(P99_MAX)),
            ours: ratio,
            unit: Unit::Times,
            cause: (load == 100).then_some(FULL),
        });
    }
    let header = ["load", "compliant, default", "fifo", "p99, default", "fifo"].map(String::from).to_vec();
    report.tables.push(("200 functions:".to_owned(), header, rows));
    Ok(report)
}
