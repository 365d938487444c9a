//! Chooses the batch that crosses between the host and a GPU next (`FaaSTube` §6.1; D12 to D16), by
//! the policy's transfer sharing. The two directions are decided separately.
//!
//! - `fair`: the transfer that was served longest ago, as on NVLinks.
//! - `fifo`: the transfer that started first.
//! - `faastube`: transfers that a request waits for are granted at the rates of [`RateAllocator`]. Each
//!   transfer has the least rate that meets the deadline, and the tightest transfer also gets the
//!   idle rest. A transfer has no rate if no request waits for the transfer, if the deadline cannot
//!   be met, or if the needed rate does not fit beside the others. Transfers without a rate take
//!   turns, the longest unserved first. Their turns are the times when no transfer with a rate can
//!   use the link, and one spare batch of [`SPARE_EVERY`](super::SPARE_EVERY) whenever a transfer without a rate waits.
//!   Rates are computed from the link rates without spare batches, so that spare batches break no
//!   guarantee. No transfer starves: a link that cannot run short keeps no transfer waiting
//!   (`lanes`), and at a link that can, every batch that crosses is counted.
//!
//! A transfer that is the tightest of a link when the transfer begins is granted before all others,
//! and a queued batch is revoked for that transfer, which waits only for the crossing batch (D13).
//! A spare batch may be revoked like any other batch until as many batches again have passed; then
//! the spare batch goes first and is not revoked.
//!
//! Transfers have no objective if the topology's links do not lead to the host as [`RateAllocator`]
//! requires, or beyond [`FLOWS_MAX`](crate::rates::FLOWS_MAX) transfers that requests wait for.

use std::collections::BTreeMap;

use millrace_types::Bytes;
use millrace_types::topology::LinkId;

use super::host_link_shares::{GrantReason, HostLinkShares, SPARE_DUE, SPARE_FIRM};
use super::lanes::TransferRoute;
use super::protocol::Action;
use super::scheduler::LinkScheduler;
use super::transfer::{BatchInFlight, TransferState};
use crate::paths::HostDirection;
use crate::rates::{RateAllocator, RateGuarantee, RatedFlow, TransferObjective, TransferSharing};
use millrace_core::ids::{FlowId, TransferId};

impl LinkScheduler {
    /// Changes the sharing of the host's links. Batches in flight stay granted. The rest of each
    /// transfer follows the new rule, with a new rate guarantee.
    pub(super) fn set_sharing(&mut self, sharing: TransferSharing) {
        if self.shares.sharing == sharing {
            return;
        }
        let before = std::mem::replace(&mut self.shares, HostLinkShares::new(&self.topology, sharing));
        self.shares.now = before.now;
        self.shares.tally = before.tally;
        for state in self.transfers.values_mut() {
            state.guarantee = RateGuarantee::Unpromised;
            for batch in &mut state.out {
                // The old rates are dropped, so no batch can be given back to them.
                batch.turn = match batch.turn {
                    GrantReason::Forwarded { .. } => GrantReason::Forwarded { promised: false },
                    GrantReason::Due(_) | GrantReason::Longest { .. } => {
                        GrantReason::Longest { passed: 0, spare: None }
                    }
                };
            }
        }
        for transfer in self.transfers.keys().copied().collect::<Vec<_>>() {
            self.request_rate(transfer);
        }
    }

    /// Whether the transfer is granted batches only when a batch is due by the rate.
    pub(super) fn has_rate(&self, transfer: TransferId) -> bool {
        HostDirection::BOTH.into_iter().any(|direction| self.shares.ways[direction].sends(transfer))
    }

    /// Whether batches that are granted now count towards a rate guarantee of the transfer.
    pub(super) fn is_promised(&self, transfer: TransferId) -> bool {
        let promised = |rates: &RateAllocator| rates.guarantee(FlowId(transfer.0)).is_some();
        HostDirection::BOTH.into_iter().any(|way| self.shares.ways[way].rates.as_ref().is_some_and(promised))
    }

    /// Requests a rate for a transfer that comes from the host from now on, or goes there. A
    /// transfer that would miss its deadline even alone has no rate, and counts as infeasible at
    /// the end.
    pub(super) fn request_rate(&mut self, transfer: TransferId) {
        let now = self.shares.now;
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let Some(route) = state.host_route() else { return };
        let Some(wanted) = state.wanted else { return };
        if state.ending.is_some() {
            return;
        }
        let id = FlowId(transfer.0);
        let bytes = state.left();
        let direction = state.cargo.direction();
        state.measured = now;
        let objective = Some(TransferObjective { slo: wanted.by.since(now), infer: wanted.infer });
        let links = vec![self.lanes[self.paths[&route].lanes[0]].link];
        let Some(rates) = &mut self.shares.ways[direction].rates else { return };
        // A transfer that `RateAllocator` refuses has no objective.
        if rates.begin(now, &RatedFlow { id, bytes, links, objective }).is_ok()
            && let Some(guarantee @ RateGuarantee::Infeasible(_)) = rates.guarantee(id)
        {
            state.guarantee = guarantee;
            self.end_flow(id, direction);
        }
    }

