//! Objects between GPUs (D07, D20 to D22), as tables; in any order of events in [`properties`].

mod properties;

use millrace_types::Incarnation;

use super::*;
use millrace_core::ids::ObjectKey;
use millrace_memory::{BlockRun, BlockSize};

/// A ring of four GPUs, with GPUs 0 and 2 also joined across at twice the rate. GPU 4 has no
/// NVLinks.
const JOINED: [(u32, u32, u64); 5] = [(0, 1, 1), (1, 2, 1), (2, 3, 1), (0, 3, 1), (0, 2, 2)];
const GPUS: u32 = 5;
const NVLINK_RATE: u64 = 8 * RATE.0;

fn node() -> Node {
    let link = |kind, rate| TopologyLink { kind, rate: BytesPerSec(rate) };
    let gpu = |index: u32| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "test".to_owned(),
        memory: Bytes::gib(1),
        host_path: vec![LinkId(index)],
    };
    let mut links = vec![link(LinkKind::Pcie, RATE.0); GPUS as usize];
    let join = |&(a, b, times): &(u32, u32, u64)| {
        link(LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) }, NVLINK_RATE * times)
    };
    links.extend(JOINED.iter().map(join));
    let topology = Topology { name: "ring".to_owned(), gpus: (0..GPUS).map(gpu).collect(), links };
    Node { fabric: LinkScheduler::new(&topology), now: Timestamp(1 << 40), actions: Vec::new() }
}

fn object(transfer: u64, chunks: u32) -> TransferCargo {
    let object = ObjectKey(transfer);
    let of = ObjectKey(1000 + transfer);
    TransferCargo::Object(ObjectPiece {
        object,
        of,
        offset: Bytes::ZERO,
        bytes: Bytes(CHUNK.0 * u64::from(chunks)),
    })
}

/// Returns the blocks of an object of `chunks` chunks on a GPU.
fn there(gpu: u32, chunks: u32) -> PeerBlocks {
    let blocks = vec![BlockRun { start: 7, len: chunks }];
    PeerBlocks {
        gpu: GpuIndex(gpu),
        incarnation: Incarnation(1),
        blocks,
        block: BlockSize::DEFAULT,
        skip: Bytes::ZERO,
    }
}

impl Node {
    fn ask(&mut self, transfer: u64, from: Option<u32>, to: u32, chunks: u32) -> Vec<Action> {
        let cargo = object(transfer, chunks);
        let gpu = GpuIndex(to);
        let from = from.map(GpuIndex);
        let transfer = TransferId(transfer);
        let chunks = std::iter::once(0..chunks).collect();
        self.step(Event::Start { transfer, gpu, cargo, chunks, from, objective: None })
    }

    fn kept(&mut self, transfer: u64, from: u32, chunks: u32) -> Vec<Action> {
        self.step(Event::Locked { transfer: TransferId(transfer), peer: there(from, chunks) })
    }

    /// Starts the copy of an object, and has its GPU lock the object.
    fn bring(&mut self, transfer: u64, from: u32, to: u32, chunks: u32) -> Vec<Action> {
        let cargo = object(transfer, chunks);
        let lock = Action::Lock { gpu: GpuIndex(from), transfer: TransferId(transfer), cargo };
        assert_eq!(self.ask(transfer, Some(from), to, chunks), [lock]);
        self.kept(transfer, from, chunks)
    }

    /// Returns the routes of a transfer.
    fn routes(&self, transfer: u64) -> Vec<Vec<u32>> {
        let state = &self.fabric.transfers[&TransferId(transfer)];
        state.routes.iter().map(|route| gpus(&route.hops().unwrap())).collect()
    }

    fn at_rest(&self) -> bool {
        let lanes = self.fabric.lanes.iter();
        let idle = lanes.into_iter().all(|lane| lane.outstanding() == 0 && lane.routes() == 0);
        let routes = self.fabric.routes.as_ref().unwrap();
        let pairs = (0..GPUS).flat_map(|a| (0..GPUS).map(move |b| (GpuIndex(a), GpuIndex(b))));
        idle && pairs.into_iter().all(|(a, b)| routes.rate_left(a, b) == routes.capacity(a, b))
    }
}

fn gpus(hops: &crate::paths::RouteHops) -> Vec<u32> {
    hops.as_slice().iter().map(|gpu| gpu.0).collect()
}

fn outcome(actions: &[Action]) -> Option<(TransferOutcome, Vec<Vec<u32>>)> {
    actions.iter().find_map(|action| match action {
        Action::Ended { outcome, routes, .. } => Some((*outcome, routes.iter().map(gpus).collect())),
        _ => None,
    })
}

/// Ends batches in the order of their grants until a transfer has ended.
fn finish(node: &mut Node, actions: &[Action], transfer: u64) -> (TransferOutcome, Vec<Vec<u32>>) {
    let mut out: VecDeque<BatchGrant> = all_grants(actions).collect();
    while let Some(grant) = out.pop_front() {
        node.now = node.now.max(grant.not_before + BATCH_TIME / 8);
        let actions = node.done(grant.transfer.0, grant.batch.0);
        out.extend(all_grants(&actions));
        if grant.transfer.0 == transfer
            && let Some(outcome) = outcome(&actions)
        {
            return outcome;
        }
    }
    panic!("the transfer did not end")
}

