//! The compared systems, as options of one code path (D31), and the costs of operations.

use std::time::Duration;

use millrace_memory::elastic::{MigrationPolicy, PoolPolicy};
use millrace_transfers::paths::{HostLinks, Selection};
use millrace_transfers::rates::TransferSharing;
use millrace_types::BytesPerSec;

/// The memory that holds the data between two GPU functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Oriented {
    /// Data is in host memory. A function copies its output there itself, and is busy until then.
    Host,
    /// Data stays where it was made, in the store of the GPU.
    Gpu,
}

/// The pinning of host memory for copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinning {
    /// All copies pass through a ring that is pinned once (D17).
    Ring,
    /// Each copy pins its own memory. A thread for each GPU's daemon pins the part of its link (§8).
    ByLink,
    /// Each copy pins its own memory, in one call.
    Whole,
}

/// The placement of a workflow's functions on GPUs (D19).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placing {
    /// Functions are placed where their NVLinks are fastest.
    Mapa,
    /// Functions are placed at random, by the seed, regardless of NVLinks.
    Blind,
}

/// The parts of `FaaSTube` that can be switched on and off (§9.2.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FaasTubeParts {
    /// Whether the unified interface is on: a pipe to the daemon instead of a remote call (D10).
    pub interface: bool,
    /// Whether PCIe scheduling is on: by objectives and in batches, over the pinned ring (D12 to D17).
    pub pcie: bool,
    /// Whether NVLink scheduling is on: placement, and parallel paths over free links (D19 to D22).
    pub nvlink: bool,
    /// Whether the elastic store is on: a pool of memory, and migration by the queue (D23 to D28).
    pub store: bool,
}

impl FaasTubeParts {
    pub const NONE: Self = Self { interface: false, pcie: false, nvlink: false, store: false };
    pub const ALL: Self = Self { interface: true, pcie: true, nvlink: true, store: true };
}

/// A system, as a choice for each option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct System {
    pub name: &'static str,
    /// The memory that holds data between functions.
    pub oriented: Oriented,
    /// The PCIe links over which a GPU reaches the host.
    pub host_links: HostLinks,
    /// The pinning that a copy from or to the host pays for.
    pub pinning: Pinning,
    /// The division of PCIe links among copies.
    pub sharing: TransferSharing,
    /// The choice of NVLink paths.
    pub selection: Selection,
    /// The placement of functions.
    pub placing: Placing,
    /// The rule for the memory of a GPU that is reserved for data.
    pub pool: PoolPolicy,
    /// The order in which objects leave a full store.
    pub migration: MigrationPolicy,
    /// Whether calls of the interface use a pipe instead of a remote call.
    pub piped: bool,
}

impl System {
    /// Returns `FaaSTube` with the given parts on. A part that is off is as in `FaaSTube*`.
    #[must_use]
    pub const fn with(name: &'static str, on: FaasTubeParts) -> Self {
        Self {
            name,
            oriented: Oriented::Gpu,
            host_links: HostLinks::All,
            pinning: if on.pcie { Pinning::Ring } else { Pinning::ByLink },
            sharing: if on.pcie { TransferSharing::FaasTube } else { TransferSharing::Fair },
            selection: if on.nvlink { Selection::FaasTube } else { Selection::Direct },
            placing: if on.nvlink { Placing::Mapa } else { Placing::Blind },
            pool: if on.store { PoolPolicy::Elastic } else { PoolPolicy::Unpooled },
            migration: if on.store { MigrationPolicy::QueueAware } else { MigrationPolicy::Lru },
            piped: on.interface,
        }
    }

    /// `FaaSTube` with all its parts.
    pub const FAASTUBE: Self = Self::with("faastube", FaasTubeParts::ALL);
    /// `FaaSTube*`: data passes over all links, without the optimisations.
    pub const STAR: Self = Self::with("faastube*", FaasTubeParts::NONE);
    /// `DeepPlan+`: data passes through host memory, over all PCIe links.
    pub const DEEPPLAN: Self = Self { name: "deepplan+", oriented: Oriented::Host, ..Self::STAR };
    /// `INFless+`: data passes through shared host memory, over one PCIe link.
    pub const INFLESS: Self = Self { name: "infless+", host_links: HostLinks::Own, ..Self::DEEPPLAN };
    /// MAPA: functions are placed by their NVLinks, but a copy uses at most one NVLink.
    pub const MAPA: Self = Self { name: "mapa", selection: Selection::Direct, ..Self::FAASTUBE };
    /// Multi-path UCX: a pair of GPUs always uses the same paths. UCX is a library, and places no functions.
    pub const UCX: Self =
        Self { name: "ucx", selection: Selection::Ucx, placing: Placing::Blind, ..Self::FAASTUBE };
    /// `FaaSTube-PS` (§9.2.2): copies share PCIe links evenly.
    pub const PS_OFF: Self = Self { name: "faastube-ps", sharing: TransferSharing::Fair, ..Self::FAASTUBE };
}

/// The times and rates of operations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Costs {
    /// The time of pinning a byte, in nanoseconds: 70 ms for 100 MB (§3.2).
    pub pin_ns: f64,
    /// The time of a native allocation or release of GPU memory: "millisecond-level" (§7.1).
    pub native: Duration,
    /// The time of handing one block of memory to another process: `GMLake`'s 45 ms (§7.1), divided by the
    /// 150 blocks of a large object.
    pub ipc: Duration,
    /// The assumed time of a remote call of the interface.
    pub remote_call: Duration,
    /// The assumed time of a call of the interface through a pipe.
    pub piped_call: Duration,
    /// The assumed rate of a copy within a GPU: most of the bandwidth of a V100's memory.
    pub within_gpu: BytesPerSec,
    /// The rate of a copy over PCIe between two GPUs, as a share of a PCIe link: 7.9 of 12 GB/s (§3.2).
    pub peer_share: f64,
    /// The rate of a node's network, in each direction.
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
            // The 25 Gbit/s of p3.16xlarge.
            network: BytesPerSec(3_125_000_000),
        }
    }
}
