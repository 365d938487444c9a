//! Tests of intermediate data and models in one memory.

use millrace_core::SLOTS_MAX;
use proptest::prelude::*;

use super::*;
use millrace_core::ids::FunctionIndex;
use millrace_core::ids::ObjectKey;
use millrace_memory::elastic::{self, Config, ConsumerDistance, ObjectLocation, PoolPolicy};

const ONLY: usize = 0;

/// Returns a bench with 32 blocks, of which data may have 16.
fn data_bench() -> Bench {
    let config = Config { cap: Bytes::mib(32), floor: Bytes::ZERO, ..Config::default() };
    installed(
        GpuCore::new(GpuIndex(0), MemoryMap::new(Bytes::mib(64), BlockSize::DEFAULT)).with_data(Some(config)),
    )
}

fn store(object: u64, blocks: u64) -> Event {
    let object = ObjectKey(object);
    let size = Bytes(CHUNK.0 * blocks);
    let function = FunctionIndex(0);
    let consumers = vec![ConsumerDistance::Unqueued];
    Event::Data(elastic::Event::Store { object, function, size, consumers })
}

fn filled(object: u64) -> Event {
    Event::Data(elastic::Event::Filled { object: ObjectKey(object) })
}

fn discard(object: u64) -> Event {
    Event::Data(elastic::Event::Discard { object: ObjectKey(object) })
}

fn claim(object: u64) -> Event {
    let object = ObjectKey(object);
    let distance = ConsumerDistance::Claimed;
    Event::Data(elastic::Event::ConsumerMoved { object, consumer: ONLY, distance })
}

fn blocks(actions: &[Action]) -> Option<u32> {
    actions.iter().find_map(|action| match action {
        Action::Data(ObjectAction::Place { blocks, .. }) => Some(blocks.iter().map(|run| run.len).sum()),
        _ => None,
    })
}

fn wants(actions: &[Action], wanted: ObjectAction) -> bool {
    actions.contains(&Action::Data(wanted))
}

#[test]
fn an_object_is_placed_among_models_and_its_blocks_are_free_after_it() {
    let mut bench = data_bench();
    bench.assign(1, A);
    bench.arrive(A, 1, 1);
    assert_eq!(blocks(&bench.step(store(1, 3))), Some(3));
    assert_eq!(bench.gpu.memory().used_blocks(), 13);
    bench.step(filled(1));
    assert!(wants(&bench.step(discard(1)), ObjectAction::Free { object: ObjectKey(1) }));
    assert_eq!(bench.gpu.memory().used_blocks(), 10, "the pool has no floor here");
}

#[test]
fn live_objects_evict_idle_models_and_make_way_for_running_models() {
    let mut bench = data_bench();
    for (key, model) in [(1, A), (2, B), (3, C)] {
        bench.assign(key, model);
        bench.arrive(model, key, (u64::from(model.0)) + 1);
        if model != C {
            bench.run_done(key, 10);
        }
    }
    // The models have 30 of 32 blocks, and C runs.
    let actions = bench.step(store(1, 16));
    assert_eq!(blocks(&actions), Some(16));
    let gone = Action::Evicted { models: vec![A, B] };
    assert!(actions.contains(&gone), "{actions:?}");
    assert!(bench.gpu.memory().region(C).is_some());
    // Both objects are equally far from their consumers, and this object is the newer.
    assert!(wants(&bench.step(store(2, 1)), ObjectAction::Refuse { object: ObjectKey(2) }));
}

#[test]
fn data_makes_way_for_a_model_that_a_request_waits_for() {
    let mut bench = data_bench();
    bench.step(store(1, 10));
    bench.step(filled(1));
    assert_eq!(bench.gpu.waits_for_room(), None);
    // LARGE needs 28 of 32 blocks: the object has to leave first.
    let actions = bench.assign(1, LARGE);
    assert!(wants(&actions, ObjectAction::Migrate { object: ObjectKey(1) }), "{actions:?}");
    assert_eq!(bench.gpu.waits_for_room(), Some(RequestKey(1)), "its deadline is that of the copy");
    assert!(!actions.iter().any(|action| matches!(action, Action::Map { .. })));
    let actions = bench.step(Event::Data(elastic::Event::Migrated { object: ObjectKey(1) }));
    // The reader of the object learns that the object has left before the model gets the blocks.
    let at = |found: fn(&Action) -> bool| actions.iter().position(found);
    let left = at(|action| matches!(action, Action::Data(ObjectAction::Left { .. })));
    let map = at(|action| matches!(action, Action::Map { model: LARGE, .. }));
    assert!(
        left.is_some() && left < map && map < at(|action| matches!(action, Action::Run { .. })),
        "{actions:?}"
    );
    assert_eq!(bench.gpu.store().unwrap().place(ObjectKey(1)), Some(ObjectLocation::Host));
    assert_eq!(bench.gpu.waits_for_room(), None);
}

