//! Decides which bytes cross which link, and when. The fabric is a core of the Node actor and keeps
//! the state of all links of the node. The fabric therefore grants a transfer whole paths: no
//! transfer holds a link while waiting for another.
//!
//! A transfer moves in chunks of 2 MiB (D12), granted in batches of five chunks (D13). On each path
//! one batch runs and at most one more batch is queued; the queued batch can be revoked. So a link
//! never idles while a message is in flight, and a new transfer waits for a single batch at most.
//! Batches are paced: the next batch may begin when the previous batch would have ended at the
//! link's rate, so a link with a low configured rate really is slow.
//!
//! The next batch is granted to the transfer that was served longest ago. A new transfer counts as
//! served two batches ago, so a new transfer overtakes only transfers that were served since then,
//! and no transfer starves. Transfers between the host and a GPU that a request waits for are
//! granted at the needed rates instead (`host_link_sharing`; D14 to D16). The two directions of a link do not
//! share a rate, and neither direction waits for the other.
//!
//! **Weights from another GPU** (T22, T25). The fabric first asks the peer GPU to lock the model in
//! its memory. The transfer then crosses the NVLink between the two GPUs; each direction of that
//! link is a lane of its own. The transfer holds the lock until the transfer ends in any way, or
//! until the peer is lost. If the pair has no NVLink, the peer refuses the lock, the peer is lost,
//! or a copy from the peer fails, the remaining bytes take the path from the host. A peer makes a
//! transfer faster and never causes a failure.
//!
//! **Objects** (D07, D20, D22; `routes`) are copied from the host like weights, or from the GPU
//! that holds the object. That GPU locks the object, and the bytes cross several routes at once,
//! chosen by [`paths`](crate::paths); routes may cross other GPUs. No other place has the bytes: if
//! the GPU is lost, a copy from it fails or no route exists, the transfer fails.
//!
//! **PCIe links of other GPUs** (D05; `forwarding`). Data between the host and a GPU may also cross
//! idle PCIe links of other GPUs, which forward the data.
//!
//! **To the host**, objects cross the GPU's host path in the other direction, copied by the GPU's
//! own executor. A batch that fails is granted again, as for transfers from the host.
//!
//! ```text
//! Start, Hasten, Cancel ───────────────► ┌────────┐ ──► Arrived, Ended          to the Gpu
//! Locked, NotLocked (from the peer) ───► │        │
//! Done, Failed (from the path's Link) ─► │ fabric │ ──► Lock, Unlock            to the peer
//! Down ────────────────────────────────► └────────┘ ──► Grant, Revoke, Carried  to the Links
//! ```

mod forwarding;
mod grants;
mod host_link_shares;
mod host_link_sharing;
mod lanes;
pub mod link;
mod locks;
mod protocol;
mod routes;
mod scheduler;
mod tally;
mod transfer;

use std::ops::Range;

use millrace_types::{GpuIndex, Timestamp};

pub use self::grants::{REPORT_SLACK, START_SLACK};
pub use self::host_link_shares::SPARE_EVERY;
pub use self::protocol::{
    Action, BatchFailure, BatchGrant, Event, ObjectPiece, OutgoingCopy, PeerBlocks, TransferCargo,
    TransferOutcome, WeightsCargo,
};
pub use self::scheduler::{LinkScheduler, object_route_planner};
pub use self::tally::{FirstBatchWait, GuaranteeCounts, TransferCounts};
pub use crate::batch::BATCH_CHUNKS;

use self::host_link_shares::TransferDeadline;
use self::lanes::{OUT_MAX, TransferRoute};
use self::transfer::{BatchInFlight, TransferSource, TransferState};
use crate::batch::BATCH;
use crate::rates::{RateGuarantee, TransferObjective, TransferSharing};
use millrace_core::Core;
use millrace_core::decision_text::DecisionText;
use millrace_core::ids::{BatchId, TransferId};

/// Failed batches in a row that end a transfer.
pub const FAILURES_MAX: u32 = 3;

/// The arguments of a transfer that is about to start.
struct TransferRequest {
    transfer: TransferId,
    /// The destination GPU, or the source of data for the host.
    gpu: GpuIndex,
    /// The GPU to copy from; `None` for the host.
    from: Option<GpuIndex>,
    cargo: TransferCargo,
    /// The chunks of the cargo, in the order to copy them.
    chunks: Vec<Range<u32>>,
}

