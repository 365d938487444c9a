//! The elastic store's parts (H22, Fig 15b) and pools (H23, Fig 16).

use std::time::Duration;

use anyhow::Result;
use millrace_memory::elastic::{MigrationPolicy, POOLS, PoolPolicy};
use millrace_sim::passing::{ArrivalProcess, DataflowOutcome, DataflowSetup, System, workflow};
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_types::{Bytes, Timestamp};

use super::measurements::{
    average, figure, gain, header, load, most, ms, order, outcomes, p99_passing, range, spread,
};
use super::setup::{Server, Shape, as_h18, bursts, open, open_as};
use crate::effort::Effort;
use crate::figures::{Bound, Claim, SeedValues, Unit};
use crate::report::ExperimentReport;

/// The burst that fills stores: the number of requests, and the time between two requests.
const FLOOD: (u32, Duration) = (100, Duration::from_millis(1));

pub(super) fn store(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport { assumed: as_h18(), ..ExperimentReport::default() };
    report.assumed.push(format!(
        "*Pool*: bursty arrivals as in the other experiments. *Migration*: bursts of {} requests {} ms apart, at 40% of FaaSTube's capacity, so that functions make data faster than others read the data, and the 1 GiB of a store does not suffice.",
        FLOOD.0,
        FLOOD.1.as_millis()
    ));
    pool(&mut report, effort)?;
    migration(&mut report, effort)?;
    Ok(report)
}

fn pool(report: &mut ExperimentReport, effort: Effort) -> Result<()> {
    let server = Server::v100()?;
    let mut rows = Vec::new();
    let mut saved = Vec::new();
    for workflow in workflow::all() {
        let rate = load(&server, &workflow)?;
        let mut means = Vec::new();
        for system in
            [System { name: "no pool", pool: PoolPolicy::Unpooled, ..System::FAASTUBE }, System::FAASTUBE]
        {
            let runs = outcomes(effort, |seed| {
                let arrivals = open(Shape::Bursty, &[rate], seed, effort);
                server.setup(&workflow, system, arrivals, seed)
            })?;
            means.push(spread(&runs, |it| it.mean(0, |record| record.split.total())));
        }
        rows.push(vec![workflow.name.to_owned(), ms(&means[0]), ms(&means[1])]);
        saved.push(means[1].reduction_from(&means[0]));
    }
    let ours = (average(&saved), Unit::Percent);
    report.figures.push(figure(
        "the pool saves, on average".to_owned(),
        gain(Unit::Percent, 0.19),
        ours,
        None,
    ));
    let columns = header(["workflow", "no pool", "elastic pool"]);
    report.tables.push(("8xV100, mean latency without queues:".to_owned(), columns, rows));
    Ok(())
}

fn migration(report: &mut ExperimentReport, effort: Effort) -> Result<()> {
    let server = Server::v100()?;
    let mut rows = Vec::new();
    let mut saved = Vec::new();
    for workflow in workflow::all() {
        let rate = most(&server, &workflow, System::FAASTUBE)? * 0.4;
        let mut tails = Vec::new();
        for system in
            [System { name: "lru", migration: MigrationPolicy::Lru, ..System::FAASTUBE }, System::FAASTUBE]
        {
            let runs = outcomes(effort, |seed| {
                let arrivals = open_as(&[bursts(FLOOD.0, FLOOD.1, rate)], &[rate], seed, effort);
                server.setup(&workflow, system, arrivals, seed)
            })?;
            let tail = spread(&runs, |it| it.p99(0, |record| record.latency().as_secs_f64()));
            let count =
                |of: fn(&DataflowOutcome) -> u64| format!("{:.0}", spread(&runs, |it| of(it) as f64).mean());
            rows.push(vec![
                workflow.name.to_owned(),
                if system == System::FAASTUBE { "queue-aware" } else { "lru" }.to_owned(),
                ms(&tail),
                ms(&spread(&runs, p99_passing)),
                count(|it| it.counts.migrated),
                count(|it| it.counts.refused),
                count(|it| it.counts.reloaded),
                count(|it| it.counts.host_reads),
            ]);
            tails.push(tail);
        }
        saved.push(tails[1].reduction_from(&tails[0]));
        let what = format!("{}: p99 of queue-aware at most that of lru", workflow.name);
        report.orders.push(order(what, tails[0].differences(&tails[1]), None));
    }
    let ours = (range(&saved).1, Unit::Percent);
    let what = "queue-aware migration, most of the p99 saved".to_owned();
    report.figures.push(figure(what, gain(Unit::Percent, 0.14), ours, None));
    let columns = header([
        "workflow",
        "migration",
        "p99",
        "p99 of passing",
        "migrated",
        "refused",
        "reloaded",
        "read from the host",
    ]);
    report.tables.push(("8xV100, large bursts:".to_owned(), columns, rows));
    Ok(())
}

/// Returns an hour of arrivals: bursts for 20 s of every ten minutes. `strays` is the mean time between
/// single requests throughout the hour, if any.
fn phases(rate: f64, strays: Option<Duration>, seed: u64, effort: Effort) -> ArrivalProcess {
    let cycles = if effort.short { 1 } else { 6 };
    let cycle = Duration::from_secs(600);
    let strays: Vec<_> = strays.into_iter().map(|mean_gap| WorkloadPattern::Sporadic { mean_gap }).collect();
    let mut all = patterns::arrivals(&strays, cycle * cycles, seed);
    for number in 0..cycles {
        let busy = patterns::arrivals(
            &[bursts(32, Duration::from_millis(2), rate)],
            Duration::from_secs(20),
            seed * 100 + u64::from(number),
        );
        let begins = cycle * number + Duration::from_secs(60);
        all.extend(busy.into_iter().map(|mut it| {
            it.at = Timestamp(it.at.0) + begins;
            it
        }));
    }
    all.sort_unstable();
    ArrivalProcess::Open(all)
}

