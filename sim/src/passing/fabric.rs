//! All operations that take time: copies over the links of all nodes, and waits. A *course* is a sequence of
//! steps. The tag of a course names the event that its end causes.
//!
//! Bytes move as a fluid. At each event all rates are computed again, and a transfer moves at the rate of
//! its slowest leg until the next event. Chunks and batches (D12, D13) are not simulated one by one. Their
//! cost is added at the end of a step: the time of a chunk for each further stage of a pipeline (D08), and
//! for a new copy the batch that is crossing its link when the copy begins.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use millrace_memory::CHUNK;
use millrace_transfers::paths::{HostDirection, HostLinks};
use millrace_transfers::rates::{BATCH, TransferObjective};
use millrace_types::topology::Topology;
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Timestamp};

use super::error::Error;
use super::links::{HostCopy, LegId, NodeLinks, pipelines_through_host};
use super::outcome::CopyCounts;
use super::system::{Costs, System};

/// A GPU of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GpuSite {
    pub(super) node: usize,
    pub(super) gpu: GpuIndex,
}

/// A step of a course.
#[derive(Debug, Clone, Copy)]
pub(super) enum TransferStep {
    Wait(Duration),
    /// A copy between a GPU and its host.
    Host {
        site: GpuSite,
        direction: HostDirection,
        bytes: Bytes,
        links: HostLinks,
        objective: Option<TransferObjective>,
    },
    /// A copy between GPUs: within a GPU, within a node, or in pipeline over both hosts and the network
    /// (D08).
    Gpus {
        from: GpuSite,
        to: GpuSite,
        bytes: Bytes,
        objective: Option<TransferObjective>,
    },
    /// A copy from the host of a node to the host of another node.
    Network {
        from: usize,
        to: usize,
        bytes: Bytes,
    },
}

#[derive(Debug)]
enum CourseState {
    Waits(Timestamp),
    Moves {
        left: f64,
        legs: Vec<(usize, LegId)>,
        network: Option<(usize, usize)>,
        ceiling: f64,
        fill: Duration,
    },
}

#[derive(Debug)]
struct StepSequence<T> {
    tag: T,
    steps: VecDeque<TransferStep>,
    now: CourseState,
}

#[derive(Debug)]
pub(super) struct FluidFabric<T> {
    system: System,
    costs: Costs,
    pub(super) nodes: Vec<NodeLinks>,
    courses: BTreeMap<u64, StepSequence<T>>,
    last: u64,
    clock: Timestamp,
    /// The bytes of all transfers that began.
    pub(super) sent: u64,
    /// The bytes that transfers have moved.
    pub(super) delivered: f64,
    pub(super) methods: CopyCounts,
}

impl<T: Copy> FluidFabric<T> {
    pub(super) fn new(
        topology: &Topology,
        nodes: usize,
        system: System,
        costs: Costs,
    ) -> Result<Self, Error> {
        Ok(Self {
            system,
            costs,
            nodes: (0..nodes).map(|_| NodeLinks::new(topology, &system)).collect::<Result<_, _>>()?,
            courses: BTreeMap::new(),
            last: 0,
            clock: Timestamp::ZERO,
            sent: 0,
            delivered: 0.0,
            methods: CopyCounts::default(),
        })
    }

    /// Begins a course.
    pub(super) fn begin(&mut self, tag: T, steps: impl IntoIterator<Item = TransferStep>) {
        self.last += 1;
        let now = CourseState::Waits(self.clock);
        self.courses.insert(self.last, StepSequence { tag, steps: steps.into_iter().collect(), now });
    }

    /// Returns the time at which the next step ends. Returns `None` if no course is under way.
    ///
    /// # Errors
    /// Returns [`Error::Stuck`] if no transfer under way has a rate, and no wait is under way.
    pub(super) fn next(&self) -> Result<Option<Timestamp>, Error> {
        let crowd = self.crowd();
        let end = |course: &StepSequence<T>| match &course.now {
            CourseState::Waits(until) => Some(*until),
            CourseState::Moves { left, .. } => {
                let rate = self.rate(&course.now, &crowd);
                (rate > 0.0).then(|| self.clock + Duration::from_nanos((left / rate * 1e9).ceil() as u64))
            }
        };
        let next = self.courses.values().filter_map(end).min();
        if next.is_none() && !self.courses.is_empty() { Err(Error::Stuck) } else { Ok(next) }
    }

