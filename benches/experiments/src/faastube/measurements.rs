//! Runs of a setup with every seed, the measured quantities, and the figures and orders of the report.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, Result};
use millrace_sim::passing::{DataflowOutcome, DataflowSetup, ModelledWorkflow, System, run};

use super::setup::{LOAD, Server, closed};
use crate::effort::Effort;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};

/// Runs a setup with each seed, in parallel.
pub(super) fn outcomes(
    effort: Effort,
    setup: impl Fn(u64) -> DataflowSetup + Sync,
) -> Result<Vec<DataflowOutcome>> {
    let next = AtomicUsize::new(0);
    let seeds: Vec<_> = effort.each_seed().collect();
    let results = Mutex::new(BTreeMap::new());
    let work = || {
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(&seed) = seeds.get(place) else { return };
            let result = run(&setup(seed));
            results.lock().unwrap_or_else(PoisonError::into_inner).insert(place, result);
        }
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(seeds.len());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.into_values().map(|result| result.context("a simulation failed")).collect()
}

pub(super) fn spread(outcomes: &[DataflowOutcome], of: impl Fn(&DataflowOutcome) -> f64) -> SeedValues {
    SeedValues(outcomes.iter().map(of).collect())
}

/// Returns the capacity of a system for a workflow, in requests a second.
pub(super) fn throughput(
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
pub(super) fn most(server: &Server, workflow: &ModelledWorkflow, system: System) -> Result<f64> {
    Ok(throughput(server, workflow, system, Effort { seeds: 1, ..Effort::FULL })?.mean())
}

/// Returns the rate of requests for a workflow on a server, the same for every system.
pub(super) fn load(server: &Server, workflow: &ModelledWorkflow) -> Result<f64> {
    Ok(most(server, workflow, System::INFLESS)? * LOAD)
}

pub(super) fn p99_latency(outcome: &DataflowOutcome) -> f64 {
    outcome.p99(0, |record| record.latency().as_secs_f64())
}

pub(super) fn p99_passing(outcome: &DataflowOutcome) -> f64 {
    outcome.p99(0, |record| record.split.passing())
}

pub(super) fn p99_split(outcome: &DataflowOutcome) -> f64 {
    outcome.p99(0, |record| record.split.total())
}

/// Returns the least and the greatest value of several spreads, seed by seed.
pub(super) fn range(spreads: &[SeedValues]) -> (SeedValues, SeedValues) {
    let seeds = spreads.iter().map(|spread| spread.0.len()).min().unwrap_or(0);
    let of = |seed: usize, pick: fn(f64, f64) -> f64, from: f64| {
        spreads.iter().map(|spread| spread.0[seed]).fold(from, pick)
    };
    let lowest = (0..seeds).map(|seed| of(seed, f64::min, f64::MAX)).collect();
    let highest = (0..seeds).map(|seed| of(seed, f64::max, f64::MIN)).collect();
    (SeedValues(lowest), SeedValues(highest))
}

/// Returns the mean of several spreads, seed by seed.
pub(super) fn average(spreads: &[SeedValues]) -> SeedValues {
    let seeds = spreads.iter().map(|spread| spread.0.len()).min().unwrap_or(0);
    let mean = |seed: usize| spreads.iter().map(|spread| spread.0[seed]).sum::<f64>() / spreads.len() as f64;
    SeedValues((0..seeds).map(mean).collect())
}

pub(super) fn figure(
    what: String,
    claim: Claim,
    (ours, unit): (SeedValues, Unit),
    cause: Option<&'static str>,
) -> Figure {
    Figure { what, claim, ours, unit, cause }
}

/// Returns the paper's claim of a share or a ratio.
pub(super) fn gain(unit: Unit, value: f64) -> Claim {
    Claim::paper(unit.show(value), Bound::About(value))
}

pub(super) fn order(what: String, by: SeedValues, cause: Option<&'static str>) -> PolicyOrder {
    PolicyOrder { what, by, cause }
}

pub(super) fn ms(seconds: &SeedValues) -> String {
    Unit::Millis.show(seconds.mean() * 1e3)
}

pub(super) fn header<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(String::from).to_vec()
}
