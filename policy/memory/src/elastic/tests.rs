mod load;

use super::*;
use ConsumerDistance::{Claimed, Queued, Unqueued};
use millrace_core::ids::FunctionIndex;

const A: FunctionIndex = FunctionIndex(0);
/// An object of the tests: five blocks.
const SIZE: Bytes = Bytes::mib(10);

const fn key(key: u64) -> ObjectKey {
    ObjectKey(key)
}

fn config(objects: u64) -> Config {
    let cap = Bytes(SIZE.0 * objects);
    Config { cap, floor: Bytes::ZERO, ..Config::default() }
}

/// A store, and a device that carries out every action at once, except for copies.
struct StoreDriver {
    store: ElasticStore,
    now: Timestamp,
    /// Objects that a load has stored.
    stored: u64,
}

impl StoreDriver {
    fn new(config: Config) -> Self {
        Self { store: ElasticStore::new(config).unwrap(), now: Timestamp(0), stored: 0 }
    }

    /// Returns all actions except native calls.
    fn tell(&mut self, event: Event) -> Vec<Action> {
        let mut actions = self.tell_all(event);
        actions.retain(|action| !matches!(action, Action::Allocate { .. } | Action::Release { .. }));
        actions
    }

    fn tell_all(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.store.on_event(self.now, event, &mut actions);
        actions
    }

    fn store(&mut self, object: u64, size: Bytes, distance: ConsumerDistance) -> Vec<Action> {
        let consumers = vec![distance];
        self.tell(Event::Store { object: key(object), function: A, size, consumers })
    }

    /// Stores and fills an object that finds room.
    fn put(&mut self, object: u64, size: Bytes, distance: ConsumerDistance) {
        let actions = self.store(object, size, distance);
        let extents = self.store.extents(key(object)).to_vec();
        assert_eq!(actions, [Action::Place { object: key(object), extents }]);
        assert_eq!(self.tell(Event::Filled { object: key(object) }), []);
    }

    fn consumer_moved(&mut self, object: u64, distance: ConsumerDistance) -> Vec<Action> {
        self.tell(Event::ConsumerMoved { object: key(object), consumer: 0, distance })
    }

    fn consumed(&mut self, object: u64) -> Vec<Action> {
        self.tell(Event::Consumed { object: key(object), consumer: 0 })
    }

    /// Reports a copy to the host. If the object is now on the host alone, `MigrationCompleted` must be the first
    /// action.
    fn migrated(&mut self, object: u64) -> Vec<Action> {
        let mut actions = self.tell(Event::Migrated { object: key(object) });
        if let Some(place) =
            actions.iter().position(|action| matches!(action, Action::MigrationCompleted { .. }))
        {
            assert_eq!((place, &actions[place]), (0, &Action::MigrationCompleted { object: key(object) }));
            actions.remove(place);
        }
        actions
    }

    fn limit(&mut self, objects: u64) -> Vec<Action> {
        self.tell(Event::Limit { limit: Bytes(SIZE.0 * objects) })
    }

    fn places(&self, objects: &[u64]) -> Vec<Option<ObjectLocation>> {
        objects.iter().map(|&object| self.store.place(key(object))).collect()
    }

    fn free(object: u64) -> Action {
        Action::Free { object: key(object) }
    }

    fn migrate(object: u64) -> Action {
        Action::Migrate { object: key(object) }
    }

    fn place(&self, object: u64) -> Action {
        Action::Place { object: key(object), extents: self.store.extents(key(object)).to_vec() }
    }

    fn reload(&self, object: u64) -> Action {
        Action::Reload { object: key(object), extents: self.store.extents(key(object)).to_vec() }
    }
}

/// §7.2, Fig. 10b: a1 and a2 feed b1 and b2, which are queued in this order.
#[test]
fn the_object_needed_last_leaves_first_and_returns_before_its_turn() {
    let mut bench = StoreDriver::new(config(2));
    bench.put(1, SIZE, Queued(1));
    bench.put(2, SIZE, Queued(2));
    assert_eq!(bench.limit(1), [StoreDriver::migrate(2)]);
    assert_eq!(bench.migrated(2), []);
    assert_eq!(bench.consumer_moved(1, Claimed), []);
    let consumed = bench.consumed(1);
    assert_eq!(consumed, [StoreDriver::free(1), bench.reload(2)]);
    assert_eq!(bench.tell(Event::Reloaded { object: key(2) }), []);
    assert_eq!(bench.consumer_moved(2, Claimed), []);
    assert_eq!(bench.consumed(2), [StoreDriver::free(2)]);
    assert_eq!(bench.store.counts(), ObjectCounts { migrated: 1, reloaded: 1, refused: 0, host_reads: 0 });
}

