//! Names, entries and notes, and every path of a lookup with what it costs.

use std::collections::BTreeSet;

use millrace_types::GpuIndex;

use super::*;

mod cluster;

fn node(number: u64) -> NodeName {
    NodeName::new(&format!("n{number}")).unwrap()
}

fn index(number: u64) -> Index {
    Index::new(node(number), Epoch(1))
}

const ENTRY: Entry = Entry { place: Place::Gpu(GpuIndex(3)), bytes: Bytes(7) };

/// A name that a node gave, of something it does not hold.
fn id_of(home: u64) -> DataId {
    DataId { home: node(home), epoch: Epoch(1), counter: 5 }
}

#[test]
fn names_are_never_given_twice() {
    let registrations = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2)];
    let mut given = BTreeSet::new();
    for (number, epoch) in registrations {
        let mut index = Index::new(node(number), Epoch(epoch));
        given.extend((0..200_000).map(|_| index.unique_id()));
    }
    assert_eq!(given.len(), 1_000_000);
}

#[test]
fn an_object_is_where_it_was_stored_until_it_moves_or_is_dropped() {
    let mut index = index(1);
    let own = index.unique_id();
    let earlier = DataId { epoch: Epoch(0), ..own.clone() };
    for id in [own, id_of(2), earlier] {
        assert_eq!(index.lookup(&id), None);
        assert_eq!(index.store(&id, ENTRY), Ok(()));
        assert_eq!((index.lookup(&id), index.len()), (Some(ENTRY), 1));
        assert_eq!(index.store(&id, ENTRY), Err(Error::Stored(id.clone())));
        assert_eq!(index.moved(&id, Destination::Here(Place::Host)), Ok(Tell::Nobody));
        let in_host = Entry { place: Place::Host, ..ENTRY };
        assert_eq!(index.drop(&id), Some(in_host));
        assert_eq!((index.lookup(&id), index.drop(&id), index.is_empty()), (None, None, true));
        assert_eq!(index.moved(&id, Destination::Here(Place::Host)), Err(Error::NotHere(id.clone())));
        assert_eq!(index.moved(&id, Destination::Node(node(2))), Err(Error::NotHere(id)));
    }
    assert!(index.foreign.is_empty(), "homes of nothing are forgotten");
}

#[test]
fn takes_no_name_that_it_never_gave() {
    let mut index = index(1);
    let id = id_of(1);
    assert_eq!(index.store(&id, ENTRY), Err(Error::NeverGiven(id.clone())));
    assert_eq!(index.note(&id, node(2)), Err(Error::NotHome(id)));
    assert_eq!(index.note(&id_of(2), node(2)), Err(Error::NotHome(id_of(2))));
}

#[test]
fn a_home_says_where_its_objects_went() {
    let mut home = index(1);
    let id = home.unique_id();
    assert_eq!(home.answer(&id), HomeAnswer::UnknownSince(Epoch(1)));
    home.store(&id, ENTRY).unwrap();
    assert_eq!(home.answer(&id), HomeAnswer::Held);
    assert_eq!(home.moved(&id, Destination::Node(node(2))), Ok(Tell::Nobody));
    assert_eq!(home.answer(&id), HomeAnswer::Moved { to: node(2) });
    // From there it goes on: its holder says so.
    let mut holder = index(2);
    holder.store(&id, ENTRY).unwrap();
    assert_eq!(holder.moved(&id, Destination::Node(node(3))), Ok(Tell::Home(node(1))));
    assert_eq!(home.note(&id, node(3)), Ok(None));
    assert_eq!(home.answer(&id), HomeAnswer::Moved { to: node(3) });
    // And comes back: older news is refused, and the note is gone with the object.
    home.store(&id, ENTRY).unwrap();
    assert_eq!(home.note(&id, node(2)), Err(Error::Stored(id.clone())));
    home.drop(&id);
    assert_eq!(home.answer(&id), HomeAnswer::UnknownSince(Epoch(1)));
    assert_eq!(home.note(&id, node(2)), Ok(None));
    home.drop(&id);
    assert_eq!(home.answer(&id), HomeAnswer::UnknownSince(Epoch(1)));
    assert!(home.notes.is_empty() && home.turns.is_empty());
    // A later registration of the node knows nothing of the earlier one's.
    let again = Index::new(node(1), Epoch(4));
    assert_eq!(again.answer(&id), HomeAnswer::UnknownSince(Epoch(4)));
}

