//! Whether slices keep functions apart: the paper's comparison of time quotas alone with quotas on SMs of their
//! own (`FAST-FIG9`), and the owner of a slice beside a neighbour that floods the GPU (`ATTACK`). Both simulate a
//! worker with one shared GPU.

use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_scheduling::dispatch::PolicyConfig;
use millrace_sim::SimulationOutcome;
use millrace_sim::models::{self, ModelFigures, SharedSpeed};
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
use millrace_sim::workload::MINUTE;
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_types::policy::GpuSharingName;
use millrace_types::{AskedSlices, Permille, Terms, Timestamp};

use crate::Effort;
use crate::figures::{Bound, Claim, Figure, SeedValues, Unit};
use crate::report::ExperimentReport;
use crate::torpor::v100;

/// The span of arrivals, and the start of the part with counted answers: buckets are then no longer full.
const SPAN: Duration = Duration::from_secs(30);
const COUNTED_FROM: Duration = Duration::from_secs(5);
/// Run time of RNNT on a whole GPU.
const RNNT_RUN: Duration = Duration::from_millis(20);

/// Returns terms in percent of the SMs, the requested and the greatest time.
fn slice(sm: u16, request: u16, limit: u16) -> Result<AskedSlices> {
    let share = |percent: u16| Permille::new(percent * 10).context("invalid share");
    Ok(AskedSlices::fixed(Terms::new(share(sm)?, share(sm)?, share(request)?, share(limit)?)?, 1))
}

pub(super) fn resnet() -> ModelFigures {
    models::torpor().swap_remove(4)
}

fn rnnt() -> ModelFigures {
    let name = "rnnt".to_owned();
    ModelFigures { name, run: RNNT_RUN, tail: RNNT_RUN, shared: SharedSpeed::rnnt(), ..resnet() }
}

/// A function with its slices and the rate of its requests, in 1/s.
#[derive(Clone)]
pub(super) struct Load {
    pub(super) model: ModelFigures,
    pub(super) slices: Option<AskedSlices>,
    pub(super) rate: f64,
}

/// Returns a worker with one shared GPU under loads.
pub(super) fn scenario(loads: &[Load], span: Duration, seed: u64) -> ClusterScenario {
    let pattern =
        |load: &Load| WorkloadPattern::Sporadic { mean_gap: Duration::from_secs_f64(1.0 / load.rate) };
    let patterns: Vec<_> = loads.iter().map(pattern).collect();
    let arrivals = patterns::arrivals(&patterns, span, seed);
    let function = |load: &Load| SimulatedFunction {
        slices: load.slices,
        ..SimulatedFunction::new(load.model.clone(), None)
    };
    let functions = loads.iter().map(function).collect();
    let node = SimulatedNode {
        gpu_sharing: GpuSharingName::Slices,
        ..SimulatedNode::new(v100(1), PolicyConfig::default())
    };
    ClusterScenario {
        timeout: MINUTE,
        warmed: true,
        ..ClusterScenario::new(vec![node], functions, arrivals, seed)
    }
}

/// Returns the answers of a function per second.
fn rate_of(outcome: &SimulationOutcome, function: u32, span: Duration) -> f64 {
    let counted = Timestamp::ZERO + COUNTED_FROM..Timestamp::ZERO + span;
    let answers = outcome.records.iter().filter(|it| it.function == function && it.answered());
    let count = answers.filter(|it| counted.contains(&it.finished)).count();
    count as f64 / (span - COUNTED_FROM).as_secs_f64()
}

fn p99_of(outcome: &SimulationOutcome, function: u32) -> f64 {
    let of = outcome.records.iter().filter(|it| it.function == function && it.answered());
    let mut latencies: Vec<_> = of.map(millrace_sim::SimulatedRequest::latency).collect();
    latencies.sort_unstable();
    latencies.get(latencies.len() * 99 / 100).map_or(0.0, |latency| latency.as_secs_f64() * 1e3)
}

/// Returns the share by which values fell.
fn loss(before: &SeedValues, after: &SeedValues) -> SeedValues {
    SeedValues(before.0.iter().zip(&after.0).map(|(before, after)| 1.0 - after / before).collect())
}

/// Returns the share by which values rose or fell.
fn change(before: &SeedValues, after: &SeedValues) -> SeedValues {
    SeedValues(loss(before, after).0.iter().map(|loss| loss.abs()).collect())
}

