//! Which NVLinks bytes take from one GPU of a node to another, and to the host over other GPUs' PCIe
//! links (FaaSTube §6.2, Algorithm 1; D05, D07, D19 to D22).
//!
//! In: transfers that begin and end. Out: the routes of each, with their rates, whenever they change.
//! A GPU server is a network: pairs that no NVLink joins, 12 of DGX-V100's 28 (H26), reach each other
//! through others, and those that one joins are faster with detours beside it.
//!
//! ```text
//! begin, begin_host, end ──► ┌───────┐ ──► Change { flow, routes }
//!                            │ Paths │ ──► HostPlan
//!                            └───────┘
//! ```
//!
//! A newcomer takes, in this order:
//! 1. the link that joins its pair. It owns it: flows of other pairs leave, and take what is free. One
//!    that would have no route then stays with a fair share. Owners are never evicted, so nobody evicts
//!    each other in turns;
//! 2. its shortest paths over what is free, each at the rate of its narrowest link, which every link
//!    of the path has less then, until nothing leaves its GPU or arrives at the other;
//! 3. busy paths: a route of another flow moves to where it is as fast, or the slower flow is given a
//!    part by the faster ones (see `balance`).
//!
//! Then, and when a flow ends, all flows take what is free, the slowest first. Between GPUs that no NVLinks
//! join, a flow has no route, and the caller sends its bytes over the host.
//!
//! Absent: PCIe bandwidth, which belongs to whoever schedules host transfers; chunks and batches: a
//! caller goes on with the batches it has sent and plans the next by the new routes.

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
pub use self::direction::{Direction, Each};
pub use self::hops::{HOPS_MAX, Hops};
pub use self::host::{HostPlan, HostRoute};
pub use self::place::{Edge, place};
pub use self::ways::{Way, ways};
pub use crate::ids::FlowId;

use self::host::{Ask, HostPath, forwards, host_paths};
use self::matrix::Matrix;
use self::running::{Flow, Role, Running};

/// GPUs a node has at most.
pub const GPUS_MAX: usize = 64;
/// NVLinks a node has at most, each direction for itself; of a switch its ports.
pub const LINKS_MAX: usize = 128;
/// Flows that run at once at most.
pub const FLOWS_MAX: usize = 256;
/// Routes of one flow at most. DGX-V100 has six NVLinks at a GPU.
pub const ROUTES_MAX: usize = 8;

/// Why something could not be begun or placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The topology has no such GPU.
    #[error("there is no GPU {0}")]
    UnknownGpu(GpuIndex),
    /// Bytes that stay on a GPU cross no link.
    #[error("from GPU {0} to itself there is nothing to cross")]
    SameGpu(GpuIndex),
    /// The name is taken.
    #[error("{0} runs already")]
    Runs(FlowId),
    /// [`FLOWS_MAX`] run.
    #[error("{FLOWS_MAX} flows run already")]
    TooManyFlows,
    /// More than [`GPUS_MAX`].
    #[error("{0} GPUs are more than {GPUS_MAX}")]
    TooManyGpus(usize),
    /// More than [`LINKS_MAX`].
    #[error("{0} NVLinks are more than {LINKS_MAX}")]
    TooManyLinks(usize),
    /// An edge names a function past the last.
    #[error("there is no function {0}")]
    UnknownFunction(usize),
    /// Each function needs a GPU of its own.
    #[error("{functions} functions do not fit {free} free GPUs")]
    TooFewGpus {
        /// So many are to be placed.
        functions: usize,
        /// So many GPUs are free.
        free: usize,
    },
}

/// A way from one GPU to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The GPUs it crosses, both ends included.
    pub hops: Hops,
    /// How fast.
    pub rate: BytesPerSec,
}

/// A flow's routes from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Whose.
    pub flow: FlowId,
    /// All of them, the shortest first. None: it goes by the host.
    pub routes: Vec<Route>,
}

/// The NVLinks of a node, and who uses them.
#[derive(Debug)]
pub struct Paths {
    selection: Selection,
    running: Running,
    hosts: Vec<HostPath>,
}

impl Paths {
    /// All links idle.
    ///
    /// # Errors
    /// [`Error::TooManyGpus`], [`Error::TooManyLinks`], and [`Error::UnknownGpu`] for a link to one.
    pub fn new(topology: &Topology, config: Config) -> Result<Self, Error> {
        let bound = config.hops_max.map_or(HOPS_MAX, |hops| (hops.get() as usize).min(HOPS_MAX));
        let matrix = Matrix::new(topology, bound)?;
        let running = Running { matrix, flows: Vec::new() };
        Ok(Self { selection: config.selection, running, hosts: host_paths(topology) })
    }

