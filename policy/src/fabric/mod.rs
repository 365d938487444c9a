//! Which bytes cross which link when. One core of the Node actor; it keeps the state of all links,
//! so that a transfer is given whole paths and never holds one link while it waits for another.
//!
//! A transfer moves in chunks of 2 MiB (D12), granted in batches of five (D13). Per path one batch
//! runs and at most one more is queued, which can be taken back: a link never idles for a message,
//! and a newcomer waits for one batch at most. Batches are paced: the next may begin when the
//! previous would have ended at the link's rate, so a slowed link really is slow.
//!
//! Who is next: the transfer that was served longest ago. A newcomer counts as served two batches
//! ago, so it overtakes only those which were served since: nobody starves. From the host and to it,
//! transfers that somebody waits for go by the rates that they need instead (`sharing`; D14 to D16). The
//! directions of a link do not share its rate, and none waits for the other.
//!
//! **From another GPU** (T22, T25). A transfer that is to come from a peer asks that GPU first to
//! lock the model where it is, and then crosses the NVLink between them, each direction of which is
//! a lane of its own. It holds the lock until it ends, whichever way, or until the peer is lost. Where
//! there is no such link, no lock is given, the peer goes or a copy from it fails, what is still to
//! come takes the path from the host: a peer makes a transfer faster and never makes it fail.
//!
//! **Objects** (D07, D20, D22; `routes`) come from the host like weights, or from the GPU that has them,
//! which locks them, over several routes at once as [`paths`](crate::paths) chooses, other GPUs in
//! between included. Nobody else has their bytes: where the GPU is lost, a copy from it fails or no
//! route leads there, the transfer fails.
//!
//! **Over others' links** (D05; `forwards`). What comes from the host, or goes there, may cross idle PCIe links
//! of other GPUs as well, which forward it.
//!
//! **To the host** objects cross the GPU's way from there in the other direction, copied by its own
//! executor. What fails is granted again, as from the host.
//!
//! ```text
//! Start, Hasten, Cancel ───────────────► ┌────────┐ ──► Arrived, Ended          to the Gpu
//! Locked, NotLocked (from the peer) ───► │        │
//! Done, Failed (from the path's Link) ─► │ fabric │ ──► Lock, Unlock            to the peer
//! Down ────────────────────────────────► └────────┘ ──► Grant, Revoke, Carried  to the Links
//! ```

mod forwards;
mod grants;
mod lanes;
pub mod link;
mod locks;
mod protocol;
mod routes;
mod sharing;
mod tally;
mod transfer;

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::ops::Range;
use std::time::Duration;

use millrace_types::topology::{LinkId, Topology};
use millrace_types::{Bytes, GpuIndex, Timestamp};

pub use self::protocol::{
    Action, BatchFailure, Cargo, Event, Grant, Leaving, Outcome, PeerBlocks, Piece, Weights,
};
pub use self::routes::routes_of;
pub use self::sharing::SPARE_EVERY;
pub use self::tally::{Counts, Tally, Wait};

use self::lanes::{Lane, Path, Route};
use self::sharing::{Shares, Wanted};
use self::transfer::{Batch, OUT_MAX, Source, Transfer};
use crate::core::Core;
use crate::decision_text::DecisionText;
use crate::ids::{BatchId, TransferId};
use crate::memory::BLOCK;
use crate::paths::{Direction, Paths};
use crate::rates::{Objective, Sharing, Standing};

/// Chunks in a batch (D13).
pub const BATCH_CHUNKS: NonZeroU32 = NonZeroU32::new(5).expect("not zero");
/// How much later than planned a batch may begin; after that it is refused and granted again.
pub const START_SLACK: Duration = Duration::from_millis(250);
/// How long after the end of its window a batch that nobody reported counts as failed.
pub const REPORT_SLACK: Duration = Duration::from_secs(5);
/// Failures in a row that end a transfer.
pub const FAILURES_MAX: u32 = 3;

/// All links of a node, towards its GPUs and from there to the host.
#[derive(Debug)]
pub struct Fabric {
    topology: Topology,
    lanes: Vec<Lane>,
    paths: BTreeMap<Route, Path>,
    /// Who of the objects' transfers has which NVLinks; `None` where there are too many for it.
    routes: Option<Paths>,
    /// By GPU and direction: the ways by which others may forward for it, the best first. None where each
    /// keeps to its own.
    forwards: BTreeMap<(Direction, GpuIndex), Vec<Route>>,
    /// How transfers from the host, and those to it, share their links.
    shares: Shares,
    transfers: BTreeMap<TransferId, Transfer>,
    grants: u64,
}

