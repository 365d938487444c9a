use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, ModelId};

use super::lanes::LinkLane;
use super::*;
use crate::paths::HostDirection;
use millrace_core::ids::Generation;
use millrace_memory::CHUNK;

mod forwards;
mod leaving;
mod objects;
mod peers;
mod properties;
mod sharing;

const RATE: BytesPerSec = BytesPerSec(1 << 30);
/// The time of a batch of five chunks at `RATE`.
const BATCH_TIME: Duration = Duration::from_nanos(9_765_625);
const LINK_3: LinkId = LinkId(3);

/// Returns a machine of three GPUs. GPUs 0 and 1 share an uplink that is `uplink` times as fast as
/// their own links; GPU 2 shares none.
fn topology(uplink: u64) -> Topology {
    shared(2, uplink)
}

/// Returns a machine on which GPUs 0 to `gpus - 1` share the uplink, and one more GPU shares none.
fn shared(gpus: u32, uplink: u64) -> Topology {
    let link = |kind, times| TopologyLink { kind, rate: BytesPerSec(RATE.0 * times) };
    let gpu = |index: u32| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "test".to_owned(),
        memory: Bytes::gib(1),
        host_path: [index, gpus + 1].into_iter().map(LinkId).take(if index < gpus { 2 } else { 1 }).collect(),
    };
    let mut links = vec![link(LinkKind::Pcie, 1); gpus as usize + 1];
    links.push(link(LinkKind::PcieUplink, uplink));
    Topology { name: "test".to_owned(), gpus: (0..=gpus).map(gpu).collect(), links }
}

/// Returns the weights of the model that is named after a transfer.
fn weights(transfer: u64, bytes: Bytes) -> TransferCargo {
    TransferCargo::Weights(WeightsCargo { model: ModelId(transfer as u32), generation: Generation(1), bytes })
}

/// Returns the data for the host of the copy that is named after a transfer.
fn leaving(transfer: u64, bytes: Bytes) -> TransferCargo {
    TransferCargo::ToHost(OutgoingCopy { copy: transfer, bytes })
}

struct Node {
    fabric: LinkScheduler,
    now: Timestamp,
    actions: Vec<Action>,
}

impl Node {
    fn new(uplink: u64) -> Self {
        Self::sharing(uplink, TransferSharing::default())
    }

    fn sharing(uplink: u64, sharing: TransferSharing) -> Self {
        Self::of(&topology(uplink), sharing)
    }

    fn of(topology: &Topology, sharing: TransferSharing) -> Self {
        let fabric = LinkScheduler::with_sharing(topology, sharing);
        Self { fabric, now: Timestamp(1 << 40), actions: Vec::new() }
    }

    fn step(&mut self, event: Event) -> Vec<Action> {
        let mut actions = std::mem::take(&mut self.actions);
        let before: Vec<_> = self.fabric.lanes.iter().map(LinkLane::outstanding).collect();
        self.fabric.on_event(self.now, event, &mut actions);
        for (lane, before) in self.fabric.lanes.iter().zip(before) {
            // Batches in flight on a route that was taken away may exceed the new bound until they
            // end.
            let most = lane.holds_max().max(before);
            assert!(lane.outstanding() <= most, "{:?} is overbooked", lane.link);
        }
        let batches = || self.fabric.transfers.values().flat_map(|transfer| &transfer.out);
        for route in self.fabric.paths.keys() {
            let out = batches().filter(|batch| batch.route == *route).count();
            assert!(out <= 2, "{route:?} has three out");
        }
        actions
    }

    fn start(&mut self, transfer: u64, gpu: u32, chunks: u32) -> Vec<Action> {
        self.start_wanted(transfer, gpu, chunks, None)
    }

    /// Starts a transfer of weights with a deadline in `ms` milliseconds, if any.
    fn start_wanted(&mut self, transfer: u64, gpu: u32, chunks: u32, ms: Option<u64>) -> Vec<Action> {
        self.start_of(weights, transfer, gpu, chunks, ms)
    }

    /// Starts a transfer from a GPU to the host.
    fn leave(&mut self, transfer: u64, gpu: u32, chunks: u32) -> Vec<Action> {
        self.start_of(leaving, transfer, gpu, chunks, None)
    }

    fn start_of(
        &mut self,
        cargo: fn(u64, Bytes) -> TransferCargo,
        transfer: u64,
        gpu: u32,
        chunks: u32,
        ms: Option<u64>,
    ) -> Vec<Action> {
        // The last chunk is half a chunk.
        let bytes = Bytes(CHUNK.0 * u64::from(chunks) - CHUNK.0 / 2);
        let cargo = cargo(transfer, bytes);
        let transfer = TransferId(transfer);
        let gpu = GpuIndex(gpu);
        let chunks = std::iter::once(0..chunks).collect();
        self.step(Event::Start { transfer, gpu, cargo, chunks, from: None, objective: ms.map(within) })
    }

