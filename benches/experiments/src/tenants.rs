//! The latency of a tenant beside a tenant at ten times its load (L20), under the caps of a node:
//! `scheduling::tenancy` in whole nodes, with models that are swapped and links that are shared.

use std::num::NonZeroU32;
use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_memory::eviction::Eviction;
use millrace_sim::outcome::percentile;
use millrace_sim::run_each;
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
use millrace_sim::workload::MINUTE;
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_sim::{models, report::format_percent};
use millrace_types::{Quota, ResourceShare, TenantName};

use crate::effort::Effort;
use crate::experiment::Experiment;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;
use crate::torpor::v100;

pub const EXPERIMENTS: [Experiment; 1] = [Experiment {
    id: "TENANTS",
    title: "A tenant at ten times its load, and another's p99",
    run: isolation,
}];

/// The workloads: the number of functions of each tenant, and the mean time between requests of a function.
/// The models of the first stay on the GPUs; those of the second are swapped.
const WORKLOADS: [(&str, usize, Duration); 2] =
    [("resident", 80, Duration::from_secs(3)), ("swapped", 240, Duration::from_secs(6))];
const POLICIES: [&str; 2] = ["fifo", "unified"];
const TIMES: u32 = 10;

/// The cause of `fifo` outside the band with resident models, with 10 seeds.
const ONE_IN_A_HUNDRED: &str = "`fifo` copies a model to an idle GPU if the GPUs that hold the model are busy. For about one in a hundred of the quiet tenant's requests that model is Bert-qa, so the p99 is the time of that swap (144 ms). That holds in 7 of 10 seeds before the other tenant's load, and in all seeds under the load";

/// Returns the compared caps of the noisy tenant, by name.
fn caps() -> Result<[(&'static str, Quota); 4]> {
    let share = |of: f64| ResourceShare::from_fraction(of).context("invalid share of a cap");
    let one = Quota { gpus_max: NonZeroU32::new(1), ..Quota::NONE };
    let shares = Quota { gpu_share: Some(share(0.25)?), memory_share: Some(share(0.5)?), ..one };
    let time = Quota { gpu_share: Some(share(0.25)?), ..Quota::NONE };
    Ok([
        ("none", Quota::NONE),
        ("one GPU", one),
        ("25% of the time", time),
        ("one GPU, 25% of the time, 50% of the memory", shares),
    ])
}

/// Returns the functions of a quiet tenant and then those of a noisy tenant, on the Torpor node.
fn scenario(
    policy: &str,
    quota: Quota,
    functions: usize,
    apart: Duration,
    times: u32,
    seed: u64,
    effort: Effort,
) -> Result<ClusterScenario> {
    let quiet = TenantName::new("quiet").context("invalid tenant name")?;
    let noisy = TenantName::new("noisy").context("invalid tenant name")?;
    let table = models::torpor();
    let function = |place: usize| {
        let tenant = if place < functions { quiet.clone() } else { noisy.clone() };
        SimulatedFunction { tenant, ..SimulatedFunction::new(table[place % table.len()].clone(), None) }
    };
    let beat = |times: u32| WorkloadPattern::Sporadic { mean_gap: apart / times };
    let mut patterns = vec![beat(1); functions];
    patterns.resize(2 * functions, beat(times));
    let span = if effort.short { MINUTE / 10 } else { MINUTE };
    let arrivals = patterns::arrivals(&patterns, span, seed);
    let node = SimulatedNode {
        eviction: Eviction::Torpor,
        ..SimulatedNode::new(v100(4), crate::lalb::policy(policy)?)
    };
    let published = (0..2 * functions).map(function).collect();
    let quotas = if quota.is_none() { [].into() } else { [(noisy, quota)].into() };
    let scenario = ClusterScenario::new(vec![node], published, arrivals, seed);
    Ok(ClusterScenario { quotas, timeout: MINUTE, warmed: true, ..scenario })
}

/// Returns the quiet tenant's p99 in milliseconds, and the share of the noisy tenant's requests that were
/// answered.
fn measure(setups: &[ClusterScenario], functions: usize) -> Result<(SeedValues, SeedValues)> {
    let measured = run_each(setups, |_, outcome| {
        let tail = percentile(&outcome.latencies_of(|function| (function as usize) < functions), 99.0);
        let noisy = outcome.records.iter().filter(|it| it.function as usize >= functions);
        let answered = noisy.clone().filter(|it| it.answered()).count();
        (tail.as_secs_f64() * 1e3, answered as f64 / noisy.count().max(1) as f64)
    })?;
    let (tails, answered) = measured.into_iter().unzip();
    Ok((SeedValues(tails), SeedValues(answered)))
}

fn isolation(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport::default();
    report.assumed.push(format!(
        "The Torpor node; a quiet and a noisy tenant, each with as many functions over the eight models. Requests arrive at random times for a minute, those of the noisy tenant {TIMES} times as often. *resident*: 80 functions each, which take 43 of the GPUs' 100 GB, with a request of each every 3 s; {TIMES} times that rate exceeds the capacity of four GPUs. *swapped*: 240 functions each, 128 GB, with a request of each every 6 s; {TIMES} times that rate is twice the capacity. The quiet tenant has no caps."
    ));
    let workloads = if effort.short { &WORKLOADS[..1] } else { &WORKLOADS };
    let mut rows = Vec::new();
    for &(workload, functions, apart) in workloads {
        let functions = if effort.short { functions / 10 } else { functions };
        for policy in POLICIES {
            let mut uncapped = None;
            for (name, quota) in caps()? {
                let at = |times: u32| {
                    let setup = |seed| scenario(policy, quota, functions, apart, times, seed, effort);
                    measure(&effort.each_seed().map(setup).collect::<Result<Vec<_>>>()?, functions)
                };
                let (before, _) = at(1)?;
                let (under, answered) = at(TIMES)?;
                let by =
                    SeedValues(under.0.iter().zip(&before.0).map(|(under, before)| under / before).collect());
                rows.push(vec![
                    workload.to_owned(),
                    policy.to_owned(),
                    name.to_owned(),
                    Unit::Millis.show(before.mean()),
                    Unit::Millis.show(under.mean()),
                    format!("{} ± {}", Unit::Times.show(by.mean()), Unit::Times.show(by.half_interval())),
                    format_percent(answered.mean()),
                ]);
                if quota.is_none() {
                    uncapped = Some(under);
                    continue;
                }
                let what = format!("{workload}, {policy}, {name}");
                report.figures.push(Figure {
                    what: format!("{what}: the quiet tenant's p99 under the load, relative to before"),
                    claim: Claim::goal("at most 1.10× (our aim)", Bound::AtMost(1.10)),
                    ours: by,
                    unit: Unit::Times,
                    cause: (policy == "fifo" && workload == "resident").then_some(ONE_IN_A_HUNDRED),
                });
                if let Some(uncapped) = &uncapped {
                    let what = format!("{what}: p99 at most that without caps");
                    report.orders.push(PolicyOrder { what, by: uncapped.differences(&under), cause: None });
                }
            }
        }
    }
    let header = [
        "models",
        "policy",
        "the noisy tenant's caps",
        "quiet p99 before",
        "quiet p99 under the load",
        "ratio",
        "noisy answered",
    ];
    report.tables.push(("Two tenants:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}
