//! Cost of one decision of each dispatch policy with 100, 10,000 and 1,000,000 requests waiting
//! (L16). Criterion's means hide the tail, so this bench also prints quantiles, and how they grow
//! with the queue.
//!
//! An event is the end of a request on a GPU: the GPU is free, and the policy looks for the next
//! request. The policy may then decide about several requests: LALB binds requests to busy GPUs
//! until one is left for the free GPU. So the bench reports the cost of the event, and the cost of
//! each decision as an equal share of its event. A decision assigns or binds a request to a GPU.
//!
//! Times are the processor time of this thread, so other work on the machine is not counted, and
//! the cost of reading that clock is subtracted. As many requests arrive as end, so that the queue
//! keeps its length; the cost of arrivals is reported apart. Models are evicted as in production,
//! so that each GPU holds [`HELD`] of them.
//!
//! Memory per waiting request is the growth of the process's resident set. Each policy is measured
//! in a process of its own, because a policy could reuse memory that another policy freed.
//!
//! `cargo bench -p millrace-core-benches --bench dispatch` reads these environment variables: GPUS and
//! FUNCTIONS set their numbers. DEADLINE sets a deadline in milliseconds for every function
//! (default: none, so no request is late). DATA sets the percentage of requests with data on a GPU
//! that every other GPU can reach (default: 0). POLICY selects one policy.

#[path = "support/percentiles.rs"]
mod percentiles;
#[path = "support/resident.rs"]
mod resident;

use std::collections::VecDeque;
use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use millrace_core::Core;
use millrace_core::attempts::{AttemptRecord, Idempotence};
use millrace_core::ids::{FunctionIndex, RequestKey};
use millrace_scheduling::dispatch::{
    Action, AlphaRule, Config, Dispatcher, Event, GpuConfig, InputLocations, LatencyObjective, ModelProfile,
    POLICIES, PeerLink, PolicyConfig, QueuedRequest, TorporConfig,
};
use millrace_transfers::paths::PairRate;
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Incarnation, ModelId, Priority, SloCounts, Timestamp};
use rustix::time::{ClockId, clock_gettime};

use percentiles::percentiles;
use resident::resident;

/// Number of models that each GPU holds.
const HELD: usize = 20;
const QUEUED: [u64; 3] = [100, 10_000, 1_000_000];
const WARM_UP: usize = 20_000;
const SAMPLES: usize = 200_000;

fn count(name: &str, usual: u32) -> u32 {
    let given = std::env::var(name).ok();
    given.map_or(usual, |text| text.parse().unwrap_or_else(|_| panic!("{name}={text} is no number")))
}

/// A domain in overload: every GPU is busy and `queued` more requests wait.
struct Domain {
    dispatch: Dispatcher,
    functions: u32,
    /// Percentage of requests with data on a GPU.
    data: u32,
    now: u64,
    key: u64,
    draws: u64,
    /// Requests assigned to each GPU, in order.
    on: Vec<VecDeque<RequestKey>>,
    /// Models on each GPU, the last used last.
    held: Vec<VecDeque<ModelId>>,
    scores: Vec<SloCounts>,
    actions: Vec<Action>,
}

impl Domain {
    fn new(policy: PolicyConfig, gpus: u32, functions: u32, queued: u64) -> Self {
        let gpu = GpuConfig::new(Bytes::gib(8), BytesPerSec::gb(12));
        let pairs = (0..gpus / 2).map(|pair| vec![GpuIndex(2 * pair), GpuIndex(2 * pair + 1)]);
        let peer = |pair: u32| PeerLink {
            a: GpuIndex(2 * pair),
            b: GpuIndex(2 * pair + 1),
            rate: BytesPerSec::gb(48),
        };
        let data = count("DATA", 0);
        let deadline = Some(count("DEADLINE", 0)).filter(|&millis| millis > 0);
        let ends = (0..gpus).flat_map(|from| (0..gpus).map(move |to| (GpuIndex(from), GpuIndex(to))));
        let ways = ends.filter(|(from, to)| data > 0 && from != to);
        let config = Config {
            ways: ways.map(|(from, to)| PairRate { from, to, rate: BytesPerSec::gb(48) }).collect(),
            switches: pairs.collect(),
            peers: (0..gpus / 2).map(peer).collect(),
            ..Config::new(vec![gpu; gpus as usize], 2_000_000).with_policy(policy, 1)
        };
        let mut domain = Self {
            dispatch: Dispatcher::new(&config),
            functions,
            data,
            now: 0,
            key: 0,
            draws: 1,
            on: vec![VecDeque::new(); gpus as usize],
            held: vec![VecDeque::new(); gpus as usize],
            scores: vec![SloCounts::default(); functions as usize],
            actions: Vec::new(),
        };
        for index in 0..functions {
            let size = Bytes::mib(50 + u64::from(index % 300));
            let model = ModelId(index);
            let function = FunctionIndex(index);
            domain.tell(Event::Install { model, memory: size, weights: size });
            let load = BytesPerSec::gb(12).time_for(size);
            let run = Duration::from_millis(5 + u64::from(index % 40));
            domain.tell(Event::ProfileLoaded(ModelProfile { model, kind: 0, load, swap: None, run }));
            let share = LatencyObjective::from_billionths(980_000_000);
            let within = |millis: u32| share.map(|it| it.within(Duration::from_millis(millis.into())));
            let objective = deadline.map_or(share, within);
            domain.tell(Event::Objective { function, objective });
        }
        for gpu in (0..gpus).map(GpuIndex) {
            domain.tell(Event::Up { gpu, incarnation: Incarnation(1) });
        }
        domain.fill(queued);
        domain
    }