    fn done(&mut self, transfer: u64, batch: u64) -> Vec<Action> {
        self.step(Event::Done { transfer: TransferId(transfer), batch: BatchId(batch) })
    }

    fn failed(&mut self, transfer: u64, batch: u64, why: BatchFailure) -> Vec<Action> {
        self.step(Event::Failed { transfer: TransferId(transfer), batch: BatchId(batch), why })
    }
}

/// Returns an objective that leaves `ms` milliseconds for the transfer.
fn within(ms: u64) -> TransferObjective {
    TransferObjective { slo: Duration::from_millis(ms + 5), infer: Duration::from_millis(5) }
}

/// Returns the grants among some actions: transfer, batch, chunks, and the earliest start after
/// `start`.
fn grants(actions: &[Action], start: Timestamp) -> Vec<(u64, u64, Range<u32>, Duration)> {
    let grant = |action: &Action| match action {
        Action::Grant { grant, .. } => {
            let begin = grant.not_before.since(start);
            Some((grant.transfer.0, grant.batch.0, grant.chunks.clone(), begin))
        }
        _ => None,
    };
    actions.iter().filter_map(grant).collect()
}

fn ended(actions: &[Action]) -> Vec<(u64, TransferOutcome)> {
    let ended = |action: &Action| match *action {
        Action::Ended { transfer, outcome, .. } => Some((transfer.0, outcome)),
        _ => None,
    };
    actions.iter().filter_map(ended).collect()
}

#[test]
fn batches_of_a_transfer_are_paced_at_the_rate_of_the_link() {
    let mut node = Node::new(1);
    let start = node.now;
    let actions = node.start(1, 2, 13);
    assert_eq!(grants(&actions, start), [(1, 0, 0..5, Duration::ZERO), (1, 1, 5..10, BATCH_TIME)]);
    // The copy was faster than the link's rate. The next batch still waits for the link's time.
    let actions = node.done(1, 0);
    assert_eq!(grants(&actions, start), [(1, 2, 10..13, BATCH_TIME * 2)]);
    assert!(matches!(&actions[0], Action::Arrived { chunks, .. } if *chunks == (0..5)));
    assert_eq!(ended(&node.done(1, 1)), []);
    assert_eq!(ended(&node.done(1, 2)), [(1, TransferOutcome::Complete)]);
    assert_eq!(node.fabric.in_flight(), 0);
}

#[test]
fn the_last_chunk_is_short() {
    let cargo = weights(0, Bytes(CHUNK.0 * 6 + 7));
    assert_eq!(cargo.span(&(5..7)), (Bytes(CHUNK.0 * 5), Bytes(CHUNK.0 + 7)));
}

#[test]
fn transfers_that_share_a_link_take_turns() {
    let mut node = Node::new(1);
    let start = node.now;
    // Batches of both transfers may be in flight at the same time, but never cross the uplink
    // together.
    node.start(1, 0, 40);
    let revoke = node.start(2, 1, 40);
    assert!(matches!(revoke[..], [Action::Revoke { transfer: TransferId(1), batch: BatchId(1), .. }]));
    let actions = node.failed(1, 1, BatchFailure::NotBegun);
    assert_eq!(grants(&actions, start), [(2, 0, 0..5, BATCH_TIME)]);
    let mut order = Vec::new();
    let mut out = VecDeque::from([(1, 0), (2, 0)]);
    for _ in 0..8 {
        let Some((transfer, batch)) = out.pop_front() else { break };
        node.now = node.now + BATCH_TIME;
        for (transfer, batch, ..) in grants(&node.done(transfer, batch), start) {
            order.push(transfer);
            out.push_back((transfer, batch));
        }
    }
    assert_eq!(order, [1, 2, 1, 2, 1, 2, 1, 2]);
}

#[test]
fn a_new_transfer_is_served_after_the_running_batch() {
    let mut node = Node::new(1);
    let start = node.now;
    node.start(1, 0, 100);
    node.now = node.now + BATCH_TIME / 4;
    let actions = node.start(2, 1, 3);
    let revoke =
        Action::Revoke { link: LinkId(0), gpu: GpuIndex(0), transfer: TransferId(1), batch: BatchId(1) };
    assert_eq!(actions, [revoke]);
    let actions = node.failed(1, 1, BatchFailure::NotBegun);
    assert_eq!(grants(&actions, start), [(2, 0, 0..3, BATCH_TIME)], "right after the batch that runs");
}

