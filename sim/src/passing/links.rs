//! The links of one node, and the rates of the transfers that cross the links. `transfers::rates` divides PCIe
//! links, separately for each direction, and `transfers::paths` divides NVLinks. A *leg* is the share of one
//! transfer in either.

use std::collections::BTreeMap;

use millrace_transfers::paths::{
    self, FlowId, HostDirection, HostLinks, NvlinkRoute, PathPlanner, PerDirection, Selection,
};
use millrace_transfers::rates::{self, RateAllocator, TransferObjective, TransferSharing};
use millrace_types::topology::{LinkId, LinkKind, Topology};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Timestamp};

use super::error::Error;
use super::system::System;

/// The id of a leg. Ids are not reused.
pub(super) type LegId = u64;

/// A copy between a GPU and its host.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostCopy {
    pub(super) gpu: GpuIndex,
    pub(super) direction: HostDirection,
    pub(super) bytes: Bytes,
    pub(super) links: HostLinks,
    pub(super) objective: Option<TransferObjective>,
}

#[derive(Debug)]
struct HostLeg {
    direction: HostDirection,
    /// The rate over each PCIe link, in bytes a second.
    parts: Vec<(LinkId, u64)>,
    /// The rate at which NVLinks forward from each PCIe link of another GPU, in bytes a second. The GPU's
    /// own link has no entry.
    forwards: BTreeMap<LinkId, u64>,
    /// The GPU's own PCIe link.
    own: LinkId,
    /// Whether the leg has a flow at the NVLinks too.
    forwarded: bool,
    /// The bytes carried since the last measurement.
    carried: f64,
    measured: Timestamp,
}

#[derive(Debug)]
enum TransferLeg {
    Host(HostLeg),
    NvLink(Vec<NvlinkRoute>),
}

#[derive(Debug)]
pub(super) struct NodeLinks {
    topology: Topology,
    sharing: TransferSharing,
    paths: PathPlanner,
    rates: PerDirection<RateAllocator>,
    legs: BTreeMap<LegId, TransferLeg>,
    /// The number of PCIe links over which each GPU reaches the host when no other transfer runs.
    reach: Vec<u32>,
}

impl NodeLinks {
    pub(super) fn new(topology: &Topology, system: &System) -> Result<Self, Error> {
        let paths = || {
            PathPlanner::new(topology, paths::Config { selection: system.selection, ..Default::default() })
        };
        let rates = || RateAllocator::new(topology, rates::Config { sharing: system.sharing });
        let mut idle = paths()?;
        let mut reach = Vec::new();
        for gpu in &topology.gpus {
            let plan = idle.begin_host(FlowId(0), gpu.index, HostDirection::ToGpu)?;
            idle.end(FlowId(0));
            reach.push(plan.routes.len() as u32);
        }
        Ok(Self {
            topology: topology.clone(),
            sharing: system.sharing,
            paths: paths()?,
            rates: PerDirection { to_gpu: rates()?, from_gpu: rates()? },
            legs: BTreeMap::new(),
            reach,
        })
    }

    /// Returns the number of PCIe links over which a GPU reaches the host when no other transfer runs.
    pub(super) fn reach(&self, gpu: GpuIndex, links: HostLinks) -> u32 {
        match links {
            HostLinks::Own => 1,
            HostLinks::All => self.reach[gpu.0 as usize],
        }
    }

    /// Returns a GPU's own PCIe link.
    pub(super) fn pcie(&self, gpu: GpuIndex) -> LinkId {
        self.topology.gpus[gpu.0 as usize].host_path[0]
    }

    pub(super) fn rate_of(&self, link: LinkId) -> BytesPerSec {
        self.topology.links[link.0 as usize].rate
    }

    /// Reports the bytes that each copy of a direction carried to the core of the PCIe links (D16). The
    /// core divides links by the bytes that are left, so the report precedes each change.
    fn measure(&mut self, now: Timestamp, direction: HostDirection) -> Result<(), Error> {
        let mut measured = Vec::new();
        for (&id, leg) in &mut self.legs {
            let TransferLeg::Host(leg) = leg else { continue };
            if leg.direction == direction && now > leg.measured {
                measured.push((id, Bytes(leg.carried as u64), now.since(leg.measured)));
                leg.carried -= leg.carried.floor();
                leg.measured = now;
            }
        }
        for (id, bytes, window) in measured {
            let change = self.rates[direction].measured(now, rates::FlowId(id), bytes, window)?;
            self.take_rates(&change);
        }
        Ok(())
    }

