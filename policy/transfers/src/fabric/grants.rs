//! Chooses the transfer that is granted the next batch, and the route of the batch.

use std::time::Duration;

use millrace_types::Timestamp;

use super::host_link_shares::GrantReason;
use super::lanes::{OUT_MAX, TransferRoute};
use super::protocol::{Action, BatchGrant};
use super::scheduler::LinkScheduler;
use super::transfer::{BatchInFlight, TransferSource, TransferState};
use crate::batch::{BATCH, BATCH_CHUNKS};
use crate::rates::TransferSharing;
use millrace_core::ids::{BatchId, TransferId};

/// Latest start of a batch, counted from the planned start. An executor refuses a batch that would
/// begin later, and the fabric grants the chunks again.
pub const START_SLACK: Duration = Duration::from_millis(250);
/// Time after the end of a batch's window after which a batch without a report counts as failed.
pub const REPORT_SLACK: Duration = Duration::from_secs(5);

/// The time of a transfer's last grant, the grant's number, and the transfer. The least value is
/// next.
type ServiceOrder = ((Timestamp, u64), TransferId);

impl LinkScheduler {
    /// Grants every batch that can be granted: first the host batches that are due by their rate,
    /// then the batches of transfers that were served longest ago.
    pub(super) fn grant_all(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        while self.grant_due(actions) {}
        loop {
            let waited_for = self.waited_for();
            let candidates = self.transfers.iter().filter(|(_, state)| state.wants());
            let candidates = candidates.filter(|&(&transfer, _)| !self.has_rate(transfer));
            let turns = candidates.filter_map(|(&transfer, state)| {
                let turn = (state.served, transfer);
                Some((turn, self.next_route(now, turn, state, &waited_for)?))
            });
            let Some(((_, next), route)) = turns.min_by_key(|&(turn, _)| turn) else { break };
            self.grant_longest(next, route, actions);
        }
        self.revoke_for_waiting(actions);
        self.grant_forwarded(actions);
    }

    /// Returns the routes of starving transfers: transfers of a peer's object that have no batch in
    /// flight, with a first route over several lanes. All lanes of such a route must have room at
    /// the same time, so transfers that were served later leave the room to the starving transfer.
    fn waited_for(&self) -> Vec<(ServiceOrder, TransferRoute)> {
        let starves = |state: &&TransferState| {
            state.wants() && state.out.is_empty() && !state.routes().any(|route| self.path_takes_more(route))
        };
        let objects = self.transfers.iter().filter(|(_, state)| state.is_of_peers_object());
        let starving = objects.filter(|(_, state)| starves(state));
        let first = starving
            .filter_map(|(&transfer, state)| Some(((state.served, transfer), state.routes().next()?)));
        first.filter(|(_, route)| self.paths[route].lanes.len() > 1).collect()
    }

    /// Returns the route with room on which the transfer's next batch would arrive first.
    fn next_route(
        &self,
        now: Timestamp,
        turn: ServiceOrder,
        state: &TransferState,
        waited_for: &[(ServiceOrder, TransferRoute)],
    ) -> Option<TransferRoute> {
        let left_to_others = |route: &TransferRoute| {
            let crosses = |other: &TransferRoute| self.shares_a_lane(route, other);
            waited_for.iter().any(|(since, other)| *since < turn && crosses(other))
        };
        let open = state.routes().filter(|route| state.takes_more(route) && self.path_takes_more(*route));
        let mut open = open.filter(|route| !left_to_others(route));
        let first = open.next()?;
        let Some(second) = open.next() else { return Some(first) };
        let there = |route: &TransferRoute| self.free_at(now, route) + self.paths[route].time_for(BATCH);
        [first, second].into_iter().chain(open).min_by_key(there)
    }

    /// Returns the time from which a route can carry another batch.
    pub(super) fn free_at(&self, now: Timestamp, route: &TransferRoute) -> Timestamp {
        let lanes = self.paths[route].lanes.iter();
        lanes.map(|&lane| self.lanes[lane].free_at()).fold(now, Timestamp::max)
    }

    /// Whether a path accepts another batch: at most a single batch runs there, at most a single
    /// batch is queued, and each lane accepts the batch.
    pub(super) fn path_takes_more(&self, route: TransferRoute) -> bool {
        self.out_on(route) < OUT_MAX
            && self.paths[&route].lanes.iter().all(|&lane| self.lanes[lane].takes_more())
    }

    /// Returns the number of batches in flight on a route.
    pub(super) fn out_on(&self, route: TransferRoute) -> usize {
        let batches = self.transfers.values().flat_map(|state| &state.out);
        batches.filter(|batch| batch.route == route).count()
    }

