//! The links of a modelled machine. Each link divides its rate evenly among the copies that cross the
//! link in the same direction (processor sharing), and a copy proceeds at the smallest of its shares. The
//! unused part of a share is not given to other copies. A forwarded copy crosses all links of its route
//! at once, one chunk apart (D05).
//!
//! Grants keep copies apart on shared links. This model adds the cost of the overlaps that remain.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_memory::CHUNK;
use millrace_transfers::paths::{HostDirection, RouteHops};
use millrace_types::topology::{LinkId, LinkKind, Topology};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};

use super::model::CopyPath;

/// The source GPU of a copy; `None` for copies from the host or to the host.
pub(super) type Source = Option<GpuIndex>;

/// A link in one direction. Copies share the rate of a lane, and copies in opposite directions do not
/// disturb each other.
type DirectedLink = (LinkId, LinkDirection);

/// The direction in which a copy crosses a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum LinkDirection {
    Gpus,
    Host,
    /// Over an NVLink, to this GPU.
    Gpu(GpuIndex),
}

/// A way of a GPU, on which the GPU copies one batch at a time.
pub(super) type CopyStream = (GpuIndex, CopyPath);

/// The links of a machine and the copies that cross them now.
#[derive(Debug)]
pub(super) struct SharedLinks {
    topology: Topology,
    crossing: BTreeMap<DirectedLink, u32>,
    copying: BTreeMap<CopyStream, (Source, Vec<DirectedLink>)>,
}

impl SharedLinks {
    pub(super) fn new(topology: &Topology) -> Self {
        Self { topology: topology.clone(), crossing: BTreeMap::new(), copying: BTreeMap::new() }
    }

    /// Sets the copy under way on a stream: its source, or `None` for no copy. Returns whether this changes
    /// the load of the links.
    pub(super) fn set(&mut self, stream: CopyStream, copying: Option<Source>) -> bool {
        if self.copying.get(&stream).map(|(source, _)| *source) == copying {
            return false;
        }
        if let Some((_, path)) = self.copying.remove(&stream) {
            for lane in path {
                if let Some(crossing) = self.crossing.get_mut(&lane) {
                    *crossing -= 1;
                }
            }
        }
        if let Some(source) = copying {
            let path = self.path(stream, source);
            path.iter().for_each(|&lane| *self.crossing.entry(lane).or_default() += 1);
            self.copying.insert(stream, (source, path));
        }
        true
    }

    /// Returns the ways on which other GPUs forward to a GPU or from it now.
    pub(super) fn forwarding(&self, gpu: GpuIndex) -> Vec<CopyPath> {
        let ways = self.copying.keys().filter(|(its, _)| *its == gpu).map(|&(_, way)| way);
        ways.filter(|way| matches!(way, CopyPath::Forwarded(..))).collect()
    }

    /// Returns the time that a forwarded batch of this size needs beyond the time on the slowest link: the
    /// time of one chunk on each other link. A chunk is sent on while the next chunk arrives.
    pub(super) fn fill(&self, way: CopyPath, size: Bytes) -> Duration {
        let CopyPath::Forwarded(direction, hops) = way else { return Duration::ZERO };
        let rate = |link: LinkId| self.topology.links[link.0 as usize].rate;
        let host = self.host_path(neighbour(direction, &hops)).iter().map(|&link| rate(link)).min();
        let nvlinks = hops.links().filter_map(|(from, to)| self.between(from, to)).map(rate);
        let chunk = size.min(CHUNK);
        let stages = host.into_iter().chain(nvlinks).map(|rate| rate.time_for(chunk));
        let (all, longest) = stages.fold((Duration::ZERO, Duration::ZERO), |(all, longest), stage| {
            (all + stage, longest.max(stage))
        });
        all.saturating_sub(longest)
    }

    /// Returns the lanes that a copy crosses. A copy with the host crosses the GPU's path to the host,
    /// and a copy from another GPU the NVLink between the two. A forwarded copy crosses the host path of
    /// the forwarding GPU, and the NVLinks of the route.
    fn path(&self, (gpu, way): CopyStream, source: Source) -> Vec<DirectedLink> {
        let host = |gpu: GpuIndex, direction: HostDirection| {
            let towards = match direction {
                HostDirection::ToGpu => LinkDirection::Gpus,
                HostDirection::FromGpu => LinkDirection::Host,
            };
            self.host_path(gpu).iter().map(move |&link| (link, towards)).collect::<Vec<_>>()
        };
        let nvlink = |(from, to): (GpuIndex, GpuIndex)| {
            self.between(from, to).map(|link| (link, LinkDirection::Gpu(to)))
        };
        match (way, source) {
            (CopyPath::Forwarded(direction, hops), _) => {
                let mut path = host(neighbour(direction, &hops), direction);
                path.extend(hops.links().filter_map(nvlink));
                path
            }
            (CopyPath::Own(_), Some(from)) => nvlink((from, gpu)).into_iter().collect(),
            (CopyPath::Own(direction), None) => host(gpu, direction),
        }
    }

    fn host_path(&self, gpu: GpuIndex) -> &[LinkId] {
        &self.topology.gpus[gpu.0 as usize].host_path
    }

    /// Returns the NVLink between two GPUs, if there is one.
    fn between(&self, from: GpuIndex, to: GpuIndex) -> Option<LinkId> {
        let joins = |kind: LinkKind| match kind {
            LinkKind::NvLink { a, b } => (a, b) == (from, to) || (b, a) == (from, to),
            LinkKind::Pcie | LinkKind::PcieUplink => false,
        };
        let link = (0..).map(LinkId).zip(&self.topology.links).find(|(_, link)| joins(link.kind));
        link.map(|(link, _)| link)
    }

