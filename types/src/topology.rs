//! GPUs and the links between them, as data. `millrace-device` has the presets; a policy sees only
//! these types.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::ids::GpuIndex;
use crate::units::{Bytes, BytesPerSec};

/// The GPUs and links of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// The preset's name, or "discovered".
    pub name: String,
    /// The GPUs, in index order.
    pub gpus: Vec<TopologyGpu>,
    /// The links, in [`LinkId`] order.
    pub links: Vec<TopologyLink>,
}

impl Topology {
    /// Returns the topology of the first `count` GPUs and of the links between them and to the host, or
    /// `None` if there are fewer GPUs.
    #[must_use]
    pub fn first_gpus(&self, count: NonZeroU32) -> Option<Self> {
        let mut gpus = self.gpus.get(..count.get() as usize)?.to_vec();
        let is_used = |(id, link): &(LinkId, &TopologyLink)| match link.kind {
            LinkKind::NvLink { a, b } => a.0.max(b.0) < count.get(),
            LinkKind::Pcie | LinkKind::PcieUplink => gpus.iter().any(|gpu| gpu.host_path.contains(id)),
        };
        let used: Vec<_> = (0..).map(LinkId).zip(&self.links).filter(is_used).collect();
        let links = used.iter().map(|(_, link)| (*link).clone()).collect();
        let renumbered: BTreeMap<LinkId, LinkId> =
            used.iter().map(|(id, _)| *id).zip((0..).map(LinkId)).collect();
        for gpu in &mut gpus {
            gpu.host_path = gpu.host_path.iter().filter_map(|id| renumbered.get(id).copied()).collect();
        }
        Some(Self { name: self.name.clone(), gpus, links })
    }

    /// Returns a GPU's NVLinks, each with the GPU at the other end.
    pub fn nvlinks_of(&self, gpu: GpuIndex) -> impl Iterator<Item = (LinkId, GpuIndex)> {
        (0..).map(LinkId).zip(&self.links).filter_map(move |(id, link)| match link.kind {
            LinkKind::NvLink { a, b } if a == gpu => Some((id, b)),
            LinkKind::NvLink { a, b } if b == gpu => Some((id, a)),
            _ => None,
        })
    }

    /// Returns the display name of a link: its kind and the GPUs that use the link, as in `pcie 0`,
    /// `uplink 0,1`, `nvlink 0-1`.
    #[must_use]
    pub fn link_name(&self, link: LinkId) -> String {
        let users = || {
            let crosses = self.gpus.iter().filter(|gpu| gpu.host_path.contains(&link));
            crosses.map(|gpu| gpu.index.0.to_string()).collect::<Vec<_>>().join(",")
        };
        match self.links.get(link.0 as usize).map(|link| link.kind) {
            Some(LinkKind::Pcie) => format!("pcie {}", users()),
            Some(LinkKind::PcieUplink) => format!("uplink {}", users()),
            Some(LinkKind::NvLink { a, b }) => format!("nvlink {}-{}", a.0, b.0),
            None => format!("link {}", link.0),
        }
    }
}

/// A GPU of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyGpu {
    /// The GPU's index, equal to its position in [`Topology::gpus`].
    pub index: GpuIndex,
    /// The product name. Profiles are stored per product name (L21).
    pub gpu_type: String,
    /// The size of the GPU's memory.
    pub memory: Bytes,
    /// The links that a copy from host memory crosses, in order: the GPU's own PCIe link, then a
    /// shared uplink, if any.
    pub host_path: Vec<LinkId>,
}

/// A link's position in [`Topology::links`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LinkId(pub u32);

/// A link that carries bytes in each direction independently.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TopologyLink {
    /// The kind of the link.
    pub kind: LinkKind,
    /// The rate in each direction.
    pub rate: BytesPerSec,
}

/// The kind of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkKind {
    /// A GPU's own PCIe link.
    Pcie,
    /// The uplink of a PCIe switch, shared by the GPUs under it.
    PcieUplink,
    /// An NVLink between two GPUs.
    NvLink {
        /// The GPU at one end.
        a: GpuIndex,
        /// The GPU at the other end.
        b: GpuIndex,
    },
}
