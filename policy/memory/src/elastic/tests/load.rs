//! Allocated memory during and after a load.

use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::BlockSize;

const B: FunctionIndex = FunctionIndex(1);

#[test]
fn an_idle_pool_is_its_floor_from_the_first_moment() {
    let mut bench = StoreDriver::new(Config::default());
    assert_eq!(bench.store.next_wake(), Some(Timestamp::ZERO));
    let floor = StoreExtent { at: 0, len: Bytes::mib(300) };
    assert_eq!(bench.tell_all(Event::Tick), [Action::Allocate { extents: vec![floor] }]);
    assert_eq!(bench.store.next_wake(), None);
    assert_eq!(bench.tell_all(Event::Tick), []);
}

#[test]
fn the_floor_gives_way_to_models_alone() {
    let mut bench = StoreDriver::new(Config::default());
    bench.tell(Event::Tick);
    let above = StoreExtent { at: 100 << 20, len: Bytes::mib(200) };
    let limit = Bytes((100 << 20) + 1);
    assert_eq!(bench.tell_all(Event::Limit { limit }), [Action::Release { extents: vec![above] }]);
    let limit = Bytes::gib(9);
    assert_eq!(bench.tell_all(Event::Limit { limit }), [Action::Allocate { extents: vec![above] }]);
    assert_eq!(bench.store.limit(), STORE_CAP);
}

/// Each period, a request stores objects, which are read a quarter of a period later.
#[derive(Debug, Clone, Copy)]
struct Load {
    period: Duration,
    objects: u64,
    size: Bytes,
}

/// A load whose reservation is above the floor.
const STEADY: Load = Load { period: Duration::from_secs(1), objects: 5, size: Bytes::mib(100) };

impl Load {
    /// Runs the load, and ends a period after the last request.
    fn run(self, bench: &mut StoreDriver, requests: u64) {
        for _ in 0..requests {
            let came = bench.now;
            bench.tell(Event::Requested { function: A });
            let first = bench.stored;
            bench.stored += self.objects;
            (first..first + self.objects).for_each(|object| bench.put(object, self.size, Queued(object)));
            bench.tell(Event::Executed { function: A });
            bench.now = came + self.period / 4;
            for object in first..first + self.objects {
                bench.consumer_moved(object, Claimed);
                bench.consumed(object);
            }
            bench.tell(Event::Executed { function: B });
            bench.now = came + self.period;
            bench.tell(Event::Tick);
        }
    }
}

/// Checks D25 for a load that fits the store.
fn check_steady(load: Load) {
    let mut bench = StoreDriver::new(Config::default());
    load.run(&mut bench, 3);
    let warm = bench.store.pool().calls();
    load.run(&mut bench, 100);
    assert_eq!(bench.store.pool().calls(), warm, "no native calls");
    let objects = Bytes(BlockSize::DEFAULT.round_up(load.size).0 * load.objects);
    assert_eq!((bench.store.pool().size(), bench.store.objects()), (objects.max(POOL_FLOOR), 0));
    let window = bench.store.demands.of(A).unwrap().window();
    assert_eq!(window, Some(load.period));
    let wake = bench.now + Duration::from_nanos(1);
    assert_eq!(bench.store.next_wake(), Some(wake), "the window's end is inside");
    bench.now = wake;
    bench.tell(Event::Tick);
    assert_eq!((bench.store.pool().size(), bench.store.next_wake()), (POOL_FLOOR, None));
    let releases = u64::from(objects > POOL_FLOOR);
    assert_eq!(bench.store.pool().calls().releases, warm.releases + releases);
}

#[test]
fn a_steady_load_allocates_nothing_and_frees_its_memory_when_it_stops() {
    check_steady(STEADY);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_steady_load_allocates_nothing_and_frees_its_memory(millis in 4..3_600_000u64, objects in 1..=8u64, size in 1..(100u64 << 20)) {
        check_steady(Load { period: Duration::from_millis(millis), objects, size: Bytes(size) });
    }
}

/// H22, H23: the cost of the same load in each pool once warm, and the memory kept after the load.
#[test]
fn other_pools_allocate_or_keep_more() {
    let after = |pool: PoolPolicy| {
        let mut bench = StoreDriver::new(Config { pool, ..Config::default() });
        STEADY.run(&mut bench, 3);
        let warm = bench.store.pool().calls();
        STEADY.run(&mut bench, 100);
        let calls = bench.store.pool().calls();
        bench.now = bench.now + Duration::from_secs(30);
        bench.tell(Event::Tick);
        (calls.allocations - warm.allocations, calls.ipc - warm.ipc, bench.store.pool().size())
    };
    assert_eq!(after(PoolPolicy::Elastic), (0, 0, Bytes::mib(300)));
    assert_eq!(after(PoolPolicy::Caching { reclaim_every: None }), (0, 0, Bytes::mib(500)));
    let minute = Some(Duration::from_secs(60));
    let reclaimed = after(PoolPolicy::Caching { reclaim_every: minute });
    assert_eq!(reclaimed, (5, 0, Bytes::ZERO), "all memory is allocated again after each reclamation");
    assert_eq!(after(PoolPolicy::GmLake), (0, 100 * 500, Bytes::mib(500)));
    assert_eq!(after(PoolPolicy::Unpooled), (500, 0, Bytes::ZERO));
}
