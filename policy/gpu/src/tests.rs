use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use millrace_types::{Bytes, GpuIndex, Incarnation, ModelId, Reason, Timestamp};

use super::*;
use millrace_core::Core;
use millrace_core::attempts::{AttemptProgress, ReturnReason};
use millrace_core::ids::{Generation, RequestKey, RunId, SeatIndex, TransferId};
use millrace_memory::eviction::Eviction;
use millrace_memory::{BlockPlacement, BlockRun, BlockSize, CHUNK, MemoryMap};
use millrace_slices::tokens::Config;
use millrace_transfers::fabric::{TransferOutcome, WeightsCargo};

mod blocks;
mod data;
mod eviction;
mod failures;
mod isolation;
mod prefetch;
mod residency;
mod seats;
mod sharing;

const A: ModelId = ModelId(0);
const B: ModelId = ModelId(1);
const C: ModelId = ModelId(2);
const LARGE: ModelId = ModelId(3);
const HUGE: ModelId = ModelId(4);
/// The sizes of the models' weights, in chunks. The GPU has 32 blocks.
const CHUNKS: [u32; 5] = [10, 10, 10, 28, 33];
const FIRST: Incarnation = Incarnation(1);

struct Bench {
    gpu: GpuCore,
    now: Timestamp,
    /// Whether tests see no tokens of a shared GPU.
    hides_tokens: bool,
}

fn bench() -> Bench {
    installed(GpuCore::new(GpuIndex(0), MemoryMap::new(Bytes::mib(64), BlockSize::DEFAULT)))
}

/// Returns a bench with all models installed on this GPU, and an executor up.
fn installed(gpu: GpuCore) -> Bench {
    let mut bench = Bench { gpu, now: Timestamp(1_000), hides_tokens: false };
    for (model, chunks) in (0..).map(ModelId).zip(CHUNKS) {
        let weights = Bytes(CHUNK.0 * u64::from(chunks));
        assert_eq!(bench.step(Event::Install { model, memory: weights, weights }), []);
    }
    assert_eq!(bench.step(Event::Up { incarnation: FIRST }), [Action::Up { incarnation: FIRST }]);
    bench
}

impl Bench {
    fn step(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.gpu.on_event(self.now, event, &mut actions);
        if self.hides_tokens {
            actions.retain(|it| {
                !matches!(it, Action::Grant { .. } | Action::Shorten { .. } | Action::Withdraw { .. })
            });
            for action in &mut actions {
                if let Action::Run { tokens, .. } = action {
                    assert!(tokens.take().is_some());
                }
            }
        }
        actions
    }

    /// Shares the GPU, for tests that are not about tokens.
    fn shared(mut self) -> Self {
        self.hides_tokens = true;
        assert_eq!(self.step(Event::Sharing(Some(Config::SLICES))), []);
        self
    }

    fn assign(&mut self, key: u64, model: ModelId) -> Vec<Action> {
        self.assign_to(0, key, model, None)
    }

    /// Assigns a request to a seat.
    fn assign_to(&mut self, seat: u32, key: u64, model: ModelId, deadline: Option<u64>) -> Vec<Action> {
        self.step(Event::Assign {
            seat: SeatIndex(seat),
            key: RequestKey(key),
            model,
            incarnation: FIRST,
            from: None,
            deadline: deadline.map(Timestamp),
            right: ComputeRight::Free,
        })
    }

    /// Has all of a model arrive and its transfer end.
    fn arrive(&mut self, model: ModelId, generation: u64, transfer: u64) -> Vec<Action> {
        let chunks = 0..CHUNKS[model.0 as usize];
        let mut actions = self.step(Event::Arrived { model, generation: Generation(generation), chunks });
        actions.extend(self.end_transfer(transfer, TransferOutcome::Complete));
        actions
    }

    fn end_transfer(&mut self, transfer: u64, outcome: TransferOutcome) -> Vec<Action> {
        self.step(Event::TransferEnded { transfer: TransferId(transfer), outcome, from: None })
    }

    /// Ends a run that began `ran` nanoseconds ago.
    fn run_done(&mut self, run: u64, ran: u64) -> Vec<Action> {
        let started = Timestamp(self.now.0 - ran);
        let finished = self.now;
        self.step(run_done(RunId(run), started, finished))
    }

    fn run_failed(&mut self, run: u64, why: RunFailure) -> Vec<Action> {
        self.step(Event::RunFailed { run: RunId(run), why })
    }

    fn cancel(&mut self, key: u64) -> Vec<Action> {
        self.step(Event::Cancel { key: RequestKey(key) })
    }

