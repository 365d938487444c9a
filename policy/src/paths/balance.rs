//! Busy paths (Algorithm 1, lines 8 to 14): whom to ask for one, and for how much.
//!
//! The paper says that the totals are compared and the running function moves if it can. Here: a route
//! moves if its flow finds it a path at least as fast elsewhere and still has no less than the newcomer.
//! Else those who have more than the newcomer give it some, until the poorer has as much as they keep:
//! max-min. Owners give nothing of their link, except to other
//! flows of the pair and to one that has no route at all, and they keep an equal part of it.

use super::LINKS_MAX;
use super::matrix::{Mask, bits, set};
use super::running::{Part, Running};

/// Busy paths that one flow is given at most when it begins: each may change the routes of others.
const BALANCES_MAX: usize = 4;
/// A split gains at least this part of the path's width, unless the flow has no route: less is not
/// worth new plans for others.
const GAIN_MIN: u64 = 16;
/// A split is exact to this part of the path's width.
const GRAIN: u64 = 1024;

/// Whoever crosses a resource of the path that is to be shared.
struct User {
    flow: usize,
    resource: usize,
    /// What it has of the resource and need not keep.
    spare: u64,
    /// The flow's total rate.
    total: u64,
}

impl Running {
    /// Gives a flow busy paths, while bytes could leave and arrive faster or it has no route.
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

    /// Gives it the first busy path that somebody gives up or shares.
    fn take_busy(&mut self, at: usize) -> bool {
        let (from, to, total) = (self.flows[at].from, self.flows[at].to, self.flows[at].total);
        let others = self.matrix.owned & !self.flows[at].link.map_or(0, |link| 1 << link);
        let richer = self.richer(total);
        let allowed: &[Mask] = if total == 0 { &[others, 0] } else { &[others] };
        for &barred in allowed {
            let mut generous: Option<Mask> = None;
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

    /// What is crossed by flows that have more than so much.
    fn richer(&self, total: u64) -> Mask {
        self.flows.iter().filter(|flow| flow.total > total).fold(0, |mask, flow| mask | flow.mask)
    }

    /// What could give a flow the least that a split must gain, of what is not barred. Many paths cross
    /// the same few links, so once a split has failed this is asked of the links and not of the paths.
    fn generous(&self, at: usize, barred: Mask) -> Mask {
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

    /// Gives a flow a path whose `full` resources one route of another crosses, if that can move.
    fn take_moved(&mut self, at: usize, path: usize, full: Mask) -> bool {
        for other in 0..self.flows.len() {
            if other == at || full & !self.flows[other].mask != 0 {
                continue;
            }
            let parts = self.flows[other].parts;
            let over = |part: &&Part| full & !self.matrix.path(part.path).mask == 0;
            let Some(part) = parts.as_slice().iter().find(over) else { continue };
            if self.move_away(other, *part, at, path) {
                self.lay(at, path, self.matrix.room(path));
                return true;
            }
        }
        false
    }

    /// Moves a route off a path that a newcomer is to have, if its flow loses nothing and has no less
    /// than the newcomer then. An owner stays on its link.
    fn move_away(&mut self, other: usize, part: Part, newcomer: usize, path: usize) -> bool {
        let (flow, wanted) = (&self.flows[other], self.matrix.path(path).mask);
        let (from, to, route) = (flow.from, flow.to, self.matrix.path(part.path));
        if flow.total <= self.flows[newcomer].total || flow.link.is_some_and(|link| route.mask == 1 << link) {
            return false;
        }
        // Most cannot move at all: that is seen before anything is touched.
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

    /// Shares a path with the flows on it that have more. Says whether that gained anything.
    pub(super) fn split(&mut self, at: usize, path: usize) -> bool {
        let users = self.users_of(at, path);
        let (total, width) = (self.flows[at].total, self.matrix.path(path).width);
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
        let (mut gain, mut too_much) = (least, width + 1);
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

    /// Has a user give what a resource lacks of `gain`, down to a level.
    fn collect(&mut self, user: &User, level: u64, gain: u64) {
        let mut lacks = gain.saturating_sub(self.matrix.left(user.resource));
        let flow = &self.flows[user.flow];
        lacks = lacks.min(User { total: flow.total, ..*user }.gives(level));
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

    /// Whoever crosses a path and has more than a flow, the richest first.
    fn users_of(&self, at: usize, path: usize) -> Vec<User> {
        let (newcomer, path) = (&self.flows[at], self.matrix.path(path));
        let mut users = Vec::new();
        for (flow, it) in self.flows.iter().enumerate().filter(|(_, it)| it.total > newcomer.total) {
            users.extend(bits(it.mask & path.mask).map(|resource| self.user(at, flow, resource)));
        }
        users.sort_unstable_by_key(|user| (std::cmp::Reverse(user.total), user.flow, user.resource));
        users
    }

    /// A flow as one that `at` asks for a part of a resource.
    fn user(&self, at: usize, flow: usize, resource: usize) -> User {
        let it = &self.flows[flow];
        let keeps = if it.link == Some(resource) { self.equal_part(at, resource) } else { 0 };
        let spare = self.rate_on(flow, resource).saturating_sub(keeps);
        User { flow, resource, spare, total: it.total }
    }

    /// What each would have of a resource if a flow joined those who use it.
    fn equal_part(&self, at: usize, resource: usize) -> u64 {
        let newcomer = &self.flows[at];
        let joins = newcomer.mask >> resource & 1 == 0 && newcomer.link != Some(resource);
        self.matrix.capacity(resource) / (self.users(resource) + u64::from(joins))
    }
}

/// What a flow of so much must gain at least by sharing a path so wide.
fn least_gain(total: u64, width: u64) -> u64 {
    if total == 0 { 1 } else { width / GAIN_MIN + 1 }
}

impl User {
    /// Returns the rate that the flow gives up so that it keeps at least a level.
    fn gives(&self, level: u64) -> u64 {
        self.spare.min(self.total.saturating_sub(level))
    }
}
