//! The time and the fragmentation of the allocators of GPU memory: best fit, which production uses, and the
//! paper's two tiers (T13), against the paper's baseline Torpor-Block, a pool over a native allocator (§7.3).
//!
//! The workload is seeded: 220 functions over the 22 models of LALB's Table I (memory at batch 32),
//! requested by Zipf's law of exponent 1. The GPU has 25 GiB, the reservation of Torpor's artifact, or
//! 80 GiB. The papers do not state the sizes of the pieces. The bench assumes half of a model in segments
//! of 20 MiB and 2 MiB, as frameworks gather small tensors, and half in irregular pieces of 22 to 150 MiB.
//! Two models are pinned at any time: the model that runs, and the model of the next request.
//!
//! The program prints tables first, then runs criterion's benches. The tables come from rounds in which the
//! allocators take turns; ratios are relative to the pool, as median and range. A native call is assumed to
//! cost 1 ms ("millisecond-level", FaaSTube §7). The calls are counted here, not made.

#![allow(clippy::disallowed_methods, reason = "measures the wall clock")]

use std::time::{Duration, Instant};

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use millrace_memory::{BlockPlacement, BlockRun};
use millrace_sim::memory::{AllocatorKind, AllocatorUnderTest};
use millrace_types::{Bytes, ModelId, Timestamp};

/// The generator xorshift64*, whose numbers are the same on every platform.
struct Seeded(u64);

impl Seeded {
    fn below(&mut self, end: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (((self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) * u64::from(end)) >> 32) as u32
    }
}

/// The memory of the models of LALB's Table I, in MB.
const MODELS: [u32; 22] = [
    1269, 1313, 1357, 1435, 1437, 1555, 1601, 1631, 1665, 1701, 1757, 1827, 1919, 2157, 2191, 2903, 3611,
    3831, 3887, 3907, 3907, 3947,
];
const FUNCTIONS: u32 = 220;
const REQUESTS: u32 = 6_000;
/// The number of first requests that are left out of the figures, because the GPU has to fill and models have
/// to be evicted first.
const WARM_UP: u32 = 1_000;
const ROUNDS: usize = 5;
const NATIVE_CALL: Duration = Duration::from_millis(1);
/// The number of requests between two steps of consolidation.
const CONSOLIDATE_EVERY: u32 = 16;

const KINDS: [(AllocatorKind, ConsolidationMode); 7] = [
    (AllocatorKind::Pool, ConsolidationMode::Never),
    (AllocatorKind::BestFit(BlockPlacement::Scattered), ConsolidationMode::Never),
    (AllocatorKind::TwoTiers(BlockPlacement::Scattered), ConsolidationMode::Never),
    (AllocatorKind::TwoTiers(BlockPlacement::Scattered), ConsolidationMode::Sometimes),
    (AllocatorKind::BestFit(BlockPlacement::Contiguous), ConsolidationMode::Never),
    (AllocatorKind::TwoTiers(BlockPlacement::Contiguous), ConsolidationMode::Never),
    (AllocatorKind::TwoTiers(BlockPlacement::Contiguous), ConsolidationMode::Sometimes),
];