impl Fabric {
    /// Idle links, those of the host shared by objective.
    ///
    /// # Panics
    /// When a GPU has no path from the host: such a topology is not one.
    #[must_use]
    pub fn new(topology: &Topology) -> Self {
        Self::with_sharing(topology, Sharing::default())
    }

    /// Idle links, those of the host shared like this.
    ///
    /// # Panics
    /// When a GPU has no path from the host: such a topology is not one.
    #[must_use]
    pub fn with_sharing(topology: &Topology, sharing: Sharing) -> Self {
        let (lanes, paths) = lanes::lay(topology);
        let routes = routes_of(topology).ok();
        let (shares, forwards) = (Shares::new(topology, sharing), BTreeMap::new());
        let topology = topology.clone();
        Self { topology, lanes, paths, routes, forwards, shares, transfers: BTreeMap::new(), grants: 0 }
    }

    /// What it has counted so far.
    #[must_use]
    pub fn tally(&self) -> &Tally {
        &self.shares.tally
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
        (gpu, from): (GpuIndex, Option<GpuIndex>),
        (cargo, chunks): (Cargo, Vec<Range<u32>>),
        objective: Option<Objective>,
        actions: &mut Vec<Action>,
    ) {
        let waiting: Vec<_> = chunks.into_iter().rev().filter(|range| !range.is_empty()).collect();
        let from = from.filter(|_| !waiting.is_empty());
        let leads = from.filter(|&from| match cargo {
            Cargo::Weights(_) => self.paths.contains_key(&Route::direct(from, gpu)),
            Cargo::Object(_) => self.routes.as_ref().is_some_and(|routes| routes.lead(from, gpu)),
            Cargo::ToHost(_) => false,
        });
        let nowhere = matches!(cargo, Cargo::Object(_)) && from.is_some() && leads.is_none();
        let direct =
            leads.map(|from| Route::direct(from, gpu)).filter(|route| self.paths.contains_key(route));
        let of_host = Route::Host(cargo.direction(), gpu);
        let served = self.head_start(now, &direct.unwrap_or(of_host));
        if let Some(from) = leads {
            actions.push(Action::Lock { gpu: from, transfer, cargo });
        }
        let transfer_state = Transfer {
            gpu,
            cargo,
            source: leads.map_or(Source::Host, Source::Asked),
            locked: None,
            waiting,
            out: Vec::with_capacity(OUT_MAX),
            next_batch: BatchId(0),
            failures: 0,
            served,
            ending: nowhere.then_some(Outcome::Failed),
            routes: Vec::new(),
            used: Vec::new(),
            forwarded: true,
            wanted: objective.map(|objective| Wanted::new(now, objective)),
            standing: Standing::Unpromised,
            began: now,
            begun: false,
            measured: now,
            took_back: false,
        };
        self.transfers.insert(transfer, transfer_state);
        self.promise(transfer);
    }

    /// Somebody waits for a transfer from now on.
    fn hasten(&mut self, now: Timestamp, transfer: TransferId, objective: Objective) {
        let nobody = |state: &&mut Transfer| state.wanted.is_none();
        if let Some(state) = self.transfers.get_mut(&transfer).filter(nobody) {
            state.wanted = Some(Wanted::new(now, objective));
            self.promise(transfer);
        }
    }

    /// A newcomer counts as served two batches ago; where who came first goes first, as served when it
    /// came.
    fn head_start(&self, now: Timestamp, route: &Route) -> (Timestamp, u64) {
        if route.host_way().is_some() && self.shares.sharing == Sharing::Fifo {
            return (now, self.grants);
        }
        let batch = Bytes(BLOCK.0 * u64::from(BATCH_CHUNKS.get()));
        let head_start = self.paths[route].time_for(batch).saturating_mul(2);
        let head_start = u64::try_from(head_start.as_nanos()).unwrap_or(u64::MAX);
        (Timestamp(now.0.saturating_sub(head_start)), self.grants)
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
        let (cargo, size) = (state.cargo, state.cargo.span(&batch.chunks).1);
        if let Some(hops) = batch.route.hops().filter(|hops| !state.used.contains(hops))
            && matches!(cargo, Cargo::Object(_))
        {
            state.used.push(hops);
        }
        self.crossed(transfer, &batch, size);
        for (place, &lane) in self.paths[&batch.route].lanes.iter().enumerate() {
            self.lanes[lane].carried(batch.hold);
            if place > 0 {
                // By where it goes, as the link that issued it counts.
                let (link, direction) = (self.lanes[lane].link, cargo.direction());
                actions.push(Action::Carried { link, direction, size });
            }
        }
        actions.push(Action::Arrived { gpu: batch.route.gpu(), cargo, chunks: batch.chunks });
        self.end_if_over(transfer, actions);
    }

