//! Models that move so that the rest of the memory stays together.

use super::super::consolidation::LOOK_AFTER;
use super::*;
use crate::memory::Layout;

/// A, B and C have run, each in most of a partition of 16 blocks: any two have room for the third.
fn spread() -> Bench {
    let sizes = Config { partition: Bytes::mib(32), step: Bytes::mib(32), ..Config::default() };
    let memory = MemoryMap::with(Bytes::mib(96), Layout::Partitions.of(sizes).grid().unwrap());
    let mut bench = installed(Gpu::new(GpuIndex(0), memory));
    for (place, model) in (1..).zip([A, B, C]) {
        bench.assign(place, model);
        bench.step(Event::ProgramLoaded { model });
        bench.arrive(model, place, place);
        bench.run_done(place, 5);
    }
    bench
}

fn due(mut bench: Bench) -> Bench {
    assert_eq!(bench.gpu.next_wake(), Some(bench.now + LOOK_AFTER));
    bench.now = bench.now + LOOK_AFTER;
    bench
}

fn relocate(model: ModelId, was: u64, generation: u64, blocks: &[(u32, u32)]) -> Action {
    let blocks = blocks.iter().map(|&(start, len)| BlockRun { start, len }).collect();
    Action::Relocate { model, was: Generation(was), generation: Generation(generation), blocks }
}

impl Bench {
    fn relocated(&mut self, model: ModelId, generation: u64) -> Vec<Action> {
        self.step(Event::Relocated { model, generation: Generation(generation) })
    }

    /// A moves to what B and C leave of their partitions.
    fn moving_a() -> Self {
        let mut bench = due(spread());
        assert_eq!(bench.step(Event::Tick), [relocate(A, 1, 4, &[(26, 6), (42, 4)])]);
        bench
    }
}

#[test]
fn what_is_not_in_use_moves_until_a_partition_is_free_and_nothing_more_is_due() {
    let mut bench = Bench::moving_a();
    assert_eq!(bench.gpu.memory().used_blocks(), 40, "it has both places while it is copied");
    assert_eq!(bench.relocated(A, 4), []);
    assert_eq!(bench.gpu.memory().used_blocks(), 30);
    assert_eq!(bench.gpu.memory().fragmentation().whole, 1);
    assert_eq!(bench.gpu.next_wake(), None, "it looks again when something changes");
    assert_eq!(bench.gpu.totals().moved_blocks, 10);
    assert_eq!(bench.assign(9, A), [run(4, 9, A, 4)], "it is resident as before");
}

#[test]
fn what_runs_stays_where_it_is() {
    let mut bench = spread();
    bench.assign(9, A);
    bench.now = bench.now + LOOK_AFTER;
    assert_eq!(bench.step(Event::Tick), [relocate(B, 2, 4, &[(10, 6), (42, 4)])]);
}

#[test]
fn what_another_gpu_copies_stays_where_it_is_and_what_moves_is_not_lent() {
    let mut bench = spread();
    let lock = |transfer, model| Event::Lock { transfer: TransferId(transfer), model };
    bench.step(lock(7, A));
    bench = due(bench);
    assert_eq!(bench.step(Event::Tick), [relocate(B, 2, 4, &[(10, 6), (42, 4)])]);
    let refused = Action::NotLocked { transfer: TransferId(8) };
    assert_eq!(bench.step(lock(8, B)), [refused]);
    bench.relocated(B, 4);
    let lent = bench.step(lock(9, B));
    assert!(matches!(lent[..], [Action::Locked { .. }]), "{lent:?}");
}

#[test]
fn nothing_moves_while_weights_are_on_their_way_here() {
    let mut bench = spread();
    let model = ModelId(9);
    bench.step(Event::Install { model, memory: Bytes::mib(4), weights: Bytes::mib(4) });
    bench = due(bench);
    let actions = bench.assign(9, model);
    assert!(!actions.iter().any(|action| matches!(action, Action::Relocate { .. })), "{actions:?}");
    bench.step(Event::Arrived { model, generation: Generation(4), chunks: 0..2 });
    bench.end_transfer(4, Outcome::Complete);
    bench.now = bench.gpu.next_wake().unwrap();
    let actions = bench.step(Event::Tick);
    assert!(matches!(actions[..], [Action::Relocate { .. }]), "{actions:?}");
}

#[test]
fn a_request_for_what_moves_waits_until_it_has() {
    let mut bench = Bench::moving_a();
    assert_eq!(bench.assign(9, A), []);
    assert_eq!(bench.relocated(A, 4), [run(4, 9, A, 4)]);
}

#[test]
fn room_is_never_made_of_what_moves() {
    let mut bench = Bench::moving_a();
    let asked = bench.assign(9, LARGE);
    assert!(asked.contains(&unmap(B, 2)) && asked.contains(&unmap(C, 3)), "{asked:?}");
    assert!(!asked.contains(&unmap(A, 4)), "{asked:?}");
    let mapped = asked.iter().find_map(|action| match action {
        Action::Map { blocks, .. } => Some(blocks.clone()),
        _ => None,
    });
    // Where it was, and where it goes.
    for taken in [0..10, 26..32, 42..46] {
        let free = |run: &BlockRun| run.end() <= taken.start || run.start >= taken.end;
        assert!(mapped.iter().flatten().all(free), "{taken:?} and {mapped:?}");
    }
}

#[test]
fn a_move_that_fails_costs_the_copy_and_gives_all_its_blocks_back() {
    let mut bench = Bench::moving_a();
    let failed = bench.step(Event::MapFailed { model: A, generation: Generation(4) });
    assert_eq!(failed, [evicted(&[A])]);
    assert_eq!(bench.gpu.memory().used_blocks(), 20);
    assert_eq!(bench.relocated(A, 4), [], "too late");
    let asked = bench.assign(9, A);
    assert!(asked.iter().any(|action| matches!(action, Action::Map { .. })), "{asked:?}");
}

#[test]
fn an_executor_that_never_says_it_moved_is_replaced() {
    let mut bench = Bench::moving_a();
    bench.now = bench.gpu.next_wake().unwrap();
    assert_eq!(bench.step(Event::Tick), [Action::Down { lost: vec![] }, Action::Replace]);
    assert_eq!((bench.gpu.memory().used_blocks(), bench.gpu.next_wake()), (0, None));
    bench.step(Event::Up { incarnation: Incarnation(2) });
    assert_eq!(bench.relocated(A, 4), [], "what was asked of the one before");
}

#[test]
fn a_process_that_dies_moving_its_model_takes_both_places_with_it() {
    let mut bench = due(spread());
    bench.gpu.isolation = Isolation::Model;
    assert_eq!(bench.step(Event::Tick), [relocate(A, 1, 4, &[(26, 6), (42, 4)])]);
    assert_eq!(bench.step(Event::ProgramLost { model: A }), [evicted(&[A])]);
    assert_eq!(bench.gpu.memory().used_blocks(), 20);
}