#[test]
fn the_oldest_notes_are_handed_to_tier_2() {
    let mut home = index(1);
    let mut ids = Vec::new();
    for _ in 0..NOTES_MAX {
        let id = home.unique_id();
        home.store(&id, ENTRY).unwrap();
        assert_eq!(home.moved(&id, Destination::Node(node(2))), Ok(Tell::Nobody));
        ids.push(id);
    }
    // The first is told of again, so that the second is the oldest.
    assert_eq!(home.note(&ids[0], node(3)), Ok(None));
    let id = home.unique_id();
    home.store(&id, ENTRY).unwrap();
    let oldest = Forward { id: ids[1].clone(), to: node(2) };
    assert_eq!(home.moved(&id, Destination::Node(node(2))), Ok(Tell::Tier2(oldest)));
    assert_eq!(home.answer(&ids[1]), HomeAnswer::UnknownSince(Epoch(1)));
    assert_eq!(home.answer(&ids[0]), HomeAnswer::Moved { to: node(3) });
    assert_eq!((home.notes.len(), home.turns.len()), (NOTES_MAX, NOTES_MAX));
}

#[test]
fn chooses_exactly_one_method() {
    let (here, there) = (node(1), node(2));
    let gpu = |index| Place::Gpu(GpuIndex(index));
    let places = [Place::Host, gpu(0), gpu(1)];
    let expected = [
        [Method::SharedHost, Method::HostGpu, Method::HostGpu],
        [Method::HostGpu, Method::IntraGpu, Method::InterGpu],
        [Method::HostGpu, Method::InterGpu, Method::IntraGpu],
    ];
    for (data, expected) in places.into_iter().zip(expected) {
        for (requester, expected) in places.into_iter().zip(expected) {
            let requester = Location { node: &here, place: requester };
            assert_eq!(method(Location { node: &here, place: data }, requester), expected);
            assert_eq!(method(Location { node: &there, place: data }, requester), Method::InterNode);
        }
    }
    assert_eq!(Method::IntraGpu.to_string(), "intra-gpu");
}

#[test]
fn lookup_orders_have_names() {
    let names = [LookupOrder::HomeFirst, LookupOrder::Paper].map(|order| order.to_string());
    assert_eq!(names, ["home-first", "paper"]);
}

/// Looks from node 9 for what node 1 made, and compares every step after the answer before it, and
/// what it cost: calls of the home, of tier 2, of other holders.
fn check(order: LookupOrder, first: Step, then: &[(Answer, Step)], calls: [u32; 3]) {
    let (mut lookup, step) = Lookup::begin(order, &index(9), id_of(1));
    assert_eq!(step, first);
    for (answer, expected) in then {
        assert_eq!(lookup.on(answer.clone()), *expected, "after {answer:?} of {then:?}");
    }
    let [home, tier2, holders] = calls;
    assert_eq!(lookup.calls(), Calls { home, tier2, holders });
    assert_eq!(lookup.calls().total(), calls.iter().sum::<u32>());
}

const HELD: Answer = Answer::Home(HomeAnswer::Held);
const UNKNOWN: Answer = Answer::Home(HomeAnswer::UnknownSince(Epoch(8)));
const GONE: Step = Step::Gone { since: Epoch(8) };

fn moved(to: u64) -> Answer {
    Answer::Home(HomeAnswer::Moved { to: node(to) })
}

fn tier2(holders: &[u64]) -> Answer {
    Answer::Tier2(holders.iter().copied().map(node).collect())
}

fn fetch(from: u64) -> Step {
    Step::Fetch(node(from))
}

#[test]
fn home_first_asks_nobody_for_what_is_here_and_the_home_alone_for_what_stayed() {
    let mut here = index(9);
    let id = id_of(1);
    here.store(&id, ENTRY).unwrap();
    for (_, order) in LOOKUP_ORDERS {
        let (lookup, step) = Lookup::begin(order, &here, id.clone());
        assert_eq!((step, lookup.calls().total()), (Step::Here(ENTRY), 0));
    }
    let ask = || Step::AskHome(node(1));
    check(LookupOrder::HomeFirst, ask(), &[(HELD, fetch(1))], [1, 0, 0]);
    check(LookupOrder::HomeFirst, ask(), &[(moved(2), fetch(2))], [1, 0, 1]);
}