#[test]
fn a_revoked_batch_that_had_begun_ends_as_usual() {
    let mut node = Node::new(1);
    let start = node.now;
    node.start(1, 0, 100);
    node.start(2, 1, 3);
    let actions = node.done(1, 0);
    assert_eq!(grants(&actions, start), [(2, 0, 0..3, BATCH_TIME * 2)]);
    assert!(matches!(
        node.done(1, 1)[..],
        [Action::Carried { link: LINK_3, .. }, Action::Arrived { .. }, ..]
    ));
}

#[test]
fn a_stream_of_new_transfers_does_not_starve_an_older_transfer() {
    let mut node = Node::new(1);
    let mut actions = node.start(1, 0, 400);
    let mut newcomer = 1;
    let mut there = false;
    let mut out = Vec::new();
    let mut served = 0;
    for _ in 0..60 {
        if !std::mem::replace(&mut there, true) {
            newcomer += 1;
            actions.extend(node.start(newcomer, 1, 5));
        }
        out.extend(grants(&actions, node.now).into_iter().map(|(transfer, batch, ..)| (transfer, batch)));
        let revoked = actions.iter().find_map(|action| match action {
            Action::Revoke { transfer, batch, .. } => Some((transfer.0, batch.0)),
            _ => None,
        });
        actions.clear();
        if let Some((transfer, batch)) = revoked {
            out.retain(|&other| other != (transfer, batch));
            let granted = node.failed(transfer, batch, BatchFailure::NotBegun);
            out.extend(grants(&granted, node.now).into_iter().map(|(transfer, batch, ..)| (transfer, batch)));
        }
        node.now = node.now + BATCH_TIME;
        let (transfer, batch) = out.remove(0);
        served += u32::from(transfer == 1);
        there = transfer == 1;
        actions.extend(node.done(transfer, batch));
    }
    assert!((20..=40).contains(&served), "the first transfer had {served} of 60 batches");
}

#[test]
fn an_uplink_as_wide_as_all_links_below_keeps_no_transfer_waiting() {
    for gpus in 2..5 {
        let mut node = Node::of(&shared(gpus, u64::from(gpus)), TransferSharing::default());
        let start = node.now;
        let actions: Vec<_> = (0..gpus).flat_map(|gpu| node.start(u64::from(gpu), gpu, 20)).collect();
        let begins: Vec<_> =
            grants(&actions, start).into_iter().map(|(transfer, _, _, begin)| (transfer, begin)).collect();
        let both = |gpu: u32| [(u64::from(gpu), Duration::ZERO), (u64::from(gpu), BATCH_TIME)];
        assert_eq!(begins, (0..gpus).flat_map(both).collect::<Vec<_>>());
    }
}

#[test]
fn the_third_failure_in_a_row_ends_a_transfer() {
    let mut node = Node::new(1);
    let start = node.now;
    node.start(1, 2, 5);
    let faulty = BatchFailure::Faulty;
    assert_eq!(grants(&node.failed(1, 0, faulty), start).len(), 1);
    assert_eq!(grants(&node.failed(1, 1, faulty), start).len(), 1);
    assert_eq!(ended(&node.failed(1, 2, faulty)), [(1, TransferOutcome::Failed)]);
    assert_eq!(node.fabric.in_flight(), 0);
}

#[test]
fn an_unreported_batch_is_granted_again() {
    let mut node = Node::new(1);
    let start = node.now;
    node.start(1, 2, 5);
    let give_up = node.fabric.next_wake().unwrap();
    node.now = give_up;
    assert_eq!(grants(&node.step(Event::Tick), start).len(), 1);
    assert_eq!(node.done(1, 0), [], "too late");
    assert_eq!(ended(&node.done(1, 1)), [(1, TransferOutcome::Complete)]);
}

#[test]
fn a_cancelled_transfer_ends_with_the_last_batch_in_flight() {
    let mut node = Node::new(1);
    node.start(1, 2, 40);
    let actions = node.step(Event::Cancel { transfer: TransferId(1) });
    assert!(matches!(actions[..], [Action::Revoke { batch: BatchId(1), .. }]));
    assert_eq!(ended(&node.failed(1, 1, BatchFailure::NotBegun)), []);
    assert_eq!(ended(&node.done(1, 0)), [(1, TransferOutcome::Cancelled)]);
}

#[test]
fn a_lost_gpu_frees_its_links() {
    let mut node = Node::new(1);
    let start = node.now;
    node.start(1, 0, 40);
    assert_eq!(node.step(Event::Down { gpu: GpuIndex(0) }), []);
    assert_eq!(grants(&node.start(2, 1, 5), start), [(2, 0, 0..5, Duration::ZERO)]);
    assert_eq!(node.done(1, 0), []);
}
