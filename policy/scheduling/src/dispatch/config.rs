//! Configuration of a dispatcher: its GPUs, the links between them, and its policy.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use millrace_types::topology::{LinkKind, Topology};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};

use millrace_core::SEATS_MAX;
use millrace_core::names::{self, UnknownName};
use millrace_memory::BlockSize;
use millrace_memory::eviction::Eviction;
use millrace_transfers::paths::{self, PairRate};

/// A GPU, as far as dispatch needs to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuConfig {
    pub memory: Bytes,
    /// Rate at which models are copied from the host.
    pub host_rate: BytesPerSec,
    /// Type of the GPU. Run times learned on one GPU apply to all GPUs of its kind (L21).
    pub kind: u32,
    /// Unit of the GPU's memory.
    pub block: BlockSize,
    /// Number of seats for requests of all functions, open or closed: requests that run at a time. At
    /// most [`SEATS_MAX`](millrace_core::SEATS_MAX).
    pub seats: NonZeroU32,
    /// Number of seats for slices, each with requests of a single function. At most
    /// [`SEATS_MAX`](millrace_core::SEATS_MAX) with `seats`.
    pub slice_seats: u32,
}

impl GpuConfig {
    /// Creates a GPU of kind 0 with one seat and with blocks of the default size.
    #[must_use]
    pub const fn new(memory: Bytes, host_rate: BytesPerSec) -> Self {
        let block = BlockSize::DEFAULT;
        Self { memory, host_rate, kind: 0, block, seats: NonZeroU32::MIN, slice_seats: 0 }
    }

    /// Returns the number of seats that dispatch uses.
    #[must_use]
    pub(crate) fn seat_count(&self) -> u32 {
        self.seats.get().saturating_add(self.slice_seats).min(SEATS_MAX as u32)
    }

    /// Returns the number of seats for requests of all functions.
    #[must_use]
    pub(crate) fn free_seat_count(&self) -> u32 {
        self.seats.get().min(SEATS_MAX as u32)
    }

    /// Returns the number of open seats if `open_seats` seats of each GPU are open.
    #[must_use]
    pub(crate) fn open_seat_count(&self, open_seats: NonZeroU32) -> u32 {
        self.free_seat_count().min(open_seats.get())
    }

    /// Returns the memory that the GPU gives out: its whole blocks.
    #[must_use]
    pub(super) fn usable(&self) -> Bytes {
        self.block.round_down(self.memory)
    }
}

/// A direct link between two GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLink {
    /// GPU at one end.
    pub a: GpuIndex,
    /// GPU at the other end.
    pub b: GpuIndex,
    /// Rate in each direction.
    pub rate: BytesPerSec,
}

/// A node, as far as dispatch needs to know.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// GPUs in index order.
    pub gpus: Vec<GpuConfig>,
    /// Groups of GPUs that share the bandwidth of a link to the host: a group per PCIe switch.
    pub switches: Vec<Vec<GpuIndex>>,
    /// Links over which a model may be copied from one GPU to another.
    pub peers: Vec<PeerLink>,
    /// Rates at which inputs travel between two GPUs. Between all other pairs, inputs travel over
    /// the host.
    pub ways: Vec<PairRate>,
    /// Maximum number of waiting requests. Requests that return from lost GPUs may exceed this
    /// bound by [`SLOTS_MAX`](millrace_core::SLOTS_MAX) for each seat.
    pub queue_max: u32,
    /// Number of open seats of each GPU at the start: only the first so many seats take requests. All
    /// seats of a GPU with fewer are open. [`Event::SeatsOpened`](super::Event::SeatsOpened) changes
    /// the number.
    pub open_seats: NonZeroU32,
    pub policy: PolicyConfig,
    /// Eviction rule of the GPUs. Some rules depend on the models that the other GPUs hold.
    pub eviction: Eviction,
    /// Seed of a policy that chooses at random.
    pub seed: u64,
}

