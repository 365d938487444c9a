//! Tests of host transfers that neighbours forward (D05).

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::super::host_link_shares::GrantReason;
use super::*;
use crate::paths::{HostLinks, RouteHops};
use crate::rates::SHARINGS;
use millrace_core::ids::ObjectKey;

/// GPUs 0 and 1 share an uplink; each other GPU has its own. GPU 1 has no NVLinks.
const GPUS: u32 = 5;
const JOINED: [(u32, u32); 4] = [(0, 2), (0, 3), (2, 3), (3, 4)];
/// The first NVLink, after the PCIe links and the uplink.
const NVLINKS: u32 = GPUS + 1;

fn machine(nvlink: u64) -> Topology {
    let link = |kind, rate| TopologyLink { kind, rate: BytesPerSec(rate) };
    let gpu = |index: u32| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "test".to_owned(),
        memory: Bytes::gib(1),
        host_path: [index, GPUS].into_iter().map(LinkId).take(if index < 2 { 2 } else { 1 }).collect(),
    };
    let mut links = vec![link(LinkKind::Pcie, RATE.0); GPUS as usize];
    links.push(link(LinkKind::PcieUplink, RATE.0));
    let join = |&(a, b): &(u32, u32)| link(LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) }, nvlink);
    links.extend(JOINED.iter().map(join));
    Topology { name: "forwards".to_owned(), gpus: (0..GPUS).map(gpu).collect(), links }
}

fn node_of(nvlink: u64, sharing: TransferSharing, links: HostLinks) -> Node {
    let fabric = LinkScheduler::with_sharing(&machine(nvlink), sharing).with_host_links(links);
    Node { fabric, now: Timestamp(1 << 40), actions: Vec::new() }
}

fn node() -> Node {
    node_of(2 * RATE.0, TransferSharing::Fair, HostLinks::All)
}

fn hops(gpus: &[u32]) -> RouteHops {
    RouteHops::of(gpus.iter().map(|&gpu| GpuIndex(gpu)))
}

/// Returns the object that is named after a transfer.
fn reload(transfer: u64, bytes: Bytes) -> TransferCargo {
    let object = ObjectKey(transfer);
    TransferCargo::Object(ObjectPiece { object, of: object, offset: Bytes::ZERO, bytes })
}

fn granted(actions: &[Action]) -> Vec<BatchGrant> {
    let grant =
        |action: &Action| if let Action::Grant { grant } = action { Some(grant.clone()) } else { None };
    actions.iter().filter_map(grant).collect()
}

/// Returns the forwarded grants: the chunks, the link that issues the grant, and the GPUs.
fn forwarded(actions: &[Action]) -> Vec<(Range<u32>, LinkId, RouteHops)> {
    let via = |grant: BatchGrant| Some((grant.chunks, grant.link, grant.via?));
    granted(actions).into_iter().filter_map(via).collect()
}

#[test]
fn batches_without_room_on_the_own_link_are_forwarded_by_idle_neighbours() {
    for cargo in [weights, reload] {
        let mut node = node();
        let start = node.now;
        let actions = node.start_of(cargo, 1, 0, 100, None);
        let own = [(1, 0, 0..5, Duration::ZERO), (1, 1, 5..10, BATCH_TIME)];
        let others = [(1, 2, 10..15, Duration::ZERO), (1, 3, 15..20, Duration::ZERO)];
        assert_eq!(grants(&actions, start), [own, others].concat());
        let by_2 = (10..15, LinkId(NVLINKS), hops(&[2, 0]));
        let by_3 = (15..20, LinkId(NVLINKS + 1), hops(&[3, 0]));
        // GPU 4's link is idle, but the NVLink from GPU 3 is not.
        assert_eq!(forwarded(&actions), [by_2, by_3]);
        node.now = start + BATCH_TIME;
        let actions = node.done(1, 2);
        let direction = HostDirection::ToGpu;
        let size = Bytes(CHUNK.0 * 5);
        assert!(actions.contains(&Action::Carried { link: LinkId(2), direction, size }), "{actions:?}");
        assert_eq!(forwarded(&actions), [(20..25, LinkId(NVLINKS), hops(&[2, 0]))]);
        assert_eq!(grants(&actions, start), [(1, 4, 20..25, BATCH_TIME)]);
    }
}

