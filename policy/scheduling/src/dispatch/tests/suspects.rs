//! Suspects on GPUs with several seats.

use std::num::NonZeroU32;

use super::*;
use millrace_core::attempts::AttemptProgress::{BegunBeside, Waiting};

/// Returns a node of GPUs with four seats each, where request 1 runs beside request 2 on GPU 0.
pub(super) fn two_beside(policy: PolicyConfig, gpus: usize) -> Node {
    let seats = NonZeroU32::new(4).unwrap();
    let one = GpuConfig { seats, ..GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000)) };
    let mut node = node_of(&Config::new(vec![one; gpus], 9).with_policy(policy, 1));
    for index in 1..gpus as u32 {
        node.step(Event::Down { gpu: gpu(index), lost: Vec::new() });
    }
    assert_eq!(seats_of(&node.enqueue(1, A)), [(1, 0)]);
    assert_eq!(seats_of(&node.enqueue(2, A)), [(2, 1)]);
    node
}

/// Returns the assigned requests, each with its seat.
pub(super) fn seats_of(actions: &[Action]) -> Vec<(u64, u32)> {
    let assigned = |action: &Action| match *action {
        Action::Assign { seat, key, .. } => Some((key.0, seat.0)),
        _ => None,
    };
    actions.iter().filter_map(assigned).collect()
}

fn lose_both(node: &mut Node) {
    let lost = [1, 2].map(|key| (RequestKey(key), BegunBeside)).to_vec();
    assert_eq!(seats_of(&node.step(Event::Down { gpu: gpu(0), lost })), []);
}

fn up(node: &mut Node, index: u32) -> Vec<(u64, u32)> {
    seats_of(&node.step(Event::Up { gpu: gpu(index), incarnation: Incarnation(1) }))
}

#[test]
fn requests_that_ran_beside_each_other_in_a_dying_executor_run_alone_one_after_the_other() {
    for policy in [PolicyConfig::Fifo, unified::unified(UNIFIED_OVERTAKES_MAX)] {
        let mut node = two_beside(policy, 1);
        lose_both(&mut node);
        assert_eq!(up(&mut node, 0).len(), 1, "the other waits until the first has run");
        assert_eq!(seats_of(&node.enqueue(3, A)), [], "nobody runs beside a suspect");
        let first = node.seat(0).running.unwrap().request.key.0;
        let second = seats_of(&node.ended(0, first, 5));
        assert_eq!(second.len(), 1);
        assert_eq!(seats_of(&node.ended(0, second[0].0, 5)), [(3, 0)]);
    }
}

#[test]
fn a_gpu_takes_no_request_until_its_suspect_has_run() {
    let mut node = two_beside(PolicyConfig::Fifo, 2);
    lose_both(&mut node);
    // The first suspect runs on GPU 1 alone; the second waits for GPU 0, where request 3 runs.
    assert_eq!(up(&mut node, 1), [(1, 4)]);
    node.ask(3, 0, B);
    assert_eq!(node.dispatch.queued(), 2);
    let first = up(&mut node, 0);
    assert_eq!(first, [(2, 0)], "the older request goes first, and alone");
    assert_eq!(seats_of(&node.ended(0, 2, 5)), [(3, 0)]);
    assert_eq!(node.dispatch.queued(), 0);
}

#[test]
fn a_withdrawn_suspect_opens_its_gpu_again() {
    let mut node = two_beside(PolicyConfig::Fifo, 1);
    // Request 1 returns as a suspect, while request 2 still runs.
    let why = ReturnReason::Died(Waiting);
    assert_eq!(
        seats_of(&node.step(Event::RequestReturned { gpu: gpu(0), key: RequestKey(1), why })),
        [(1, 0)]
    );
    let why = ReturnReason::Died(BegunBeside);
    assert_eq!(seats_of(&node.step(Event::RequestReturned { gpu: gpu(0), key: RequestKey(1), why })), []);
    assert_eq!(seats_of(&node.enqueue(3, A)), [], "the GPU drains");
    assert_eq!(seats_of(&node.step(Event::Withdraw { key: RequestKey(1) })), [(3, 0)]);
}

#[test]
fn a_suspect_that_waits_for_a_lost_gpu_goes_elsewhere() {
    let mut node = two_beside(PolicyConfig::Fifo, 2);
    let why = ReturnReason::Died(BegunBeside);
    node.step(Event::RequestReturned { gpu: gpu(0), key: RequestKey(1), why });
    assert_eq!(up(&mut node, 1), [], "the suspect waits for GPU 0, where request 2 runs");
    let lost = vec![(RequestKey(2), BegunBeside)];
    let moved = seats_of(&node.step(Event::Down { gpu: gpu(0), lost }));
    assert_eq!(moved, [(1, 4)]);
    assert_eq!(seats_of(&node.ended(1, 1, 5)), [(2, 4)]);
}
