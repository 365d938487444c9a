//! The faults of a run and the times, drawn from the seed before the run begins.

use std::time::Duration;

use rand::Rng as _;
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;

/// The time between the beginnings of two faults, in milliseconds. Faults last longer than the shortest
/// of these times, so some faults overlap.
const APART_MS: std::ops::Range<u64> = 200..2_500;
/// The downtime of a controller, in milliseconds.
const DOWN_MS: std::ops::Range<u64> = 100..4_000;
/// The downtime of a controller that restarts before the others elect a leader, in milliseconds.
const QUICK_MS: std::ops::Range<u64> = 5..100;
/// The duration of a network split, in milliseconds: up to several elections.
const SPLIT_MS: std::ops::Range<u64> = 300..5_000;
/// The downtime of a worker, in milliseconds.
const WORKER_DOWN_MS: std::ops::Range<u64> = 100..5_000;
/// The duration of a worker's silence or isolation, in milliseconds: up to well over a lease.
const SILENT_MS: std::ops::Range<u64> = 300..7_000;
/// The delay of messages, in milliseconds.
const LATE_MS: std::ops::Range<u64> = 50..2_000;

/// A fault. Controllers are numbered from 1, and workers' machines from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The process of a controller dies and restarts.
    Crash(u64),
    /// The power of a controller's machine fails during a write, and returns.
    PowerCut(u64),
    /// The processes of all controllers die at once, and restart in turn.
    CrashAll,
    /// All messages between two sides are lost, which breaks the connections between the sides.
    Split(Vec<u64>, Vec<u64>),
    /// All messages from the first controller to the second are lost, and messages in the other
    /// direction arrive.
    OneWay(u64, u64),
    /// All messages between two controllers are delayed.
    Late(u64, u64),
    /// Clients cannot reach a controller.
    CutOff(u64),
    /// A worker's process dies, and another process starts.
    WorkerCrash(u64),
    /// A worker says goodbye, and another process starts.
    WorkerLeaves(u64),
    /// A worker is stopped for a while. The connections stay open.
    WorkerStalls(u64),
    /// A worker and some controllers cannot reach each other.
    WorkerCutOff(u64, Vec<u64>),
    /// A controller does not receive a worker's messages.
    WorkerUnheard(u64, u64),
    /// All messages between a worker and a controller are delayed.
    WorkerLate(u64, u64),
}

/// A fault with the times of the beginning and the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) from: Duration,
    pub(crate) until: Duration,
    pub(crate) fault: Fault,
}

/// Returns the faults of a run of this length, ordered by beginning.
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
    let one = all[0];
    let other = all[1];
    match rng.random_range(0..20) {
        0..3 => (Fault::Crash(one), DOWN_MS),
        3..5 => (Fault::Crash(one), QUICK_MS),
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