    pub(super) fn grant(
        &mut self,
        transfer: TransferId,
        route: TransferRoute,
        turn: GrantReason,
        actions: &mut Vec<Action>,
    ) {
        let now = self.shares.now;
        let batch_chunks = BATCH_CHUNKS.get();
        let free = self.free_at(now, &route);
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let Some(mut range) = state.waiting.pop() else { return };
        if range.len() > batch_chunks as usize {
            state.waiting.push(range.start + batch_chunks..range.end);
            range.end = range.start + batch_chunks;
        }
        self.grants += 1;
        let hold = self.grants;
        let path = &self.paths[&route];
        let size = state.cargo.span(&range).1;
        for &lane in &path.lanes {
            self.lanes[lane].hold(hold, free, size);
        }
        let not_after = free + START_SLACK;
        let give_up = not_after + path.time_for(size).saturating_mul(2) + REPORT_SLACK;
        let batch = state.next_batch;
        state.next_batch = BatchId(batch.0 + 1);
        let in_turns = route.host_way().is_none() || self.shares.sharing != TransferSharing::Fifo;
        let served_before = state.served;
        // A forwarded batch uses links that are idle, so it does not use up the transfer's turn.
        if in_turns && route.forwarded().is_none() {
            state.served = (now, hold);
        }
        let not_before = free;
        let chunks = range.clone();
        state.out.push(BatchInFlight {
            id: batch,
            chunks,
            route,
            hold,
            give_up,
            revoked: false,
            not_before,
            turn,
            served_before,
        });
        let peer = match &state.source {
            TransferSource::Peer(peer) => Some(peer.of(&range)),
            TransferSource::Host | TransferSource::Asked(_) => None,
        };
        let gpu = state.gpu;
        let cargo = state.cargo;
        let via = route.forwarded();
        let link = self.first_link(route);
        let chunks = range;
        let grant =
            BatchGrant { link, transfer, batch, gpu, cargo, chunks, peer, via, not_before, not_after };
        actions.push(Action::Grant { grant });
    }

    /// Revokes queued batches for transfers that have no batch in flight and find their path full.
    /// Such a transfer is either new and the tightest of its link, or has no rate and was served
    /// before the transfer that loses the batch.
    fn revoke_for_waiting(&mut self, actions: &mut Vec<Action>) {
        let newcomers = self.newcomers_without_room();
        let stuck = |&(transfer, state): &(&TransferId, &TransferState)| {
            state.out.is_empty()
                && state.ending.is_none()
                && !matches!(state.source, TransferSource::Asked(_))
                && ((newcomers.contains(transfer) && !state.took_back) || !self.has_rate(*transfer))
                && !state.routes().any(|route| self.path_takes_more(route))
        };
        let first =
            |(&transfer, state): (&TransferId, &TransferState)| Some((transfer, state.routes().next()?));
        let stuck: Vec<_> = self.transfers.iter().filter(stuck).filter_map(first).collect();
        for (waits, route) in stuck {
            let is_new = newcomers.contains(&waits);
            let in_the_way = |(&transfer, state): (&TransferId, &TransferState)| {
                let early = |place: usize| is_new && state.out[place].not_before > self.shares.now;
                let queued = |&place: &usize| early(place) || state.queued().any(|it| it == place);
                let blocks = |&place: &usize| self.blocks_route(&state.out[place].route, &route);
                let mut places = (0..state.out.len()).filter(queued).filter(blocks);
                let revoked = places.clone().find(|&place| is_new && state.out[place].revoked);
                Some((transfer, revoked.or_else(|| places.next())?))
            };
            let blockers = self.transfers.iter().filter_map(in_the_way);
            let batch = |(transfer, place): (TransferId, usize)| &self.transfers[&transfer].out[place];
            // Revoke one batch at a time: a waiting transfer needs a single slot.
            if blockers.clone().any(|blocker| batch(blocker).revoked) {
                continue;
            }
            let yields = |&(transfer, place): &(TransferId, usize)| {
                let waiting = &self.transfers[&waits];
                let other = &self.transfers[&transfer];
                if is_new {
                    other.out[place].turn.makes_way_for(waiting.wanted, other.wanted)
                } else {
                    matches!(other.out[place].turn, GrantReason::Longest { .. })
                        && other.served > waiting.served
                }
            };
            // Batches that were granted without a rate are revoked first.
            let due = |blocker| matches!(batch(blocker).turn, GrantReason::Due(_));
            let rank =
                |&blocker: &(TransferId, usize)| (due(blocker), is_new.then_some(batch(blocker).not_before));
            if let Some((transfer, place)) = blockers.filter(yields).min_by_key(rank) {
                self.revoke(transfer, place, actions);
                if let Some(state) = self.transfers.get_mut(&waits).filter(|_| is_new) {
                    state.took_back = true;
                }
            }
        }
    }

    pub(super) fn shares_a_lane(&self, a: &TransferRoute, b: &TransferRoute) -> bool {
        let a_lanes = &self.paths[a].lanes;
        let b_lanes = &self.paths[b].lanes;
        a_lanes.iter().any(|lane| b_lanes.contains(lane))
    }

    /// Whether revoking a batch on the route `other` makes room for a batch that waits for the
    /// route `waiting`. On a path from the host each link leads to the next, so a batch that
    /// crosses the path's first full link also crosses the links after it. A batch that does not
    /// cross the first full link must not be revoked: another transfer could take the slot, and the
    /// slot would be revoked again without end.
    fn blocks_route(&self, other: &TransferRoute, waiting: &TransferRoute) -> bool {
        let lanes = &self.paths[other].lanes;
        let mut full = self.paths[waiting].lanes.iter().filter(|&&lane| !self.lanes[lane].takes_more());
        if other == waiting {
            true
        } else if waiting.host_way().is_none() {
            full.any(|lane| lanes.contains(lane))
        } else {
            self.out_on(*waiting) < OUT_MAX && full.next().is_some_and(|lane| lanes.contains(lane))
        }
    }
}
