//! Input and output of the planner.

use millrace_types::{Bytes, Digest, FunctionKey, NodeName, NodeState};

/// Default maximum number of steps of one plan: as many as one command in the log may hold.
pub const STEPS_MAX: usize = 512;

/// Bounds of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanLimits {
    /// Maximum number of steps in a plan.
    pub steps_max: usize,
}

impl Default for PlanLimits {
    fn default() -> Self {
        Self { steps_max: STEPS_MAX }
    }
}

/// GPU time needed in each second, in thousandths of one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuLoad(pub u64);

/// A model that is needed in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlacedModel {
    /// Digest of the model file. Functions that share a model on a node share its bytes.
    pub digest: Digest,
    /// Host memory that the model needs.
    pub host: Bytes,
}

/// Desired state of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DesiredReplicas {
    /// Tenant and name.
    pub key: FunctionKey,
    /// Whether requests are served. A disabled function is placed nowhere.
    pub enabled: bool,
    /// Number of nodes that should have the function's models.
    pub replicas: u32,
    /// Models of the newest revision and, during a rollout, of the revision before.
    pub models: Vec<PlacedModel>,
    /// Memory of one GPU that a run needs.
    pub gpu: Bytes,
    /// Expected load of all its requests together. Its replicas share this load.
    pub load: GpuLoad,
    /// Whether the function ever answered a request. A function that never ran may move to its
    /// group.
    pub ran: bool,
    /// Whether its copy has the only state of sequences. Such a copy moves only if necessary, and
    /// is removed as soon as another is placed: two serving copies would each have a state of their
    /// own.
    pub keeps_state: bool,
}

/// Data that two functions pass to each other when a workflow runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DataFlow {
    /// Function that produces the data.
    pub from: FunctionKey,
    /// Function that consumes the data.
    pub to: FunctionKey,
    /// Bytes in one run, as measured or as declared.
    pub bytes: Bytes,
    /// Whether the flow lies on the workflow's critical path.
    pub is_critical: bool,
}

/// A worker machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacementNode {
    pub name: NodeName,
    /// State, which determines whether the node takes new copies and keeps its copies.
    pub state: NodeState,
    /// Host memory for models.
    pub host: Bytes,
    /// Memory of the node's largest GPU.
    pub gpu: Bytes,
    /// Number of GPUs.
    pub gpus: u32,
    /// Observed load of all its GPUs together.
    pub busy: GpuLoad,
}

/// Progress of a placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PlacementPhase {
    /// Every model of the function is in the node's host memory.
    Ready,
    /// The models are on their way, or the node has not reported yet.
    Preparing,
    /// The node could not prepare the function.
    Failed,
}

/// A function that is placed on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FunctionPlacement {
    pub function: FunctionKey,
    pub node: NodeName,
    pub phase: PlacementPhase,
}

/// Everything that a plan depends on. Keys and names are unique; if a placement is listed twice,
/// the better phase counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterSnapshot {
    pub functions: Vec<DesiredReplicas>,
    pub nodes: Vec<PlacementNode>,
    pub placements: Vec<FunctionPlacement>,
    /// Data passed in workflows. Several flows between the same two functions add up.
    pub flows: Vec<DataFlow>,
}

/// A change to one placement.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PlacementChange {
    /// Place a copy: the node loads the function's models.
    Place { function: FunctionKey, node: NodeName },
    /// Unplace a copy: the node drops the function's models.
    Unplace { function: FunctionKey, node: NodeName },
}

/// Next steps of the reconciler.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PlacementPlan {
    /// Steps, the most urgent first.
    pub steps: Vec<PlacementChange>,
    /// Functions with fewer copies than wanted, for which no step helps.
    pub unplaced: Vec<Unplaced>,
    /// Whether steps were left out. Then `unplaced` may be incomplete, too.
    pub more: bool,
}

/// A function that cannot have all its copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unplaced {
    pub function: FunctionKey,
    /// Copies placed on nodes that may keep them.
    pub copies: u32,
    /// Missing copies.
    pub missing: u32,
    /// Reason why the next copy cannot be placed.
    pub why: UnplacedReason,
}

/// Reason why a copy cannot be placed. The text includes a remedy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum UnplacedReason {
    /// No node takes functions.
    #[error("no node takes functions: start a worker, or uncordon one")]
    NoNode,
    /// Every node that takes functions has a copy already, or failed to prepare a copy.
    #[error("{nodes} nodes take functions and each has its copy: add a node, or ask for fewer replicas")]
    TooFewNodes {
        /// Number of nodes that take functions.
        nodes: u32,
    },
    /// No GPU is large enough for a run.
    #[error(
        "a run needs {needs} of GPU memory and the largest GPU has {largest}: add a node with a larger one"
    )]
    GpuMemory {
        /// GPU memory that a run needs.
        needs: Bytes,
        /// Memory of the largest GPU.
        largest: Bytes,
    },
    /// Every suitable node has the maximum number of functions.
    #[error(
        "{nodes} nodes take functions and each has the most that a node may have ({max}): add a node, or remove functions"
    )]
    NodesFull {
        /// Number of nodes that take functions.
        nodes: u32,
        /// Maximum number of functions of a node.
        max: usize,
    },
    /// No node has room for the function's models.
    #[error(
        "the function's models need {needs} of host memory and no node has more than {free} left: add a node, give workers more (--host-memory), or remove functions"
    )]
    HostMemory {
        /// Host memory that all its models need.
        needs: Bytes,
        /// Largest free host memory of a node.
        free: Bytes,
    },
    /// Nodes failed to prepare the function, and no further node is tried.
    #[error("{nodes} nodes failed to prepare the function: see the errors that these nodes report")]
    Failing {
        /// Number of nodes that failed.
        nodes: u32,
    },
}
