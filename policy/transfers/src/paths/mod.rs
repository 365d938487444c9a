//! Chooses the NVLinks that bytes take from one GPU of a node to another, and to the host over
//! other GPUs' PCIe links (FaaSTube §6.2, Algorithm 1; D05, D07, D19 to D22).
//!
//! The inputs are transfers that begin and end. The outputs are the routes of each transfer, with
//! their rates, whenever they change. A GPU server is a network. Pairs without an NVLink, 12 of
//! DGX-V100's 28 (H26), reach each other through other GPUs; pairs with an NVLink are faster with
//! detours beside it.
//!
//! ```text
//! begin, begin_host, end ──► ┌───────┐ ──► Change { flow, routes }
//!                            │ Paths │ ──► HostPlan
//!                            └───────┘
//! ```
//!
//! A new transfer takes, in this order:
//! 1. The link that joins its pair. The transfer owns this link: flows of other pairs leave the
//!    link, and take free links. A flow that would then have no route stays on the link with a fair
//!    share. Owners are never evicted, so no two flows evict each other in turns.
//! 2. The shortest paths over free links, until no more bytes can leave the source or arrive at the
//!    destination. Each path has the rate of the narrowest link, and every link of the path has
//!    that much less left.
//! 3. Busy paths. A route of another flow moves to a path where it is as fast, or faster flows give
//!    the slower flow a part (see `balance`).
//!
//! Then, and when a flow ends, all flows take the free links, the slowest flow first. Between GPUs
//! that no NVLinks join, a flow has no route, and the caller sends its bytes over the host.
//!
//! Absent: PCIe bandwidth, which belongs to the scheduler of host transfers; chunks and batches. A
//! caller finishes the batches that it has sent, and sends the next batches over the new routes.

mod aware;
mod balance;
mod config;
mod direction;
mod fixed;
mod hops;
mod host;
mod matrix;
mod place;
mod running;
mod search;
#[cfg(test)]
mod tests;
mod ways;

use millrace_types::topology::Topology;
use millrace_types::{BytesPerSec, GpuIndex};

pub use self::config::{Config, FORWARDS_MAX, HOPS_DEFAULT, HOST_LINKS, HostLinks, Selection, UCX_ROUTES};
pub use self::direction::{HostDirection, PerDirection};
pub use self::hops::{HOPS_MAX, RouteHops};
pub use self::host::{HostPlan, HostRoute};
pub use self::place::{DataEdge, place};
pub use self::ways::{PairRate, pair_rates};
pub use millrace_core::ids::FlowId;

use self::host::{HostPath, HostRouteRequest, forwards, host_paths};
use self::matrix::RateMatrix;
use self::running::{FlowKind, FlowTable, PathFlow};

/// GPUs of a node, at most.
pub const GPUS_MAX: usize = 64;
/// NVLinks of a node, at most; each direction counts. Of a switch, its ports count.
pub const LINKS_MAX: usize = 128;
/// Concurrent flows, at most.
pub const FLOWS_MAX: usize = 256;
/// Routes of one flow, at most. DGX-V100 has six NVLinks at a GPU.
pub const ROUTES_MAX: usize = 8;

/// The reason why a transfer could not begin, or functions could not be placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The topology has no such GPU.
    #[error("the topology has no GPU {0}")]
    UnknownGpu(GpuIndex),
    /// Both ends are the same GPU: bytes that stay on a GPU cross no link.
    #[error("a transfer from GPU {0} to itself crosses no link")]
    SameGpu(GpuIndex),
    /// A flow of this name is running.
    #[error("{0} is already running: end it first, or use another name")]
    Runs(FlowId),
    /// [`FLOWS_MAX`] flows are running.
    #[error("the limit of {FLOWS_MAX} flows is reached: wait until a flow ends")]
    TooManyFlows,
    /// The topology has more than [`GPUS_MAX`] GPUs.
    #[error("the topology has {0} GPUs, at most {GPUS_MAX} are supported")]
    TooManyGpus(usize),
    /// The topology has more than [`LINKS_MAX`] NVLinks.
    #[error("the topology has {0} NVLinks, at most {LINKS_MAX} are supported")]
    TooManyLinks(usize),
    /// An edge names a function past the last.
    #[error("an edge names function {0}, which does not exist")]
    UnknownFunction(usize),
    /// Each function needs a GPU of its own, and too few GPUs are free.
    #[error("{functions} functions need a GPU each, and {free} are free")]
    TooFewGpus {
        /// Number of functions to place.
        functions: usize,
        /// Number of free GPUs.
        free: usize,
    },
}

/// A route from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NvlinkRoute {
    /// The GPUs that the route crosses, both ends included.
    pub hops: RouteHops,
    pub rate: BytesPerSec,
}

/// A change of a flow's routes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteChange {
    pub flow: FlowId,
    /// All routes from now on, the shortest first. Empty: the flow takes the host.
    pub routes: Vec<NvlinkRoute>,
}

/// The NVLinks of a node, and the flows that use them.
#[derive(Debug)]
pub struct PathPlanner {
    selection: Selection,
    running: FlowTable,
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
    /// with at most [`FORWARDS_MAX`] NVLinks on each. The GPU's own PCIe link is always one of
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
    /// [`FORWARDS_MAX`] NVLinks. The PCIe links are none of the GPU's own. The shortest ways are
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
