//! The ways between a GPU and host memory over the PCIe links of other GPUs (D05, §5.1). A
//! neighbour under another PCIe switch takes part of the bytes and forwards them over NVLink. The
//! PCIe part of each way is an upper bound, because the shares of PCIe links are decided elsewhere.
//! The NVLink part is taken from the matrix like any route.

use std::cmp::Reverse;

use millrace_types::topology::{LinkId, Topology};
use millrace_types::{BytesPerSec, GpuIndex};

use super::config::{FORWARDS_MAX, Selection};
use super::direction::HostDirection;
use super::hops::RouteHops;
use super::limits::ROUTES_MAX;
use super::matrix::RateMatrix;
use super::route::RouteChange;
use super::running::{FlowKind, FlowTable, PathFlow, PathShare, PathShares};
use millrace_core::ids::FlowId;

/// One way between host memory and a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostRoute {
    /// The GPU that provides the PCIe link.
    pub via: GpuIndex,
    /// The GPUs that the bytes cross, in the direction of the bytes: from `via`, or to it. A single
    /// GPU if no GPU forwards.
    pub forward: RouteHops,
    /// The rate that the PCIe link and the NVLinks can carry.
    pub rate: BytesPerSec,
}

/// The result of beginning a host transfer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPlan {
    /// The ways of the transfer: over the GPU's own PCIe link first, then those with fewer NVLinks.
    pub routes: Vec<HostRoute>,
    /// Other flows with changed routes.
    pub changes: Vec<RouteChange>,
}

/// The links that a GPU's copies from and to the host cross.
#[derive(Debug)]
pub(super) struct HostPath {
    links: Vec<LinkId>,
    rate: u64,
}

/// Returns the host path of every GPU.
pub(super) fn host_paths(topology: &Topology) -> Vec<HostPath> {
    let rate = |link: &LinkId| topology.links.get(link.0 as usize).map_or(0, |link| link.rate.0);
    let of = |gpu: &millrace_types::topology::TopologyGpu| HostPath {
        links: gpu.host_path.clone(),
        rate: gpu.host_path.iter().map(rate).min().unwrap_or(0),
    };
    topology.gpus.iter().map(of).collect()
}

/// Returns the ways between the host and a GPU over which other GPUs may forward, the best first.
pub(super) fn forwards(
    matrix: &RateMatrix,
    hosts: &[HostPath],
    direction: HostDirection,
    gpu: usize,
) -> Vec<RouteHops> {
    let apart = |via: &usize| !hosts[*via].links.iter().any(|link| hosts[gpu].links.contains(link));
    let ways = (0..hosts.len()).filter(apart).flat_map(|via| {
        let (from, to) = match direction {
            HostDirection::ToGpu => (via, gpu),
            HostDirection::FromGpu => (gpu, via),
        };
        matrix.paths_of(from, to).map(move |path| (via, path))
    });
    let way = |(via, path): (usize, usize)| {
        let hops = matrix.path(path).hops;
        let width = matrix.path(path).width;
        let links = hops.links().count();
        let order = (links, Reverse(width.min(hosts[via].rate)), path);
        (links <= FORWARDS_MAX.get() as usize).then_some((order, hops))
    };
    let mut ways: Vec<_> = ways.filter_map(way).collect();
    ways.sort_unstable_by_key(|&(order, _)| order);
    ways.into_iter().map(|(_, hops)| hops).collect()
}

/// A request for the ways between a GPU and the host, with the host paths of other GPUs that it may
/// use.
pub(super) struct HostRouteRequest<'a> {
    pub(super) hosts: &'a [HostPath],
    pub(super) id: FlowId,
    pub(super) gpu: usize,
    pub(super) direction: HostDirection,
}

impl HostRouteRequest<'_> {
    /// Returns the source and the destination of the bytes that the GPU `via` forwards.
    fn ends(&self, via: usize) -> (usize, usize) {
        match self.direction {
            HostDirection::ToGpu => (via, self.gpu),
            HostDirection::FromGpu => (self.gpu, via),
        }
    }

    fn via(&self, hops: &RouteHops) -> GpuIndex {
        match self.direction {
            HostDirection::ToGpu => hops.first(),
            HostDirection::FromGpu => hops.last(),
        }
    }

    /// Returns the best path among those with unused PCIe links: the shortest, then the fastest,
    /// then the path that leaves most to other flows.
    fn next(&self, matrix: &RateMatrix, used: &[LinkId], selection: Selection) -> Option<(usize, PathShare)> {
        let apart = |via: &usize| !self.hosts[*via].links.iter().any(|link| used.contains(link));
        let ways = (0..self.hosts.len()).filter(apart).flat_map(|via| {
            let (from, to) = self.ends(via);
            matrix.paths_of(from, to).map(move |path| (via, path))
        });
        let free = |path: usize| match selection {
            Selection::FaasTube => matrix.path(path).mask & !matrix.free() == 0,
            Selection::Direct | Selection::Ucx => true,
        };
        let way = |(via, path): (usize, usize)| {
            let room =
                if selection == Selection::FaasTube { matrix.room(path) } else { matrix.path(path).width };
            let rate = room.min(self.hosts[via].rate);
            let hops = matrix.path(path).hops.links().count();
            (hops <= FORWARDS_MAX.get() as usize && free(path) && rate > 0)
                .then_some(((hops, Reverse(rate), Reverse(room), path), (via, PathShare { path, rate })))
        };
        ways.filter_map(way).min_by_key(|(order, _)| *order).map(|(_, found)| found)
    }
}

impl FlowTable {
    /// Adds the flow that neighbours forward for a GPU's host transfer.
    pub(super) fn begin_host(&mut self, ask: &HostRouteRequest<'_>, selection: Selection) {
        let at = self.flows.len();
        self.flows.push(PathFlow::new(ask.id, FlowKind::Forward, ask.gpu, ask.gpu));
        let mut used = ask.hosts[ask.gpu].links.clone();
        let mut fixed = Vec::new();
        while let Some((via, part)) =
            ask.next(&self.matrix, &used, selection).filter(|_| fixed.len() < ROUTES_MAX)
        {
            used.extend(&ask.hosts[via].links);
            fixed.push(part);
            if selection == Selection::FaasTube {
                self.lay(at, part.path, part.rate);
            }
        }
        self.flows[at].fixed = fixed.into_iter().collect::<PathShares>();
    }

    /// Returns the ways of the host transfer that began last, by length.
    pub(super) fn host_routes(&self, ask: &HostRouteRequest<'_>) -> Vec<HostRoute> {
        let own = GpuIndex(ask.gpu as u32);
        let rate = BytesPerSec(ask.hosts[ask.gpu].rate);
        let mut routes = vec![HostRoute { via: own, forward: RouteHops::of([own]), rate }];
        let parts = self.flows.last().map(|flow| flow.parts.as_slice()).unwrap_or_default();
        routes.extend(parts.iter().map(|part| {
            let route = self.route(part);
            HostRoute { via: ask.via(&route.hops), forward: route.hops, rate: route.rate }
        }));
        routes.sort_by_key(|route| route.forward.links().count());
        routes
    }
}