    fn recall(&mut self, key: u64) -> Vec<Action> {
        self.step(Event::Recall { key: RequestKey(key) })
    }

    /// Returns a bench on which the resident model A runs as request 1.
    fn running_a() -> Self {
        bench().with_a()
    }

    /// Returns the bench with the resident model A running as request 1.
    fn with_a(mut self) -> Self {
        self.assign(1, A);
        self.step(Event::ProgramLoaded { model: A });
        self.arrive(A, 1, 1);
        self
    }

    /// Returns a bench that holds A, B and C after one run of each.
    fn holding_three() -> Self {
        let mut bench = Self::running_a();
        bench.run_done(1, 500);
        for (place, model) in [(2, B), (3, C)] {
            bench.now = Timestamp(bench.now.0 + 1_000);
            bench.assign(place, model);
            bench.arrive(model, place, place);
            bench.run_done(place, 500);
        }
        bench
    }
}

fn load(model: ModelId) -> Action {
    Action::LoadProgram { model }
}

fn map(model: ModelId, generation: u64, start: u32) -> Action {
    let blocks = vec![BlockRun { start, len: CHUNKS[model.0 as usize] }];
    Action::Map { model, generation: Generation(generation), blocks }
}

fn unmap(model: ModelId, generation: u64) -> Action {
    Action::Unmap { model, generation: Generation(generation) }
}

fn run(run: u64, key: u64, model: ModelId, generation: u64) -> Action {
    run_on(0, run, key, model, generation)
}

/// Returns the start of a run on a seat of the executor.
fn run_on(seat: u8, run: u64, key: u64, model: ModelId, generation: u64) -> Action {
    Action::Run {
        run: RunId(run),
        key: RequestKey(key),
        model,
        generation: Generation(generation),
        seat: ExecutorSeat(seat),
        tokens: None,
    }
}

/// Returns the end of a run that waited for nothing.
fn run_done(run: RunId, started: Timestamp, finished: Timestamp) -> Event {
    let zero = Duration::ZERO;
    Event::RunDone { run, started, finished, waited: zero, held: zero, sm: zero, token: None }
}

fn transfer(transfer: u64, model: ModelId, generation: u64, chunks: std::ops::Range<u32>) -> Action {
    let bytes = Bytes(CHUNK.0 * u64::from(CHUNKS[model.0 as usize]));
    let weights = WeightsCargo { model, generation: Generation(generation), bytes };
    Action::Transfer { transfer: TransferId(transfer), weights, chunks: vec![chunks], from: None }
}

fn cancel_transfer(transfer: u64) -> Action {
    Action::CancelTransfer { transfer: TransferId(transfer) }
}

fn cancel_run(run: u64) -> Action {
    Action::CancelRun { run: RunId(run) }
}

fn ended(key: u64, ran: Option<u64>) -> Action {
    Action::Ended { key: RequestKey(key), ran: ran.map(Duration::from_nanos) }
}

fn returned(key: u64, why: ReturnReason) -> Action {
    Action::RequestReturned { key: RequestKey(key), why }
}

fn evicted(models: &[ModelId]) -> Action {
    Action::Evicted { models: models.to_vec() }
}

fn down(lost: &[(u64, AttemptProgress)]) -> Action {
    Action::Down { lost: lost.iter().map(|&(key, progress)| (RequestKey(key), progress)).collect() }
}

#[test]
fn a_cold_request_is_sent_at_once_while_the_weights_are_copied() {
    let mut bench = bench();
    assert_eq!(bench.assign(7, A), [load(A), map(A, 1, 0), run(1, 7, A, 1), transfer(1, A, 1, 0..10)]);
    bench.now = Timestamp(9_000);
    assert_eq!(bench.arrive(A, 1, 1), []);
    let spent = GpuTimes {
        turn: Timestamp(1_000),
        swap: Duration::from_nanos(5_000),
        ran: Duration::from_nanos(3_000),
        held: Duration::ZERO,
        billed: Duration::from_nanos(3_000),
        swapped: Bytes::mib(20),
        on: None,
    };
    let completed = Action::Completed { key: RequestKey(7), spent };
    assert_eq!(bench.run_done(1, 3_000), [completed, ended(7, Some(3_000))]);
    assert_eq!(bench.gpu.totals().swaps, 1);
}

#[test]
fn a_request_for_a_resident_model_has_no_swap_time() {
    let mut bench = Bench::running_a();
    bench.run_done(1, 500);
    assert_eq!(bench.assign(2, A), [run(2, 2, A, 1)]);
    bench.now = Timestamp(4_000);
    let spent = GpuTimes {
        turn: Timestamp(1_000),
        swap: Duration::ZERO,
        ran: Duration::from_nanos(700),
        held: Duration::ZERO,
        billed: Duration::from_nanos(700),
        swapped: Bytes::ZERO,
        on: None,
    };
    let completed = Action::Completed { key: RequestKey(2), spent };
    assert_eq!(bench.run_done(2, 700), [completed, ended(2, Some(700))]);
}

