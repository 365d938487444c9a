//! The LALB paper's experiments: 12 GPUs of 8 GB, 325 requests a minute for 6 minutes, and 15, 25 or 35
//! functions (L19).
//!
//! The paper's scheduler has one global queue over its three servers, which is one dispatch domain of
//! twelve GPUs here. The experiments also run the cluster as in Millrace: a router over three nodes of four
//! GPUs.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use millrace_scheduling::dispatch::PolicyConfig;
use millrace_sim::models::{self, LALB_GPU_MEMORY, ModelFigures};
use millrace_sim::report::{format_duration, format_percent};
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction, SimulatedNode};
use millrace_sim::workload::{apportion, minutes, random, zipf};
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{BytesPerSec, GpuIndex};
use rand::seq::SliceRandom as _;

use crate::effort::Effort;
use crate::experiment::Experiment;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;
use crate::seeds::Summaries;
use crate::versus::{PolicyComparison, Quantity};

pub const EXPERIMENTS: [Experiment; 4] = [
    Experiment {
        id: "H01-H04",
        title: "LALB and O3 against load balancing: latency and misses",
        run: latency,
    },
    Experiment { id: "H05", title: "LALB: false misses, duplicates and SM utilisation", run: efficiency },
    Experiment { id: "H06", title: "LALB: the limit of overtaking requests", run: limits },
    Experiment {
        id: "ROUTED",
        title: "LALB behind a router: three nodes of four GPUs against one domain of twelve",
        run: routed,
    },
];

/// The number of requests in each minute.
const PER_MINUTE: u32 = 325;
/// The number of minutes of the trace.
const MINUTES: usize = 6;
/// The number of functions of the whole trace.
const TRACE_FUNCTIONS: usize = 46_413;
/// The number of most popular functions of which the paper states the share of requests.
const TOP: usize = 15;
/// The share of requests of the [`TOP`] most popular functions.
const TOP_SHARE: f64 = 0.56;

/// A reading of the popularity of the kept functions, which the paper leaves open (docs/develop/mechanisms.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PopularityReading {
    /// Popularity follows Zipf's law over all 46,413 functions, at the exponent at which 15 functions have
    /// 56% of the requests. The most popular functions are kept.
    Steep,
    /// Popularity follows Zipf's law over the kept functions, with 15 functions at 56% of the requests. All
    /// functions are equally popular if the even share of 15 functions is higher.
    Flat,
}

impl PopularityReading {
    pub const ALL: [Self; 2] = [Self::Steep, Self::Flat];

    /// Returns the reading's name in the tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Steep => "steep",
            Self::Flat => "flat",
        }
    }

    /// Returns the shares of the kept functions, most popular first.
    #[must_use]
    pub fn shares(self, functions: usize) -> Vec<f64> {
        match self {
            Self::Steep => {
                let all = zipf::shares(TRACE_FUNCTIONS, zipf::exponent(TRACE_FUNCTIONS, TOP, TOP_SHARE));
                all.into_iter().take(functions).collect()
            }
            Self::Flat => zipf::shares(functions, zipf::exponent(functions, TOP, TOP_SHARE)),
        }
    }
}

/// The arrangement of the twelve GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arrangement {
    /// One queue over all twelve GPUs, as in the paper.
    OneDomain,
    /// A router over three nodes of four GPUs.
    Routed,
}

impl Arrangement {
    fn nodes(self, dispatch: PolicyConfig) -> Vec<SimulatedNode> {
        match self {
            Self::OneDomain => vec![SimulatedNode::new(rtx2080(12), dispatch)],
            Self::Routed => vec![SimulatedNode::new(rtx2080(4), dispatch); 3],
        }
    }
}

/// Returns GPUs of 8 GB, each behind a PCIe link of its own.
fn rtx2080(gpus: u32) -> Topology {
    let gpu = |index: u32| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "RTX-2080".to_owned(),
        memory: LALB_GPU_MEMORY,
        host_path: vec![LinkId(index)],
    };
    let link = TopologyLink { kind: LinkKind::Pcie, rate: BytesPerSec::gb(12) };
    Topology {
        name: "rtx2080".to_owned(),
        gpus: (0..gpus).map(gpu).collect(),
        links: vec![link; gpus as usize],
    }
}

