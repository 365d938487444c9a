//! Tests of the choice of the next batch between the host and a GPU.

use proptest::prelude::*;

use super::*;
use crate::rates::{FLOWS_MAX, SHARINGS};

/// A node with executors that copy every granted batch, one after the other. A queued batch that is
/// revoked has not begun.
struct Machine {
    node: Node,
    out: Vec<BatchGrant>,
    /// The batches that ended: transfer and number of chunks.
    copied: Vec<(u64, u32)>,
    ended: Vec<(u64, TransferOutcome)>,
}

impl Machine {
    fn new(uplink: u64, sharing: TransferSharing) -> Self {
        Self::of(Node::sharing(uplink, sharing))
    }

    fn of(node: Node) -> Self {
        let out = Vec::new();
        let copied = Vec::new();
        let ended = Vec::new();
        Self { node, out, copied, ended }
    }

    fn start(&mut self, transfer: u64, gpu: u32, chunks: u32, ms: Option<u64>) {
        self.start_of(weights, transfer, gpu, chunks, ms);
    }

    fn start_of(
        &mut self,
        cargo: fn(u64, Bytes) -> TransferCargo,
        transfer: u64,
        gpu: u32,
        chunks: u32,
        ms: Option<u64>,
    ) {
        let actions = self.node.start_of(cargo, transfer, gpu, chunks, ms);
        self.take(actions);
    }

    fn take(&mut self, actions: Vec<Action>) {
        self.ended.extend(ended(&actions));
        for action in actions {
            match action {
                Action::Grant { grant } => self.out.push(grant),
                Action::Revoke { gpu, transfer, batch, .. } => {
                    let its = |grant: &BatchGrant| (grant.transfer, grant.batch) == (transfer, batch);
                    let found = self.out.iter().position(its).filter(|&place| {
                        let direction = self.out[place].cargo.direction();
                        let before =
                            |grant: &BatchGrant| grant.gpu == gpu && grant.cargo.direction() == direction;
                        self.out[..place].iter().any(before)
                    });
                    if let Some(place) = found {
                        self.out.remove(place);
                        let actions = self.node.failed(transfer.0, batch.0, BatchFailure::NotBegun);
                        self.take(actions);
                    }
                }
                _ => {}
            }
        }
    }

    /// Ends the batch with the earliest end. Returns false if no batch is in flight.
    fn copy(&mut self) -> bool {
        let end = |grant: &BatchGrant| grant.not_before + RATE.time_for(grant.cargo.span(&grant.chunks).1);
        let Some(place) = (0..self.out.len()).min_by_key(|&place| (end(&self.out[place]), place)) else {
            return false;
        };
        let grant = self.out.remove(place);
        self.node.now = self.node.now.max(end(&grant));
        self.copied.push((grant.transfer.0, grant.chunks.len() as u32));
        let actions = self.node.done(grant.transfer.0, grant.batch.0);
        self.take(actions);
        true
    }

    fn copies_of(&self, transfer: u64) -> usize {
        self.copied.iter().filter(|(its, _)| *its == transfer).count()
    }

    fn counts(&self) -> GuaranteeCounts {
        self.node.fabric.tally().ended.to_gpu
    }
}

/// Returns the position of the tight transfer's last copy, if that transfer starts while a loose
/// transfer runs.
fn last_of_the_tight(sharing: TransferSharing, cargo: fn(u64, Bytes) -> TransferCargo) -> usize {
    let mut machine = Machine::new(1, sharing);
    machine.start_of(cargo, 1, 2, 100, Some(10_000));
    machine.copy();
    machine.start_of(cargo, 2, 2, 20, Some(60));
    while machine.copy() {}
    assert_eq!(machine.ended.len(), 2);
    machine.copied.iter().rposition(|(transfer, _)| *transfer == 2).unwrap()
}

#[test]
fn the_tightest_transfer_goes_first_if_links_are_shared_by_objective() {
    for cargo in [weights, leaving] {
        let last = SHARINGS.map(|(_, sharing)| last_of_the_tight(sharing, cargo));
        // A batch of the loose transfer had crossed and another was crossing at the start of the
        // tight transfer. Then the tight transfer goes first, in turns, or after the whole loose
        // transfer.
        assert_eq!(last, [5, 8, 23]);
    }
}

