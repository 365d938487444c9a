//! What the planner is told, and what it answers.

use millrace_types::{Bytes, Digest, FunctionKey, NodeName, NodeState};

/// Steps of one plan, unless the caller says otherwise: what one command in the log may hold.
pub const STEPS_MAX: usize = 512;

/// What a plan is held to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Steps in a plan.
    pub steps_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { steps_max: STEPS_MAX }
    }
}

/// GPU time needed in each second, in thousandths of one GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuLoad(pub u64);

/// A model that is wanted in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Model {
    /// Which. Functions that share one on a node share its bytes.
    pub digest: Digest,
    /// Host memory it needs.
    pub host: Bytes,
}

/// A function as it is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Whose it is and what it is called.
    pub key: FunctionKey,
    /// Whether requests are served. A disabled function is placed nowhere.
    pub enabled: bool,
    /// Nodes that should have its models.
    pub replicas: u32,
    /// Its models: the newest revision's and, while a change rolls out, the one before.
    pub models: Vec<Model>,
    /// Memory of one GPU that a run needs.
    pub gpu: Bytes,
    /// What all its requests together are expected to need. Its replicas share it.
    pub load: GpuLoad,
    /// Whether it ever answered a request. What did not may move for its group's sake.
    pub ran: bool,
    /// Whether its copy has what no other has: the state of sequences. It goes only from where it must, and
    /// as soon as another is placed: two that serve would each have state of their own.
    pub keeps_state: bool,
}

/// Data that two functions pass to each other when a workflow runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// Who makes it.
    pub from: FunctionKey,
    /// Who takes it.
    pub to: FunctionKey,
    /// How much, in one run: as measured, or as declared.
    pub bytes: Bytes,
    /// Whether it lies on the workflow's critical path.
    pub is_critical: bool,
}

/// A worker machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its name.
    pub name: NodeName,
    /// What may be placed there.
    pub state: NodeState,
    /// Host memory for models.
    pub host: Bytes,
    /// Memory of its largest GPU.
    pub gpu: Bytes,
    /// Its GPUs.
    pub gpus: u32,
    /// What its GPUs were seen to do, all together.
    pub busy: GpuLoad,
}

/// How far a placement is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// Every model of the function is in the node's host memory.
    Ready,
    /// On its way, or nothing was heard of it yet.
    Preparing,
    /// The node could not.
    Failed,
}

/// A function that is placed on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Which.
    pub function: FunctionKey,
    /// Where.
    pub node: NodeName,
    /// How far.
    pub phase: Phase,
}

/// Everything a plan depends on. Keys and names are unique; of a placement that is given twice the
/// better one counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct View {
    /// All functions.
    pub functions: Vec<Function>,
    /// All nodes.
    pub nodes: Vec<Node>,
    /// All placements.
    pub placements: Vec<Placement>,
    /// What workflows pass. Of two functions there may be several: they add up.
    pub flows: Vec<Flow>,
}

/// A change to one placement.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Step {
    /// Have the function's models on the node.
    Place {
        /// Which.
        function: FunctionKey,
        /// Where.
        node: NodeName,
    },
    /// Have them there no more.
    Unplace {
        /// Which.
        function: FunctionKey,
        /// Where.
        node: NodeName,
    },
}

/// What to do next.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// In the order of their urgency.
    pub steps: Vec<Step>,
    /// Functions with fewer copies than they should have, and no step that helps.
    pub unplaced: Vec<Unplaced>,
    /// Whether steps were left out. Then `unplaced` may lack some, too.
    pub more: bool,
}

/// A function that cannot have all its copies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unplaced {
    /// Which.
    pub function: FunctionKey,
    /// Copies that are placed on nodes that may keep them.
    pub copies: u32,
    /// Copies that are missing.
    pub missing: u32,
    /// What keeps the next one from being placed.
    pub why: Why,
}

/// Why a copy cannot be placed. Prints what to do about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Why {
    /// No node takes anything.
    #[error("no node takes functions: start a worker, or uncordon one")]
    NoNode,
    /// Every node that takes functions has a copy already, or had one and failed.
    #[error("{nodes} nodes take functions and each has its copy: add a node, or ask for fewer replicas")]
    TooFewNodes {
        /// Nodes that take functions.
        nodes: u32,
    },
    /// No GPU is large enough.
    #[error(
        "a run needs {needs} of GPU memory and the largest GPU has {largest}: add a node with a larger one"
    )]
    GpuMemory {
        /// What a run needs.
        needs: Bytes,
        /// What the largest GPU has.
        largest: Bytes,
    },
    /// Every node that could take it has as many functions as a node may have.
    #[error(
        "{nodes} nodes take functions and each has the most that a node may have ({max}): add a node, or remove functions"
    )]
    NodesFull {
        /// Nodes that take functions.
        nodes: u32,
        /// The most functions of a node.
        max: usize,
    },
    /// No node has room for its models.
    #[error(
        "its models need {needs} of host memory and no node has more than {free} left: add a node, give workers more (--host-memory), or remove functions"
    )]
    HostMemory {
        /// What its models need, where none of them is.
        needs: Bytes,
        /// The most that a node has left.
        free: Bytes,
    },
    /// Nodes tried and failed, and more are not tried.
    #[error("{nodes} nodes could not prepare it: see what they report")]
    Failing {
        /// Nodes that failed.
        nodes: u32,
    },
}
