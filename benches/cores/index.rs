//! Costs of a node's index with a million live objects, in time and in memory, including the memory
//! of checkpoints; and the cost of sharing links among flows, up to the maximum number. Each figure
//! is printed beside its target.
//!
//! The index is the workers' own, with values as large as theirs. Lookups are timed in batches of
//! 1000, in an order that no cache can predict. A percentile is that of batches, divided by their
//! size, so on a busy machine the highest percentile shows the scheduler's time slices. Memory is
//! the growth of the process's resident set.

#![allow(clippy::disallowed_methods, reason = "it measures")]

#[path = "../../policy/transfers/src/fixtures.rs"]
mod fixtures;
#[path = "support/percentiles.rs"]
mod percentiles;
#[path = "support/resident.rs"]
mod resident;
#[path = "support/seeded.rs"]
mod seeded;

use std::hint::black_box;
use std::time::{Duration, Instant};

use millrace_core::Core;
use millrace_nodes::checkpoint::{Action, Config as Checkpoints, Event, WorkerCheckpoint};
use millrace_nodes::index::{DataIndex, IndexCapacity, IndexedObject, OBJECTS_MAX};
use millrace_transfers::rates::{
    self, Config, FLOWS_MAX, FlowId, RateAllocator, RatedFlow, SHARINGS, TransferObjective, TransferSharing,
};
use millrace_types::topology::LinkId;
use millrace_types::{Bytes, BytesPerSec, DataId, Epoch, NodeName, Timestamp};

use fixtures::dgx_v100;
use percentiles::percentiles;
use resident::resident;
use seeded::Seeded;

const OBJECTS: usize = OBJECTS_MAX as usize;
/// Objects stored in each second, which are young together.
const A_SECOND: usize = 50_000;
const BATCH: usize = 1_000;
const BATCHES: usize = 2_000;
const LOOKUP_TARGET: Duration = Duration::from_nanos(200);
const BYTES_TARGET: usize = 200;
/// A usual number of flows on a busy node, and the maximum number.
const FLOWS: [u64; 2] = [64, FLOWS_MAX as u64];
const EPOCH: Epoch = Epoch(3);
const DECISIONS: usize = 2_000;

/// A value as large as the workers' `Contents`, which a test of theirs bounds.
#[derive(Clone, Copy)]
struct ObjectValue([u64; 5]);

impl IndexedObject for ObjectValue {
    fn bytes(&self) -> Bytes {
        Bytes(self.0[0])
    }

    fn files(&self) -> u64 {
        0
    }
}

fn name(number: usize) -> NodeName {
    NodeName::new(&format!("gpu-worker-{number:02}")).expect("a node's name")
}

/// Returns a million names, from counters of which a third is skipped. The objects are made here
/// and on the other nodes, in equal shares.
fn names(others: usize) -> Vec<DataId> {
    let homes: Vec<_> = (0..=others).map(name).collect();
    let mut seeded = Seeded(7);
    let made = (1..).filter(|_| seeded.below(3) > 0).take(OBJECTS);
    let mut names = Vec::with_capacity(OBJECTS);
    let id = |counter: usize| {
        let home = counter % homes.len();
        let epoch = if home == 0 { EPOCH } else { Epoch(9) };
        DataId { home: homes[home].clone(), epoch, counter: counter as u64 }
    };
    names.extend(made.map(id));
    names
}

/// Returns the index of a node that holds all these objects, each of which expires at its counter's
/// time.
fn filled(names: &[DataId]) -> DataIndex<ObjectValue> {
    let limit = IndexCapacity { bytes: Bytes(u64::MAX), files: 0, objects: OBJECTS_MAX };
    let node = name(0);
    let mut index = DataIndex::new(node.clone(), limit);
    for id in names {
        let kept = ObjectValue([id.counter; 5]);
        let until = Timestamp(id.counter);
        let taken = if id.home == node {
            index.put_as(id.epoch, id.counter, kept, until).is_ok()
        } else {
            index.put_copy(id, kept, until)
        };
        assert!(taken, "{id} is new, and there is room");
    }
    index
}

/// Returns the checkpoint of a node that stored these objects at `A_SECOND` per second, and sent
/// the permitted ones to the leader.
fn told(names: &[DataId]) -> WorkerCheckpoint {
    let mut checkpoint = WorkerCheckpoint::new(Checkpoints::default());
    let mut now = Timestamp::ZERO;
    let mut actions = Vec::new();
    checkpoint.on_event(now, Event::Registered { epoch: EPOCH }, &mut actions);
    // The last second stores no object, so that the last batch of the second before is
    // acknowledged.
    for stored in names.chunks(A_SECOND).chain([&names[..0]]) {
        for id in stored {
            let stored = Event::DataStored { id: id.clone(), bytes: Bytes(id.counter) };
            checkpoint.on_event(now, stored, &mut actions);
        }
        // One batch is in flight at a time.
        while let Some(Action::Send(batch)) = actions.pop() {
            let acknowledged = Event::Acknowledged { epoch: batch.epoch, seq: batch.seq };
            checkpoint.on_event(now, acknowledged, &mut actions);
        }
        now = now + Duration::from_secs(1);
        checkpoint.on_event(now, Event::Tick, &mut actions);
    }
    checkpoint
}

