//! Contention-aware selection (Algorithm 1, D20): first the link of the pair, then free paths, then
//! busy paths. An evicted flow takes only free paths and evicts no other flow, so the algorithm
//! terminates.

use super::matrix::{ResourceSet, bits};
use super::running::{FlowKind, FlowTable, PathFlow};

impl FlowTable {
    /// Gives routes to the flow that began last: the link of its pair, then free paths, then busy
    /// paths. The other flows take the free paths that are left.
    pub(super) fn admit(&mut self) {
        let Some(newcomer) = self.flows.len().checked_sub(1) else { return };
        self.claim(newcomer);
        self.spread(newcomer);
        self.balance(newcomer);
        self.grow();
    }

    /// Gives freed links to the flows that can use the links, the slowest flow first. A flow that
    /// stayed on another flow's link leaves that link if possible. This is done twice, because a
    /// flow that leaves may make way for another.
    pub(super) fn grow(&mut self) {
        for _ in 0..2 {
            let mut strangers = false;
            for at in 0..self.flows.len() {
                let strange = self.borrowed_links(at);
                if strange != 0 {
                    strangers = true;
                    self.leave(at, strange);
                }
            }
            for link in bits(self.matrix.owned & self.matrix.open) {
                self.even_out(link);
            }
            for at in self.poorest_first() {
                self.spread(at);
            }
            if !strangers {
                return;
            }
        }
    }

    /// Returns the transfers, the slowest first.
    fn poorest_first(&self) -> Vec<usize> {
        let transfers = (0..self.flows.len()).filter(|&at| self.flows[at].role == FlowKind::Transfer);
        let mut order: Vec<_> = transfers.collect();
        order.sort_unstable_by_key(|&at| (self.flows[at].total, at));
        order
    }

    /// Returns the links that a flow crosses and that others own.
    fn borrowed_links(&self, at: usize) -> ResourceSet {
        let flow = &self.flows[at];
        flow.mask & self.matrix.owned & !flow.link.map_or(0, |link| 1 << link)
    }

    /// Gives a flow the link that joins the flow's pair: flows of other pairs leave the link, and
    /// flows of this pair share the link.
    fn claim(&mut self, at: usize) {
        let from = self.flows[at].from;
        let to = self.flows[at].to;
        let Some(link) = self.matrix.link(from, to) else { return };
        self.flows[at].link = Some(link);
        self.matrix.own(link);
        for other in 0..self.flows.len() {
            if self.flows[other].mask >> link & 1 == 1 && self.flows[other].link != Some(link) {
                self.leave(other, 1 << link);
            }
        }
        self.even_out(link);
    }

    /// Gives each owner of a link an equal rate of it, beside the flows that could not leave.
    fn even_out(&mut self, link: usize) {
        let owns = |flow: &PathFlow| flow.link == Some(link);
        let Some(owner) = self.flows.iter().find(|flow| owns(flow)) else { return };
        let Some(path) = self.matrix.direct(owner.from, owner.to) else { return };
        let mut owners = 0;
        let mut room = self.matrix.left(link);
        for at in (0..self.flows.len()).filter(|&at| owns(&self.flows[at])) {
            owners += 1;
            room += self.rate_on(at, link);
        }
        let share = (room / owners).max(1);
        for gains in [false, true] {
            for at in 0..self.flows.len() {
                if !owns(&self.flows[at]) {
                    continue;
                }
                let rate = self.rate_on(at, link);
                let over = rate.saturating_sub(share);
                if gains {
                    self.lay(at, path, share.saturating_sub(rate).min(self.matrix.room(path)));
                } else if over > 0 {
                    self.cut(at, path, over);
                }
            }
        }
    }

    /// Evicts a flow from links that others own. The flow takes free links instead. Only a flow
    /// that would have no route keeps a fair share of its old links.
    fn leave(&mut self, at: usize, links: ResourceSet) {
        if self.flows[at].role == FlowKind::Forward {
            return self.strip(at, links);
        }
        let before = self.flows[at].parts;
        let share = self.share(links);
        self.strip(at, links);
        self.spread(at);
        for part in before.as_slice() {
            if self.flows[at].total > 0 {
                return;
            }
            self.lay(at, part.path, share.min(part.rate).min(self.matrix.room(part.path)));
        }
        debug_assert!(self.flows[at].total > 0, "no other flow took the rates that this flow had");
    }

    /// Returns the rate that a flow without another way may use of the tightest of these links.
    fn share(&self, links: ResourceSet) -> u64 {
        let of = |link: usize| self.matrix.capacity(link) / self.users(link).max(1);
        bits(links).map(of).min().unwrap_or(0).max(1)
    }

    /// Gives a flow the rate that is left of the flow's own link, and then the shortest paths over
    /// free links, each at the rate that the path's narrowest link has left.
    pub(super) fn spread(&mut self, at: usize) {
        let from = self.flows[at].from;
        let to = self.flows[at].to;
        let link = self.flows[at].link;
        let leaving = self.matrix.leaving[from];
        let entering = self.matrix.entering[to];
        let own = link.map_or(0, |link| 1 << link);
        for path in self.matrix.paths_of(from, to) {
            let free = self.matrix.free() | self.matrix.open & own;
            if leaving & free == 0 || entering & free == 0 {
                return;
            }
            if self.matrix.path(path).mask & !free == 0 && !self.lay(at, path, self.matrix.room(path)) {
                return;
            }
        }
    }
}