impl Config {
    /// Creates a node of GPUs that share no link, with the policies `fifo` and `lru`. All seats are
    /// open.
    #[must_use]
    pub fn new(gpus: Vec<GpuConfig>, queue_max: u32) -> Self {
        let policy = PolicyConfig::Fifo;
        let eviction = Eviction::Lru;
        Self {
            gpus,
            switches: Vec::new(),
            peers: Vec::new(),
            ways: Vec::new(),
            queue_max,
            open_seats: NonZeroU32::MAX,
            policy,
            eviction,
            seed: 0,
        }
    }

    /// Creates a node from a machine's topology, with the links to the host that its GPUs share.
    /// Models and inputs come from the host alone: add copies between GPUs with
    /// [`Self::with_peers`] and [`Self::with_ways`].
    #[must_use]
    pub fn of(topology: &Topology, queue_max: u32) -> Self {
        let rate = |gpu: &millrace_types::topology::TopologyGpu| {
            let rates = gpu.host_path.iter().map(|link| topology.links[link.0 as usize].rate);
            rates.min().unwrap_or(BytesPerSec(0))
        };
        let gpu = |gpu: &millrace_types::topology::TopologyGpu| GpuConfig {
            memory: gpu.memory,
            host_rate: rate(gpu),
            kind: kind_of(topology, &gpu.gpu_type).unwrap_or(0),
            block: BlockSize::DEFAULT,
            seats: NonZeroU32::MIN,
            slice_seats: 0,
        };
        let gpus = topology.gpus.iter().map(gpu).collect();
        let under = |link: u32| {
            let crosses =
                |gpu: &&millrace_types::topology::TopologyGpu| gpu.host_path.iter().any(|it| it.0 == link);
            topology.gpus.iter().filter(crosses).map(|gpu| gpu.index).collect::<Vec<_>>()
        };
        let switches = (0..topology.links.len() as u32).map(under).filter(|gpus| gpus.len() > 1).collect();
        Self { switches, ..Self::new(gpus, queue_max) }
    }

    /// Returns the same node, with models copied between GPUs over the topology's direct links.
    #[must_use]
    pub fn with_peers(mut self, topology: &Topology) -> Self {
        let peers = topology.links.iter().filter_map(|link| match link.kind {
            LinkKind::NvLink { a, b } => Some(PeerLink { a, b, rate: link.rate }),
            LinkKind::Pcie | LinkKind::PcieUplink => None,
        });
        self.peers = peers.collect();
        self
    }

    /// Returns the same node, with inputs that travel between GPUs over as many routes, each over
    /// as many links, as the fabric gives objects ([`millrace_transfers::fabric::object_route_planner`]). Inputs travel
    /// over the host if the topology exceeds the limits of route planning, as in the fabric.
    #[must_use]
    pub fn with_ways(self, topology: &Topology) -> Self {
        Self { ways: paths::pair_rates(topology, paths::Config::default()).unwrap_or_default(), ..self }
    }

    /// Returns the same node, with GPUs that all have blocks of this size.
    #[must_use]
    pub fn with_block(mut self, block: BlockSize) -> Self {
        self.gpus.iter_mut().for_each(|gpu| gpu.block = block);
        self
    }

    /// Returns the same node with this number of seats on each GPU.
    #[must_use]
    pub fn with_seats(mut self, seats: NonZeroU32) -> Self {
        self.gpus.iter_mut().for_each(|gpu| gpu.seats = seats);
        self
    }

    /// Returns the same node with this number of seats for slices on each GPU.
    #[must_use]
    pub fn with_slice_seats(mut self, slice_seats: u32) -> Self {
        self.gpus.iter_mut().for_each(|gpu| gpu.slice_seats = slice_seats);
        self
    }

    /// Returns the same node with another number of open seats of each GPU.
    #[must_use]
    pub fn with_open_seats(self, open_seats: NonZeroU32) -> Self {
        Self { open_seats, ..self }
    }

    /// Returns the same node with another eviction rule.
    #[must_use]
    pub fn with_eviction(self, eviction: Eviction) -> Self {
        Self { eviction, ..self }
    }