/// LRU in the case of Fig. 10b: b1 reads its input from the host, although b2 could have waited
/// instead.
#[test]
fn lru_migrates_the_oldest_object_even_if_it_is_needed_first() {
    let mut bench = StoreDriver::new(Config { migration: MigrationPolicy::Lru, ..config(2) });
    bench.put(1, SIZE, Queued(1));
    bench.put(2, SIZE, Queued(2));
    assert_eq!(bench.limit(1), [StoreDriver::migrate(1)]);
    assert_eq!(bench.migrated(1), []);
    assert_eq!(bench.consumer_moved(1, Claimed), []);
    assert_eq!(bench.consumed(1), [StoreDriver::free(1)]);
    assert_eq!(bench.consumer_moved(2, Claimed), []);
    assert_eq!(bench.consumed(2), [StoreDriver::free(2)]);
    assert_eq!(bench.store.counts(), ObjectCounts { migrated: 1, reloaded: 0, refused: 0, host_reads: 1 });
}

#[test]
fn lru_counts_a_read_as_use() {
    let mut bench = StoreDriver::new(Config { migration: MigrationPolicy::Lru, ..config(2) });
    bench.put(1, SIZE, Unqueued);
    bench.put(2, SIZE, Unqueued);
    bench.consumer_moved(1, Claimed);
    bench.consumer_moved(1, Queued(9));
    assert_eq!(bench.limit(1), [StoreDriver::migrate(2)]);
}

#[test]
fn a_newcomer_waits_while_an_object_further_back_migrates() {
    let mut bench = StoreDriver::new(config(2));
    bench.put(1, SIZE, Queued(5));
    bench.put(2, SIZE, Unqueued);
    assert_eq!(bench.store(3, SIZE, Queued(7)), [StoreDriver::migrate(2)]);
    assert_eq!(
        bench.places(&[1, 2, 3]),
        [ObjectLocation::Gpu, ObjectLocation::Migrating, ObjectLocation::Waiting].map(Some)
    );
    assert_eq!(bench.store.pool().used(), Bytes(SIZE.0 * 2), "a migrating object counts as used");
    let migrated = bench.migrated(2);
    assert_eq!(migrated, [bench.place(3)]);
}

#[test]
fn a_newcomer_that_is_furthest_back_is_refused_to_the_host() {
    let mut bench = StoreDriver::new(config(2));
    bench.put(1, SIZE, Queued(5));
    bench.put(2, SIZE, Queued(6));
    assert_eq!(bench.store(3, SIZE, Queued(7)), [Action::Refuse { object: key(3) }]);
    assert_eq!(
        bench.store(4, SIZE, Queued(6)),
        [Action::Refuse { object: key(4) }],
        "ties go to the newer object"
    );
    assert_eq!(bench.migrated(3), []);
    assert_eq!(bench.places(&[3, 4]), [ObjectLocation::Host, ObjectLocation::Refused].map(Some));
    bench.consumer_moved(1, Claimed);
    let consumed = bench.consumed(1);
    assert_eq!(consumed, [StoreDriver::free(1)], "object 3 would be the first to leave again");
    assert_eq!(bench.consumer_moved(3, Queued(2)), [bench.reload(3)], "now object 2 would");
}

#[test]
fn nothing_leaves_for_a_newcomer_that_cannot_fit() {
    let mut bench = StoreDriver::new(config(3));
    bench.put(1, SIZE, Claimed);
    bench.put(2, SIZE, Unqueued);
    let twice = Bytes(SIZE.0 * 3);
    assert_eq!(bench.store(3, twice, Queued(1)), [Action::Refuse { object: key(3) }]);
    assert_eq!(bench.places(&[1, 2]), [ObjectLocation::Gpu; 2].map(Some));
}

