//! The worker's cores in two times: the same seeded scenario under actix in paused tokio time, and
//! over a bare heap of events. Request, swap and run are pure cores, so each core must see and do
//! the same in both, to the nanosecond.
//!
//! In virtual time every timer and every executor wakes in separate microseconds, so no two
//! events have the same time. This matters because actix does not define the order in which actors
//! run that are due at the same moment. The bare driver asserts the property.

use std::collections::BTreeMap;

use millrace_core::trace::{CoreDigest, CoreId};
use millrace_scheduling::dispatch::POLICIES;
use millrace_transfers::rates::{SHARINGS, TransferSharing};
use millrace_types::Reason;
use millrace_types::policy::GpuSharingName;

use crate::scenario::{Ending, Scenario};
use crate::{actors, bare};

/// The outcome of a scenario's run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) folds: BTreeMap<CoreId, CoreDigest>,
    pub(crate) endings: BTreeMap<usize, Ending>,
}

const SEEDS: [u64; 6] = [1, 2, 3, 42, 1_000_003, 0xfeed_beef];

/// Returns the first core that differs, or the first request that ended differently.
fn first_difference(a: &Outcome, b: &Outcome) -> Option<String> {
    let fold = a.folds.iter().find(|(core, fold)| b.folds.get(core) != Some(fold));
    if let Some((core, fold)) = fold {
        return Some(format!("{core:?}: {fold:?} and {:?}", b.folds.get(core)));
    }
    let ending = a.endings.iter().find(|(request, ending)| b.endings.get(request) != Some(ending));
    ending.map(|(request, ending)| format!("request {request}: {ending:?} and {:?}", b.endings.get(request)))
}

#[test]
fn actors_and_a_bare_heap_take_the_same_actions() {
    for seed in SEEDS {
        let scenario = Scenario::draw(seed);
        let bare = bare::run(&scenario);
        let (actors, _) = actors::run(&scenario);
        let events: u64 = bare.folds.values().map(|fold| fold.events).sum();
        println!("seed {seed}: {events} events");
        assert_eq!(first_difference(&bare, &actors), None, "seed {seed}");
        assert_eq!(bare, actors, "seed {seed}");
    }
}

#[test]
fn every_policy_takes_the_same_actions_in_both() {
    for (name, dispatch) in POLICIES {
        let scenario = Scenario { dispatch, ..Scenario::draw(42) };
        let bare = bare::run(&scenario);
        let (actors, _) = actors::run(&scenario);
        assert_eq!(first_difference(&bare, &actors), None, "{name}");
        assert_eq!(bare.endings.len(), scenario.requests(), "{name}: a request was never answered");
    }
}

#[test]
fn shared_gpus_take_the_same_actions_in_both() {
    let shown = ["unified", "torpor", "lalb-o3", "fifo"];
    for (name, dispatch) in POLICIES.into_iter().filter(|(name, _)| shown.contains(name)) {
        let scenario = Scenario { dispatch, gpu_sharing: GpuSharingName::Slices, ..Scenario::draw(42) };
        let bare = bare::run(&scenario);
        let (actors, snapshot) = actors::run(&scenario);
        assert_eq!(first_difference(&bare, &actors), None, "{name}");
        assert_eq!(bare.endings.len(), scenario.requests(), "{name}: a request was never answered");
        assert!(snapshot.gpus.iter().all(|gpu| gpu.running.is_empty()), "{name}: a seat still runs");
    }
}

/// D14 to D16, with copies between GPUs and copies from the host.
#[test]
fn every_transfer_sharing_takes_the_same_actions_in_both() {
    for (name, sharing) in SHARINGS {
        for scenario in [Scenario::draw(3), Scenario::draw(42).joined()] {
            let scenario = Scenario { sharing, ..scenario };
            let bare = bare::run(&scenario);
            let (actors, snapshot) = actors::run(&scenario);
            assert_eq!(first_difference(&bare, &actors), None, "{name}");
            assert_eq!(bare.endings.len(), scenario.requests(), "{name}: a request was never answered");
            println!("{name}: {:?}", snapshot.transfers.ended.to_gpu);
            let promised = snapshot.transfers.ended.to_gpu.admitted > 0;
            assert_eq!(promised, sharing == TransferSharing::FaasTube, "{name}");
        }
    }
}

/// T22, T25, executors that die during copies between GPUs included.
#[test]
fn copies_between_gpus_are_the_same_in_both_and_leave_nothing_behind() {
    for seed in SEEDS {
        let scenario = Scenario::draw(seed).joined();
        let bare = bare::run(&scenario);
        let (actors, snapshot) = actors::run(&scenario);
        assert_eq!(first_difference(&bare, &actors), None, "seed {seed}");
        assert_eq!(bare.endings.len(), scenario.requests(), "seed {seed}: a request was never answered");
        let peer_swaps: u64 = snapshot.gpus.iter().map(|gpu| gpu.peer_swaps).sum();
        println!("seed {seed}: {peer_swaps} models were copied from other GPUs");
        assert!(peer_swaps > 0, "seed {seed}");
        assert!(snapshot.links.iter().all(|link| link.outstanding == 0));
    }
}

#[test]
fn the_same_seed_repeats_the_run_and_another_seed_does_not() {
    let run = |seed| actors::run(&Scenario::draw(seed)).0;
    let first = run(7);
    let second = run(7);
    let other = run(8);
    assert_eq!(first_difference(&first, &second), None, "seed 7");
    assert_ne!(first.folds, other.folds, "seeds 7 and 8");
}

#[test]
fn every_request_is_answered_and_the_scenarios_meet_every_ending() {
    let mut seen: BTreeMap<&str, usize> = BTreeMap::new();
    for seed in SEEDS {
        let scenario = Scenario::draw(seed);
        let outcome = bare::run(&scenario);
        assert_eq!(outcome.endings.len(), scenario.requests(), "seed {seed}: a request was never answered");
        for ending in outcome.endings.values() {
            *seen.entry(name(ending)).or_default() += 1;
        }
    }
    println!("{seen:?}");
    for wanted in [
        "answered",
        "answered again",
        "CANCELLED",
        "TIMED_OUT",
        "QUARANTINED",
        "EXECUTOR_LOST",
        "MODEL_FAILED",
    ] {
        assert!(seen.contains_key(wanted), "no scenario ends a request with {wanted}: {seen:?}");
    }
}

fn name(ending: &Ending) -> &'static str {
    match ending {
        Ending::Answered { attempts: 1, .. } => "answered",
        Ending::Answered { .. } => "answered again",
        Ending::Failed { reason, .. } => reason.as_str(),
        Ending::Cancelled => Reason::Cancelled.as_str(),
    }
}

#[test]
fn every_resource_is_released_in_the_end() {
    let scenario = Scenario::draw(3);
    let (_, snapshot) = actors::run(&scenario);
    assert_eq!(snapshot.queued, 0);
    assert!(snapshot.functions.iter().all(|function| function.in_flight == 0));
    assert!(snapshot.links.iter().all(|link| link.outstanding == 0));
    for gpu in &snapshot.gpus {
        assert_eq!(gpu.running, []);
        assert_eq!(gpu.used, gpu.models.iter().map(|model| model.bytes).sum());
        assert!(gpu.swaps > gpu.models.len() as u64, "{gpu:?}");
    }
    let answered: u64 = snapshot
        .functions
        .iter()
        .map(|f| f.score.completed + f.score.expired + f.score.failed + f.score.cancelled)
        .sum();
    assert_eq!(answered, scenario.requests() as u64);
}
