//! Tests of the order in which models are evicted, and of models that are never evicted (T24, T25).

use super::*;
use millrace_memory::eviction::EvictionCandidate;
use millrace_memory::eviction::{CopyKind, LoadInterference};

const REPLICA: EvictionCandidate =
    EvictionCandidate { copy: CopyKind::Replica, weight: LoadInterference::Heavy };
const LIGHT: EvictionCandidate =
    EvictionCandidate { copy: CopyKind::Original, weight: LoadInterference::Light };
const HEAVY: EvictionCandidate =
    EvictionCandidate { copy: CopyKind::Original, weight: LoadInterference::Heavy };

/// Returns a bench on which A, B and C are resident and were used in this order. Two of the 32
/// blocks are free.
fn resident(eviction: Eviction) -> Bench {
    let mut bench = bench();
    bench.gpu = bench.gpu.with_eviction(eviction);
    for (key, model) in [(1, A), (2, B), (3, C)] {
        bench.now = Timestamp(bench.now.0 + 1_000);
        bench.assign(key, model);
        bench.arrive(model, key, key);
        bench.run_done(key, 500);
    }
    bench
}

impl Bench {
    fn set_candidate(&mut self, model: ModelId, candidate: EvictionCandidate) {
        assert_eq!(self.step(Event::CandidateChanged { model, candidate }), []);
    }

    /// Returns the models that a model of `chunks` chunks evicts.
    fn evicts(&mut self, chunks: u64) -> Vec<ModelId> {
        let model = ModelId(50);
        let weights = Bytes(CHUNK.0 * chunks);
        self.step(Event::Install { model, memory: weights, weights });
        let evicted = |action| if let Action::Evicted { models } = action { Some(models) } else { None };
        self.assign(9, model).into_iter().find_map(evicted).unwrap_or_default()
    }

    fn lock(&mut self, transfer: u64, model: ModelId) -> Vec<Action> {
        self.step(Event::Lock { transfer: TransferId(transfer), model })
    }

    fn unlock(&mut self, transfer: u64) -> Vec<Action> {
        self.step(Event::Unlock { transfer: TransferId(transfer) })
    }
}

#[test]
fn replicas_are_evicted_before_light_models_and_light_before_heavy_models() {
    let order = |eviction, candidates: [EvictionCandidate; 3]| {
        let mut bench = resident(eviction);
        for (model, candidate) in [A, B, C].into_iter().zip(candidates) {
            bench.set_candidate(model, candidate);
        }
        bench.evicts(28)
    };
    for (candidates, due) in [
        ([HEAVY, LIGHT, REPLICA], [C, B, A]),
        ([LIGHT, HEAVY, REPLICA], [C, A, B]),
        ([HEAVY, LIGHT, LIGHT], [B, C, A]),
        ([HEAVY, REPLICA, REPLICA], [B, C, A]),
        ([HEAVY; 3], [A, B, C]),
    ] {
        assert_eq!(order(Eviction::Torpor, candidates), due, "{candidates:?}");
        let replicas = |candidate: &EvictionCandidate| candidate.copy == CopyKind::Replica;
        let mut by_age = [A, B, C];
        by_age.sort_by_key(|model| !replicas(&candidates[model.0 as usize]));
        assert_eq!(order(Eviction::Replicas, candidates), by_age, "{candidates:?}");
        assert_eq!(order(Eviction::Lru, candidates), [A, B, C], "least recently used first");
    }
}

#[test]
fn a_reloaded_model_has_the_last_reported_candidate() {
    let mut bench = resident(Eviction::Torpor);
    bench.set_candidate(C, REPLICA);
    assert_eq!(bench.evicts(10), [C]);
    bench.arrive_any(ModelId(50));
    bench.now = Timestamp(bench.now.0 + 9_000);
    bench.set_candidate(C, LIGHT);
    bench.assign(10, C);
    bench.arrive_any(C);
    assert_eq!(
        bench.gpu.memory().region(B).map(|_| ()),
        Some(()),
        "A made room, the heavy one used longest ago"
    );
    bench.set_candidate(B, LIGHT);
    assert_eq!(bench.evicts_model(51, 10), [B], "light like C, and used before it");
}

#[test]
fn a_changed_eviction_policy_applies_to_resident_models() {
    let mut bench = resident(Eviction::Torpor);
    for (model, candidate) in [(A, HEAVY), (B, REPLICA), (C, LIGHT)] {
        bench.set_candidate(model, candidate);
    }
    assert_eq!(bench.step(Event::Eviction(Eviction::Lru)), []);
    assert_eq!(bench.evicts(10), [A], "used longest ago");
    let mut bench = resident(Eviction::Lru);
    for (model, candidate) in [(A, HEAVY), (B, REPLICA), (C, LIGHT)] {
        bench.set_candidate(model, candidate);
    }
    assert_eq!(bench.step(Event::Eviction(Eviction::Torpor)), []);
    assert_eq!(bench.evicts(10), [B]);
}