#[test]
fn no_batch_is_forwarded_unless_all_host_links_may_be_used() {
    let mut node = node_of(2 * RATE.0, TransferSharing::Fair, HostLinks::Own);
    assert_eq!(granted(&node.start(1, 0, 100)).len(), 2);
    assert_eq!(granted(&node.leave(2, 0, 100)).len(), 2);
    let mut node = self::node();
    // GPU 1 has only its own link.
    assert_eq!(forwarded(&node.start(1, 1, 100)), []);
    assert_eq!(forwarded(&node.leave(2, 1, 100)), []);
}

#[test]
fn data_for_the_host_is_forwarded_by_idle_neighbours() {
    let mut node = node();
    let start = node.now;
    let by_2 = |chunks: Range<u32>| (chunks, LinkId(NVLINKS), hops(&[0, 2]));
    let by_3 = |chunks: Range<u32>| (chunks, LinkId(NVLINKS + 1), hops(&[0, 3]));
    assert_eq!(forwarded(&node.leave(1, 0, 100)), [by_2(10..15), by_3(15..20)]);
    // Data from the host has the same links in the other direction.
    assert_eq!(forwarded(&node.start(2, 0, 100)).len(), 2);
    node.now = start + BATCH_TIME;
    let actions = node.done(1, 2);
    let direction = HostDirection::FromGpu;
    let size = Bytes(CHUNK.0 * 5);
    assert!(actions.contains(&Action::Carried { link: LinkId(2), direction, size }), "{actions:?}");
    assert_eq!(forwarded(&actions), [by_2(20..25)]);
}

#[test]
fn a_neighbour_that_would_be_later_forwards_nothing() {
    for (nvlink, ways) in [(RATE.0 / 3 + 1, 2), (RATE.0 / 4, 0)] {
        let mut node = node_of(nvlink, TransferSharing::Fair, HostLinks::All);
        assert_eq!(forwarded(&node.start(1, 0, 100)).len(), ways);
    }
}

#[test]
fn a_neighbour_under_an_uplink_in_use_forwards_nothing() {
    let mut node = node();
    node.start(1, 1, 100);
    let forwarded = forwarded(&node.start(2, 2, 100));
    assert_eq!(forwarded.iter().map(|(_, _, way)| *way).collect::<Vec<_>>(), [hops(&[3, 2])]);
}

/// D13, at the neighbour's own link.
#[test]
fn a_new_transfer_on_a_forwarding_link_waits_for_the_crossing_batch() {
    let mut node = node();
    let start = node.now;
    node.start(1, 0, 100);
    node.now = start + BATCH_TIME / 4;
    let actions = node.start(2, 2, 20);
    // GPU 4 forwards a batch for the transfer as well.
    assert_eq!(grants(&actions, start), [(2, 0, 0..5, BATCH_TIME), (2, 1, 5..10, BATCH_TIME / 4)]);
    assert_eq!(forwarded(&actions), [(5..10, LinkId(NVLINKS + 2), hops(&[4, 3, 2]))]);
    node.now = start + BATCH_TIME;
    let actions = node.done(1, 2);
    assert_eq!(grants(&actions, start), [(2, 2, 10..15, BATCH_TIME * 2)]);
    assert_eq!(forwarded(&actions), [], "GPU 2 has more to send over this link");
}

/// Copies may be faster than the rates of their links.
#[test]
fn a_forwarding_link_is_free_once_the_last_batch_would_have_crossed() {
    let mut node = node();
    let start = node.now;
    node.start(1, 0, 100);
    node.now = start + BATCH_TIME / 2;
    assert_eq!(granted(&node.done(1, 2)), []);
    assert_eq!(node.fabric.next_wake(), Some(start + BATCH_TIME));
    node.now = start + BATCH_TIME;
    let actions = node.step(Event::Tick);
    assert_eq!(grants(&actions, start), [(1, 4, 20..25, BATCH_TIME)]);
    assert_eq!(forwarded(&actions), [(20..25, LinkId(NVLINKS), hops(&[2, 0]))]);
    assert!(node.fabric.next_wake().unwrap() > start + BATCH_TIME * 3, "when the first is overdue");
}