fn all_grants(actions: &[Action]) -> impl Iterator<Item = BatchGrant> {
    let grant =
        |action: &Action| if let Action::Grant { grant } = action { Some(grant.clone()) } else { None };
    actions.iter().filter_map(grant).collect::<Vec<_>>().into_iter()
}

#[test]
fn an_object_uses_every_free_route_and_all_links_of_a_route_at_once() {
    let mut node = node();
    let actions = node.bring(1, 0, 1, 100);
    assert_eq!(node.routes(1), [vec![0, 1], vec![0, 2, 1]]);
    // Each route has two batches, granted by the link nearest to the destination.
    let links: Vec<_> = all_grants(&actions).map(|grant| grant.link.0 - GPUS).collect();
    let by = |link| links.iter().filter(|&&it| it == link).count();
    assert_eq!((by(0), by(1), links.len()), (2, 2, 4));
    let first = all_grants(&actions).find(|grant| grant.link.0 == GPUS + 1).unwrap();
    let carried = node.done(1, first.batch.0);
    let link = LinkId(GPUS + 4);
    let direction = HostDirection::ToGpu;
    let across = Action::Carried { link, direction, size: Bytes(CHUNK.0 * 5) };
    assert!(carried.contains(&across), "{carried:?}");
}

#[test]
fn routes_are_used_in_proportion_to_their_rates() {
    let mut node = node();
    let actions = node.bring(1, 0, 2, 600);
    assert_eq!(node.routes(1), [vec![0, 2], vec![0, 1, 2], vec![0, 3, 2]]);
    let mut out: Vec<BatchGrant> = all_grants(&actions).collect();
    let mut chunks = BTreeMap::<LinkId, usize>::new();
    loop {
        // A batch arrives when its route has carried the batch.
        let took = |grant: &BatchGrant| {
            let times = if grant.link.0 == GPUS + 4 { 16 } else { 8 };
            grant.not_before + BATCH_TIME / times
        };
        out.sort_by_key(|grant| std::cmp::Reverse(took(grant)));
        let grant = out.pop().unwrap();
        node.now = node.now.max(took(&grant));
        *chunks.entry(grant.link).or_default() += grant.chunks.len();
        let actions = node.done(1, grant.batch.0);
        if let Some((outcome, mut routes)) = outcome(&actions) {
            routes.sort();
            assert_eq!(
                (outcome, routes),
                (TransferOutcome::Complete, vec![vec![0, 1, 2], vec![0, 2], vec![0, 3, 2]])
            );
            break;
        }
        out.extend(all_grants(&actions));
    }
    let direct = chunks[&LinkId(GPUS + 4)];
    let beside = [chunks[&LinkId(GPUS + 1)], chunks[&LinkId(GPUS + 2)]];
    assert_eq!(direct + beside[0] + beside[1], 600);
    assert!((290..=310).contains(&direct) && beside.iter().all(|it| (140..=160).contains(it)), "{chunks:?}");
    assert!(node.at_rest());
}

#[test]
fn the_owner_gets_the_link_and_another_transfer_returns_when_the_owner_ends() {
    let mut node = node();
    let mut actions = node.bring(1, 0, 1, 200);
    actions.extend(node.bring(2, 2, 1, 5));
    assert_eq!((node.routes(1)[0].clone(), node.routes(2)[0].clone()), (vec![0, 1], vec![2, 1]));
    assert!(!node.routes(1).contains(&vec![0, 2, 1]), "2 to 1 has another owner: {:?}", node.routes(1));
    assert_eq!(finish(&mut node, &actions, 2).0, TransferOutcome::Complete);
    assert_eq!(node.routes(1), [vec![0, 1], vec![0, 2, 1]]);
}

#[test]
fn an_object_fails_without_trying_the_host_if_the_source_gpu_is_unavailable() {
    let mut node = node();
    assert_eq!(outcome(&node.ask(1, Some(4), 0, 5)), Some((TransferOutcome::Failed, vec![])), "no NVLink");
    node.ask(2, Some(0), 1, 5);
    let gone = node.step(Event::NotLocked { transfer: TransferId(2) });
    assert_eq!(outcome(&gone), Some((TransferOutcome::Failed, vec![])));
    node.ask(3, Some(0), 1, 5);
    assert_eq!(
        outcome(&node.step(Event::Down { gpu: GpuIndex(0) })),
        Some((TransferOutcome::Failed, vec![]))
    );
    // A batch in flight ends first.
    node.bring(4, 0, 4 - 1, 5);
    assert_eq!(outcome(&node.step(Event::Down { gpu: GpuIndex(0) })), None);
    assert_eq!(outcome(&node.failed(4, 0, BatchFailure::Faulty)), Some((TransferOutcome::Failed, vec![])));
    node.bring(5, 0, 1, 5);
    let faulty = node.failed(5, 0, BatchFailure::Faulty);
    assert!(faulty.contains(&Action::Unlock { gpu: GpuIndex(0), transfer: TransferId(5) }));
    assert!(node.at_rest());
}