/// Returns the name of an allocator in the tables.
fn name(kind: AllocatorKind, moves: ConsolidationMode) -> String {
    match moves {
        ConsolidationMode::Never => kind.to_string(),
        ConsolidationMode::Sometimes => "  and consolidated".to_owned(),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConsolidationMode {
    Never,
    Sometimes,
}

/// Returns the lengths of a model's pieces, in blocks of 2 MiB.
fn pieces(function: u32) -> Vec<u32> {
    let mut seeded = Seeded(u64::from(function) + 1);
    let blocks = MODELS[(function % 22) as usize].div_ceil(2);
    let mut pieces = Vec::new();
    let mut left = blocks;
    while left > blocks / 2 {
        let len = (11 + seeded.below(65)).min(left);
        pieces.push(len);
        left -= len;
    }
    while left > 0 {
        let len = if left >= 10 && seeded.below(3) > 0 { 10 } else { 1 };
        pieces.push(len);
        left -= len;
    }
    pieces
}

/// Returns the function of each request.
fn requests(seed: u64) -> Vec<u32> {
    let mut seeded = Seeded(seed);
    let weights: Vec<u32> = (1..=FUNCTIONS).map(|rank| 1_000_000 / rank).collect();
    let all = weights.iter().sum();
    let ask = |_| {
        let mut at = seeded.below(all);
        // The factor 7 spreads popularity over models of all sizes. 7 and 220 have no common divisor, so
        // every function is reached.
        let mut passes = |weight: &u32| at.checked_sub(*weight).map(|rest| at = rest).is_some();
        weights.iter().take_while(|weight| passes(weight)).count() as u32 * 7 % FUNCTIONS
    };
    (0..REQUESTS).map(ask).collect()
}

#[derive(Default)]
struct AllocatorResult {
    took: Vec<Duration>,
    /// The times in `took`, plus [`NATIVE_CALL`] for each native call.
    charged: Vec<Duration>,
    /// The times of planning a step of consolidation.
    plans: Vec<Duration>,
    native: u64,
    evicted: u32,
    runs: u64,
    partitions: f64,
    whole: u64,
    stranded: f64,
    free: f64,
    moved: u64,
    short: u32,
    misses: u32,
}

fn serve(memory: Bytes, kind: AllocatorKind, consolidation: ConsolidationMode, seed: u64) -> AllocatorResult {
    let shapes: Vec<_> = (0..FUNCTIONS).map(pieces).collect();
    let mut map = AllocatorUnderTest::new(memory, kind);
    let mut found = AllocatorResult::default();
    let mut last = ModelId(0);
    for (at, function) in (0..).zip(requests(seed)) {
        let now = Timestamp(at);
        let model = ModelId(function);
        let counts = at >= u64::from(WARM_UP);
        let pinned = [last, model];
        last = model;
        if map.touch(now, model) {
            continue;
        }
        found.misses += u32::from(counts);
        let shape = &shapes[function as usize];
        let before = map.native_calls();
        let began = Instant::now();
        let mapped = map.map(now, model, shape, &pinned);
        let took = began.elapsed();
        let Ok(evicted) = mapped else {
            found.short += 1;
            continue;
        };
        if counts {
            let native = map.native_calls() - before;
            found.took.push(took);
            found.charged.push(took + NATIVE_CALL * native as u32);
            found.native += native;
            found.evicted += evicted.len() as u32;
            let runs = map.runs(model).expect("the model was mapped");
            found.runs += runs.len() as u64;
            let spread = |run: &BlockRun| run.start / 64..=(run.end() - 1) / 64;
            let mut partitions: Vec<_> = runs.iter().flat_map(spread).collect();
            partitions.sort_unstable();
            partitions.dedup();
            let blocks = runs.iter().map(|run| run.len).sum::<u32>();
            found.partitions += partitions.len() as f64 / f64::from(blocks.div_ceil(64));
            let fragmentation = map.fragmentation();
            found.stranded += f64::from(fragmentation.stranded) / f64::from(map.total_blocks());
            found.free += f64::from(fragmentation.free) / f64::from(map.total_blocks());
        }
        if consolidation == ConsolidationMode::Sometimes && at.is_multiple_of(CONSOLIDATE_EVERY.into()) {
            let began = Instant::now();
            let moves = map.consolidate(&pinned);
            found.plans.push(began.elapsed());
            found.moved += moves.iter().map(|step| u64::from(step.from.len)).sum::<u64>();
        }
    }
    // Counts the partitions that become whole when the five least recently used models leave the full GPU.
    let mut models = map.models();
    models.sort_unstable();
    for (_, model) in models.into_iter().take(5) {
        let before = map.fragmentation().whole;
        map.unmap(model);
        found.whole += u64::from(map.fragmentation().whole - before);
    }
    found
}

/// Runs [`serve`] three times, and keeps the least of the three times of each step. Other load on the machine
/// disturbs different steps in each of the runs.
fn serve_quietly(memory: Bytes, kind: AllocatorKind, moves: ConsolidationMode, seed: u64) -> AllocatorResult {
    let mut found = serve(memory, kind, moves, seed);
    for again in [serve(memory, kind, moves, seed), serve(memory, kind, moves, seed)] {
        let times = [
            (&mut found.took, again.took),
            (&mut found.charged, again.charged),
            (&mut found.plans, again.plans),
        ];
        for (times, again) in times {
            times.iter_mut().zip(again).for_each(|(time, again)| *time = again.min(*time));
        }
    }
    found.took.sort_unstable();
    found.charged.sort_unstable();
    found.plans.sort_unstable();
    found
}

fn at(sorted: &[Duration], share: f64) -> f64 {
    sorted.get((sorted.len() as f64 * share) as usize).map_or(0.0, Duration::as_secs_f64) * 1e6
}

fn spread(mut values: Vec<f64>) -> String {
    values.sort_unstable_by(f64::total_cmp);
    format!("{:.4} ({:.4}-{:.4})", values[values.len() / 2], values[0], values[values.len() - 1])
}

fn table(memory: Bytes) {
    println!("\n{memory}, {REQUESTS} requests of which the first {WARM_UP} do not count, {ROUNDS} rounds");
    let round = |round: usize| {
        let turn = |place: usize| (place + round) % KINDS.len();
        let serve_turn = |place: usize| {
            let (kind, moves) = KINDS[turn(place)];
            (turn(place), serve_quietly(memory, kind, moves, round as u64 + 1))
        };
        let mut found: Vec<_> = (0..KINDS.len()).map(serve_turn).collect();
        found.sort_by_key(|&(kind, _)| kind);
        found.into_iter().map(|(_, found)| found).collect::<Vec<_>>()
    };
    let rounds: Vec<Vec<AllocatorResult>> = (0..ROUNDS).map(round).collect();
    println!("{:24} {:>9} {:>9}  time with native calls / the pool's: p50, p99", "", "p50 us", "p99 us");
    for (kind, name) in KINDS.map(|(kind, moves)| name(kind, moves)).iter().enumerate() {
        let ratio = |share: f64| {
            spread(
                rounds
                    .iter()
                    .map(|round| at(&round[kind].charged, share) / at(&round[0].charged, share))
                    .collect(),
            )
        };
        let worst = |share| rounds.iter().map(|round| at(&round[kind].took, share)).fold(0.0, f64::max);
        println!("{name:24} {:9.2} {:9.2}  {}, {}", worst(0.5), worst(0.99), ratio(0.5), ratio(0.99));
    }
    println!(
        "{:24} {:>7} {:>7} {:>7} {:>7} {:>9} {:>7} {:>8} {:>9} {:>8} {:>6} {:>8}  (a map; whole: an eviction)",
        "",
        "miss %",
        "native",
        "evicted",
        "runs",
        "part/min",
        "whole",
        "free %",
        "strand. %",
        "moved",
        "short",
        "plan us"
    );
    for (kind, name) in KINDS.map(|(kind, moves)| name(kind, moves)).iter().enumerate() {
        let sum = |value: &dyn Fn(&AllocatorResult) -> f64| {
            rounds.iter().map(|round| value(&round[kind])).sum::<f64>()
        };
        let maps = sum(&|found| found.took.len() as f64);
        let mean = |value: &dyn Fn(&AllocatorResult) -> f64| sum(value) / maps;
        println!(
            "{name:24} {:7.2} {:7.1} {:7.2} {:7.1} {:9.3} {:7.1} {:8.2} {:9.2} {:8.1} {:6} {:8.1}",
            sum(&|found| f64::from(found.misses)) * 100.0 / (f64::from(REQUESTS - WARM_UP) * ROUNDS as f64),
            mean(&|found| found.native as f64),
            mean(&|found| f64::from(found.evicted)),
            mean(&|found| found.runs as f64),
            mean(&|found| found.partitions),
            sum(&|found| found.whole as f64) / (5 * ROUNDS) as f64,
            mean(&|found| found.free) * 100.0,
            mean(&|found| found.stranded) * 100.0,
            mean(&|found| found.moved as f64),
            sum(&|found| f64::from(found.short)),
            rounds.iter().map(|round| at(&round[kind].plans, 0.99)).fold(0.0, f64::max),
        );
    }
}

fn benches(c: &mut Criterion) {
    table(Bytes::gib(25));
    table(Bytes::gib(80));
    for (kind, _) in KINDS.iter().filter(|(_, moves)| *moves == ConsolidationMode::Never) {
        let shapes: Vec<_> = (0..FUNCTIONS).map(pieces).collect();
        let mut map = AllocatorUnderTest::new(Bytes::gib(25), *kind);
        let mut now = 0;
        let mut at = 0;
        let requests = requests(1);
        // Each call maps the next requested model that has no memory.
        let mut bring = |map: &mut AllocatorUnderTest| {
            now += 1;
            while map.runs(ModelId(requests[at])).is_some() {
                at = (at + 1) % requests.len();
            }
            let function = requests[at];
            map.map(Timestamp(now), ModelId(function), &shapes[function as usize], &[]).is_ok()
        };
        for _ in 0..WARM_UP {
            assert!(bring(&mut map), "a model does not fit the GPU");
        }
        c.bench_function(&format!("memory/make room and map a model of Table I, {kind}"), |b| {
            b.iter_batched(|| (), |()| bring(&mut map), BatchSize::PerIteration);
        });
    }
}

criterion_group!(memory, benches);
criterion_main!(memory);