#[test]
fn an_object_above_the_cap_does_not_size_the_pool() {
    let mut bench = StoreDriver::new(config(3));
    bench.tell(Event::Requested { function: A });
    bench.put(1, SIZE, Claimed);
    for too_large in [Bytes(SIZE.0 * 3 + 1), Bytes(u64::MAX)] {
        assert_eq!(bench.store(2, too_large, Queued(1)), [Action::Refuse { object: key(2) }]);
        bench.tell(Event::Discard { object: key(2) });
    }
    bench.now = Timestamp(1_000_000_000);
    bench.tell(Event::Requested { function: A });
    let demand = bench.store.demands.of(A).unwrap();
    assert_eq!((demand.size(), demand.concurrency()), (Some(SIZE), Some(1)));
    assert_eq!(bench.store.demands.live(A), 1);
    assert_eq!(bench.store.target(), SIZE);
    assert_eq!(bench.store(3, Bytes(SIZE.0 * 3), Queued(1)), [Action::Refuse { object: key(3) }]);
    assert_eq!(bench.store.demands.live(A), 2, "an object as large as the cap could fit");
}

#[test]
fn waits_for_room_names_the_nearest_waiting_object() {
    let mut bench = StoreDriver::new(config(2));
    bench.put(1, SIZE, Queued(3));
    bench.put(2, SIZE, Queued(4));
    assert_eq!(bench.store.waits_for_room(), None);
    assert_eq!(bench.store(3, SIZE, Queued(2)), [StoreDriver::migrate(2)]);
    assert_eq!(bench.store.waits_for_room(), Some(key(3)));
    assert_eq!(bench.store(4, SIZE, Queued(1)), []);
    assert_eq!(bench.store.waits_for_room(), Some(key(4)), "object 4 is nearer and gets the room");
    let migrated = bench.migrated(2);
    assert_eq!(migrated, [bench.place(4), StoreDriver::migrate(1)]);
    assert_eq!(bench.store.waits_for_room(), Some(key(3)));
    let migrated = bench.migrated(1);
    assert_eq!(migrated, [bench.place(3)]);
    assert_eq!(bench.store.waits_for_room(), None);
}

#[test]
fn claimed_and_unwritten_objects_never_migrate() {
    let mut bench = StoreDriver::new(config(3));
    bench.put(1, SIZE, Claimed);
    bench.store(2, SIZE, Unqueued);
    bench.put(3, SIZE, Queued(1));
    assert_eq!(bench.limit(0), [StoreDriver::migrate(3)]);
    assert_eq!(bench.migrated(3), []);
    assert_eq!(bench.store.pool().size(), Bytes(SIZE.0 * 2), "above the limit until they are read");
    assert_eq!(bench.tell(Event::Filled { object: key(2) }), [StoreDriver::migrate(2)]);
    assert_eq!(
        bench.consumer_moved(1, Queued(4)),
        [StoreDriver::migrate(1)],
        "the consumer of object 1 returned to the queue"
    );
}

#[test]
fn an_object_ranks_by_its_first_consumer_in_the_queue() {
    let mut bench = StoreDriver::new(config(2));
    let consumers = vec![Unqueued, Queued(3)];
    bench.tell(Event::Store { object: key(1), function: A, size: SIZE, consumers });
    bench.tell(Event::Filled { object: key(1) });
    bench.put(2, SIZE, Queued(4));
    assert_eq!(bench.tell(Event::Consumed { object: key(1), consumer: 1 }), []);
    assert_eq!(bench.limit(1), [StoreDriver::migrate(1)], "the remaining consumer is not queued");
    assert_eq!(
        bench.tell(Event::Consumed { object: key(1), consumer: 1 }),
        [],
        "this consumer has read already"
    );
    assert_eq!(bench.consumed(1), [StoreDriver::free(1)]);
}

#[test]
fn an_object_claimed_during_its_migration_stays() {
    let mut bench = StoreDriver::new(config(2));
    bench.put(1, SIZE, Queued(1));
    bench.put(2, SIZE, Queued(2));
    assert_eq!(bench.limit(1), [StoreDriver::migrate(2)]);
    assert_eq!(
        bench.consumer_moved(2, Claimed),
        [StoreDriver::migrate(1)],
        "another object has to make the room"
    );
    assert_eq!(bench.migrated(2), [Action::CancelMigration { object: key(2) }]);
    assert_eq!(bench.migrated(1), []);
    assert_eq!(bench.places(&[1, 2]), [ObjectLocation::Host, ObjectLocation::Gpu].map(Some));
}