/// A rate guarantee in one direction costs nothing in the other direction.
#[test]
fn the_two_directions_have_independent_rates() {
    let mut machine = Machine::new(1, TransferSharing::FaasTube);
    machine.start(1, 2, 100, Some(1_000));
    machine.start_of(leaving, 2, 2, 100, Some(1_000));
    machine.start_of(leaving, 3, 2, 5, None);
    while machine.copy() {}
    let tally = machine.node.fabric.tally();
    assert_eq!(tally.ended.to_gpu, GuaranteeCounts { admitted: 1, ..GuaranteeCounts::default() });
    assert_eq!(
        tally.ended.from_gpu,
        GuaranteeCounts { admitted: 1, unpromised: 1, ..GuaranteeCounts::default() }
    );
    // Side by side the directions take half the time that they would take one after the other.
    let took = machine.node.now.since(Timestamp(1 << 40));
    assert!(took < BATCH_TIME * 22, "{took:?}");
}

#[test]
fn a_new_transfer_with_the_earliest_deadline_waits_for_the_crossing_batch() {
    let mut node = Node::new(1);
    let start = node.now;
    node.start_wanted(1, 0, 100, Some(5_000));
    node.now = node.now + BATCH_TIME / 4;
    let actions = node.start_wanted(2, 1, 3, Some(100));
    let revoke =
        Action::Revoke { link: LinkId(0), gpu: GpuIndex(0), transfer: TransferId(1), batch: BatchId(1) };
    assert_eq!(actions, [revoke]);
    let actions = node.failed(1, 1, BatchFailure::NotBegun);
    assert_eq!(grants(&actions, start), [(2, 0, 0..3, BATCH_TIME)]);
}

#[test]
fn a_new_transfer_with_a_later_deadline_revokes_no_batch() {
    let mut node = Node::new(1);
    node.start_wanted(1, 2, 100, Some(1_500));
    assert_eq!(node.start_wanted(2, 2, 3, Some(5_000)), []);
    // A transfer that no request waits for revokes no batch either.
    assert_eq!(node.start(3, 2, 3), []);
    assert_eq!(node.failed(1, 1, BatchFailure::NotBegun).len(), 1, "the place is taken again");
}

#[test]
fn transfers_without_a_deadline_get_a_sixteenth_of_the_batches_of_a_full_link() {
    let mut machine = Machine::new(1, TransferSharing::FaasTube);
    machine.start(1, 2, 4_000, Some(8_600));
    machine.start(2, 2, 200, None);
    for _ in 0..160 {
        machine.copy();
    }
    let spare = machine.copies_of(2);
    assert!((8..=10).contains(&spare), "{spare} of 160");
    while machine.copy() {}
    let counts = GuaranteeCounts { admitted: 1, unpromised: 1, ..GuaranteeCounts::default() };
    assert_eq!(machine.counts(), counts);
    let chunks: u32 = machine.copied.iter().map(|(_, chunks)| chunks).sum();
    assert_eq!(chunks, 4_200, "every chunk once");
}

#[test]
fn transfers_without_a_deadline_cross_links_that_rated_transfers_leave_idle() {
    let mut machine = Machine::new(2, TransferSharing::FaasTube);
    machine.start(1, 0, 100, Some(1_200));
    machine.start(2, 1, 100, None);
    for _ in 0..20 {
        machine.copy();
    }
    assert!(machine.copies_of(2) >= 9, "{:?}", machine.copied);
}

#[test]
fn transfers_that_cannot_meet_the_deadline_are_carried_and_counted() {
    let mut machine = Machine::new(1, TransferSharing::FaasTube);
    machine.start(1, 2, 100, Some(10));
    machine.start(2, 2, 5, Some(0));
    machine.start(3, 2, 80, Some(220));
    machine.start(4, 2, 80, Some(300));
    while machine.copy() {}
    assert_eq!(machine.ended.len(), 4);
    let counts = machine.counts();
    assert_eq!((counts.infeasible, counts.admitted), (2, 1), "{counts:?}");
    assert_eq!(counts.crowded + counts.late, 1, "{counts:?}");
}

#[test]
fn a_hastened_prefetch_is_sent_at_the_needed_rate() {
    let mut machine = Machine::new(1, TransferSharing::FaasTube);
    machine.start(1, 2, 200, Some(2_000));
    machine.start(2, 2, 20, None);
    for _ in 0..3 {
        machine.copy();
    }
    assert_eq!(machine.copies_of(2), 0);
    let actions = machine.node.step(Event::Hasten { transfer: TransferId(2), objective: within(200) });
    machine.take(actions);
    machine.copy();
    machine.copy();
    assert_eq!(machine.copies_of(2), 1, "it is a newcomer now");
    while machine.copy() {}
    assert_eq!(machine.counts(), GuaranteeCounts { admitted: 2, ..GuaranteeCounts::default() });
}

#[test]
fn transfers_beyond_flows_max_have_no_objective() {
    let mut machine = Machine::new(1, TransferSharing::FaasTube);
    let all = FLOWS_MAX as u64 + 10;
    for transfer in 1..=all {
        machine.start(transfer, (transfer % 3) as u32, 7, Some(60_000));
    }
    while machine.copy() {}
    assert_eq!(machine.ended.len() as u64, all);
    let counts = GuaranteeCounts { admitted: FLOWS_MAX as u64, unpromised: 10, ..GuaranteeCounts::default() };
    assert_eq!(machine.counts(), counts);
}

