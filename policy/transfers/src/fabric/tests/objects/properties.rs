//! Properties for any order of transfers of objects and weights, ends, failures and losses: every
//! chunk arrives once, and all links become idle.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone, Copy)]
enum Step {
    Object { from: u32, to: u32, chunks: u32 },
    Reload { to: u32, chunks: u32 },
    Leave { from: u32, chunks: u32 },
    Weights { from: Option<u32>, to: u32, chunks: u32 },
    Lock(usize),
    NotLock(usize),
    Done(usize),
    Faulty(usize),
    Acknowledge(usize),
    Cancel(usize),
    Down(u32),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let gpu = || 0..GPUS;
    prop_oneof![
        4 => (gpu(), gpu(), 1..60u32).prop_map(|(from, to, chunks)| Step::Object { from, to, chunks }),
        1 => (gpu(), 1..30u32).prop_map(|(to, chunks)| Step::Reload { to, chunks }),
        2 => (gpu(), 1..30u32).prop_map(|(from, chunks)| Step::Leave { from, chunks }),
        1 => (prop::option::of(gpu()), gpu(), 1..30u32)
            .prop_map(|(from, to, chunks)| Step::Weights { from, to, chunks }),
        4 => any::<usize>().prop_map(Step::Lock),
        1 => any::<usize>().prop_map(Step::NotLock),
        16 => any::<usize>().prop_map(Step::Done),
        1 => any::<usize>().prop_map(Step::Faulty),
        4 => any::<usize>().prop_map(Step::Acknowledge),
        1 => any::<usize>().prop_map(Step::Cancel),
        1 => gpu().prop_map(Step::Down),
        3 => (0..20u64).prop_map(Step::Pass),
    ]
}

/// The requests that executors and GPUs have not answered yet.
#[derive(Default)]
struct World {
    out: Vec<(BatchGrant, bool)>,
    asked: Vec<(GpuIndex, TransferId)>,
    /// The locks that GPUs hold for transfers.
    locks: BTreeSet<(GpuIndex, TransferId)>,
    /// The chunks that have not arrived, with the GPU that copies them.
    missing: BTreeMap<TransferId, (GpuIndex, BTreeSet<u32>)>,
}

impl World {
    fn take(&mut self, actions: Vec<Action>) -> Result<(), TestCaseError> {
        for action in actions {
            match action {
                Action::Grant { grant } => {
                    let missing = &self.missing[&grant.transfer].1;
                    prop_assert!(
                        grant.chunks.clone().all(|chunk| missing.contains(&chunk)),
                        "twice: {grant:?}"
                    );
                    let out = self.out.iter().filter(|(other, _)| other.transfer == grant.transfer);
                    let overlaps = |other: &BatchGrant| {
                        grant.chunks.start < other.chunks.end && other.chunks.start < grant.chunks.end
                    };
                    prop_assert!(out.into_iter().all(|(other, _)| !overlaps(other)), "twice out: {grant:?}");
                    if let Some(peer) = &grant.peer {
                        prop_assert!(self.locks.contains(&(peer.gpu, grant.transfer)), "not kept: {grant:?}");
                    }
                    self.out.push((grant, false));
                }
                Action::Revoke { transfer, batch, .. } => {
                    let found = self.out.iter_mut().find(|(g, _)| (g.transfer, g.batch) == (transfer, batch));
                    found.unwrap().1 = true;
                }
                Action::Arrived { cargo, chunks, .. } => {
                    let transfer = match cargo {
                        TransferCargo::Weights(weights) => TransferId(weights.model.0.into()),
                        TransferCargo::Object(piece) => TransferId(piece.object.0),
                        TransferCargo::ToHost(leaving) => TransferId(leaving.copy),
                    };
                    let missing = &mut self.missing.get_mut(&transfer).unwrap().1;
                    for chunk in chunks {
                        prop_assert!(missing.remove(&chunk), "chunk {chunk} of {transfer} came twice");
                    }
                }
                Action::Lock { gpu, transfer, .. } => self.asked.push((gpu, transfer)),
                Action::Unlock { gpu, transfer } => {
                    prop_assert!(self.out.iter().all(|(grant, _)| grant.transfer != transfer
                        || self.missing.get(&transfer).is_none_or(|(to, _)| *to == grant.gpu)));
                    self.locks.remove(&(gpu, transfer));
                }
                Action::Ended { transfer, outcome, .. } => {
                    let (_, missing) = self.missing.remove(&transfer).unwrap();
                    prop_assert_eq!(outcome == TransferOutcome::Complete, missing.is_empty());
                    prop_assert!(self.out.iter().all(|(grant, _)| grant.transfer != transfer));
                    prop_assert!(self.locks.iter().all(|(_, other)| *other != transfer), "still kept");
                }
                Action::Carried { .. } => {}
            }
        }
        Ok(())
    }

