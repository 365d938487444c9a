//! The routes of a flow between two GPUs.

use millrace_core::ids::FlowId;
use millrace_types::BytesPerSec;

use super::hops::RouteHops;

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