#[test]
fn waits_are_counted_by_link() {
    let mut machine = Machine::new(1, TransferSharing::Fifo);
    machine.start(1, 2, 10, None);
    machine.start(2, 2, 5, None);
    while machine.copy() {}
    let waits = &machine.node.fabric.tally().waits;
    let link = (LinkId(2), HostDirection::ToGpu);
    let waited = waits[&link].waited;
    // The last chunk is half a chunk.
    assert_eq!(waited, BATCH_TIME + RATE.time_for(Bytes::mib(9)));
    assert_eq!((waits.len(), waits[&link].transfers), (1, 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// D13, for any other transfers in flight.
    #[test]
    fn the_tightest_new_transfer_waits_for_the_crossing_batch(
        others in prop::collection::vec((1..60u32, prop::option::of(2_000..9_000u64)), 1..8),
        before in 0..60usize,
    ) {
        let mut machine = Machine::new(1, TransferSharing::FaasTube);
        for (transfer, (chunks, ms)) in (1..).zip(others) {
            machine.start(transfer, 2, chunks, ms);
        }
        for _ in 0..before {
            machine.copy();
        }
        let crossing = usize::from(!machine.out.is_empty());
        machine.start(100, 2, 3, Some(500));
        for _ in 0..=crossing {
            machine.copy();
        }
        prop_assert_eq!(machine.copies_of(100), 1, "{:?}", machine.copied);
    }

    /// For any number of transfers with deadlines, however early: with two GPUs on an uplink, and
    /// with three on an uplink that is as fast as all of their links.
    #[test]
    fn no_transfer_starves(
        (sharers, uplink) in prop_oneof![(Just(2u32), 1..3u64), (Just(3u32), 3..5u64)],
        gpus in prop::collection::vec(0..3u32, 1..4),
        coming in prop::collection::vec((0..2u32, 1..12u32, 1..400u64), 40),
    ) {
        let mut machine = Machine::of(Node::of(&shared(sharers, uplink), TransferSharing::FaasTube));
        let mut next = 100;
        let mut coming = coming.into_iter().cycle();
        let mut come = |machine: &mut Machine| {
            // Twice as many bytes as two links can carry are always in flight.
            while machine.node.fabric.in_flight() < 12 {
                let (gpu, chunks, ms) = coming.next().unwrap();
                next += 1;
                machine.start(next, gpu, chunks, Some(ms));
            }
        };
        come(&mut machine);
        for (transfer, &gpu) in (1..).zip(&gpus) {
            machine.start(transfer, gpu % sharers, 15, None);
        }
        let mine = gpus.len() as u64;
        // Three batches each. Each batch waits for all other transfers and for two rounds of
        // passing batches, which every link that can run short may count separately.
        let most = 3 * 12 * 2 * SPARE_EVERY * sharers;
        let mut copied = 0;
        while (machine.ended.len() as u64) < mine && copied < most {
            prop_assert!(machine.copy());
            copied += 1;
            come(&mut machine);
            machine.ended.retain(|&(transfer, _)| transfer <= mine);
        }
        prop_assert_eq!(machine.ended.len() as u64, mine, "of {:?}", gpus);
    }

    /// For any deadlines and any sharing.
    #[test]
    fn every_chunk_arrives_once(
        uplink in 1..3u64,
        sharing in (0..SHARINGS.len()).prop_map(|at| SHARINGS[at].1),
        all in prop::collection::vec((0..3u32, 1..60u32, prop::option::of(0..800u64), 0..4u32), 1..25),
    ) {
        let mut machine = Machine::new(uplink, sharing);
        let mut expected = BTreeMap::new();
        for (transfer, (gpu, chunks, ms, copies)) in (1..).zip(all) {
            machine.start(transfer, gpu, chunks, ms);
            expected.insert(transfer, chunks);
            for _ in 0..copies {
                machine.copy();
            }
        }
        while machine.copy() {}
        let mut copied = BTreeMap::new();
        for (transfer, chunks) in machine.copied {
            *copied.entry(transfer).or_default() += chunks;
        }
        prop_assert_eq!(&copied, &expected);
        prop_assert!(machine.ended.iter().all(|(_, outcome)| *outcome == TransferOutcome::Complete));
        prop_assert_eq!(machine.ended.len(), expected.len());
        let counted: u64 = machine.node.fabric.tally().ended.to_gpu.named().iter().map(|(_, count)| count).sum();
        prop_assert_eq!(counted, expected.len() as u64);
    }
}