/// Returns a model for each function, of evenly spread sizes and in a random order. Every model occurs once
/// before any model occurs twice.
fn models_for(functions: usize, seed: u64) -> Vec<ModelFigures> {
    let table = models::lalb();
    let mut chosen = Vec::with_capacity(functions);
    while chosen.len() < functions {
        let left = (functions - chosen.len()).min(table.len());
        chosen.extend((0..left).map(|place| table[place * table.len() / left].clone()));
    }
    chosen.shuffle(&mut random(seed, 0));
    chosen
}

/// Returns the scenario of one run.
#[must_use]
pub fn scenario(
    dispatch: PolicyConfig,
    functions: usize,
    reading: PopularityReading,
    arrangement: Arrangement,
    seed: u64,
    effort: Effort,
) -> ClusterScenario {
    let counts = apportion(PER_MINUTE, &reading.shares(functions));
    let minutes = vec![counts; if effort.short { 1 } else { MINUTES }];
    let published = models_for(functions, seed).into_iter().map(|model| {
        let replicas = if arrangement == Arrangement::Routed { 3 } else { 1 };
        SimulatedFunction { replicas, ..SimulatedFunction::new(model, None) }
    });
    let arrivals = minutes::arrivals(&minutes, seed);
    ClusterScenario::new(arrangement.nodes(dispatch), published.collect(), arrivals, seed)
}

/// Returns the dispatch policy of this name.
///
/// # Errors
/// Returns an error if no policy has the name.
pub fn policy(name: &str) -> Result<PolicyConfig> {
    name.parse().with_context(|| format!("invalid policy {name}"))
}