    /// Begins a transfer, and says whose routes change: the newcomer's, and those of whoever made room.
    ///
    /// # Errors
    /// [`Error::UnknownGpu`], [`Error::SameGpu`], [`Error::Runs`], [`Error::TooManyFlows`]: then nothing
    /// has changed.
    pub fn begin(&mut self, flow: FlowId, from: GpuIndex, to: GpuIndex) -> Result<Vec<Change>, Error> {
        self.check_gpu(from)?;
        self.check_gpu(to)?;
        if from == to {
            return Err(Error::SameGpu(from));
        }
        self.check_flow(flow)?;
        let ends = (from.0 as usize, to.0 as usize);
        let mut newcomer = Flow::new(flow, Role::Transfer, ends);
        match self.selection {
            Selection::FaasTube => {}
            Selection::Direct => newcomer.fixed = self.running.direct_parts(ends.0, ends.1),
            Selection::Ucx => newcomer.fixed = self.running.shortest_parts(ends.0, ends.1),
        }
        self.running.flows.push(newcomer);
        match self.selection {
            Selection::FaasTube => self.running.admit(),
            Selection::Direct | Selection::Ucx => self.running.share_out(),
        }
        Ok(self.running.changes())
    }

    /// Begins a transfer between the host and a GPU over as many PCIe links as there are ways to,
    /// with at most [`FORWARDS_MAX`] NVLinks on each. The GPU's own is always one of them. [`Self::end`]
    /// ends it. Where an owner takes a link back it loses that way, as a [`Change`] says.
    ///
    /// # Errors
    /// [`Error::UnknownGpu`], [`Error::Runs`], [`Error::TooManyFlows`].
    pub fn begin_host(
        &mut self,
        flow: FlowId,
        gpu: GpuIndex,
        direction: Direction,
    ) -> Result<HostPlan, Error> {
        self.check_gpu(gpu)?;
        self.check_flow(flow)?;
        let ask = Ask { hosts: &self.hosts, id: flow, gpu: gpu.0 as usize, direction };
        self.running.begin_host(&ask, self.selection);
        if self.selection != Selection::FaasTube {
            self.running.share_out();
        }
        let routes = self.running.host_routes(&ask);
        let mut changes = self.running.changes();
        changes.retain(|change| change.flow != flow);
        Ok(HostPlan { routes, changes })
    }

    /// Ends a flow, and says who is faster for it. Nothing for one that does not run.
    pub fn end(&mut self, flow: FlowId) -> Vec<Change> {
        if !self.running.remove(flow) {
            return Vec::new();
        }
        match self.selection {
            Selection::FaasTube => self.running.grow(),
            Selection::Direct | Selection::Ucx => self.running.share_out(),
        }
        self.running.changes()
    }

    /// A flow's routes; `None` if it does not run.
    #[must_use]
    pub fn routes(&self, flow: FlowId) -> Option<Vec<Route>> {
        let flow = self.running.flows.iter().find(|it| it.id == flow)?;
        Some(flow.parts.as_slice().iter().map(|part| self.running.route(part)).collect())
    }

    /// Whether NVLinks lead from one GPU to another, by routes that are not too long.
    #[must_use]
    pub fn lead(&self, from: GpuIndex, to: GpuIndex) -> bool {
        let known = self.check_gpu(from).and_then(|()| self.check_gpu(to)).is_ok();
        known && !self.running.matrix.paths_of(from.0 as usize, to.0 as usize).is_empty()
    }

    /// The ways between the host and a GPU by which neighbours may forward, whoever uses them: from the GPU
    /// whose PCIe links they cross, or to it, none of which are its own, over at most [`FORWARDS_MAX`] NVLinks
    /// (D05). The shortest first, then the fastest.
    #[must_use]
    pub fn forwards(&self, direction: Direction, gpu: GpuIndex) -> Vec<Hops> {
        if self.check_gpu(gpu).is_err() {
            return Vec::new();
        }
        forwards(&self.running.matrix, &self.hosts, direction, gpu.0 as usize)
    }

    /// What is left between two GPUs over what joins them: the matrix of D21.
    #[must_use]
    pub fn left(&self, from: GpuIndex, to: GpuIndex) -> BytesPerSec {
        self.running.matrix.between(from, to).0
    }

    /// What joins two GPUs, if it is idle.
    #[must_use]
    pub fn capacity(&self, from: GpuIndex, to: GpuIndex) -> BytesPerSec {
        self.running.matrix.between(from, to).1
    }

    fn check_gpu(&self, gpu: GpuIndex) -> Result<(), Error> {
        if (gpu.0 as usize) < self.running.matrix.gpus() { Ok(()) } else { Err(Error::UnknownGpu(gpu)) }
    }

    /// Whether a flow can be added to those that run.
    fn check_flow(&self, flow: FlowId) -> Result<(), Error> {
        if self.running.flows.iter().any(|it| it.id == flow) {
            return Err(Error::Runs(flow));
        }
        if self.running.flows.len() >= FLOWS_MAX { Err(Error::TooManyFlows) } else { Ok(()) }
    }
}
