//! H16: the pilot's bills and GPUs (table 5, Fig 15). Functions on pools of GPUs, billed by the rules of
//! the nodes (T26), are compared with functions that each have a GPU of their own.

use std::f64::consts::TAU;
use std::time::Duration;

use anyhow::Result;
use millrace_memory::eviction::Eviction;
use millrace_sim::models::{ModelFigures, SharedSpeed, TORPOR_PCIE};
use millrace_sim::run_each;
use millrace_sim::scenario::{ClusterScenario, SimulatedFunction};
use millrace_sim::workload::patterns::{self, WorkloadPattern};
use millrace_sim::workload::{RequestArrival, random, zipf};
use millrace_types::{Bytes, Timestamp};
use rand::Rng as _;

use super::setup::{ComparedSystem, named};
use crate::effort::Effort;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;

/// Table 1: the memory of a model (MB), and the time in which its runtime resumes (ms).
const MODELS: [(&str, u64, u64); 6] = [
    ("resnet-152", 1_600, 260),
    ("bert-qa", 2_400, 190),
    ("stable-diffusion", 5_100, 1_500),
    ("llama3-8b", 13_000, 1_400),
    ("qwen-14b", 20_100, 1_500),
    ("llama2-13b", 24_500, 1_900),
];
/// The number of the pilot's functions: its 350 GPUs are 65% fewer than 1000, one for each long-running
/// function.
const FUNCTIONS: f64 = 1000.0;
const USERS: f64 = 150.0;
const REQUESTS_A_DAY: f64 = 465_000.0;
/// The number of functions that are simulated.
const PART: usize = 60;
const DAY: Duration = Duration::from_secs(86_400);
/// The number of GPUs of a node.
const GPUS: u32 = 4;
/// The numbers of functions on a node, tried in ascending order until requests wait for too long.
const DENSITIES: [usize; 4] = [8, 10, 12, 15];
/// The highest acceptable share of waiting and loading in the time of requests: the share of loading in the
/// pilot's own function (Fig 15).
const LOADING: f64 = 0.30;
/// The two readings of the mean time of a run, in seconds.
const RUNS: [f64; 2] = [10.0, 40.0];

/// A function with its rate and its user.
#[derive(Debug, Clone)]
struct PilotFunction {
    model: ModelFigures,
    mean_gap: Duration,
    user: usize,
}

impl PilotFunction {
    /// Returns the share of a GPU's time that the function's requests compute.
    fn load(&self) -> f64 {
        self.model.run.as_secs_f64() / self.mean_gap.as_secs_f64()
    }
}

/// Returns a model of table 1 with this run time. The model's process starts with each swap.
fn model(place: usize, run: Duration) -> ModelFigures {
    let (name, megabytes, resume) = MODELS[place % MODELS.len()];
    let weights = Bytes(megabytes * 1_000_000);
    let start = TORPOR_PCIE.time_for(weights) + Duration::from_millis(resume);
    let shared = SharedSpeed::PROPORTIONAL;
    ModelFigures { name: name.to_owned(), weights, memory: weights, run, tail: run, start, shared }
}

/// Returns the simulated functions. `mean_run` is the mean time of a run in seconds.
fn fleet(functions: usize, mean_run: f64, seed: u64) -> Vec<PilotFunction> {
    let mut rng = random(seed, 16);
    // Popularity is log-uniform over a factor of ten. This is the mean of 10^x for x from 0 to 1.
    let mean_of_factor = 9.0 / 10f64.ln();
    let users = (USERS * functions as f64 / FUNCTIONS).round().max(1.0) as usize;
    // Users have functions by Zipf's law with exponent 1, but each has at least one.
    let shares = zipf::shares(users, 1.0);
    let published = |place: usize| {
        let popularity = 10f64.powf(rng.random::<f64>()) / mean_of_factor;
        let per_day = REQUESTS_A_DAY / FUNCTIONS * popularity;
        let run = Duration::from_secs_f64(mean_run * rng.random_range(0.5..1.5));
        let mut left = rng.random::<f64>();
        let drawn = shares.iter().position(|share| {
            left -= share;
            left < 0.0
        });
        let user = if place < users { place } else { drawn.unwrap_or(0) };
        let kind = rng.random_range(0..MODELS.len());
        PilotFunction { model: model(kind, run), mean_gap: DAY.div_f64(per_day), user }
    };
    (0..functions).map(published).collect()
}

