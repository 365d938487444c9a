//! Cost of choosing NVLink paths (D20): a transfer begins and ends on a DGX-V100 while others run.
//!
//! First come percentiles of each of the two decisions by itself, for pairs drawn from a seed; then
//! criterion's benches of both together. The paper has "less than 10 us"; our target is a median
//! below 2 us.

#![allow(clippy::disallowed_methods, reason = "it measures")]

#[path = "../../policy/transfers/src/fixtures.rs"]
mod fixtures;
#[path = "support/percentiles.rs"]
mod percentiles;
#[path = "support/seeded.rs"]
mod seeded;

use std::hint::black_box;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use millrace_transfers::paths::{Config, FlowId, PathPlanner, Selection};
use millrace_types::GpuIndex;

use fixtures::dgx_v100;
use percentiles::percentiles;
use seeded::Seeded;

const DECISIONS: usize = 100_000;
const SEEDS: u64 = 500;
const OTHERS: [u64; 3] = [0, 4, 12];
const SELECTIONS: [(&str, Selection); 3] =
    [("faastube", Selection::FaasTube), ("direct", Selection::Direct), ("ucx", Selection::Ucx)];

/// Draws two of eight GPUs.
fn pair(seeded: &mut Seeded) -> (GpuIndex, GpuIndex) {
    let from = seeded.below(8);
    let other = seeded.below(7);
    (GpuIndex(from), GpuIndex(if other < from { other } else { other + 1 }))
}

/// A machine with a fixed number of flows: when a flow begins, the oldest ends.
struct Busy {
    paths: PathPlanner,
    seeded: Seeded,
    others: u64,
    next: u64,
}

impl Busy {
    fn new(config: Config, others: u64) -> Self {
        let paths = PathPlanner::new(&dgx_v100(), config).expect("eight GPUs");
        let mut busy = Self { paths, seeded: Seeded(7), others, next: 0 };
        for _ in 0..others {
            busy.begin();
        }
        busy
    }

    fn begin(&mut self) -> usize {
        let (from, to) = pair(&mut self.seeded);
        self.next += 1;
        let begun = self.paths.begin(FlowId(self.next), from, to);
        begun.expect("the flow is new").len()
    }

    fn end(&mut self) -> usize {
        self.paths.end(FlowId(self.next - self.others)).len()
    }
}

fn decisions(config: Config, name: &str) {
    println!(
        "\n{name}, {DECISIONS} decisions with each number of other flows; us, and flows whose routes changed"
    );
    for others in OTHERS {
        let mut busy = Busy::new(config, others);
        let mut times = [Vec::new(), Vec::new()];
        let mut changed = [0, 0];
        for _ in 0..DECISIONS / 2 {
            for (kind, decide) in [Busy::begin, Busy::end].into_iter().enumerate() {
                let began = Instant::now();
                changed[kind] += black_box(decide(&mut busy));
                times[kind].push(began.elapsed());
            }
        }
        for ((name, times), changed) in ["begin", "end"].into_iter().zip(times).zip(changed) {
            let mean = changed as f64 / times.len() as f64;
            let [p50, p99] = percentiles(times, [50, 99]).map(|time| time.as_secs_f64() * 1e6);
            println!(
                "{others:3} others, {name:5}: p50 {p50:6.2}  p99 {p99:6.2}  (aim 2, paper 10)  changes {mean:.2}"
            );
        }
    }
}

/// Prints the rates of transfers in GB/s: the mean, and the slowest of concurrent transfers.
fn rates(name: &str, config: Config) {
    print!("{name:22}");
    for flows in [1, 4, 8, 12] {
        let mut sum = 0.0;
        let mut slowest = 0.0;
        for seed in 1..=SEEDS {
            let mut busy = Busy::new(config, 0);
            busy.seeded = Seeded(seed);
            for _ in 0..flows {
                busy.begin();
            }
            let rates = (1..=flows).map(|flow| {
                let routes = busy.paths.routes(FlowId(flow)).unwrap_or_default();
                routes.iter().map(|route| route.rate.0 as f64 / 1e9).sum::<f64>()
            });
            let rates: Vec<f64> = rates.collect();
            sum += rates.iter().sum::<f64>() / flows as f64;
            slowest += rates.iter().copied().fold(f64::MAX, f64::min);
        }
        print!("  {:6.1} {:6.1}", sum / SEEDS as f64, slowest / SEEDS as f64);
    }
    println!();
}

fn benches(c: &mut Criterion) {
    println!("\nGB/s of transfers between random pairs: mean and slowest, of 1, 4, 8 and 12 at once");
    for (name, selection) in SELECTIONS {
        let bounds = if selection == Selection::FaasTube { 1..=7 } else { 7..=7 };
        for hops in bounds {
            rates(&format!("{name}, {hops} links"), Config { selection, hops_max: NonZeroU32::new(hops) });
        }
    }

    let unlimited = Config { hops_max: None, ..Config::default() };
    decisions(Config::default(), "routes of the default length");
    decisions(unlimited, "routes of any length");
    for (name, config) in [("default", Config::default()), ("any", unlimited)] {
        for others in OTHERS {
            let mut busy = Busy::new(config, others);
            c.bench_function(&format!("paths/begin and end, {others} others, {name} length"), |b| {
                b.iter(|| busy.begin() + busy.end());
            });
        }
    }
}

criterion_group! {
    name = paths;
    config = Criterion::default().measurement_time(Duration::from_secs(2));
    targets = benches
}
criterion_main!(paths);