    /// Returns the same node with another dispatch policy.
    #[must_use]
    pub fn with_policy(self, policy: PolicyConfig, seed: u64) -> Self {
        Self { policy, seed, ..self }
    }
}

/// Returns the number by which a dispatcher knows a type of GPU. Types are numbered in the order of
/// their names.
#[must_use]
pub fn kind_of(topology: &Topology, gpu_type: &str) -> Option<u32> {
    gpu_types(topology).into_iter().zip(0..).find(|(name, _)| *name == gpu_type).map(|(_, kind)| kind)
}

/// Returns the types of GPU in a topology, by kind.
#[must_use]
pub fn gpu_types(topology: &Topology) -> Vec<&str> {
    let types: BTreeSet<&str> = topology.gpus.iter().map(|gpu| gpu.gpu_type.as_str()).collect();
    types.into_iter().collect()
}

/// Default number of times that a waiting request may be overtaken (L14).
pub const OVERTAKES_MAX: u32 = 25;

/// Dispatch policy: the order of requests and the choice of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PolicyConfig {
    /// The oldest request first, also assigned to busy GPUs. Our own policy.
    Fifo,
    /// The oldest request first, to the GPU that has been idle longest, wherever the model is
    /// (L18).
    Lb,
    /// Locality and load balance (L03, L09 to L14), with bounded overtaking. The name is `lalb` if
    /// `overtakes_max` is 0, else `lalb-o3`.
    Lalb {
        /// Number of times that a request may be overtaken.
        overtakes_max: u32,
    },
    /// By required request counts, onto the GPU with least interference or onto a random GPU (T17
    /// to T22).
    Torpor(TorporConfig),
    /// By estimated finish, with requests first that can still meet their deadline. Our own policy,
    /// and the default.
    Unified(UnifiedConfig),
    /// Each function bound to a GPU before its requests run (T28).
    Bound(BoundConfig),
}

/// Baseline that binds functions to GPUs. `runtime` and `cold_start` are assumptions about the
/// device, because dispatch can observe neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BoundConfig {
    pub binding: BindingLifetime,
    /// GPU memory that each function occupies besides its model, for a runtime of its own.
    pub runtime: Bytes,
    /// Time from the binding of a function until its first request may run.
    pub cold_start: Duration,
}

/// Lifetime of a function's binding to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BindingLifetime {
    /// The binding lasts until the function is removed.
    ForGood,
    /// The binding ends after this time without an assigned request.
    KeepAlive(Duration),
}

/// Assumed memory of a function's own runtime. Torpor's node runs 72 functions natively in 128 GB
/// (§7.3), with models that average 270 MB.
pub const RUNTIME_MEMORY: Bytes = Bytes(1_500_000_000);
/// Assumed duration of a cold start: the shortest in table 1 of the Torpor paper.
pub const COLD_START: Duration = Duration::from_secs(8);
/// Time that a function without requests stays bound. The paper gives no value; its functions get a
/// request every 2 to 12 s.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);

impl Default for PolicyConfig {
    fn default() -> Self {
        Self::Unified(UNIFIED)
    }
}

impl PolicyConfig {
    /// Returns whether decisions depend on objectives, on scores and on the arrival of models.
    #[must_use]
    pub const fn uses_scores(self) -> bool {
        matches!(self, Self::Torpor(_) | Self::Unified(_) | Self::Bound(_))
    }

    /// Returns whether a request may have to wait for one GPU while another is idle, or may be
    /// refused because other functions hold the memory.
    #[must_use]
    pub const fn binds_early(self) -> bool {
        matches!(self, Self::Bound(_))
    }
}

/// Default number of times that `unified` lets a waiting request be overtaken before the request
/// gets a share of the turns. Our own value: tens of seconds of a busy node. The LALB paper's 25
/// suits queues of a few dozen requests, in which this limit is never reached.
pub const UNIFIED_OVERTAKES_MAX: u32 = 5000;

/// Default interval of turns that go by age while requests at their overtaking limit wait: one turn
/// in so many. Our own value: in a lasting overload the other turns are for requests that can still
/// meet their deadline.
pub const AGED_EVERY: u32 = 10;

