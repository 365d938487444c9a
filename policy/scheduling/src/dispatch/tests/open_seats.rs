//! Seats that open and close while requests wait and run.

use std::num::NonZeroU32;

use super::suspects::{seats_of, two_beside};
use super::*;
use millrace_core::attempts::AttemptProgress::BegunBeside;

/// Returns a node with one GPU of eight seats, of which `open` are open.
fn node_with_open(policy: PolicyConfig, open: u32) -> Node {
    let one = GpuConfig { seats: count(8), ..GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000)) };
    node_of(&Config::new(vec![one], 99).with_policy(policy, 1).with_open_seats(count(open)))
}

fn count(seats: u32) -> NonZeroU32 {
    NonZeroU32::new(seats).unwrap()
}

fn open(node: &mut Node, seats: u32) -> Vec<Action> {
    node.step(Event::SeatsOpened { seats: count(seats) })
}

/// Returns the number of seats that each event examines.
fn seats_in_use(node: &Node) -> usize {
    node.dispatch.fleet.get(gpu(0)).seats().len()
}

#[test]
fn all_seats_are_open_by_default() {
    let one = GpuConfig { seats: count(2), ..GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000)) };
    let mut node = node_of(&Config::new(vec![one], 9));
    assert_eq!(seats_of(&node.enqueue(1, A)), [(1, 0)]);
    assert_eq!(seats_of(&node.enqueue(2, A)), [(2, 1)]);
}

#[test]
fn a_closed_seat_takes_no_request_and_a_seat_that_opens_takes_one_at_once() {
    let mut node = node_with_open(PolicyConfig::Fifo, 1);
    assert_eq!(seats_of(&node.enqueue(1, A)), [(1, 0)]);
    assert_eq!(seats_of(&node.enqueue(2, A)), [(2, 0)], "behind request 1");
    assert_eq!(seats_of(&node.enqueue(3, A)), []);
    assert_eq!(seats_in_use(&node), 1);
    assert_eq!(seats_of(&open(&mut node, 2)), [(3, 1)]);
    assert_eq!(seats_in_use(&node), 2);
    assert_eq!(seats_of(&node.ended(0, 1, 5)), []);
    assert_eq!(seats_of(&node.ended(0, 3, 5)), []);
    assert_eq!(seats_of(&node.enqueue(4, A)), [(4, 1)], "request 2 runs on seat 0");
}

#[test]
fn more_open_seats_than_a_gpu_has_are_all_of_its_seats() {
    let mut node = node_with_open(PolicyConfig::Fifo, 1);
    assert_eq!(seats_of(&open(&mut node, u32::MAX)), []);
    let first = (1..=8).flat_map(|key| seats_of(&node.enqueue(key, A))).collect::<Vec<_>>();
    assert_eq!(first, (1..=8).map(|key| (key, key as u32 - 1)).collect::<Vec<_>>());
}

#[test]
fn waiting_requests_of_every_policy_get_the_seats_that_open() {
    // The runtimes of the other policies that bind early do not fit on this GPU.
    let fits = |policy| !matches!(policy, PolicyConfig::Bound(bound) if bound.runtime > Bytes::ZERO);
    for (name, policy) in POLICIES.into_iter().filter(|&(_, policy)| fits(policy)) {
        let mut node = node_with_open(policy, 1);
        for key in 1..=6 {
            node.enqueue(key, A);
        }
        assert!(node.dispatch.queued() >= 4, "{name}");
        open(&mut node, 8);
        assert_eq!(node.dispatch.queued(), 0, "{name}");
    }
}

#[test]
fn requests_run_and_wait_to_their_end_on_a_seat_that_closed() {
    let mut node = node_with_open(PolicyConfig::Fifo, 2);
    // Without a known run time, request 4 is assigned behind request 2 on seat 1.
    let assigned: Vec<_> = (1..=5).flat_map(|key| seats_of(&node.enqueue(key, A))).collect();
    assert_eq!(assigned, [(1, 0), (2, 1), (3, 0), (4, 1)]);
    assert_eq!(open(&mut node, 1), []);
    assert_eq!(seats_in_use(&node), 2);
    assert_eq!(seats_of(&node.ended(0, 2, 5)), [], "request 4 runs now; request 5 waits for seat 0");
    assert_eq!(node.seat(1).running.unwrap().request.key, RequestKey(4));
    assert_eq!(seats_of(&node.ended(0, 1, 5)), [(5, 0)]);
    assert_eq!(seats_of(&node.enqueue(6, A)), []);
    assert_eq!(seats_of(&node.ended(0, 4, 5)), []);
    assert_eq!(seats_in_use(&node), 1, "no event examines a closed seat without requests");
    assert_eq!(seats_of(&node.ended(0, 3, 5)), [(6, 0)]);
    node.ended(0, 5, 5);
    assert_eq!(node.ended(0, 6, 5), []);
    assert_eq!((node.dispatch.in_flight(), node.dispatch.queued()), (0, 0));
}