#[test]
fn data_stays_if_a_waiting_model_would_not_fit_without_the_data_either() {
    let mut bench = data_bench();
    bench.assign(1, C);
    bench.step(Event::Arrived { model: C, generation: Generation(1), chunks: 0..10 });
    bench.step(store(1, 2));
    bench.step(filled(1));
    // The end of the run is reported before the last batch of its model, so C counts as in use
    // until then. C has 10 blocks and LARGE needs 28, more than the GPU has. Beside the object
    // there is room for either model.
    let mut actions = bench.run_done(1, 10);
    actions.extend(bench.assign(2, LARGE));
    assert_eq!(bench.gpu.waits_for_room(), Some(RequestKey(2)));
    actions.extend(bench.end_transfer(1, TransferOutcome::Complete));
    assert!(!wants(&actions, ObjectAction::Migrate { object: ObjectKey(1) }), "{actions:?}");
    assert!(actions.iter().any(|action| matches!(action, Action::Map { model: LARGE, .. })), "{actions:?}");
    assert_eq!(bench.gpu.store().unwrap().place(ObjectKey(1)), Some(ObjectLocation::Gpu));
}

#[test]
fn waits_for_room_returns_the_first_request_without_room() {
    let mut bench = data_bench();
    bench.step(store(1, 10));
    bench.step(filled(1));
    bench.assign(1, LARGE);
    bench.assign(2, A);
    assert_eq!(bench.gpu.waits_for_room(), Some(RequestKey(1)));
    bench.cancel(1);
    assert_eq!(bench.gpu.waits_for_room(), None, "the other has room beside the object");
}

#[test]
fn an_object_stays_until_the_claiming_run_has_read_the_object() {
    let mut bench = data_bench();
    bench.step(store(1, 10));
    bench.step(filled(1));
    bench.step(claim(1));
    let actions = bench.assign(1, LARGE);
    assert!(!wants(&actions, ObjectAction::Migrate { object: ObjectKey(1) }));
    let actions = bench.step(discard(1));
    assert!(actions.iter().any(|action| matches!(action, Action::Run { .. })), "{actions:?}");
}

#[test]
fn objects_are_declined_without_an_executor_and_with_an_executor_per_model() {
    let mut bench = data_bench();
    bench.step(Event::Down);
    assert!(wants(&bench.step(store(1, 1)), ObjectAction::Decline { object: ObjectKey(1) }));
    let gpu = GpuCore::new(GpuIndex(0), MemoryMap::new(Bytes::mib(64), BlockSize::DEFAULT))
        .with_isolation(ExecutorIsolation::Model);
    assert!(!gpu.with_data(Some(Config::default())).keeps_data());
}

#[test]
fn objects_are_lost_with_the_executor() {
    let mut bench = data_bench();
    bench.step(store(1, 4));
    bench.step(filled(1));
    bench.step(Event::Down);
    assert_eq!((bench.gpu.memory().used_blocks(), bench.gpu.store().is_none()), (0, true));
    bench.step(Event::Up { incarnation: Incarnation(2) });
    assert_eq!(bench.step(discard(1)), [], "an unknown object");
}

#[test]
fn a_lost_input_fails_a_request_that_did_not_run() {
    let mut bench = data_bench();
    bench.assign(1, A);
    bench.arrive(A, 1, 1);
    let actions = bench.run_failed(1, RunFailure::InputLost);
    let key = RequestKey(1);
    let reason = Reason::DataLost;
    assert!(actions.contains(&Action::Failed { key, reason, may_have_executed: false }), "{actions:?}");
    assert!(actions.contains(&Action::Ended { key, ran: None }));
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Store(u64, u64),
    Filled(u64),
    Migrated(u64),
    Failed(u64),
    Claim(u64),
    Discard(u64),
    Assign(u32),
    RunEnds,
    Lost,
}

