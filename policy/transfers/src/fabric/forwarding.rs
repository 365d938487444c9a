//! Forwards data between the host and a GPU over the PCIe links of other GPUs (D05, `FaaSTube`
//! §5.1). A GPU under another PCIe switch takes part of the bytes from the host and forwards them
//! over NVLinks. Weights are forwarded, and objects that return to a GPU. Data for the host takes
//! the same routes in the other direction.
//!
//! A batch takes a forwarding route if all of these hold:
//! - The GPU's own route has as many batches in flight as it may have.
//! - The batch would arrive no later than over the GPU's own route. Runs read weights in the order
//!   of their grants, so no run waits longer for any weights. Data for the host may arrive in any
//!   order, because no reader reads a part of the data.
//! - The whole forwarding route is idle: no batch is in flight on the route's links, and no
//!   transfer that wants a batch has any of the links on its own route.
//!
//! So neighbours use only idle links, batch by batch, and each route carries bytes in proportion to
//! its rate. A forwarded batch uses up no transfer's turn, and has no guaranteed rate. A transfer
//! that arrives at a forwarding link waits for the crossing batch, and no longer. While the link's
//! own transfers have more to send, nothing is forwarded there, so no transfer starves. Of the
//! transfers that could be forwarded, the transfer with the earliest deadline goes first.
//!
//! If a forwarded copy fails, the fault may be the neighbour's alone, so the rest takes the GPU's
//! own route. In emulation, the executor of the source or destination GPU reads or writes the
//! host's memory itself, and the batch counts on each link of its route. A real device would stage
//! the batch in the GPUs between.

use std::collections::BTreeMap;

use millrace_types::{GpuIndex, Timestamp};

use super::host_link_shares::{GrantReason, TransferDeadline};
use super::lanes::{TransferRoute, forwarded};
use super::protocol::Action;
use super::scheduler::LinkScheduler;
use super::transfer::TransferState;
use crate::paths::{HostDirection, HostLinks, RouteHops};
use millrace_core::ids::TransferId;

impl LinkScheduler {
    /// Returns the fabric with `links` as the links that data between the host and GPUs may cross.
    #[must_use]
    pub fn with_host_links(mut self, links: HostLinks) -> Self {
        self.use_host_links(links);
        self
    }

    /// Sets the links that data may cross from the next batch on. A batch in flight keeps its path.
    pub(super) fn use_host_links(&mut self, links: HostLinks) {
        self.forwards = match links {
            HostLinks::Own => BTreeMap::new(),
            HostLinks::All => self.lay_forwards(),
        };
    }

    /// Finds the routes over which other GPUs may forward, and adds their paths.
    fn lay_forwards(&mut self) -> BTreeMap<(HostDirection, GpuIndex), Vec<TransferRoute>> {
        let Some(routes) = &self.routes else { return BTreeMap::new() };
        let ends = self.paths.keys().filter_map(|route| Some((route.host_way()?, route.gpu())));
        let ways: Vec<_> = ends.map(|(way, gpu)| ((way, gpu), routes.forwards(way, gpu))).collect();
        let mut lay = |direction: HostDirection, hops: RouteHops| {
            let path = forwarded(direction, &hops, &self.paths)?;
            let route = TransferRoute::Forwarded(direction, hops);
            self.paths.insert(route, path);
            Some(route)
        };
        let mut forwards = BTreeMap::new();
        for ((direction, gpu), ways) in ways {
            let routes: Vec<_> = ways.into_iter().filter_map(|hops| lay(direction, hops)).collect();
            forwards.insert((direction, gpu), routes);
        }
        forwards
    }

    /// Grants every batch that neighbours may forward now.
    pub(super) fn grant_forwarded(&mut self, actions: &mut Vec<Action>) {
        while let Some((transfer, route)) = self.next_forwarded() {
            let promised = self.is_promised(transfer);
            self.grant(transfer, route, GrantReason::Forwarded { promised }, actions);
        }
    }

    /// Returns the transfer with the earliest deadline of those that neighbours may forward a batch
    /// of, and the route.
    fn next_forwarded(&self) -> Option<(TransferId, TransferRoute)> {
        if self.forwards.is_empty() {
            return None;
        }
        let waiting = self.transfers.iter().filter(|(_, state)| state.may_be_forwarded());
        let ways = waiting.filter_map(|(&transfer, state)| {
            let there_by = state.wanted.map_or(Timestamp::MAX, TransferDeadline::there_by);
            Some(((there_by, state.served, transfer), self.idle_way(state)?))
        });
        ways.min_by_key(|&(order, _)| order).map(|((_, _, transfer), route)| (transfer, route))
    }

    /// Returns the best idle forwarding route on which the transfer's next batch arrives no later
    /// than on its own route.
    fn idle_way(&self, state: &TransferState) -> Option<TransferRoute> {
        let own = state.host_route()?;
        if state.takes_more(&own) && self.path_takes_more(own) {
            return None;
        }
        let now = self.shares.now;
        let size = state.next_size();
        let by_own = self.free_at(now, &own) + self.paths[&own].time_for(size);
        let in_time = |route: &&TransferRoute| now + self.paths[*route].time_for(size) <= by_own;
        let ways = self.forwards.get(&(state.cargo.direction(), state.gpu))?.iter();
        ways.filter(in_time).find(|route| self.is_idle(route)).copied()
    }

    fn is_idle(&self, route: &TransferRoute) -> bool {
        self.idle_from(route).is_some_and(|at| at <= self.shares.now) && !self.is_wanted(route)
    }

    /// Returns the time from which a route is idle; `None` while a batch is in flight on it.
    fn idle_from(&self, route: &TransferRoute) -> Option<Timestamp> {
        let mut lanes = self.paths[route].lanes.iter().map(|&lane| self.lanes[lane].idle_from());
        lanes.try_fold(Timestamp::ZERO, |latest, at| Some(latest.max(at?)))
    }

    /// Returns the time at which a forwarding route becomes idle. Copies may be faster than the
    /// links' rates, so a batch may be reported before its time on the links is over: without a
    /// wake-up no event would follow.
    pub(super) fn next_idle(&self) -> Option<Timestamp> {
        let waiting = self.transfers.values().filter(|state| state.may_be_forwarded());
        let ways = waiting.filter_map(|state| self.forwards.get(&(state.cargo.direction(), state.gpu)));
        ways.flatten().filter_map(|route| self.idle_from(route)).filter(|&at| at > self.shares.now).min()
    }

    /// Whether a transfer that wants a batch has a link of this route on a route of its own.
    fn is_wanted(&self, route: &TransferRoute) -> bool {
        let mut wanting = self.transfers.values().filter(|state| state.wants());
        wanting.any(|state| state.routes().any(|other| self.shares_a_lane(&other, route)))
    }
}
