//! What a node is made of, and how its actors are started.

use std::sync::Arc;

use millrace_policy::dispatch::PolicyConfig;
use millrace_policy::elastic::{self, MigrationPolicy, POOL_FLOOR, PoolPolicy, STORE_CAP};
use millrace_policy::gpu::{Eviction, Isolation};
use millrace_policy::paths::HostLinks;
use millrace_policy::preset::SchedulingPolicy;
use millrace_policy::prewarm::Prewarm;
use millrace_policy::rates::Sharing;
use millrace_types::Bytes;
use millrace_types::policy::Batches;
use millrace_types::topology::Topology;

pub use crate::actors::driven::SharedTrace;
use crate::clock::{Clock, MonotonicClock};
use crate::handle::NodeHandle;
use crate::port::Spawner;
use crate::supervisor::Supervisor;

/// Requests the worker holds at one time, counting those on GPUs: the permits of
/// [`crate::handle::NodeHandle`].
pub const REQUESTS_MAX: u32 = 4096;
/// Requests that one function may have in flight.
pub const IN_FLIGHT_MAX: u32 = 2048;

/// A GPU's memory is shared by so many, of which data is one at most.
const DATA_SHARE: u64 = 4;

/// How GPUs keep intermediate data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataConfig {
    /// The most of a GPU's memory that it takes; a quarter of the GPU where that is less. Zero: it is
    /// kept in host memory.
    pub memory: Bytes,
    /// What stays allocated for it.
    pub pool: PoolPolicy,
    /// What leaves first where there is too little room.
    pub migration: MigrationPolicy,
}

impl Default for DataConfig {
    fn default() -> Self {
        let (pool, migration) = (PoolPolicy::default(), MigrationPolicy::default());
        Self { memory: STORE_CAP, pool, migration }
    }
}

impl DataConfig {
    /// Of a GPU with so much memory: the floor keeps the paper's proportion to the cap (D24, D26).
    pub(crate) fn of(self, gpu: Bytes) -> Option<elastic::Config> {
        let Self { memory, pool, migration } = self;
        let cap = memory.min(Bytes(gpu.get() / DATA_SHARE));
        let floor = Bytes(POOL_FLOOR.get() * cap.get().min(STORE_CAP.get()) / STORE_CAP.get());
        (cap > Bytes::ZERO).then_some(elastic::Config { cap, floor, pool, migration })
    }
}

/// What a node is.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Its GPUs and links.
    pub topology: Topology,
    /// Requests it holds at one time, waiting and running.
    pub requests_max: u32,
    /// Requests that one function may have in flight.
    pub in_flight_max: u32,
    /// Which request goes to which GPU.
    pub dispatch: PolicyConfig,
    /// Which models make room first.
    pub eviction: Eviction,
    /// Which models share an executor.
    pub isolation: Isolation,
    /// How they keep intermediate data.
    pub data: DataConfig,
    /// How transfers from the host share their links.
    pub sharing: Sharing,
    /// Over whose links they come.
    pub host_links: HostLinks,
    /// Whether models come before they are asked for, where that is likely.
    pub prewarm: Prewarm,
}

impl NodeConfig {
    /// A node with these GPUs and the default limits.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        let policy = SchedulingPolicy::default();
        let isolation = Isolation::default();
        let (requests_max, in_flight_max) = (REQUESTS_MAX, IN_FLIGHT_MAX);
        let data = DataConfig::default();
        Self {
            topology,
            requests_max,
            in_flight_max,
            dispatch: policy.dispatch,
            eviction: policy.eviction,
            isolation,
            data,
            sharing: policy.sharing,
            host_links: policy.host_links,
            prewarm: Prewarm::default(),
        }
    }

    /// Returns the same node with this policy until an operator sets another.
    #[must_use]
    pub fn with_policy(self, policy: SchedulingPolicy) -> Self {
        let SchedulingPolicy { dispatch, eviction, batching: _, sharing, host_links } = policy;
        Self { dispatch, eviction, sharing, host_links, ..self }
    }

    /// The policy of the node until an operator sets another.
    #[must_use]
    pub fn policy(&self) -> SchedulingPolicy {
        let &Self { dispatch, eviction, sharing, host_links, .. } = self;
        SchedulingPolicy { dispatch, eviction, batching: Batches::On, sharing, host_links }
    }
}

/// The world a node lives in: everything that differs between production and simulation.
pub struct NodeContext {
    /// Time.
    pub(crate) clock: Arc<dyn Clock>,
    /// Spreads restarts.
    pub(crate) seed: u64,
    /// Makes executors.
    pub(crate) spawner: Box<dyn Spawner>,
    /// Where what the cores do is folded, if anywhere.
    pub(crate) trace: Option<SharedTrace>,
}

impl NodeContext {
    /// A node on the machine's own clock.
    #[must_use]
    pub fn new(seed: u64, spawner: Box<dyn Spawner>) -> Self {
        Self { clock: Arc::new(MonotonicClock), seed, spawner, trace: None }
    }

    /// The same on another clock.
    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// The same, with what the cores do folded into `trace`.
    #[must_use]
    pub fn with_trace(self, trace: SharedTrace) -> Self {
        Self { trace: Some(trace), ..self }
    }
}

/// Starts a node's actors on this thread, which must be running an actix system: how a simulation
/// has them in its own time.
#[must_use]
pub fn start_here(config: NodeConfig, context: NodeContext) -> NodeHandle {
    Supervisor::start(config, context)
}

#[cfg(test)]
mod tests;
