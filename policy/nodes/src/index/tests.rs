//! Tests of names, room and expiry, and of every path of a lookup with its cost.

use std::collections::BTreeSet;

use super::*;

mod cluster;

/// Maximum number of steps of a lookup, the last included.
const STEPS_MAX: usize = 6;

const LIMIT: IndexCapacity = IndexCapacity { bytes: Bytes(100), files: 100, objects: 3 };

/// An object of this many bytes and files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Thing(u64, u64);

impl IndexedObject for Thing {
    fn bytes(&self) -> Bytes {
        Bytes(self.0)
    }

    fn files(&self) -> u64 {
        self.1
    }
}

fn bytes(bytes: u64) -> Thing {
    Thing(bytes, 0)
}

/// Returns the size of a copy in transit that opens no file.
fn coming(bytes: u64) -> IndexCapacity {
    IndexCapacity { bytes: Bytes(bytes), files: 0, objects: 1 }
}

fn node(number: u64) -> NodeName {
    NodeName::new(&format!("n{number}")).unwrap()
}

fn index(limit: IndexCapacity) -> DataIndex<Thing> {
    DataIndex::new(node(1), limit)
}

/// Returns the name of another node's object.
fn id(counter: u64) -> DataId {
    DataId { home: node(2), epoch: Epoch(7), counter }
}

#[test]
fn names_are_never_given_twice() {
    let registrations = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2)];
    let mut given = BTreeSet::new();
    for (number, epoch) in registrations {
        let mut index = DataIndex::new(node(number), IndexCapacity { objects: u64::MAX, ..LIMIT });
        given.extend((0..20_000).map(|_| index.put(Epoch(epoch), bytes(0), Timestamp(1)).unwrap()));
    }
    assert_eq!(given.len(), 100_000);
}

#[test]
fn an_object_is_found_under_its_own_name_until_it_is_let_go() {
    let mut index = index(LIMIT);
    let id = index.put(Epoch(2), bytes(60), Timestamp(10)).unwrap();
    assert_eq!((&id.home, id.epoch, index.get(&id)), (&node(1), Epoch(2), Some(&bytes(60))));
    for other in [
        DataId { epoch: Epoch(1), ..id.clone() },
        DataId { home: node(2), ..id.clone() },
        DataId { counter: id.counter + 1, ..id.clone() },
    ] {
        assert!(index.get(&other).is_none() && !index.remove(&other), "{other}");
    }
    assert!(index.remove(&id) && !index.remove(&id));
    assert_eq!(index.usage(), IndexUsage { kept: 1, ..IndexUsage::default() });
}

#[test]
fn a_reserved_counter_is_exclusive_and_names_one_object() {
    let mut index = index(LIMIT);
    let first = index.reserve(10);
    let other = index.put(Epoch(1), bytes(1), Timestamp(10)).unwrap();
    assert!(other.counter >= first + 10);
    let id = index.put_as(Epoch(1), first, bytes(1), Timestamp(10)).unwrap();
    let twice = index.put_as(Epoch(1), first, bytes(2), Timestamp(10));
    assert_eq!(twice, Err((InsertError::Taken, bytes(2))));
    assert!(index.keep_on(&id, Timestamp(30)));
    assert!(!index.keep_on(&DataId { epoch: Epoch(2), ..id.clone() }, Timestamp(40)));
    assert_eq!(index.expire(Timestamp(20)), [other]);
    assert_eq!(index.expire(Timestamp(30)), [id]);
}

#[test]
fn an_object_that_does_not_fit_is_returned() {
    let mut index = index(LIMIT);
    index.put(Epoch(1), bytes(60), Timestamp(10)).unwrap();
    assert_eq!(index.put(Epoch(1), bytes(41), Timestamp(10)), Err(bytes(41)));
    assert_eq!(index.usage().refused, 1);
    assert!(index.put(Epoch(1), bytes(40), Timestamp(10)).is_ok());
    assert_eq!(index.usage().bytes, Bytes(100));
    index.put(Epoch(1), bytes(0), Timestamp(10)).unwrap();
    assert!(index.put(Epoch(1), bytes(0), Timestamp(10)).is_err(), "three objects are the limit");
}

