//! The Torpor paper's experiments: a node of four V100 (two under each PCIe switch, NVLink between
//! them), and six such nodes.

use std::time::Duration;

use anyhow::Result;
use millrace_policy::dispatch::{Choice, Order as QueueOrder, PolicyConfig, TorporConfig};
use millrace_policy::gpu::Eviction;
use millrace_sim::models::{self, ModelFigures, TORPOR_PCIE};
use millrace_sim::outcome::percentile;
use millrace_sim::report::{percent, span};
use millrace_sim::run_each;
use millrace_sim::scenario::{Function, NodeSpec, Scenario};
use millrace_sim::workload::patterns::{self, Pattern};
use millrace_sim::workload::{MINUTE, minutes, rates};
use millrace_types::topology::{Gpu, Link, LinkId, LinkKind, Topology};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Slo};

use crate::figures::{Figure, Order, Spread, Unit};
use crate::report::Report;
use crate::seeds::Summaries;
use crate::{Effort, Experiment};

/// The experiments of this module.
pub const EXPERIMENTS: [Experiment; 4] = [
    Experiment {
        id: "H08-H09",
        title: "Torpor: functions that meet their objectives on one node",
        run: compliance,
    },
    Experiment { id: "H10", title: "Torpor: by required request count or by age", run: deadlines },
    Experiment { id: "H11", title: "Torpor: low-frequency functions on one GPU", run: one_gpu },
    Experiment { id: "T7.3", title: "Torpor: heavy and light models", run: heaviness },
];

/// What of a V100's 32 GB holds models (T12, the artifact's).
const GPU_MEMORY: Bytes = Bytes::gib(25);
/// A PCIe switch's uplink: what table 3 says of two Bert-qa that are swapped at once.
const UPLINK: BytesPerSec = BytesPerSec(11_650_000_000);
/// Requests of a function that have to be in time.
const PERCENTILE: f64 = 0.98;

/// So many of the four GPUs of table 4's machine.
fn v100(gpus: u32) -> Topology {
    let gpu = |index: u32| Gpu {
        index: GpuIndex(index),
        gpu_type: "V100".to_owned(),
        memory: GPU_MEMORY,
        host_path: vec![LinkId(index), LinkId(gpus + index / 2)],
    };
    let link = |kind, rate| Link { kind, rate };
    let own = (0..gpus).map(|_| link(LinkKind::Pcie, TORPOR_PCIE));
    let uplinks = (0..gpus.div_ceil(2)).map(|_| link(LinkKind::PcieUplink, UPLINK));
    // The artifact's pairs (T22).
    let pairs = [(0, 3, 48), (1, 2, 48), (2, 3, 48), (0, 1, 24), (0, 2, 24), (1, 3, 24)];
    let nvlinks = pairs
        .into_iter()
        .filter(|&(a, b, _)| a < gpus && b < gpus)
        .map(|(a, b, gb)| link(LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) }, BytesPerSec::gb(gb)));
    Topology {
        name: "v100".to_owned(),
        gpus: (0..gpus).map(gpu).collect(),
        links: own.chain(uplinks).chain(nvlinks).collect(),
    }
}

/// A system that is compared.
#[derive(Debug, Clone)]
struct System {
    name: &'static str,
    dispatch: PolicyConfig,
    eviction: Eviction,
}

impl System {
    fn node(&self, gpus: u32) -> NodeSpec {
        NodeSpec { eviction: self.eviction, ..NodeSpec::new(v100(gpus), self.dispatch) }
    }
}

fn systems() -> Result<Vec<System>> {
    let torpor = TorporConfig::default();
    let by_age = TorporConfig { order: QueueOrder::Arrival, ..torpor };
    let at_random = TorporConfig { choice: Choice::Random, ..torpor };
    let system = |name, config, eviction| System { name, dispatch: PolicyConfig::Torpor(config), eviction };
    Ok(vec![
        system("torpor", torpor, Eviction::Torpor),
        system("torpor-fifo", by_age, Eviction::Torpor),
        system("torpor-random", at_random, Eviction::Torpor),
        system("torpor-lru", torpor, Eviction::Lru),
        System { name: "unified", dispatch: crate::lalb::policy("unified")?, eviction: Eviction::Torpor },
    ])
}

