//! The links of a modelled machine, shared by the copies that cross them at one moment: each link
//! divides its rate evenly among those of one direction (processor sharing), and a copy goes at the least
//! of its shares. What one copy leaves unused of its share, the others do not get. What GPUs forward from
//! the host crosses all the links of its way at once, but for one chunk (D05).
//!
//! Grants keep copies apart on the links they share; where they do not quite, this is what it costs.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_policy::memory::BLOCK;
use millrace_policy::paths::{Direction, Hops};
use millrace_types::topology::{LinkId, LinkKind, Topology};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};

use super::model::Way;

/// Where a copy comes from that goes to a GPU: another GPU, or the host.
pub(super) type Source = Option<GpuIndex>;

/// A GPU's copy crosses the same link as another's only in the same direction.
type Lane = (LinkId, Towards);

/// Which way a link is crossed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Towards {
    Gpus,
    Host,
    /// Over an NVLink.
    Gpu(GpuIndex),
}

/// A GPU copies one thing at a time on each way.
pub(super) type Stream = (GpuIndex, Way);

/// Which GPUs' copies cross which links.
#[derive(Debug)]
pub(super) struct Links {
    topology: Topology,
    crossing: BTreeMap<Lane, u32>,
    copying: BTreeMap<Stream, (Source, Vec<Lane>)>,
}

impl Links {
    pub(super) fn new(topology: &Topology) -> Self {
        Self { topology: topology.clone(), crossing: BTreeMap::new(), copying: BTreeMap::new() }
    }

