//! What goes wrong in a run, and when: drawn from the seed before it begins.

use std::time::Duration;

use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

/// How long between the beginnings of two faults, in milliseconds. They last longer than the
/// shortest of these, so that some meet.
const APART_MS: std::ops::Range<u64> = 200..2_500;
/// How long a controller stays down, in milliseconds.
const DOWN_MS: std::ops::Range<u64> = 100..4_000;
/// How long the network is split, in milliseconds: up to several elections.
const SPLIT_MS: std::ops::Range<u64> = 300..5_000;
/// How long a worker stays down, in milliseconds.
const WORKER_DOWN_MS: std::ops::Range<u64> = 100..5_000;
/// How long it says nothing, or is not reached, in milliseconds: up to well over a lease.
const SILENT_MS: std::ops::Range<u64> = 300..7_000;
/// How long messages are late, in milliseconds.
const LATE_MS: std::ops::Range<u64> = 50..2_000;

/// Something that goes wrong. Controllers are numbered from 1, workers' machines from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// A process is gone, and comes back.
    Crash(u64),
    /// The power of one machine fails while it writes, and comes back.
    PowerCut(u64),
    /// All processes are gone at once, and come back one after the other.
    CrashAll,
    /// Messages between two sides are lost, and with them the connections they belong to.
    Split(Vec<u64>, Vec<u64>),
    /// Messages from one to the other are lost. Those of the other direction come.
    OneWay(u64, u64),
    /// Messages between two come later, all of them.
    Late(u64, u64),
    /// Clients do not reach a controller.
    CutOff(u64),
    /// A worker's process is gone, and another one comes.
    WorkerCrash(u64),
    /// It leaves in order, and another one comes.
    WorkerLeaves(u64),
    /// It is stopped for a while. Its connections stay.
    WorkerStalls(u64),
    /// It does not reach some controllers, nor they it.
    WorkerCutOff(u64, Vec<u64>),
    /// A controller does not hear it.
    WorkerUnheard(u64, u64),
    /// A controller hears it late, and it the controller.
    WorkerLate(u64, u64),
}

/// A fault with its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) from: Duration,
    pub(crate) until: Duration,
    pub(crate) fault: Fault,
}

/// The faults of a run of that length, by when they begin.
pub(crate) fn plan(rng: &mut StdRng, controllers: u64, workers: u64, length: Duration) -> Vec<Planned> {
    let mut planned = sequence(rng, length, |rng| draw(rng, controllers));
    planned.extend(sequence(rng, length, |rng| draw_worker(rng, controllers, workers)));
    planned.sort_by_key(|planned| planned.from);
    planned
}

fn sequence(
    rng: &mut StdRng,
    length: Duration,
    draw: impl Fn(&mut StdRng) -> (Fault, std::ops::Range<u64>),
) -> Vec<Planned> {
    let mut planned = Vec::new();
    let mut now = Duration::ZERO;
    loop {
        now += Duration::from_millis(rng.random_range(APART_MS));
        if now >= length {
            return planned;
        }
        let (fault, lasts) = draw(rng);
        let until = now + Duration::from_millis(rng.random_range(lasts));
        planned.push(Planned { from: now, until: until.min(length), fault });
    }
}

fn draw(rng: &mut StdRng, controllers: u64) -> (Fault, std::ops::Range<u64>) {
    let mut all: Vec<u64> = (1..=controllers).collect();
    all.shuffle(rng);
    let (one, other) = (all[0], all[1]);
    match rng.random_range(0..20) {
        0..5 => (Fault::Crash(one), DOWN_MS),
        5..8 => (Fault::PowerCut(one), DOWN_MS),
        8 => (Fault::CrashAll, DOWN_MS),
        9..13 => {
            let minority = rng.random_range(1..=all.len() / 2);
            let rest = all.split_off(minority);
            (Fault::Split(all, rest), SPLIT_MS)
        }
        13..15 => (Fault::OneWay(one, other), SPLIT_MS),
        15..18 => (Fault::Late(one, other), LATE_MS),
        _ => (Fault::CutOff(one), SPLIT_MS),
    }
}

fn draw_worker(rng: &mut StdRng, controllers: u64, workers: u64) -> (Fault, std::ops::Range<u64>) {
    let worker = rng.random_range(0..workers);
    let controller = rng.random_range(1..=controllers);
    match rng.random_range(0..20) {
        0..4 => (Fault::WorkerCrash(worker), WORKER_DOWN_MS),
        4..6 => (Fault::WorkerLeaves(worker), WORKER_DOWN_MS),
        6..10 => (Fault::WorkerStalls(worker), SILENT_MS),
        10..16 => {
            let mut all: Vec<u64> = (1..=controllers).collect();
            all.shuffle(rng);
            all.truncate(rng.random_range(1..=all.len()));
            (Fault::WorkerCutOff(worker, all), SILENT_MS)
        }
        16..18 => (Fault::WorkerUnheard(worker, controller), SILENT_MS),
        _ => (Fault::WorkerLate(worker, controller), LATE_MS),
    }
}

#[test]
fn the_same_seed_plans_the_same_faults() {
    use rand::SeedableRng as _;
    let plan = |seed| plan(&mut StdRng::seed_from_u64(seed), 3, 4, Duration::from_secs(20));
    assert_eq!(plan(1), plan(1));
    assert_ne!(plan(1), plan(2));
}
