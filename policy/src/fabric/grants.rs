//! Who is granted the next batch, over which route.

use millrace_types::{Bytes, Timestamp};

use super::lanes::Route;
use super::protocol::{Action, Grant};
use super::transfer::{Batch, OUT_MAX, Source, Transfer};
use super::{BATCH_CHUNKS, Fabric, REPORT_SLACK, START_SLACK};
use crate::ids::{BatchId, TransferId};
use crate::memory::BLOCK;

/// Who was served when: the least is next.
type Turn = ((Timestamp, u64), TransferId);

impl Fabric {
    /// Grants whatever can be granted, those served longest ago first.
    pub(super) fn pump(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        loop {
            let waited_for = self.waited_for();
            let candidates = self.transfers.iter().filter(|(_, state)| state.wants());
            let turns = candidates.filter_map(|(&transfer, state)| {
                let turn = (state.served, transfer);
                Some((turn, self.next_route(now, turn, state, &waited_for)?))
            });
            let Some(((_, next), route)) = turns.min_by_key(|&(turn, _)| turn) else { break };
            self.grant(now, next, route, actions);
        }
        self.make_way(actions);
    }

    /// Routes over several lanes whose transfers have nothing out: all of these must have room at one
    /// time, so those who were served since let them have it.
    fn waited_for(&self) -> Vec<(Turn, Route)> {
        let starves = |state: &&Transfer| {
            state.wants() && state.out.is_empty() && !state.routes().any(|route| self.path_takes_more(route))
        };
        let objects = self.transfers.iter().filter(|(_, state)| state.is_of_peers_object());
        let starving = objects.filter(|(_, state)| starves(state));
        let first = starving
            .filter_map(|(&transfer, state)| Some(((state.served, transfer), state.routes().next()?)));
        first.filter(|(_, route)| self.paths[route].lanes.len() > 1).collect()
    }

    /// The route that a transfer's next batch may take now: the one on which it would be there first.
    fn next_route(
        &self,
        now: Timestamp,
        turn: Turn,
        state: &Transfer,
        waited_for: &[(Turn, Route)],
    ) -> Option<Route> {
        let left_to_others = |route: &Route| {
            let crosses = |other: &Route| self.shares_a_lane(route, other);
            waited_for.iter().any(|(since, other)| *since < turn && crosses(other))
        };
        let open = state.routes().filter(|route| state.takes_more(route) && self.path_takes_more(*route));
        let mut open = open.filter(|route| !left_to_others(route));
        let first = open.next()?;
        let Some(second) = open.next() else { return Some(first) };
        let batch = Bytes(BLOCK.0 * u64::from(BATCH_CHUNKS.get()));
        let there = |route: &Route| self.free_at(now, route) + self.paths[route].time_for(batch);
        [first, second].into_iter().chain(open).min_by_key(there)
    }

    /// From when on a batch can take a route.
    fn free_at(&self, now: Timestamp, route: &Route) -> Timestamp {
        let lanes = self.paths[route].lanes.iter();
        lanes.map(|&lane| self.lanes[lane].free_at()).fold(now, Timestamp::max)
    }

    /// Whether a path takes another batch: one runs on it, one is queued, and each of its lanes
    /// agrees.
    fn path_takes_more(&self, route: Route) -> bool {
        let batches = self.transfers.values().flat_map(|state| &state.out);
        let out = batches.filter(|batch| batch.route == route).count();
        out < OUT_MAX && self.paths[&route].lanes.iter().all(|&lane| self.lanes[lane].takes_more())
    }

    fn grant(&mut self, now: Timestamp, transfer: TransferId, route: Route, actions: &mut Vec<Action>) {
        let batch = BATCH_CHUNKS.get();
        let free = self.free_at(now, &route);
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let Some(mut range) = state.waiting.pop() else { return };
        if range.len() > batch as usize {
            state.waiting.push(range.start + batch..range.end);
            range.end = range.start + batch;
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
                && !state.routes().any(|route| self.path_takes_more(route))
        };
        let first = |state: &Transfer| Some((state.routes().next()?, state.served));
        let stuck: Vec<_> = self.transfers.values().filter(stuck).filter_map(first).collect();
        for (route, served) in stuck {
            let in_the_way = |(&transfer, state): (&TransferId, &Transfer)| {
                let shares = |&place: &usize| self.shares_a_full_lane(&route, &state.out[place].route);
                let place = state.queued().find(shares)?;
                Some((transfer, place, state.served, state.out[place].revoked))
            };
            let mut blockers = self.transfers.iter().filter_map(in_the_way);
            // One at a time: who waits needs one place.
            if blockers.clone().any(|(.., revoked)| revoked) {
                continue;
            }
            if let Some((transfer, place, ..)) = blockers.find(|&(_, _, since, _)| since > served) {
                self.revoke(transfer, place, actions);
            }
        }
    }

    fn shares_a_lane(&self, a: &Route, b: &Route) -> bool {
        let (a_lanes, b_lanes) = (&self.paths[a].lanes, &self.paths[b].lanes);
        a_lanes.iter().any(|lane| b_lanes.contains(lane))
    }

    fn shares_a_full_lane(&self, a: &Route, b: &Route) -> bool {
        let (a_lanes, b_lanes) = (&self.paths[a].lanes, &self.paths[b].lanes);
        a == b || a_lanes.iter().any(|lane| b_lanes.contains(lane) && !self.lanes[*lane].takes_more())
    }
}