/// Default number of times that `unified` lets a request without a deadline be overtaken. Such a
/// request is never given up. A larger value gained nothing on average.
pub const FREE_OVERTAKES_MAX: u32 = 1000;

/// Settings of `unified`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UnifiedConfig {
    /// Number of times that a waiting request may be overtaken.
    pub overtakes_max: u32,
    /// Interval of turns that go by age while the oldest request has a deadline and is at its
    /// limit: one departure in `aged_every` is the oldest request. At 1, every departure is.
    pub aged_every: u32,
    /// Number of times that a request without a deadline may be overtaken. While an older request
    /// has a deadline, that request's limit applies. At most [`Self::overtakes_max`].
    pub free_overtakes_max: u32,
    /// Requests that count for a function's required request count.
    pub counts: ScoreWindow,
}

pub(super) const UNIFIED: UnifiedConfig = UnifiedConfig {
    overtakes_max: UNIFIED_OVERTAKES_MAX,
    aged_every: AGED_EVERY,
    free_overtakes_max: FREE_OVERTAKES_MAX,
    counts: ScoreWindow::Cumulative,
};

/// Settings of Torpor's policy. The paper also evaluates the policy without each of these parts
/// (T28).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TorporConfig {
    pub order: TorporOrder,
    pub choice: TorporGpuChoice,
    /// Requests that count for a function's required request count.
    pub counts: ScoreWindow,
    /// Rule that adjusts the share of prioritised functions.
    pub alpha: AlphaRule,
}

impl Default for TorporConfig {
    fn default() -> Self {
        TORPOR
    }
}

/// Order in which requests are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TorporOrder {
    /// By the group and the required request count of the function (T21), then by age.
    Required,
    /// By age (Torpor-FIFO).
    Arrival,
}

/// Choice of the idle GPU for a request if no idle GPU holds its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TorporGpuChoice {
    /// The GPU next to a busy holder, else the GPU where the load disturbs others least (T22).
    Interference,
    /// Any idle GPU (Torpor-Random).
    Random,
}

/// Requests that count for a function's required request count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScoreWindow {
    /// All requests since the function started.
    Cumulative,
    /// The most recent requests, at most [`WINDOW_MAX`].
    Last(u32),
}

/// Maximum number of a function's requests for which the outcome is stored individually.
pub const WINDOW_MAX: u32 = millrace_types::policy::SLO_WINDOW_MAX;

/// Rule by which alpha follows the share of functions that meet their objective (T20).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AlphaRule {
    /// Appendix A.3 of the paper: absolute differences, and groups that are always up to date.
    Paper,
    /// The released prototype: differences relative to the last adjusted ratio, a slow increase
    /// while steady, groups renewed every 2 s, and counts weighted by mean run time.
    Artifact,
}

/// All policies by name.
pub const POLICIES: [(&str, PolicyConfig); 11] = [
    ("fifo", PolicyConfig::Fifo),
    ("lb", PolicyConfig::Lb),
    ("lalb", PolicyConfig::Lalb { overtakes_max: 0 }),
    ("lalb-o3", PolicyConfig::Lalb { overtakes_max: OVERTAKES_MAX }),
    ("torpor", PolicyConfig::Torpor(TORPOR)),
    ("random", PolicyConfig::Torpor(TorporConfig { choice: TorporGpuChoice::Random, ..TORPOR })),
    ("unified", PolicyConfig::Unified(UNIFIED)),
    ("native", PolicyConfig::Bound(BoundConfig { runtime: RUNTIME_MEMORY, ..NONSWAP })),
    (
        "infless-ka",
        PolicyConfig::Bound(BoundConfig {
            binding: BindingLifetime::KeepAlive(KEEP_ALIVE),
            runtime: RUNTIME_MEMORY,
            cold_start: COLD_START,
        }),
    ),
    ("nonswap", PolicyConfig::Bound(NONSWAP)),
    (
        "simpleswap",
        PolicyConfig::Torpor(TorporConfig {
            order: TorporOrder::Arrival,
            choice: TorporGpuChoice::Random,
            ..TORPOR
        }),
    ),
];