/// Returns arrivals at random times, with 1.5 times the mean rate at noon and half the mean rate at midnight.
fn arrivals(functions: &[PilotFunction], span: Duration, seed: u64) -> Vec<RequestArrival> {
    const SWING: f64 = 0.5;
    let densest =
        |it: &PilotFunction| WorkloadPattern::Sporadic { mean_gap: it.mean_gap.div_f64(1.0 + SWING) };
    let patterns: Vec<_> = functions.iter().map(densest).collect();
    let mut rng = random(seed, 17);
    let mut arrivals = patterns::arrivals(&patterns, span, seed);
    arrivals.retain(|arrival| {
        let at = arrival.at.since(Timestamp::ZERO).as_secs_f64() / DAY.as_secs_f64();
        let rate = 1.0 - SWING * (TAU * at).cos();
        rng.random::<f64>() * (1.0 + SWING) < rate
    });
    arrivals
}

/// The results of a pool of GPUs.
#[derive(Debug, Clone, Default)]
struct Pool {
    gpus: u32,
    /// The charge of each function, relative to the charge of a GPU of its own.
    charged: Vec<f64>,
    latency_s: f64,
    run_s: f64,
    failed: u64,
}

impl Pool {
    /// Returns the share of the requests' time that is not computation.
    fn waiting(&self) -> f64 {
        1.0 - self.run_s / self.latency_s.max(1e-9)
    }
}

fn span_of(effort: Effort) -> Duration {
    if effort.short { DAY / 48 } else { DAY }
}

/// Returns the functions of each node, at most `density` on a node. The busiest functions are placed first,
/// each on the node with the least load, as the paper's cluster manager balances load (§4.1).
fn balanced(fleet: &[PilotFunction], density: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..fleet.len()).collect();
    order.sort_by(|&a, &b| fleet[b].load().total_cmp(&fleet[a].load()));
    let mut nodes = vec![(0.0_f64, Vec::new()); fleet.len().div_ceil(density)];
    for place in order {
        let with_room = nodes.iter_mut().filter(|(_, its)| its.len() < density);
        let Some((load, its)) = with_room.min_by(|a, b| a.0.total_cmp(&b.0)) else { continue };
        *load += fleet[place].load();
        its.push(place);
    }
    nodes.into_iter().map(|(_, its)| its).collect()
}

/// Runs the functions on nodes of four GPUs, with at most `density` functions on a node.
fn pool(
    system: &ComparedSystem,
    fleet: &[PilotFunction],
    density: usize,
    seed: u64,
    effort: Effort,
) -> Result<Pool> {
    let nodes = balanced(fleet, density);
    let node = |(place, its): (usize, &Vec<usize>)| {
        let functions: Vec<_> = its.iter().map(|&function| fleet[function].clone()).collect();
        let published = functions.iter().map(|it| SimulatedFunction::new(it.model.clone(), None)).collect();
        let seed = seed * 1000 + place as u64;
        let arrivals = arrivals(&functions, span_of(effort), seed);
        ClusterScenario::new(vec![system.node(GPUS)], published, arrivals, seed)
    };
    let scenarios: Vec<_> = nodes.iter().enumerate().map(node).collect();
    let outcomes = run_each(&scenarios, |scenario, outcome| {
        let usage = outcome.usage(&scenario.functions);
        let own = outcome.span.as_secs_f64();
        let charged: Vec<f64> = usage.iter().map(|it| it.charge().as_secs_f64() / own).collect();
        let answered = outcome.records.iter().filter(|record| record.answered());
        let latency = answered.clone().map(|it| it.latency().as_secs_f64()).sum::<f64>();
        let run = answered.map(|it| scenario.functions[it.function as usize].model.run.as_secs_f64());
        (charged, latency, run.sum::<f64>(), outcome.summary(&scenario.functions).failed)
    })?;
    let gpus = GPUS * nodes.len() as u32;
    let mut pool = Pool { gpus, charged: vec![0.0; fleet.len()], ..Pool::default() };
    for (its, (charged, latency, run, failed)) in nodes.iter().zip(outcomes) {
        its.iter().zip(charged).for_each(|(&function, charged)| pool.charged[function] = charged);
        pool.latency_s += latency;
        pool.run_s += run;
        pool.failed += failed;
    }
    Ok(pool)
}