#[test]
fn after_a_forwarded_batch_fails_the_rest_takes_the_own_link() {
    let mut machine = Machine::of(node());
    machine.start(weights, 1, 0, 60, None);
    let actions = machine.node.failed(1, 2, BatchFailure::Faulty);
    assert_eq!(forwarded(&actions), []);
    machine.out.retain(|grant| grant.batch != BatchId(2));
    machine.take(actions).unwrap();
    while machine.copy().unwrap() {}
    assert_eq!(machine.ended, [(1, TransferOutcome::Complete)]);
    assert_eq!(machine.forwarded, 2, "the batches in flight");
}

#[test]
fn three_routes_are_three_times_as_fast() {
    for sharing in SHARINGS.map(|(_, sharing)| sharing) {
        for cargo in [weights, leaving] {
            let mut machine = Machine::of(node_of(2 * RATE.0, sharing, HostLinks::All));
            let start = machine.node.now;
            machine.start(cargo, 1, 0, 300, Some(5_000));
            while machine.copy().unwrap() {}
            let batches = machine.node.now.since(start).as_secs_f64() / BATCH_TIME.as_secs_f64();
            assert!((19.5..22.0).contains(&batches), "{sharing:?}: {batches} of 60");
        }
    }
}

/// Returns, by chunk, the time from the start until the chunk of a transfer arrives that has its
/// own link to itself.
fn arrivals(links: HostLinks, chunks: u32) -> BTreeMap<u32, Duration> {
    let mut machine = Machine::of(node_of(2 * RATE.0, TransferSharing::Fair, links));
    let start = machine.node.now;
    let mut there = BTreeMap::new();
    machine.start(weights, 1, 0, chunks, None);
    while let Some(grant) = machine.take_next() {
        let now = machine.node.now.since(start);
        there.extend(grant.chunks.clone().map(|chunk| (chunk, now)));
        let actions = machine.node.done(1, grant.batch.0);
        machine.take(actions).unwrap();
    }
    there
}

/// Runs wait for weights in the order of the chunks.
#[test]
fn forwarding_delays_no_chunk() {
    for chunks in [1, 5, 6, 10, 11, 19, 20, 41, 113] {
        let own = arrivals(HostLinks::Own, chunks);
        let all = arrivals(HostLinks::All, chunks);
        assert_eq!((own.len(), all.len()), (chunks as usize, chunks as usize));
        assert!(own.iter().all(|(chunk, at)| all[chunk] <= *at), "{own:?} {all:?}");
    }
}

/// Forwarded batches are reported for a flow with a rate, and its guarantee is kept.
#[test]
fn a_rate_guarantee_is_kept_while_batches_are_forwarded() {
    let mut machine = Machine::of(node_of(2 * RATE.0, TransferSharing::FaasTube, HostLinks::All));
    machine.start(weights, 1, 0, 200, Some(1_500));
    machine.start(reload, 2, 0, 100, Some(1_000));
    while machine.copy().unwrap() {}
    let counts = GuaranteeCounts { admitted: 2, ..GuaranteeCounts::default() };
    assert_eq!((machine.ended.len(), machine.node.fabric.tally().ended.to_gpu), (2, counts));
}

/// The rate guarantee of a transfer that a request begins to wait for covers the bytes that were
/// not granted by then.
#[test]
fn batches_forwarded_before_a_request_waits_are_not_part_of_the_guarantee() {
    let mut node = node_of(2 * RATE.0, TransferSharing::FaasTube, HostLinks::All);
    let promised = |node: &Node| -> Vec<bool> {
        let out = node.fabric.transfers[&TransferId(1)].out.iter();
        let forwarded = |turn: &GrantReason| {
            if let GrantReason::Forwarded { promised } = turn { Some(*promised) } else { None }
        };
        out.filter_map(|batch| forwarded(&batch.turn)).collect()
    };
    node.start(1, 0, 100);
    node.step(Event::Hasten { transfer: TransferId(1), objective: within(2_000) });
    assert_eq!(promised(&node), [false, false]);
    node.now = node.now + BATCH_TIME;
    node.done(1, 2);
    assert_eq!(promised(&node), [false, true]);
}

