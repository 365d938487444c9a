//! Transfers of weights from another GPU (T22, T25), as tables. `tests/peers/` tests the properties
//! that must hold for any order of events.

use super::*;
use millrace_memory::{BlockRun, BlockSize};
use millrace_types::Incarnation;

const TIMES: u32 = 4;
/// An NVLink between GPUs 0 and 2.
const NVLINK: LinkId = LinkId(4);

fn node() -> Node {
    let mut topology = topology(1);
    let kind = LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(2) };
    topology.links.push(TopologyLink { kind, rate: BytesPerSec(RATE.0 * u64::from(TIMES)) });
    Node { fabric: LinkScheduler::new(&topology), now: Timestamp(1 << 40), actions: Vec::new() }
}

fn blocks(start: u32, len: u32) -> BlockRun {
    BlockRun { start, len }
}

fn peer(gpu: u32, runs: &[BlockRun]) -> PeerBlocks {
    PeerBlocks {
        gpu: GpuIndex(gpu),
        incarnation: Incarnation(7),
        blocks: runs.to_vec(),
        block: BlockSize::DEFAULT,
        skip: Bytes::ZERO,
    }
}

fn lock(gpu: u32, transfer: u64, chunks: u32) -> Action {
    let cargo = weights(transfer, Bytes(CHUNK.0 * u64::from(chunks)));
    Action::Lock { gpu: GpuIndex(gpu), transfer: TransferId(transfer), cargo }
}

fn unlock(gpu: u32, transfer: u64) -> Action {
    Action::Unlock { gpu: GpuIndex(gpu), transfer: TransferId(transfer) }
}

fn down(gpu: u32) -> Event {
    Event::Down { gpu: GpuIndex(gpu) }
}

impl Node {
    fn start_from(&mut self, from: u32, transfer: u64, gpu: u32, chunks: u32) -> Vec<Action> {
        let cargo = weights(transfer, Bytes(CHUNK.0 * u64::from(chunks)));
        let transfer = TransferId(transfer);
        let gpu = GpuIndex(gpu);
        let chunks = std::iter::once(0..chunks).collect();
        let from = Some(GpuIndex(from));
        self.step(Event::Start { transfer, gpu, cargo, chunks, from, objective: None })
    }

    fn locked(&mut self, transfer: u64, peer: PeerBlocks) -> Vec<Action> {
        self.step(Event::Locked { transfer: TransferId(transfer), peer })
    }

    /// Returns a node that copies 12 chunks from GPU 0 to GPU 2 and has two batches in flight.
    fn copying() -> Self {
        let mut node = node();
        assert_eq!(node.start_from(0, 1, 2, 12), [lock(0, 1, 12)]);
        assert_eq!(sources(&node.locked(1, peer(0, &[blocks(50, 12)]))), [Some(0), Some(0)]);
        node
    }
}

/// Returns the GPU that each grant among some actions copies from.
fn sources(actions: &[Action]) -> Vec<Option<u32>> {
    let source = |action: &Action| match action {
        Action::Grant { grant } => {
            let from = grant.peer.as_ref().map(|peer| peer.gpu.0);
            assert_eq!(grant.link == NVLINK, from.is_some(), "{grant:?}");
            Some(from)
        }
        _ => None,
    };
    actions.iter().filter_map(source).collect()
}

fn complete(gpu: u32, transfer: u64, from: Option<u32>) -> Action {
    let gpu = GpuIndex(gpu);
    let transfer = TransferId(transfer);
    let outcome = TransferOutcome::Complete;
    Action::Ended { gpu, transfer, outcome, from: from.map(GpuIndex), routes: Vec::new() }
}

/// Returns the unlocks and the ends among some actions.
fn ends(actions: &[Action]) -> Vec<Action> {
    let told = |action: &&Action| matches!(action, Action::Unlock { .. } | Action::Ended { .. });
    actions.iter().filter(told).cloned().collect()
}

