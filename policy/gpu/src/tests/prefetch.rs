//! Tests of models that are loaded before the requests that need them (T16).

use millrace_types::ResidencyOptions;

use super::*;

impl Bench {
    fn prefetch(&mut self, model: ModelId) -> Vec<Action> {
        self.step(Event::Prefetch { model })
    }
}

#[test]
fn a_prefetch_runs_beside_a_request_and_makes_way_for_transfers_of_requests() {
    let mut bench = Bench::running_a();
    assert_eq!(bench.prefetch(B), [load(B), map(B, 2, 10), transfer(2, B, 2, 0..10)]);
    assert_eq!(bench.prefetch(B), [], "the transfer is in flight");
    let asked = bench.assign(2, C);
    assert_eq!(asked[3..], [cancel_transfer(2), transfer(3, C, 3, 0..10)]);
    bench.step(Event::Arrived { model: B, generation: Generation(2), chunks: 0..4 });
    assert_eq!(bench.end_transfer(2, TransferOutcome::Cancelled), []);
    assert_eq!(
        bench.arrive(C, 3, 3),
        [transfer(4, B, 2, 4..10)],
        "the rest, while no request needs the link"
    );
    assert_eq!(bench.gpu.totals().swaps, 3);
}

#[test]
fn prefetched_models_are_loaded_one_after_the_other() {
    let mut bench = bench();
    assert_eq!(bench.prefetch(A), [load(A), map(A, 1, 0), transfer(1, A, 1, 0..10)]);
    assert_eq!(bench.prefetch(B), []);
    assert_eq!(bench.prefetch(C), []);
    assert_eq!(bench.arrive(A, 1, 1), [load(B), map(B, 2, 10), transfer(2, B, 2, 0..10)]);
    assert_eq!(bench.arrive(B, 2, 2), [load(C), map(C, 3, 20), transfer(3, C, 3, 0..10)]);
    assert_eq!(bench.arrive(C, 3, 3), []);
}

#[test]
fn a_prefetch_evicts_no_model_that_is_used_or_prefetched() {
    let mut bench = Bench::running_a();
    bench.prefetch(B);
    bench.arrive(B, 2, 2);
    assert_eq!(bench.prefetch(C), [load(C), map(C, 3, 20), transfer(3, C, 3, 0..10)]);
    bench.arrive(C, 3, 3);
    bench.run_done(1, 500);
    let model = ModelId(9);
    bench.step(Event::Install { model, memory: Bytes::mib(30), weights: Bytes::mib(30) });
    assert_eq!(bench.prefetch(model), [evicted(&[model])], "A alone does not make room");
    assert_eq!(bench.prefetch(HUGE), [evicted(&[HUGE])]);
    bench.assign(2, B);
    bench.run_done(2, 500);
    assert_eq!(bench.prefetch(model)[..3], [unmap(A, 1), unmap(B, 2), evicted(&[A, B])], "B was used");
}

#[test]
fn a_request_gets_the_room_of_a_prefetched_model() {
    let mut bench = bench();
    assert_eq!(bench.prefetch(A), [load(A), map(A, 1, 0), transfer(1, A, 1, 0..10)]);
    assert_eq!(bench.assign(1, LARGE), [cancel_transfer(1)]);
    let room = bench.end_transfer(1, TransferOutcome::Cancelled);
    assert_eq!(room[..4], [unmap(A, 1), evicted(&[A]), load(LARGE), map(LARGE, 2, 0)]);
}

#[test]
fn no_prefetch_starts_while_a_request_waits_for_room() {
    let mut bench = Bench::running_a();
    bench.prefetch(B);
    assert_eq!(bench.assign(2, LARGE), [cancel_transfer(2)]);
    assert_eq!(bench.end_transfer(2, TransferOutcome::Cancelled), []);
}

#[test]
fn nothing_is_prefetched_without_an_executor() {
    let mut bench = bench();
    bench.prefetch(A);
    assert_eq!(bench.step(Event::Down), [down(&[])]);
    assert_eq!(bench.prefetch(B), []);
    bench.step(Event::Up { incarnation: Incarnation(2) });
    assert_eq!(bench.gpu.transfers(), 0, "prefetches were lost with the first executor");
}

#[test]
fn a_prewarmed_model_is_evicted_like_any_other_once_loaded() {
    let mut bench = Bench::running_a();
    let prewarm = |bench: &mut Bench, model| bench.step(Event::Prewarm { model });
    assert_eq!(prewarm(&mut bench, B), [load(B), map(B, 2, 10), transfer(2, B, 2, 0..10)]);
    bench.arrive(B, 2, 2);
    bench.run_done(1, 500);
    assert_eq!(prewarm(&mut bench, B), [], "B is loaded");
    bench.now = bench.now + Duration::from_millis(1);
    bench.assign(2, A);
    bench.run_done(2, 500);
    bench.now = bench.now + Duration::from_millis(1);
    assert_eq!(prewarm(&mut bench, C), [load(C), map(C, 3, 20), transfer(3, C, 3, 0..10)]);
    bench.arrive(C, 3, 3);
    let model = ModelId(9);
    bench.step(Event::Install { model, memory: Bytes::mib(24), weights: Bytes::mib(24) });
    let room = bench.assign(3, model);
    assert_eq!(room[..2], [unmap(B, 2), evicted(&[B])], "the least recently used, and not A");
}

#[test]
fn a_pinned_model_is_evicted_for_a_prefetch_and_not_for_a_prewarm() {
    let mut bench = Bench::running_a();
    bench.run_done(1, 500);
    bench.step(Event::Residency {
        model: A,
        residency: ResidencyOptions { pin: true, ..ResidencyOptions::default() },
    });
    assert_eq!(bench.step(Event::Prewarm { model: LARGE }), [evicted(&[LARGE])]);
    assert_eq!(bench.prefetch(LARGE)[..2], [unmap(A, 1), evicted(&[A])]);
}

#[test]
fn a_prefetch_is_hastened_once_when_a_request_waits() {
    let mut bench = bench();
    bench.prefetch(A);
    assert_eq!(bench.gpu.reader_of(A), None);
    let hasten = Action::Hasten { transfer: TransferId(1), key: RequestKey(1) };
    assert_eq!(bench.assign(1, A), [run(1, 1, A, 1), hasten]);
    assert_eq!((bench.gpu.reader_of(A), bench.gpu.reader_of(B)), (Some(RequestKey(1)), None));
    let hastens = |action: &Action| matches!(action, Action::Hasten { .. });
    assert!(!bench.assign(2, A).iter().any(hastens));
}
