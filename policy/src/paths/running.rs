//! The transfers that run, and their routes. Whatever a route takes off the matrix goes through here,
//! so that both agree.

use super::matrix::{Mask, Matrix};
use super::{Change, FlowId, ROUTES_MAX, Route};
use millrace_types::BytesPerSec;

/// A path in use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Part {
    /// Which of the matrix's paths.
    pub(super) path: usize,
    /// How fast.
    pub(super) rate: u64,
}

/// A transfer's routes, without a heap. In the order of their paths, so that the same routes are equal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Parts {
    parts: [Part; ROUTES_MAX],
    len: usize,
}

impl Parts {
    pub(super) fn as_slice(&self) -> &[Part] {
        &self.parts[..self.len]
    }

    pub(super) fn is_full(&self) -> bool {
        self.len == ROUTES_MAX
    }

    fn find(&self, path: usize) -> Option<usize> {
        self.as_slice().iter().position(|part| part.path == path)
    }

    fn insert(&mut self, part: Part) {
        let at = self.as_slice().partition_point(|other| other.path < part.path);
        self.parts.copy_within(at..self.len, at + 1);
        self.parts[at] = part;
        self.len += 1;
    }

    fn remove(&mut self, at: usize) {
        self.parts.copy_within(at + 1..self.len, at);
        self.len -= 1;
        self.parts[self.len] = Part::default();
    }
}

impl FromIterator<Part> for Parts {
    /// The first [`ROUTES_MAX`].
    fn from_iter<I: IntoIterator<Item = Part>>(from: I) -> Self {
        let mut parts = Self::default();
        from.into_iter().take(ROUTES_MAX).for_each(|part| parts.insert(part));
        parts
    }
}

/// What a flow is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// All that moves from one GPU to another for it.
    Transfer,
    /// What neighbours forward from or to the host. It has its routes once and for all: it may lose
    /// some, since the host path of its own GPU stays.
    Forward,
}

#[derive(Debug)]
pub(super) struct Flow {
    pub(super) id: FlowId,
    pub(super) role: Role,
    pub(super) from: usize,
    pub(super) to: usize,
    /// The routes it would have if it were alone, where these are fixed from the beginning.
    pub(super) fixed: Parts,
    /// The link it owns, while it runs.
    pub(super) link: Option<usize>,
    pub(super) parts: Parts,
    /// The sum of its routes' rates.
    pub(super) total: u64,
    /// All that its routes cross.
    pub(super) mask: Mask,
    /// The routes its owner was last told of, once they may be others. `None` inside: of none yet.
    told: Option<Option<Parts>>,
}

impl Flow {
    pub(super) fn new(id: FlowId, role: Role, (from, to): (usize, usize)) -> Self {
        let (told, fixed, parts) = (Some(None), Parts::default(), Parts::default());
        Self { id, role, from, to, fixed, link: None, parts, total: 0, mask: 0, told }
    }
}

#[derive(Debug)]
pub(super) struct Running {
    pub(super) matrix: Matrix,
    /// In the order in which they began.
    pub(super) flows: Vec<Flow>,
}

impl Running {
    fn touch(&mut self, at: usize) {
        let flow = &mut self.flows[at];
        flow.told.get_or_insert(Some(flow.parts));
    }

    /// Gives a flow so much more of a path. `false`: it has as many routes as it may have.
    pub(super) fn lay(&mut self, at: usize, path: usize, rate: u64) -> bool {
        if rate == 0 {
            return true;
        }
        self.touch(at);
        let parts = &mut self.flows[at].parts;
        match parts.find(path) {
            Some(part) => parts.parts[part].rate += rate,
            None if parts.is_full() => return false,
            None => parts.insert(Part { path, rate }),
        }
        self.flows[at].total += rate;
        self.flows[at].mask |= self.matrix.path(path).mask;
        self.matrix.take(path, rate);
        true
    }

    /// Takes so much of a path from a flow that has it.
    pub(super) fn cut(&mut self, at: usize, path: usize, rate: u64) {
        self.touch(at);
        let flow = &mut self.flows[at];
        let Some(part) = flow.parts.find(path) else {
            debug_assert!(false, "only a route that is there is cut");
            return;
        };
        flow.parts.parts[part].rate -= rate;
        flow.total -= rate;
        if flow.parts.parts[part].rate == 0 {
            flow.parts.remove(part);
            flow.mask =
                flow.parts.as_slice().iter().fold(0, |mask, part| mask | self.matrix.path(part.path).mask);
        }
        self.matrix.give(path, rate);
    }

    /// Takes every route from a flow that crosses one of these.
    pub(super) fn strip(&mut self, at: usize, mask: Mask) {
        let parts = self.flows[at].parts;
        for part in parts.as_slice() {
            if self.matrix.path(part.path).mask & mask != 0 {
                self.cut(at, part.path, part.rate);
            }
        }
    }

    /// What a flow has of a resource.
    pub(super) fn rate_on(&self, at: usize, resource: usize) -> u64 {
        let over = |part: &&Part| self.matrix.path(part.path).mask >> resource & 1 == 1;
        self.flows[at].parts.as_slice().iter().filter(over).map(|part| part.rate).sum()
    }

    /// How many flows cross a resource or own it.
    pub(super) fn users(&self, resource: usize) -> u64 {
        let uses = |flow: &&Flow| flow.mask >> resource & 1 == 1 || flow.link == Some(resource);
        self.flows.iter().filter(uses).count() as u64
    }

    /// Ends a flow, and says whether there was one.
    pub(super) fn remove(&mut self, id: FlowId) -> bool {
        let Some(at) = self.flows.iter().position(|flow| flow.id == id) else { return false };
        self.strip(at, Mask::MAX);
        if let Some(link) = self.flows.remove(at).link {
            self.matrix.disown(link);
        }
        true
    }

    /// A part as others see it.
    pub(super) fn route(&self, part: &Part) -> Route {
        Route { hops: self.matrix.path(part.path).hops, rate: BytesPerSec(part.rate) }
    }

    /// What has changed since it was asked last.
    pub(super) fn changes(&mut self) -> Vec<Change> {
        let matrix = &self.matrix;
        let route = |part: &Part| Route { hops: matrix.path(part.path).hops, rate: BytesPerSec(part.rate) };
        let changed = self.flows.iter_mut().filter_map(|flow| {
            let told = flow.told.take()?;
            let routes = || flow.parts.as_slice().iter().map(route).collect();
            (told != Some(flow.parts)).then(|| Change { flow: flow.id, routes: routes() })
        });
        changed.collect()
    }
}