#[test]
fn a_seat_that_opens_again_while_its_request_runs_takes_another_behind_it() {
    let mut node = node_with_open(PolicyConfig::Fifo, 2);
    node.enqueue(1, A);
    assert_eq!(seats_of(&node.enqueue(2, A)), [(2, 1)]);
    open(&mut node, 1);
    assert_eq!(seats_of(&node.enqueue(3, A)), [(3, 0)]);
    assert_eq!(seats_of(&node.enqueue(4, A)), []);
    assert_eq!(seats_of(&open(&mut node, 2)), [(4, 1)]);
}

#[test]
fn an_idle_seat_recalls_a_request_that_waits_on_a_closed_seat() {
    let mut node = node_with_open(PolicyConfig::Fifo, 2);
    let assigned: Vec<_> = (1..=4).flat_map(|key| seats_of(&node.enqueue(key, A))).collect();
    assert_eq!(assigned, [(1, 0), (2, 1), (3, 0), (4, 1)]);
    open(&mut node, 1);
    node.ended(0, 1, 5);
    node.now = node.now + Duration::from_secs(9);
    let recalls = node.ended(0, 3, 5);
    assert_eq!(recalls, [Action::Recall { gpu: gpu(0), key: RequestKey(4) }]);
    let event = Event::RequestReturned { gpu: gpu(0), key: RequestKey(4), why: ReturnReason::Recalled };
    assert_eq!(seats_of(&node.step(event)), [(4, 0)]);
}

#[test]
fn a_lost_gpu_returns_the_requests_of_its_closed_seats() {
    let mut node = node_with_open(PolicyConfig::Fifo, 8);
    for key in 1..=3 {
        node.enqueue(key, A);
    }
    open(&mut node, 1);
    assert_eq!(seats_in_use(&node), 3);
    let lost = [1, 2, 3].map(|key| (key, AttemptProgress::Waiting));
    assert_eq!(node.down(0, &lost), []);
    assert_eq!((node.dispatch.queued(), seats_in_use(&node)), (3, 1));
    let up = node.step(Event::Up { gpu: gpu(0), incarnation: Incarnation(2) });
    assert!(seats_of(&up).iter().all(|&(_, seat)| seat == 0), "{up:?}");
    open(&mut node, 8);
    assert_eq!(node.dispatch.queued(), 0);
}

#[test]
fn a_policy_change_keeps_closed_seats_closed() {
    let mut node = node_with_open(PolicyConfig::Fifo, 2);
    for key in 1..=5 {
        node.enqueue(key, A);
    }
    open(&mut node, 1);
    let policy = PolicyConfig::Lb;
    let event = Event::PolicyChanged { policy, eviction: Eviction::Lru, functions: Vec::new() };
    assert_eq!(seats_of(&node.step(event)), []);
    for key in [2, 4] {
        assert_eq!(seats_of(&node.ended(0, key, 5)), []);
    }
    node.ended(0, 1, 5);
    assert_eq!(seats_of(&node.ended(0, 3, 5)), [(5, 0)]);
}

#[test]
fn no_request_runs_beside_a_suspect_when_seats_open_or_close() {
    for closes in [false, true] {
        let mut node = two_beside(PolicyConfig::Fifo, 1);
        let lost = [1, 2].map(|key| (RequestKey(key), BegunBeside)).to_vec();
        node.step(Event::Down { gpu: gpu(0), lost });
        if !closes {
            open(&mut node, 1);
        }
        let up = node.step(Event::Up { gpu: gpu(0), incarnation: Incarnation(1) });
        assert_eq!(seats_of(&up), [(1, 0)]);
        assert_eq!(seats_of(&node.enqueue(3, B)), []);
        let seats = if closes { 1 } else { 4 };
        assert_eq!(seats_of(&open(&mut node, seats)), [], "request 1 runs alone");
        assert_eq!(seats_of(&node.ended(0, 1, 5)), [(2, 0)]);
        assert_eq!(seats_of(&node.ended(0, 2, 5)), [(3, 0)]);
        assert!(!node.dispatch.fleet.get(gpu(0)).held_for_suspect);
        let next = if closes { (4, 0) } else { (4, 1) };
        assert_eq!(seats_of(&node.enqueue(4, B)), [next]);
    }
}

#[test]
fn a_suspect_waits_for_the_requests_on_closed_seats() {
    let mut node = two_beside(PolicyConfig::Fifo, 1);
    open(&mut node, 1);
    let why = ReturnReason::Died(BegunBeside);
    assert_eq!(seats_of(&node.step(Event::RequestReturned { gpu: gpu(0), key: RequestKey(1), why })), []);
    assert_eq!(seats_of(&node.enqueue(3, A)), [], "the GPU drains for request 1");
    assert_eq!(seats_of(&node.ended(0, 2, 5)), [(1, 0)]);
    assert_eq!(seats_of(&node.ended(0, 1, 5)), [(3, 0)]);
    assert_eq!(seats_of(&node.enqueue(4, A)), [(4, 0)], "behind request 3");
}