/// The results of a pool.
struct PoolResult {
    pool: &'static str,
    held: SeedValues,
    tail: SeedValues,
}

pub(super) fn pools(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport { assumed: as_h18(), ..ExperimentReport::default() };
    report.assumed.push(
        "The workflow *traffic* for an hour: bursts of 32 requests at 60% of FaaSTube's capacity, for 20 s of every ten minutes. *With strays*: also one request in 20 s, on average, throughout the hour. Sizes are 0.2 to 1.8 times the usual. Stores may have 8 GiB, so that the size of a pool is the pool's own choice. All else is as in FaaSTube.".to_owned(),
    );
    let often = measure_pools(&mut report, "phases", None, effort)?;
    judge_pools(&mut report, "phases", &often, None);
    let with_strays = "with strays";
    let found = measure_pools(&mut report, with_strays, Some(Duration::from_secs(20)), effort)?;
    judge_pools(&mut report, with_strays, &found, Some(RESERVED));
    Ok(report)
}

fn measure_pools(
    report: &mut ExperimentReport,
    name: &str,
    strays: Option<Duration>,
    effort: Effort,
) -> Result<Vec<PoolResult>> {
    let server = Server::v100()?;
    let workflow = workflow::traffic();
    let rate = most(&server, &workflow, System::FAASTUBE)? * 0.6;
    let mut rows = Vec::new();
    let mut found = Vec::new();
    for (pool, policy) in POOLS {
        let system = System { name: pool, pool: policy, ..System::FAASTUBE };
        let runs = outcomes(effort, |seed| {
            let setup = server.setup(&workflow, system, phases(rate, strays, seed, effort), seed);
            DataflowSetup { store_cap: Bytes::gib(8), sizes: (0.2, 1.8), ..setup }
        })?;
        let held = spread(&runs, |it: &DataflowOutcome| it.memory.allocated);
        let tail = spread(&runs, p99_passing);
        let mib = |bytes: f64| format!("{:.0} MiB", bytes / f64::from(1 << 20));
        rows.push(vec![
            pool.to_owned(),
            mib(held.mean()),
            mib(spread(&runs, |it| it.memory.peak).mean()),
            mib(spread(&runs, |it| it.memory.used).mean()),
            ms(&tail),
            ms(&spread(&runs, |it| it.mean(0, |record| record.split.passing()))),
            format!("{:.0}", spread(&runs, |it| it.calls.allocations as f64).mean()),
        ]);
        found.push(PoolResult { pool, held, tail });
    }
    let columns = header([
        "pool",
        "allocated, mean",
        "peak",
        "used, mean",
        "p99 of passing",
        "mean",
        "allocations waited for",
    ]);
    report.tables.push((format!("8xV100, all stores together, {name}:"), columns, rows));
    Ok(found)
}

/// The cause of an elastic pool that reserves much memory for few requests.
const RESERVED: &str = "each stray request opens the window again, and the pool then reserves the 99th percentile of concurrency over the last 256 objects, which are still those of the last burst (D23); without strays (first table) the pool frees the memory";
/// The cause of reclaiming at a lower cost than in the paper.
const RECLAIMED: &str = "after a reclaim only the first objects of a burst allocate, 600 of 39,000, for 1.3 ms each, and the tail is 5.6 ms; 4× would take native calls of 17 ms";

fn judge_pools(
    report: &mut ExperimentReport,
    name: &str,
    found: &[PoolResult],
    reserved: Option<&'static str>,
) {
    let of = |name: &str| found.iter().find(|it| it.pool == name);
    let (Some(elastic), Some(never), Some(minute), Some(gmlake)) =
        (of("elastic"), of("caching"), of("caching-1min"), of("gmlake"))
    else {
        return;
    };
    let ratio =
        |a: &SeedValues, b: &SeedValues| SeedValues(a.0.iter().zip(&b.0).map(|(a, b)| a / b).collect());
    let times = |what: &str, ours, cause| {
        let claim = Claim::paper("up to 4×", Bound::About(4.0));
        figure(format!("{name}: {what}"), claim, (ours, Unit::Times), cause)
    };
    let memory = ratio(&never.held, &elastic.held);
    report.figures.push(times("memory of PyTorch's pool relative to the elastic pool", memory, reserved));
    let tail = ratio(&minute.tail, &never.tail);
    let what = "p99 of passing, reclaimed each minute relative to never";
    report.figures.push(times(what, tail, Some(RECLAIMED)));
    for (what, by) in [
        ("memory: elastic below PyTorch's", never.held.differences(&elastic.held)),
        ("memory: elastic below GMLake's", gmlake.held.differences(&elastic.held)),
        (
            "p99 of passing: elastic at most that of reclaiming each minute",
            minute.tail.differences(&elastic.tail),
        ),
        ("p99 of passing: elastic below GMLake's", gmlake.tail.differences(&elastic.tail)),
    ] {
        report.orders.push(order(format!("{name}: {what}"), by, None));
    }
}