/// Returns the mean saving of the users, relative to GPUs of their own.
fn saving(fleet: &[PilotFunction], pool: &Pool) -> f64 {
    let users = fleet.iter().map(|it| it.user + 1).max().unwrap_or(0);
    let mut bills = vec![(0.0, 0.0); users];
    for (function, charged) in fleet.iter().zip(&pool.charged) {
        let bill = &mut bills[function.user];
        *bill = (bill.0 + charged, bill.1 + 1.0);
    }
    let savings = bills.iter().filter(|bill| bill.1 > 0.0).map(|(charged, own)| 1.0 - charged / own);
    savings.sum::<f64>() / bills.iter().filter(|bill| bill.1 > 0.0).count().max(1) as f64
}

/// The results of one reading, by seed.
#[derive(Debug, Default)]
struct PilotResult {
    users: SeedValues,
    gpus: SeedValues,
    density: SeedValues,
    waiting: SeedValues,
    busy: SeedValues,
}

/// Finds the densest pool in which requests do not wait too long, for each seed.
fn densest(system: &ComparedSystem, mean_run: f64, effort: Effort) -> Result<PilotResult> {
    let (functions, densities): (usize, &[usize]) =
        if effort.short { (12, &DENSITIES[..1]) } else { (PART, &DENSITIES) };
    let mut found = PilotResult::default();
    for seed in effort.each_seed() {
        let fleet = fleet(functions, mean_run, seed);
        let mut best: Option<(usize, Pool)> = None;
        for &density in densities {
            let pool = pool(system, &fleet, density, seed, effort)?;
            let too_long = pool.waiting() > LOADING || pool.failed > 0;
            if best.is_some() && too_long {
                break;
            }
            best = Some((density, pool));
        }
        let Some((density, pool)) = best else { continue };
        found.users.0.push(saving(&fleet, &pool));
        found.gpus.0.push(1.0 - f64::from(pool.gpus) / functions as f64);
        found.density.0.push(density as f64);
        found.waiting.0.push(pool.waiting());
        let computes: f64 = fleet.iter().map(PilotFunction::load).sum();
        found.busy.0.push(computes / functions as f64);
    }
    Ok(found)
}

/// Returns the saving of the pilot's own function: several thousand requests a day, with 30% of their time in
/// loading.
fn case(system: &ComparedSystem, effort: Effort) -> Result<SeedValues> {
    const OTHERS: usize = 9;
    let mut savings = SeedValues::default();
    for seed in effort.each_seed() {
        let mut rng = random(seed, 18);
        let per_day = rng.random_range(2_000.0..5_000.0);
        // The loading time is between that of Bert-qa and that of Stable Diffusion in table 1.
        let loading = Duration::from_secs_f64(rng.random_range(0.33..1.74));
        let run = loading.mul_f64((1.0 - LOADING) / LOADING);
        let image_to_text = ModelFigures { start: loading, ..model(1, run) };
        let mut functions = fleet(OTHERS, RUNS[0], seed);
        functions.insert(0, PilotFunction { model: image_to_text, mean_gap: DAY.div_f64(per_day), user: 0 });
        let pool = pool(system, &functions, OTHERS + 1, seed, effort)?;
        savings.0.push(1.0 - pool.charged[0]);
    }
    Ok(savings)
}