/// The paper's deadlines: 80 ms, and 200 ms for Bert-qa.
fn slo(model: &ModelFigures) -> Slo {
    let deadline = if model.name == "bert-qa" { 200 } else { 80 };
    Slo { deadline: Duration::from_millis(deadline), percentile: PERCENTILE }
}

fn minutes_of(effort: Effort) -> usize {
    if effort.short { 1 } else { 15 }
}

/// So many functions over the eight models in turn, at the rates of the paper's artifact.
fn mixed(system: &System, functions: usize, (seed, effort): (u64, Effort)) -> Scenario {
    let table = models::torpor();
    let model = |place: usize| table[place % table.len()].clone();
    let published = (0..functions).map(model).map(|model| {
        let slo = slo(&model);
        Function::new(model, Some(slo))
    });
    let first = usize::try_from(seed * 31).unwrap_or(0);
    let counts = rates::by_minute(&rates::torpor(), functions, minutes_of(effort), first);
    let arrivals = minutes::arrivals(&counts, seed);
    let nodes = vec![system.node(4)];
    Scenario { timeout: MINUTE, warmed: true, ..Scenario::new(nodes, published.collect(), arrivals, seed) }
}

fn assumed() -> Vec<String> {
    [
        "Four V100 with 25 of 32 GB for models; PCIe at 10 GB/s, each switch's uplink at 11.65 GB/s, NVLink at 48 and 24 GB/s between the artifact's pairs. At these rates swaps alone take what table 4 says, and two of Bert-qa at once what table 3 says.",
        "Models hold their weights as published (single precision); activations, one run at a time, are in the 7 GB that are left; runs take what table 4 says with GPU remoting, every time.",
        "Rates are those of the artifact's 203 functions over 30 minutes (means of 5 to 15 a minute where §7.3 says 5 to 30), in turn, from a place of the seed's; requests at random moments of their minute. Every function is asked once before; clients wait for 60 s.",
    ]
    .map(str::to_owned)
    .to_vec()
}

