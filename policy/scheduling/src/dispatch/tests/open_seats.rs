//! Opening and closing of seats while requests wait and run.

use std::num::NonZeroU32;

use super::*;
use millrace_core::attempts::AttemptProgress::BegunBeside;

/// Returns a node of a GPU with four seats, of which this number is open.
fn four_seats(policy: PolicyConfig, open: u32) -> Node {
    let seats = NonZeroU32::new(4).unwrap();
    let one = GpuConfig { seats, ..GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000)) };
    node_of(&Config::new(vec![one], 9).with_policy(policy, 1).with_open_seats(NonZeroU32::new(open).unwrap()))
}

fn open(node: &mut Node, seats: u32) -> Vec<Action> {
    node.step(Event::SeatsOpened { seats: NonZeroU32::new(seats).unwrap() })
}

/// Returns the assigned requests, each with its seat.
fn seats_of(actions: &[Action]) -> Vec<(u64, u32)> {
    let assigned = |action: &Action| match *action {
        Action::Assign { seat, key, .. } => Some((key.0, seat.0)),
        _ => None,
    };
    actions.iter().filter_map(assigned).collect()
}

/// Enqueues these requests, and returns the assigned ones, each with its seat.
fn enqueue(node: &mut Node, keys: impl IntoIterator<Item = u64>) -> Vec<(u64, u32)> {
    keys.into_iter().flat_map(|key| seats_of(&node.enqueue(key, A))).collect()
}

/// Returns the number of the GPU's seats that an event examines.
fn active(node: &Node) -> usize {
    node.dispatch.fleet.get(gpu(0)).seats().len()
}

#[test]
fn waiting_requests_get_the_seats_that_open_at_once() {
    let late = POLICIES.iter().filter(|(_, policy)| !policy.binds_early());
    for &(name, policy) in late {
        let mut node = four_seats(policy, 1);
        let first = enqueue(&mut node, 1..=6);
        assert!(first.iter().all(|&(_, seat)| seat == 0), "{name}: {first:?}");
        let waiting = 6 - first.len();
        let opened = seats_of(&open(&mut node, 3));
        let seats: Vec<u32> = opened.iter().map(|&(_, seat)| seat).collect();
        assert!(waiting >= 2 && seats.contains(&1) && seats.contains(&2), "{name}: {opened:?}");
        assert!(!seats.contains(&3), "{name}: {opened:?}");
        glance::check_seats(&node.dispatch);
    }
}

#[test]
fn more_open_seats_than_a_gpu_has_opens_all() {
    let mut node = four_seats(PolicyConfig::Lb, 1);
    assert_eq!(enqueue(&mut node, 1..=6), [(1, 0)]);
    assert_eq!(seats_of(&open(&mut node, u32::MAX)), [(2, 1), (3, 2), (4, 3)]);
    assert_eq!(active(&node), 4);
}

#[test]
fn a_request_of_an_early_binding_policy_gets_a_seat_that_opens() {
    let (_, nonswap) = POLICIES.into_iter().find(|(name, _)| *name == "nonswap").unwrap();
    let mut node = four_seats(nonswap, 1);
    assert_eq!(enqueue(&mut node, 1..=3), [(1, 0)]);
    assert_eq!(seats_of(&open(&mut node, 2)), [(2, 1)]);
}

#[test]
fn requests_end_on_a_seat_that_closes_and_no_request_follows_them() {
    let mut node = four_seats(PolicyConfig::Fifo, 4);
    assert_eq!(enqueue(&mut node, 1..=4), [(1, 0), (2, 1), (3, 2), (4, 3)]);
    let behind = enqueue(&mut node, 5..=8);
    assert_eq!(behind, [(5, 0), (6, 1), (7, 2), (8, 3)]);
    assert_eq!(open(&mut node, 1), []);
    assert_eq!(active(&node), 4, "closed seats have requests");
    assert_eq!(enqueue(&mut node, [9]), [], "the open seat has a next request already");
    for key in [4, 8, 2, 6] {
        assert_eq!(node.ended(0, key, 5), [], "{key} leaves a closed seat");
        glance::check_seats(&node.dispatch);
    }
    assert_eq!(active(&node), 3, "the third seat still has requests");
    assert_eq!(node.seat(2).requests().count(), 2);
    node.ended(0, 3, 5);
    node.ended(0, 7, 5);
    assert_eq!(active(&node), 1, "no closed seat is examined any longer");
    assert_eq!(seats_of(&node.ended(0, 1, 5)), [(9, 0)]);
    assert_eq!((node.dispatch.queued(), node.dispatch.in_flight()), (0, 2));
}

