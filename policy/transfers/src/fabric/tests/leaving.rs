//! Transfers from a GPU to the host, which follow the same rules as transfers from the host.

use super::link::LinkLedger as Books;
use super::*;

/// Returns the GPU, link and chunks of each grant among some actions, all of which must copy to the
/// host.
fn left(actions: &[Action]) -> Vec<(GpuIndex, LinkId, Range<u32>)> {
    let grant = |action: &Action| match action {
        Action::Grant { grant } => {
            assert_eq!((grant.cargo.direction(), &grant.peer), (HostDirection::FromGpu, &None));
            Some((grant.gpu, grant.link, grant.chunks.clone()))
        }
        _ => None,
    };
    actions.iter().filter_map(grant).collect()
}

#[test]
fn batches_for_the_host_cross_every_link_of_the_host_path() {
    let mut node = Node::new(1);
    let start = node.now;
    let actions = node.leave(1, 0, 13);
    assert_eq!(grants(&actions, start), [(1, 0, 0..5, Duration::ZERO), (1, 1, 5..10, BATCH_TIME)]);
    let gpu = GpuIndex(0);
    let link = LinkId(0);
    assert_eq!(left(&actions), [(gpu, link, 0..5), (gpu, link, 5..10)]);
    let actions = node.done(1, 0);
    let size = Bytes(CHUNK.0 * 5);
    let carried = Action::Carried { link: LINK_3, direction: HostDirection::FromGpu, size };
    assert!(actions.contains(&carried), "{actions:?}");
    assert_eq!(grants(&actions, start), [(1, 2, 10..13, BATCH_TIME * 2)]);
    assert_eq!(ended(&node.done(1, 1)), []);
    assert_eq!(ended(&node.done(1, 2)), [(1, TransferOutcome::Complete)]);
    let tally = node.fabric.tally();
    assert_eq!((tally.ended.from_gpu.unpromised, tally.ended.to_gpu), (1, GuaranteeCounts::default()));
    assert_eq!(tally.waits[&(link, HostDirection::FromGpu)].transfers, 1);
}

#[test]
fn the_directions_of_a_link_do_not_share_its_rate() {
    let mut node = Node::new(1);
    let start = node.now;
    node.start(1, 0, 40);
    node.start(2, 1, 40);
    assert_eq!(grants(&node.leave(3, 0, 5), start), [(3, 0, 0..5, Duration::ZERO)]);
    assert_eq!(ended(&node.done(3, 0)), [(3, TransferOutcome::Complete)]);
}

#[test]
fn transfers_to_the_host_take_turns_and_a_new_transfer_waits_for_one_batch() {
    let mut node = Node::new(1);
    let start = node.now;
    node.leave(1, 0, 100);
    node.now = node.now + BATCH_TIME / 4;
    let link = LinkId(0);
    let gpu = GpuIndex(0);
    let revoke = Action::Revoke { link, gpu, transfer: TransferId(1), batch: BatchId(1) };
    assert_eq!(node.leave(2, 1, 40), [revoke]);
    let actions = node.failed(1, 1, BatchFailure::NotBegun);
    assert_eq!(grants(&actions, start), [(2, 0, 0..5, BATCH_TIME)]);
    let mut order = Vec::new();
    let mut out = VecDeque::from([(1, 0), (2, 0)]);
    for _ in 0..6 {
        let Some((transfer, batch)) = out.pop_front() else { break };
        node.now = node.now + BATCH_TIME;
        for (transfer, batch, ..) in grants(&node.done(transfer, batch), start) {
            order.push(transfer);
            out.push_back((transfer, batch));
        }
    }
    assert_eq!(order, [1, 2, 1, 2, 1, 2]);
}

#[test]
fn the_third_failure_in_a_row_ends_a_transfer_to_the_host() {
    let faulty = BatchFailure::Faulty;
    let mut node = Node::new(1);
    node.leave(1, 2, 7);
    assert_eq!(left(&node.failed(1, 0, faulty)).len(), 1);
    node.done(1, 1);
    assert_eq!(ended(&node.failed(1, 2, faulty)), []);
    assert_eq!(ended(&node.failed(1, 3, faulty)), []);
    assert_eq!(ended(&node.failed(1, 4, faulty)), [(1, TransferOutcome::Failed)]);
    assert_eq!(node.fabric.in_flight(), 0);
}

#[test]
fn a_lost_gpu_ends_a_transfer_to_the_host_silently_and_a_cancel_ends_a_transfer_after_the_last_batch() {
    let mut node = Node::new(1);
    let start = node.now;
    node.leave(1, 0, 40);
    node.leave(2, 2, 40);
    assert_eq!(node.step(Event::Down { gpu: GpuIndex(0) }), []);
    assert_eq!(grants(&node.leave(3, 1, 5), start), [(3, 0, 0..5, Duration::ZERO)], "its links are free");
    let actions = node.step(Event::Cancel { transfer: TransferId(2) });
    assert!(matches!(actions[..], [Action::Revoke { batch: BatchId(1), .. }]));
    assert_eq!(ended(&node.failed(2, 1, BatchFailure::NotBegun)), []);
    assert_eq!(ended(&node.done(2, 0)), [(2, TransferOutcome::Cancelled)]);
}

#[test]
fn a_link_measures_each_direction_separately() {
    let mut node = Node::new(1);
    let mut actions = node.leave(1, 2, 5);
    actions.extend(node.start(2, 2, 10));
    let mut books = Books::default();
    for action in actions {
        if let Action::Grant { grant } = action {
            let transfer = grant.transfer;
            let batch = grant.batch;
            let size = grant.cargo.span(&grant.chunks).1;
            let times = if grant.cargo.direction() == HostDirection::ToGpu { 1 } else { 2 };
            let started = node.now;
            let finished = node.now + RATE.time_for(size) * times;
            books.on_event(node.now, link::Event::Grant(grant), &mut Vec::new());
            let done = link::Event::Done { transfer, batch, started, finished };
            books.on_event(node.now, done, &mut Vec::new());
        }
    }
    books.on_event(node.now, link::Event::Carried(HostDirection::FromGpu, Bytes(1)), &mut Vec::new());
    let carried = HostDirection::BOTH.map(|direction| books.carried(direction));
    // The last chunk of each transfer is half a chunk.
    assert_eq!(carried, [Bytes::mib(19), Bytes(Bytes::mib(9).0 + 1)]);
    let measured = |direction| books.measured(direction).unwrap().0 / (1 << 20);
    assert_eq!([measured(HostDirection::ToGpu), measured(HostDirection::FromGpu)], [1024, 512]);
}
