//! What the index of a node costs with a million live objects, in time and in memory, what checkpoints
//! remember of them included; and what it costs to share links among flows, up to as many as are taken.
//! Prints each figure beside its target.
//!
//! The index is the one that workers run, with as much kept of each object as they keep. Lookups are timed
//! in batches of 1000 in an order that no cache can guess: a percentile is one of batches, divided by their
//! size, so that on a machine with other work the highest one shows the scheduler's slices. Memory is what
//! the process's resident set grew by.

#![allow(clippy::disallowed_methods, reason = "it measures")]

#[path = "../src/fixtures.rs"]
mod fixtures;
#[path = "support/percentiles.rs"]
mod percentiles;
#[path = "support/resident.rs"]
mod resident;
#[path = "support/seeded.rs"]
mod seeded;

use std::hint::black_box;
use std::time::{Duration, Instant};

use millrace_policy::checkpoint::{Action, Checkpoint, Config as Checkpoints, Event};
use millrace_policy::core::Core;
use millrace_policy::index::{Held, Index, Limit, OBJECTS_MAX};
use millrace_policy::rates::{self, Config, FLOWS_MAX, Flow, FlowId, Objective, Rates, SHARINGS, Sharing};
use millrace_types::topology::LinkId;
use millrace_types::{Bytes, BytesPerSec, DataId, Epoch, NodeName, Timestamp};

use fixtures::dgx_v100;
use percentiles::percentiles;
use resident::resident;
use seeded::Seeded;

const OBJECTS: usize = OBJECTS_MAX as usize;
/// How many are stored in a second: those are young together.
const A_SECOND: usize = 50_000;
const BATCH: usize = 1_000;
const BATCHES: usize = 2_000;
const LOOKUP_TARGET: Duration = Duration::from_nanos(200);
const BYTES_TARGET: usize = 200;
/// As many as are under way on a busy node, and all that are taken.
const FLOWS: [u64; 2] = [64, FLOWS_MAX as u64];
const EPOCH: Epoch = Epoch(3);
const DECISIONS: usize = 2_000;

/// What workers keep of an object: their `Contents` are asserted to take no more.
#[derive(Clone, Copy)]
struct Kept([u64; 5]);

impl Held for Kept {
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

/// A million names, of which one in three that came between is gone: made here, and as many on each
/// of some other nodes.
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

/// A node that holds them all, each for as long as it was given after the one before.
fn filled(names: &[DataId]) -> Index<Kept> {
    let limit = Limit { bytes: Bytes(u64::MAX), files: 0, objects: OBJECTS_MAX };
    let node = name(0);
    let mut index = Index::new(node.clone(), limit);
    for id in names {
        let (kept, until) = (Kept([id.counter; 5]), Timestamp(id.counter));
        let taken = if id.home == node {
            index.put_as(id.epoch, id.counter, kept, until).is_ok()
        } else {
            index.put_copy(id, kept, until)
        };
        assert!(taken, "{id} is new, and there is room");
    }
    index
}

/// A checkpoint of a node that stored them at this pace, and told the leader what it may.
fn told(names: &[DataId]) -> Checkpoint {
    let mut checkpoint = Checkpoint::new(Checkpoints::default());
    let (mut now, mut actions) = (Timestamp::ZERO, Vec::new());
    checkpoint.on_event(now, Event::Registered { epoch: EPOCH }, &mut actions);
    // In the last second nothing is stored: what the one before it ended with is acknowledged.
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

/// What making something of these takes, for each, and what was made: kept, so that the next does not
/// take over its memory uncounted.
fn grown<T>(names: &[DataId], make: impl FnOnce(&[DataId]) -> T) -> (usize, T) {
    let before = resident();
    let made = make(names);
    (resident().saturating_sub(before) / names.len(), made)
}

/// What it takes to read one of as many values as the index holds, by its place in an array, where no read
/// begins before the last has ended: nothing that has to look finds any of them sooner.
fn reads() {
    let values: Vec<(Kept, Timestamp)> =
        (0..OBJECTS as u64).map(|number| (Kept([number; 5]), Timestamp(number))).collect();
    let mut seeded = Seeded(11);
    let mut took = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        let places: Vec<usize> = (0..BATCH).map(|_| seeded.below(OBJECTS as u32) as usize).collect();
        let (start, mut last) = (Instant::now(), 0);
        for &place in &places {
            let Kept([number, ..]) = values[place ^ last].0;
            // Zero: each is at its place. But that is not known before the value is.
            last = black_box(number as usize) ^ place;
        }
        black_box(last);
        took.push(start.elapsed() / BATCH as u32);
    }
    let [p50, p90, p99] = percentiles(took, [50, 90, 99]);
    println!("index/limit: a read of an array of {OBJECTS}: p50 {p50:?}, p90 {p90:?}, p99 {p99:?}");
}

fn lookups(what: &str, others: usize) -> (Vec<DataId>, Index<Kept>, Checkpoint) {
    // They are made before, so that what they take is not counted.
    let names = names(others);
    let (index_bytes, index) = grown(&names, filled);
    let mut seeded = Seeded(11);
    let mut took = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        // Whoever asks has just read the name.
        let asked: Vec<DataId> =
            (0..BATCH).map(|_| names[seeded.below(names.len() as u32) as usize].clone()).collect();
        let start = Instant::now();
        for id in &asked {
            black_box(index.get(id).copied()).expect("it is here");
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

/// A flow that may use four of eight links, with 1 to 200 MB; one in eight is best effort. In all
/// they need about so many percent of the uplinks.
fn flow(id: u64, seeded: &mut Seeded, flows: u64, load_percent: u64) -> Flow {
    let bytes = 1_000_000 * (1 + u64::from(seeded.below(200)));
    let rate = 48_000_000_000 * load_percent / 100 / flows;
    let infer = Duration::from_millis(5);
    let slack = BytesPerSec(rate).time_for(Bytes(bytes));
    let objective = (!id.is_multiple_of(8)).then_some(Objective { slo: infer + slack, infer });
    let own = seeded.below(8);
    let links = (0..4).map(|hop| LinkId((own + 2 * hop) % 8)).collect();
    Flow { id: FlowId(id), bytes: Bytes(bytes), links, objective }
}

fn decisions(sharing: Sharing, flows: u64, load_percent: u64) {
    let mut rates = Rates::new(&dgx_v100(), Config { sharing }).expect("a topology");
    let mut seeded = Seeded(5);
    let now = Timestamp::ZERO;
    for id in 0..flows {
        rates.begin(now, &flow(id, &mut seeded, flows, load_percent)).expect("a new flow");
    }
    let (mut shared, mut picked) = (Vec::new(), Vec::new());
    for turn in 0..DECISIONS as u64 {
        rates.end(now, FlowId(turn)).expect("it has begun");
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