impl Bench {
    /// Has all of a model arrive, run and end.
    fn arrive_any(&mut self, model: ModelId) {
        let region = self.gpu.memory().region(model).unwrap();
        let generation = region.generation();
        let chunks = region.loaded().missing();
        for chunks in chunks {
            self.step(Event::Arrived { model, generation, chunks });
        }
        let transfer = self.gpu.last_transfer;
        let run = self.gpu.last_run;
        self.end_transfer(transfer.0, TransferOutcome::Complete);
        self.run_done(run.0, 500);
    }

    fn evicts_model(&mut self, model: u32, chunks: u64) -> Vec<ModelId> {
        let model = ModelId(model);
        let weights = Bytes(CHUNK.0 * chunks);
        self.step(Event::Install { model, memory: weights, weights });
        let evicted = |action| if let Action::Evicted { models } = action { Some(models) } else { None };
        self.assign(11, model).into_iter().find_map(evicted).unwrap_or_default()
    }
}

fn locked(transfer: u64, start: u32) -> Action {
    let blocks = vec![BlockRun { start, len: 10 }];
    let peer = millrace_transfers::fabric::PeerBlocks {
        gpu: GpuIndex(0),
        incarnation: FIRST,
        blocks,
        block: BlockSize::DEFAULT,
        skip: Bytes::ZERO,
    };
    Action::Locked { transfer: TransferId(transfer), peer }
}

#[test]
fn a_model_is_not_evicted_while_another_gpu_copies_the_model() {
    let mut bench = resident(Eviction::Torpor);
    bench.set_candidate(A, REPLICA);
    assert_eq!(bench.lock(70, A), [locked(70, 0)]);
    assert_eq!(bench.lock(71, A), [locked(71, 0)]);
    assert_eq!(bench.assign(9, LARGE), [], "all three models would have to be evicted");
    let not_locked = Action::NotLocked { transfer: TransferId(72) };
    assert_eq!(bench.lock(72, B), [not_locked], "a lock would block the waiting request");
    assert_eq!(bench.unlock(70), [], "another GPU still copies the model");
    assert_eq!(bench.unlock(71)[3..4], [evicted(&[A, B, C])]);
}

#[test]
fn an_incomplete_model_is_not_locked() {
    let mut bench = bench();
    let not_locked = |transfer| [Action::NotLocked { transfer: TransferId(transfer) }];
    assert_eq!(bench.lock(70, A), not_locked(70), "not there");
    bench.assign(1, A);
    bench.step(Event::Arrived { model: A, generation: Generation(1), chunks: 0..9 });
    assert_eq!(bench.lock(71, A), not_locked(71), "on its way");
    bench.step(Event::Arrived { model: A, generation: Generation(1), chunks: 9..10 });
    assert_eq!(bench.lock(72, A), [locked(72, 0)]);
    bench.step(Event::Down);
    assert_eq!(bench.unlock(72), [], "the lock was lost with the executor");
    assert_eq!(bench.lock(73, A), not_locked(73));
}

#[test]
fn a_removed_model_stays_while_another_gpu_copies_it() {
    let mut bench = resident(Eviction::Lru);
    bench.lock(70, A);
    assert_eq!(bench.step(Event::Remove { model: A }), []);
    assert_eq!(bench.unlock(70)[..2], [unmap(A, 1), evicted(&[A])]);
}

#[test]
fn an_executor_that_denies_the_mapping_of_a_lent_model_is_replaced() {
    let mut bench = resident(Eviction::Lru);
    bench.lock(70, A);
    let denied = bench.step(Event::MapFailed { model: A, generation: Generation(1) });
    assert_eq!(denied, [down(&[]), Action::Replace]);
}

#[test]
fn models_copied_wholly_from_a_peer_are_counted() {
    let mut bench = bench();
    let from = Some(GpuIndex(1));
    for (transfer, outcome, from) in [
        (1, TransferOutcome::Cancelled, from),
        (2, TransferOutcome::Complete, from),
        (3, TransferOutcome::Complete, None),
    ] {
        let model = ModelId(transfer as u32 - 1);
        bench.assign(transfer, model);
        bench.step(Event::TransferEnded { transfer: TransferId(transfer), outcome, from });
        bench.cancel(transfer);
        bench.step(Event::RunCancelled { run: RunId(transfer) });
    }
    assert_eq!(bench.gpu.totals().peer_swaps, 1);
}
