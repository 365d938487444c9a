//! The input of a simulation: machines, functions, arrivals of requests, and faults.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_gpu::isolation::ExecutorIsolation;
use millrace_memory::eviction::Eviction;
use millrace_scheduling::dispatch::PolicyConfig;
use millrace_scheduling::preset::SchedulingPolicy;
use millrace_transfers::paths::HostLinks;
use millrace_transfers::rates::TransferSharing;
use millrace_types::policy::GpuSharingName;
use millrace_types::topology::Topology;
use millrace_types::{AskedSlices, Bytes, GpuIndex, Quota, SchedulingOptions, Slo, TenantName, Timestamp};

use crate::models::ModelFigures;
use crate::workload::RequestArrival;

/// One machine of the cluster.
#[derive(Debug, Clone)]
pub struct SimulatedNode {
    /// The GPUs and links of the machine.
    pub topology: Topology,
    /// The policy that assigns requests to GPUs.
    pub dispatch: PolicyConfig,
    /// The policy that orders models for eviction.
    pub eviction: Eviction,
    /// The rule that decides which models share an executor process.
    pub isolation: ExecutorIsolation,
    /// The division of a link among transfers from the host.
    pub sharing: TransferSharing,
    /// The links that a transfer from the host may use: those of its own GPU, or those of other GPUs too.
    pub host_links: HostLinks,
    /// The sharing of a GPU among requests.
    pub gpu_sharing: GpuSharingName,
    /// The host memory for models.
    pub host_memory: Bytes,
}

impl SimulatedNode {
    /// Returns the scheduling policy of the node, as a worker would report it.
    #[must_use]
    pub fn scheduling(&self) -> SchedulingPolicy {
        SchedulingPolicy {
            dispatch: self.dispatch,
            eviction: self.eviction,
            sharing: self.sharing,
            host_links: self.host_links,
            gpu_sharing: self.gpu_sharing,
            ..SchedulingPolicy::default()
        }
    }

    /// Returns a machine with this topology and the preset of this dispatch policy. Its host memory fits any
    /// number of models.
    #[must_use]
    pub fn new(topology: Topology, dispatch: PolicyConfig) -> Self {
        let SchedulingPolicy { eviction, sharing, host_links, gpu_sharing, .. } =
            SchedulingPolicy::around(dispatch);
        Self {
            topology,
            dispatch,
            eviction,
            isolation: ExecutorIsolation::default(),
            sharing,
            host_links,
            gpu_sharing,
            host_memory: Bytes(u64::MAX / 2),
        }
    }
}

/// One published function.
#[derive(Debug, Clone)]
pub struct SimulatedFunction {
    /// The function's model. Functions never share a model, as in the papers.
    pub model: ModelFigures,
    /// The latency objective, if any.
    pub slo: Option<Slo>,
    /// The run time that each request beyond the first adds to a batch. At the run time of a single request,
    /// batching gains nothing.
    pub by_member: Duration,
    /// The number of nodes that keep the function ready.
    pub replicas: u32,
    /// The priority, residency and batching of the function on its nodes.
    pub serving: SchedulingOptions,
    /// The tenant that owns the function.
    pub tenant: TenantName,
    /// The slices of GPUs that the function asks for.
    pub slices: Option<AskedSlices>,
}

impl SimulatedFunction {
    /// Returns a function with one replica, of the default tenant, for which batching gains nothing.
    #[must_use]
    pub fn new(model: ModelFigures, slo: Option<Slo>) -> Self {
        Self {
            by_member: model.run,
            model,
            slo,
            replicas: 1,
            serving: SchedulingOptions::default(),
            tenant: TenantName::default(),
            slices: None,
        }
    }
}

/// The death of an executor at a given time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutorFault {
    /// The time since the first moment of the scenario, after any warm-up.
    pub at: Timestamp,
    /// The index of the machine.
    pub node: usize,
    /// The GPU whose executor is killed.
    pub gpu: GpuIndex,
}

/// The whole input of a simulation.
#[derive(Debug, Clone)]
pub struct ClusterScenario {
    pub nodes: Vec<SimulatedNode>,
    /// The published functions.
    pub functions: Vec<SimulatedFunction>,
    /// The caps of tenants on each machine. A tenant without an entry has no caps.
    pub quotas: BTreeMap<TenantName, Quota>,
    /// The requests, in the order of their arrival. Each names its function by index.
    pub arrivals: Vec<RequestArrival>,
    /// The deaths of executors, in the order of their times.
    pub faults: Vec<ExecutorFault>,
    /// The run time on each type of GPU, in percent of the model's figures (L21). A type without an entry
    /// has 100.
    pub pace: BTreeMap<String, u32>,
    /// Whether each function is requested once before the first arrival, one after the other, as in the
    /// papers' warm-up. The outcome leaves out these requests.
    pub warmed: bool,
    /// The time that a client waits for an answer.
    pub timeout: Duration,
    /// The start time of an executor.
    pub executor_start: Duration,
    /// The start time of a model's own executor, if each model has one (T14): the runtime resumption of
    /// ResNet-152 in table 1.
    pub process_start: Duration,
    /// The seed of random choices inside the nodes.
    pub seed: u64,
    /// The seed of the order of simultaneous events. 0 is the usual order.
    pub ties: u64,
    /// Whether events are counted and hashed, which costs about a tenth of the time.
    pub traced: bool,
}

impl ClusterScenario {
    /// Returns a scenario without faults, caps, warm-up or trace, whose clients wait for an hour.
    #[must_use]
    pub fn new(
        nodes: Vec<SimulatedNode>,
        functions: Vec<SimulatedFunction>,
        arrivals: Vec<RequestArrival>,
        seed: u64,
    ) -> Self {
        Self {
            nodes,
            functions,
            quotas: BTreeMap::new(),
            arrivals,
            faults: Vec::new(),
            pace: BTreeMap::new(),
            warmed: false,
            timeout: Duration::from_secs(3600),
            executor_start: Duration::from_millis(100),
            process_start: Duration::from_millis(260),
            seed,
            ties: 0,
            traced: false,
        }
    }
}
