//! What a dispatcher is: its GPUs, the links between them, and how it decides.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use millrace_types::topology::{LinkKind, Topology};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};

use crate::gpu::Eviction;
use crate::names::{self, UnknownName};
use crate::paths::{self, Way};

/// What a GPU is, for dispatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuConfig {
    /// Its memory.
    pub memory: Bytes,
    /// How fast models come from the host.
    pub host_rate: BytesPerSec,
    /// Which type it is: what is learned of a model's runs on one holds for all of its kind (L21).
    pub kind: u32,
}

impl GpuConfig {
    /// A GPU of kind 0.
    #[must_use]
    pub const fn new(memory: Bytes, host_rate: BytesPerSec) -> Self {
        Self { memory, host_rate, kind: 0 }
    }
}

/// A direct link between two GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLink {
    /// One end.
    pub a: GpuIndex,
    /// The other.
    pub b: GpuIndex,
    /// Its rate in each direction.
    pub rate: BytesPerSec,
}

/// What a node is, for dispatch.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Its GPUs, in index order.
    pub gpus: Vec<GpuConfig>,
    /// GPUs whose copies from the host slow each other down: each PCIe switch's.
    pub switches: Vec<Vec<GpuIndex>>,
    /// The links that models may be copied over from one GPU to another.
    pub peers: Vec<PeerLink>,
    /// How fast requests' data may go from one GPU to another; between the others it goes over the host.
    pub ways: Vec<Way>,
    /// Requests that may wait. Those that come back from a lost GPU may exceed it by
    /// [`SLOTS_MAX`](crate::gpu::SLOTS_MAX) for each.
    pub queue_max: u32,
    /// How it decides.
    pub policy: PolicyConfig,
    /// How its GPUs choose what makes room: some have to be told what others hold.
    pub eviction: Eviction,
    /// What a policy that draws lots begins with.
    pub seed: u64,
}

impl Config {
    /// GPUs that share no link, with `fifo` and `lru`.
    #[must_use]
    pub fn new(gpus: Vec<GpuConfig>, queue_max: u32) -> Self {
        let (switches, peers, ways) = (Vec::new(), Vec::new(), Vec::new());
        let policy = PolicyConfig::Fifo;
        let eviction = Eviction::Lru;
        Self { gpus, switches, peers, ways, queue_max, policy, eviction, seed: 0 }
    }

    /// A machine's GPUs, and which of them share a link to the host. Models come from
    /// the host alone, and so does data: for copies between GPUs add [`Self::with_peers`] and
    /// [`Self::with_ways`].
    #[must_use]
    pub fn of(topology: &Topology, queue_max: u32) -> Self {
        let rate = |gpu: &millrace_types::topology::Gpu| {
            let rates = gpu.host_path.iter().map(|link| topology.links[link.0 as usize].rate);
            rates.min().unwrap_or(BytesPerSec(0))
        };
        let gpu = |gpu: &millrace_types::topology::Gpu| GpuConfig {
            memory: gpu.memory,
            host_rate: rate(gpu),
            kind: kind_of(topology, &gpu.gpu_type).unwrap_or(0),
        };
        let gpus = topology.gpus.iter().map(gpu).collect();
        let under = |link: u32| {
            let crosses = |gpu: &&millrace_types::topology::Gpu| gpu.host_path.iter().any(|it| it.0 == link);
            topology.gpus.iter().filter(crosses).map(|gpu| gpu.index).collect::<Vec<_>>()
        };
        let switches = (0..topology.links.len() as u32).map(under).filter(|gpus| gpus.len() > 1).collect();
        Self { switches, ..Self::new(gpus, queue_max) }
    }

    /// The same with models copied between GPUs where the topology joins them directly.
    #[must_use]
    pub fn with_peers(mut self, topology: &Topology) -> Self {
        let peers = topology.links.iter().filter_map(|link| match link.kind {
            LinkKind::NvLink { a, b } => Some(PeerLink { a, b, rate: link.rate }),
            LinkKind::Pcie | LinkKind::PcieUplink => None,
        });
        self.peers = peers.collect();
        self
    }

    /// The same with data that goes between GPUs by as many routes, each over as many links, as the
    /// fabric gives objects ([`crate::fabric::routes_of`]). Over the host where the topology is more than
    /// routes are planned for, as there.
    #[must_use]
    pub fn with_ways(self, topology: &Topology) -> Self {
        Self { ways: paths::ways(topology, paths::Config::default()).unwrap_or_default(), ..self }
    }

    /// The same with GPUs that choose otherwise what makes room.
    #[must_use]
    pub fn with_eviction(self, eviction: Eviction) -> Self {
        Self { eviction, ..self }
    }