#[test]
fn bytes_of_an_unreported_copy_are_counted_once_for_the_run_that_read_the_weights() {
    let mut bench = bench();
    bench.assign(1, A);
    bench.assign(2, A);
    bench.step(Event::Arrived { model: A, generation: Generation(1), chunks: 0..5 });
    let swapped = |actions: &[Action]| match actions {
        [Action::Completed { spent, .. }, ..] => spent.swapped,
        other => panic!("{other:?}"),
    };
    assert_eq!(swapped(&bench.run_done(1, 500)), Bytes::mib(20));
    bench.step(Event::Arrived { model: A, generation: Generation(1), chunks: 5..10 });
    bench.end_transfer(1, TransferOutcome::Complete);
    assert_eq!(swapped(&bench.run_done(2, 500)), Bytes::ZERO);
    assert_eq!(bench.gpu.loaded(A), Bytes::mib(20));
}

#[test]
fn the_next_request_is_prepared_while_the_first_runs_but_the_first_has_the_link() {
    let mut bench = bench();
    bench.assign(1, A);
    assert_eq!(bench.assign(2, B), [load(B), map(B, 2, 10), run(2, 2, B, 2)]);
    assert_eq!(bench.arrive(A, 1, 1), [transfer(2, B, 2, 0..10)]);
}

#[test]
fn a_model_that_does_not_fit_beside_the_running_model_waits() {
    let mut bench = Bench::running_a();
    assert_eq!(bench.assign(2, LARGE), []);
    let actions = bench.run_done(1, 500);
    let expected = [
        unmap(A, 1),
        evicted(&[A]),
        load(LARGE),
        map(LARGE, 2, 0),
        run(2, 2, LARGE, 2),
        transfer(2, LARGE, 2, 0..28),
    ];
    assert_eq!(actions[2..], expected);
    assert_eq!(bench.gpu.totals().evictions, 1);
}

#[test]
fn the_least_recently_used_models_are_evicted_first() {
    let mut bench = Bench::holding_three();
    bench.now = Timestamp(bench.now.0 + 1_000);
    bench.assign(4, A);
    bench.run_done(4, 500);
    let actions = bench.assign(5, LARGE);
    // All of B, C and A have to be evicted; the model used last is evicted last.
    assert_eq!(actions[..4], [unmap(B, 2), unmap(C, 3), unmap(A, 1), evicted(&[B, C, A])]);
}

#[test]
fn a_pinned_model_is_spared_while_others_make_room() {
    let evicted_by = |bench: &mut Bench| {
        let actions = bench.assign(5, LARGE);
        actions.into_iter().find(|action| matches!(action, Action::Evicted { .. }))
    };
    // A was used longest ago, but only all three models together make room for LARGE.
    let mut bench = Bench::holding_three();
    bench.step(Event::Pin { model: A });
    assert_eq!(evicted_by(&mut bench), Some(evicted(&[A, B, C])), "rather than that nothing runs");
    let mut bench = Bench::holding_three();
    bench.step(Event::Pin { model: A });
    bench.step(Event::Install { model: ModelId(40), memory: Bytes::mib(20), weights: Bytes::mib(2) });
    let actions = bench.assign(5, ModelId(40));
    assert_eq!(actions.iter().find(|action| matches!(action, Action::Evicted { .. })), Some(&evicted(&[B])));
}

/// The node sends the pin before learning of the executor's end, and the unpin afterwards.
#[test]
fn a_pin_after_the_end_of_the_executor_is_removed_by_the_next_unpin() {
    let mut bench = Bench::running_a();
    bench.step(Event::Down);
    bench.step(Event::Pin { model: A });
    bench.step(Event::Up { incarnation: Incarnation(2) });
    assert_eq!(bench.gpu.awaited, BTreeSet::from([A]), "the GPU cannot tell that the pin is old");
    bench.step(Event::Unpin { model: A });
    assert_eq!(bench.gpu.awaited, BTreeSet::new());
}

#[test]
fn a_model_larger_than_the_gpu_is_refused() {
    let mut bench = bench();
    let failed = Action::Failed { key: RequestKey(1), reason: Reason::NoGpuMemory, may_have_executed: false };
    assert_eq!(bench.assign(1, HUGE), [evicted(&[HUGE]), failed, ended(1, None)]);
    assert_eq!(bench.gpu.requests(), 0);
}