#[test]
fn objects_without_open_files_do_not_count_against_the_file_limit() {
    let mut index = index(IndexCapacity { files: 1, ..LIMIT });
    assert!(index.put_copy(&id(1), Thing(1, 1), Timestamp(10)));
    let own = index.put(Epoch(1), Thing(1, 1), Timestamp(10)).unwrap();
    assert_eq!(index.take_gone(Timestamp(0)), [id(1)], "copies give way");
    assert_eq!(index.put(Epoch(1), Thing(1, 1), Timestamp(10)), Err(Thing(1, 1)));
    assert!(!index.put_copy(&id(1), Thing(1, 1), Timestamp(10)));
    assert!(index.put(Epoch(1), bytes(1), Timestamp(10)).is_ok());
    assert!(index.put_copy(&id(2), bytes(1), Timestamp(10)));
    assert!(index.remove(&own));
    assert!(index.put(Epoch(1), Thing(1, 1), Timestamp(10)).is_ok());
}

#[test]
fn unreleased_objects_expire_in_time_and_names_are_never_reused() {
    let mut index = index(LIMIT);
    let ids = [10, 30, 20].map(|until| index.put(Epoch(1), bytes(10), Timestamp(until)).unwrap());
    assert_eq!(index.expire(Timestamp(9)), []);
    assert_eq!(index.expire(Timestamp(20)), [ids[0].clone(), ids[2].clone()]);
    let usage = IndexUsage { objects: 1, bytes: Bytes(10), kept: 3, expired: 2, ..IndexUsage::default() };
    assert_eq!(index.usage(), usage);
    assert!(index.put(Epoch(1), bytes(1), Timestamp(5)).unwrap().counter > ids[2].counter);
}

#[test]
fn copies_give_way_to_the_nodes_own_and_to_newer_ones() {
    let mut index = index(LIMIT);
    for (counter, until) in [(1, 20), (2, 10)] {
        assert!(index.set_aside(coming(40)));
        index.give_back(coming(40));
        assert!(index.put_copy(&id(counter), bytes(40), Timestamp(until)));
    }
    assert!(!index.put_copy(&id(1), bytes(10), Timestamp(20)), "the copy is present");
    let usage = index.usage();
    assert_eq!((usage.copies, usage.copied, usage.objects), (2, Bytes(80), 0));
    // The copy that expires first makes room for a third.
    assert!(index.set_aside(coming(50)));
    assert!(index.get(&id(2)).is_none() && index.get(&id(1)).is_some());
    // Room set aside for a copy in transit is not available.
    assert!(index.put(Epoch(1), bytes(60), Timestamp(30)).is_err());
    assert!(index.get(&id(1)).is_some(), "no copy is evicted in vain");
    index.give_back(coming(50));
    index.put(Epoch(1), bytes(100), Timestamp(30)).unwrap();
    assert_eq!(index.take_gone(Timestamp(0)), [id(2), id(1)]);
    assert!(!index.set_aside(coming(1)), "own objects are not evicted");
    assert_eq!(index.take_gone(Timestamp(50)), []);
}

#[test]
fn copies_in_transit_count_files_and_objects_like_present_copies() {
    let mut index = index(IndexCapacity { files: 2, ..LIMIT });
    let opens = IndexCapacity { bytes: Bytes(1), files: 1, objects: 1 };
    assert!(index.put_copy(&id(1), Thing(1, 1), Timestamp(10)));
    assert!(index.set_aside(opens) && index.set_aside(opens));
    assert_eq!(index.take_gone(Timestamp(0)), [id(1)], "the present copy is evicted");
    assert!(!index.set_aside(opens), "two files are open");
    assert!(!index.put_copy(&id(1), Thing(1, 1), Timestamp(10)));
    assert!(index.set_aside(coming(1)), "one more object");
    assert!(!index.set_aside(coming(1)), "three copies are in transit");
    assert!(index.set_aside(IndexCapacity { objects: 0, ..coming(1) }), "more of a copy in transit");
    assert_eq!(index.put(Epoch(1), bytes(1), Timestamp(10)), Err(bytes(1)));
    index.give_back(opens);
    assert!(index.put_copy(&id(1), Thing(1, 1), Timestamp(10)));
    assert_eq!((index.usage().copies, index.usage().copied), (1, Bytes(4)));
}

