//! Busy paths (Algorithm 1, lines 8 to 14): the choice of the flow that gives up a path, and of the
//! rate that it gives up.
//!
//! In the paper the totals are compared, and the running function moves if possible. Here, a route
//! moves if the route's flow finds another path that is at least as fast, and if the flow still has
//! no less than the new flow. Otherwise the flows that have more than the new flow give up a part
//! of the rate, until the poorer flow has as much as the others keep: max-min fairness. An owner
//! gives up nothing of the owned link, except to other flows of the pair and to a flow that has no
//! route at all, and keeps an equal part of the link.

use super::limits::LINKS_MAX;
use super::matrix::{ResourceSet, bits, set};
use super::running::{FlowTable, PathShare};

/// Busy paths that a flow is given at the start, at most: each path may change the routes of other
/// flows.
const BALANCES_MAX: usize = 4;
/// A split must gain at least 1/`GAIN_MIN` of the path's width, unless the flow has no route. A
/// smaller gain is not worth new plans for other flows.
const GAIN_MIN: u64 = 16;
/// A split is exact to 1/`GRAIN` of the path's width.
const GRAIN: u64 = 1024;

/// A flow that crosses a resource of the path that is to be shared.
struct ResourceUser {
    flow: usize,
    resource: usize,
    /// The rate of the resource that the flow has and need not keep.
    spare: u64,
    /// The flow's total rate.
    total: u64,
}

impl FlowTable {
    /// Gives a flow busy paths while bytes could leave and arrive faster, or while the flow has no
    /// route.
    pub(super) fn balance(&mut self, at: usize) {
        for _ in 0..BALANCES_MAX {
            let flow = &self.flows[at];
            let saturated = self.matrix.leaving[flow.from] & self.matrix.open == 0
                || self.matrix.entering[flow.to] & self.matrix.open == 0;
            if saturated && flow.total > 0 || flow.parts.is_full() || !self.take_busy(at) {
                return;
            }
        }
    }

    /// Gives the flow the first busy path that another flow gives up or shares. Returns whether
    /// there was one.
    fn take_busy(&mut self, at: usize) -> bool {
        let from = self.flows[at].from;
        let to = self.flows[at].to;
        let total = self.flows[at].total;
        let others = self.matrix.owned & !self.flows[at].link.map_or(0, |link| 1 << link);
        let richer = self.richer(total);
        let allowed: &[ResourceSet] = if total == 0 { &[others, 0] } else { &[others] };
        for &barred in allowed {
            let mut generous: Option<ResourceSet> = None;
            for path in self.matrix.paths_of(from, to) {
                let mask = self.matrix.path(path).mask;
                let full = mask & !self.matrix.open;
                if mask & barred != 0 || full & !richer != 0 {
                    continue;
                }
                if self.take_moved(at, path, full) {
                    return true;
                }
                if generous.is_none_or(|generous| mask & !generous == 0) {
                    if self.split(at, path) {
                        return true;
                    }
                    generous.get_or_insert_with(|| self.generous(at, barred));
                }
            }
        }
        false
    }

    /// Returns the resources that flows with more than `total` cross.
    fn richer(&self, total: u64) -> ResourceSet {
        self.flows.iter().filter(|flow| flow.total > total).fold(0, |mask, flow| mask | flow.mask)
    }

    /// Returns the resources, except barred ones, that could give a flow the least gain of a split.
    /// Many paths cross the same few links, so once a split has failed, links are checked instead
    /// of paths.
    fn generous(&self, at: usize, barred: ResourceSet) -> ResourceSet {
        let total = self.flows[at].total;
        let least = least_gain(total, self.matrix.narrowest);
        let mut given = [0; LINKS_MAX];
        for (flow, it) in self.flows.iter().enumerate().filter(|(_, it)| it.total > total) {
            for resource in bits(it.mask & !barred) {
                given[resource] += self.user(at, flow, resource).gives(total + least);
            }
        }
        let gives = |resource: &usize| self.matrix.left(*resource) + given[*resource] >= least;
        set((0..self.matrix.resources()).filter(gives))
    }

    /// Gives a flow a path whose `full` resources a single route of another flow crosses, if that
    /// route can move.
    fn take_moved(&mut self, at: usize, path: usize, full: ResourceSet) -> bool {
        for other in 0..self.flows.len() {
            if other == at || full & !self.flows[other].mask != 0 {
                continue;
            }
            let parts = self.flows[other].parts;
            let over = |part: &&PathShare| full & !self.matrix.path(part.path).mask == 0;
            let Some(part) = parts.as_slice().iter().find(over) else { continue };
            if self.move_away(other, *part, at, path) {
                self.lay(at, path, self.matrix.room(path));
                return true;
            }
        }
        false
    }