    fn take_rates(&mut self, change: &rates::RateChange) {
        for allocation in &change.allocations {
            if let Some(TransferLeg::Host(leg)) = self.legs.get_mut(&allocation.flow.0) {
                leg.parts = allocation.rates.iter().map(|&(link, rate)| (link, rate.0)).collect();
            }
        }
    }

    fn take_routes(&mut self, changes: Vec<paths::RouteChange>) {
        for change in changes {
            let topology = &self.topology;
            match self.legs.get_mut(&change.flow.0) {
                Some(TransferLeg::NvLink(routes)) => *routes = change.routes,
                Some(TransferLeg::Host(leg)) => {
                    let via = |route: &NvlinkRoute| match leg.direction {
                        HostDirection::ToGpu => route.hops.first(),
                        HostDirection::FromGpu => route.hops.last(),
                    };
                    let forward = |route: &NvlinkRoute| {
                        (topology.gpus[via(route).0 as usize].host_path[0], route.rate.0)
                    };
                    leg.forwards = change.routes.iter().map(forward).collect();
                }
                None => {}
            }
        }
    }

    /// Begins a copy from or to the host. Returns whether the copy waits for a batch that is crossing the
    /// link (D13).
    pub(super) fn begin_host(&mut self, now: Timestamp, id: LegId, copy: HostCopy) -> Result<bool, Error> {
        self.measure(now, copy.direction)?;
        let own = self.pcie(copy.gpu);
        let mut links = vec![own];
        let mut forwards = BTreeMap::new();
        let forwarded = copy.links == HostLinks::All && self.reach[copy.gpu.0 as usize] > 1;
        if forwarded {
            let plan = self.paths.begin_host(FlowId(id), copy.gpu, copy.direction)?;
            for route in plan.routes.iter().filter(|route| route.via != copy.gpu) {
                links.push(self.pcie(route.via));
                forwards.insert(self.pcie(route.via), route.rate.0);
            }
            self.take_routes(plan.changes);
        }
        let crossing = |leg: &TransferLeg| matches!(leg, TransferLeg::Host(leg) if leg.direction == copy.direction && leg.parts.iter().any(|(link, _)| *link == own));
        let waits = self.sharing == TransferSharing::FaasTube && self.legs.values().any(crossing);
        let leg = HostLeg {
            direction: copy.direction,
            parts: Vec::new(),
            forwards,
            own,
            forwarded,
            carried: 0.0,
            measured: now,
        };
        self.legs.insert(id, TransferLeg::Host(leg));
        let flow =
            rates::RatedFlow { id: rates::FlowId(id), bytes: copy.bytes, links, objective: copy.objective };
        let change = self.rates[copy.direction].begin(now, &flow)?;
        self.take_rates(&change);
        Ok(waits)
    }

    /// Begins a copy between two GPUs over NVLinks. Returns the number of NVLinks of the longest route.
    /// Returns `None`, and begins no copy, if no NVLinks join the GPUs.
    pub(super) fn begin_nvlink(
        &mut self,
        id: LegId,
        from: GpuIndex,
        to: GpuIndex,
    ) -> Result<Option<usize>, Error> {
        self.legs.insert(id, TransferLeg::NvLink(Vec::new()));
        let changes = self.paths.begin(FlowId(id), from, to)?;
        self.take_routes(changes);
        let longest = match self.legs.get(&id) {
            Some(TransferLeg::NvLink(routes)) => routes.iter().map(|route| route.hops.links().count()).max(),
            _ => None,
        };
        if longest.is_none() {
            let changes = self.paths.end(FlowId(id));
            self.legs.remove(&id);
            self.take_routes(changes);
        }
        Ok(longest)
    }

