//! The links of a node, and the transfers that cross the links.

use std::collections::BTreeMap;

use millrace_types::GpuIndex;
use millrace_types::topology::{LinkId, Topology};

use super::host_link_shares::HostLinkShares;
use super::lanes::{LanePath, LinkLane, TransferRoute, lanes_and_paths};
use super::tally::TransferCounts;
use super::transfer::TransferState;
use crate::paths::{Config, Error, HostDirection, PathPlanner};
use crate::rates::TransferSharing;
use millrace_core::ids::TransferId;

/// All links of a node: from the host to GPUs, from GPUs to the host, and between GPUs.
#[derive(Debug)]
pub struct LinkScheduler {
    pub(super) topology: Topology,
    pub(super) lanes: Vec<LinkLane>,
    pub(super) paths: BTreeMap<TransferRoute, LanePath>,
    /// The NVLinks that each transfer of an object uses; `None` if the node is larger than
    /// [`PathPlanner`] can plan for.
    pub(super) routes: Option<PathPlanner>,
    /// The routes over which other GPUs may forward, by direction and GPU, the best first. Empty if
    /// each GPU uses only its own links.
    pub(super) forwards: BTreeMap<(HostDirection, GpuIndex), Vec<TransferRoute>>,
    /// The shares of the host's links that transfers have.
    pub(super) shares: HostLinkShares,
    pub(super) transfers: BTreeMap<TransferId, TransferState>,
    pub(super) grants: u64,
}

/// Returns the planner of NVLink routes for objects, which also finds the GPUs that may forward for
/// others.
///
/// # Errors
/// The errors of [`PathPlanner::new`], if the machine is larger than the planner's bounds. Objects then
/// cross the host, and no GPU forwards for others.
pub fn object_route_planner(topology: &Topology) -> Result<PathPlanner, Error> {
    PathPlanner::new(topology, Config::default())
}

impl LinkScheduler {
    /// Returns a fabric of idle links that shares host links by objective.
    ///
    /// # Panics
    /// If a GPU of the topology has no path from the host: such a topology is invalid.
    #[must_use]
    pub fn new(topology: &Topology) -> Self {
        Self::with_sharing(topology, TransferSharing::default())
    }

    /// Returns a fabric of idle links that shares host links by `host_link_sharing`.
    ///
    /// # Panics
    /// If a GPU of the topology has no path from the host: such a topology is invalid.
    #[must_use]
    pub fn with_sharing(topology: &Topology, sharing: TransferSharing) -> Self {
        let (lanes, paths) = lanes_and_paths(topology);
        let routes = object_route_planner(topology).ok();
        let shares = HostLinkShares::new(topology, sharing);
        let forwards = BTreeMap::new();
        let topology = topology.clone();
        Self { topology, lanes, paths, routes, forwards, shares, transfers: BTreeMap::new(), grants: 0 }
    }

    /// Returns the counts of transfers and waits so far.
    #[must_use]
    pub fn tally(&self) -> &TransferCounts {
        &self.shares.tally
    }

    /// Returns the number of transfers that have not ended.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.transfers.len()
    }

    /// Returns the first link of a route's path. The Link actor of this link issues the path's
    /// grants.
    pub(super) fn first_link(&self, route: TransferRoute) -> LinkId {
        self.lanes[self.paths[&route].lanes[0]].link
    }
}