/// Executors that copy every granted batch, one after the other on each link. A batch that is
/// revoked before its start has not begun.
struct Machine {
    node: Node,
    out: Vec<BatchGrant>,
    /// The chunks that have arrived, by transfer.
    come: BTreeMap<u64, BTreeSet<u32>>,
    ended: Vec<(u64, TransferOutcome)>,
    /// The number of batches that neighbours forwarded.
    forwarded: usize,
}

/// Returns the uplink that a GPU shares.
fn switch(gpu: GpuIndex) -> u32 {
    if gpu.0 < 2 { 0 } else { gpu.0 }
}

impl Machine {
    fn of(node: Node) -> Self {
        Self { node, out: Vec::new(), come: BTreeMap::new(), ended: Vec::new(), forwarded: 0 }
    }

    fn start(
        &mut self,
        cargo: fn(u64, Bytes) -> TransferCargo,
        transfer: u64,
        gpu: u32,
        chunks: u32,
        ms: Option<u64>,
    ) {
        let actions = self.node.start_of(cargo, transfer, gpu, chunks, ms);
        self.take(actions).unwrap();
    }

    fn take(&mut self, actions: Vec<Action>) -> Result<(), TestCaseError> {
        self.ended.extend(ended(&actions));
        let mut revoked = Vec::new();
        for action in actions {
            match action {
                Action::Grant { grant } => {
                    if grant.via.is_some() {
                        self.forwarded += 1;
                        let direction = grant.cargo.direction();
                        let by = |grant: &BatchGrant| match (grant.via, direction) {
                            (Some(via), HostDirection::ToGpu) => switch(via.first()),
                            (Some(via), HostDirection::FromGpu) => switch(via.last()),
                            (None, _) => switch(grant.gpu),
                        };
                        let mut same_way = self.out.iter().filter(|it| it.cargo.direction() == direction);
                        let busy = same_way.any(|other| by(other) == by(&grant));
                        prop_assert!(!busy, "{grant:?} over a link in use: {:?}", self.out);
                        prop_assert_ne!(by(&grant), switch(grant.gpu));
                    }
                    self.out.push(grant);
                }
                Action::Revoke { transfer, batch, .. } => revoked.push((transfer, batch)),
                Action::Arrived { cargo, chunks, .. } => {
                    let transfer = match cargo {
                        TransferCargo::Weights(weights) => u64::from(weights.model.0),
                        TransferCargo::Object(piece) => piece.object.0,
                        TransferCargo::ToHost(leaving) => leaving.copy,
                    };
                    for chunk in chunks {
                        prop_assert!(self.come.entry(transfer).or_default().insert(chunk), "{chunk} twice");
                    }
                }
                _ => {}
            }
        }
        for (transfer, batch) in revoked {
            let now = self.node.now;
            let its = |grant: &BatchGrant| {
                (grant.transfer, grant.batch) == (transfer, batch) && grant.not_before > now
            };
            if let Some(place) = self.out.iter().position(its) {
                self.out.remove(place);
                let actions = self.node.failed(transfer.0, batch.0, BatchFailure::NotBegun);
                self.take(actions)?;
            }
        }
        Ok(())
    }

    /// Removes the batch with the earliest end from the batches in flight, at its end.
    fn take_next(&mut self) -> Option<BatchGrant> {
        let end = |grant: &BatchGrant| grant.not_before + RATE.time_for(grant.cargo.span(&grant.chunks).1);
        let place = (0..self.out.len()).min_by_key(|&place| (end(&self.out[place]), place))?;
        let grant = self.out.remove(place);
        self.node.now = self.node.now.max(end(&grant));
        Some(grant)
    }

    /// Ends the batch with the earliest end. Returns false if no batch is in flight.
    fn copy(&mut self) -> Result<bool, TestCaseError> {
        let Some(grant) = self.take_next() else { return Ok(false) };
        let actions = self.node.done(grant.transfer.0, grant.batch.0);
        self.take(actions)?;
        Ok(true)
    }
}