#[test]
fn an_idle_open_seat_recalls_a_request_that_waits_on_a_closed_seat() {
    let mut node = four_seats(PolicyConfig::Fifo, 2);
    assert_eq!(enqueue(&mut node, 1..=4), [(1, 0), (2, 1), (3, 0), (4, 1)]);
    assert_eq!(open(&mut node, 1), []);
    assert_eq!(node.ended(0, 1, 100), [], "request 3 begins on the open seat");
    let recall = Action::Recall { gpu: gpu(0), key: RequestKey(4) };
    assert_eq!(node.ended(0, 3, 100), [recall]);
    let returned = Event::RequestReturned { gpu: gpu(0), key: RequestKey(4), why: ReturnReason::Recalled };
    assert_eq!(seats_of(&node.step(returned)), [(4, 0)]);
}

#[test]
fn a_busy_closed_seat_that_opens_again_takes_a_next_request() {
    let mut node = four_seats(PolicyConfig::Fifo, 2);
    assert_eq!(enqueue(&mut node, 1..=2), [(1, 0), (2, 1)]);
    assert_eq!(open(&mut node, 1), []);
    assert_eq!(enqueue(&mut node, 3..=4), [(3, 0)]);
    assert_eq!(seats_of(&open(&mut node, 2)), [(4, 1)], "behind request 2");
    assert_eq!(node.ended(0, 2, 5), [], "request 4 begins");
    assert_eq!(node.seat(1).running.unwrap().request.key, RequestKey(4));
}

#[test]
fn a_suspect_runs_only_after_the_requests_on_closed_seats() {
    let mut node = four_seats(PolicyConfig::Fifo, 2);
    assert_eq!(enqueue(&mut node, 1..=2), [(1, 0), (2, 1)]);
    assert_eq!(open(&mut node, 1), []);
    let died =
        Event::RequestReturned { gpu: gpu(0), key: RequestKey(1), why: ReturnReason::Died(BegunBeside) };
    assert_eq!(seats_of(&node.step(died)), [], "request 2 runs on the closed seat");
    assert_eq!(enqueue(&mut node, [3]), [], "the GPU drains");
    assert_eq!(seats_of(&node.ended(0, 2, 5)), [(1, 0)]);
    assert_eq!(seats_of(&open(&mut node, 4)), [], "no request runs beside a suspect");
    assert_eq!(seats_of(&node.ended(0, 1, 5)), [(3, 0)]);
}

#[test]
fn a_gpu_takes_requests_again_after_the_suspect_for_which_it_drained_while_seats_closed() {
    let mut node = four_seats(PolicyConfig::Fifo, 2);
    assert_eq!(enqueue(&mut node, 1..=2), [(1, 0), (2, 1)]);
    let why = ReturnReason::Died(BegunBeside);
    let died = node.step(Event::RequestReturned { gpu: gpu(0), key: RequestKey(2), why });
    assert_eq!(seats_of(&died), [], "request 1 still runs");
    assert_eq!(open(&mut node, 1), []);
    assert_eq!(active(&node), 1);
    assert_eq!(enqueue(&mut node, [3]), [], "the GPU drains");
    assert_eq!(seats_of(&node.ended(0, 1, 5)), [(2, 0)]);
    assert_eq!(seats_of(&node.ended(0, 2, 5)), [(3, 0)]);
}

#[test]
fn requests_of_closed_seats_return_if_their_gpu_is_lost() {
    let mut node = four_seats(PolicyConfig::Lb, 4);
    assert_eq!(enqueue(&mut node, 1..=4).len(), 4);
    assert_eq!(open(&mut node, 1), []);
    let lost = [1, 2, 3, 4].map(|key| (key, AttemptProgress::Waiting));
    assert_eq!(seats_of(&node.down(0, &lost)), []);
    assert_eq!((node.dispatch.queued(), active(&node)), (4, 1));
    let up = seats_of(&node.step(Event::Up { gpu: gpu(0), incarnation: Incarnation(1) }));
    assert!(matches!(up[..], [(_, 0)]), "one request at a time: {up:?}");
}

#[test]
fn a_policy_change_keeps_seats_closed() {
    let mut node = four_seats(PolicyConfig::Lb, 4);
    assert_eq!(enqueue(&mut node, 1..=3), [(1, 0), (2, 1), (3, 2)]);
    assert_eq!(open(&mut node, 2), []);
    assert_eq!(enqueue(&mut node, [4]), []);
    let policy = PolicyConfig::Fifo;
    let changed = node.step(Event::PolicyChanged { policy, eviction: Eviction::Lru, functions: Vec::new() });
    assert_eq!(seats_of(&changed), [(4, 0)], "behind request 1");
    assert_eq!(seats_of(&node.ended(0, 3, 5)), []);
    glance::check_seats(&node.dispatch);
}