impl LinkScheduler {
    fn start(
        &mut self,
        now: Timestamp,
        request: TransferRequest,
        objective: Option<TransferObjective>,
        actions: &mut Vec<Action>,
    ) {
        let TransferRequest { transfer, gpu, from, cargo, chunks } = request;
        let waiting: Vec<_> = chunks.into_iter().rev().filter(|range| !range.is_empty()).collect();
        let from = from.filter(|_| !waiting.is_empty());
        let leads = from.filter(|&from| match cargo {
            TransferCargo::Weights(_) => self.paths.contains_key(&TransferRoute::direct(from, gpu)),
            TransferCargo::Object(_) => {
                self.routes.as_ref().is_some_and(|routes| routes.is_reachable(from, gpu))
            }
            TransferCargo::ToHost(_) => false,
        });
        let nowhere = matches!(cargo, TransferCargo::Object(_)) && from.is_some() && leads.is_none();
        let direct =
            leads.map(|from| TransferRoute::direct(from, gpu)).filter(|route| self.paths.contains_key(route));
        let of_host = TransferRoute::Host(cargo.direction(), gpu);
        let served = self.head_start(now, &direct.unwrap_or(of_host));
        if let Some(from) = leads {
            actions.push(Action::Lock { gpu: from, transfer, cargo });
        }
        let transfer_state = TransferState {
            gpu,
            cargo,
            source: leads.map_or(TransferSource::Host, TransferSource::Asked),
            locked: None,
            waiting,
            out: Vec::with_capacity(OUT_MAX),
            next_batch: BatchId(0),
            failures: 0,
            served,
            ending: nowhere.then_some(TransferOutcome::Failed),
            routes: Vec::new(),
            used: Vec::new(),
            forwarded: true,
            wanted: objective.map(|objective| TransferDeadline::new(now, objective)),
            guarantee: RateGuarantee::Unpromised,
            began: now,
            begun: false,
            measured: now,
            took_back: false,
        };
        self.transfers.insert(transfer, transfer_state);
        self.request_rate(transfer);
    }

    /// Records that a request waits for a transfer that no request waited for before.
    fn hasten(&mut self, now: Timestamp, transfer: TransferId, objective: TransferObjective) {
        let nobody = |state: &&mut TransferState| state.wanted.is_none();
        if let Some(state) = self.transfers.get_mut(&transfer).filter(nobody) {
            state.wanted = Some(TransferDeadline::new(now, objective));
            self.request_rate(transfer);
        }
    }

    /// Returns the time and the number of grants at which a new transfer counts as served: two
    /// batches ago, or its arrival if host links are shared first come, first served.
    fn head_start(&self, now: Timestamp, route: &TransferRoute) -> (Timestamp, u64) {
        if route.host_way().is_some() && self.shares.sharing == TransferSharing::Fifo {
            return (now, self.grants);
        }
        let head_start = self.paths[route].time_for(BATCH).saturating_mul(2);
        let head_start = u64::try_from(head_start.as_nanos()).unwrap_or(u64::MAX);
        (Timestamp(now.0.saturating_sub(head_start)), self.grants)
    }

    /// Removes a batch that ended from its transfer.
    fn take_batch(
        &mut self,
        transfer: TransferId,
        batch: BatchId,
    ) -> Option<(BatchInFlight, &mut TransferState)> {
        let state = self.transfers.get_mut(&transfer)?;
        let place = state.out.iter().position(|out| out.id == batch)?;
        Some((state.out.remove(place), state))
    }