#[test]
fn an_object_is_reloaded_from_the_host_like_weights() {
    let mut node = node();
    let start = node.now;
    let actions = node.ask(1, None, 2, 7);
    assert_eq!(grants(&actions, start), [(1, 0, 0..5, Duration::ZERO), (1, 1, 5..7, BATCH_TIME)]);
    node.done(1, 0);
    assert_eq!(outcome(&node.done(1, 1)), Some((TransferOutcome::Complete, vec![])));
}

#[test]
fn a_part_of_an_object_may_begin_within_a_block() {
    let runs = vec![BlockRun { start: 3, len: 2 }, BlockRun { start: 20, len: 2 }];
    let gpu = GpuIndex(0);
    let all = PeerBlocks {
        gpu,
        incarnation: Incarnation(1),
        blocks: runs,
        block: BlockSize::DEFAULT,
        skip: Bytes(9),
    };
    let of = |chunks| all.of(&chunks).blocks.iter().map(|run| (run.start, run.len)).collect::<Vec<_>>();
    assert_eq!((of(0..1), of(1..2), of(2..3)), (vec![(3, 2)], vec![(4, 1), (20, 1)], vec![(20, 2)]));
    assert_eq!(all.of(&(1..2)).skip, Bytes(9));
}

#[test]
fn chunks_of_a_peer_with_large_blocks_share_a_block() {
    let block = BlockSize::new(Bytes::mib(16)).unwrap();
    let blocks = vec![BlockRun { start: 3, len: 1 }, BlockRun { start: 20, len: 2 }];
    let gpu = GpuIndex(0);
    let all = PeerBlocks { gpu, incarnation: Incarnation(1), blocks, block, skip: Bytes::ZERO };
    let of = |peer: PeerBlocks| {
        (peer.blocks.iter().map(|run| (run.start, run.len)).collect::<Vec<_>>(), peer.skip)
    };
    for (chunks, blocks, skip) in [
        (0..5, vec![(3, 1)], 0),
        (5..10, vec![(3, 1), (20, 1)], 10),
        (8..16, vec![(20, 1)], 0),
        (14..24, vec![(20, 2)], 12),
        (23..24, vec![(21, 1)], 14),
        (24..25, vec![], 0),
    ] {
        assert_eq!(of(all.of(&chunks)), (blocks, Bytes::mib(skip)), "{chunks:?}");
    }
    // A part of an object from its byte 17 MiB + 9 on, and the chunks of that part.
    let part = all.after(Bytes::mib(17) + Bytes(9));
    assert_eq!(of(part.clone()), (vec![(20, 2)], Bytes::mib(1) + Bytes(9)));
    assert_eq!(of(part.of(&(7..8))), (vec![(20, 2)], Bytes::mib(15) + Bytes(9)));
    assert_eq!(of(part.of(&(8..9))), (vec![(21, 1)], Bytes::mib(1) + Bytes(9)));
}

/// Each of the two links that the transfer needs has a stream of new transfers.
#[test]
fn a_transfer_over_two_links_is_not_starved_by_transfers_over_single_links() {
    let mut node = node();
    let mut actions = node.bring(1, 3, 1, 40);
    let mut next = 2;
    let mut out = VecDeque::new();
    let mut there = [0, 0];
    for round in 0..400 {
        for (count, (from, to)) in there.iter_mut().zip([(3, 0), (0, 1)]) {
            while *count < 3 {
                (*count, next) = (*count + 1, next + 1);
                actions.extend(node.bring(next, from, to, 10));
            }
        }
        let revoked = actions.iter().filter_map(|action| match action {
            Action::Revoke { transfer, batch, .. } => Some((*transfer, *batch)),
            _ => None,
        });
        let revoked: Vec<_> = revoked.collect();
        out.extend(all_grants(&actions));
        actions.clear();
        for (transfer, batch) in revoked {
            if out.iter().any(|it: &BatchGrant| (it.transfer, it.batch) == (transfer, batch)) {
                out.retain(|it| (it.transfer, it.batch) != (transfer, batch));
                actions.extend(node.failed(transfer.0, batch.0, BatchFailure::NotBegun));
            }
        }
        out.extend(all_grants(&actions));
        actions.clear();
        let Some(grant) = out.pop_front() else { continue };
        node.now = node.now.max(grant.not_before + BATCH_TIME / 8);
        let over = if grant.link.0 == GPUS + 3 { 0 } else { 1 };
        actions = node.done(grant.transfer.0, grant.batch.0);
        if let Some((outcome, _)) = outcome(&actions) {
            assert_eq!(outcome, TransferOutcome::Complete);
            if grant.transfer.0 == 1 {
                return assert!(round < 200, "only after {round} batches");
            }
            there[over] -= 1;
        }
    }
    panic!("never in 400 batches");
}
