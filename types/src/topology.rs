//! GPUs and the links between them, as data. The presets are in `millrace-device`; a policy sees
//! only this.

use serde::{Deserialize, Serialize};

use crate::ids::GpuIndex;
use crate::units::{Bytes, BytesPerSec};

/// One machine's GPUs and links.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// The preset's name, or "discovered".
    pub name: String,
    /// The GPUs, in index order.
    pub gpus: Vec<Gpu>,
    /// The links, in [`LinkId`] order.
    pub links: Vec<Link>,
}

impl Topology {
    /// A GPU's NVLinks, and the GPU at the other end of each.
    pub fn nvlinks_of(&self, gpu: GpuIndex) -> impl Iterator<Item = (LinkId, GpuIndex)> {
        (0..).map(LinkId).zip(&self.links).filter_map(move |(id, link)| match link.kind {
            LinkKind::NvLink { a, b } if a == gpu => Some((id, b)),
            LinkKind::NvLink { a, b } if b == gpu => Some((id, a)),
            _ => None,
        })
    }

    /// What people call a link: its kind and whose it is, as in `pcie 0`, `uplink 0,1`, `nvlink 0-1`.
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

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// Its position, equal to its place in [`Topology::gpus`].
    pub index: GpuIndex,
    /// The product name; profiles are kept per type (L21).
    pub gpu_type: String,
    /// Its memory.
    pub memory: Bytes,
    /// The links a copy from host memory crosses, in order: its PCIe link, then an uplink it
    /// shares, if any.
    pub host_path: Vec<LinkId>,
}

/// A link's place in [`Topology::links`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LinkId(pub u32);

/// Something bytes cross, in each direction independently.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Which kind it is.
    pub kind: LinkKind,
    /// Its rate in each direction.
    pub rate: BytesPerSec,
}

/// The kinds of link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkKind {
    /// A GPU's own PCIe link.
    Pcie,
    /// The uplink of a PCIe switch, shared by the GPUs under it.
    PcieUplink,
    /// An NVLink pair.
    NvLink {
        /// One end.
        a: GpuIndex,
        /// The other.
        b: GpuIndex,
    },
}