    /// Adds requests until `queued` wait.
    fn fill(&mut self, queued: u64) {
        while (self.dispatch.queued() as u64) < queued {
            self.arrive();
        }
    }

    fn tell(&mut self, event: Event) {
        self.now += 1000;
        self.actions.clear();
        self.dispatch.on_event(Timestamp(self.now), event, &mut self.actions);
        for action in &self.actions {
            if let Action::Assign { gpu, key, model, .. } = *action {
                let place = gpu.0 as usize;
                self.on[place].push_back(key);
                self.held[place].retain(|&held| held != model);
                self.held[place].push_back(model);
            }
        }
    }

    /// SplitMix64.
    fn draw(&mut self, below: u32) -> u32 {
        self.draws = self.draws.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.draws ^ (self.draws >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (((z >> 32) * u64::from(below)) >> 32) as u32
    }

    /// Adds a request. Half of all requests are for a hundredth of the functions.
    fn arrive(&mut self) {
        let popular = self.draw(2) == 0;
        let index = self.draw(if popular { (self.functions / 100).max(1) } else { self.functions });
        self.key += 1;
        let attempts = AttemptRecord::new(3, Idempotence::Yes);
        let function = FunctionIndex(index);
        let model = ModelId(index);
        let inputs = if self.data > 0 && self.draw(100) < self.data {
            InputLocations::of([(GpuIndex(self.draw(self.on.len() as u32)), Bytes::mib(8))])
        } else {
            InputLocations::NONE
        };
        self.tell(Event::Enqueue(QueuedRequest {
            key: RequestKey(self.key),
            function,
            model,
            attempts,
            priority: Priority::default(),
            inputs,
        }));
    }

    /// Prepares the domain for the next decision, and returns the event that triggers it.
    fn next(&mut self) -> Event {
        // SLO counts change with each request that ends.
        let index = self.draw(self.functions);
        let in_time = u64::from(self.draw(100) < 97);
        let counts = &mut self.scores[index as usize];
        *counts = counts.plus(SloCounts { m: in_time, n: 1 });
        let counts = *counts;
        self.tell(Event::SloCountsChanged { function: FunctionIndex(index), counts });
        let place = loop {
            let place = self.draw(self.on.len() as u32);
            if !self.on[place as usize].is_empty() {
                break place;
            }
        };
        let gpu = GpuIndex(place);
        if self.held[place as usize].len() > HELD {
            let models = self.held[place as usize].pop_front().into_iter().collect();
            self.tell(Event::ModelsEvicted { gpu, models });
        }
        let key = self.on[place as usize].pop_front().expect("the GPU has a request");
        Event::RequestEnded { gpu, key, ran: Some(Duration::from_millis(10)) }
    }

    /// Ends a request, and refills the queue.
    fn decide(&mut self, times: &mut Times) {
        let queued = self.dispatch.queued();
        let bound = self.bound();
        let event = self.next();
        let nanos = timed(|| self.tell(event)).saturating_sub(times.clock);
        let assigned = self.actions.iter().filter(|action| matches!(action, Action::Assign { .. })).count();
        let decisions = (assigned as u64 + self.bound() - bound).max(1);
        times.events.push(nanos);
        times.decisions.extend(std::iter::repeat_n(nanos / decisions, decisions as usize));
        while self.dispatch.queued() < queued {
            times.arrivals.push(timed(|| self.arrive()).saturating_sub(times.clock));
        }
    }

    fn bound(&self) -> u64 {
        self.dispatch.reserved()
    }
}

/// Measured times in nanoseconds.
#[derive(Default)]
struct Times {
    /// Cost of reading the clock.
    clock: u64,
    events: Vec<u64>,
    decisions: Vec<u64>,
    arrivals: Vec<u64>,
}

impl Times {
    fn clear(&mut self) {
        [&mut self.events, &mut self.decisions, &mut self.arrivals].into_iter().for_each(Vec::clear);
    }
}

fn timed(work: impl FnOnce()) -> u64 {
    let start = processor_time();
    work();
    processor_time() - start
}

/// Returns the processor time of this thread, in nanoseconds.
fn processor_time() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the cost of timing nothing.
fn clock_cost() -> u64 {
    (0..10_000).map(|_| timed(|| ())).min().unwrap_or(0)
}

fn policies() -> impl Iterator<Item = (&'static str, PolicyConfig)> {
    let artifact = TorporConfig { alpha: AlphaRule::Artifact, ..TorporConfig::default() };
    // The other policies refuse a request without room, so their queues do not grow.
    let late = POLICIES.into_iter().filter(|(_, policy)| !policy.binds_early());
    let only = std::env::var("POLICY").ok();
    let picked = move |name: &str| only.as_ref().is_none_or(|only| only == name);
    late.chain([("torpor (artifact)", PolicyConfig::Torpor(artifact))]).filter(move |(name, _)| picked(name))
}

/// Environment variable that is set in the processes that measure memory.
const MEMORY: &str = "MILLRACE_BENCH_MEMORY";

/// Prints the memory of each waiting request, with 100 to 1,000,000 of them.
fn memory(_: &mut Criterion) {
    let gpus = count("GPUS", 8);
    let functions = count("FUNCTIONS", 1000);
    if std::env::var_os(MEMORY).is_some() {
        for (_, policy) in policies() {
            let mut domain = Domain::new(policy, gpus, functions, 0);
            let before = resident();
            for queued in QUEUED {
                domain.fill(queued);
                print!(" {:>9}", resident().saturating_sub(before) as u64 / queued);
            }
        }
        std::process::exit(0);
    }
    println!("bytes of memory for each request that waits, with {QUEUED:?} of them");
    for (name, _) in policies() {
        let exe = std::env::current_exe().expect("the path of the running bench");
        let child =
            std::process::Command::new(exe).arg("--bench").env(MEMORY, "1").env("POLICY", name).output();
        let told = child.expect("the child process starts").stdout;
        println!("{name:<18}{}", String::from_utf8_lossy(&told));
    }
}

fn histogram(_: &mut Criterion) {
    let gpus = count("GPUS", 8);
    let functions = count("FUNCTIONS", 1000);
    println!(
        "{gpus} GPUs of {HELD} models, {functions} functions; nanoseconds of this thread's processor time"
    );
    println!(
        "{:<18} {:>9} {:>9} {:>9} {:>12} {:>12} {:>12} {:>11} {:>11}",
        "policy", "queued", "event p50", "p99", "p99 / first", "decision p50", "p99", "arrival p50", "p99"
    );
    for (name, policy) in policies() {
        let mut first = None;
        for queued in QUEUED {
            let mut domain = Domain::new(policy, gpus, functions, queued);
            let mut times = Times { clock: clock_cost(), ..Times::default() };
            for _ in 0..WARM_UP {
                domain.decide(&mut times);
            }
            times.clear();
            while times.events.len() < SAMPLES {
                domain.decide(&mut times);
            }
            let [[event50, event99], [one50, one99], [came50, came99]] =
                [times.events, times.decisions, times.arrivals].map(|times| percentiles(times, [50, 99]));
            let ratio = event99 as f64 / *first.get_or_insert(event99) as f64;
            println!(
                "{name:<18} {queued:>9} {event50:>9} {event99:>9} {ratio:>12.2} {one50:>12} {one99:>12} \
                 {came50:>11} {came99:>11}"
            );
        }
    }
}

fn means(c: &mut Criterion) {
    for (name, policy) in policies() {
        let mut domain = Domain::new(policy, 8, 1000, 10_000);
        let mut times = Times::default();
        c.bench_function(&format!("dispatch/{name}: a request ends and one comes, 10,000 queued"), |b| {
            b.iter(|| {
                domain.decide(&mut times);
                times.clear();
                black_box(&domain.actions);
            });
        });
    }
}

criterion_group!(benches, memory, histogram, means);
criterion_main!(benches);