    /// Notes the source of a GPU's copy that is under way; returns whether that is news.
    pub(super) fn set(&mut self, stream: Stream, copying: Option<Source>) -> bool {
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

    /// The ways by which others forward to a GPU or from it now.
    pub(super) fn forwarding(&self, gpu: GpuIndex) -> Vec<Way> {
        let ways = self.copying.keys().filter(|(its, _)| *its == gpu).map(|&(_, way)| way);
        ways.filter(|way| matches!(way, Way::Forwarded(..))).collect()
    }

    /// How long so much is on a way by which others forward it, beyond what it takes at the rate of its
    /// slowest link: a chunk is sent on while the next one comes.
    pub(super) fn fill(&self, way: Way, size: Bytes) -> Duration {
        let Way::Forwarded(direction, hops) = way else { return Duration::ZERO };
        let rate = |link: LinkId| self.topology.links[link.0 as usize].rate;
        let host = self.host_path(neighbour(direction, &hops)).iter().map(|&link| rate(link)).min();
        let nvlinks = hops.links().filter_map(|pair| self.between(pair)).map(rate);
        let chunk = size.min(BLOCK);
        let stages = host.into_iter().chain(nvlinks).map(|rate| rate.time_for(chunk));
        let (all, longest) = stages.fold((Duration::ZERO, Duration::ZERO), |(all, longest), stage| {
            (all + stage, longest.max(stage))
        });
        all.saturating_sub(longest)
    }

    /// What a copy crosses: the GPU's way from the host or back, or its link with the other GPU, towards it;
    /// or the way of the GPU that forwards, and the links between the two.
    fn path(&self, (gpu, way): Stream, source: Source) -> Vec<Lane> {
        let host = |gpu: GpuIndex, direction: Direction| {
            let towards = match direction {
                Direction::ToGpu => Towards::Gpus,
                Direction::FromGpu => Towards::Host,
            };
            self.host_path(gpu).iter().map(move |&link| (link, towards)).collect::<Vec<_>>()
        };
        let nvlink =
            |(from, to): (GpuIndex, GpuIndex)| self.between((from, to)).map(|link| (link, Towards::Gpu(to)));
        match (way, source) {
            (Way::Forwarded(direction, hops), _) => {
                let mut path = host(neighbour(direction, &hops), direction);
                path.extend(hops.links().filter_map(nvlink));
                path
            }
            (Way::Own(_), Some(from)) => nvlink((from, gpu)).into_iter().collect(),
            (Way::Own(direction), None) => host(gpu, direction),
        }
    }

    fn host_path(&self, gpu: GpuIndex) -> &[LinkId] {
        &self.topology.gpus[gpu.0 as usize].host_path
    }

    /// The NVLink between two GPUs.
    fn between(&self, (from, to): (GpuIndex, GpuIndex)) -> Option<LinkId> {
        let joins = |kind: LinkKind| match kind {
            LinkKind::NvLink { a, b } => (a, b) == (from, to) || (b, a) == (from, to),
            LinkKind::Pcie | LinkKind::PcieUplink => false,
        };
        let link = (0..).map(LinkId).zip(&self.topology.links).find(|(_, link)| joins(link.kind));
        link.map(|(link, _)| link)
    }

    /// The rate of each copy under way.
    pub(super) fn rates(&self) -> impl Iterator<Item = (Stream, BytesPerSec)> {
        self.copying.iter().map(|(&stream, (_, path))| {
            let share = |lane: &Lane| {
                let crossing = self.crossing.get(lane).copied().unwrap_or(1).max(1);
                BytesPerSec(self.topology.links[lane.0.0 as usize].rate.0 / u64::from(crossing))
            };
            (stream, path.iter().map(share).min().unwrap_or(BytesPerSec(u64::MAX)))
        })
    }
}

/// The GPU whose links lead to the host or from there, where it forwards.
fn neighbour(direction: Direction, hops: &Hops) -> GpuIndex {
    match direction {
        Direction::ToGpu => hops.first(),
        Direction::FromGpu => hops.last(),
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::topology::{Gpu, Link};

    use super::*;

    #[test]
    fn copies_divide_the_links_they_share() {
        let gpu = |index: u32, path: &[u32]| Gpu {
            index: GpuIndex(index),
            gpu_type: "modelled".to_owned(),
            memory: Bytes::gib(1),
            host_path: path.iter().copied().map(LinkId).collect(),
        };
        let link = |gb| Link { kind: LinkKind::Pcie, rate: BytesPerSec::gb(gb) };
        let topology = Topology {
            name: "test".to_owned(),
            gpus: vec![gpu(0, &[0, 3]), gpu(1, &[1, 3]), gpu(2, &[2])],
            links: vec![
                link(10),
                link(4),
                link(10),
                link(12),
                Link { kind: LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(2) }, rate: BytesPerSec::gb(24) },
            ],
        };
        let mut links = Links::new(&topology);
        let rates = |links: &Links| links.rates().map(|((gpu, _), rate)| (gpu.0, rate)).collect::<Vec<_>>();
        let to = |gpu| (GpuIndex(gpu), Way::Own(Direction::ToGpu));
        let from = |gpu| (GpuIndex(gpu), Way::Own(Direction::FromGpu));
        let host = Some(None);
        assert!(links.set(to(0), host) && !links.set(to(0), host));
        assert_eq!(rates(&links), [(0, BytesPerSec::gb(10))]);
        assert!(links.set(to(1), host) && links.set(to(2), host));
        let shared = [(0, BytesPerSec::gb(6)), (1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))];
        assert_eq!(rates(&links), shared, "the uplink in halves, the slow link whole, the other alone");
        assert!(links.set(to(0), None));
        assert_eq!(rates(&links), [(1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))]);
        assert!(links.set(to(0), Some(Some(GpuIndex(2)))));
        let beside = [(0, BytesPerSec::gb(24)), (1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))];
        assert_eq!(rates(&links), beside, "a copy from another GPU crosses the link between them");
        assert!(links.set(from(2), host));
        let [.., down, up] = rates(&links)[..] else { panic!("not two copies") };
        assert_eq!((down, up), ((2, BytesPerSec::gb(10)), (2, BytesPerSec::gb(10))), "each way has it all");
        assert!(links.set(from(0), host) && links.set(from(1), host));
        let rates_of = |links: &Links, its: fn(Way) -> bool| {
            let rates = links.rates().filter(|((_, way), _)| its(*way));
            rates.map(|(_, rate)| rate).collect::<Vec<_>>()
        };
        let up = rates_of(&links, |way| way == Way::Own(Direction::FromGpu));
        assert_eq!(up, [6, 4, 10].map(BytesPerSec::gb), "as from the host");
        let hops = Hops::of([GpuIndex(2), GpuIndex(0)]);
        let way = (GpuIndex(0), Way::Forwarded(Direction::ToGpu, hops));
        assert!(links.set(way, host) && links.forwarding(GpuIndex(0)) == [way.1]);
        let forwarded = rates_of(&links, |way| matches!(way, Way::Forwarded(..)));
        assert_eq!(
            forwarded,
            [BytesPerSec::gb(5)],
            "half of the neighbour's way, whose own copy has the other"
        );
        let to_2 = links.rates().find(|(stream, _)| *stream == to(2));
        assert_eq!(to_2, Some((to(2), BytesPerSec::gb(5))));
        // A chunk of the host's memory crosses the NVLink after the last of it has come.
        assert_eq!(links.fill(way.1, Bytes::mib(10)), BytesPerSec::gb(24).time_for(Bytes::mib(2)));
        assert_eq!(links.fill(way.1, Bytes(24_000)), Duration::from_micros(1));
        assert!(links.set(way, None) && links.forwarding(GpuIndex(0)).is_empty());
        // GPU 2's own copy to the host is under way beside it.
        let back = Way::Forwarded(Direction::FromGpu, Hops::of([GpuIndex(0), GpuIndex(2)]));
        assert!(links.set((GpuIndex(0), back), host));
        assert_eq!(rates_of(&links, |way| matches!(way, Way::Forwarded(..))), [BytesPerSec::gb(5)]);
    }
}
