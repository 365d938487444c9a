//! Whether the predicted rate of a function's slices is the rate that a worker serves within the objective
//! (`CAPACITY`).

use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_sim::SimulationOutcome;
use millrace_slices::scaling::{Capacity, SliceSpeed};
use millrace_types::{AskedSlices, Permille, Terms};

use super::isolation::{Load, resnet, scenario};
use crate::Effort;
use crate::figures::{Bound, Claim, Figure, SeedValues, Unit};
use crate::report::ExperimentReport;

/// The span of arrivals.
const SPAN: Duration = Duration::from_secs(60);
/// The objective: 99% of the requests within this time.
const DEADLINE: Duration = Duration::from_millis(69);
const SHARE: f64 = 0.99;
/// The share of the SMs of each slice, in thousandths: four slices fill a GPU.
const SMS: u16 = 250;
/// Parts of the predicted rate. At the first at most 1% may be late; the others are 10% around the prediction.
const LOADS: [f64; 3] = [0.85, 0.9, 1.1];

fn share(thousandths: u16) -> Result<Permille> {
    Permille::new(thousandths).context("invalid share")
}

/// Returns the share of the requests that are late or have no answer.
fn late(outcome: &SimulationOutcome) -> f64 {
    let in_time = |it: &&millrace_sim::SimulatedRequest| it.answered() && it.latency() <= DEADLINE;
    let met = outcome.records.iter().filter(in_time).count();
    1.0 - met as f64 / outcome.records.len().max(1) as f64
}

/// The slices of the function, and their rates.
struct Setting {
    slices: u32,
    limit: u16,
    /// The rate at which the objective is met, as the scaler predicts it.
    predicted: f64,
    /// The rate of the paper's Algorithm 1, which knows no objective.
    throughput: f64,
}

impl Setting {
    fn new(slices: u32, limit: u16) -> Result<Self> {
        let model = resnet();
        let run = model.run.div_f64(model.shared.curve.rate(share(SMS)?));
        let speed = SliceSpeed { run, limit: share(limit)? };
        let capacity = Capacity { speed, objective: Some((DEADLINE, SHARE)) };
        let predicted = capacity.rate(slices);
        Ok(Self { slices, limit, predicted, throughput: capacity.throughput(slices) })
    }

    /// Returns the share of late requests at a part of the predicted rate, for each seed.
    fn late_at(&self, part: f64, seeds: &[u64], span: Duration) -> Result<SeedValues> {
        let terms = Terms::new(share(SMS)?, share(SMS)?, Permille::ZERO, share(self.limit)?)?;
        let slices = Some(AskedSlices::fixed(terms, self.slices));
        let load = Load { model: resnet(), slices, rate: self.predicted * part };
        let scenarios: Vec<_> =
            seeds.iter().map(|&seed| scenario(std::slice::from_ref(&load), span, seed)).collect();
        Ok(SeedValues(millrace_sim::run_each(&scenarios, |_, outcome| late(&outcome))?))
    }
}

pub(super) fn capacity(effort: Effort) -> Result<ExperimentReport> {
    let span = if effort.short { SPAN / 4 } else { SPAN };
    let seeds: Vec<u64> = effort.each_seed().collect();
    let mut report = ExperimentReport::default();
    report.assumed.push(
        "A worker with one shared GPU, and ResNet-50 in slices of 25% of the SMs. 99% of the requests are to be answered within 69 ms, as in the paper. Requests arrive at random. The prediction knows the time of a run and the limit of the time alone; the worker is the one that servers run. 10% below the prediction the objective should be met, and 10% above missed. The paper's Algorithm 1 predicts the throughput, whatever the objective."
            .to_owned(),
    );
    let mut rows = Vec::new();
    for (slices, limit) in [(1, 400), (1, 1000), (2, 1000), (4, 1000)] {
        let setting = Setting::new(slices, limit)?;
        let name = match slices {
            1 => format!("one slice, {}% of the time", limit / 10),
            _ => format!("{slices} slices, {}% of the time", limit / 10),
        };
        rows.push(vec![
            name.clone(),
            format!("{:.1}", setting.predicted),
            format!("{:.1}", setting.throughput),
            format!("{:.2}×", setting.throughput / setting.predicted),
        ]);
        for (part, text, bound) in [
            (LOADS[0], "at most 1%", Bound::AtMost(1.0 - SHARE)),
            (LOADS[1], "at most 1%: the prediction is at most 10% too high", Bound::AtMost(1.0 - SHARE)),
            (LOADS[2], "at least 1%: the prediction is at most 10% too low", Bound::AtLeast(1.0 - SHARE)),
        ] {
            report.figures.push(Figure {
                what: format!("{name}: late at {:.0}% of the predicted rate", part * 100.0),
                claim: Claim::goal(text, bound),
                ours: setting.late_at(part, &seeds, span)?,
                unit: Unit::Percent,
                cause: None,
            });
        }
    }
    let header = ["slices", "predicted rate, 1/s", "throughput, 1/s", "Algorithm 1 is higher by"];
    report.tables.push((String::new(), header.map(String::from).to_vec(), rows));
    Ok(report)
}
