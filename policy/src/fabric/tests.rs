use std::collections::VecDeque;

use millrace_types::topology::{Gpu, Link, LinkKind};
use millrace_types::{BytesPerSec, ModelId};
use proptest::prelude::*;

use super::*;
use crate::ids::Generation;

mod peers;

const RATE: BytesPerSec = BytesPerSec(1 << 30);
/// A batch of five chunks at that rate.
const BATCH_TIME: Duration = Duration::from_nanos(9_765_625);
const LINK_3: LinkId = LinkId(3);

/// GPUs 0 and 1 share an uplink that is `uplink` times as fast as their own links; GPU 2 is alone.
fn topology(uplink: u64) -> Topology {
    let link = |kind, times| Link { kind, rate: BytesPerSec(RATE.0 * times) };
    let gpu = |index: u32, path: &[u32]| Gpu {
        index: GpuIndex(index),
        gpu_type: "test".to_owned(),
        memory: Bytes::gib(1),
        host_path: path.iter().copied().map(LinkId).collect(),
    };
    Topology {
        name: "test".to_owned(),
        gpus: vec![gpu(0, &[0, 3]), gpu(1, &[1, 3]), gpu(2, &[2])],
        links: vec![
            link(LinkKind::Pcie, 1),
            link(LinkKind::Pcie, 1),
            link(LinkKind::Pcie, 1),
            link(LinkKind::PcieUplink, uplink),
        ],
    }
}

struct Node {
    fabric: Fabric,
    now: Timestamp,
    actions: Vec<Action>,
}

impl Node {
    fn new(uplink: u64) -> Self {
        Self { fabric: Fabric::new(&topology(uplink)), now: Timestamp(1 << 40), actions: Vec::new() }
    }

    fn step(&mut self, event: Event) -> Vec<Action> {
        let mut actions = std::mem::take(&mut self.actions);
        self.fabric.on_event(self.now, event, &mut actions);
        for lane in &self.fabric.lanes {
            assert!(lane.outstanding() <= lane.tracks() + 1, "{:?} is overbooked", lane.link);
        }
        let batches = || self.fabric.transfers.values().flat_map(|transfer| &transfer.out);
        for route in self.fabric.paths.keys() {
            let out = batches().filter(|batch| batch.route == *route).count();
            assert!(out <= 2, "{route:?} has three out");
        }
        actions
    }

    fn start(&mut self, transfer: u64, gpu: u32, chunks: u32) -> Vec<Action> {
        // The last chunk is half a chunk.
        let weights = Bytes(BLOCK.0 * u64::from(chunks) - BLOCK.0 / 2);
        let cargo = Cargo { model: ModelId(transfer as u32), generation: Generation(1), weights };
        let (transfer, gpu) = (TransferId(transfer), GpuIndex(gpu));
        let chunks = std::iter::once(0..chunks).collect();
        self.step(Event::Start { transfer, gpu, cargo, chunks, from: None })
    }

    fn done(&mut self, transfer: u64, batch: u64) -> Vec<Action> {
        self.step(Event::Done { transfer: TransferId(transfer), batch: BatchId(batch) })
    }

    fn failed(&mut self, transfer: u64, batch: u64, why: BatchFailure) -> Vec<Action> {
        self.step(Event::Failed { transfer: TransferId(transfer), batch: BatchId(batch), why })
    }
}

/// The grants among some actions: transfer, batch, chunks, and when they may begin from `start` on.
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

fn ended(actions: &[Action]) -> Vec<(u64, Outcome)> {
    let ended = |action: &Action| match *action {
        Action::Ended { transfer, outcome, .. } => Some((transfer.0, outcome)),
        _ => None,
    };
    actions.iter().filter_map(ended).collect()
}

#[test]
fn a_transfer_goes_batch_by_batch_paced_at_the_links_rate() {
    let mut node = Node::new(1);
    let start = node.now;
    let actions = node.start(1, 2, 13);
    assert_eq!(grants(&actions, start), [(1, 0, 0..5, Duration::ZERO), (1, 1, 5..10, BATCH_TIME)]);
    // It was copied faster than the link: the next one still waits for the link's time.
    let actions = node.done(1, 0);
    assert_eq!(grants(&actions, start), [(1, 2, 10..13, BATCH_TIME * 2)]);
    assert!(matches!(&actions[0], Action::Arrived { chunks, .. } if *chunks == (0..5)));
    assert_eq!(ended(&node.done(1, 1)), []);
    assert_eq!(ended(&node.done(1, 2)), [(1, Outcome::Complete)]);
    assert_eq!(node.fabric.in_flight(), 0);
}