    /// Moves the bytes of all transfers up to a time before which no step ends.
    pub(super) fn advance(&mut self, to: Timestamp) {
        let span = to.since(self.clock).as_secs_f64();
        if span > 0.0 {
            let crowd = self.crowd();
            let rates: Vec<f64> =
                self.courses.values().map(|course| self.rate(&course.now, &crowd)).collect();
            for (course, rate) in self.courses.values_mut().zip(rates) {
                let CourseState::Moves { left, legs, .. } = &mut course.now else { continue };
                let moved = (rate * span).min(*left);
                *left -= moved;
                self.delivered += moved;
                legs.iter().for_each(|&(node, leg)| self.nodes[node].carried(leg, moved));
            }
        }
        self.clock = to;
    }

    /// Ends the steps that are over, and begins the next steps of their courses. Returns the tags of the
    /// courses that ended.
    pub(super) fn collect(&mut self) -> Result<Vec<T>, Error> {
        let mut ended = Vec::new();
        let ids: Vec<u64> = self.courses.keys().copied().collect();
        for id in ids {
            while let Some(course) = self.courses.get_mut(&id) {
                match &mut course.now {
                    CourseState::Waits(until) if *until > self.clock => break,
                    CourseState::Waits(_) => {}
                    // Less than a byte is left only because of rounding.
                    CourseState::Moves { left, .. } if *left >= 1.0 => break,
                    CourseState::Moves { left, legs, fill, .. } => {
                        self.delivered += *left;
                        let legs = std::mem::take(legs);
                        course.now = CourseState::Waits(self.clock + *fill);
                        for (node, leg) in legs {
                            self.nodes[node].end(self.clock, leg)?;
                        }
                        continue;
                    }
                }
                match course.steps.pop_front() {
                    Some(step) => {
                        let now = self.step(step)?;
                        if let Some(course) = self.courses.get_mut(&id) {
                            course.now = now;
                        }
                    }
                    None => {
                        ended.push(course.tag);
                        self.courses.remove(&id);
                    }
                }
            }
        }
        Ok(ended)
    }

    /// Returns the number of transfers that leave and that enter each node over the network.
    fn crowd(&self) -> Vec<(u32, u32)> {
        let mut crowd = vec![(0, 0); self.nodes.len()];
        for course in self.courses.values() {
            if let CourseState::Moves { network: Some((from, to)), .. } = course.now {
                crowd[from].0 += 1;
                crowd[to].1 += 1;
            }
        }
        crowd
    }

    fn rate(&self, now: &CourseState, crowd: &[(u32, u32)]) -> f64 {
        let CourseState::Moves { legs, network, ceiling, .. } = now else { return 0.0 };
        let legs = legs.iter().map(|&(node, leg)| self.nodes[node].rate(leg));
        let share = |(from, to): (usize, usize)| {
            self.costs.network.0 as f64 / f64::from(crowd[from].0.max(crowd[to].1))
        };
        legs.chain(network.map(share)).fold(*ceiling, f64::min)
    }

    fn step(&mut self, step: TransferStep) -> Result<CourseState, Error> {
        Ok(match step {
            TransferStep::Wait(span) => CourseState::Waits(self.clock + span),
            TransferStep::Host { site, direction, bytes, links, objective } => {
                self.methods.host_gpu += 1;
                let copy = HostCopy { gpu: site.gpu, direction, bytes, links, objective };
                let (leg, mut fill) = self.host_leg(site.node, copy)?;
                if links == HostLinks::All && self.nodes[site.node].reach(site.gpu, links) > 1 {
                    fill += self.chunk(site);
                }
                self.moves(bytes, vec![leg], None, f64::MAX, fill)
            }
            TransferStep::Gpus { from, to, bytes, .. } if from == to => {
                self.methods.intra += 1;
                CourseState::Waits(self.clock + self.costs.within_gpu.time_for(bytes))
            }
            TransferStep::Gpus { from, to, bytes, objective } if from.node == to.node => {
                self.methods.inter += 1;
                self.within_node(from, to, bytes, objective)?
            }
            TransferStep::Gpus { from, to, bytes, objective } => {
                self.methods.inter_node += 1;
                let (legs, fill) = self.through_host(from, to, bytes, self.system.host_links, objective)?;
                let network = self.costs.network.time_for(CHUNK);
                self.moves(bytes, legs, Some((from.node, to.node)), f64::MAX, fill + network)
            }
            TransferStep::Network { from, to, bytes } => {
                self.methods.inter_node += 1;
                self.moves(bytes, Vec::new(), Some((from, to)), f64::MAX, Duration::ZERO)
            }
        })
    }

