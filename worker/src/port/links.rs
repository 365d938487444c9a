//! The links of a modelled machine, shared by the copies that cross them at one moment: each link
//! divides its rate evenly among those of one direction (processor sharing), and a copy goes at the least of its shares. What one
//! copy leaves unused of its share, the others do not get.
//!
//! Grants keep copies apart on the links they share; where they do not quite, this is what it costs.

use std::collections::BTreeMap;

use millrace_types::topology::{LinkId, LinkKind, Topology};
use millrace_types::{BytesPerSec, GpuIndex};

/// Where a copy comes from: another GPU, or the host.
pub(super) type Source = Option<GpuIndex>;

/// A GPU's copy crosses the same link as another's only in the same direction.
type Lane = (LinkId, Option<GpuIndex>);

/// Which GPUs' copies cross which links.
#[derive(Debug)]
pub(super) struct Links {
    topology: Topology,
    crossing: BTreeMap<Lane, u32>,
    copying: BTreeMap<GpuIndex, (Source, Vec<Lane>)>,
}

impl Links {
    pub(super) fn new(topology: &Topology) -> Self {
        Self { topology: topology.clone(), crossing: BTreeMap::new(), copying: BTreeMap::new() }
    }

    /// Notes the source of a GPU's copy that is under way; returns whether that is news.
    pub(super) fn set(&mut self, gpu: GpuIndex, copying: Option<Source>) -> bool {
        if self.copying.get(&gpu).map(|(source, _)| *source) == copying {
            return false;
        }
        if let Some((_, path)) = self.copying.remove(&gpu) {
            for lane in path {
                if let Some(crossing) = self.crossing.get_mut(&lane) {
                    *crossing -= 1;
                }
            }
        }
        if let Some(source) = copying {
            let path = self.path(gpu, source);
            path.iter().for_each(|&lane| *self.crossing.entry(lane).or_default() += 1);
            self.copying.insert(gpu, (source, path));
        }
        true
    }

    /// What a copy crosses: the GPU's way from the host, or its link with the other GPU, towards it.
    fn path(&self, gpu: GpuIndex, source: Source) -> Vec<Lane> {
        let Some(from) = source else {
            let path = &self.topology.gpus[gpu.0 as usize].host_path;
            return path.iter().map(|&link| (link, None)).collect();
        };
        let joins = |kind: LinkKind| match kind {
            LinkKind::NvLink { a, b } => (a, b) == (from, gpu) || (b, a) == (from, gpu),
            LinkKind::Pcie | LinkKind::PcieUplink => false,
        };
        let link = (0..).map(LinkId).zip(&self.topology.links).find(|(_, link)| joins(link.kind));
        link.map(|(link, _)| (link, Some(gpu))).into_iter().collect()
    }

    /// The rate of each copy under way.
    pub(super) fn rates(&self) -> impl Iterator<Item = (GpuIndex, BytesPerSec)> {
        self.copying.iter().map(|(&gpu, (_, path))| {
            let share = |lane: &Lane| {
                let crossing = self.crossing.get(lane).copied().unwrap_or(1).max(1);
                BytesPerSec(self.topology.links[lane.0.0 as usize].rate.0 / u64::from(crossing))
            };
            (gpu, path.iter().map(share).min().unwrap_or(BytesPerSec(u64::MAX)))
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
        let rates = |links: &Links| links.rates().map(|(gpu, rate)| (gpu.0, rate)).collect::<Vec<_>>();
        let host = Some(None);
        assert!(links.set(GpuIndex(0), host) && !links.set(GpuIndex(0), host));
        assert_eq!(rates(&links), [(0, BytesPerSec::gb(10))]);
        assert!(links.set(GpuIndex(1), host) && links.set(GpuIndex(2), host));
        let shared = [(0, BytesPerSec::gb(6)), (1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))];
        assert_eq!(rates(&links), shared, "the uplink in halves, the slow link whole, the other alone");
        assert!(links.set(GpuIndex(0), None));
        assert_eq!(rates(&links), [(1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))]);
        assert!(links.set(GpuIndex(0), Some(Some(GpuIndex(2)))));
        let beside = [(0, BytesPerSec::gb(24)), (1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))];
        assert_eq!(rates(&links), beside, "a copy from another GPU crosses the link between them");
    }
}
