//! H08 to H10: functions that meet their objectives on one node, against Torpor without one of its parts
//! (T28).

use std::time::Duration;

use anyhow::Result;
use millrace_sim::models;
use millrace_sim::report::format_percent;
use millrace_sim::scenario::SimulatedFunction;
use millrace_types::Slo;

use super::allocation;
use super::setup::{ComparedSystem, PERCENTILE, assumed, at_counts, counts, minutes_of, mixed, systems};
use crate::effort::Effort;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;
use crate::seeds::Summaries;

pub(super) fn compliance(effort: Effort) -> Result<ExperimentReport> {
    let counts: &[usize] = if effort.short { &[80] } else { &[320, 480, 520, 560] };
    let mut rows = Vec::new();
    let mut report = ExperimentReport { assumed: assumed(), ..ExperimentReport::default() };
    let mut at_560: Vec<(&str, SeedValues)> = Vec::new();
    report.assumed.push(
        "torpor-block is torpor with the mean time of allocation of each model under Torpor-Block (Fig 13) added to the copy."
            .to_owned(),
    );
    let mut systems = systems()?;
    let block =
        ComparedSystem { name: "torpor-block", allocation: allocation::of_pool(1), ..systems[0].clone() };
    systems.insert(4, block);
    for system in systems {
        for &functions in counts {
            let summaries = Summaries::of(effort, |seed| mixed(&system, 4, functions, seed, effort))?;
            report.versus.add_summaries(&format!("{functions} functions"), system.name, &summaries);
            let compliant = summaries.spread(millrace_sim::RunSummary::compliance);
            rows.push(vec![
                system.name.to_owned(),
                functions.to_string(),
                format!(
                    "{} ± {}",
                    format_percent(compliant.mean()),
                    format_percent(compliant.half_interval())
                ),
                Unit::Millis.show(summaries.mean_ms().mean()),
                Unit::Millis.show(summaries.spread(|it| it.p98.as_secs_f64() * 1e3).mean()),
                format_percent(summaries.spread(|it| it.miss_ratio).mean()),
                format_percent(summaries.spread(|it| it.gpu_load).mean()),
            ]);
            let figure =
                |what: String, claim, ours| Figure { what, claim, ours, unit: Unit::Percent, cause: None };
            if functions == 480 && matches!(system.name, "torpor" | "unified") {
                let what = format!("H08 compliant of 480, {}", system.name);
                report.figures.push(figure(what, Claim::paper("100%", Bound::About(1.0)), compliant.clone()));
            }
            if functions == 560 {
                if matches!(system.name, "torpor" | "unified") {
                    let what = format!("H09 compliant of 560, {}", system.name);
                    report.figures.push(figure(
                        what,
                        Claim::paper("over 80%", Bound::AtLeast(0.80)),
                        compliant.clone(),
                    ));
                }
                at_560.push((system.name, compliant));
            }
        }
    }
    let of = |name: &str| at_560.iter().find(|(it, _)| *it == name).map(|(_, spread)| spread.clone());
    for (first, then) in [
        ("torpor", "torpor-fifo"),
        ("torpor", "torpor-random"),
        ("torpor-fifo", "torpor-random"),
        ("torpor", "torpor-lru"),
        ("torpor", "torpor-block"),
        ("torpor-block", "torpor-random"),
        ("torpor-lru", "torpor-random"),
        ("unified", "torpor"),
    ] {
        if let (Some(a), Some(b)) = (of(first), of(then)) {
            let what = format!("compliant of 560: {first} at least {then}");
            report.orders.push(PolicyOrder { what, by: a.differences(&b), cause: None });
        }
    }
    let header = ["system", "functions", "compliant", "mean latency", "p98", "misses", "GPUs computing"];
    report.tables.push(("One node, 15 minutes:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}

/// Runs 560 functions of ResNet-152 at several deadlines and loads.
pub(super) fn deadlines(effort: Effort) -> Result<ExperimentReport> {
    let systems: Vec<_> =
        systems()?.into_iter().filter(|it| !matches!(it.name, "torpor-random" | "torpor-lru")).collect();
    let count = if effort.short { 40 } else { 560 };
    let mut rows = Vec::new();
    let mut report = ExperimentReport { assumed: assumed(), ..ExperimentReport::default() };
    report.assumed.push(
        "The paper does not state the rates. At the artifact's rates four GPUs compute 45% of the time and nearly all functions comply, so rates are also raised by half."
            .to_owned(),
    );
    let loads: &[u32] = if effort.short { &[150] } else { &[100, 150] };
    let model = models::torpor().swap_remove(6);
    for &load in loads {
        for &deadline in if effort.short { &[80][..] } else { &[60, 70, 80] } {
            let mut compliant = Vec::new();
            for system in &systems {
                let setup = |seed: u64| {
                    let slo = Slo { deadline: Duration::from_millis(deadline), percentile: PERCENTILE };
                    let functions = vec![SimulatedFunction::new(model.clone(), Some(slo)); count];
                    let mut counts = counts(count, minutes_of(effort).min(5), seed);
                    counts.iter_mut().flatten().for_each(|count| *count = (*count * load).div_ceil(100));
                    at_counts(vec![system.node(4)], functions, &counts, seed)
                };
                let summaries = Summaries::of(effort, setup)?;
                let setup = format!("rates at {load}%, {deadline} ms");
                report.versus.add_summaries(&setup, system.name, &summaries);
                let share = summaries.spread(millrace_sim::RunSummary::compliance);
                rows.push(vec![
                    format!("{load}%"),
                    format!("{deadline} ms"),
                    system.name.to_owned(),
                    format!("{} ± {}", format_percent(share.mean()), format_percent(share.half_interval())),
                    Unit::Millis.show(summaries.spread(|it| it.p98.as_secs_f64() * 1e3).mean()),
                    format_percent(summaries.spread(|it| it.gpu_load).mean()),
                ]);
                compliant.push((system.name, share));
            }
            let of = |name: &str| compliant.iter().find(|(it, _)| *it == name).map(|(_, it)| it.clone());
            for ours in ["torpor", "unified"] {
                if let (Some(ours_at), Some(fifo)) = (of(ours), of("torpor-fifo")) {
                    let what = format!("{ours} at least torpor-fifo, {deadline} ms, rates at {load}%");
                    report.orders.push(PolicyOrder { what, by: ours_at.differences(&fifo), cause: None });
                }
            }
        }
    }
    let header = ["rates", "deadline", "system", "compliant", "p98", "GPUs computing"];
    report.tables.push(("560 ResNet-152, 5 minutes:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}