#[test]
fn the_last_chunk_is_short() {
    let cargo = Cargo { model: ModelId(0), generation: Generation(0), weights: Bytes(BLOCK.0 * 6 + 7) };
    assert_eq!(cargo.span(&(5..7)), (Bytes(BLOCK.0 * 5), Bytes(BLOCK.0 + 7)));
}

#[test]
fn two_that_share_a_link_take_turns() {
    let mut node = Node::new(1);
    let start = node.now;
    // Both may be out at one time, but never to cross the uplink at the same time.
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
fn a_newcomer_is_served_after_the_batch_that_runs() {
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
fn a_stream_of_newcomers_starves_nobody() {
    let mut node = Node::new(1);
    let mut actions = node.start(1, 0, 400);
    let (mut newcomer, mut there) = (1, false);
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
fn a_wide_uplink_serves_both_at_full_rate() {
    let mut node = Node::new(2);
    let start = node.now;
    let actions = [node.start(1, 0, 20), node.start(2, 1, 20)].concat();
    let begins: Vec<_> =
        grants(&actions, start).into_iter().map(|(transfer, _, _, begin)| (transfer, begin)).collect();
    assert_eq!(begins, [(1, Duration::ZERO), (1, BATCH_TIME), (2, Duration::ZERO)]);
}

#[test]
fn failures_are_tried_again_and_end_a_transfer_in_the_end() {
    let mut node = Node::new(1);
    let start = node.now;
    node.start(1, 2, 5);
    let faulty = BatchFailure::Faulty;
    assert_eq!(grants(&node.failed(1, 0, faulty), start).len(), 1);
    assert_eq!(grants(&node.failed(1, 1, faulty), start).len(), 1);
    assert_eq!(ended(&node.failed(1, 2, faulty)), [(1, Outcome::Failed)]);
    assert_eq!(node.fabric.in_flight(), 0);
}

#[test]
fn a_batch_that_nobody_reports_is_granted_again() {
    let mut node = Node::new(1);
    let start = node.now;
    node.start(1, 2, 5);
    let give_up = node.fabric.next_wake().unwrap();
    node.now = give_up;
    assert_eq!(grants(&node.step(Event::Tick), start).len(), 1);
    assert_eq!(node.done(1, 0), [], "too late");
    assert_eq!(ended(&node.done(1, 1)), [(1, Outcome::Complete)]);
}

#[test]
fn a_cancelled_transfer_ends_with_what_is_out() {
    let mut node = Node::new(1);
    node.start(1, 2, 40);
    let actions = node.step(Event::Cancel { transfer: TransferId(1) });
    assert!(matches!(actions[..], [Action::Revoke { batch: BatchId(1), .. }]));
    assert_eq!(ended(&node.failed(1, 1, BatchFailure::NotBegun)), []);
    assert_eq!(ended(&node.done(1, 0)), [(1, Outcome::Cancelled)]);
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

#[derive(Debug, Clone, Copy)]
enum Step {
    Start {
        gpu: u32,
        chunks: u32,
    },
    /// The first batch out of a GPU ends well.
    Done(u32),
    Faulty(u32),
    /// What was revoked and has not begun is given back.
    Acknowledge,
    Cancel(usize),
    Down(u32),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..3u32, 1..40u32).prop_map(|(gpu, chunks)| Step::Start { gpu, chunks }),
        10 => (0..3u32).prop_map(Step::Done),
        1 => (0..3u32).prop_map(Step::Faulty),
        3 => Just(Step::Acknowledge),
        1 => any::<usize>().prop_map(Step::Cancel),
        1 => (0..3u32).prop_map(Step::Down),
        3 => (0..20u64).prop_map(Step::Pass),
    ]
}

/// Executors as the fabric sees them: what they were granted and have not answered, in order.
struct World {
    uplink: u64,
    out: Vec<(Grant, bool)>,
    /// Chunks that have not arrived, by transfer.
    missing: BTreeMap<TransferId, (GpuIndex, u32)>,
}

/// Whether two batches take their links' whole rate at different times.
fn apart(a: &Grant, b: &Grant) -> bool {
    let end = |grant: &Grant| grant.not_before + RATE.time_for(grant.cargo.span(&grant.chunks).1);
    end(a) <= b.not_before || end(b) <= a.not_before
}

impl World {
    /// Whether only one of two batches can cross at a time.
    fn share_a_track(&self, a: &Grant, b: &Grant) -> bool {
        a.gpu == b.gpu || (self.uplink == 1 && a.gpu.0 < 2 && b.gpu.0 < 2)
    }

    fn take(&mut self, actions: Vec<Action>) -> Result<(), TestCaseError> {
        for action in actions {
            match action {
                Action::Grant { grant, .. } => {
                    for (other, _) in self.out.iter().filter(|(other, _)| self.share_a_track(&grant, other)) {
                        prop_assert!(apart(&grant, other), "{grant:?} and {other:?} cross at one time");
                    }
                    prop_assert!(
                        grant.chunks.len() <= BATCH_CHUNKS.get() as usize && !grant.chunks.is_empty()
                    );
                    prop_assert!(grant.not_before < grant.not_after);
                    self.out.push((grant, false));
                }
                Action::Revoke { transfer, batch, .. } => {
                    let found = self.out.iter_mut().find(|(g, _)| (g.transfer, g.batch) == (transfer, batch));
                    found.unwrap().1 = true;
                }
                Action::Arrived { model, chunks, .. } => {
                    let transfer = TransferId(model.0.into());
                    self.missing.get_mut(&transfer).unwrap().1 -= chunks.len() as u32;
                }
                Action::Ended { transfer, outcome, .. } => {
                    let (_, missing) = self.missing.remove(&transfer).unwrap();
                    prop_assert_eq!(outcome == Outcome::Complete, missing == 0);
                    prop_assert!(self.out.iter().all(|(grant, _)| grant.transfer != transfer));
                }
                Action::Carried { .. } => {}
                Action::Lock { .. } | Action::Unlock { .. } => unreachable!("all comes from the host"),
            }
        }
        Ok(())
    }

    fn first_of(&mut self, gpu: u32) -> Option<Grant> {
        let place = self.out.iter().position(|(grant, _)| grant.gpu.0 == gpu)?;
        Some(self.out.remove(place).0)
    }

    /// A revoked batch that is not the first of its GPU, so that it has not begun.
    fn revoked(&mut self) -> Option<Grant> {
        let begun = |place: usize| !self.out[..place].iter().any(|(g, _)| g.gpu == self.out[place].0.gpu);
        let place = (0..self.out.len()).find(|&place| self.out[place].1 && !begun(place))?;
        Some(self.out.remove(place).0)
    }
}

proptest! {
    #[test]
    fn nothing_is_lost_no_link_is_overbooked_and_all_comes_to_rest(
        uplink in 1..3u64,
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut node = Node::new(uplink);
        let mut world = World { uplink, out: Vec::new(), missing: BTreeMap::new() };
        let mut next = 0;
        for step in steps {
            let actions = match step {
                Step::Start { gpu, chunks } => {
                    next += 1;
                    world.missing.insert(TransferId(next), (GpuIndex(gpu), chunks));
                    node.start(next, gpu, chunks)
                }
                Step::Done(gpu) => {
                    let Some(grant) = world.first_of(gpu) else { continue };
                    node.now = node.now.max(grant.not_before);
                    node.done(grant.transfer.0, grant.batch.0)
                }
                Step::Faulty(gpu) => {
                    let Some(grant) = world.first_of(gpu) else { continue };
                    node.failed(grant.transfer.0, grant.batch.0, BatchFailure::Faulty)
                }
                Step::Acknowledge => {
                    let Some(grant) = world.revoked() else { continue };
                    node.failed(grant.transfer.0, grant.batch.0, BatchFailure::NotBegun)
                }
                Step::Cancel(number) => {
                    let Some(&transfer) = world.missing.keys().nth(number % world.missing.len().max(1)) else { continue };
                    node.step(Event::Cancel { transfer })
                }
                Step::Down(gpu) => {
                    world.out.retain(|(grant, _)| grant.gpu.0 != gpu);
                    world.missing.retain(|_, (at, _)| at.0 != gpu);
                    node.step(Event::Down { gpu: GpuIndex(gpu) })
                }
                Step::Pass(ms) => {
                    node.now = node.now + Duration::from_millis(ms);
                    continue;
                }
            };
            world.take(actions)?;
            prop_assert!(world.missing.is_empty() || !world.out.is_empty(), "links idle while bytes wait");
        }
        while !world.out.is_empty() {
            let (grant, _) = world.out.remove(0);
            let actions = node.done(grant.transfer.0, grant.batch.0);
            world.take(actions)?;
        }
        prop_assert!(world.missing.is_empty());
        prop_assert_eq!(node.fabric.in_flight(), 0);
        prop_assert!(node.fabric.lanes.iter().all(|lane| lane.outstanding() == 0));
        prop_assert_eq!(node.fabric.next_wake(), None);
    }
}
