//! Costs of the elastic store's decisions with 1,000 live objects, and native calls of the paper's
//! pools under the same load (FaaSTube §7; H22, H23).
//!
//! Objects are 1 to 16 MiB, from a seed. *take* is a pool's allocation and its return. *store* is
//! the whole life of an object that finds room, from its storage to its read, in five events.
//! *victim* is an event that evicts an object among 1,000, because a new object at the front of the
//! queue finds no room. The figure is the decision with all changes of its event.
//!
//! `cargo bench -p millrace-core-benches --bench elastic`. Tables come first, then criterion's means. A
//! native call ("millisecond-level", §7.1) is counted here, not made.

#![allow(clippy::disallowed_methods, reason = "it measures")]

#[path = "support/percentiles.rs"]
mod percentiles;

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use millrace_core::Core;
use millrace_core::ids::FunctionIndex;
use millrace_core::ids::ObjectKey;
use millrace_memory::BlockSize;
use millrace_memory::elastic::{
    Action, AllocationPurpose, Config, ConsumerDistance, ElasticStore, Event, MIGRATIONS, MemoryPool,
    MigrationPolicy, POOLS, PoolPolicy,
};
use millrace_types::{Bytes, Timestamp};

use percentiles::percentiles;

const LIVE: u64 = 1_000;
const SAMPLES: usize = 100_000;
const WARM_UP: usize = 10_000;
/// Room for the live objects and some more.
const CAP: Bytes = Bytes::gib(16);
const FUNCTIONS: u64 = 20;

/// Seeded random numbers (`SplitMix64`).
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn size(&mut self) -> Bytes {
        Bytes((1 << 20) + self.next() % (15 << 20))
    }
}

