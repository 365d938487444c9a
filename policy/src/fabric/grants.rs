//! Who is granted the next batch, over which route.

use millrace_types::{Bytes, Timestamp};

use super::lanes::Route;
use super::protocol::{Action, Grant};
use super::sharing::Turn;
use super::transfer::{Batch, OUT_MAX, Source, Transfer};
use super::{BATCH_CHUNKS, Fabric, REPORT_SLACK, START_SLACK};
use crate::ids::{BatchId, TransferId};
use crate::memory::BLOCK;
use crate::rates::Sharing;

/// Who was served when: the least is next.
type Served = ((Timestamp, u64), TransferId);

impl Fabric {
    /// Grants whatever can be granted: from the host and to it what is due by its rate, and where there is
    /// nothing such, those served longest ago first.
    pub(super) fn pump(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        while self.grant_due(actions) {}
        loop {
            let waited_for = self.waited_for();
            let candidates = self.transfers.iter().filter(|(_, state)| state.wants());
            let candidates = candidates.filter(|&(&transfer, _)| !self.goes_by_rate(transfer));
            let turns = candidates.filter_map(|(&transfer, state)| {
                let turn = (state.served, transfer);
                Some((turn, self.next_route(now, turn, state, &waited_for)?))
            });
            let Some(((_, next), route)) = turns.min_by_key(|&(turn, _)| turn) else { break };
            self.grant_longest(next, route, actions);
        }
        self.make_way(actions);
        self.grant_forwarded(actions);
    }

    /// Routes over several lanes whose transfers have nothing out: all of these must have room at one
    /// time, so those who were served since let them have it.
    fn waited_for(&self) -> Vec<(Served, Route)> {
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
        turn: Served,
        state: &Transfer,
        waited_for: &[(Served, Route)],
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
    pub(super) fn free_at(&self, now: Timestamp, route: &Route) -> Timestamp {
        let lanes = self.paths[route].lanes.iter();
        lanes.map(|&lane| self.lanes[lane].free_at()).fold(now, Timestamp::max)
    }

    /// Whether a path takes another batch: one runs on it, one is queued, and each of its lanes
    /// agrees.
    pub(super) fn path_takes_more(&self, route: Route) -> bool {
        self.out_on(route) < OUT_MAX
            && self.paths[&route].lanes.iter().all(|&lane| self.lanes[lane].takes_more())
    }

    /// Batches that are out on a route.
    pub(super) fn out_on(&self, route: Route) -> usize {
        let batches = self.transfers.values().flat_map(|state| &state.out);
        batches.filter(|batch| batch.route == route).count()
    }

    pub(super) fn grant(
        &mut self,
        transfer: TransferId,
        route: Route,
        turn: Turn,
        actions: &mut Vec<Action>,
    ) {
        let (now, batch) = (self.shares.now, BATCH_CHUNKS.get());
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
        let in_turns = route.host_way().is_none() || self.shares.sharing != Sharing::Fifo;
        // What neighbours forward costs nobody a turn.
        if in_turns && route.forwarded().is_none() {
            state.served = (now, hold);
        }
        let (revoked, not_before) = (false, free);
        let chunks = range.clone();
        state.out.push(Batch { id: batch, chunks, route, hold, give_up, revoked, not_before, turn });
        let peer = match &state.source {
            Source::Peer(peer) => Some(peer.of(&range)),
            Source::Host | Source::Asked(_) => None,
        };
        let (gpu, cargo, via) = (state.gpu, state.cargo, route.forwarded());
        let link = self.first_link(route);
        let chunks = range;
        let grant = Grant { link, transfer, batch, gpu, cargo, chunks, peer, via, not_before, not_after };
        actions.push(Action::Grant { grant });
    }

    /// Takes queued batches back for transfers that have nothing out and find their path full: for those
    /// that have just come and are the tightest of their link, and, of those without a rate, for who was
    /// served before them.
    fn make_way(&mut self, actions: &mut Vec<Action>) {
        let newcomers = self.newcomers_without_room();
        let stuck = |&(transfer, state): &(&TransferId, &Transfer)| {
            state.out.is_empty()
                && state.ending.is_none()
                && !matches!(state.source, Source::Asked(_))
                && ((newcomers.contains(transfer) && !state.took_back) || !self.goes_by_rate(*transfer))
                && !state.routes().any(|route| self.path_takes_more(route))
        };
        let first = |(&transfer, state): (&TransferId, &Transfer)| Some((transfer, state.routes().next()?));
        let stuck: Vec<_> = self.transfers.iter().filter(stuck).filter_map(first).collect();
        for (waits, route) in stuck {
            let is_new = newcomers.contains(&waits);
            let in_the_way = |(&transfer, state): (&TransferId, &Transfer)| {
                let early = |place: usize| is_new && state.out[place].not_before > self.shares.now;
                let queued = |&place: &usize| early(place) || state.queued().any(|it| it == place);
                let blocks = |&place: &usize| self.stands_in_the_way(&state.out[place].route, &route);
                let mut places = (0..state.out.len()).filter(queued).filter(blocks);
                let revoked = places.clone().find(|&place| is_new && state.out[place].revoked);
                Some((transfer, revoked.or_else(|| places.next())?))
            };
            let blockers = self.transfers.iter().filter_map(in_the_way);
            let batch = |(transfer, place): (TransferId, usize)| &self.transfers[&transfer].out[place];
            // One at a time: who waits needs one place.
            if blockers.clone().any(|blocker| batch(blocker).revoked) {
                continue;
            }
            let yields = |&(transfer, place): &(TransferId, usize)| {
                let (waiting, other) = (&self.transfers[&waits], &self.transfers[&transfer]);
                if is_new {
                    other.out[place].turn.makes_way_for(waiting, other)
                } else {
                    matches!(other.out[place].turn, Turn::Longest { .. }) && other.served > waiting.served
                }
            };
            // First those that have no rate.
            let due = |blocker| matches!(batch(blocker).turn, Turn::Due(_));
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

    pub(super) fn shares_a_lane(&self, a: &Route, b: &Route) -> bool {
        let (a_lanes, b_lanes) = (&self.paths[a].lanes, &self.paths[b].lanes);
        a_lanes.iter().any(|lane| b_lanes.contains(lane))
    }

    /// Whether there is room for a batch that waits on one route once one on another is taken back. The
    /// links of a path from the host lead one to the next: whoever crosses the first that is full crosses
    /// those after it. The place of one who does not would go to who can use it, and be taken again,
    /// without end.
    fn stands_in_the_way(&self, other: &Route, waiting: &Route) -> bool {
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
