//! The systems that are compared, as choices on one code path (D31), and what they pay for.

use std::time::Duration;

use millrace_policy::elastic::{MigrationPolicy, PoolPolicy};
use millrace_policy::paths::{HostLinks, Selection};
use millrace_policy::rates::Sharing;
use millrace_types::BytesPerSec;

/// Where the data between two GPU functions is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Oriented {
    /// In host memory: a function copies its output there itself, and is busy with it.
    Host,
    /// Where it was made, in the GPU's store.
    Gpu,
}

/// What host memory copies go through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinning {
    /// A ring that is pinned once (D17).
    Ring,
    /// Each copy pins its memory anew, each link's part by a thread of its own: there is a daemon
    /// thread for each GPU (§8).
    ByLink,
    /// Each copy pins its memory anew, all of it in one call.
    Whole,
}

/// Where a workflow's functions are put (D19).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placing {
    /// Where their NVLinks are fastest.
    Mapa,
    /// On GPUs at random, by the seed: NVLinks are not looked at.
    Blind,
}

/// Which of `FaaSTube`'s parts are on (§9.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Switches {
    /// The unified interface: a pipe to the daemon instead of a remote call (D10).
    pub interface: bool,
    /// PCIe scheduling: by objectives and in batches, over the pinned ring (D12 to D17).
    pub pcie: bool,
    /// NVLink scheduling: placement, and paths in parallel that nobody else uses (D19 to D22).
    pub nvlink: bool,
    /// The elastic store: a pool that is kept, and migration by the queue (D23 to D28).
    pub store: bool,
}

impl Switches {
    /// None of them.
    pub const NONE: Self = Self { interface: false, pcie: false, nvlink: false, store: false };
    /// All of them.
    pub const ALL: Self = Self { interface: true, pcie: true, nvlink: true, store: true };
}

/// A system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct System {
    /// What it is called.
    pub name: &'static str,
    /// Where data is.
    pub oriented: Oriented,
    /// How the host is reached.
    pub host_links: HostLinks,
    /// What copies from and to the host pay first.
    pub pinning: Pinning,
    /// How PCIe links are shared.
    pub sharing: Sharing,
    /// How NVLink paths are chosen.
    pub selection: Selection,
    /// Where functions run.
    pub placing: Placing,
    /// What of a GPU's memory is kept for data.
    pub pool: PoolPolicy,
    /// What leaves a full store.
    pub migration: MigrationPolicy,
    /// Whether calls of the interface go through a pipe.
    pub piped: bool,
}

impl System {
    /// `FaaSTube` with some of its parts; what is off is as in `FaaSTube*`.
    #[must_use]
    pub const fn with(name: &'static str, on: Switches) -> Self {
        Self {
            name,
            oriented: Oriented::Gpu,
            host_links: HostLinks::All,
            pinning: if on.pcie { Pinning::Ring } else { Pinning::ByLink },
            sharing: if on.pcie { Sharing::FaasTube } else { Sharing::Fair },
            selection: if on.nvlink { Selection::FaasTube } else { Selection::Direct },
            placing: if on.nvlink { Placing::Mapa } else { Placing::Blind },
            pool: if on.store { PoolPolicy::Elastic } else { PoolPolicy::Unpooled },
            migration: if on.store { MigrationPolicy::QueueAware } else { MigrationPolicy::Lru },
            piped: on.interface,
        }
    }

    /// All of `FaaSTube`.
    pub const FAASTUBE: Self = Self::with("faastube", Switches::ALL);
    /// `FaaSTube*`: all links, none of the optimisations.
    pub const STAR: Self = Self::with("faastube*", Switches::NONE);
    /// `DeepPlan+`: through host memory, over all PCIe links.
    pub const DEEPPLAN: Self = Self { name: "deepplan+", oriented: Oriented::Host, ..Self::STAR };
    /// `INFless+`: through host memory that functions share, over one PCIe link.
    pub const INFLESS: Self = Self { name: "infless+", host_links: HostLinks::Own, ..Self::DEEPPLAN };
    /// MAPA: well placed, but one NVLink at most.
    pub const MAPA: Self = Self { name: "mapa", selection: Selection::Direct, ..Self::FAASTUBE };
    /// Multi-path UCX: the same paths always. It is a library, and places nothing.
    pub const UCX: Self =
        Self { name: "ucx", selection: Selection::Ucx, placing: Placing::Blind, ..Self::FAASTUBE };
    /// `FaaSTube-PS` (§9.2.2): PCIe shares its links.
    pub const PS_OFF: Self = Self { name: "faastube-ps", sharing: Sharing::Fair, ..Self::FAASTUBE };
}

/// What things cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// Pinning a byte, in nanoseconds: 70 ms for 100 MB (§3.2).
    pub pin_ns: f64,
    /// A native allocation or release of GPU memory: "millisecond-level" (§7.1).
    pub native: Duration,
    /// Handing one block of memory to another process: `GMLake`'s 45 ms (§7.1) over the 150 blocks of
    /// a large object.
    pub ipc: Duration,
    /// A call of the interface as a remote one. Assumed.
    pub remote_call: Duration,
    /// The same through a pipe. Assumed.
    pub piped_call: Duration,
    /// A copy within a GPU. Assumed: most of what a V100's memory does.
    pub within_gpu: BytesPerSec,
    /// PCIe between two GPUs, as a share of a PCIe link: 7.9 of 12 GB/s (§3.2).
    pub peer_share: f64,
    /// A node's network, each way.
    pub network: BytesPerSec,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            pin_ns: 0.7,
            native: Duration::from_millis(1),
            ipc: Duration::from_micros(300),
            remote_call: Duration::from_micros(300),
            piped_call: Duration::from_micros(20),
            within_gpu: BytesPerSec::gb(700),
            peer_share: 7.9 / 12.0,
            // 25 Gbit/s, as p3.16xlarge.
            network: BytesPerSec(3_125_000_000),
        }
    }
}