type Key = (&'static str, usize, PopularityReading);

/// The results of several policies with several working sets.
struct ResultGrid(BTreeMap<Key, Summaries>);

impl ResultGrid {
    fn run(
        policies: &[&'static str],
        sets: &[usize],
        arrangement: Arrangement,
        effort: Effort,
    ) -> Result<Self> {
        let mut grid = BTreeMap::new();
        for &name in policies {
            let dispatch = policy(name)?;
            for &functions in sets {
                for reading in PopularityReading::ALL {
                    let setup = |seed| scenario(dispatch, functions, reading, arrangement, seed, effort);
                    grid.insert((name, functions, reading), Summaries::of(effort, setup)?);
                }
            }
        }
        Ok(Self(grid))
    }

    fn at(&self, policy: &'static str, functions: usize, reading: PopularityReading) -> &Summaries {
        &self.0[&(policy, functions, reading)]
    }

    fn compare(&self, versus: &mut PolicyComparison, arranged: &str) {
        for ((policy, functions, reading), it) in &self.0 {
            let setup = format!("{arranged}, {functions} functions, {}", reading.name());
            versus.add_summaries(&setup, policy, it);
            versus.add(&setup, policy, Quantity::MISSES, it.spread(|summary| summary.miss_ratio));
        }
    }

    fn table(&self, title: &str) -> (String, Vec<String>, Vec<Vec<String>>) {
        let header = [
            "functions",
            "reading",
            "policy",
            "mean latency",
            "p99",
            "variance",
            "misses",
            "false misses",
            "GPUs with the top model",
            "GPUs computing",
        ];
        let mean = |spread: SeedValues| spread.mean();
        let seconds = |spread: SeedValues| format_duration(std::time::Duration::from_secs_f64(spread.mean()));
        let rows = self.0.iter().map(|((policy, functions, reading), it)| {
            vec![
                functions.to_string(),
                reading.name().to_owned(),
                (*policy).to_owned(),
                seconds(it.spread(|summary| summary.mean.as_secs_f64())),
                seconds(it.spread(|summary| summary.p99.as_secs_f64())),
                format!("{:.2} s²", mean(it.spread(|summary| summary.variance))),
                format_percent(mean(it.spread(|summary| summary.miss_ratio))),
                format_percent(mean(it.spread(|summary| summary.false_miss_ratio))),
                format!("{:.2}", mean(it.spread(|summary| summary.held_of_top))),
                format_percent(mean(it.spread(|summary| summary.gpu_load))),
            ]
        });
        let mut rows: Vec<_> = rows.collect();
        rows.sort_by(|a, b| (a[0].len(), &a[0], &a[1]).cmp(&(b[0].len(), &b[0], &b[1])));
        (title.to_owned(), header.map(String::from).to_vec(), rows)
    }
}

fn assumed() -> Vec<String> {
    [
        "12 GPUs of 8 GB (decimal, as the sizes of models). A model occupies its memory at batch 32 (table I). 325 requests arrive in each of 6 minutes, at random times, and clients wait for every answer.",
        "A miss starts a process of the model's own: the loading time, then the inference, without overlap (L05, L06). Every inference lasts as long as in table I.",
        "The paper does not state how steeply popularity falls. *steep*: Zipf's law over all 46,413 functions, of which the most popular are kept. *flat*: Zipf's law over the kept functions, with the top 15 at 56% (all functions are equally popular if 56% is less than the even share of 15).",
        "35 functions exceed the 22 models, so 13 models occur twice and count as two models each (docs/develop/mechanisms.md, L19).",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Returns the reduction of a quantity against load balancing, under each reading.
fn reductions(
    grid: &ResultGrid,
    what: &str,
    paper: f64,
    policy: &'static str,
    functions: usize,
    of: impl Fn(&millrace_sim::RunSummary) -> f64 + Copy,
) -> [Figure; 2] {
    PopularityReading::ALL.map(|reading| {
        let base = grid.at("lb", functions, reading).spread(of);
        Figure {
            what: format!("{what}, {policy}, {functions} functions ({})", reading.name()),
            claim: Claim::paper(Unit::Percent.show(paper), Bound::About(paper)),
            ours: grid.at(policy, functions, reading).spread(of).reduction_from(&base),
            unit: Unit::Percent,
            cause: None,
        }
    })
}

const LATENCY_POLICIES: [&str; 4] = ["lb", "lalb", "lalb-o3", "unified"];

fn latency(effort: Effort) -> Result<ExperimentReport> {
    let grid = ResultGrid::run(&LATENCY_POLICIES, &[15, 25, 35], Arrangement::OneDomain, effort)?;
    let mean = |summary: &millrace_sim::RunSummary| summary.mean.as_secs_f64();
    let miss = |summary: &millrace_sim::RunSummary| summary.miss_ratio;
    let figures = [
        reductions(&grid, "H01 mean latency below lb", 0.9774, "lalb", 15, mean),
        reductions(&grid, "H02 mean latency below lb", 0.9333, "lalb", 25, mean),
        reductions(&grid, "H03 mean latency below lb", 0.7943, "lalb", 35, mean),
        reductions(&grid, "H03 mean latency below lb", 0.9693, "lalb-o3", 35, mean),
        reductions(&grid, "H04 misses below lb", 0.9411, "lalb", 15, miss),
        reductions(&grid, "H03 misses below lb", 0.6521, "lalb", 35, miss),
        reductions(&grid, "H03 misses below lb", 0.8115, "lalb-o3", 35, miss),
    ]
    .concat();
    let mut orders = Vec::new();
    for functions in [15, 25, 35] {
        for reading in PopularityReading::ALL {
            for (first, then) in [("lalb", "lb"), ("lalb-o3", "lalb"), ("unified", "lalb-o3")] {
                // With 15 functions all models fit, so O3 has nothing to improve, as the paper states.
                if functions == 15 && then == "lalb" {
                    continue;
                }
                let a = grid.at(first, functions, reading);
                let b = grid.at(then, functions, reading);
                let what =
                    format!("mean latency: {first} before {then}, {functions} functions, {}", reading.name());
                orders.push(PolicyOrder { what, by: b.mean_ms().differences(&a.mean_ms()), cause: None });
            }
        }
    }
    let tables = vec![grid.table("One dispatch domain of 12 GPUs:")];
    let mut versus = PolicyComparison::default();
    grid.compare(&mut versus, "one domain");
    Ok(ExperimentReport { assumed: assumed(), tables, figures, orders, versus })
}

/// The most that a router may add to a quantity of a single dispatch domain: a goal of our own.
const ROUTED_MAX: f64 = 1.25;

/// The cause of longer latencies and more misses of `lalb` behind a router, where all functions are popular.
const NO_RECOVERY: &str = "with a limit of 0, a miss holds up every hit behind. Loads take more time than the GPUs have, and twelve GPUs (means of 11 to 26 s) leave a miss more holders to go to than four (49 to 67 s)";

fn routed(effort: Effort) -> Result<ExperimentReport> {
    let policies = ["lalb", "lalb-o3", "unified"];
    let one = ResultGrid::run(&policies, &[35], Arrangement::OneDomain, effort)?;
    let three = ResultGrid::run(&LATENCY_POLICIES, &[35], Arrangement::Routed, effort)?;
    let mean = |summary: &millrace_sim::RunSummary| summary.mean.as_secs_f64();
    let miss = |summary: &millrace_sim::RunSummary| summary.miss_ratio;
    let mut figures = Vec::new();
    for policy in policies {
        for reading in PopularityReading::ALL {
            for (quantity, of) in [("mean latency", &mean as &dyn Fn(&_) -> f64), ("misses", &miss)] {
                let routed = three.at(policy, 35, reading).spread(of);
                let ours = routed.ratio_to(&one.at(policy, 35, reading).spread(of));
                figures.push(Figure {
                    what: format!("{quantity}, {policy}, {}: 3 nodes against one domain", reading.name()),
                    claim: Claim::goal(format!("at most {ROUTED_MAX}× (our aim)"), Bound::AtMost(ROUTED_MAX)),
                    ours,
                    unit: Unit::Times,
                    cause: (policy == "lalb" && reading == PopularityReading::Flat).then_some(NO_RECOVERY),
                });
            }
        }
    }
    let tables = vec![
        one.table("One dispatch domain of 12 GPUs:"),
        three.table("A router over 3 nodes of 4 GPUs, each function on every node:"),
    ];
    let mut versus = PolicyComparison::default();
    three.compare(&mut versus, "3 nodes");
    Ok(ExperimentReport { assumed: assumed(), tables, figures, versus, ..ExperimentReport::default() })
}

/// The cause of fewer false misses under O3 than in the paper.
const FEWER_MISSES: &str =
    "the remaining misses under our O3 are those of the least popular models, which one GPU holds or none";

fn efficiency(effort: Effort) -> Result<ExperimentReport> {
    let grid = ResultGrid::run(&["lb", "lalb", "lalb-o3"], &[15, 35], Arrangement::OneDomain, effort)?;
    let false_miss = |summary: &millrace_sim::RunSummary| summary.false_miss_ratio;
    let held = |summary: &millrace_sim::RunSummary| summary.held_of_top;
    let steep = PopularityReading::Steep;
    let lb_false = PopularityReading::ALL.map(|reading| Figure {
        what: format!("false misses of lb, 15 functions ({})", reading.name()),
        claim: Claim::paper("nearly 96%", Bound::About(0.96)),
        ours: grid.at("lb", 15, reading).spread(false_miss),
        unit: Unit::Percent,
        cause: None,
    });
    let falsely = "false misses below lb";
    let holders = "top model's holders below lb";
    let caused = |figures: [Figure; 2]| figures.map(|it| Figure { cause: Some(FEWER_MISSES), ..it });
    let figures = [
        lb_false,
        reductions(&grid, falsely, 0.3438, "lalb", 15, false_miss),
        reductions(&grid, falsely, 0.3541, "lalb-o3", 15, false_miss),
        caused(reductions(&grid, falsely, 0.0365, "lalb-o3", 35, false_miss)),
        reductions(&grid, holders, 0.4896, "lalb", 15, held),
        reductions(&grid, holders, 0.4948, "lalb-o3", 15, held),
        reductions(&grid, holders, 0.3532, "lalb", 35, held),
        reductions(&grid, holders, 0.3347, "lalb-o3", 35, held),
    ]
    .concat();
    let mut orders = Vec::new();
    for (what, of) in
        [("false misses", &false_miss as &dyn Fn(&_) -> f64), ("holders of the top model", &held)]
    {
        for policy in ["lalb", "lalb-o3"] {
            let base = grid.at("lb", 15, steep).spread(of);
            let ours = grid.at(policy, 15, steep).spread(of);
            let what = format!("{what}: {policy} below lb, 15 functions, steep");
            orders.push(PolicyOrder { what, by: base.differences(&ours), cause: None });
        }
    }
    let load = |policy, functions| grid.at(policy, functions, steep).spread(|summary| summary.gpu_load);
    for functions in [15, 35] {
        let what = format!("GPUs computing (SM utilisation, V-C): lalb-o3 above lb, {functions} functions");
        orders.push(PolicyOrder {
            what,
            by: load("lalb-o3", functions).differences(&load("lb", functions)),
            cause: None,
        });
    }
    let tables = vec![grid.table("One dispatch domain:")];
    Ok(ExperimentReport { assumed: assumed(), tables, figures, orders, ..ExperimentReport::default() })
}

fn limits(effort: Effort) -> Result<ExperimentReport> {
    let limits: &[u32] = if effort.short { &[0, 25] } else { &[0, 5, 15, 25, 35, 45] };
    let mut rows = Vec::new();
    let mut by_limit: BTreeMap<(PopularityReading, u32), Summaries> = BTreeMap::new();
    for reading in PopularityReading::ALL {
        for &limit in limits {
            let dispatch = PolicyConfig::Lalb { overtakes_max: limit };
            let setup = |seed| scenario(dispatch, 35, reading, Arrangement::OneDomain, seed, effort);
            let summaries = Summaries::of(effort, setup)?;
            rows.push(vec![
                reading.name().to_owned(),
                limit.to_string(),
                Unit::Millis.show(summaries.mean_ms().mean()),
                format_percent(summaries.spread(|summary| summary.miss_ratio).mean()),
                format!("{:.2} s²", summaries.spread(|summary| summary.variance).mean()),
            ]);
            by_limit.insert((reading, limit), summaries);
        }
    }
    let last = limits[limits.len() - 1];
    let reductions = |what: &str, paper: f64, of: &dyn Fn(&millrace_sim::RunSummary) -> f64| {
        PopularityReading::ALL.map(|reading| {
            let at = |limit| by_limit[&(reading, limit)].spread(of);
            Figure {
                what: format!("{what}, limit 45 below limit 0 ({})", reading.name()),
                claim: Claim::paper(Unit::Percent.show(paper), Bound::About(paper)),
                ours: at(last).reduction_from(&at(0)),
                unit: Unit::Percent,
                cause: Some(
                    "less is left to gain: at limit 0 our LALB is already 97% (steep) and 89% (flat) below lb, and the paper's is 79% below (H03)",
                ),
            }
        })
    };
    let figures = [
        reductions("mean latency", 0.851, &|summary| summary.mean.as_secs_f64()),
        reductions("misses", 0.4583, &|summary| summary.miss_ratio),
        reductions("variance of latency", 0.9593, &|summary| summary.variance),
    ]
    .concat();
    let header = ["reading", "limit", "mean latency", "misses", "variance"].map(String::from).to_vec();
    let tables = vec![("35 functions:".to_owned(), header, rows)];
    Ok(ExperimentReport { assumed: assumed(), tables, figures, ..ExperimentReport::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_model_occurs_once_before_any_model_occurs_twice() {
        let names = |functions| {
            let mut names: Vec<_> = models_for(functions, 1).into_iter().map(|model| model.name).collect();
            names.sort_unstable();
            let all = names.len();
            names.dedup();
            (all, names.len())
        };
        assert_eq!(names(15), (15, 15));
        assert_eq!(names(22), (22, 22));
        assert_eq!(names(35), (35, 22));
    }

    #[test]
    fn both_readings_have_325_requests_a_minute() {
        for reading in PopularityReading::ALL {
            let arrangement = Arrangement::OneDomain;
            let scenario = scenario(PolicyConfig::Lb, 35, reading, arrangement, 3, Effort::FULL);
            assert_eq!(scenario.arrivals.len(), PER_MINUTE as usize * MINUTES, "{reading:?}");
        }
    }
}
