//! Which bytes cross which link when. One core of the Node actor; it keeps the state of all links,
//! so that a transfer is given whole paths and never holds one link while it waits for another.
//!
//! A transfer moves in chunks of 2 MiB (D12), granted in batches of five (D13). Per path one batch
//! runs and at most one more is queued, which can be taken back: a link never idles for a message,
//! and a newcomer waits for one batch at most. Batches are paced: the next may begin when the
//! previous would have ended at the link's rate, so a slowed link really is slow.
//!
//! Who is next: the transfer that was served longest ago. A newcomer counts as served two batches
//! ago, so it overtakes only those which were served since: nobody starves.
//!
//! **From another GPU** (T22, T25). A transfer that is to come from a peer asks that GPU first to
//! lock the model where it is, and then crosses the NVLink between them, each direction of which is
//! a lane of its own. It holds the lock until it ends, whichever way, or until the peer is lost. Where
//! there is no such link, no lock is given, the peer goes or a copy from it fails, what is still to
//! come takes the path from the host: a peer makes a transfer faster and never makes it fail.
//!
//! ```text
//! Start, Cancel, Locked, NotLocked ────► ┌────────┐ ──► Arrived, Ended          to the Gpu
//! Done, Failed (from the path's Link) ─► │ fabric │ ──► Lock, Unlock            to the peer
//! Down ────────────────────────────────► └────────┘ ──► Grant, Revoke, Carried  to the Links
//! ```

mod lanes;
pub mod link;
mod protocol;
mod transfer;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::time::Duration;

use millrace_types::topology::{LinkId, Topology};
use millrace_types::{Bytes, GpuIndex, Timestamp};

pub use self::protocol::{Action, BatchFailure, Cargo, Event, Grant, Outcome, PeerBlocks};

use self::lanes::{Lane, Path, Route};
use self::transfer::{Batch, OUT_MAX, Source, Transfer};
use crate::core::Core;
use crate::ids::{BatchId, TransferId};
use crate::memory::BLOCK;

/// Chunks in a batch (D13).
pub const BATCH_CHUNKS: NonZeroU32 = NonZeroU32::new(5).expect("not zero");
/// How much later than planned a batch may begin; after that it is refused and granted again.
pub const START_SLACK: Duration = Duration::from_millis(250);
/// How long after the end of its window a batch that nobody reported counts as failed.
pub const REPORT_SLACK: Duration = Duration::from_secs(5);
/// Failures in a row that end a transfer.
pub const FAILURES_MAX: u32 = 3;

/// All links of a node, towards its GPUs.
#[derive(Debug)]
pub struct Fabric {
    lanes: Vec<Lane>,
    paths: BTreeMap<Route, Path>,
    transfers: BTreeMap<TransferId, Transfer>,
    grants: u64,
}

impl Fabric {
    /// Idle links.
    ///
    /// # Panics
    /// When a GPU has no path from the host: such a topology is not one.
    #[must_use]
    pub fn new(topology: &Topology) -> Self {
        let (lanes, paths) = lanes::lay(topology);
        Self { lanes, paths, transfers: BTreeMap::new(), grants: 0 }
    }