fn step() -> impl Strategy<Value = Step> {
    let object = || 0..6u64;
    prop_oneof![
        3 => (object(), 1..20u64).prop_map(|(object, blocks)| Step::Store(object, blocks)),
        3 => object().prop_map(Step::Filled),
        3 => object().prop_map(Step::Migrated),
        1 => object().prop_map(Step::Failed),
        1 => object().prop_map(Step::Claim),
        2 => object().prop_map(Step::Discard),
        2 => (0..4u32).prop_map(Step::Assign),
        3 => Just(Step::RunEnds),
        1 => Just(Step::Lost),
    ]
}

proptest! {
    /// For any order of events, the map and the store agree on the blocks of data. At the end, with
    /// nothing stored and no run, data has no blocks.
    #[test]
    fn the_map_and_the_store_agree(
        steps in proptest::collection::vec(step(), 1..80),
        pool in prop_oneof![Just(PoolPolicy::Elastic), Just(PoolPolicy::GmLake), Just(PoolPolicy::Unpooled)],
        block in prop_oneof![2 => Just(2), 1 => Just(16)],
    ) {
        let block = BlockSize::new(Bytes::mib(block)).unwrap();
        let config = Config { cap: Bytes::mib(32), floor: Bytes::ZERO, pool, ..Config::default() };
        let mut bench = installed(GpuCore::new(GpuIndex(0), MemoryMap::new(Bytes::mib(64), block)).with_data(Some(config)));
        let mut incarnation = 1;
        let mut key = 0;
        let mut running = Vec::new();
        for (now, step) in steps.into_iter().enumerate() {
            bench.now = Timestamp(1_000 + now as u64);
            let data = |event| Event::Data(event);
            let actions = match step {
                Step::Store(object, blocks) => bench.step(store(object, blocks)),
                Step::Filled(object) => bench.step(filled(object)),
                Step::Migrated(object) => {
                    bench.step(data(elastic::Event::Migrated { object: ObjectKey(object) }))
                }
                Step::Failed(object) => {
                    bench.step(data(elastic::Event::CopyFailed { object: ObjectKey(object) }))
                }
                Step::Claim(object) => bench.step(claim(object)),
                Step::Discard(object) => bench.step(discard(object)),
                Step::Assign(model) if bench.gpu.requests() < SLOTS_MAX => {
                    key += 1;
                    let key = RequestKey(key);
                    let incarnation = Incarnation(incarnation);
                    let model = ModelId(model);
                    let seat = SeatIndex(0);
                    bench.step(Event::Assign { seat, key, model, incarnation, from: None, deadline: None, right: ComputeRight::Free })
                }
                Step::RunEnds => match running.pop() {
                    Some(run) => bench.run_done(run, 1),
                    None => Vec::new(),
                },
                Step::Lost => {
                    running.clear();
                    bench.step(Event::Down);
                    incarnation += 1;
                    bench.step(Event::Up { incarnation: Incarnation(incarnation) })
                }
                Step::Assign(_) => Vec::new(),
            };
            running.extend(actions.iter().filter_map(|action| match action {
                Action::Run { run, .. } => Some(run.0),
                _ => None,
            }));
            let held = bench.gpu.store().map_or(Bytes::ZERO, |store| store.pool().size());
            let memory = bench.gpu.memory();
            let regions = bench.gpu.memory().regions();
            prop_assert_eq!(block.bytes(memory.data_blocks()), held);
            let models: u32 = regions.map(|(_, region)| region.blocks()).sum();
            prop_assert_eq!(memory.used_blocks(), models + memory.data_blocks());
        }
        for object in 0..6 {
            // Copies that are in flight end.
            bench.step(discard(object));
            for event in [elastic::Event::Migrated { object: ObjectKey(object) },
                          elastic::Event::Filled { object: ObjectKey(object) },
                          elastic::Event::Reloaded { object: ObjectKey(object) }] {
                bench.step(Event::Data(event));
            }
        }
        prop_assert_eq!(bench.gpu.store().map_or(0, |store| store.objects()), 0);
        if pool == PoolPolicy::Unpooled {
            prop_assert_eq!(bench.gpu.memory().data_blocks(), 0);
        }
    }
}
