//! What choosing NVLink paths costs (D20): a transfer begins and ends on DGX-V100 while others run.
//!
//! Percentiles first, of each of the two decisions by itself, with pairs drawn from a seed; then
//! criterion's benches of both together. The paper has "less than 10 us"; ours is to stay under 2 us
//! at the median.

#![allow(clippy::disallowed_methods, reason = "it measures")]

use std::hint::black_box;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use millrace_policy::paths::{Config, FlowId, Paths, SELECTIONS, Selection};
use millrace_types::topology::{Gpu, Link, LinkId, LinkKind, Topology};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};

const DECISIONS: usize = 100_000;
const SEEDS: u64 = 500;
const OTHERS: [u64; 3] = [0, 4, 12];
const LINKS: [(u32, u32, u64); 16] = [
    (0, 3, 48),
    (0, 4, 48),
    (1, 2, 48),
    (1, 5, 48),
    (2, 3, 48),
    (4, 7, 48),
    (5, 6, 48),
    (6, 7, 48),
    (0, 1, 24),
    (0, 2, 24),
    (1, 3, 24),
    (2, 6, 24),
    (3, 7, 24),
    (4, 5, 24),
    (4, 6, 24),
    (5, 7, 24),
];

fn dgx_v100() -> Topology {
    let gpu = |index: u32| Gpu {
        index: GpuIndex(index),
        gpu_type: "V100".to_owned(),
        memory: Bytes::gib(16),
        host_path: vec![LinkId(index)],
    };
    let mut links = vec![Link { kind: LinkKind::Pcie, rate: BytesPerSec::gb(12) }; 8];
    links.extend(LINKS.map(|(a, b, rate)| {
        let kind = LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) };
        Link { kind, rate: BytesPerSec::gb(rate) }
    }));
    Topology { name: "dgx-v100".to_owned(), gpus: (0..8).map(gpu).collect(), links }
}

/// xorshift64*: the same numbers everywhere.
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (((self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) * u64::from(end)) >> 32) as u32
    }

    fn pair(&mut self) -> (GpuIndex, GpuIndex) {
        let (from, other) = (self.below(8), self.below(7));
        (GpuIndex(from), GpuIndex(if other < from { other } else { other + 1 }))
    }
}

/// A machine where so many flows run, the oldest of which ends whenever one begins.
struct Busy {
    paths: Paths,
    seeded: Seeded,
    others: u64,
    next: u64,
}

impl Busy {
    fn new(config: Config, others: u64) -> Self {
        let paths = Paths::new(&dgx_v100(), config).expect("eight GPUs");
        let mut busy = Self { paths, seeded: Seeded(7), others, next: 0 };
        for _ in 0..others {
            busy.begin();
        }
        busy
    }

    fn begin(&mut self) -> usize {
        let (from, to) = self.seeded.pair();
        self.next += 1;
        let begun = self.paths.begin(FlowId(self.next), from, to, BytesPerSec(0));
        begun.expect("the flow is new").len()
    }

    fn end(&mut self) -> usize {
        self.paths.end(FlowId(self.next - self.others)).len()
    }
}

fn percentiles(config: Config, name: &str) {
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
        for ((name, mut times), changed) in ["begin", "end"].into_iter().zip(times).zip(changed) {
            let mean = changed as f64 / times.len() as f64;
            times.sort_unstable();
            let at = |share: f64| times[(times.len() as f64 * share) as usize].as_secs_f64() * 1e6;
            println!(
                "{others:3} others, {name:5}: p50 {:6.2}  p99 {:6.2}  (aim 2, paper 10)  changes {mean:.2}",
                at(0.5),
                at(0.99)
            );
        }
    }
}

/// What transfers get, GB/s: the mean, and the slowest of those that run at once.
fn rates(name: &str, config: Config) {
    print!("{name:22}");
    for flows in [1, 4, 8, 12] {
        let (mut sum, mut slowest) = (0.0, 0.0);
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
    percentiles(Config::default(), "routes of the default length");
    percentiles(unlimited, "routes of any length");
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