#[test]
fn a_copy_that_is_present_or_back_is_not_reported_as_gone() {
    let mut index = index(LIMIT);
    assert!(index.put_copy(&id(1), bytes(60), Timestamp(10)));
    assert!(!index.put_copy(&id(1), bytes(60), Timestamp(20)), "the copy is present, and stays");
    assert_eq!(index.take_gone(Timestamp(0)), []);
    assert!(index.put_copy(&id(2), bytes(60), Timestamp(30)), "the first makes room");
    assert!(index.get(&id(1)).is_none());
    assert!(index.put_copy(&id(1), bytes(60), Timestamp(40)));
    assert_eq!(index.take_gone(Timestamp(0)), [id(2)]);
}

#[test]
fn copies_expire_in_time_for_every_home() {
    let mut index = index(LIMIT);
    let other = DataId { home: node(3), ..id(1) };
    for (id, until) in [(id(1), 10), (id(2), 20), (other.clone(), 15)] {
        assert!(index.put_copy(&id, bytes(1), Timestamp(until)));
    }
    assert_eq!(index.take_gone(Timestamp(9)), []);
    assert_eq!(index.take_gone(Timestamp(15)), [id(1), other]);
    assert!(index.remove(&id(2)) && !index.remove(&id(2)));
    assert_eq!((index.take_gone(Timestamp(30)), index.usage()), (vec![], IndexUsage::default()));
    let own = index.put(Epoch(7), bytes(1), Timestamp(90)).unwrap();
    index.drop_own(&own);
    assert_eq!((index.take_gone(Timestamp(40)), index.usage().objects), (vec![own], 0));
}

#[test]
fn an_own_object_that_was_dropped_may_return_as_a_copy() {
    let mut index = index(LIMIT);
    let own = index.put(Epoch(1), bytes(1), Timestamp(10)).unwrap();
    assert!(!index.put_copy(&own, bytes(1), Timestamp(20)), "the node has the object");
    assert!(index.remove(&own) && index.put_copy(&own, bytes(1), Timestamp(20)));
    assert!(index.get(&own).is_some() && !index.keep_on(&own, Timestamp(30)));
    assert_eq!((index.expire(Timestamp(20)), index.take_gone(Timestamp(20))), (vec![], vec![own]));
}

#[test]
fn lookup_orders_parse_from_their_displayed_names() {
    for (name, order) in LOOKUP_ORDERS {
        assert_eq!((name.parse::<LookupOrder>(), order.to_string()), (Ok(order), name.to_owned()));
    }
    let refused = "home-first".parse::<LookupOrder>().unwrap_err().to_string();
    assert!(refused.contains("use one of home, paper"), "{refused}");
}

/// The result of a step that does not end the lookup.
#[derive(Debug, Clone)]
enum Answer {
    NotHeld,
    HeldBy(Vec<NodeName>),
}

use Answer::NotHeld;

fn held_by(holders: &[u64]) -> Answer {
    Answer::HeldBy(holders.iter().copied().map(node).collect())
}

fn fetch(from: u64) -> LookupAction {
    LookupAction::Fetch(node(from))
}

/// Looks from node 9 for an object of node 1. Compares every step after its answer, and the number
/// of queries to the home, to tier 2 and to other holders.
fn check(
    order: LookupOrder,
    first: &LookupAction,
    then: &[(Answer, LookupAction)],
    [home, tier2, holders]: [u64; 3],
) {
    let (mut lookup, step) = Lookup::begin(order, &node(9), &node(1));
    assert_eq!(step, *first);
    let mut calls = LookupCounts::default();
    calls.count(&step);
    for (answer, expected) in then {
        let step = match answer {
            NotHeld => lookup.not_held(),
            Answer::HeldBy(holders) => lookup.held_by(holders),
        };
        assert_eq!(step, *expected, "after {answer:?} of {then:?}");
        calls.count(&step);
    }
    assert_eq!(calls, LookupCounts { home, tier2, holders });
}

