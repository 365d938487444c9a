//! Tests of models that have a process each (L05, L06), and of the end of a process.

use super::*;

/// Returns a bench on which A is loaded and runs, B is loaded and queued behind A, and C is
/// resident.
fn three(isolation: ExecutorIsolation) -> Bench {
    let mut bench = bench();
    bench.gpu = bench.gpu.with_isolation(isolation);
    for (key, model) in [(1, C), (2, A), (3, B)] {
        bench.assign(key, model);
        bench.step(Event::ProgramLoaded { model });
        bench.arrive(model, key, key);
        if model == C {
            bench.run_done(1, 500);
        }
    }
    bench
}

fn lost(model: ModelId) -> Event {
    Event::ProgramLost { model }
}

fn unload(model: ModelId) -> Action {
    Action::UnloadProgram { model }
}

fn died(key: u64, progress: AttemptProgress) -> Action {
    returned(key, ReturnReason::Died(progress))
}

impl Bench {
    fn starts(&mut self, key: u64, model: ModelId) -> bool {
        self.assign(key, model).contains(&load(model))
    }

    /// Loads and runs a model, and kills its process in the run.
    fn dies(&mut self, key: u64, model: ModelId) {
        assert!(self.starts(key, model));
        let region = self.gpu.memory().region(model).unwrap();
        let generation = region.generation();
        self.step(Event::Arrived { model, generation, chunks: 0..CHUNKS[model.0 as usize] });
        self.end_transfer(self.gpu.last_transfer.0, TransferOutcome::Complete);
        assert_eq!(self.step(lost(model)), [evicted(&[model]), died(key, AttemptProgress::Begun)]);
    }
}

#[test]
fn the_death_of_a_process_affects_a_single_model() {
    let mut bench = three(ExecutorIsolation::Model);
    assert_eq!(bench.step(lost(A)), [evicted(&[A]), died(2, AttemptProgress::Begun)]);
    assert_eq!(bench.gpu.memory().regions().map(|(model, _)| model).collect::<Vec<_>>(), [B, C]);
    assert_eq!((bench.gpu.health(), bench.gpu.totals().restarts), (ExecutorHealth::Up, 0));
    assert_eq!(bench.run_done(2, 500), [], "the report of the dead process");
    assert_eq!(bench.run_done(3, 500).last(), Some(&ended(3, Some(500))), "the other process continues");
    assert_eq!(bench.assign(4, C), [run(4, 4, C, 1)], "the idle process continues as well");
    let again = bench.assign(5, A);
    let whole = [load(A), map(A, 4, 10), run(5, 5, A, 4), transfer(4, A, 4, 0..10)];
    assert_eq!(again, whole, "all of the model is loaded again");
}

#[test]
fn a_request_queued_behind_another_process_is_reported_as_waiting() {
    let mut bench = three(ExecutorIsolation::Model);
    assert_eq!(bench.step(lost(B)), [evicted(&[B]), died(3, AttemptProgress::Waiting)]);
    assert_eq!(bench.gpu.running().collect::<Vec<_>>(), [RequestKey(2)]);
}

#[test]
fn a_request_without_weights_is_reported_as_starting_and_the_transfer_is_cancelled() {
    let mut bench = bench();
    bench.gpu = bench.gpu.with_isolation(ExecutorIsolation::Model);
    bench.assign(1, A);
    bench.step(Event::ProgramLoaded { model: A });
    let gone = [cancel_transfer(1), evicted(&[A]), died(1, AttemptProgress::Starting)];
    assert_eq!(bench.step(lost(A)), gone);
    assert_eq!(bench.step(lost(A)), [], "the loss is already known");
    assert_eq!(bench.end_transfer(1, TransferOutcome::Cancelled), []);
    assert_eq!((bench.gpu.memory().used_blocks(), bench.gpu.transfers()), (0, 0));
}

#[test]
fn a_cancelled_request_ends_with_the_process() {
    let mut bench = three(ExecutorIsolation::Model);
    bench.cancel(2);
    assert_eq!(bench.step(lost(A)), [evicted(&[A]), ended(2, None)]);
}

#[test]
fn the_process_of_a_hung_cancelled_run_is_ended() {
    let mut bench = three(ExecutorIsolation::Model);
    bench.cancel(2);
    bench.now = bench.gpu.next_wake().unwrap();
    assert_eq!(bench.step(Event::Tick), [Action::EndProgram { model: A }]);
    assert_eq!(bench.step(Event::Tick), [], "once");
    assert_eq!(bench.step(lost(A)), [evicted(&[A]), ended(2, None)]);
    assert_eq!(bench.gpu.next_wake(), None);
}