#[test]
fn a_locked_model_crosses_the_nvlink_at_full_rate_and_is_unlocked() {
    let mut node = node();
    let start = node.now;
    assert_eq!(node.start_from(0, 1, 2, 7), [lock(0, 1, 7)], "nothing moves before it is locked");
    let actions = node.locked(1, peer(0, &[blocks(3, 2), blocks(20, 9)]));
    let begins: Vec<_> =
        grants(&actions, start).into_iter().map(|(.., chunks, begin)| (chunks, begin)).collect();
    let second = BytesPerSec(RATE.0 * u64::from(TIMES)).time_for(Bytes(CHUNK.0 * 5));
    assert_eq!(begins, [(0..5, Duration::ZERO), (5..7, second)]);
    let part = |action: &Action| match action {
        Action::Grant { grant } => grant.peer.clone(),
        _ => None,
    };
    let parts: Vec<_> = actions.iter().filter_map(part).collect();
    assert_eq!(parts, [peer(0, &[blocks(3, 2), blocks(20, 3)]), peer(0, &[blocks(23, 2)])]);
    node.done(1, 0);
    assert_eq!(ends(&node.done(1, 1)), [unlock(0, 1), complete(2, 1, Some(0))]);
}

#[test]
fn without_a_lock_or_an_nvlink_weights_are_copied_from_the_host() {
    let mut node = node();
    assert_eq!(sources(&node.start_from(1, 1, 2, 3)), [None], "1 and 2 are not joined");
    assert_eq!(ends(&node.done(1, 0)), [complete(2, 1, None)]);
    node.start_from(0, 2, 2, 3);
    assert_eq!(sources(&node.step(Event::NotLocked { transfer: TransferId(2) })), [None]);
    assert_eq!(ends(&node.done(2, 0)), [complete(2, 2, None)], "nothing to unlock");
}

#[test]
fn a_failed_copy_from_a_peer_is_repeated_from_the_host_and_not_counted() {
    let faulty = BatchFailure::Faulty;
    let mut node = Node::copying();
    assert_eq!(sources(&node.failed(1, 0, faulty)), [None]);
    assert_eq!(sources(&node.failed(1, 1, faulty)), [None], "the peer stays locked until the transfer ends");
    node.failed(1, 2, faulty);
    assert_eq!(ends(&node.failed(1, 3, faulty)), [], "two in a row are not three");
    node.done(1, 4);
    node.done(1, 5);
    assert_eq!(ends(&node.done(1, 6)), [unlock(0, 1), complete(2, 1, None)]);
}

#[test]
fn after_the_loss_of_a_peer_the_rest_is_copied_from_the_host() {
    let mut node = Node::copying();
    assert_eq!(node.step(down(0)), [], "two batches are out");
    assert_eq!(sources(&node.done(1, 0)), [None], "what was copied is there");
    assert_eq!(sources(&node.failed(1, 1, BatchFailure::Faulty)), [None]);
    node.done(1, 2);
    assert_eq!(ends(&node.done(1, 3)), [complete(2, 1, None)], "the lost GPU forgot its locks");
    let mut node = self::node();
    node.start_from(0, 1, 2, 3);
    assert_eq!(sources(&node.step(down(0))), [None], "the lost GPU never answered");
}

#[test]
fn a_transfer_that_ends_early_unlocks_its_peer_even_after_a_late_lock() {
    let mut node = Node::copying();
    assert_eq!(node.step(down(2)), [unlock(0, 1)], "the destination is lost");
    let mut node = Node::copying();
    node.step(Event::Cancel { transfer: TransferId(1) });
    node.failed(1, 1, BatchFailure::NotBegun);
    assert!(matches!(ends(&node.done(1, 0))[..], [Action::Unlock { .. }, Action::Ended { .. }]));
    let mut node = self::node();
    node.start_from(0, 1, 2, 3);
    assert_eq!(
        ended(&node.step(Event::Cancel { transfer: TransferId(1) })),
        [(1, TransferOutcome::Cancelled)]
    );
    assert_eq!(node.locked(1, peer(0, &[blocks(0, 3)])), [unlock(0, 1)], "too late");
}

#[test]
fn the_directions_of_an_nvlink_and_the_host_path_do_not_share_a_rate() {
    let mut node = Node::copying();
    let start = node.now;
    node.start_from(2, 2, 0, 5);
    let back = node.locked(2, peer(2, &[blocks(0, 5)]));
    assert_eq!(grants(&back, start), [(2, 0, 0..5, Duration::ZERO)]);
    assert_eq!(grants(&node.start(3, 2, 5), start), [(3, 0, 0..5, Duration::ZERO)]);
    assert_eq!(node.start_from(0, 4, 2, 5), [lock(0, 4, 5)]);
    let actions = node.locked(4, peer(0, &[blocks(100, 5)]));
    assert!(matches!(actions[..], [Action::Revoke { link: NVLINK, .. }]), "the same direction is taken");
}