pub(super) fn figure9(effort: Effort) -> Result<ExperimentReport> {
    let span = if effort.short { SPAN / 3 } else { SPAN };
    let mut report = ExperimentReport::default();
    report.assumed.push(
        "A worker with one shared GPU. ResNet-50 (50% to 80% of the time) and RNNT (50%) get more requests than their limits allow, RNNT at times none. The paper gives neither the loads nor the run times: ResNet-50 gets 100 requests a second and runs for 9 ms on a whole GPU, RNNT 60 a second and 20 ms. The speeds on a part of the SMs are fitted to the paper's figures 8 and 10, and not judged. Rates are of the time after the first five seconds."
            .to_owned(),
    );
    let mut rows = Vec::new();
    for (name, sm) in [("time quotas alone: 100% of the SMs", 100), ("24% of the SMs each", 24)] {
        let resnet = Load { model: resnet(), slices: Some(slice(sm, 50, 80)?), rate: 100.0 };
        let rnnt = Load { model: rnnt(), slices: Some(slice(sm, 50, 50)?), rate: 60.0 };
        let rates = |loads: &[Load]| -> Result<Vec<SeedValues>> {
            let scenarios: Vec<_> = effort.each_seed().map(|seed| scenario(loads, span, seed)).collect();
            let each = millrace_sim::run_each(&scenarios, |_, outcome| {
                (0..loads.len() as u32).map(|function| rate_of(&outcome, function, span)).collect::<Vec<_>>()
            })?;
            Ok((0..loads.len()).map(|at| SeedValues(each.iter().map(|rates| rates[at]).collect())).collect())
        };
        let alone = rates(std::slice::from_ref(&resnet))?;
        let rnnt_alone = rates(std::slice::from_ref(&rnnt))?;
        let both = rates(&[resnet, rnnt])?;
        let cell = |values: &SeedValues| format!("{:.1}", values.mean());
        rows.push(vec![
            name.to_owned(),
            cell(&alone[0]),
            cell(&both[0]),
            cell(&rnnt_alone[0]),
            cell(&both[1]),
        ]);
        let (what, claim, ours) = match sm {
            100 => (
                "time quotas alone: fall of ResNet-50's rate by RNNT's load",
                Claim::paper(
                    "RNNT interferes, as 80% + 50% exceed the time; at least 15% here",
                    Bound::AtLeast(0.15),
                ),
                loss(&alone[0], &both[0]),
            ),
            _ => (
                "24% of the SMs each: change of ResNet-50's rate by RNNT's load",
                Claim::paper("no mutual influence; at most 3% here", Bound::AtMost(0.03)),
                change(&alone[0], &both[0]),
            ),
        };
        report.figures.push(Figure { what: what.to_owned(), claim, ours, unit: Unit::Percent, cause: None });
        if sm == 24 {
            report.figures.push(Figure {
                what: "24% of the SMs each: change of RNNT's rate by ResNet-50's load".to_owned(),
                claim: Claim::paper("no mutual influence; at most 3% here", Bound::AtMost(0.03)),
                ours: change(&rnnt_alone[0], &both[1]),
                unit: Unit::Percent,
                cause: None,
            });
        }
    }
    let header = ["slices", "ResNet-50 alone", "beside RNNT", "RNNT alone", "beside ResNet-50"];
    report.tables.push(("Answers per second:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}

pub(super) fn attack(effort: Effort) -> Result<ExperimentReport> {
    let span = if effort.short { SPAN / 3 } else { SPAN };
    let mut report = ExperimentReport::default();
    report.assumed.push(
        "A worker with one shared GPU. The owner, ResNet-50, has a slice of 24% of the SMs and at least half of the time, and gets 30 requests a second. The neighbour has no slice; its runs take 20 ms on a whole GPU. Its load of 1 is 10 requests a second, and 10 times as many exceed the GPU. The judged neighbour uses no memory bandwidth, because slices divide the SMs alone; the other uses the bandwidth of RNNT."
            .to_owned(),
    );
    let mut rows = Vec::new();
    for (name, shared) in
        [("computing alone", SharedSpeed::PROPORTIONAL), ("computing and bandwidth", SharedSpeed::rnnt())]
    {
        let owner = Load { model: resnet(), slices: Some(slice(24, 50, 100)?), rate: 30.0 };
        let p99s = |rate: f64| -> Result<SeedValues> {
            let neighbour = Load { model: ModelFigures { shared, ..rnnt() }, slices: None, rate };
            let loads = [owner.clone(), neighbour];
            let scenarios: Vec<_> = effort.each_seed().map(|seed| scenario(&loads, span, seed)).collect();
            Ok(SeedValues(millrace_sim::run_each(&scenarios, |_, outcome| p99_of(&outcome, 0))?))
        };
        let before = p99s(10.0)?;
        let under = p99s(100.0)?;
        let cell = |values: &SeedValues| Unit::Millis.show(values.mean());
        rows.push(vec![name.to_owned(), cell(&before), cell(&under)]);
        let rise = SeedValues(loss(&before, &under).0.iter().map(|loss| -loss).collect());
        let claim = match shared == SharedSpeed::PROPORTIONAL {
            true => Claim::goal("below 10%", Bound::AtMost(0.1)),
            false => Claim::not_judged("none: bandwidth is not divided, and its share is fitted"),
        };
        report.figures.push(Figure {
            what: format!("rise of the owner's p99 by a neighbour at 10 times its load, {name}"),
            claim,
            ours: rise,
            unit: Unit::Percent,
            cause: None,
        });
    }
    let header = ["neighbour", "owner's p99 at a load of 1", "at a load of 10"];
    report.tables.push((String::new(), header.map(String::from).to_vec(), rows));
    Ok(report)
}
