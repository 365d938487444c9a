//! Properties that hold for every pool, every migration policy and every sequence of events: no
//! byte has two owners, no byte is lost, the pool stays within the cap, no object that is next
//! moves, and the store ends empty. The model beside the store is derived from the store's actions
//! alone.

mod world;

use std::time::Duration;

use proptest::prelude::*;

use self::world::{ModelledObject, StoreModel};
use super::*;
use crate::BlockSize;
use millrace_core::ids::FunctionIndex;

const CAP: Bytes = Bytes::mib(64);
const FLOOR: Bytes = Bytes::mib(10);

#[derive(Debug, Clone)]
enum Step {
    Store {
        function: u32,
        size: u64,
        consumers: Vec<ConsumerDistance>,
    },
    ConsumerMoved {
        object: prop::sample::Index,
        consumer: usize,
        distance: ConsumerDistance,
    },
    Consumed {
        object: prop::sample::Index,
        consumer: usize,
    },
    Discard(prop::sample::Index),
    /// A copy ends, successfully or not.
    Copied {
        object: prop::sample::Index,
        well: bool,
    },
    Request(u32),
    Executed(u32),
    Forget(u32),
    Limit(u64),
    Wait(u64),
}

fn distance() -> impl Strategy<Value = ConsumerDistance> {
    prop_oneof![
        2 => Just(ConsumerDistance::Claimed),
        5 => (0..20u64).prop_map(ConsumerDistance::Queued),
        2 => Just(ConsumerDistance::Unqueued),
    ]
}

/// Sizes below a block, of a few blocks, of most of the store, and beyond it.
fn size() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0..(3u64 << 20), 6 => (1u64 << 20)..(24 << 20), 1 => (40u64 << 20)..(70 << 20), 1 => Just(u64::MAX)]
}

fn step() -> impl Strategy<Value = Step> {
    let object = any::<prop::sample::Index>;
    let function = || 0..4u32;
    let consumers = prop::collection::vec(distance(), 1..4);
    prop_oneof![
        12 => (function(), size(), consumers)
            .prop_map(|(function, size, consumers)| Step::Store { function, size, consumers }),
        8 => (object(), 0..4usize, distance())
            .prop_map(|(object, consumer, distance)| Step::ConsumerMoved { object, consumer, distance }),
        10 => (object(), 0..4usize).prop_map(|(object, consumer)| Step::Consumed { object, consumer }),
        2 => object().prop_map(Step::Discard),
        20 => (object(), prop::bool::weighted(0.9)).prop_map(|(object, well)| Step::Copied { object, well }),
        4 => function().prop_map(Step::Request),
        4 => function().prop_map(Step::Executed),
        1 => function().prop_map(Step::Forget),
        2 => prop_oneof![1 => Just(0u64), 2 => 0..(70u64 << 20), 1 => Just(CAP.0)].prop_map(Step::Limit),
        6 => (0..3_000u64).prop_map(Step::Wait),
    ]
}

fn configs() -> impl Strategy<Value = Config> {
    let pools = prop::sample::select(POOLS.map(|(_, pool)| pool).to_vec());
    let migrations = prop::sample::select(MIGRATIONS.map(|(_, migration)| migration).to_vec());
    let blocks = prop_oneof![2 => Just(2u64), 1 => Just(16)];
    (pools, migrations, blocks).prop_map(|(pool, migration, block)| {
        let block = BlockSize::new(Bytes::mib(block)).unwrap();
        Config { cap: CAP, floor: FLOOR, pool, migration, block }
    })
}