fn compliance(effort: Effort) -> Result<Report> {
    let counts: &[usize] = if effort.short { &[560] } else { &[320, 480, 520, 560] };
    let mut rows = Vec::new();
    let mut report = Report { assumed: assumed(), ..Report::default() };
    let mut at_560: Vec<(&str, Spread)> = Vec::new();
    for system in systems()? {
        for &functions in counts {
            let summaries = Summaries::of(effort.seeds, |seed| mixed(&system, functions, (seed, effort)))?;
            let compliant = summaries.spread(millrace_sim::Summary::compliance);
            rows.push(vec![
                system.name.to_owned(),
                functions.to_string(),
                format!("{} ± {}", percent(compliant.mean()), percent(compliant.half())),
                Unit::Millis.show(summaries.mean_ms().mean()),
                Unit::Millis.show(summaries.spread(|it| it.p98.as_secs_f64() * 1e3).mean()),
                percent(summaries.spread(|it| it.miss_ratio).mean()),
                percent(summaries.spread(|it| it.gpu_load).mean()),
            ]);
            let figure = |what: String, paper: &str, ours, band| Figure {
                what,
                paper: paper.to_owned(),
                ours,
                unit: Unit::Percent,
                band,
                cause: None,
            };
            if functions == 480 && matches!(system.name, "torpor" | "unified") {
                let what = format!("H08 compliant of 480, {}", system.name);
                report.figures.push(figure(what, "100%", compliant.clone(), 0.995..=1.0));
            }
            if functions == 560 {
                if matches!(system.name, "torpor" | "unified") {
                    let what = format!("H09 compliant of 560, {}", system.name);
                    report.figures.push(figure(what, "over 80%", compliant.clone(), 0.80..=1.0));
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
        ("torpor-lru", "torpor-random"),
        ("unified", "torpor"),
    ] {
        if let (Some(a), Some(b)) = (of(first), of(then)) {
            let what = format!("compliant of 560: {first} at least {then}");
            report.orders.push(Order { what, by: a.less(&b), cause: None });
        }
    }
    let header = ["system", "functions", "compliant", "mean latency", "p98", "misses", "GPUs computing"];
    report.tables.push(("One node, 15 minutes:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}

/// 560 functions of ResNet-152 at several deadlines and loads.
fn deadlines(effort: Effort) -> Result<Report> {
    let systems: Vec<_> =
        systems()?.into_iter().filter(|it| !matches!(it.name, "torpor-random" | "torpor-lru")).collect();
    let mut rows = Vec::new();
    let mut report = Report { assumed: assumed(), ..Report::default() };
    report.assumed.push(
        "The paper does not say at which rates; at the artifact's, four GPUs are at about 60% and nobody is late, so rates are also raised until they are not enough."
            .to_owned(),
    );
    let loads: &[u32] = if effort.short { &[150] } else { &[100, 140, 160, 180] };
    let model = models::torpor().swap_remove(6);
    for &load in loads {
        for deadline in [60, 70, 80] {
            let mut compliant = Vec::new();
            for system in &systems {
                let setup = |seed: u64| {
                    let slo = Slo { deadline: Duration::from_millis(deadline), percentile: PERCENTILE };
                    let functions = vec![Function::new(model.clone(), Some(slo)); 560];
                    let first = usize::try_from(seed * 31).unwrap_or(0);
                    let mut counts = rates::by_minute(&rates::torpor(), 560, minutes_of(effort), first);
                    counts.iter_mut().flatten().for_each(|count| *count = (*count * load).div_ceil(100));
                    let arrivals = minutes::arrivals(&counts, seed);
                    let nodes = vec![system.node(4)];
                    Scenario {
                        timeout: MINUTE,
                        warmed: true,
                        ..Scenario::new(nodes, functions, arrivals, seed)
                    }
                };
                let summaries = Summaries::of(effort.seeds.min(5), setup)?;
                let share = summaries.spread(millrace_sim::Summary::compliance);
                rows.push(vec![
                    format!("{load}%"),
                    format!("{deadline} ms"),
                    system.name.to_owned(),
                    format!("{} ± {}", percent(share.mean()), percent(share.half())),
                    Unit::Millis.show(summaries.spread(|it| it.p98.as_secs_f64() * 1e3).mean()),
                    percent(summaries.spread(|it| it.gpu_load).mean()),
                ]);
                compliant.push((system.name, share));
            }
            let of = |name: &str| compliant.iter().find(|(it, _)| *it == name).map(|(_, it)| it.clone());
            for ours in ["torpor", "unified"] {
                if let (Some(ours_at), Some(fifo)) = (of(ours), of("torpor-fifo")) {
                    let what = format!("{ours} at least torpor-fifo, {deadline} ms, rates at {load}%");
                    report.orders.push(Order { what, by: ours_at.less(&fifo), cause: None });
                }
            }
        }
    }
    let header = ["rates", "deadline", "system", "compliant", "p98", "GPUs computing"];
    report.tables.push(("560 ResNet-152:".to_owned(), header.map(String::from).to_vec(), rows));
    Ok(report)
}

/// What one GPU serves: ResNet-152 at several rates per function, against functions that stay on it.
fn one_gpu(effort: Effort) -> Result<Report> {
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
fn heaviness(effort: Effort) -> Result<Report> {
    let light = models::torpor().swap_remove(1);
    let heavy = models::torpor().swap_remove(7);
    let heavies = 80;
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
        let scenarios: Vec<_> = (1..=effort.seeds.min(3)).map(setup).collect();
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