    fn failed(&mut self, transfer: TransferId, batch: BatchId, why: BatchFailure, actions: &mut Vec<Action>) {
        let Some((batch, state)) = self.take_batch(transfer, batch) else { return };
        state.waiting.push(batch.chunks.clone());
        match (why, batch.route) {
            (BatchFailure::NotBegun, _) => {}
            // Whatever is wrong may be wrong with the peer alone.
            (BatchFailure::Faulty, Route::Over(_)) => self.lose_source(transfer, actions),
            // Or with the neighbour.
            (BatchFailure::Faulty, Route::Forwarded(..)) => state.forwarded = false,
            (BatchFailure::Faulty, Route::Host(..)) => {
                state.failures += 1;
                if state.failures >= FAILURES_MAX {
                    state.ending.get_or_insert(Outcome::Failed);
                }
            }
        }
        for &lane in &self.paths[&batch.route].lanes {
            self.lanes[lane].release(batch.hold);
        }
        self.uncrossed(batch);
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
            let (gpu, from, routes) = (state.gpu, state.source.peer(), state.used.clone());
            actions.push(Action::Ended { gpu, transfer, outcome, from, routes });
            self.forget(transfer);
        }
    }

    /// Ends a transfer as soon as nothing of it is out.
    fn give_up(&mut self, transfer: TransferId, outcome: Outcome, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        state.ending.get_or_insert(outcome);
        for place in 1..state.out.len() {
            self.revoke(transfer, place, actions);
        }
        self.leave(transfer);
        self.end_if_over(transfer, actions);
    }

    fn revoke(&mut self, transfer: TransferId, place: usize, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let Some(batch) = state.out.get_mut(place).filter(|batch| !batch.revoked) else { return };
        batch.revoked = true;
        let (batch, route) = (batch.id, batch.route);
        actions.push(Action::Revoke { link: self.first_link(route), gpu: route.gpu(), transfer, batch });
    }

    fn down(&mut self, gpu: GpuIndex, actions: &mut Vec<Action>) {
        let (mut gone, mut failed, mut on) = (Vec::new(), Vec::new(), Vec::new());
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
                gone.push(transfer);
            } else if state.source.peer() == Some(gpu) || state.locked == Some(gpu) {
                // It forgot its locks. What is out from it either comes whole or fails.
                state.locked = None;
                if state.is_of_peers_object() {
                    failed.push(transfer);
                } else {
                    state.source = Source::Host;
                    on.push(transfer);
                }
            }
        }
        on.into_iter().for_each(|transfer| self.promise(transfer));
        gone.into_iter().for_each(|transfer| self.forget(transfer));
        failed.into_iter().for_each(|transfer| self.give_up(transfer, Outcome::Failed, actions));
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
}

impl Core for Fabric {
    type Event = Event;
    type Action = Action;

    fn decision(action: &Action) -> Option<DecisionText> {
        let Action::Grant { grant } = action else { return None };
        let (_, bytes) = grant.cargo.span(&grant.chunks);
        let named = DecisionText::new("grant").gpu(grant.gpu).bytes(bytes);
        Some(match &grant.cargo {
            Cargo::Weights(weights) => named.model(weights.model),
            Cargo::Object(piece) => named.object(piece.of),
            Cargo::ToHost(_) => DecisionText::new("grant to the host").gpu(grant.gpu).bytes(bytes),
        })
    }

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        self.shares.now = now;
        match event {
            Event::Start { transfer, gpu, cargo, chunks, from, objective } => {
                self.start(now, transfer, (gpu, from), (cargo, chunks), objective, actions);
                self.end_if_over(transfer, actions);
            }
            Event::Hasten { transfer, objective } => self.hasten(now, transfer, objective),
            Event::Locked { transfer, peer } => self.locked(transfer, peer, actions),
            Event::NotLocked { transfer } => self.not_locked(transfer, actions),
            Event::LockLost { transfer } => self.lose_source(transfer, actions),
            Event::Cancel { transfer } => self.give_up(transfer, Outcome::Cancelled, actions),
            Event::Done { transfer, batch } => self.done(transfer, batch, actions),
            Event::Failed { transfer, batch, why } => self.failed(transfer, batch, why, actions),
            Event::Down { gpu } => self.down(gpu, actions),
            Event::Change { sharing, host_links } => {
                self.use_host_links(host_links);
                self.share_anew(sharing);
            }
            Event::Tick => self.lose_unreported(now, actions),
        }
        self.pump(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let out = self.transfers.values().flat_map(|state| &state.out);
        out.map(|batch| batch.give_up).chain(self.next_idle()).min()
    }
}

#[cfg(test)]
mod tests;