fn assumed() -> Vec<String> {
    [
        "The pilot's 350 GPUs are 65% fewer than 1000, the number of functions with a GPU of their own without Torpor. The 1000 functions of 150 users have 465 requests a day each, 465,000 in all. 60 functions of 9 users are simulated for a day, on nodes of four V100 of 25 GB; the remaining functions would be alike.",
        "A function has 119 to 1190 requests a day (log-uniform over a factor of ten), at random times, with 1.5 times the mean rate at noon and half the mean rate at midnight. Its model is one of the six of table 1 at random, with the memory of table 1. Each swap resumes the model's runtime, in the time of table 1 (runtime isolation). Users have functions by Zipf's law, but each at least one.",
        "The paper does not state the computing time of requests. *10 s* and *40 s* are means; the time of a function is 0.5 to 1.5 times the mean. The second mean follows from the pilot's figures if these are of one day: users who save 70%, with idle time at a tenth of the price, compute 22% of the time, which is 41 s a request. So the users' saving at 40 s is no prediction, but the number of GPUs is.",
        "Bills are those of the nodes (`scheduling::admission`, `scheduling::residence`): answered runs in whole milliseconds, a tenth of the idle time in host memory, and no charge for waiting and swapping. Without Torpor a user pays for each function's GPU all day.",
        "The number of GPUs follows from the highest number of functions on a node, of 8, 10, 12 and 15, at which requests wait and load for at most 30% of their time, as in figure 15 for the pilot's own function. Functions are placed such that the load of nodes is balanced, as by the paper's cluster manager (§4.1).",
        "The pilot's own function (case) has 2,000 to 5,000 requests a day (\"several thousand\"), with 30% of their time in loading, which takes from 0.33 s (Bert-qa) to 1.74 s (Stable Diffusion), by the seed.",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Measures the users' costs and the number of GPUs.
pub(super) fn bills(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport { assumed: assumed(), ..ExperimentReport::default() };
    let system = named("torpor", Eviction::Torpor)?;
    let mut rows = Vec::new();
    for mean_run in RUNS {
        let found = densest(&system, mean_run, effort)?;
        let percent = |it: &SeedValues| {
            format!("{} ± {}", Unit::Percent.show(it.mean()), Unit::Percent.show(it.half_interval()))
        };
        rows.push(vec![
            format!("{mean_run} s"),
            percent(&found.busy),
            percent(&found.users),
            format!("{:.1}", found.density.mean()),
            percent(&found.gpus),
            percent(&found.waiting),
        ]);
        let figure = |what: &str, paper: f64, ours: SeedValues| Figure {
            what: format!("{what}, {mean_run} s"),
            claim: Claim::paper(Unit::Percent.show(paper), Bound::About(paper)),
            ours,
            unit: Unit::Percent,
            cause: None,
        };
        for (what, ours) in [("users' costs", &found.users), ("GPUs", &found.gpus)] {
            let what = format!("{what}: fewer than without, {mean_run} s");
            report.orders.push(PolicyOrder { what, by: ours.clone(), cause: None });
        }
        if mean_run > RUNS[0] {
            let claim = Claim::not_judged("70%: the mean time of a run was fitted to it");
            let users = figure("users' costs below a GPU of their own", 0.70, found.users);
            report.figures.push(Figure { claim, ..users });
            report.figures.push(figure("GPUs below one for each function", 0.65, found.gpus));
        }
    }
    let savings = case(&system, effort)?;
    report.figures.push(Figure {
        what: "the case's cost below a GPU of its own".to_owned(),
        claim: Claim::paper("84%", Bound::About(0.84)),
        ours: savings,
        unit: Unit::Percent,
        cause: None,
    });
    let header = [
        "a run takes",
        "a function computes",
        "users save",
        "functions a node",
        "GPUs saved",
        "waiting and loading",
    ];
    report.tables.push(("A day of the pilot:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}