    fn within_node(
        &mut self,
        from: GpuSite,
        to: GpuSite,
        bytes: Bytes,
        objective: Option<TransferObjective>,
    ) -> Result<CourseState, Error> {
        let leg = self.leg();
        let node = from.node;
        if let Some(hops) = self.nodes[node].begin_nvlink(leg, from.gpu, to.gpu)? {
            let rate = BytesPerSec(self.nodes[node].rate(leg) as u64);
            // Each GPU on the way receives a whole chunk before it sends the chunk on.
            let fill = rate.time_for(CHUNK).min(Duration::from_millis(1)) * (hops as u32 - 1);
            return Ok(self.moves(bytes, vec![(node, leg)], None, f64::MAX, fill));
        }
        if pipelines_through_host(self.system.selection) && !self.nodes[node].has_nvlinks() {
            let (legs, fill) = self.through_host(from, to, bytes, HostLinks::Own, objective)?;
            return Ok(self.moves(bytes, legs, None, f64::MAX, fill));
        }
        let (legs, _) = self.through_host(from, to, bytes, HostLinks::Own, objective)?;
        let link = self.nodes[node].pcie(from.gpu);
        let ceiling = self.nodes[node].rate_of(link).0 as f64 * self.costs.peer_share;
        Ok(self.moves(bytes, legs, None, ceiling, Duration::ZERO))
    }

    /// Begins a copy from a GPU to host memory and at once on to another GPU, at the rate of the slower leg.
    fn through_host(
        &mut self,
        from: GpuSite,
        to: GpuSite,
        bytes: Bytes,
        links: HostLinks,
        objective: Option<TransferObjective>,
    ) -> Result<(Vec<(usize, LegId)>, Duration), Error> {
        let copy = |site: GpuSite, direction| HostCopy { gpu: site.gpu, direction, bytes, links, objective };
        let (up, waits_up) = self.host_leg(from.node, copy(from, HostDirection::FromGpu))?;
        let (down, waits_down) = self.host_leg(to.node, copy(to, HostDirection::ToGpu))?;
        Ok((vec![up, down], waits_up.max(waits_down) + self.chunk(to)))
    }

    /// Begins a leg between a GPU and its host. Returns the leg, and the time that the leg waits for a
    /// batch that is crossing the link.
    fn host_leg(&mut self, node: usize, copy: HostCopy) -> Result<((usize, LegId), Duration), Error> {
        let leg = self.leg();
        let waits = self.nodes[node].begin_host(self.clock, leg, copy)?;
        let link = self.nodes[node].pcie(copy.gpu);
        let batch = self.nodes[node].rate_of(link).time_for(BATCH.min(copy.bytes));
        Ok(((node, leg), if waits { batch } else { Duration::ZERO }))
    }

    /// Returns the time of a chunk over the PCIe link of a GPU.
    fn chunk(&self, site: GpuSite) -> Duration {
        let links = &self.nodes[site.node];
        links.rate_of(links.pcie(site.gpu)).time_for(CHUNK)
    }

    fn leg(&mut self) -> LegId {
        self.last += 1;
        self.last
    }

    fn moves(
        &mut self,
        bytes: Bytes,
        legs: Vec<(usize, LegId)>,
        network: Option<(usize, usize)>,
        ceiling: f64,
        fill: Duration,
    ) -> CourseState {
        self.sent += bytes.0;
        CourseState::Moves { left: bytes.0 as f64, legs, network, ceiling, fill }
    }

    pub(super) fn clock(&self) -> Timestamp {
        self.clock
    }

    pub(super) fn is_idle(&self) -> bool {
        self.courses.is_empty() && self.nodes.iter().all(NodeLinks::is_idle)
    }

    /// Returns the use of the fullest link of any node (see [`NodeLinks::fullest`]). The network is not included.
    pub(super) fn fullest(&self) -> f64 {
        self.nodes.iter().map(NodeLinks::fullest).fold(0.0, f64::max)
    }
}
