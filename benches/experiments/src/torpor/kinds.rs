//! H11 and a figure of the text: the throughput of one GPU, and the latency of heavy and light models
//! together.

use anyhow::Result;
use millrace_memory::eviction::Eviction;
use millrace_sim::models;
use millrace_sim::outcome::percentile;
use millrace_sim::report::format_percent;
use millrace_sim::run_each;
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction};
use millrace_sim::workload::MINUTE;
use millrace_sim::workload::patterns::{self, WorkloadPattern};

use super::setup::{assumed, at_counts, counts, minutes_of, named, slo, systems};
use crate::effort::Effort;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;
use crate::versus::Quantity;

/// Measures the throughput of one GPU for ResNet-152 at several rates per function, against functions that
/// stay on the GPU.
pub(super) fn one_gpu(effort: Effort) -> Result<ExperimentReport> {
    /// The number of functions that stay on a GPU for good: 72 on four (§7.3).
    const NATIVE: f64 = 18.0;
    /// The offered requests a second: about half of the GPU's capacity.
    const OFFERED: f64 = 31.0;
    let model = models::torpor().swap_remove(6);
    let mut rows = Vec::new();
    let mut report = ExperimentReport { assumed: assumed(), ..ExperimentReport::default() };
    report.assumed.push(
        "Requests of a function arrive periodically, and the phases of the functions are evenly apart: with requests at random times no system has a short tail at such a load. native hosts 18 functions on a GPU (72 on four, §7.3) and serves all their requests."
            .to_owned(),
    );
    let per_minute: &[u32] = if effort.short { &[40] } else { &[10, 20, 40, 80] };
    let compared = [named("torpor", Eviction::Torpor)?, named("unified", Eviction::Torpor)?];
    for (system, &rate) in
        compared.iter().flat_map(|system| per_minute.iter().map(move |rate| (system, rate)))
    {
        let functions = (OFFERED * 60.0 / f64::from(rate)).round() as u32;
        let setup = |seed: u64| {
            let period = MINUTE / rate;
            let span = MINUTE * if effort.short { 1 } else { 5 };
            let pattern = WorkloadPattern::Periodic { period, jitter: 0.0 };
            // All requests are evenly apart: the phases of the functions divide the period.
            let mut arrivals = patterns::arrivals(&vec![pattern; functions as usize], span, seed);
            let count = arrivals.len() as u64;
            for (place, arrival) in (0..count).zip(&mut arrivals) {
                arrival.at.0 = span.as_nanos() as u64 / count * place;
            }
            let published = vec![SimulatedFunction::new(model.clone(), None); functions as usize];
            ClusterScenario {
                warmed: true,
                ..ClusterScenario::new(vec![system.node(1)], published, arrivals, seed)
            }
        };
        let scenarios: Vec<_> = effort.each_seed().map(setup).collect();
        let measured = run_each(&scenarios, |_, outcome| {
            let latencies = outcome.latencies_of(|_| true);
            let throughput = latencies.len() as f64 / outcome.span.as_secs_f64();
            (throughput, percentile(&latencies, 98.0).as_secs_f64() * 1e3)
        })?;
        let throughput =
            SeedValues(measured.iter().map(|it| it.0 / (NATIVE * f64::from(rate) / 60.0)).collect());
        let tail = SeedValues(measured.iter().map(|it| it.1).collect());
        report.versus.add(&format!("{rate} requests a minute"), system.name, Quantity::P98, tail.clone());
        rows.push(vec![
            system.name.to_owned(),
            rate.to_string(),
            functions.to_string(),
            Unit::Times.show(throughput.mean()),
            Unit::Millis.show(tail.mean()),
        ]);
        if rate == 10 {
            report.figures.push(Figure {
                what: format!("throughput relative to native, 10 requests a minute, {}", system.name),
                claim: Claim::not_judged("over 10×: ours is the offered load over the rate of 18 functions"),
                ours: throughput,
                unit: Unit::Times,
                cause: None,
            });
        }
        report.figures.push(Figure {
            what: format!("p98, {rate} requests a minute, {}", system.name),
            claim: Claim::paper("below 50 ms", Bound::AtMost(50.0)),
            ours: tail,
            unit: Unit::Millis,
            cause: None,
        });
    }
    let header = ["system", "requests a minute", "functions", "throughput relative to native", "p98"];
    report.tables.push(("One V100:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}

/// Runs DenseNet-201 and Bert-qa together, with Bert-qa at 60% of all weights (Fig 12).
pub(super) fn heaviness(effort: Effort) -> Result<ExperimentReport> {
    let light = models::torpor().swap_remove(1);
    let heavy = models::torpor().swap_remove(7);
    let heavies = if effort.short { 4 } else { 80 };
    let lights =
        (heavies as f64 * heavy.memory.0 as f64 / 0.6 * 0.4 / light.memory.0 as f64).round() as usize;
    let mut by_name = Vec::new();
    let mut rows = Vec::new();
    let mut report = ExperimentReport { assumed: assumed(), ..ExperimentReport::default() };
    report.assumed.push(format!(
        "{heavies} functions of Bert-qa and {lights} of DenseNet-201 (Bert-qa has 60% of the weights), each at a third of the artifact's rates."
    ));
    for system in systems()? {
        let setup = |seed: u64| {
            let published = (0..lights).map(|_| light.clone()).chain((0..heavies).map(|_| heavy.clone()));
            let published = published.map(|model| {
                let slo = slo(&model);
                SimulatedFunction::new(model, Some(slo))
            });
            let mut counts = counts(lights + heavies, minutes_of(effort).min(10), seed);
            counts.iter_mut().flatten().for_each(|count| *count = count.div_ceil(3));
            at_counts(vec![system.node(4)], published.collect(), &counts, seed)
        };
        let scenarios: Vec<_> = effort.each_seed().map(setup).collect();
        let each = run_each(&scenarios, |scenario, outcome| {
            let tails = |name: &'static str| {
                let is = |function: u32| scenario.functions[function as usize].model.name == name;
                let latencies = outcome.latencies_of(is);
                [90.0, 98.0].map(|percent| percentile(&latencies, percent).as_secs_f64() * 1e3)
            };
            let [light_p90, light_p98] = tails("densenet-201");
            let [heavy_p90, heavy_p98] = tails("bert-qa");
            let misses = outcome.summary(&scenario.functions).miss_ratio;
            [light_p90, light_p98, heavy_p90, heavy_p98, misses]
        })?;
        let [light_p90, light_p98, heavy_p90, heavy_p98, misses] =
            [0, 1, 2, 3, 4].map(|place| SeedValues(each.iter().map(|it: &[f64; 5]| it[place]).collect()));
        let tails = [&light_p90, &light_p98, &heavy_p90, &heavy_p98];
        let mut row = vec![system.name.to_owned()];
        row.extend(tails.map(|it| Unit::Millis.show(it.mean())));
        row.push(format_percent(misses.mean()));
        rows.push(row);
        for (model, p98) in [("DenseNet-201", &light_p98), ("Bert-qa", &heavy_p98)] {
            report.versus.add(model, system.name, Quantity::P98, p98.clone());
        }
        by_name.push((system.name, light_p98, heavy_p98));
    }
    judge_heaviness(&mut report, &by_name);
    let header = ["system", "p90 of DenseNet-201", "p98", "p90 of Bert-qa", "p98", "misses"]
        .map(String::from)
        .to_vec();
    report.tables.push(("Mixed:".to_owned(), header, rows));
    Ok(report)
}

/// Compares the 98th percentiles of the light and the heavy model by system with Fig 12.
fn judge_heaviness(report: &mut ExperimentReport, by_name: &[(&'static str, SeedValues, SeedValues)]) {
    let of = |name: &str| by_name.iter().find(|it| it.0 == name).map(|(_, light, heavy)| (light, heavy));
    let mut figure = |what: &str, paper: &str, ours: &SeedValues, bound| {
        report.figures.push(Figure {
            what: what.to_owned(),
            claim: Claim::paper(paper, bound),
            ours: ours.clone(),
            unit: Unit::Millis,
            cause: None,
        });
    };
    if let (Some(torpor), Some(lru), Some(unified)) = (of("torpor"), of("torpor-lru"), of("unified")) {
        figure("p98 of Bert-qa, torpor", "within 200 ms", torpor.1, Bound::AtMost(200.0));
        figure("p98 of Bert-qa, torpor-lru", "over 200 ms", lru.1, Bound::AtLeast(200.0));
        figure("p98 of DenseNet-201, torpor", "within 80 ms", torpor.0, Bound::AtMost(80.0));
        figure("p98 of Bert-qa, unified", "within 200 ms", unified.1, Bound::AtMost(200.0));
        figure("p98 of DenseNet-201, unified", "within 80 ms", unified.0, Bound::AtMost(80.0));
        for (what, by) in [
            ("p98 of Bert-qa: torpor below torpor-lru", lru.1.differences(torpor.1)),
            ("p98 of DenseNet-201: torpor at most torpor-lru", lru.0.differences(torpor.0)),
        ] {
            report.orders.push(PolicyOrder { what: what.to_owned(), by, cause: None });
        }
    }
}