    fn lock(&mut self, node: &mut Node, place: usize) -> Vec<Action> {
        let (gpu, transfer) = self.asked.remove(place);
        self.locks.insert((gpu, transfer));
        node.step(Event::Locked { transfer, peer: there(gpu.0, 100) })
    }

    /// Ends a batch at its earliest start.
    fn done(&mut self, node: &mut Node, place: usize) -> Vec<Action> {
        let (grant, _) = self.out.remove(place);
        node.now = node.now.max(grant.not_before);
        node.done(grant.transfer.0, grant.batch.0)
    }
}

fn pick(number: usize, len: usize) -> Option<usize> {
    (len > 0).then(|| number % len)
}

proptest! {
    #[test]
    fn every_chunk_arrives_once_and_all_links_become_idle(
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut node = node();
        let mut world = World::default();
        let mut next = 0;
        for step in steps {
            let mut begin = |world: &mut World, to: u32, chunks: u32| {
                next += 1;
                world.missing.insert(TransferId(next), (GpuIndex(to), (0..chunks).collect()));
                next
            };
            let actions = match step {
                Step::Object { from, to, .. } if from == to => continue,
                Step::Object { from, to, chunks } => {
                    let transfer = begin(&mut world, to, chunks);
                    node.ask(transfer, Some(from), to, chunks)
                }
                Step::Reload { to, chunks } => {
                    let transfer = begin(&mut world, to, chunks);
                    node.ask(transfer, None, to, chunks)
                }
                Step::Leave { from, chunks } => {
                    let transfer = begin(&mut world, from, chunks);
                    node.leave(transfer, from, chunks)
                }
                Step::Weights { from, to, .. } if from == Some(to) => continue,
                Step::Weights { from, to, chunks } => {
                    let transfer = begin(&mut world, to, chunks);
                    let cargo = weights(transfer, Bytes(CHUNK.0 * u64::from(chunks)));
                    let gpu = GpuIndex(to);
                    let transfer = TransferId(transfer);
                    let chunks = std::iter::once(0..chunks).collect();
                    let from = from.map(GpuIndex);
                    let objective = None;
                    node.step(Event::Start { transfer, gpu, cargo, chunks, from, objective })
                }
                Step::Lock(number) => {
                    let Some(place) = pick(number, world.asked.len()) else { continue };
                    world.lock(&mut node, place)
                }
                Step::NotLock(number) => {
                    let Some(place) = pick(number, world.asked.len()) else { continue };
                    let (_, transfer) = world.asked.remove(place);
                    node.step(Event::NotLocked { transfer })
                }
                Step::Done(number) => {
                    let Some(place) = pick(number, world.out.len()) else { continue };
                    world.done(&mut node, place)
                }
                Step::Faulty(number) => {
                    let Some(place) = pick(number, world.out.len()) else { continue };
                    let (grant, _) = world.out.remove(place);
                    node.failed(grant.transfer.0, grant.batch.0, BatchFailure::Faulty)
                }
                Step::Acknowledge(number) => {
                    let revoked: Vec<_> = (0..world.out.len()).filter(|&at| world.out[at].1).collect();
                    let Some(place) = pick(number, revoked.len()) else { continue };
                    let (grant, _) = world.out.remove(revoked[place]);
                    node.failed(grant.transfer.0, grant.batch.0, BatchFailure::NotBegun)
                }
                Step::Cancel(number) => {
                    let Some(place) = pick(number, world.missing.len()) else { continue };
                    let transfer = *world.missing.keys().nth(place).unwrap();
                    node.step(Event::Cancel { transfer })
                }
                Step::Down(gpu) => {
                    let gpu = GpuIndex(gpu);
                    world.out.retain(|(grant, _)| grant.gpu != gpu);
                    world.missing.retain(|_, (to, _)| *to != gpu);
                    world.asked.retain(|(from, _)| *from != gpu);
                    world.locks.retain(|(from, _)| *from != gpu);
                    node.step(Event::Down { gpu })
                }
                Step::Pass(ms) => {
                    node.now = node.now + Duration::from_millis(ms);
                    continue;
                }
            };
            world.take(actions)?;
            let idle = world.out.is_empty() && world.asked.is_empty();
            prop_assert!(world.missing.is_empty() || !idle, "links idle while bytes wait");
        }
        // Every lock is granted and every batch arrives from here on, so every transfer must end.
        for _ in 0..100_000 {
            let actions = if !world.asked.is_empty() {
                world.lock(&mut node, 0)
            } else if !world.out.is_empty() {
                world.done(&mut node, 0)
            } else {
                break;
            };
            world.take(actions)?;
        }
        prop_assert!(world.missing.is_empty(), "{:?}", world.missing);
        prop_assert!(world.locks.is_empty(), "{:?}", world.locks);
        prop_assert_eq!(node.fabric.in_flight(), 0);
        prop_assert!(node.at_rest());
        prop_assert_eq!(node.fabric.next_wake(), None);
    }
}