    pub(super) fn end(&mut self, now: Timestamp, id: LegId) -> Result<(), Error> {
        match self.legs.get(&id) {
            Some(TransferLeg::Host(leg)) => {
                let direction = leg.direction;
                let forwarded = leg.forwarded;
                self.measure(now, direction)?;
                self.legs.remove(&id);
                let change = self.rates[direction].end(now, rates::FlowId(id))?;
                self.take_rates(&change);
                if forwarded {
                    let changes = self.paths.end(FlowId(id));
                    self.take_routes(changes);
                }
            }
            Some(TransferLeg::NvLink(_)) => {
                self.legs.remove(&id);
                let changes = self.paths.end(FlowId(id));
                self.take_routes(changes);
            }
            None => {}
        }
        Ok(())
    }

    /// Records the bytes that a leg carried.
    pub(super) fn carried(&mut self, id: LegId, bytes: f64) {
        if let Some(TransferLeg::Host(leg)) = self.legs.get_mut(&id) {
            leg.carried += bytes;
        }
    }

    /// Returns the rate of a leg, in bytes a second.
    pub(super) fn rate(&self, id: LegId) -> f64 {
        let rate: u64 = match self.legs.get(&id) {
            Some(TransferLeg::Host(leg)) => leg.parts.iter().map(|part| leg.over(part)).sum(),
            Some(TransferLeg::NvLink(routes)) => routes.iter().map(|route| route.rate.0).sum(),
            None => 0,
        };
        rate as f64
    }

    /// Returns whether no leg is left, and all NVLinks have their whole capacity again (the matrix of D21).
    pub(super) fn is_idle(&self) -> bool {
        let pairs = self
            .topology
            .gpus
            .iter()
            .flat_map(|a| self.topology.gpus.iter().map(move |b| (a.index, b.index)));
        let whole =
            |(a, b): (GpuIndex, GpuIndex)| a == b || self.paths.rate_left(a, b) == self.paths.capacity(a, b);
        self.legs.is_empty() && pairs.into_iter().all(whole)
    }

    /// Returns the use of the fullest link, as a share of its rate. NVLinks count by pair of GPUs, also
    /// through a switch. A use above 1 is a bug of the cores.
    pub(super) fn fullest(&self) -> f64 {
        let mut pcie: BTreeMap<(bool, LinkId), u64> = BTreeMap::new();
        let mut nvlink: BTreeMap<(GpuIndex, GpuIndex), u64> = BTreeMap::new();
        for (&id, leg) in &self.legs {
            if let TransferLeg::Host(leg) = leg {
                for &(link, rate) in &leg.parts {
                    let chain = self.topology.gpus.iter().find(|gpu| gpu.host_path[0] == link);
                    for &link in chain.into_iter().flat_map(|gpu| &gpu.host_path) {
                        *pcie.entry((leg.direction == HostDirection::ToGpu, link)).or_default() += rate;
                    }
                }
            }
            for route in self.paths.routes(FlowId(id)).into_iter().flatten() {
                route.hops.links().for_each(|pair| *nvlink.entry(pair).or_default() += route.rate.0);
            }
        }
        let of = |used: u64, most: BytesPerSec| used as f64 / most.0 as f64;
        let pcie = pcie.into_iter().map(|((_, link), used)| of(used, self.rate_of(link)));
        let nvlink = nvlink.into_iter().map(|((a, b), used)| of(used, self.paths.capacity(a, b)));
        pcie.chain(nvlink).fold(0.0, f64::max)
    }

    /// Returns whether the node has NVLinks.
    pub(super) fn has_nvlinks(&self) -> bool {
        self.topology.links.iter().any(|link| matches!(link.kind, LinkKind::NvLink { .. }))
    }
}

impl HostLeg {
    /// Returns the rate of the leg over one PCIe link. Over another GPU's link, the rate is at most that at
    /// which NVLinks forward from there.
    fn over(&self, &(link, rate): &(LinkId, u64)) -> u64 {
        if link == self.own { rate } else { rate.min(self.forwards.get(&link).copied().unwrap_or(0)) }
    }
}

/// Returns whether copies between GPUs without an NVLink pass through host memory in pipeline, as in
/// `FaaSTube` (§9.3). Other systems copy over PCIe between the two GPUs.
pub(super) fn pipelines_through_host(selection: Selection) -> bool {
    selection == Selection::FaasTube
}