#[test]
fn an_object_stays_if_room_appears_during_its_migration() {
    let mut bench = StoreDriver::new(config(2));
    bench.put(1, SIZE, Queued(1));
    bench.put(2, SIZE, Queued(2));
    assert_eq!(bench.limit(1), [StoreDriver::migrate(2)]);
    bench.consumer_moved(1, Claimed);
    bench.consumed(1);
    assert_eq!(bench.migrated(2), [Action::CancelMigration { object: key(2) }]);
}

#[test]
fn memory_under_a_copy_is_free_when_the_copy_has_ended() {
    let mut bench = StoreDriver::new(config(2));
    bench.put(1, SIZE, Queued(1));
    bench.put(2, SIZE, Queued(2));
    bench.limit(1);
    assert_eq!(bench.consumed(2), [StoreDriver::free(2)]);
    assert_eq!(bench.places(&[2]), [Some(ObjectLocation::Ending)]);
    assert_eq!(bench.store.pool().used(), Bytes(SIZE.0 * 2));
    assert_eq!(bench.tell(Event::Discard { object: key(2) }), [], "the object is gone already");
    assert_eq!(bench.tell(Event::CopyFailed { object: key(2) }), []);
    assert_eq!((bench.store.objects(), bench.store.pool().used()), (1, SIZE));
}

#[test]
fn reloading_the_next_victim_leaves_an_eighth_of_the_limit_free() {
    let mut bench = StoreDriver::new(config(8));
    (1..=9).for_each(|object| drop(bench.store(object, SIZE, Queued(object))));
    (1..=8).for_each(|object| drop(bench.tell(Event::Filled { object: key(object) })));
    assert_eq!(bench.migrated(9), []);
    assert_eq!(bench.consumed(8), [StoreDriver::free(8)], "an eighth of the limit would not be left");
    let consumed = bench.consumed(7);
    assert_eq!(consumed, [StoreDriver::free(7), bench.reload(9)]);
}

#[test]
fn the_nearest_objects_reload_first_and_at_most_two_at_once() {
    let mut bench = StoreDriver::new(config(4));
    (1..=4).for_each(|object| bench.put(object, SIZE, Queued(object)));
    assert_eq!(bench.limit(0), [4, 3, 2, 1].map(StoreDriver::migrate), "the furthest first");
    (1..=4).for_each(|object| drop(bench.migrated(object)));
    let back = bench.limit(4);
    assert_eq!(back, [bench.reload(1), bench.reload(2)]);
    let third = bench.tell(Event::Reloaded { object: key(2) });
    assert_eq!(third, [bench.reload(3)]);
    let fourth = bench.tell(Event::Reloaded { object: key(1) });
    assert_eq!(fourth, [], "object 4 would leave first and use the margin");
}

#[test]
fn a_copy_that_failed_is_tried_again_later_and_not_for_ever() {
    let mut bench = StoreDriver::new(config(2));
    bench.put(1, SIZE, Queued(1));
    bench.put(2, SIZE, Queued(2));
    bench.limit(1);
    assert_eq!(bench.tell(Event::CopyFailed { object: key(2) }), [StoreDriver::migrate(1)]);
    bench.migrated(1);
    bench.limit(2);
    assert_eq!(bench.tell(Event::CopyFailed { object: key(1) }), [], "the reload of object 1");
    assert_eq!(bench.places(&[1, 2]), [ObjectLocation::Host, ObjectLocation::Gpu].map(Some));
    assert_eq!(bench.store.pool().used(), SIZE);
    assert_eq!(bench.consumer_moved(1, Queued(0)), []);

    for failed in 1..MOVES_FAILED_MAX {
        let at = bench.store.next_wake().unwrap();
        assert_eq!(at.since(bench.now), MOVES_AFTER * (1 << (failed - 1)));
        bench.now = at;
        let again = bench.tell(Event::Tick);
        assert_eq!(again, [bench.reload(1)]);
        assert_eq!(bench.tell(Event::CopyFailed { object: key(1) }), []);
    }
    // Object 2 may move again since the first second is over.
    assert_eq!((bench.store.next_wake(), bench.limit(0)), (None, vec![StoreDriver::migrate(2)]));
    bench.migrated(2);
    assert_eq!(bench.limit(2), [bench.reload(2)], "object 1 stays on the host for good");
}

