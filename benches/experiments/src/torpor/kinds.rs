//! H11 and the text's: what one GPU serves, and how heavy and light models fare together.

use std::time::Duration;

use anyhow::Result;
use millrace_sim::models;
use millrace_sim::outcome::percentile;
use millrace_sim::report::{percent, span};
use millrace_sim::run_each;
use millrace_sim::scenario::{Function, Scenario};
use millrace_sim::workload::patterns::{self, Pattern};
use millrace_sim::workload::{MINUTE, minutes, rates};

use super::{assumed, minutes_of, slo, systems};
use crate::Effort;
use crate::figures::{Figure, Spread, Unit};
use crate::report::Report;

/// What one GPU serves: ResNet-152 at several rates per function, against functions that stay on it.
pub(super) fn one_gpu(effort: Effort) -> Result<Report> {
    /// Functions that stay on a GPU for good: 72 on four (§7.3).
    const NATIVE: f64 = 18.0;
    /// Requests a second that are offered: two thirds of what the GPU could compute.
    const OFFERED: f64 = 31.0;
    let model = models::torpor().swap_remove(6);
    let mut rows = Vec::new();
    let mut report = Report { assumed: assumed(), ..Report::default() };
    report.assumed.push(
        "Requests of a function come at a beat, the functions' beats evenly apart: with requests at random moments no system has a short tail at such a load. Native hosts 18 functions on a GPU (72 on four, §7.3) and serves them all."
            .to_owned(),
    );
    let [torpor, ..] = &systems()?[..] else { return Ok(report) };
    let per_minute: &[u32] = if effort.short { &[40] } else { &[10, 20, 40, 80] };
    for &rate in per_minute {
        let functions = (OFFERED * 60.0 / f64::from(rate)).round() as u32;
        let setup = |seed: u64| {
            let period = MINUTE / rate;
            let span = MINUTE * if effort.short { 1 } else { 5 };
            let pattern = Pattern::Periodic { period, jitter: 0.0 };
            // Evenly apart: who begins when is the beat divided by the functions.
            let mut arrivals = patterns::arrivals(&vec![pattern; functions as usize], span, seed);
            let count = arrivals.len() as u64;
            for (place, arrival) in (0..count).zip(&mut arrivals) {
                arrival.at.0 = span.as_nanos() as u64 / count * place;
            }
            let published = vec![Function::new(model.clone(), None); functions as usize];
            Scenario { warmed: true, ..Scenario::new(vec![torpor.node(1)], published, arrivals, seed) }
        };
        let scenarios: Vec<_> = (1..=effort.seeds).map(setup).collect();
        let measured = run_each(&scenarios, |_, outcome| {
            let latencies = outcome.latencies_of(|_| true);
            let throughput = latencies.len() as f64 / outcome.span.as_secs_f64();
            (throughput, percentile(&latencies, 98.0).as_secs_f64() * 1e3)
        })?;
        let throughput = Spread(measured.iter().map(|it| it.0 / (NATIVE * f64::from(rate) / 60.0)).collect());
        let tail = Spread(measured.iter().map(|it| it.1).collect());
        rows.push(vec![
            rate.to_string(),
            functions.to_string(),
            Unit::Times.show(throughput.mean()),
            Unit::Millis.show(tail.mean()),
        ]);
        if rate == 10 {
            report.figures.push(Figure {
                what: "throughput by native's, 10 requests a minute".to_owned(),
                paper: "over 10×".to_owned(),
                ours: throughput,
                unit: Unit::Times,
                band: 10.0..=30.0,
                cause: None,
            });
        }
        report.figures.push(Figure {
            what: format!("p98, {rate} requests a minute"),
            paper: "below 50 ms".to_owned(),
            ours: tail,
            unit: Unit::Millis,
            band: 0.0..=50.0,
            cause: None,
        });
    }
    let header = ["requests a minute", "functions", "throughput by native's", "p98"];
    report.tables.push(("One V100:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}

/// DenseNet-201 and Bert-qa together, Bert-qa with 60% of all weights (Fig 12).
pub(super) fn heaviness(effort: Effort) -> Result<Report> {
    let light = models::torpor().swap_remove(1);
    let heavy = models::torpor().swap_remove(7);
    let heavies = if effort.short { 4 } else { 80 };
    let lights =
        (heavies as f64 * heavy.memory.0 as f64 / 0.6 * 0.4 / light.memory.0 as f64).round() as usize;
    let mut rows = Vec::new();
    let mut report = Report { assumed: assumed(), ..Report::default() };
    report.assumed.push(format!(
        "{heavies} functions of Bert-qa and {lights} of DenseNet-201 (Bert-qa has 60% of the footprint), each a third of the artifact's rates."
    ));
    for system in systems()? {
        let setup = |seed: u64| {
            let published = (0..lights).map(|_| light.clone()).chain((0..heavies).map(|_| heavy.clone()));
            let published = published.map(|model| {
                let slo = slo(&model);
                Function::new(model, Some(slo))
            });
            let first = usize::try_from(seed * 31).unwrap_or(0);
            let mut counts =
                rates::by_minute(&rates::torpor(), lights + heavies, minutes_of(effort).min(10), first);
            counts.iter_mut().flatten().for_each(|count| *count = count.div_ceil(3));
            let arrivals = minutes::arrivals(&counts, seed);
            let nodes = vec![system.node(4)];
            Scenario {
                timeout: MINUTE,
                warmed: true,
                ..Scenario::new(nodes, published.collect(), arrivals, seed)
            }
        };
        let scenarios: Vec<_> = (1..=effort.seeds).map(setup).collect();
        let tails = run_each(&scenarios, |scenario, outcome| {
            let is = |name: &'static str| {
                move |function: u32| scenario.functions[function as usize].model.name == name
            };
            let tail = |name| percentile(&outcome.latencies_of(is(name)), 98.0);
            (tail("densenet-201"), tail("bert-qa"), outcome.summary(&scenario.functions).miss_ratio)
        })?;
        let mean =
            |of: &dyn Fn(&(Duration, Duration, f64)) -> f64| Spread(tails.iter().map(of).collect()).mean();
        rows.push(vec![
            system.name.to_owned(),
            span(Duration::from_secs_f64(mean(&|it| it.0.as_secs_f64()))),
            span(Duration::from_secs_f64(mean(&|it| it.1.as_secs_f64()))),
            percent(mean(&|it| it.2)),
        ]);
    }
    let header = ["system", "p98 of DenseNet-201", "p98 of Bert-qa", "misses"];
    report.tables.push(("Mixed:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}