    fn end_flow(&mut self, flow: FlowId, direction: HostDirection) {
        let now = self.shares.now;
        if let Some(rates) = &mut self.shares.ways[direction].rates {
            // Most transfers have no flow, so an unknown flow is no error.
            drop(rates.end(now, flow));
        }
    }

    /// Ends the flow of a transfer that asks for no more batches, and keeps its last rate
    /// guarantee.
    pub(super) fn end_rate(&mut self, transfer: TransferId) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let flow = FlowId(transfer.0);
        let direction = state.cargo.direction();
        let rates = self.shares.ways[direction].rates.as_ref();
        if let Some(guarantee) = rates.and_then(|rates| rates.guarantee(flow)) {
            state.guarantee = guarantee;
            self.end_flow(flow, direction);
        }
    }

    /// Counts a transfer that has ended.
    pub(super) fn count(&mut self, state: &TransferState) {
        if let Some(direction) = state.host_route().and_then(|route| route.host_way()) {
            self.shares.tally.ended[direction].add(state.guarantee);
        }
    }

    /// Records that a batch of a transfer crossed, and measures the transfer's rate (D16).
    pub(super) fn record_crossed_batch(&mut self, transfer: TransferId, batch: &BatchInFlight, size: Bytes) {
        let now = self.shares.now;
        let link = self.first_link(batch.route);
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let direction = state.cargo.direction();
        if !std::mem::replace(&mut state.begun, true) {
            let wait = self.shares.tally.waits.entry((link, direction)).or_default();
            wait.transfers += 1;
            wait.waited += batch.not_before.since(state.began);
        }
        let promised = match &batch.turn {
            GrantReason::Due(_) => true,
            GrantReason::Longest { spare, .. } => spare.is_some(),
            GrantReason::Forwarded { promised } => *promised,
        };
        if let Some(rates) = self.shares.ways[direction].rates.as_mut().filter(|_| promised) {
            let window = now.since(std::mem::replace(&mut state.measured, now));
            // The flow may have ended before its last batch.
            drop(rates.measured(now, FlowId(transfer.0), size, window));
        }
    }

    /// Gives back a batch that did not cross, so that no flow pays for it.
    pub(super) fn return_batch(&mut self, batch: BatchInFlight) {
        let link = self.first_link(batch.route);
        let Some(direction) = batch.route.host_way() else { return };
        let way = &mut self.shares.ways[direction];
        let given = match batch.turn {
            GrantReason::Due(given) => Some(given),
            GrantReason::Longest { passed, spare } => {
                let now = way.passed.entry(way.meter(link)).or_default();
                *now = passed.max(*now);
                spare
            }
            GrantReason::Forwarded { .. } => None,
        };
        if let (Some(given), Some(rates)) = (given, &mut way.rates) {
            // The flow may have ended before its last batch.
            rates.give_back(given).unwrap_or_default();
        }
    }

    /// Grants the next batch that is due by a rate, or a spare batch of a transfer without a rate.
    /// Returns false if there is no such batch: the links are then free for the transfer that was
    /// served longest ago.
    pub(super) fn grant_due(&mut self, actions: &mut Vec<Action>) -> bool {
        HostDirection::BOTH.into_iter().any(|direction| self.grant_due_one_way(direction, actions))
    }

    fn grant_due_one_way(&mut self, direction: HostDirection, actions: &mut Vec<Action>) -> bool {
        if self.shares.ways[direction].rates.as_ref().is_none_or(RateAllocator::is_empty) {
            return false;
        }
        // The size of each flow's next batch that can be granted now, with the link that the batch
        // enters by.
        let mut sizes: BTreeMap<FlowId, (LinkId, Bytes)> = BTreeMap::new();
        let mut out: BTreeMap<LinkId, usize> = BTreeMap::new();
        for (transfer, state, route) in self.one_way(direction) {
            if state.takes_more(&route) && self.path_takes_more(route) {
                let link = self.first_link(route);
                sizes.insert(FlowId(transfer.0), (link, state.next_size()));
                out.insert(link, self.out_on(route));
            }
        }
        let size = |flow: FlowId, _: LinkId| sizes.get(&flow).map_or(Bytes::ZERO, |&(_, size)| size);
        let Some(rates) = &mut self.shares.ways[direction].rates else { return false };
        let newcomers = out.keys().filter_map(|&link| Some((rates.newcomer_on(link, size)?, link)));
        let newcomer = newcomers.min().map(|(_, link)| link);
        let open = |transfer: TransferId| sizes.contains_key(&FlowId(transfer.0));
        let route =
            |transfer: TransferId, this: &Self| TransferRoute::Host(direction, this.transfers[&transfer].gpu);
        if let Some(transfer) = self.due_spare_transfer(direction, open, newcomer) {
            self.grant_longest(transfer, route(transfer, self), actions);
            return true;
        }
        let Some(rates) = &mut self.shares.ways[direction].rates else { return false };
        let mut links: Vec<_> = out.into_iter().collect();
        // A link with nothing in flight idles, so such links come first.
        links.sort_by_key(|&(link, out)| (Some(link) != newcomer, out, link));
        let due = links.into_iter().find_map(|(link, _)| rates.next_rated(link, size));
        let Some(due) = due else { return false };
        let transfer = TransferId(due.flow.0);
        let meter = self.shares.ways[direction].meter(due.link);
        let waits = self.without_rate(direction).any(|(_, _, its)| its == meter);
        let most = if waits { SPARE_FIRM } else { SPARE_DUE };
        let passed = self.shares.ways[direction].passed.entry(meter).or_default();
        *passed = (*passed + 1).min(most.max(*passed));
        self.grant(transfer, route(transfer, self), GrantReason::Due(due), actions);
        true
    }

    /// Grants a batch of the transfer that was served longest ago.
    pub(super) fn grant_longest(
        &mut self,
        transfer: TransferId,
        route: TransferRoute,
        actions: &mut Vec<Action>,
    ) {
        let mut turn = GrantReason::Longest { passed: 0, spare: None };
        if let Some(direction) = route.host_way()
            && let Some(state) = self.transfers.get(&transfer)
        {
            let link = self.first_link(route);
            let bytes = state.next_size();
            let way = &mut self.shares.ways[direction];
            let passed = way.passed.insert(way.meter(link), 0).unwrap_or(0);
            let rates = way.rates.as_mut();
            let spare = rates.and_then(|rates| rates.take_spare(FlowId(transfer.0), link, bytes));
            turn = GrantReason::Longest { passed, spare };
        }
        self.grant(transfer, route, turn, actions);
    }

    /// Returns the transfers between the host and GPUs in one direction that want another batch,
    /// each with its route.
    fn one_way(
        &self,
        direction: HostDirection,
    ) -> impl Iterator<Item = (TransferId, &TransferState, TransferRoute)> {
        self.transfers.iter().filter_map(move |(&transfer, state)| {
            let route = state.host_route().filter(|_| state.wants())?;
            (route.host_way() == Some(direction)).then_some((transfer, state, route))
        })
    }

    /// Returns the transfers in one direction that want another batch and have no rate, each with
    /// its meter.
    fn without_rate(
        &self,
        direction: HostDirection,
    ) -> impl Iterator<Item = (TransferId, &TransferState, LinkId)> {
        let way = &self.shares.ways[direction];
        self.one_way(direction).filter_map(|(transfer, state, route)| {
            let meter = way.meter(self.first_link(route));
            (state.takes_more(&route) && !way.sends(transfer)).then_some((transfer, state, meter))
        })
    }

    /// Returns the transfer without a rate that is next although transfers with rates wait, if the
    /// path has room. The turn comes when enough batches with rates have passed, and goes to the
    /// transfer that was served longest ago.
    fn due_spare_transfer(
        &self,
        direction: HostDirection,
        open: impl Fn(TransferId) -> bool,
        newcomer: Option<LinkId>,
    ) -> Option<TransferId> {
        let way = &self.shares.ways[direction];
        let newcomer = newcomer.map(|link| way.meter(link));
        let mut found = None;
        for (&meter, &passed) in &way.passed {
            let due = if newcomer == Some(meter) { SPARE_FIRM } else { SPARE_DUE };
            if passed < due {
                continue;
            }
            let under = self.without_rate(direction).filter(|&(_, _, its)| its == meter);
            let first = under.min_by_key(|&(transfer, state, _)| (state.served, transfer));
            found = found.or(first.map(|(transfer, ..)| transfer).filter(|&transfer| open(transfer)));
        }
        found
    }

    /// Returns the new transfers that are the tightest of their links and find no room there.
    pub(super) fn newcomers_without_room(&self) -> Vec<TransferId> {
        HostDirection::BOTH.into_iter().flat_map(|direction| self.newcomers_one_way(direction)).collect()
    }

    fn newcomers_one_way(&self, direction: HostDirection) -> Vec<TransferId> {
        let Some(rates) = &self.shares.ways[direction].rates else { return Vec::new() };
        let size = |flow: FlowId, _: LinkId| {
            let state = self.transfers.get(&TransferId(flow.0)).filter(|state| state.wants());
            state.map_or(Bytes::ZERO, TransferState::next_size)
        };
        let waiting = self.one_way(direction).filter(|(_, state, _)| state.out.is_empty());
        let full = waiting.map(|(_, _, route)| route).filter(|route| !self.path_takes_more(*route));
        let mut links: Vec<_> = full.map(|route| self.first_link(route)).collect();
        links.sort_unstable();
        links.dedup();
        let newcomers = links.into_iter().filter_map(|link| rates.newcomer_on(link, size));
        newcomers.map(|(_, flow)| TransferId(flow.0)).collect()
    }
}