/// Returns the memory per name that `make` uses, and its result. The caller keeps the result, so
/// that a later measurement does not reuse its memory uncounted.
fn grown<T>(names: &[DataId], make: impl FnOnce(&[DataId]) -> T) -> (usize, T) {
    let before = resident();
    let made = make(names);
    (resident().saturating_sub(before) / names.len(), made)
}

/// Measures the read of a value among a million by its position in an array. Each read begins after
/// the previous one has ended. No lookup can be faster than this.
fn reads() {
    let values: Vec<(ObjectValue, Timestamp)> =
        (0..OBJECTS as u64).map(|number| (ObjectValue([number; 5]), Timestamp(number))).collect();
    let mut seeded = Seeded(11);
    let mut took = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        let places: Vec<usize> = (0..BATCH).map(|_| seeded.below(OBJECTS as u32) as usize).collect();
        let start = Instant::now();
        let mut last = 0;
        for &place in &places {
            let ObjectValue([number, ..]) = values[place ^ last].0;
            // The result is always zero, because each number equals its position. The processor
            // knows that only after reading the value.
            last = black_box(number as usize) ^ place;
        }
        black_box(last);
        took.push(start.elapsed() / BATCH as u32);
    }
    let [p50, p90, p99] = percentiles(took, [50, 90, 99]);
    println!("index/limit: a read of an array of {OBJECTS}: p50 {p50:?}, p90 {p90:?}, p99 {p99:?}");
}

fn lookups(what: &str, others: usize) -> (Vec<DataId>, DataIndex<ObjectValue>, WorkerCheckpoint) {
    // The names are made first, so that their memory is not counted.
    let names = names(others);
    let (index_bytes, index) = grown(&names, filled);
    let mut seeded = Seeded(11);
    let mut took = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        // A caller has just read the name, so the name is in a cache.
        let asked: Vec<DataId> =
            (0..BATCH).map(|_| names[seeded.below(names.len() as u32) as usize].clone()).collect();
        let start = Instant::now();
        for id in &asked {
            black_box(index.get(id).copied()).expect("the object is present");
        }
        took.push(start.elapsed() / BATCH as u32);
    }
    let (told_bytes, checkpoint) = grown(&names, told);
    let [p50, p90, p99] = percentiles(took, [50, 90, 99]);
    let bytes = index_bytes + told_bytes;
    let usage = index.usage();
    println!(
        "index/{what}: {} objects, lookup p50 {p50:?}, p90 {p90:?}, p99 {p99:?} (target {LOOKUP_TARGET:?}), \
         {bytes} bytes an object, of which {told_bytes} for checkpoints (target {BYTES_TARGET})",
        usage.objects + usage.copies
    );
    (names, index, checkpoint)
}

/// Returns a flow that may use four of eight links, with 1 to 200 MB; every eighth flow is best
/// effort. All flows together need about `load_percent` percent of the uplinks.
fn flow(id: u64, seeded: &mut Seeded, flows: u64, load_percent: u64) -> RatedFlow {
    let bytes = 1_000_000 * (1 + u64::from(seeded.below(200)));
    let rate = 48_000_000_000 * load_percent / 100 / flows;
    let infer = Duration::from_millis(5);
    let slack = BytesPerSec(rate).time_for(Bytes(bytes));
    let objective = (!id.is_multiple_of(8)).then_some(TransferObjective { slo: infer + slack, infer });
    let own = seeded.below(8);
    let links = (0..4).map(|hop| LinkId((own + 2 * hop) % 8)).collect();
    RatedFlow { id: FlowId(id), bytes: Bytes(bytes), links, objective }
}

fn decisions(sharing: TransferSharing, flows: u64, load_percent: u64) {
    let mut rates = RateAllocator::new(&dgx_v100(), Config { sharing }).expect("a topology");
    let mut seeded = Seeded(5);
    let now = Timestamp::ZERO;
    for id in 0..flows {
        rates.begin(now, &flow(id, &mut seeded, flows, load_percent)).expect("a new flow");
    }
    let mut shared = Vec::new();
    let mut picked = Vec::new();
    for turn in 0..DECISIONS as u64 {
        rates.end(now, FlowId(turn)).expect("the flow has begun");
        let flow = flow(flows + turn, &mut seeded, flows, load_percent);
        let start = Instant::now();
        black_box(rates.begin(now, &flow)).expect("a new flow");
        shared.push(start.elapsed());
        let start = Instant::now();
        black_box(rates.next_rated(LinkId((turn % 8) as u32), |_, _| rates::BATCH));
        picked.push(start.elapsed());
    }
    let [[begin50, begin99], [next50, next99]] = [shared, picked].map(|took| percentiles(took, [50, 99]));
    println!(
        "rates/{sharing}, {flows} flows, {load_percent} % asked: a flow begins p50 {begin50:?}, p99 {begin99:?}; \
         the next batch p50 {next50:?}, p99 {next99:?}"
    );
}

fn main() {
    let homes = [("all made here", 0), ("half made on another node", 1), ("nine in ten made on 9 others", 9)];
    let kept = homes.map(|(what, others)| lookups(what, others));
    drop(kept);
    reads();
    for (_, sharing) in SHARINGS {
        for flows in FLOWS {
            for load_percent in [50, 200] {
                decisions(sharing, flows, load_percent);
            }
        }
    }
}
