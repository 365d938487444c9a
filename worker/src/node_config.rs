//! The configuration and the environment of a node.

use std::num::NonZeroU32;
use std::sync::Arc;

use millrace_gpu::ExecutorIsolation;
use millrace_memory::BlockSize;
use millrace_memory::elastic::{self, MigrationPolicy, POOL_FLOOR, PoolPolicy, STORE_CAP};
use millrace_memory::eviction::Eviction;
use millrace_scheduling::dispatch::PolicyConfig;
use millrace_scheduling::preset::SchedulingPolicy;
use millrace_slices::tokens;
use millrace_transfers::paths::HostLinks;
use millrace_transfers::rates::TransferSharing;
use millrace_types::Bytes;
use millrace_types::limits::SLICES_PER_GPU_MAX;
use millrace_types::policy::{Batches, GpuSharingName};
use millrace_types::topology::Topology;
use millrace_workflow::hints::Prewarm;

use crate::clock::{Clock, MonotonicClock};
use crate::port::PortFactory;
use crate::traced_core::SharedTrace;

/// Maximum number of requests that a worker holds at a time, requests on GPUs included: the
/// permits of [`crate::handle::NodeHandle`].
pub const REQUESTS_MAX: u32 = 4096;
/// Maximum number of requests in flight for one function.
pub const IN_FLIGHT_MAX: u32 = 2048;

/// Number of seats of a GPU that can be shared.
const SHARED_SEATS: NonZeroU32 = NonZeroU32::new(8).expect("eight is not zero");
/// The number of seats for slices of a GPU that can be shared: the packer puts no more slices on a GPU.
const SLICE_SEATS: u32 = SLICES_PER_GPU_MAX as u32;

/// Divisor of a GPU's memory: objects get at most one part in this number.
const DATA_SHARE: u64 = 4;

/// The limits and the policies of intermediate data on GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataConfig {
    /// Maximum memory of objects on one GPU; at most a quarter of the GPU. With zero, objects are
    /// stored in host memory.
    pub memory: Bytes,
    /// The memory that stays allocated for objects.
    pub pool: PoolPolicy,
    /// The choice of the object that leaves a full GPU.
    pub migration: MigrationPolicy,
}

impl Default for DataConfig {
    fn default() -> Self {
        Self { memory: STORE_CAP, pool: PoolPolicy::default(), migration: MigrationPolicy::default() }
    }
}

impl DataConfig {
    /// Returns the store's configuration on a GPU with `gpu` bytes of memory; `None`: no objects on
    /// the GPU. The floor keeps the paper's proportion to the cap (D24, D26).
    pub(crate) fn store_config(self, gpu: Bytes) -> Option<elastic::Config> {
        let Self { memory, pool, migration } = self;
        let cap = memory.min(Bytes(gpu.get() / DATA_SHARE));
        let floor = Bytes(POOL_FLOOR.get() * cap.get().min(STORE_CAP.get()) / STORE_CAP.get());
        (cap > Bytes::ZERO).then_some(elastic::Config {
            cap,
            floor,
            pool,
            migration,
            ..elastic::Config::default()
        })
    }
}

/// The hardware, the limits and the policies of a node.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    pub topology: Topology,
    /// The unit in which every GPU's memory is given out.
    pub block: BlockSize,
    /// Maximum number of requests at a time, waiting and running.
    pub requests_max: u32,
    /// Maximum number of requests in flight for one function.
    pub in_flight_max: u32,
    /// Whether the device can restrict a launch to a part of the SMs.
    pub shareable: bool,
    /// The choice of the next request and its GPU.
    pub dispatch: PolicyConfig,
    /// The choice of the models that are evicted first.
    pub eviction: Eviction,
    /// The models that share an executor process.
    pub isolation: ExecutorIsolation,
    /// The limits and the policies of intermediate data on the node's GPUs.
    pub data: DataConfig,
    /// The division of link rates among transfers from the host.
    pub sharing: TransferSharing,
    /// The links that transfers from the host use: the GPU's own, or idle links of neighbours too.
    pub host_links: HostLinks,
    /// The sharing of a GPU among requests.
    pub gpu_sharing: GpuSharingName,
    /// Whether likely models are loaded before their first request.
    pub prewarm: Prewarm,
}