#[test]
fn an_object_discarded_during_its_move_backoff_leaves_no_wake() {
    let mut bench = StoreDriver::new(config(1));
    bench.put(1, SIZE, Unqueued);
    bench.limit(0);
    bench.tell(Event::CopyFailed { object: key(1) });
    assert_eq!(bench.store.next_wake(), Some(bench.now + MOVES_AFTER));
    assert_eq!(bench.tell(Event::Discard { object: key(1) }), [StoreDriver::free(1)]);
    assert_eq!(bench.store.next_wake(), None);
}

/// The producer keeps an object until the copy to the store or to the host ends.
#[test]
fn an_object_that_could_not_be_written_is_refused_to_the_host() {
    let mut bench = StoreDriver::new(config(2));
    bench.store(1, SIZE, Queued(1));
    assert_eq!(bench.tell(Event::CopyFailed { object: key(1) }), [Action::Refuse { object: key(1) }]);
    assert_eq!(
        (bench.places(&[1]), bench.store.pool().used()),
        (vec![Some(ObjectLocation::Refused)], Bytes::ZERO)
    );
    let migrated = bench.migrated(1);
    assert_eq!(migrated, [bench.reload(1)], "the object is on the host like any other");
    assert_eq!(bench.store.counts().refused, 1);
}

#[test]
fn an_object_that_could_not_reach_the_host_waits_for_room_again() {
    let mut bench = StoreDriver::new(config(1));
    bench.put(1, SIZE, Claimed);
    assert_eq!(bench.store(2, SIZE, Queued(1)), [Action::Refuse { object: key(2) }]);
    assert_eq!(bench.consumed(1), [StoreDriver::free(1)]);
    let failed = bench.tell(Event::CopyFailed { object: key(2) });
    assert_eq!(failed, [bench.place(2)], "there is room by now");
}

#[test]
fn an_object_is_lost_after_all_its_copies_fail() {
    let mut bench = StoreDriver::new(config(1));
    bench.store(1, SIZE, Queued(1));
    for _ in 1..FAILURES_MAX {
        let failed = bench.tell(Event::CopyFailed { object: key(1) });
        assert!(matches!(failed[..], [Action::Refuse { .. } | Action::Place { .. }]), "{failed:?}");
    }
    assert_eq!(bench.tell(Event::CopyFailed { object: key(1) }), [Action::Lost { object: key(1) }]);
    assert_eq!((bench.store.objects(), bench.store.pool().used()), (0, Bytes::ZERO));
    assert_eq!(bench.store.demands.live(A), 0);
}

#[test]
fn an_object_with_invalid_consumers_or_a_used_key_is_declined() {
    let mut bench = StoreDriver::new(config(2));
    let declined = [Action::Decline { object: key(1) }];
    let many = vec![Unqueued; CONSUMERS_MAX + 1];
    for consumers in [vec![], many] {
        assert_eq!(bench.tell(Event::Store { object: key(1), function: A, size: SIZE, consumers }), declined);
    }
    bench.put(1, SIZE, Unqueued);
    assert_eq!(bench.store(1, SIZE, Unqueued), declined);
    assert_eq!(bench.store.demands.of(A).unwrap().concurrency(), Some(1));
}

/// The paper's reason against segments (§9.2.4): more bytes are free than requested, but no piece
/// fits.
#[test]
fn segments_force_a_migration_although_enough_bytes_are_free() {
    let pool = PoolPolicy::Caching { reclaim_every: None };
    let mut bench = StoreDriver::new(Config { pool, ..config(4) });
    (1..=8).for_each(|object| bench.put(object, Bytes::mib(5), Queued(object)));
    [2, 4, 6, 8].into_iter().for_each(|object| drop(bench.consumed(object)));
    assert_eq!((bench.store.pool().size(), bench.store.pool().used()), (Bytes::mib(40), Bytes::mib(20)));
    assert_eq!(bench.store(9, Bytes::mib(8), Queued(0)), [StoreDriver::migrate(7)]);
    let migrated = bench.migrated(7);
    assert_eq!(migrated, [bench.place(9), bench.reload(7)], "three pieces have joined; object 7 fits a gap");
    assert_eq!(bench.store(10, Bytes::mib(8), Queued(9)), [Action::Refuse { object: key(10) }]);
}