    /// The same with another policy.
    #[must_use]
    pub fn with_policy(self, policy: PolicyConfig, seed: u64) -> Self {
        Self { policy, seed, ..self }
    }
}

/// The number by which a dispatcher knows a type of GPU of its topology: types are numbered by name.
#[must_use]
pub fn kind_of(topology: &Topology, gpu_type: &str) -> Option<u32> {
    gpu_types(topology).into_iter().zip(0..).find(|(name, _)| *name == gpu_type).map(|(_, kind)| kind)
}

/// The types of GPU of a topology, by kind.
#[must_use]
pub fn gpu_types(topology: &Topology) -> Vec<&str> {
    let types: BTreeSet<&str> = topology.gpus.iter().map(|gpu| gpu.gpu_type.as_str()).collect();
    types.into_iter().collect()
}

/// Times a waiting request may be overtaken by default (L14).
pub const OVERTAKES_MAX: u32 = 25;

/// How requests are ordered and given to GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PolicyConfig {
    /// The oldest first, handed ahead to busy GPUs. Ours.
    Fifo,
    /// The oldest first, to the GPU that has been idle longest, wherever its model is (L18).
    Lb,
    /// Locality and load balance (L03, L09 to L14): a request may be overtaken so many times. At 0
    /// it is `lalb`, else `lalb-o3`.
    Lalb {
        /// So many.
        overtakes_max: u32,
    },
    /// By required request counts, onto the GPU with least interference (T17 to T22), or at random.
    Torpor(TorporConfig),
    /// By estimated finish and by what can still be in time. Ours, and the default.
    Unified(UnifiedConfig),
    /// Each function on a GPU of its own choice before anything runs (T28).
    Bound(BoundConfig),
}

/// A baseline that binds functions to GPUs. What it says of the device is assumed: dispatch sees
/// neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BoundConfig {
    /// For how long.
    pub binding: Binding,
    /// GPU memory that each function holds besides its model: a runtime of its own.
    pub runtime: Bytes,
    /// From binding a function until its first request may run.
    pub cold_start: Duration,
}

/// How long a function stays bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Binding {
    /// Until it is gone.
    ForGood,
    /// Until none of its requests was given out for so long.
    KeepAlive(Duration),
}

/// What a function's own runtime is taken to hold. Torpor's node runs 72 functions natively in 128 GB
/// (§7.3), of models that average 270 MB.
pub const RUNTIME_MEMORY: Bytes = Bytes(1_500_000_000);
/// How long a cold start is taken to last: the shortest of the paper's table 1.
pub const COLD_START: Duration = Duration::from_secs(8);
/// How long a function without requests stays bound. The paper gives none; its functions are asked
/// for every 2 to 12 s.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);

impl Default for PolicyConfig {
    fn default() -> Self {
        Self::Unified(UNIFIED)
    }
}

impl PolicyConfig {
    /// Whether decisions depend on objectives and scores, and on when models have arrived.
    #[must_use]
    pub const fn scores(self) -> bool {
        matches!(self, Self::Torpor(_) | Self::Unified(_) | Self::Bound(_))
    }

    /// Whether a request may have to wait for one GPU while another idles, or be refused since others
    /// hold the memory.
    #[must_use]
    pub const fn binds_early(self) -> bool {
        matches!(self, Self::Bound(_))
    }
}

/// Times a waiting request may be overtaken by default under `unified`, before it has a share of the
/// turns. Ours: tens of seconds of a busy node. The LALB paper's 25 goes with queues of a few dozen,
/// where ours never comes near its limit.
pub const UNIFIED_OVERTAKES_MAX: u32 = 5000;

/// While requests wait that were overtaken as often as that, one of so many turns goes by age, by default.
/// Ours: in an overload that lasts the other turns are for what can still be in time.
pub const AGED_EVERY: u32 = 10;

/// The same for requests without a deadline, of which none is given up. More gains nothing on average.
pub const FREE_OVERTAKES_MAX: u32 = 1000;

/// Our own policy's settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UnifiedConfig {
    /// Times a waiting request may be overtaken.
    pub overtakes_max: u32,
    /// While the oldest has a deadline and was overtaken so often, one in so many that leave is the
    /// oldest; 1: each.
    pub aged_every: u32,
    /// Times one without a deadline may be; while an older one has one, as often as that one. At most
    /// [`Self::overtakes_max`].
    pub free_overtakes_max: u32,
    /// Which requests count for a function's score.
    pub counts: Counts,
}

pub(super) const UNIFIED: UnifiedConfig = UnifiedConfig {
    overtakes_max: UNIFIED_OVERTAKES_MAX,
    aged_every: AGED_EVERY,
    free_overtakes_max: FREE_OVERTAKES_MAX,
    counts: Counts::Cumulative,
};