/// A permanently bound function counts as started before its first request, hence without a cold
/// start.
const NONSWAP: BoundConfig =
    BoundConfig { binding: BindingLifetime::ForGood, runtime: Bytes::ZERO, cold_start: Duration::ZERO };

pub(super) const TORPOR: TorporConfig = TorporConfig {
    order: TorporOrder::Required,
    choice: TorporGpuChoice::Interference,
    counts: ScoreWindow::Cumulative,
    alpha: AlphaRule::Paper,
};

impl FromStr for PolicyConfig {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("dispatch policy", &POLICIES, text)
    }
}

impl fmt::Display for PolicyConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fifo => "fifo",
            Self::Lb => "lb",
            Self::Lalb { overtakes_max: 0 } => "lalb",
            Self::Lalb { .. } => "lalb-o3",
            Self::Torpor(TorporConfig {
                order: TorporOrder::Arrival,
                choice: TorporGpuChoice::Random,
                ..
            }) => "simpleswap",
            Self::Torpor(TorporConfig { choice: TorporGpuChoice::Random, .. }) => "random",
            Self::Torpor(_) => "torpor",
            Self::Unified(_) => "unified",
            Self::Bound(BoundConfig { binding: BindingLifetime::KeepAlive(_), .. }) => "infless-ka",
            Self::Bound(BoundConfig { runtime: Bytes::ZERO, .. }) => "nonswap",
            Self::Bound(_) => "native",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_types::topology::{LinkId, TopologyGpu, TopologyLink};

    #[test]
    fn policies_parse_from_the_names_they_display_as() {
        for (name, policy) in POLICIES {
            assert_eq!((name.parse(), policy.to_string()), (Ok(policy), name.to_owned()));
        }
        assert_eq!(PolicyConfig::default().to_string(), "unified");
        let refused = "lifo".parse::<PolicyConfig>().unwrap_err().to_string();
        assert_eq!(
            refused,
            "dispatch policy \"lifo\" is not known: use one of fifo, lb, lalb, lalb-o3, torpor, random, \
             unified, native, infless-ka, nonswap, simpleswap"
        );
        assert_eq!(TORPOR, TorporConfig::default());
    }

    #[test]
    fn config_takes_shared_switches_and_peer_links_from_the_topology() {
        let gpu = |index: u32, gpu_type: &str| TopologyGpu {
            index: GpuIndex(index),
            gpu_type: gpu_type.to_owned(),
            memory: Bytes::gib(1),
            host_path: vec![LinkId(index), LinkId(3 + index / 2)],
        };
        let link = |kind, gb| TopologyLink { kind, rate: BytesPerSec::gb(gb) };
        let pcie = link(LinkKind::Pcie, 12);
        let uplink = link(LinkKind::PcieUplink, 10);
        let a = GpuIndex(0);
        let b = GpuIndex(2);
        let topology = Topology {
            name: "test".to_owned(),
            gpus: vec![gpu(0, "b"), gpu(1, "b"), gpu(2, "a")],
            links: vec![
                pcie.clone(),
                pcie.clone(),
                pcie,
                uplink.clone(),
                uplink,
                link(LinkKind::NvLink { a, b }, 48),
            ],
        };
        let config = Config::of(&topology, 7);
        assert_eq!(config.switches, [[GpuIndex(0), GpuIndex(1)]]);
        assert_eq!((config.peers.len(), config.ways.len()), (0, 0));
        let kinds: Vec<_> = config.gpus.iter().map(|gpu| (gpu.host_rate, gpu.kind)).collect();
        assert_eq!(kinds, [1, 1, 0].map(|kind| (BytesPerSec::gb(10), kind)));
        let rate = BytesPerSec::gb(48);
        let joined = config.with_peers(&topology).with_ways(&topology);
        assert_eq!(joined.peers, [PeerLink { a, b, rate }]);
        assert_eq!(joined.ways, [PairRate { from: a, to: b, rate }, PairRate { from: b, to: a, rate }]);
    }
}