    /// Moves a route off a path that a new flow is to get. The route moves only if the route's flow
    /// loses nothing and then has no less than the new flow. An owner stays on the owned link.
    fn move_away(&mut self, other: usize, part: PathShare, newcomer: usize, path: usize) -> bool {
        let flow = &self.flows[other];
        let wanted = self.matrix.path(path).mask;
        let from = flow.from;
        let to = flow.to;
        let route = self.matrix.path(part.path);
        if flow.total <= self.flows[newcomer].total || flow.link.is_some_and(|link| route.mask == 1 << link) {
            return false;
        }
        // Most routes cannot move at all, so this is checked before anything is changed.
        let free = self.matrix.free() | route.mask & !self.matrix.owned;
        let open = |way: &usize| self.matrix.path(*way).mask & (wanted | !free) == 0;
        let Some(first) = self.matrix.paths_of(from, to).find(open) else { return false };
        let ways = first..self.matrix.paths_of(from, to).end;
        self.cut(other, part.path, part.rate);
        let room = self.matrix.room(path);
        let fair = room > 0 && self.flows[other].total + part.rate >= self.flows[newcomer].total + room;
        let fits = |way: &usize| {
            let mask = self.matrix.path(*way).mask;
            mask & (wanted | !self.matrix.free()) == 0 && self.matrix.room(*way) >= part.rate
        };
        let elsewhere = ways.filter(|_| fair).find(fits);
        self.lay(other, elsewhere.unwrap_or(part.path), part.rate);
        elsewhere.is_some()
    }

    /// Shares a path with the flows on it that have more. Returns whether the flow gained anything.
    pub(super) fn split(&mut self, at: usize, path: usize) -> bool {
        let users = self.users_of(at, path);
        let total = self.flows[at].total;
        let width = self.matrix.path(path).width;
        let enough = |gain: u64| {
            self.matrix.path(path).resources().all(|resource| {
                let here = users.iter().filter(|user| user.resource == resource);
                let given: u64 = here.map(|user| user.gives(total + gain)).sum();
                self.matrix.left(resource) + given >= gain
            })
        };
        let least = least_gain(total, width);
        if !enough(least) {
            return false;
        }
        let mut gain = least;
        let mut too_much = width + 1;
        while too_much - gain > width / GRAIN + 1 {
            let middle = gain.midpoint(too_much);
            if enough(middle) { gain = middle } else { too_much = middle }
        }
        for user in &users {
            self.collect(user, total + gain, gain);
        }
        let room = self.matrix.room(path).min(gain);
        room > 0 && self.lay(at, path, room)
    }

    /// Takes from a user the rate that a resource lacks of `gain`, so that the user's flow keeps at
    /// least `level`.
    fn collect(&mut self, user: &ResourceUser, level: u64, gain: u64) {
        let mut lacks = gain.saturating_sub(self.matrix.left(user.resource));
        let flow = &self.flows[user.flow];
        lacks = lacks.min(ResourceUser { total: flow.total, ..*user }.gives(level));
        let parts = flow.parts;
        for part in parts.as_slice().iter().rev() {
            if self.matrix.path(part.path).mask >> user.resource & 1 == 1 {
                let rate = part.rate.min(lacks);
                lacks -= rate;
                if rate > 0 {
                    self.cut(user.flow, part.path, rate);
                }
            }
        }
    }

    /// Returns the flows that cross a path and have more than a flow, the richest first.
    fn users_of(&self, at: usize, path: usize) -> Vec<ResourceUser> {
        let newcomer = &self.flows[at];
        let path = self.matrix.path(path);
        let mut users = Vec::new();
        for (flow, it) in self.flows.iter().enumerate().filter(|(_, it)| it.total > newcomer.total) {
            users.extend(bits(it.mask & path.mask).map(|resource| self.user(at, flow, resource)));
        }
        users.sort_unstable_by_key(|user| (std::cmp::Reverse(user.total), user.flow, user.resource));
        users
    }

    /// Returns a flow as a user that `at` asks for a part of a resource.
    fn user(&self, at: usize, flow: usize, resource: usize) -> ResourceUser {
        let it = &self.flows[flow];
        let keeps = if it.link == Some(resource) { self.equal_part(at, resource) } else { 0 };
        let spare = self.rate_on(flow, resource).saturating_sub(keeps);
        ResourceUser { flow, resource, spare, total: it.total }
    }

    /// Returns the equal part of a resource if the flow `at` joined its users.
    fn equal_part(&self, at: usize, resource: usize) -> u64 {
        let newcomer = &self.flows[at];
        let joins = newcomer.mask >> resource & 1 == 0 && newcomer.link != Some(resource);
        self.matrix.capacity(resource) / (self.users(resource) + u64::from(joins))
    }
}

/// Returns the least rate that a flow with `total` must gain by sharing a path of `width`.
fn least_gain(total: u64, width: u64) -> u64 {
    if total == 0 { 1 } else { width / GAIN_MIN + 1 }
}

impl ResourceUser {
    /// Returns the rate that the flow gives up so that it keeps at least a level.
    fn gives(&self, level: u64) -> u64 {
        self.spare.min(self.total.saturating_sub(level))
    }
}
