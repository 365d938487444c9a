//! What is simulated: machines, functions, who asks when, and what breaks.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_policy::dispatch::PolicyConfig;
use millrace_policy::gpu::Eviction;
use millrace_policy::gpu::isolation::Isolation;
use millrace_policy::paths::HostLinks;
use millrace_policy::rates::Sharing;
use millrace_types::topology::Topology;
use millrace_types::{Bytes, GpuIndex, Quota, Serving, Slo, TenantName, Timestamp};

use crate::models::ModelFigures;
use crate::workload::Arrival;

/// One machine of the cluster.
#[derive(Debug, Clone)]
pub struct NodeSpec {
    /// Its GPUs and links.
    pub topology: Topology,
    /// Which of its requests goes to which of its GPUs.
    pub dispatch: PolicyConfig,
    /// Which models make room first.
    pub eviction: Eviction,
    /// Which models share an executor process.
    pub isolation: Isolation,
    /// How transfers from the host share their links: in turns unless said, as in the papers that share
    /// by no objective.
    pub sharing: Sharing,
    /// Over whose links they come.
    pub host_links: HostLinks,
    /// Its host memory for models.
    pub host_memory: Bytes,
}

impl NodeSpec {
    /// A machine with this topology that dispatches so, with room for any number of models.
    #[must_use]
    pub fn new(topology: Topology, dispatch: PolicyConfig) -> Self {
        let eviction = Eviction::default();
        let isolation = Isolation::default();
        let (sharing, host_links) = (Sharing::Fair, HostLinks::default());
        let host_memory = Bytes(u64::MAX / 2);
        Self { topology, dispatch, eviction, isolation, sharing, host_links, host_memory }
    }
}

/// One published function.
#[derive(Debug, Clone)]
pub struct Function {
    /// Its model. Functions never share one, as the papers' do not.
    pub model: ModelFigures,
    /// Its objective.
    pub slo: Option<Slo>,
    /// How much longer a run is for each request beyond the first in it, where its serving asks for
    /// batches. As long as alone: batches gain nothing.
    pub by_member: Duration,
    /// On how many nodes it is kept ready.
    pub replicas: u32,
    /// How a node serves it among others.
    pub serving: Serving,
    /// Whose it is.
    pub tenant: TenantName,
}

impl Function {
    /// A function of one replica.
    #[must_use]
    pub fn new(model: ModelFigures, slo: Option<Slo>) -> Self {
        let (serving, tenant) = (Serving::default(), TenantName::default());
        Self { by_member: model.run, model, slo, replicas: 1, serving, tenant }
    }
}

/// Something that breaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fault {
    /// When.
    pub at: Timestamp,
    /// On which machine.
    pub node: usize,
    /// Whose executor is killed.
    pub gpu: GpuIndex,
}

/// All of it.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The machines.
    pub nodes: Vec<NodeSpec>,
    /// What is published.
    pub functions: Vec<Function>,
    /// What tenants may use of each machine; those that are not named have no caps.
    pub quotas: BTreeMap<TenantName, Quota>,
    /// The requests, in the order in which they come; each names its function by place.
    pub arrivals: Vec<Arrival>,
    /// Executors that are killed.
    pub faults: Vec<Fault>,
    /// How much longer than its model's figures a run takes on a type of GPU, in percent of them
    /// (L21). Types that are not named take what the figures say.
    pub pace: BTreeMap<String, u32>,
    /// Whether each function is asked once before the first request, in turn, as the papers warm
    /// up theirs. These requests are not among the outcome's.
    pub warmed: bool,
    /// How long clients wait.
    pub timeout: Duration,
    /// An executor's start.
    pub executor_start: Duration,
    /// The start of a model's own, where each has one (T14): runtime resumption of table 1's ResNet-152.
    pub process_start: Duration,
    /// Spreads what is spread at random, inside the nodes.
    pub seed: u64,
    /// The order of what happens in one moment: 0 the usual one.
    pub ties: u64,
    /// Whether events are counted and hashed; costs about a tenth of the time.
    pub traced: bool,
}

impl Scenario {
    /// No faults; clients wait for an hour.
    #[must_use]
    pub fn new(nodes: Vec<NodeSpec>, functions: Vec<Function>, arrivals: Vec<Arrival>, seed: u64) -> Self {
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