/// The parts of Torpor's policy, each of which its paper also takes out (T28).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TorporConfig {
    /// Who is first.
    pub order: Order,
    /// Where it goes.
    pub choice: Choice,
    /// What counts.
    pub counts: Counts,
    /// How many are prioritised.
    pub alpha: AlphaRule,
}

impl Default for TorporConfig {
    fn default() -> Self {
        TORPOR
    }
}

/// Which request is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Order {
    /// By its function's group and required request count (T21), then by age.
    Required,
    /// By age (Torpor-FIFO).
    Arrival,
}

/// Which idle GPU a request goes to, where none holds its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Choice {
    /// Next to a busy holder, else where loading disturbs least (T22).
    Interference,
    /// Any (Torpor-Random).
    Random,
}

/// Which requests count for a function's score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Counts {
    /// All there ever were.
    Cumulative,
    /// The last so many, at most [`WINDOW_MAX`].
    Last(u32),
}

/// The most requests of a function that are remembered one by one.
pub const WINDOW_MAX: u32 = millrace_types::policy::SLO_WINDOW_MAX;

/// How alpha follows the share of functions that comply (T20).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AlphaRule {
    /// As in appendix A.3: absolute differences, groups always up to date.
    Paper,
    /// As in the released prototype: relative differences from the last adjusted ratio, a creep
    /// upwards when steady, groups renewed every 2 s, counts weighted by mean run time.
    Artifact,
}

/// Every name, with what it stands for.
pub const POLICIES: [(&str, PolicyConfig); 11] = [
    ("fifo", PolicyConfig::Fifo),
    ("lb", PolicyConfig::Lb),
    ("lalb", PolicyConfig::Lalb { overtakes_max: 0 }),
    ("lalb-o3", PolicyConfig::Lalb { overtakes_max: OVERTAKES_MAX }),
    ("torpor", PolicyConfig::Torpor(TORPOR)),
    ("random", PolicyConfig::Torpor(TorporConfig { choice: Choice::Random, ..TORPOR })),
    ("unified", PolicyConfig::Unified(UNIFIED)),
    ("native", PolicyConfig::Bound(BoundConfig { runtime: RUNTIME_MEMORY, ..NONSWAP })),
    (
        "infless-ka",
        PolicyConfig::Bound(BoundConfig {
            binding: Binding::KeepAlive(KEEP_ALIVE),
            runtime: RUNTIME_MEMORY,
            cold_start: COLD_START,
        }),
    ),
    ("nonswap", PolicyConfig::Bound(NONSWAP)),
    (
        "simpleswap",
        PolicyConfig::Torpor(TorporConfig { order: Order::Arrival, choice: Choice::Random, ..TORPOR }),
    ),
];

/// Whoever is bound for good is taken to have been started before anybody asks.
const NONSWAP: BoundConfig =
    BoundConfig { binding: Binding::ForGood, runtime: Bytes::ZERO, cold_start: Duration::ZERO };

pub(super) const TORPOR: TorporConfig = TorporConfig {
    order: Order::Required,
    choice: Choice::Interference,
    counts: Counts::Cumulative,
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
            Self::Torpor(TorporConfig { order: Order::Arrival, choice: Choice::Random, .. }) => "simpleswap",
            Self::Torpor(TorporConfig { choice: Choice::Random, .. }) => "random",
            Self::Torpor(_) => "torpor",
            Self::Unified(_) => "unified",
            Self::Bound(BoundConfig { binding: Binding::KeepAlive(_), .. }) => "infless-ka",
            Self::Bound(BoundConfig { runtime: Bytes::ZERO, .. }) => "nonswap",
            Self::Bound(_) => "native",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_types::topology::{Gpu, Link, LinkId};

    #[test]
    fn every_policy_is_read_by_the_name_it_is_shown_by() {
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
    fn a_topology_says_who_shares_a_switch_and_who_is_joined() {
        let gpu = |index: u32, gpu_type: &str| Gpu {
            index: GpuIndex(index),
            gpu_type: gpu_type.to_owned(),
            memory: Bytes::gib(1),
            host_path: vec![LinkId(index), LinkId(3 + index / 2)],
        };
        let link = |kind, gb| Link { kind, rate: BytesPerSec::gb(gb) };
        let (pcie, uplink) = (link(LinkKind::Pcie, 12), link(LinkKind::PcieUplink, 10));
        let (a, b) = (GpuIndex(0), GpuIndex(2));
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
        assert_eq!(joined.ways, [Way { from: a, to: b, rate }, Way { from: b, to: a, rate }]);
    }
}