    fn done(&mut self, transfer: TransferId, batch: BatchId, actions: &mut Vec<Action>) {
        let Some((batch, state)) = self.take_batch(transfer, batch) else { return };
        state.failures = 0;
        let cargo = state.cargo;
        let size = cargo.span(&batch.chunks).1;
        if let Some(hops) = batch.route.hops().filter(|hops| !state.used.contains(hops))
            && matches!(cargo, TransferCargo::Object(_))
        {
            state.used.push(hops);
        }
        self.record_crossed_batch(transfer, &batch, size);
        for (place, &lane) in self.paths[&batch.route].lanes.iter().enumerate() {
            self.lanes[lane].carried(batch.hold);
            if place > 0 {
                // The direction is that of the cargo, as in the counts of the link that issued the batch.
                let link = self.lanes[lane].link;
                let direction = cargo.direction();
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
            // A transfer that loses its only batch keeps its place among the transfers that wait. Otherwise new
            // transfers could take the place of each of its batches, and the transfer would starve.
            (BatchFailure::NotBegun, _) => {
                if batch.revoked && state.out.is_empty() && state.served.1 == batch.hold {
                    state.served = batch.served_before;
                }
            }
            // The fault may be the peer's alone: fetch the rest from the host.
            (BatchFailure::Faulty, TransferRoute::Over(_)) => self.lose_source(transfer, actions),
            // The fault may be the forwarding GPU's alone: use the GPU's own link from now on.
            (BatchFailure::Faulty, TransferRoute::Forwarded(..)) => state.forwarded = false,
            (BatchFailure::Faulty, TransferRoute::Host(..)) => {
                state.failures += 1;
                if state.failures >= FAILURES_MAX {
                    state.ending.get_or_insert(TransferOutcome::Failed);
                }
            }
        }
        for &lane in &self.paths[&batch.route].lanes {
            self.lanes[lane].release(batch.hold);
        }
        self.return_batch(batch);
        self.end_if_over(transfer, actions);
    }

    fn end_if_over(&mut self, transfer: TransferId, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get(&transfer) else { return };
        if !state.out.is_empty() {
            return;
        }
        let outcome = if state.waiting.is_empty() { Some(TransferOutcome::Complete) } else { state.ending };
        if let Some(outcome) = outcome {
            if let Some(gpu) = state.locked {
                actions.push(Action::Unlock { gpu, transfer });
            }
            let gpu = state.gpu;
            let from = state.source.peer();
            let routes = state.used.clone();
            actions.push(Action::Ended { gpu, transfer, outcome, from, routes });
            self.forget(transfer);
        }
    }

    /// Ends a transfer as soon as none of its batches is in flight.
    fn give_up(&mut self, transfer: TransferId, outcome: TransferOutcome, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        state.ending.get_or_insert(outcome);
        for place in 1..state.out.len() {
            self.revoke(transfer, place, actions);
        }
        self.end_rate(transfer);
        self.end_if_over(transfer, actions);
    }

    fn revoke(&mut self, transfer: TransferId, place: usize, actions: &mut Vec<Action>) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let Some(batch) = state.out.get_mut(place).filter(|batch| !batch.revoked) else { return };
        batch.revoked = true;
        let batch_id = batch.id;
        let route = batch.route;
        let link = self.first_link(route);
        actions.push(Action::Revoke { link, gpu: route.gpu(), transfer, batch: batch_id });
    }

    fn down(&mut self, gpu: GpuIndex, actions: &mut Vec<Action>) {
        let mut gone = Vec::new();
        let mut failed = Vec::new();
        let mut redirected = Vec::new();
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
                // The lost GPU has forgotten all locks. Each batch in flight from that GPU either
                // arrives whole or fails.
                state.locked = None;
                if state.is_of_peers_object() {
                    failed.push(transfer);
                } else {
                    state.source = TransferSource::Host;
                    redirected.push(transfer);
                }
            }
        }
        redirected.into_iter().for_each(|transfer| self.request_rate(transfer));
        gone.into_iter().for_each(|transfer| self.forget(transfer));
        failed.into_iter().for_each(|transfer| self.give_up(transfer, TransferOutcome::Failed, actions));
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

impl Core for LinkScheduler {
    type Event = Event;
    type Action = Action;

    fn decision(action: &Action) -> Option<DecisionText> {
        let Action::Grant { grant } = action else { return None };
        let (_, bytes) = grant.cargo.span(&grant.chunks);
        let named = DecisionText::new("grant").gpu(grant.gpu).bytes(bytes);
        Some(match &grant.cargo {
            TransferCargo::Weights(weights) => named.model(weights.model),
            TransferCargo::Object(piece) => named.object(piece.of),
            TransferCargo::ToHost(_) => DecisionText::new("grant to the host").gpu(grant.gpu).bytes(bytes),
        })
    }

    fn on_event(&mut self, now: Timestamp, event: Event, actions: &mut Vec<Action>) {
        self.shares.now = now;
        match event {
            Event::Start { transfer, gpu, cargo, chunks, from, objective } => {
                let request = TransferRequest { transfer, gpu, from, cargo, chunks };
                self.start(now, request, objective, actions);
                self.end_if_over(transfer, actions);
            }
            Event::Hasten { transfer, objective } => self.hasten(now, transfer, objective),
            Event::Locked { transfer, peer } => self.locked(transfer, peer, actions),
            Event::NotLocked { transfer } => self.not_locked(transfer, actions),
            Event::LockLost { transfer } => self.lose_source(transfer, actions),
            Event::Cancel { transfer } => self.give_up(transfer, TransferOutcome::Cancelled, actions),
            Event::Done { transfer, batch } => self.done(transfer, batch, actions),
            Event::Failed { transfer, batch, why } => self.failed(transfer, batch, why, actions),
            Event::Down { gpu } => self.down(gpu, actions),
            Event::Change { sharing, host_links } => {
                self.use_host_links(host_links);
                self.set_sharing(sharing);
            }
            Event::Tick => self.lose_unreported(now, actions),
        }
        self.grant_all(now, actions);
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let out = self.transfers.values().flat_map(|state| &state.out);
        out.map(|batch| batch.give_up).chain(self.next_idle()).min()
    }
}

#[cfg(test)]
mod tests;
