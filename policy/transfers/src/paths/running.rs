//! The transfers that run, and their routes. All changes of the matrix by routes are made here, so
//! that the routes and the matrix agree.

use super::limits::ROUTES_MAX;
use super::matrix::{RateMatrix, ResourceSet};
use super::route::{NvlinkRoute, RouteChange};
use millrace_core::ids::FlowId;
use millrace_types::BytesPerSec;

/// A path in use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PathShare {
    /// Index of the path in the matrix.
    pub(super) path: usize,
    /// Rate in bytes per second.
    pub(super) rate: u64,
}

/// A transfer's routes, without a heap allocation. Sorted by path, so that equal sets of routes
/// compare equal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PathShares {
    parts: [PathShare; ROUTES_MAX],
    len: usize,
}

impl PathShares {
    pub(super) fn as_slice(&self) -> &[PathShare] {
        &self.parts[..self.len]
    }

    pub(super) fn is_full(&self) -> bool {
        self.len == ROUTES_MAX
    }

    fn find(&self, path: usize) -> Option<usize> {
        self.as_slice().iter().position(|part| part.path == path)
    }

    fn insert(&mut self, part: PathShare) {
        let at = self.as_slice().partition_point(|other| other.path < part.path);
        self.parts.copy_within(at..self.len, at + 1);
        self.parts[at] = part;
        self.len += 1;
    }

    fn remove(&mut self, at: usize) {
        self.parts.copy_within(at + 1..self.len, at);
        self.len -= 1;
        self.parts[self.len] = PathShare::default();
    }
}

impl FromIterator<PathShare> for PathShares {
    /// Collects the first [`ROUTES_MAX`] parts.
    fn from_iter<I: IntoIterator<Item = PathShare>>(from: I) -> Self {
        let mut parts = Self::default();
        from.into_iter().take(ROUTES_MAX).for_each(|part| parts.insert(part));
        parts
    }
}

/// The kind of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FlowKind {
    /// A transfer from one GPU to another, with all its routes.
    Transfer,
    /// The part of a host transfer that neighbours forward. The routes are chosen once. The flow
    /// may lose some routes, because the host path of the GPU itself stays.
    Forward,
}

#[derive(Debug)]
pub(super) struct PathFlow {
    pub(super) id: FlowId,
    pub(super) role: FlowKind,
    pub(super) from: usize,
    pub(super) to: usize,
    /// The routes of the flow if no other flow ran; empty unless the selection fixes the routes at
    /// the start.
    pub(super) fixed: PathShares,
    /// The link that the flow owns while it runs.
    pub(super) link: Option<usize>,
    pub(super) parts: PathShares,
    /// The sum of the rates of all routes.
    pub(super) total: u64,
    /// All resources that the routes cross.
    pub(super) mask: ResourceSet,
    /// The routes that the caller was last told of, once they may have changed. The inner `None`
    /// means that the caller was told of no routes yet.
    told: Option<Option<PathShares>>,
}

impl PathFlow {
    pub(super) fn new(id: FlowId, role: FlowKind, from: usize, to: usize) -> Self {
        let fixed = PathShares::default();
        let parts = PathShares::default();
        Self { id, role, from, to, fixed, link: None, parts, total: 0, mask: 0, told: Some(None) }
    }
}

#[derive(Debug)]
pub(super) struct FlowTable {
    pub(super) matrix: RateMatrix,
    /// The flows in the order in which they began.
    pub(super) flows: Vec<PathFlow>,
}

impl FlowTable {
    fn touch(&mut self, at: usize) {
        let flow = &mut self.flows[at];
        flow.told.get_or_insert(Some(flow.parts));
    }

    /// Adds `rate` of a path to a flow. Returns `false` if the flow has as many routes as it may
    /// have.
    pub(super) fn lay(&mut self, at: usize, path: usize, rate: u64) -> bool {
        if rate == 0 {
            return true;
        }
        self.touch(at);
        let parts = &mut self.flows[at].parts;
        match parts.find(path) {
            Some(part) => parts.parts[part].rate += rate,
            None if parts.is_full() => return false,
            None => parts.insert(PathShare { path, rate }),
        }
        self.flows[at].total += rate;
        self.flows[at].mask |= self.matrix.path(path).mask;
        self.matrix.take(path, rate);
        true
    }

    /// Takes `rate` of a path from a flow that uses the path.
    pub(super) fn cut(&mut self, at: usize, path: usize, rate: u64) {
        self.touch(at);
        let flow = &mut self.flows[at];
        let Some(part) = flow.parts.find(path) else {
            debug_assert!(false, "a flow gives up a path that it does not use");
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

    /// Takes all routes from a flow that cross any of these resources.
    pub(super) fn strip(&mut self, at: usize, mask: ResourceSet) {
        let parts = self.flows[at].parts;
        for part in parts.as_slice() {
            if self.matrix.path(part.path).mask & mask != 0 {
                self.cut(at, part.path, part.rate);
            }
        }
    }

    /// Returns the rate that a flow has of a resource.
    pub(super) fn rate_on(&self, at: usize, resource: usize) -> u64 {
        let over = |part: &&PathShare| self.matrix.path(part.path).mask >> resource & 1 == 1;
        self.flows[at].parts.as_slice().iter().filter(over).map(|part| part.rate).sum()
    }

    /// Returns the number of flows that cross a resource or own it.
    pub(super) fn users(&self, resource: usize) -> u64 {
        let uses = |flow: &&PathFlow| flow.mask >> resource & 1 == 1 || flow.link == Some(resource);
        self.flows.iter().filter(uses).count() as u64
    }

    /// Ends a flow. Returns whether the flow existed.
    pub(super) fn remove(&mut self, id: FlowId) -> bool {
        let Some(at) = self.flows.iter().position(|flow| flow.id == id) else { return false };
        self.strip(at, ResourceSet::MAX);
        if let Some(link) = self.flows.remove(at).link {
            self.matrix.disown(link);
        }
        true
    }

    /// Returns a part as a public route.
    pub(super) fn route(&self, part: &PathShare) -> NvlinkRoute {
        NvlinkRoute { hops: self.matrix.path(part.path).hops, rate: BytesPerSec(part.rate) }
    }

    /// Returns the changes since the last call.
    pub(super) fn changes(&mut self) -> Vec<RouteChange> {
        let matrix = &self.matrix;
        let route = |part: &PathShare| NvlinkRoute {
            hops: matrix.path(part.path).hops,
            rate: BytesPerSec(part.rate),
        };
        let changed = self.flows.iter_mut().filter_map(|flow| {
            let told = flow.told.take()?;
            let routes = || flow.parts.as_slice().iter().map(route).collect();
            (told != Some(flow.parts)).then(|| RouteChange { flow: flow.id, routes: routes() })
        });
        changed.collect()
    }
}