#[test]
fn blocks_of_a_dead_process_stay_until_no_gpu_copies_the_blocks() {
    let mut bench = three(ExecutorIsolation::Model);
    let transfer_of = |transfer| Event::Lock { transfer: TransferId(transfer), model: C };
    bench.step(transfer_of(70));
    bench.step(transfer_of(71));
    let lock_lost = |transfer| Action::LockLost { transfer: TransferId(transfer) };
    assert_eq!(bench.step(lost(C)), [lock_lost(70), lock_lost(71), evicted(&[C])]);
    assert_eq!(bench.step(transfer_of(72)), [Action::NotLocked { transfer: TransferId(72) }]);
    assert_eq!(bench.gpu.memory().used_blocks(), 30, "the blocks are not reused");
    assert_eq!(bench.assign(4, C), [], "the model itself cannot have the blocks either");
    assert_eq!(bench.step(Event::Unlock { transfer: TransferId(70) }), []);
    let again = bench.step(Event::Unlock { transfer: TransferId(71) });
    assert_eq!(again, [load(C), map(C, 4, 0), run(4, 4, C, 4), transfer(4, C, 4, 0..10)]);
}

#[test]
fn a_model_with_a_dying_process_backs_off_and_other_requests_go_first() {
    let mut bench = three(ExecutorIsolation::Model);
    bench.run_done(2, 500);
    bench.run_done(3, 500);
    bench.step(lost(A));
    bench.dies(10, A);
    assert_eq!(bench.assign(11, A), [], "not at once again");
    let until = bench.gpu.next_wake().unwrap();
    assert!(until > bench.now);
    let ran = bench.assign(12, B);
    assert_eq!(ran[..1], [run(5, 12, B, 3)], "another goes first");
    assert_eq!(bench.gpu.running().collect::<Vec<_>>(), [RequestKey(12)]);
    bench.now = until;
    assert_eq!(bench.step(Event::Tick)[..1], [load(A)]);
    assert_eq!(bench.gpu.next_wake(), None);
}

#[test]
fn failed_process_starts_back_off() {
    let mut bench = bench();
    bench.gpu = bench.gpu.with_isolation(ExecutorIsolation::Model);
    for (key, tried) in [(1, true), (2, true), (3, false)] {
        assert_eq!(bench.starts(key, A), tried, "{key}");
        bench.step(Event::ProgramFailed { model: A });
        bench.end_transfer(key, TransferOutcome::Cancelled);
    }
}

#[test]
fn an_evicted_model_loses_the_process_only_with_resident_isolation() {
    let evicting = |isolation| {
        let mut bench = three(isolation);
        bench.run_done(2, 500);
        bench.run_done(3, 500);
        bench.assign(4, LARGE)
    };
    let gone = evicted(&[A, B, C]);
    let size = 28;
    let map = Action::Map {
        model: LARGE,
        generation: Generation(4),
        blocks: vec![BlockRun { start: 0, len: size }],
    };
    let unmaps = [unmap(A, 2), unmap(B, 3), unmap(C, 1)];
    let [a, b, c] = unmaps.clone();
    assert_eq!(
        evicting(ExecutorIsolation::Model)[..6],
        [&unmaps[..], &[gone.clone(), load(LARGE), map.clone()]].concat()
    );
    let resident = evicting(ExecutorIsolation::Resident);
    assert_eq!(resident[..9], [a, unload(A), b, unload(B), c, unload(C), gone, load(LARGE), map]);
}

#[test]
fn the_process_with_the_oldest_request_is_ended_at_processes_max() {
    let mut bench = bench();
    let blocks = 1 + PROCESSES_MAX as u64;
    bench.gpu = GpuCore::new(GpuIndex(0), MemoryMap::new(Bytes(CHUNK.0 * blocks), BlockSize::DEFAULT))
        .with_isolation(ExecutorIsolation::Model);
    let small = |number: u64| ModelId(100 + number as u32);
    for model in (0..blocks).map(small) {
        bench.step(Event::Install { model, memory: CHUNK, weights: CHUNK });
    }
    bench.step(Event::Up { incarnation: FIRST });
    for number in 0..PROCESSES_MAX as u64 {
        bench.now = Timestamp(bench.now.0 + 1_000);
        assert!(bench.starts(number, small(number)));
        bench.step(Event::Arrived { model: small(number), generation: Generation(number + 1), chunks: 0..1 });
        bench.end_transfer(number + 1, TransferOutcome::Complete);
        bench.run_done(number + 1, 500);
    }
    let one_more = bench.assign(1_000, small(blocks - 1));
    let first = small(0);
    assert_eq!(one_more[..4], [unmap(first, 1), evicted(&[first]), unload(first), load(small(blocks - 1))]);
}
