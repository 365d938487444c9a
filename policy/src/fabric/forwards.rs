//! What comes from the host over the PCIe links of other GPUs (D05, `FaaSTube` §5.1): a GPU under another
//! PCIe switch takes part of the bytes and forwards them over NVLinks. So do weights come, and objects that
//! come back. What goes to the host goes there by the same ways, the other way round.
//!
//! A batch goes by a neighbour's way where
//! - its GPU's own way has as much out as it may have,
//! - it is there no later than by that way: runs read weights in the order in which they are granted, and
//!   none of them waits longer for any (of what goes to the host nobody reads a part),
//! - and all of the neighbour's way is idle: nothing is out on its links, and nobody who wants a batch has
//!   any of them on a route of its own.
//!
//! So neighbours forward what is left over, batch by batch, and each way carries as much as it is fast. It is
//! no transfer's turn, and no rate is promised for it. Who comes to a link that forwards waits for the batch
//! that crosses it and no longer, and while there is more to send nothing is forwarded there: nobody starves.
//! Of those that could be forwarded the one that is wanted first goes first.
//!
//! Where a copy fails, what is wrong may be wrong with the neighbour alone: the rest comes by the GPU's own
//! way. In emulation the executor of the GPU that they are for, or come from, reads or writes the host's memory
//! itself, and the batch counts on each link of its route; a real device would stage it in the GPUs between.

use std::collections::BTreeMap;

use millrace_types::{GpuIndex, Timestamp};

use super::Fabric;
use super::lanes::{Route, forwarded};
use super::protocol::Action;
use super::sharing::{Turn, Wanted};
use super::transfer::Transfer;
use crate::ids::TransferId;
use crate::paths::{Direction, Hops, HostLinks};

impl Fabric {
    /// Returns the fabric with data that crosses these links between the host and GPUs.
    #[must_use]
    pub fn with_host_links(mut self, links: HostLinks) -> Self {
        self.use_host_links(links);
        self
    }

    /// Lets data cross these links from the next batch on. A batch that is out keeps its path.
    pub(super) fn use_host_links(&mut self, links: HostLinks) {
        self.forwards = match links {
            HostLinks::Own => BTreeMap::new(),
            HostLinks::All => self.lay_forwards(),
        };
    }

    /// Finds the ways by which others may forward, and their paths.
    fn lay_forwards(&mut self) -> BTreeMap<(Direction, GpuIndex), Vec<Route>> {
        let Some(routes) = &self.routes else { return BTreeMap::new() };
        let ends = self.paths.keys().filter_map(|route| Some((route.host_way()?, route.gpu())));
        let ways: Vec<_> = ends.map(|(way, gpu)| ((way, gpu), routes.forwards(way, gpu))).collect();
        let mut lay = |direction: Direction, hops: Hops| {
            let path = forwarded(direction, &hops, &self.paths)?;
            let route = Route::Forwarded(direction, hops);
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

    /// Grants what neighbours may forward now.
    pub(super) fn grant_forwarded(&mut self, actions: &mut Vec<Action>) {
        while let Some((transfer, route)) = self.next_forwarded() {
            let promised = self.is_promised(transfer);
            self.grant(transfer, route, Turn::Forwarded { promised }, actions);
        }
    }

    /// The transfer that is wanted first of those that neighbours may forward a batch of, and by which way.
    fn next_forwarded(&self) -> Option<(TransferId, Route)> {
        if self.forwards.is_empty() {
            return None;
        }
        let waiting = self.transfers.iter().filter(|(_, state)| state.may_be_forwarded());
        let ways = waiting.filter_map(|(&transfer, state)| {
            let there_by = state.wanted.map_or(Timestamp::MAX, Wanted::there_by);
            Some(((there_by, state.served, transfer), self.idle_way(state)?))
        });
        ways.min_by_key(|&(order, _)| order).map(|((_, _, transfer), route)| (transfer, route))
    }

    /// The best way by which a transfer's next batch is there no later than by its own.
    fn idle_way(&self, state: &Transfer) -> Option<Route> {
        let own = state.host_route()?;
        if state.takes_more(&own) && self.path_takes_more(own) {
            return None;
        }
        let (now, size) = (self.shares.now, state.next_size());
        let by_own = self.free_at(now, &own) + self.paths[&own].time_for(size);
        let in_time = |route: &&Route| now + self.paths[*route].time_for(size) <= by_own;
        let ways = self.forwards.get(&(state.cargo.direction(), state.gpu))?.iter();
        ways.filter(in_time).find(|route| self.is_idle(route)).copied()
    }

    fn is_idle(&self, route: &Route) -> bool {
        self.idle_from(route).is_some_and(|at| at <= self.shares.now) && !self.is_wanted(route)
    }

    /// From when on nothing crosses a way; `None` while something is out on it.
    fn idle_from(&self, route: &Route) -> Option<Timestamp> {
        let mut lanes = self.paths[route].lanes.iter().map(|&lane| self.lanes[lane].idle_from());
        lanes.try_fold(Timestamp::ZERO, |latest, at| Some(latest.max(at?)))
    }

    /// When to look again: batches are told of before they would have crossed at their links' rate, where
    /// copies are faster.
    pub(super) fn next_idle(&self) -> Option<Timestamp> {
        let waiting = self.transfers.values().filter(|state| state.may_be_forwarded());
        let ways = waiting.filter_map(|state| self.forwards.get(&(state.cargo.direction(), state.gpu)));
        ways.flatten().filter_map(|route| self.idle_from(route)).filter(|&at| at > self.shares.now).min()
    }

    /// Whether somebody who wants a batch has a link of this on a route of its own.
    fn is_wanted(&self, route: &Route) -> bool {
        let mut wanting = self.transfers.values().filter(|state| state.wants());
        wanting.any(|state| state.routes().any(|other| self.shares_a_lane(&other, route)))
    }
}