impl NodeConfig {
    /// Returns the configuration of a node with these GPUs and links, and default limits and
    /// policies.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        let policy = SchedulingPolicy::default();
        let isolation = ExecutorIsolation::default();
        let data = DataConfig::default();
        Self {
            topology,
            block: BlockSize::DEFAULT,
            requests_max: REQUESTS_MAX,
            in_flight_max: IN_FLIGHT_MAX,
            shareable: true,
            dispatch: policy.dispatch,
            eviction: policy.eviction,
            isolation,
            data,
            sharing: policy.sharing,
            host_links: policy.host_links,
            gpu_sharing: policy.gpu_sharing,
            prewarm: Prewarm::default(),
        }
    }

    /// Returns this configuration with another policy, which holds until an operator sets one.
    #[must_use]
    pub fn with_policy(self, policy: SchedulingPolicy) -> Self {
        let SchedulingPolicy { dispatch, eviction, batching: _, sharing, host_links, gpu_sharing } = policy;
        Self { dispatch, eviction, sharing, host_links, gpu_sharing, ..self }
    }

    /// Returns the policy at the start, before an operator sets a policy.
    #[must_use]
    pub fn policy(&self) -> SchedulingPolicy {
        let &Self { dispatch, eviction, sharing, host_links, gpu_sharing, .. } = self;
        SchedulingPolicy { dispatch, eviction, batching: Batches::On, sharing, host_links, gpu_sharing }
    }

    /// Returns a policy with the settings that this node can obey.
    #[must_use]
    pub(crate) fn possible(&self, policy: SchedulingPolicy) -> SchedulingPolicy {
        let gpu_sharing = if self.can_share() { policy.gpu_sharing } else { GpuSharingName::Off };
        SchedulingPolicy { gpu_sharing, ..policy }
    }

    /// Returns the number of seats of each GPU for requests of all functions: the number of such requests
    /// that may run on it at once.
    #[must_use]
    pub(crate) fn seats(&self) -> NonZeroU32 {
        if self.can_share() { SHARED_SEATS } else { NonZeroU32::MIN }
    }

    /// Returns the number of seats of each GPU for slices.
    #[must_use]
    pub(crate) fn slice_seats(&self) -> u32 {
        if self.can_share() { SLICE_SEATS } else { 0 }
    }

    /// Returns whether GPUs can be shared: the device can restrict launches to SMs, and all models share an
    /// executor.
    fn can_share(&self) -> bool {
        self.shareable && !self.isolation.per_model()
    }

    /// Returns how a GPU is shared under a policy; `None`: a request has the whole GPU.
    #[must_use]
    pub(crate) fn sharing_of(&self, policy: &SchedulingPolicy) -> Option<tokens::Config> {
        match self.possible(*policy).gpu_sharing {
            GpuSharingName::Off => None,
            GpuSharingName::Slices => Some(tokens::Config::SLICES),
        }
    }

    /// Returns the number of seats that are open under a policy.
    #[must_use]
    pub(crate) fn open_seats(&self, policy: &SchedulingPolicy) -> NonZeroU32 {
        if self.sharing_of(policy).is_some() { self.seats() } else { NonZeroU32::MIN }
    }
}

/// The environment of a node: all that differs between production and simulation.
pub struct NodeContext {
    pub(crate) clock: Arc<dyn Clock>,
    /// Seed of the restart delays.
    pub(crate) seed: u64,
    /// Starts executors.
    pub(crate) spawner: Box<dyn PortFactory>,
    /// Trace that records the actions of the cores, if any.
    pub(crate) trace: Option<SharedTrace>,
}

impl NodeContext {
    /// Returns a context with the machine's own clock.
    #[must_use]
    pub fn new(seed: u64, spawner: Box<dyn PortFactory>) -> Self {
        Self { clock: Arc::new(MonotonicClock), seed, spawner, trace: None }
    }

    /// Returns this context with another clock.
    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// Returns this context with a trace, which records the actions of the cores.
    #[must_use]
    pub fn with_trace(self, trace: SharedTrace) -> Self {
        Self { trace: Some(trace), ..self }
    }
}