impl StoreModel {
    fn step(&mut self, step: Step) {
        match step {
            Step::Store { function, size, consumers } => {
                let object = ObjectKey(self.stored);
                self.stored += 1;
                self.clock += 1;
                let seen = ModelledObject {
                    place: ObjectLocation::Waiting,
                    extents: vec![],
                    consumers: consumers.iter().copied().map(Some).collect(),
                    failed: 0,
                    stays_until: Timestamp(0),
                    used: self.clock,
                };
                self.seen.insert(object, seen);
                let function = FunctionIndex(function);
                self.tell(Event::Store { object, function, size: Bytes(size), consumers });
            }
            Step::ConsumerMoved { object, consumer, distance } => {
                let Some(object) = self.pick(object, |seen| seen.place != ObjectLocation::Ending) else {
                    return;
                };
                let seen = self.seen.get_mut(&object).unwrap();
                if let Some(Some(before)) = seen.consumers.get_mut(consumer) {
                    let claimed = std::mem::replace(before, distance) != distance;
                    if claimed && distance == ConsumerDistance::Claimed {
                        self.clock += 1;
                        seen.used = self.clock;
                    }
                }
                self.tell(Event::ConsumerMoved { object, consumer, distance });
            }
            Step::Consumed { object, consumer } => {
                if let Some(object) = self.pick(object, |_| true) {
                    self.tell(Event::Consumed { object, consumer });
                }
            }
            Step::Discard(object) => {
                if let Some(object) = self.pick(object, |_| true) {
                    self.tell(Event::Discard { object });
                }
            }
            Step::Copied { object, well } => {
                if let Some(object) = self.pick(object, ModelledObject::is_copied) {
                    self.copied(object, well);
                }
            }
            Step::Request(function) => self.tell(Event::Requested { function: FunctionIndex(function) }),
            Step::Executed(function) => self.tell(Event::Executed { function: FunctionIndex(function) }),
            Step::Forget(function) => self.tell(Event::Forget { function: FunctionIndex(function) }),
            Step::Limit(limit) => self.tell(Event::Limit { limit: Bytes(limit) }),
            Step::Wait(millis) => {
                self.now = self.now + Duration::from_millis(millis);
                self.tell(Event::Tick);
            }
        }
    }

    /// Ends every object and every copy.
    fn settle(&mut self) {
        self.tell(Event::Limit { limit: CAP });
        while let Some(&object) = self.seen.keys().next() {
            match self.seen[&object].is_copied() {
                true => self.copied(object, true),
                false => self.tell(Event::Discard { object }),
            }
        }
        for _ in 0..100 {
            let Some(wake) = self.store.next_wake() else { break };
            self.now = self.now.max(wake);
            self.tell(Event::Tick);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn the_store_and_the_device_agree_on_every_byte(
        config in configs(),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut world = StoreModel::new(config);
        steps.into_iter().for_each(|step| world.step(step));
        world.settle();
        let store = &world.store;
        let pool = store.pool();
        prop_assert_eq!((store.objects(), pool.used()), (0, Bytes::ZERO));
        prop_assert_eq!((store.orders.movable.len(), store.orders.waiting.len()), (0, 0));
        prop_assert_eq!((store.orders.away.len(), store.orders.reloading), (0, 0));
        prop_assert_eq!(store.orders.leaving, Bytes::ZERO);
        match world.config.pool {
            PoolPolicy::Elastic => {
                prop_assert_eq!(pool.size(), config.block.round_up(FLOOR), "never 0 (D24)");
            }
            PoolPolicy::Unpooled | PoolPolicy::Caching { reclaim_every: Some(_) } => {
                prop_assert_eq!(pool.size(), Bytes::ZERO);
            }
            PoolPolicy::Caching { reclaim_every: None } | PoolPolicy::GmLake => {}
        }
        for function in (0..4).map(FunctionIndex) {
            prop_assert_eq!(store.demands.live(function), 0);
        }
    }

    #[test]
    fn the_same_events_give_the_same_actions(
        config in configs(),
        steps in prop::collection::vec(step(), 1..80),
    ) {
        let run = || {
            let mut world = StoreModel::new(config);
            steps.iter().cloned().for_each(|step| world.step(step));
            world.done
        };
        prop_assert_eq!(run(), run());
    }
}