/// A transfer to start: cargo, GPU, number of chunks, and milliseconds until the deadline.
type Begins = (fn(u64, Bytes) -> TransferCargo, u32, u32, Option<u64>);

fn begins(gpus: Range<u32>) -> impl Strategy<Value = Begins> {
    let cargo = prop_oneof![
        Just(weights as fn(u64, Bytes) -> TransferCargo),
        Just(reload as fn(u64, Bytes) -> TransferCargo),
        Just(leaving as fn(u64, Bytes) -> TransferCargo),
    ];
    (cargo, gpus, 1..60u32, prop::option::of(0..800u64))
}

fn sharings() -> impl Strategy<Value = TransferSharing> {
    (0..SHARINGS.len()).prop_map(|at| SHARINGS[at].1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// For transfers that start at any time, and any neighbour that fails.
    #[test]
    fn every_chunk_arrives_once_and_no_link_stays_occupied(
        sharing in sharings(),
        all in prop::collection::vec((begins(0..GPUS), 0..6u32), 1..25),
        fails in 2..9usize,
    ) {
        let mut machine = Machine::of(node_of(2 * RATE.0, sharing, HostLinks::All));
        let mut expected = BTreeMap::new();
        for (transfer, ((cargo, gpu, chunks, ms), copies)) in (1..).zip(all) {
            machine.start(cargo, transfer, gpu, chunks, ms);
            expected.insert(transfer, (0..chunks).collect::<BTreeSet<_>>());
            for _ in 0..copies {
                machine.copy()?;
            }
            // From time to time an operator permits or forbids forwarding.
            let host_links = match copies {
                4 => HostLinks::Own,
                5 => HostLinks::All,
                _ => continue,
            };
            let actions = machine.node.step(Event::Change { sharing, host_links });
            machine.take(actions)?;
        }
        let mut forwards = 0;
        while let Some(grant) = machine.take_next() {
            forwards += usize::from(grant.via.is_some());
            let transfer = grant.transfer.0;
            let batch = grant.batch.0;
            let actions = if grant.via.is_some() && forwards % fails == 0 {
                machine.node.failed(transfer, batch, BatchFailure::Faulty)
            } else {
                machine.node.done(transfer, batch)
            };
            machine.take(actions)?;
        }
        prop_assert_eq!(&machine.come, &expected);
        prop_assert!(machine.ended.iter().all(|(_, outcome)| *outcome == TransferOutcome::Complete));
        prop_assert_eq!(machine.ended.len(), expected.len());
        prop_assert_eq!(machine.node.fabric.in_flight(), 0);
        prop_assert!(machine.node.fabric.lanes.iter().all(|lane| lane.outstanding() == 0));
        prop_assert_eq!(machine.node.fabric.next_wake(), None);
    }

    /// The links are the new transfer's own: forwarded batches delay the transfer by a single batch
    /// at most.
    #[test]
    fn a_new_transfer_waits_for_at_most_one_forwarded_batch(
        sharing in sharings(),
        others in prop::collection::vec(begins(0..2), 1..8),
        before in 0..40usize,
        (gpu, chunks, ms) in (2..GPUS, 1..60u32, prop::option::of(100..900u64)),
    ) {
        let mut machine = Machine::of(node_of(2 * RATE.0, sharing, HostLinks::All));
        for (transfer, (cargo, gpu, chunks, ms)) in (1..).zip(others) {
            machine.start(cargo, transfer, gpu, chunks, ms);
        }
        for _ in 0..before {
            machine.copy()?;
        }
        let start = machine.node.now;
        machine.start(weights, 100, gpu, chunks, ms);
        while machine.ended.iter().all(|(transfer, _)| *transfer != 100) {
            prop_assert!(machine.copy()?);
        }
        let took = machine.node.now.since(start);
        let alone = BATCH_TIME * chunks.div_ceil(BATCH_CHUNKS.get());
        prop_assert!(took <= alone + BATCH_TIME, "{:?} instead of {:?}", took, alone);
    }
}
