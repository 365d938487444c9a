//! Properties for any order of transfers, ends, failures and losses: no link carries more than it
//! can, and no chunk is lost.

use proptest::prelude::*;

use super::*;
use crate::paths::HostLinks;
use crate::rates::SHARINGS;

#[derive(Debug, Clone, Copy)]
enum Step {
    Start {
        /// Whether the data goes to the host.
        leaves: bool,
        gpu: u32,
        chunks: u32,
        /// Milliseconds until the deadline.
        ms: Option<u64>,
    },
    /// A request begins to wait for a transfer that no request waited for.
    Hasten(usize, u64),
    /// The first batch in flight of a GPU ends well.
    Done(u32),
    Faulty(u32),
    /// An executor confirms a revoked batch that has not begun.
    Acknowledge,
    Cancel(usize),
    Down(u32),
    Pass(u64),
    /// An operator changes the sharing of links.
    Share(usize),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (any::<bool>(), 0..3u32, 1..40u32, prop::option::of(0..2_000u64))
            .prop_map(|(leaves, gpu, chunks, ms)| Step::Start { leaves, gpu, chunks, ms }),
        1 => (any::<usize>(), 0..2_000u64).prop_map(|(number, ms)| Step::Hasten(number, ms)),
        10 => (0..3u32).prop_map(Step::Done),
        1 => (0..3u32).prop_map(Step::Faulty),
        3 => Just(Step::Acknowledge),
        1 => any::<usize>().prop_map(Step::Cancel),
        1 => (0..3u32).prop_map(Step::Down),
        3 => (0..20u64).prop_map(Step::Pass),
        1 => (0..SHARINGS.len()).prop_map(Step::Share),
    ]
}

/// The executors as the fabric sees them: the granted batches without a report, in order.
struct World {
    uplink: u64,
    out: Vec<(BatchGrant, bool)>,
    /// The number of chunks that have not arrived, with their GPU, by transfer.
    missing: BTreeMap<TransferId, (GpuIndex, u32)>,
}

/// Whether two batches take the whole rate of their links at different times.
fn apart(a: &BatchGrant, b: &BatchGrant) -> bool {
    let end = |grant: &BatchGrant| grant.not_before + RATE.time_for(grant.cargo.span(&grant.chunks).1);
    end(a) <= b.not_before || end(b) <= a.not_before
}

impl World {
    /// Whether only one of two batches can cross at a time.
    fn share_a_track(&self, a: &BatchGrant, b: &BatchGrant) -> bool {
        let by_one_link = a.gpu == b.gpu || (self.uplink == 1 && a.gpu.0 < 2 && b.gpu.0 < 2);
        a.cargo.direction() == b.cargo.direction() && by_one_link
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
                Action::Arrived { cargo, chunks, .. } => {
                    let transfer = match cargo {
                        TransferCargo::Weights(weights) => TransferId(weights.model.0.into()),
                        TransferCargo::ToHost(leaving) => TransferId(leaving.copy),
                        TransferCargo::Object(_) => unreachable!("there are none"),
                    };
                    self.missing.get_mut(&transfer).unwrap().1 -= chunks.len() as u32;
                }
                Action::Ended { transfer, outcome, .. } => {
                    let (_, missing) = self.missing.remove(&transfer).unwrap();
                    prop_assert_eq!(outcome == TransferOutcome::Complete, missing == 0);
                    prop_assert!(self.out.iter().all(|(grant, _)| grant.transfer != transfer));
                }
                Action::Carried { .. } => {}
                Action::Lock { .. } | Action::Unlock { .. } => unreachable!("none comes from a peer"),
            }
        }
        Ok(())
    }

    fn first_of(&mut self, gpu: u32) -> Option<BatchGrant> {
        let place = self.out.iter().position(|(grant, _)| grant.gpu.0 == gpu)?;
        Some(self.out.remove(place).0)
    }

    /// Returns a revoked batch that is not the first of its GPU in its direction, so that it has
    /// not begun.
    fn revoked(&mut self) -> Option<BatchGrant> {
        let stream = |grant: &BatchGrant| (grant.gpu, grant.cargo.direction());
        let begun =
            |place: usize| !self.out[..place].iter().any(|(g, _)| stream(g) == stream(&self.out[place].0));
        let place = (0..self.out.len()).find(|&place| self.out[place].1 && !begun(place))?;
        Some(self.out.remove(place).0)
    }
}

proptest! {
    #[test]
    fn no_chunk_is_lost_no_link_is_overbooked_and_all_links_become_idle(
        uplink in 1..3u64,
        sharing in (0..SHARINGS.len()).prop_map(|at| SHARINGS[at].1),
        steps in prop::collection::vec(step(), 1..150),
    ) {
        let mut node = Node::sharing(uplink, sharing);
        let mut world = World { uplink, out: Vec::new(), missing: BTreeMap::new() };
        let mut next = 0;
        for step in steps {
            let actions = match step {
                Step::Start { leaves, gpu, chunks, ms } => {
                    next += 1;
                    world.missing.insert(TransferId(next), (GpuIndex(gpu), chunks));
                    node.start_of(if leaves { leaving } else { weights }, next, gpu, chunks, ms)
                }
                Step::Hasten(number, ms) => {
                    let nth = number % world.missing.len().max(1);
                    let Some(&transfer) = world.missing.keys().nth(nth) else { continue };
                    node.step(Event::Hasten { transfer, objective: within(ms) })
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
                Step::Share(at) => {
                    node.step(Event::Change { sharing: SHARINGS[at].1, host_links: HostLinks::Own })
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
