//! Plans the routes of transfers that begin and end.

use millrace_types::topology::Topology;
use millrace_types::{BytesPerSec, GpuIndex};

use super::config::{Config, Selection};
use super::direction::HostDirection;
use super::error::Error;
use super::hops::{HOPS_MAX, RouteHops};
use super::host::{HostPath, HostPlan, HostRouteRequest, forwards, host_paths};
use super::limits::FLOWS_MAX;
use super::matrix::RateMatrix;
use super::route::{NvlinkRoute, RouteChange};
use super::running::{FlowKind, FlowTable, PathFlow};
use millrace_core::ids::FlowId;

/// The NVLinks of a node, and the flows that use them.
#[derive(Debug)]
pub struct PathPlanner {
    pub(super) selection: Selection,
    pub(super) running: FlowTable,
    hosts: Vec<HostPath>,
}

impl PathPlanner {
    /// Returns the paths of a node with idle links.
    ///
    /// # Errors
    /// [`Error::TooManyGpus`], [`Error::TooManyLinks`], and [`Error::UnknownGpu`] for a link to an
    /// unknown GPU.
    pub fn new(topology: &Topology, config: Config) -> Result<Self, Error> {
        let bound = config.hops_max.map_or(HOPS_MAX, |hops| (hops.get() as usize).min(HOPS_MAX));
        let matrix = RateMatrix::new(topology, bound)?;
        let running = FlowTable { matrix, flows: Vec::new() };
        Ok(Self { selection: config.selection, running, hosts: host_paths(topology) })
    }

    /// Begins a transfer. Returns the changed routes: those of the new flow, and those of flows
    /// that made room.
    ///
    /// # Errors
    /// [`Error::UnknownGpu`], [`Error::SameGpu`], [`Error::Runs`], [`Error::TooManyFlows`]. In
    /// these cases nothing has changed.
    pub fn begin(&mut self, flow: FlowId, from: GpuIndex, to: GpuIndex) -> Result<Vec<RouteChange>, Error> {
        self.check_gpu(from)?;
        self.check_gpu(to)?;
        if from == to {
            return Err(Error::SameGpu(from));
        }
        self.check_flow(flow)?;
        let from = from.0 as usize;
        let to = to.0 as usize;
        let mut newcomer = PathFlow::new(flow, FlowKind::Transfer, from, to);
        match self.selection {
            Selection::FaasTube => {}
            Selection::Direct => newcomer.fixed = self.running.direct_parts(from, to),
            Selection::Ucx => newcomer.fixed = self.running.shortest_parts(from, to),
        }
        self.running.flows.push(newcomer);
        match self.selection {
            Selection::FaasTube => self.running.admit(),
            Selection::Direct | Selection::Ucx => self.running.share_out(),
        }
        Ok(self.running.changes())
    }

    /// Begins a transfer between the host and a GPU over as many PCIe links as there are ways to,
    /// with at most [`FORWARDS_MAX`](super::FORWARDS_MAX) NVLinks on each. The GPU's own PCIe link is always one of
    /// them. [`Self::end`] ends the transfer. If an owner takes an NVLink back, the transfer loses
    /// that way, and a [`RouteChange`] reports this.
    ///
    /// # Errors
    /// [`Error::UnknownGpu`], [`Error::Runs`], [`Error::TooManyFlows`].
    pub fn begin_host(
        &mut self,
        flow: FlowId,
        gpu: GpuIndex,
        direction: HostDirection,
    ) -> Result<HostPlan, Error> {
        self.check_gpu(gpu)?;
        self.check_flow(flow)?;
        let ask = HostRouteRequest { hosts: &self.hosts, id: flow, gpu: gpu.0 as usize, direction };
        self.running.begin_host(&ask, self.selection);
        if self.selection != Selection::FaasTube {
            self.running.share_out();
        }
        let routes = self.running.host_routes(&ask);
        let mut changes = self.running.changes();
        changes.retain(|change| change.flow != flow);
        Ok(HostPlan { routes, changes })
    }

    /// Ends a flow, and returns the routes that become faster. Returns nothing for a flow that does
    /// not run.
    pub fn end(&mut self, flow: FlowId) -> Vec<RouteChange> {
        if !self.running.remove(flow) {
            return Vec::new();
        }
        match self.selection {
            Selection::FaasTube => self.running.grow(),
            Selection::Direct | Selection::Ucx => self.running.share_out(),
        }
        self.running.changes()
    }

    /// Returns a flow's routes; `None` if the flow does not run.
    #[must_use]
    pub fn routes(&self, flow: FlowId) -> Option<Vec<NvlinkRoute>> {
        let flow = self.running.flows.iter().find(|it| it.id == flow)?;
        Some(flow.parts.as_slice().iter().map(|part| self.running.route(part)).collect())
    }

    /// Whether NVLinks lead from one GPU to another, by routes within the allowed length.
    #[must_use]
    pub fn is_reachable(&self, from: GpuIndex, to: GpuIndex) -> bool {
        let known = self.check_gpu(from).and_then(|()| self.check_gpu(to)).is_ok();
        known && !self.running.matrix.paths_of(from.0 as usize, to.0 as usize).is_empty()
    }

    /// Returns the ways between the host and a GPU by which neighbours may forward, even if other
    /// flows use them (D05). A way leads from or to the GPU with the PCIe links, over at most
    /// [`FORWARDS_MAX`](super::FORWARDS_MAX) NVLinks. The PCIe links are none of the GPU's own. The shortest ways are
    /// first, then the fastest.
    #[must_use]
    pub fn forwards(&self, direction: HostDirection, gpu: GpuIndex) -> Vec<RouteHops> {
        if self.check_gpu(gpu).is_err() {
            return Vec::new();
        }
        forwards(&self.running.matrix, &self.hosts, direction, gpu.0 as usize)
    }

    /// Returns the rate that is left between two GPUs over the link that joins them: the matrix of
    /// D21.
    #[must_use]
    pub fn rate_left(&self, from: GpuIndex, to: GpuIndex) -> BytesPerSec {
        self.running.matrix.between(from, to).0
    }

    /// Returns the rate of the link that joins two GPUs, if it is idle.
    #[must_use]
    pub fn capacity(&self, from: GpuIndex, to: GpuIndex) -> BytesPerSec {
        self.running.matrix.between(from, to).1
    }

    fn check_gpu(&self, gpu: GpuIndex) -> Result<(), Error> {
        if (gpu.0 as usize) < self.running.matrix.gpus() { Ok(()) } else { Err(Error::UnknownGpu(gpu)) }
    }

    /// Checks that a flow can be added to the running flows.
    fn check_flow(&self, flow: FlowId) -> Result<(), Error> {
        if self.running.flows.iter().any(|it| it.id == flow) {
            return Err(Error::Runs(flow));
        }
        if self.running.flows.len() >= FLOWS_MAX { Err(Error::TooManyFlows) } else { Ok(()) }
    }
}
