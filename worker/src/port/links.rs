//! The links of a modelled machine, shared by the copies that cross them at one moment: each link
//! divides its rate evenly among those of one direction (processor sharing), and a copy goes at the least
//! of its shares. What one copy leaves unused of its share, the others do not get.
//!
//! Grants keep copies apart on the links they share; where they do not quite, this is what it costs.

use std::collections::BTreeMap;

use millrace_policy::paths::Direction;
use millrace_types::topology::{LinkId, LinkKind, Topology};
use millrace_types::{BytesPerSec, GpuIndex};

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

/// A GPU copies one thing at a time in each direction.
pub(super) type Stream = (GpuIndex, Direction);

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

    /// What a copy crosses: the GPU's way from the host or back, or its link with the other GPU, towards it.
    fn path(&self, (gpu, direction): Stream, source: Source) -> Vec<Lane> {
        let towards = match direction {
            Direction::ToGpu => Towards::Gpus,
            Direction::FromGpu => Towards::Host,
        };
        let Some(from) = source else {
            let path = &self.topology.gpus[gpu.0 as usize].host_path;
            return path.iter().map(|&link| (link, towards)).collect();
        };
        let joins = |kind: LinkKind| match kind {
            LinkKind::NvLink { a, b } => (a, b) == (from, gpu) || (b, a) == (from, gpu),
            LinkKind::Pcie | LinkKind::PcieUplink => false,
        };
        let link = (0..).map(LinkId).zip(&self.topology.links).find(|(_, link)| joins(link.kind));
        link.map(|(link, _)| (link, Towards::Gpu(gpu))).into_iter().collect()
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

#[cfg(test)]
mod tests {
    use millrace_types::Bytes;
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
        let to = |gpu| (GpuIndex(gpu), Direction::ToGpu);
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
        assert!(links.set((GpuIndex(2), Direction::FromGpu), host));
        let [.., down, up] = rates(&links)[..] else { panic!("not two copies") };
        assert_eq!((down, up), ((2, BytesPerSec::gb(10)), (2, BytesPerSec::gb(10))), "each way has it all");
        assert!(links.set((GpuIndex(0), Direction::FromGpu), host));
        assert!(links.set((GpuIndex(1), Direction::FromGpu), host));
        let up = links.rates().filter(|((_, direction), _)| *direction == Direction::FromGpu);
        let up: Vec<_> = up.map(|(_, rate)| rate).collect();
        assert_eq!(up, [6, 4, 10].map(BytesPerSec::gb), "as from the host");
    }
}