#[test]
fn home_order_asks_tier_2_only_for_objects_that_the_home_dropped() {
    let ask = LookupAction::AskHome(node(1));
    let check = |then: &[_], calls| check(LookupOrder::Home, &ask, then, calls);
    check(&[], [1, 0, 0]);
    check(&[(NotHeld, LookupAction::AskTier2), (held_by(&[4]), fetch(4))], [1, 1, 1]);
    check(&[(NotHeld, LookupAction::AskTier2), (held_by(&[]), LookupAction::Nowhere)], [1, 1, 0]);
    // Tier 2 does not know yet that the home dropped the object: the home is not asked again.
    check(&[(NotHeld, LookupAction::AskTier2), (held_by(&[1, 4]), fetch(4))], [1, 1, 1]);
    // The node that looks for the object is not asked either.
    check(&[(NotHeld, LookupAction::AskTier2), (held_by(&[9, 4]), fetch(4))], [1, 1, 1]);
}

#[test]
fn an_object_that_tier_2_locates_wrongly_twice_is_nowhere() {
    let ask = LookupAction::AskHome(node(1));
    let stale = || (NotHeld, LookupAction::AskTier2);
    // The longest possible lookup.
    let steps = [
        stale(),
        (held_by(&[3]), fetch(3)),
        stale(),
        (held_by(&[4]), fetch(4)),
        (NotHeld, LookupAction::Nowhere),
    ];
    assert_eq!(steps.len() + 1, STEPS_MAX);
    check(LookupOrder::Home, &ask, &steps, [1, 2, 2]);
    // A node that did not hold the object is not asked again.
    let steps = [stale(), (held_by(&[1]), LookupAction::AskTier2), (held_by(&[1]), LookupAction::Nowhere)];
    check(LookupOrder::Home, &ask, &steps, [1, 2, 0]);
    // An object that tier 2 does not know yet is at its home.
    let to_home = (NotHeld, LookupAction::AskHome(node(1)));
    let steps = [(held_by(&[3]), fetch(3)), stale(), (held_by(&[4]), fetch(4)), to_home];
    check(LookupOrder::Paper, &LookupAction::AskTier2, &steps, [1, 2, 2]);
    let steps = [&steps[..], &[(NotHeld, LookupAction::Nowhere)]].concat();
    assert_eq!(steps.len() + 1, STEPS_MAX);
    check(LookupOrder::Paper, &LookupAction::AskTier2, &steps, [1, 2, 2]);
}

#[test]
fn paper_order_asks_the_home_only_for_objects_unknown_to_tier_2() {
    let check = |then: &[_], calls| check(LookupOrder::Paper, &LookupAction::AskTier2, then, calls);
    check(&[(held_by(&[1]), fetch(1))], [0, 1, 1]);
    let ask = || (held_by(&[]), LookupAction::AskHome(node(1)));
    check(&[ask()], [1, 1, 0]);
    check(&[ask(), (NotHeld, LookupAction::AskTier2), (held_by(&[]), LookupAction::Nowhere)], [1, 2, 0]);
    // A home that tier 2 named wrongly has already been asked.
    let stale = (NotHeld, LookupAction::AskTier2);
    check(&[(held_by(&[1]), fetch(1)), stale, (held_by(&[]), LookupAction::Nowhere)], [0, 2, 1]);
}

#[test]
fn a_node_does_not_ask_itself_for_its_own() {
    for (_, order) in LOOKUP_ORDERS {
        let (mut lookup, step) = Lookup::begin(order, &node(1), &node(1));
        assert_eq!((step, lookup.held_by(&[node(1), node(4)])), (LookupAction::AskTier2, fetch(4)));
        let (mut lookup, _) = Lookup::begin(order, &node(1), &node(1));
        assert_eq!(lookup.held_by(&[]), LookupAction::Nowhere);
    }
}

#[test]
fn data_held_elsewhere_uses_room_until_it_is_unclaimed() {
    let mut index = index(LIMIT);
    let state = IndexCapacity { bytes: Bytes(50), files: 2, objects: 2 };
    assert!(index.put_copy(&id(1), bytes(60), Timestamp(10)));
    assert!(index.reserve_room(state), "copies give way");
    assert_eq!(index.get(&id(1)), None);
    assert!(!index.reserve_room(state), "there is room for one object, not for two");
    assert!(index.put(Epoch(1), bytes(51), Timestamp(10)).is_err());
    index.put(Epoch(1), bytes(50), Timestamp(10)).unwrap();
    index.unclaim(state);
    assert!(index.reserve_room(state));
}
