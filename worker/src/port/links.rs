//! The links of a modelled machine, shared by the copies that cross them at one moment: each link
//! divides its rate evenly (processor sharing), and a copy goes at the least of its shares. What one
//! copy leaves unused of its share, the others do not get.
//!
//! Grants keep copies apart on the links they share; where they do not quite, this is what it costs.

use std::collections::BTreeSet;

use millrace_types::topology::{LinkId, Topology};
use millrace_types::{BytesPerSec, GpuIndex};

/// Which GPUs' copies cross which links.
#[derive(Debug)]
pub(super) struct Links {
    rates: Vec<BytesPerSec>,
    crossing: Vec<u32>,
    paths: Vec<Vec<LinkId>>,
    copying: BTreeSet<GpuIndex>,
}

impl Links {
    pub(super) fn new(topology: &Topology) -> Self {
        Self {
            rates: topology.links.iter().map(|link| link.rate).collect(),
            crossing: vec![0; topology.links.len()],
            paths: topology.gpus.iter().map(|gpu| gpu.host_path.clone()).collect(),
            copying: BTreeSet::new(),
        }
    }

    /// Notes whether a GPU's copy is under way; returns whether that is news.
    pub(super) fn set(&mut self, gpu: GpuIndex, copying: bool) -> bool {
        let news = if copying { self.copying.insert(gpu) } else { self.copying.remove(&gpu) };
        if news {
            for link in &self.paths[gpu.0 as usize] {
                let crossing = &mut self.crossing[link.0 as usize];
                *crossing = if copying { *crossing + 1 } else { *crossing - 1 };
            }
        }
        news
    }

    /// The rate of each copy under way.
    pub(super) fn rates(&self) -> impl Iterator<Item = (GpuIndex, BytesPerSec)> {
        self.copying.iter().map(|&gpu| {
            let share = |link: &LinkId| {
                BytesPerSec(self.rates[link.0 as usize].0 / u64::from(self.crossing[link.0 as usize].max(1)))
            };
            let shares = self.paths[gpu.0 as usize].iter().map(share);
            (gpu, shares.min().unwrap_or(BytesPerSec(u64::MAX)))
        })
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::Bytes;
    use millrace_types::topology::{Gpu, Link, LinkKind};

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
            links: vec![link(10), link(4), link(10), link(12)],
        };
        let mut links = Links::new(&topology);
        let rates = |links: &Links| links.rates().map(|(gpu, rate)| (gpu.0, rate)).collect::<Vec<_>>();
        assert!(links.set(GpuIndex(0), true) && !links.set(GpuIndex(0), true));
        assert_eq!(rates(&links), [(0, BytesPerSec::gb(10))]);
        assert!(links.set(GpuIndex(1), true) && links.set(GpuIndex(2), true));
        let shared = [(0, BytesPerSec::gb(6)), (1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))];
        assert_eq!(rates(&links), shared, "the uplink in halves, the slow link whole, the other alone");
        assert!(links.set(GpuIndex(0), false));
        assert_eq!(rates(&links), [(1, BytesPerSec::gb(4)), (2, BytesPerSec::gb(10))]);
    }
}