#[test]
fn a_recalled_request_is_returned_unless_the_turn_has_begun() {
    let mut bench = Bench::running_a();
    bench.assign(2, LARGE);
    assert_eq!(bench.recall(2), [evicted(&[LARGE]), returned(2, ReturnReason::Recalled)], "not sent yet");
    bench.assign(3, B);
    assert_eq!(bench.recall(3), [cancel_run(2)]);
    let cancelled = bench.step(Event::RunCancelled { run: RunId(2) });
    assert_eq!(cancelled, [returned(3, ReturnReason::Recalled)]);
    bench.assign(4, B);
    bench.run_done(1, 500);
    assert_eq!(bench.recall(4), [], "its turn has come");
}

#[test]
fn a_recall_after_the_start_of_the_run_changes_nothing() {
    let mut bench = Bench::running_a();
    bench.assign(2, A);
    assert_eq!(bench.recall(2), [cancel_run(2)]);
    bench.run_done(1, 500);
    assert!(matches!(bench.run_done(2, 100)[..], [Action::Completed { .. }, Action::Ended { .. }]));
}

#[test]
fn a_cancelled_request_leaves_at_once_or_at_the_end_of_the_run() {
    let mut bench = Bench::running_a();
    bench.assign(2, LARGE);
    assert_eq!(bench.cancel(2), [evicted(&[LARGE]), ended(2, None)]);
    assert_eq!(bench.cancel(1), [cancel_run(1)]);
    assert_eq!(bench.run_done(1, 500), [ended(1, Some(500))], "the outputs are dropped");
    bench.assign(3, A);
    assert_eq!(bench.cancel(3), [cancel_run(2)]);
    assert_eq!(bench.step(Event::RunCancelled { run: RunId(2) }), [ended(3, None)]);
}

#[test]
fn a_removed_model_is_dropped_once_no_request_uses_the_model() {
    let mut bench = Bench::running_a();
    assert_eq!(bench.step(Event::Remove { model: A }), []);
    let gone =
        [unmap(A, 1), evicted(&[A]), Action::UnloadProgram { model: A }, Action::ModelForgotten { model: A }];
    assert_eq!(bench.run_done(1, 500)[2..], gone);
    assert_eq!(
        bench.step(Event::Remove { model: B }),
        [Action::ModelForgotten { model: B }],
        "never was here"
    );
}

/// Returns a bench on which part of A arrived for a request that left, and A's transfer makes way
/// for B's.
fn cut_short() -> Bench {
    let mut bench = bench();
    bench.assign(1, A);
    bench.step(Event::Arrived { model: A, generation: Generation(1), chunks: 0..5 });
    bench.cancel(1);
    bench.step(Event::RunCancelled { run: RunId(1) });
    assert_eq!(bench.assign(2, B)[3..], [cancel_transfer(1), transfer(2, B, 2, 0..10)]);
    bench
}

#[test]
fn a_load_cut_short_without_a_waiting_request_is_dropped() {
    let mut bench = cut_short();
    assert_eq!(bench.end_transfer(1, TransferOutcome::Cancelled), [unmap(A, 1), evicted(&[A])]);
    bench.arrive(B, 2, 2);
    bench.run_done(2, 500);
    assert_eq!(bench.gpu.memory().used_blocks(), 10);
    assert_eq!(bench.assign(3, A), [map(A, 3, 0), run(3, 3, A, 3), transfer(3, A, 3, 0..10)]);
}

#[test]
fn a_load_cut_short_is_continued_for_a_waiting_request() {
    let mut bench = cut_short();
    assert_eq!(bench.assign(3, A), [run(3, 3, A, 1)]);
    assert_eq!(bench.end_transfer(1, TransferOutcome::Cancelled), []);
    assert_eq!(bench.arrive(B, 2, 2), [transfer(3, A, 1, 5..10)]);
    // The rest is also kept if a request elsewhere waits for the model, as long as it waits.
    let mut bench = cut_short();
    bench.step(Event::Pin { model: A });
    assert_eq!(bench.end_transfer(1, TransferOutcome::Cancelled), []);
    assert_eq!(bench.gpu.loaded(A), Bytes::mib(10));
    assert_eq!(bench.step(Event::Unpin { model: A }), [unmap(A, 1), evicted(&[A])]);
}