#[test]
fn home_first_asks_tier_2_for_what_its_home_does_not_know() {
    let check = |then: &[_], calls| check(LookupOrder::HomeFirst, Step::AskHome(node(1)), then, calls);
    check(&[(UNKNOWN, Step::AskTier2), (tier2(&[4]), fetch(4))], [1, 1, 1]);
    check(&[(UNKNOWN, Step::AskTier2), (tier2(&[]), GONE)], [1, 1, 0]);
    // Tier 2 has not heard yet that the home registered again: it is not asked for what it forgot.
    check(&[(UNKNOWN, Step::AskTier2), (tier2(&[1, 4]), fetch(4))], [1, 1, 1]);
    let unreachable = || (Answer::HomeUnreachable, Step::AskTier2);
    check(&[unreachable(), (tier2(&[4]), fetch(4))], [1, 1, 1]);
    check(&[unreachable(), (tier2(&[]), Step::Lost)], [1, 1, 0]);
    // Notes that are out of date: whoever it names does not hold it, or is who asks.
    let stale = || (Answer::NotFetched, Step::AskTier2);
    check(&[(moved(2), fetch(2)), stale(), (tier2(&[2, 4]), fetch(4))], [1, 1, 2]);
    check(&[(moved(9), Step::AskTier2), (tier2(&[9, 4]), fetch(4))], [1, 1, 1]);
    check(&[(HELD, fetch(1)), stale(), (tier2(&[]), Step::Lost)], [1, 1, 0]);
}

#[test]
fn what_tier_2_names_wrongly_twice_is_lost() {
    let stale = || (Answer::NotFetched, Step::AskTier2);
    let lost = || (Answer::NotFetched, Step::Lost);
    // The longest there is.
    let steps =
        [(moved(2), fetch(2)), stale(), (tier2(&[3]), fetch(3)), stale(), (tier2(&[4]), fetch(4)), lost()];
    assert_eq!(steps.len() + 1, STEPS_MAX as usize);
    check(LookupOrder::HomeFirst, Step::AskHome(node(1)), &steps, [1, 2, 3]);
    // A node that did not hold it is not asked again.
    let steps = [(moved(2), fetch(2)), stale(), (tier2(&[2]), Step::AskTier2), (tier2(&[2]), Step::Lost)];
    check(LookupOrder::HomeFirst, Step::AskHome(node(1)), &steps, [1, 2, 1]);
    // What came home meanwhile is not lost.
    let ask = || (tier2(&[3]), Step::AskHome(node(1)));
    let paper = [(tier2(&[3]), fetch(3)), stale(), ask()];
    let then = |last: &[_]| [&paper, last].concat();
    check(LookupOrder::Paper, Step::AskTier2, &then(&[(HELD, fetch(1)), lost()]), [1, 2, 1]);
    check(LookupOrder::Paper, Step::AskTier2, &then(&[(UNKNOWN, Step::Lost)]), [1, 2, 1]);
}

#[test]
fn paper_asks_tier_2_and_the_home_only_for_what_tier_2_has_not_heard_of() {
    let check = |then: &[_], calls| check(LookupOrder::Paper, Step::AskTier2, then, calls);
    check(&[(tier2(&[1]), fetch(1))], [0, 1, 1]);
    let ask = || (tier2(&[]), Step::AskHome(node(1)));
    check(&[ask(), (HELD, fetch(1))], [1, 1, 0]);
    check(&[ask(), (UNKNOWN, Step::AskTier2), (tier2(&[]), GONE)], [1, 2, 0]);
    let stale = || (Answer::NotFetched, Step::AskTier2);
    check(&[(tier2(&[2]), fetch(2)), stale(), ask(), (moved(3), fetch(3))], [1, 2, 2]);
}

#[test]
fn what_is_not_here_is_looked_for_without_a_table() {
    let (mut lookup, step) =
        Lookup::elsewhere(LookupOrder::HomeFirst, &node(9), HomeAnswer::UnknownSince(Epoch(1)), id_of(1));
    assert_eq!((step, lookup.on(HELD)), (Step::AskHome(node(1)), fetch(1)));
    assert_eq!(lookup.calls(), Calls { home: 1, ..Calls::default() });
    // Its own, gone from here: nobody is asked what it knows itself.
    let own = HomeAnswer::UnknownSince(Epoch(1));
    let (mut lookup, step) = Lookup::elsewhere(LookupOrder::HomeFirst, &node(1), own, id_of(1));
    assert_eq!((step, lookup.on(tier2(&[4]))), (Step::AskTier2, fetch(4)));
    assert_eq!(lookup.calls(), Calls { tier2: 1, holders: 1, ..Calls::default() });
}

#[test]
fn a_node_knows_without_asking_where_its_own_went() {
    let mut home = index(1);
    let (moved, gone) = (home.unique_id(), home.unique_id());
    home.store(&moved, ENTRY).unwrap();
    home.moved(&moved, Destination::Node(node(2))).unwrap();
    for (_, order) in LOOKUP_ORDERS {
        let (lookup, step) = Lookup::begin(order, &home, moved.clone());
        assert_eq!((step, lookup.calls()), (fetch(2), Calls { holders: 1, ..Calls::default() }));
        let (mut lookup, step) = Lookup::begin(order, &home, gone.clone());
        assert_eq!(step, Step::AskTier2);
        assert_eq!(lookup.on(tier2(&[])), Step::Gone { since: Epoch(1) });
    }
}