fn nanos(work: impl FnOnce()) -> u64 {
    let start = Instant::now();
    work();
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Times the replacement of an object among [`LIVE`] in a pool.
fn takes(policy: PoolPolicy) -> (u64, u64) {
    let mut pool = MemoryPool::new(policy, CAP, BlockSize::DEFAULT);
    let mut draws = Draws(1);
    let mut actions = Vec::new();
    let mut take = |pool: &mut MemoryPool, size| {
        actions.clear();
        pool.take(size, CAP, AllocationPurpose::Object, &mut actions).expect("there is room")
    };
    let mut live: Vec<_> = (0..LIVE).map(|_| take(&mut pool, draws.size())).collect();
    let mut samples = Vec::with_capacity(SAMPLES);
    let mut released = Vec::new();
    for turn in 0..WARM_UP + SAMPLES {
        let place = usize::try_from(draws.next() % LIVE).unwrap_or(0);
        let size = draws.size();
        let took = nanos(|| {
            pool.give_back(&live[place], &mut released);
            live[place] = take(&mut pool, black_box(size));
        });
        released.clear();
        if turn >= WARM_UP {
            samples.push(took);
        }
    }
    percentiles(samples, [50, 99]).into()
}

/// A store full of objects with queued consumers.
struct Full {
    store: ElasticStore,
    draws: Draws,
    next: u64,
    now: u64,
    actions: Vec<Action>,
}

impl Full {
    fn new(config: Config) -> Self {
        let store = ElasticStore::new(config).expect("the sizes are good");
        let mut full = Self { store, draws: Draws(2), next: 0, now: 0, actions: Vec::new() };
        for _ in 0..LIVE {
            let size = full.draws.size();
            full.put(size);
        }
        full
    }

    fn tell(&mut self, event: Event) {
        self.actions.clear();
        self.store.on_event(Timestamp(self.now), event, &mut self.actions);
    }

    fn put(&mut self, size: Bytes) {
        let object = ObjectKey(self.next);
        let function = FunctionIndex((self.next % FUNCTIONS) as u32);
        let consumers = vec![ConsumerDistance::Queued(self.next)];
        self.next += 1;
        self.now += 1_000_000;
        self.tell(Event::Requested { function });
        self.tell(Event::Store { object, function, size, consumers });
        self.tell(Event::Filled { object });
    }

    /// Stores an object, and lets the oldest be read.
    fn turn(&mut self, size: Bytes) {
        self.put(size);
        let object = ObjectKey(self.next - LIVE - 1);
        self.tell(Event::ConsumerMoved { object, consumer: 0, distance: ConsumerDistance::Claimed });
        self.tell(Event::Consumed { object, consumer: 0 });
    }
}

fn turns(pool: PoolPolicy, migration: MigrationPolicy) -> (u64, u64) {
    let mut full = Full::new(Config { cap: CAP, pool, migration, ..Config::default() });
    let mut samples = Vec::with_capacity(SAMPLES);
    for turn in 0..WARM_UP + SAMPLES {
        let size = full.draws.size();
        let took = nanos(|| full.turn(black_box(size)));
        if turn >= WARM_UP {
            samples.push(took);
        }
    }
    assert_eq!(full.store.objects(), LIVE as usize);
    percentiles(samples, [50, 99]).into()
}

/// Times a new object without room, ahead of all others in the queue. Afterwards the new object is
/// discarded, and the victim stays because a consumer claims the victim.
fn victims(migration: MigrationPolicy) -> (u64, u64) {
    let mut full = Full::new(Config { cap: CAP, migration, ..Config::default() });
    let limit = full.store.pool().used();
    full.tell(Event::Limit { limit });
    let mut samples = Vec::with_capacity(SAMPLES);
    let function = FunctionIndex(0);
    for turn in 0..WARM_UP + SAMPLES {
        let object = ObjectKey(full.next);
        full.next += 1;
        let consumers = vec![ConsumerDistance::Claimed];
        let event = Event::Store { object, function, size: Bytes::mib(1), consumers };
        let took = nanos(|| full.tell(event));
        let victim = full.actions.iter().find_map(|action| match action {
            Action::Migrate { object } => Some(*object),
            _ => None,
        });
        let victim = victim.expect("one object leaves");
        full.tell(Event::Discard { object });
        full.tell(Event::ConsumerMoved { object: victim, consumer: 0, distance: ConsumerDistance::Claimed });
        full.tell(Event::Migrated { object: victim });
        full.tell(Event::ConsumerMoved {
            object: victim,
            consumer: 0,
            distance: ConsumerDistance::Queued(victim.0),
        });
        if turn >= WARM_UP {
            samples.push(took);
        }
    }
    assert_eq!(full.store.objects(), LIVE as usize);
    percentiles(samples, [50, 99]).into()
}

/// A day of a pool. Every other hour is silent. In the remaining hours a request arrives every 5 s
/// on average, with 1 to 12 objects that are read 200 ms later; their size changes by the hour.
struct Day {
    store: ElasticStore,
    draws: Draws,
    actions: Vec<Action>,
    now: Timestamp,
    /// Integral of the pool's size over time, in bytes times seconds.
    held: f64,
    held_max: u64,
    next: u64,
}

impl Day {
    const HOUR: u64 = 3_600_000_000_000;
    const FUNCTION: FunctionIndex = FunctionIndex(0);

    fn tell(&mut self, event: Event) {
        self.actions.clear();
        self.store.on_event(self.now, event, &mut self.actions);
        self.held_max = self.held_max.max(self.store.pool().size().0);
    }

    /// Advances time, with a tick at each time that the store requested.
    fn wait(&mut self, until: Timestamp) {
        while self.now < until {
            let wake = self.store.next_wake().filter(|&wake| wake <= until);
            let next = wake.unwrap_or(until).max(self.now);
            self.held += self.store.pool().size().0 as f64 * next.since(self.now).as_secs_f64();
            self.now = next;
            self.tell(Event::Tick);
        }
    }

    fn request(&mut self) {
        self.tell(Event::Requested { function: Self::FUNCTION });
        let hour = self.now.as_nanos() / Self::HOUR;
        let size = Bytes::mib(10 + hour * 37 % 60 + self.draws.next() % 8);
        let first = self.next;
        for _ in 0..1 + self.draws.next() % 12 {
            let object = ObjectKey(self.next);
            let consumers = vec![ConsumerDistance::Queued(self.next)];
            self.next += 1;
            self.tell(Event::Store { object, function: Self::FUNCTION, size, consumers });
            self.tell(Event::Filled { object });
        }
        self.tell(Event::Executed { function: Self::FUNCTION });
        self.wait(self.now + Duration::from_millis(200));
        for object in (first..self.next).map(ObjectKey) {
            self.tell(Event::ConsumerMoved { object, consumer: 0, distance: ConsumerDistance::Claimed });
            self.tell(Event::Consumed { object, consumer: 0 });
        }
    }

    fn pass(pool: PoolPolicy) -> Self {
        let store = ElasticStore::new(Config { pool, ..Config::default() }).expect("the sizes are good");
        let mut day = Self {
            store,
            draws: Draws(3),
            actions: Vec::new(),
            now: Timestamp::ZERO,
            held: 0.0,
            held_max: 0,
            next: 0,
        };
        while day.now.as_nanos() < 24 * Self::HOUR {
            let hour = day.now.as_nanos() / Self::HOUR;
            if hour % 2 == 1 {
                day.wait(Timestamp((hour + 1) * Self::HOUR));
            }
            let gap = Duration::from_millis(800 + day.draws.next() % 8_000);
            day.wait(day.now + gap);
            day.request();
        }
        day
    }
}

fn days() {
    println!(
        "{:<16} {:>9} {:>9} {:>12} {:>9} {:>9} {:>10}",
        "a day, by pool", "mean MiB", "max MiB", "waited for", "ahead", "releases", "IPC"
    );
    for (name, pool) in POOLS {
        let day = Day::pass(pool);
        let calls = day.store.pool().calls();
        let mib = f64::from(1 << 20);
        let mean = day.held / day.now.since(Timestamp::ZERO).as_secs_f64() / mib;
        let max = day.held_max as f64 / mib;
        println!(
            "{name:<16} {mean:>9.0} {max:>9.0} {:>12} {:>9} {:>9} {:>10}",
            calls.allocations, calls.ahead, calls.releases, calls.ipc
        );
    }
}

fn tables(_: &mut Criterion) {
    println!("{SAMPLES} samples each, {LIVE} objects live; the clock itself costs p50 {} ns", clock());
    println!("{:<16} {:>14} {:>10}", "take, by pool", "p50 ns", "p99 ns");
    for (name, pool) in POOLS {
        let (p50, p99) = takes(pool);
        println!("{name:<16} {p50:>14} {p99:>10}");
    }
    println!("\n{:<16} {:<12} {:>10} {:>10}", "store, by pool", "migration", "p50 ns", "p99 ns");
    for (name, pool) in POOLS {
        for (migration_name, migration) in MIGRATIONS {
            let (p50, p99) = turns(pool, migration);
            println!("{name:<16} {migration_name:<12} {p50:>10} {p99:>10}");
        }
    }
    println!("\n{:<16} {:>14} {:>10}", "victim", "p50 ns", "p99 ns");
    for (name, migration) in MIGRATIONS {
        let (p50, p99) = victims(migration);
        println!("{name:<16} {p50:>14} {p99:>10}");
    }
    println!();
    days();
}

/// Returns the cost of a measurement itself.
fn clock() -> u64 {
    let nothing = || {
        black_box(0);
    };
    let [median] = percentiles((0..SAMPLES).map(|_| nanos(nothing)).collect(), [50]);
    median
}

fn means(criterion: &mut Criterion) {
    let mut full = Full::new(Config { cap: CAP, ..Config::default() });
    criterion.bench_function("elastic store and consume", |bench| {
        bench.iter(|| {
            let size = full.draws.size();
            full.turn(black_box(size));
        });
    });
}

criterion_group!(benches, tables, means);
criterion_main!(benches);