#[test]
fn a_load_recalled_before_the_start_of_the_transfer_is_dropped() {
    let mut bench = bench();
    bench.assign(1, A);
    assert_eq!(bench.assign(2, B), [load(B), map(B, 2, 10), run(2, 2, B, 2)], "A has the link");
    bench.recall(2);
    let back = bench.step(Event::RunCancelled { run: RunId(2) });
    assert_eq!(back, [unmap(B, 2), evicted(&[B]), returned(2, ReturnReason::Recalled)]);
    // A transfer in flight continues even if no request waits for it.
    bench.arrive(A, 1, 1);
    bench.assign(3, B);
    bench.recall(3);
    assert_eq!(bench.step(Event::RunCancelled { run: RunId(3) }), [returned(3, ReturnReason::Recalled)]);
    assert_eq!(bench.gpu.transfers(), 1);
}

#[test]
fn a_transfer_protects_the_weights_and_is_cancelled_for_a_request_without_room() {
    let mut bench = bench();
    bench.assign(1, A);
    bench.cancel(1);
    bench.step(Event::RunCancelled { run: RunId(1) });
    assert_eq!(bench.assign(2, LARGE), [cancel_transfer(1)]);
    let actions = bench.end_transfer(1, TransferOutcome::Cancelled);
    assert_eq!(actions[..2], [unmap(A, 1), evicted(&[A])]);
    assert_eq!(actions[2..4], [load(LARGE), map(LARGE, 2, 0)]);
}

#[test]
fn the_idle_program_with_the_oldest_request_is_unloaded_at_programs_max() {
    let mut bench = Bench {
        gpu: GpuCore::new(GpuIndex(0), MemoryMap::new(Bytes::mib(64), BlockSize::DEFAULT)),
        now: Timestamp(1_000),
        hides_tokens: false,
    };
    bench.step(Event::Up { incarnation: FIRST });
    let models = PROGRAMS_MAX as u32 + 1;
    let mut unloaded = Vec::new();
    for model in (0..models).map(ModelId) {
        bench.now = Timestamp(bench.now.0 + 1_000);
        let key = u64::from(model.0) + 1;
        let weights = CHUNK;
        bench.step(Event::Install { model, memory: weights, weights });
        let actions = bench.assign(key, model);
        let unload =
            |action: &Action| if let Action::UnloadProgram { model } = action { Some(*model) } else { None };
        unloaded.extend(actions.iter().filter_map(unload));
        let generation = bench.gpu.memory().region(model).unwrap().generation();
        bench.step(Event::Arrived { model, generation, chunks: 0..1 });
        bench.end_transfer(key, TransferOutcome::Complete);
        bench.run_done(key, 100);
    }
    assert_eq!(unloaded, [ModelId(0)], "the program with the oldest last request");
}

#[test]
fn memory_beyond_the_weights_is_held_but_not_mapped() {
    let mut bench = bench();
    let model = ModelId(9);
    bench.step(Event::Install { model, memory: Bytes::mib(20), weights: Bytes::mib(5) });
    let actions = bench.assign(1, model);
    let blocks = vec![BlockRun { start: 0, len: 3 }];
    assert_eq!(actions[1], Action::Map { model, generation: Generation(1), blocks });
    assert_eq!(bench.gpu.memory().used_blocks(), 10);
    bench.step(Event::Arrived { model, generation: Generation(1), chunks: 0..3 });
    assert_eq!(bench.gpu.loaded(model), Bytes::mib(5));
}

#[test]
fn a_model_that_fits_no_free_run_waits_or_evicts() {
    let block = BlockSize::DEFAULT;
    let memory = MemoryMap::with(block.bytes(30), block, BlockPlacement::Contiguous);
    let mut bench =
        Bench { gpu: GpuCore::new(GpuIndex(0), memory), now: Timestamp(1_000), hides_tokens: false };
    bench.step(Event::Up { incarnation: FIRST });
    let sizes = [10, 10, 15].map(|blocks| block.bytes(blocks));
    for (model, memory) in [A, B, C].into_iter().zip(sizes) {
        bench.step(Event::Install { model, memory, weights: memory });
    }
    let mapped = |actions: &[Action]| actions.iter().any(|action| matches!(action, Action::Map { .. }));
    assert!(mapped(&bench.assign(1, A)));
    assert!(mapped(&bench.assign(2, B)));
    bench.run_done(1, 100);
    bench.end_transfer(1, TransferOutcome::Complete);
    // The 10 blocks behind B and the 10 blocks of A before B are not 15 blocks in a row.
    assert!(!mapped(&bench.assign(3, C)), "B is in use, between two runs of 10 blocks");
    bench.run_done(2, 100);
    let actions = bench.end_transfer(2, TransferOutcome::Complete);
    assert!(mapped(&actions), "{actions:?}");
    assert_eq!(bench.gpu.memory().region(C).unwrap().runs().len(), 1);
}
