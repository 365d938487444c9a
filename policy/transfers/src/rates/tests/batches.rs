//! Tests of the choice of the next batch, and of batches that did not cross.

use super::*;

/// Returns the flows of the batches that are given out, in order.
fn picks(rates: &mut RateAllocator, count: usize) -> Vec<u64> {
    (0..count).map_while(|_| next_batch(rates, LinkId(0))).map(|batch| batch.flow.0).collect()
}

#[test]
fn batches_are_five_chunks_and_the_last_is_short() {
    let mut rates = faastube(&one_link());
    rates
        .begin(Timestamp::ZERO, &RatedFlow { bytes: Bytes(BATCH.0 * 2 + 7), ..best_effort(1, 1, &[0]) })
        .unwrap();
    let sizes: Vec<_> =
        std::iter::from_fn(|| next_batch(&mut rates, LinkId(0))).map(|batch| batch.bytes).collect();
    assert_eq!(sizes, [BATCH, BATCH, Bytes(7)]);
    assert_eq!(BATCH, Bytes::mib(10));
}

#[test]
fn flows_take_turns_in_proportion_to_their_rates() {
    let mut rates = faastube(&one_link());
    for (flow, megabytes) in [(1, 600), (2, 300), (3, 300)] {
        rates.begin(Timestamp::ZERO, &wanted_in(flow, megabytes, &[0], 100)).unwrap();
    }
    assert_eq!(picks(&mut rates, 8), [1, 2, 1, 3, 1, 2, 1, 3]);
}

#[test]
fn the_tightest_new_flow_is_next_and_pays_for_the_batch() {
    let mut rates = faastube(&one_link());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 900, &[0], 100)).unwrap();
    assert_eq!(picks(&mut rates, 3), [1, 1, 1]);
    // The new flow needs a sixth of the link and gets a quarter, also of the batch that was
    // crossing.
    rates.begin(Timestamp::ZERO, &wanted_in(2, 40, &[0], 20)).unwrap();
    assert_eq!(picks(&mut rates, 9), [2, 1, 1, 1, 2, 1, 1, 1, 2]);
}

#[test]
fn a_batch_that_did_not_cross_is_given_out_again() {
    let mut rates = faastube(&one_link());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 10, &[0], 10)).unwrap();
    let batch = next_batch(&mut rates, LinkId(0)).unwrap();
    assert_eq!(next_batch(&mut rates, LinkId(0)), None);
    rates.give_back(batch).unwrap();
    let again = next_batch(&mut rates, LinkId(0)).unwrap();
    assert_eq!((again.flow, again.bytes), (FlowId(1), Bytes(10 * MB)));
    rates.end(Timestamp::ZERO, FlowId(1)).unwrap();
    rates.begin(Timestamp::ZERO, &wanted_in(1, 10, &[0], 10)).unwrap();
    assert_eq!(rates.give_back(again), Err(Error::Unknown(FlowId(1))), "another flow has that name now");
}

#[test]
fn a_flow_gains_nothing_by_giving_batches_back() {
    let mut rates = faastube(&one_link());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 600, &[0], 100)).unwrap();
    for _ in 0..10 {
        let batch = next_batch(&mut rates, LinkId(0)).unwrap();
        rates.give_back(batch).unwrap();
    }
    rates.begin(Timestamp::ZERO, &wanted_in(2, 660, &[0], 110)).unwrap();
    assert_eq!(picks(&mut rates, 6), [1, 2, 1, 2, 1, 2], "the flow was new once, and owes as much as before");
}

#[test]
fn a_best_effort_flow_takes_nothing_from_a_flow_that_needs_the_whole_uplink() {
    let mut rates = faastube(&dgx_v100());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 120, &[0], 10)).unwrap();
    rates.begin(Timestamp::ZERO, &best_effort(2, 10, &[1])).unwrap();
    rates.begin(Timestamp::ZERO, &best_effort(3, 10, &[2])).unwrap();
    let mut flow = |link| next_batch(&mut rates, LinkId(link)).map(|batch| batch.flow.0);
    for _ in 0..12 {
        assert_eq!((flow(1), flow(0)), (None, Some(1)));
    }
    assert_eq!((flow(1), flow(2)), (None, Some(3)));
}

#[test]
fn flows_on_two_links_of_an_uplink_take_turns_in_proportion_to_their_rates() {
    let mut rates = faastube(&dgx_v100());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 4000, &[0], 500)).unwrap();
    rates.begin(Timestamp::ZERO, &wanted_in(2, 2000, &[1], 500)).unwrap();
    let mut flow = |link| next_batch(&mut rates, LinkId(link)).map_or(0, |batch| batch.flow.0);
    // A link that is free first waits while the other flow is behind.
    let turns: Vec<_> = (0..6).flat_map(|_| [1, 0].map(&mut flow)).collect();
    assert_eq!(turns, [2, 1, 0, 1, 2, 1, 0, 1, 2, 1, 0, 1]);
}

#[test]
fn a_flow_without_room_keeps_no_other_flow_waiting() {
    let mut rates = faastube(&dgx_v100());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 4000, &[0], 500)).unwrap();
    rates.begin(Timestamp::ZERO, &wanted_in(2, 2000, &[1], 500)).unwrap();
    let room = |_: FlowId, link: LinkId| if link == LinkId(1) { BATCH } else { Bytes::ZERO };
    for _ in 0..8 {
        assert_eq!(rates.next_rated(LinkId(1), room).unwrap().flow, FlowId(2));
    }
    assert_eq!(rates.next_rated(LinkId(0), room), None);
}

#[test]
fn a_new_flow_is_credited_for_the_crossing_batch_after_a_queued_batch_is_given_back() {
    let mut rates = faastube(&one_link());
    rates.begin(Timestamp::ZERO, &wanted_in(1, 900, &[0], 1000)).unwrap();
    let _crossing = next_batch(&mut rates, LinkId(0)).unwrap();
    let queued = next_batch(&mut rates, LinkId(0)).unwrap();
    rates.begin(Timestamp::ZERO, &wanted_in(2, 40, &[0], 20)).unwrap();
    rates.give_back(queued).unwrap();
    assert_eq!(picks(&mut rates, 4), [2, 2, 2, 2]);
}