    /// Transfers that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.transfers.len()
    }

    /// The first link of a route's path: its Link actor issues the path's grants.
    fn first_link(&self, route: Route) -> LinkId {
        self.lanes[self.paths[&route].lanes[0]].link
    }

    fn start(
        &mut self,
        now: Timestamp,
        transfer: TransferId,
        Route { to: gpu, from }: Route,
        cargo: Cargo,
        chunks: Vec<Range<u32>>,
        actions: &mut Vec<Action>,
    ) {
        let from = from.filter(|_| self.paths.contains_key(&Route { to: gpu, from }));
        let batch = Bytes(BLOCK.0 * u64::from(BATCH_CHUNKS.get()));
        let head_start = self.paths[&Route { to: gpu, from }].time_for(batch).saturating_mul(2);
        let head_start = u64::try_from(head_start.as_nanos()).unwrap_or(u64::MAX);
        let waiting: Vec<_> = chunks.into_iter().rev().filter(|range| !range.is_empty()).collect();
        let from = from.filter(|_| !waiting.is_empty());
        if let Some(from) = from {
            actions.push(Action::Lock { gpu: from, transfer, model: cargo.model });
        }
        let transfer_state = Transfer {
            gpu,
            cargo,
            source: from.map_or(Source::Host, Source::Asked),
            locked: None,
            waiting,
            out: Vec::with_capacity(OUT_MAX),
            next_batch: BatchId(0),
            failures: 0,
            served: (Timestamp(now.0.saturating_sub(head_start)), self.grants),
            ending: None,
        };
        self.transfers.insert(transfer, transfer_state);
    }

    fn locked(&mut self, transfer: TransferId, peer: PeerBlocks, actions: &mut Vec<Action>) {
        let asked = |state: &&mut Transfer| matches!(state.source, Source::Asked(gpu) if gpu == peer.gpu);
        match self.transfers.get_mut(&transfer).filter(asked) {
            Some(state) => {
                state.locked = Some(peer.gpu);
                state.source = Source::Peer(peer);
            }
            // It has ended meanwhile, or goes on from the host.
            None => actions.push(Action::Unlock { gpu: peer.gpu, transfer }),
        }
    }

    fn not_locked(&mut self, transfer: TransferId) {
        let asked = |state: &&mut Transfer| matches!(state.source, Source::Asked(_));
        if let Some(state) = self.transfers.get_mut(&transfer).filter(asked) {
            state.source = Source::Host;
        }
    }

    /// What is still to be granted comes from the host. What is out from the peer comes whole or
    /// fails; until it has, the transfer holds the lock.
    fn lock_lost(&mut self, transfer: TransferId) {
        if let Some(state) = self.transfers.get_mut(&transfer) {
            state.source = Source::Host;
        }
    }

    /// Takes a batch that ended off its transfer.
    fn take_batch(&mut self, transfer: TransferId, batch: BatchId) -> Option<(Batch, &mut Transfer)> {
        let state = self.transfers.get_mut(&transfer)?;
        let place = state.out.iter().position(|out| out.id == batch)?;
        Some((state.out.remove(place), state))
    }

    fn done(&mut self, transfer: TransferId, batch: BatchId, actions: &mut Vec<Action>) {
        let Some((batch, state)) = self.take_batch(transfer, batch) else { return };
        state.failures = 0;
        let size = state.cargo.span(&batch.chunks).1;
        let Cargo { model, generation, .. } = state.cargo;
        for (place, &lane) in self.paths[&batch.route].lanes.iter().enumerate() {
            self.lanes[lane].carried(batch.hold);
            if place > 0 {
                actions.push(Action::Carried { link: self.lanes[lane].link, size });
            }
        }
        let gpu = batch.route.to;
        actions.push(Action::Arrived { gpu, model, generation, chunks: batch.chunks });
        self.end_if_over(transfer, actions);
    }

    fn failed(&mut self, transfer: TransferId, batch: BatchId, why: BatchFailure, actions: &mut Vec<Action>) {
        let Some((batch, state)) = self.take_batch(transfer, batch) else { return };
        state.waiting.push(batch.chunks);
        match (why, batch.route.from) {
            (BatchFailure::NotBegun, _) => {}
            // Whatever is wrong may be wrong with the peer alone.
            (BatchFailure::Faulty, Some(_)) => state.source = Source::Host,
            (BatchFailure::Faulty, None) => {
                state.failures += 1;
                if state.failures >= FAILURES_MAX {
                    state.ending.get_or_insert(Outcome::Failed);
                }
            }
        }
        for &lane in &self.paths[&batch.route].lanes {
            self.lanes[lane].release(batch.hold);
        }
        self.end_if_over(transfer, actions);
    }

    fn end_if_over(&mut self, transfer: TransferId, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get(&transfer) else { return };
        if !state.out.is_empty() {
            return;
        }
        let outcome = if state.waiting.is_empty() { Some(Outcome::Complete) } else { state.ending };
        if let Some(outcome) = outcome {
            if let Some(gpu) = state.locked {
                actions.push(Action::Unlock { gpu, transfer });
            }
            let from = state.source.peer();
            actions.push(Action::Ended { gpu: state.gpu, transfer, outcome, from });
            self.transfers.remove(&transfer);
        }
    }

    fn cancel(&mut self, transfer: TransferId, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        state.ending.get_or_insert(Outcome::Cancelled);
        for place in 1..self.transfers.get(&transfer).map_or(0, |state| state.out.len()) {
            self.revoke(transfer, place, actions);
        }
        self.end_if_over(transfer, actions);
    }

    fn revoke(&mut self, transfer: TransferId, place: usize, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let Some(batch) = state.out.get_mut(place).filter(|batch| !batch.revoked) else { return };
        batch.revoked = true;
        let (batch, route) = (batch.id, batch.route);
        actions.push(Action::Revoke { link: self.first_link(route), gpu: route.to, transfer, batch });
    }

    fn down(&mut self, gpu: GpuIndex, actions: &mut Vec<Action>) {
        for (&transfer, state) in self.transfers.iter_mut() {
            if state.gpu == gpu {
                for batch in &state.out {
                    for &lane in &self.paths[&batch.route].lanes {
                        self.lanes[lane].release(batch.hold);
                    }
                }
                if let Some(gpu) = state.locked {
                    actions.push(Action::Unlock { gpu, transfer });
                }
            } else if state.source.peer() == Some(gpu) || state.locked == Some(gpu) {
                // It forgot its locks. What is out from it either comes whole or fails.
                (state.source, state.locked) = (Source::Host, None);
            }
        }
        self.transfers.retain(|_, state| state.gpu != gpu);
    }

    fn lose_unreported(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let overdue = self.transfers.iter().flat_map(|(&transfer, state)| {
            let late = state.out.iter().filter(|batch| batch.give_up <= now);
            late.map(move |batch| (transfer, batch.id))
        });
        for (transfer, batch) in overdue.collect::<Vec<_>>() {
            self.failed(transfer, batch, BatchFailure::Faulty, actions);
        }
    }

    /// Grants whatever can be granted, those served longest ago first.
    fn pump(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        loop {
            let takes = |state: &&Transfer| state.out.len() < OUT_MAX && self.path_takes_more(state.route());
            let candidates = self.transfers.iter().filter(|(_, state)| state.wants() && takes(state));
            let Some((&next, _)) = candidates.min_by_key(|(_, state)| state.served) else { break };
            self.grant(now, next, actions);
        }
        self.make_way(actions);
    }

    /// Whether a path takes another batch: one runs on it, one is queued, and each of its lanes
    /// agrees.
    fn path_takes_more(&self, route: Route) -> bool {
        let batches = self.transfers.values().flat_map(|state| &state.out);
        let out = batches.filter(|batch| batch.route == route).count();
        out < OUT_MAX && self.paths[&route].lanes.iter().all(|&lane| self.lanes[lane].takes_more())
    }

    fn grant(&mut self, now: Timestamp, transfer: TransferId, actions: &mut Vec<Action>) {
        let batch = BATCH_CHUNKS.get();
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let Some(mut range) = state.waiting.pop() else { return };
        if range.len() > batch as usize {
            state.waiting.push(range.start + batch..range.end);
            range.end = range.start + batch;
        }
        self.grants += 1;
        let hold = self.grants;
        let route = state.route();
        let path = &self.paths[&route];
        let size = state.cargo.span(&range).1;
        let free = path.lanes.iter().map(|&lane| self.lanes[lane].free_at()).fold(now, Timestamp::max);
        for &lane in &path.lanes {
            self.lanes[lane].hold(hold, free, size);
        }
        let not_after = free + START_SLACK;
        let give_up = not_after + path.time_for(size).saturating_mul(2) + REPORT_SLACK;
        let batch = state.next_batch;
        state.next_batch = BatchId(batch.0 + 1);
        state.served = (now, hold);
        state.out.push(Batch { id: batch, chunks: range.clone(), route, hold, give_up, revoked: false });
        let peer = match &state.source {
            Source::Peer(peer) => Some(peer.of(&range)),
            Source::Host | Source::Asked(_) => None,
        };
        let (gpu, cargo) = (state.gpu, state.cargo);
        let link = self.first_link(route);
        let (not_before, chunks) = (free, range);
        let grant = Grant { link, transfer, batch, gpu, cargo, chunks, peer, not_before, not_after };
        actions.push(Action::Grant { grant });
    }

    /// Takes queued batches back for transfers that have nothing out and find their path full.
    fn make_way(&mut self, actions: &mut Vec<Action>) {
        let stuck = |state: &&Transfer| {
            state.out.is_empty()
                && state.ending.is_none()
                && !matches!(state.source, Source::Asked(_))
                && !self.path_takes_more(state.route())
        };
        let stuck: Vec<_> =
            self.transfers.values().filter(stuck).map(|state| (state.route(), state.served)).collect();
        for (route, served) in stuck {
            let in_the_way = |state: &Transfer| {
                let queued = state.out.get(OUT_MAX - 1);
                queued.is_some_and(|batch| self.shares_a_full_lane(route, batch.route))
            };
            let mut blockers = self.transfers.iter().filter(|(_, state)| in_the_way(state));
            // One at a time: who waits needs one place.
            if blockers.clone().any(|(_, state)| state.out[OUT_MAX - 1].revoked) {
                continue;
            }
            let served_since = blockers.find(|(_, state)| state.served > served);
            if let Some(transfer) = served_since.map(|(&transfer, _)| transfer) {
                self.revoke(transfer, OUT_MAX - 1, actions);
            }
        }
    }

    fn shares_a_full_lane(&self, a: Route, b: Route) -> bool {
        let (a_lanes, b_lanes) = (&self.paths[&a].lanes, &self.paths[&b].lanes);
        a == b || a_lanes.iter().any(|lane| b_lanes.contains(lane) && !self.lanes[*lane].takes_more())
    }
}

impl Core for Fabric {
    type Event = Event;
    type Action = Action;

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        match event {
            Event::Start { transfer, gpu, cargo, chunks, from } => {
                self.start(now, transfer, Route { to: gpu, from }, cargo, chunks, actions);
                self.end_if_over(transfer, actions);
            }
            Event::Locked { transfer, peer } => self.locked(transfer, peer, actions),
            Event::NotLocked { transfer } => self.not_locked(transfer),
            Event::LockLost { transfer } => self.lock_lost(transfer),
            Event::Cancel { transfer } => self.cancel(transfer, actions),
            Event::Done { transfer, batch } => self.done(transfer, batch, actions),
            Event::Failed { transfer, batch, why } => self.failed(transfer, batch, why, actions),
            Event::Down { gpu } => self.down(gpu, actions),
            Event::Tick => self.lose_unreported(now, actions),
        }
        self.pump(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let out = self.transfers.values().flat_map(|state| &state.out);
        out.map(|batch| batch.give_up).min()
    }
}

#[cfg(test)]
mod tests;