    /// Returns the rate of each copy under way.
    pub(super) fn rates(&self) -> impl Iterator<Item = (CopyStream, BytesPerSec)> {
        self.copying.iter().map(|(&stream, (_, path))| {
            let share = |lane: &DirectedLink| {
                let crossing = self.crossing.get(lane).copied().unwrap_or(1).max(1);
                BytesPerSec(self.topology.links[lane.0.0 as usize].rate.0 / u64::from(crossing))
            };
            (stream, path.iter().map(share).min().unwrap_or(BytesPerSec(u64::MAX)))
        })
    }
}

/// Returns the GPU of a forwarding route that uses its own links to the host.
fn neighbour(direction: HostDirection, hops: &RouteHops) -> GpuIndex {
    match direction {
        HostDirection::ToGpu => hops.first(),
        HostDirection::FromGpu => hops.last(),
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::topology::{TopologyGpu, TopologyLink};

    use super::*;

    #[test]
    fn copies_divide_the_links_they_share() {
        let gpu = |index: u32, path: &[u32]| TopologyGpu {
            index: GpuIndex(index),
            gpu_type: "modelled".to_owned(),
            memory: Bytes::gib(1),
            host_path: path.iter().copied().map(LinkId).collect(),
        };
        let link = |gb| TopologyLink { kind: LinkKind::Pcie, rate: BytesPerSec::gb(gb) };
        let topology = Topology {
            name: "test".to_owned(),
            gpus: vec![gpu(0, &[0, 3]), gpu(1, &[1, 3]), gpu(2, &[2])],
            links: vec![
                link(10),
                link(4),
                link(10),
                link(12),
                TopologyLink {
                    kind: LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(2) },
                    rate: BytesPerSec::gb(24),
                },
            ],
        };
        let mut links = SharedLinks::new(&topology);
        let rates =
            |links: &SharedLinks| links.rates().map(|((gpu, _), rate)| (gpu.0, rate)).collect::<Vec<_>>();
        let to = |gpu| (GpuIndex(gpu), CopyPath::Own(HostDirection::ToGpu));
        let from = |gpu| (GpuIndex(gpu), CopyPath::Own(HostDirection::FromGpu));
        let host = Some(None);
        assert!(links.set(to(0), host) && !links.set(to(0), host));
        assert_eq!(rates(&links), [(0, BytesPerSec::gb(10))]);
        assert!(links.set(to(1), host) && links.set(to(2), host));
        let shared = [(0, BytesPerSec::gb(6)), (1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))];
        assert_eq!(rates(&links), shared, "GPU 0 gets half the uplink, GPU 1 its slow link, GPU 2 its own");
        assert!(links.set(to(0), None));
        assert_eq!(rates(&links), [(1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))]);
        assert!(links.set(to(0), Some(Some(GpuIndex(2)))));
        let beside = [(0, BytesPerSec::gb(24)), (1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))];
        assert_eq!(rates(&links), beside, "a copy from another GPU crosses the link between them");
        assert!(links.set(from(2), host));
        let [.., down, up] = rates(&links)[..] else { panic!("expected two copies of GPU 2") };
        let whole = (2, BytesPerSec::gb(10));
        assert_eq!((down, up), (whole, whole), "each direction has the link's whole rate");
        assert!(links.set(from(0), host) && links.set(from(1), host));
        let rates_of = |links: &SharedLinks, its: fn(CopyPath) -> bool| {
            let rates = links.rates().filter(|((_, way), _)| its(*way));
            rates.map(|(_, rate)| rate).collect::<Vec<_>>()
        };
        let up = rates_of(&links, |way| way == CopyPath::Own(HostDirection::FromGpu));
        assert_eq!(up, [6, 4, 10].map(BytesPerSec::gb), "the rates to the host equal those from the host");
        let hops = RouteHops::of([GpuIndex(2), GpuIndex(0)]);
        let way = (GpuIndex(0), CopyPath::Forwarded(HostDirection::ToGpu, hops));
        assert!(links.set(way, host) && links.forwarding(GpuIndex(0)) == [way.1]);
        let forwarded = rates_of(&links, |way| matches!(way, CopyPath::Forwarded(..)));
        assert_eq!(
            forwarded,
            [BytesPerSec::gb(5)],
            "the forwarded copy and the neighbour's own copy get half of the neighbour's path each"
        );
        let to_2 = links.rates().find(|(stream, _)| *stream == to(2));
        assert_eq!(to_2, Some((to(2), BytesPerSec::gb(5))));
        // The last chunk crosses the NVLink after the arrival from the host.
        assert_eq!(links.fill(way.1, Bytes::mib(10)), BytesPerSec::gb(24).time_for(Bytes::mib(2)));
        assert_eq!(links.fill(way.1, Bytes(24_000)), Duration::from_micros(1));
        assert!(links.set(way, None) && links.forwarding(GpuIndex(0)).is_empty());
        // GPU 2's own copy to the host is under way at the same time.
        let back = CopyPath::Forwarded(HostDirection::FromGpu, RouteHops::of([GpuIndex(0), GpuIndex(2)]));
        assert!(links.set((GpuIndex(0), back), host));
        assert_eq!(rates_of(&links, |way| matches!(way, CopyPath::Forwarded(..))), [BytesPerSec::gb(5)]);
    }
}
