//! Functions, workflows, artifacts, nodes and tenants as the state keeps them.

use std::fmt;
use std::sync::Arc;

use imbl::OrdSet;
use millrace_types::workflow::{Ports, Signature};
use millrace_types::{
    Bytes, ClusterId, Digest, Dim, Epoch, FunctionKey, FunctionSpec, GpuIndex, NodeName, NodeState,
    PolicySpec, Quota, Revision, Runtime, TenantName, TensorSpec, WorkflowSpec,
};
use serde::{Deserialize, Serialize};

use crate::command::{Caller, UnixMillis};

/// A member of the controller group: its Raft node id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ControllerId(pub u64);

impl ControllerId {
    /// Stands among an artifact's holders for the object store that the controllers share. No
    /// controller has this number: they are counted from 1.
    pub const OBJECT_STORE: Self = Self(0);
}

impl fmt::Display for ControllerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OBJECT_STORE => f.pad("the object store"),
            Self(number) => write!(f, "controller {number}"),
        }
    }
}

/// The cluster itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cluster {
    /// Its name for ever.
    pub id: ClusterId,
    /// When it began.
    pub created_at: UnixMillis,
}

/// What a model file turned out to be: what a listing shows and admission checks, without the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSummary {
    /// Its weights in device memory.
    pub weights: Bytes,
    /// Its weights, counted.
    pub parameters: u64,
    /// The launches it is cut into; none of a program.
    pub launches: u32,
    /// What it takes.
    pub inputs: Vec<TensorSpec>,
    /// What it gives.
    pub outputs: Vec<TensorSpec>,
}

impl ModelSummary {
    /// What it takes and gives.
    #[must_use]
    pub fn signature(&self) -> Signature {
        Signature { inputs: self.inputs.clone(), outputs: self.outputs.clone() }
    }

    /// The same, as it lies here.
    #[must_use]
    pub fn ports(&self) -> Ports<'_> {
        Ports { inputs: &self.inputs, outputs: &self.outputs }
    }

    /// How a function of it is run: only a model has launches.
    #[must_use]
    pub fn runtime(&self) -> Runtime {
        if self.launches == 0 { Runtime::Process } else { Runtime::Onnx }
    }

    /// An input or output whose first dimension is not free: requests for such a model cannot run as
    /// one.
    #[must_use]
    pub fn unbatchable(&self) -> Option<&TensorSpec> {
        let free = |tensor: &TensorSpec| matches!(tensor.shape.first(), Some(Dim::Symbol(_)));
        self.inputs.iter().chain(&self.outputs).find(|tensor| !free(tensor))
    }
}

/// A model file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// Its content address.
    pub digest: Digest,
    /// Its size.
    pub bytes: Bytes,
    /// What it is.
    pub model: ModelSummary,
    /// The controllers that have it durably, and [`ControllerId::OBJECT_STORE`] if that has.
    #[serde(deserialize_with = "crate::packed::set")]
    pub holders: OrdSet<ControllerId>,
    /// Revisions that refer to it.
    pub uses: u64,
    /// When it was last uploaded, referred to or released.
    pub touched_at: UnixMillis,
    /// Who uploaded it first.
    pub created_by: Caller,
}

impl Artifact {
    /// Whether the controllers' object store has it: it is safe then, whichever of them are lost.
    #[must_use]
    pub fn in_store(&self) -> bool {
        self.holders.contains(&ControllerId::OBJECT_STORE)
    }
}

/// A function with the revisions that are kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Function {
    /// Whose it is and what it is called.
    pub key: FunctionKey,
    /// The state's version at its last change.
    pub resource_version: u64,
    /// Whether requests are served.
    pub enabled: bool,
    /// The newest revisions, oldest first. Never empty.
    pub revisions: Vec<Arc<RevisionRecord>>,
    /// When it was created.
    pub created_at: UnixMillis,
    /// When it last changed.
    pub updated_at: UnixMillis,
    /// Who made the last change.
    pub updated_by: Caller,
    /// Requests that its name had been billed when it was created, of deleted ones that had it.
    #[serde(default)]
    pub requests_before: u64,
}

/// One immutable version of a function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RevisionRecord {
    /// Its number, counted from 1 and never used for other content.
    pub number: Revision,
    /// What its owner asked for.
    pub spec: FunctionSpec,
    /// Its model.
    pub digest: Digest,
    /// When it was made.
    pub created_at: UnixMillis,
    /// Who made it.
    pub created_by: Caller,
}

impl Function {
    /// The newest revision.
    #[must_use]
    pub fn latest(&self) -> &Arc<RevisionRecord> {
        self.revisions.last().expect("a function is made with its first revision and keeps the newest")
    }

    /// The number that grows with each accepted spec: the newest revision's.
    #[must_use]
    pub fn generation(&self) -> Revision {
        self.latest().number
    }

    /// The revisions that workers prepare, oldest first: the newest and, while a change rolls out
    /// and for clients that name it, the one before.
    #[must_use]
    pub fn served(&self) -> &[Arc<RevisionRecord>] {
        let from = self.revisions.len().saturating_sub(crate::REVISIONS_SERVED);
        &self.revisions[from..]
    }
}

impl RevisionRecord {
    /// GPU memory that a run needs: what its owner asked for, and at least its weights.
    #[must_use]
    pub fn gpu_memory(&self, model: &ModelSummary) -> Bytes {
        self.spec.resources.gpu_memory.unwrap_or(Bytes::ZERO).max(model.weights)
    }
}

/// What a model's name stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelKind {
    /// A published model.
    Function,
    /// A graph of them.
    Workflow,
}

impl fmt::Display for ModelKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Function => "function",
            Self::Workflow => "workflow",
        })
    }
}

/// A workflow (D01). Only its newest spec is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Workflow {
    /// Whose it is and what it is called.
    pub key: FunctionKey,
    /// The state's version when its owner last changed it.
    pub resource_version: u64,
    /// Counts accepted specs from 1, and goes on counting if the name returns.
    pub generation: Revision,
    /// What its owner asked for.
    pub spec: WorkflowSpec,
    /// What it takes and gives, checked against what it runs. Changes with that, while the workflow's
    /// own version and dates stay.
    pub signature: Signature,
    /// How deep workflows lie in it: 0 if it runs functions alone.
    pub nesting: u32,
    /// When it was created.
    pub created_at: UnixMillis,
    /// When its owner last changed it.
    pub updated_at: UnixMillis,
    /// Who made the last change.
    pub updated_by: Caller,
}

/// One GPU of a node, as far as admission cares.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeGpu {
    /// Its position on the node.
    pub index: GpuIndex,
    /// The product name.
    pub gpu_type: String,
    /// Its memory.
    pub memory: Bytes,
}

/// Whether a node is believed alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum NodeStatus {
    /// Registered, and not known to be gone.
    Live,
    /// Gone: its epoch is over.
    Lost,
}

/// What is wished of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Scheduling {
    /// Takes functions.
    #[default]
    Schedulable,
    /// Takes no more.
    Cordoned,
    /// Takes no more, and what it has moves elsewhere.
    Draining,
}

impl fmt::Display for Scheduling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Schedulable => "schedulable",
            Self::Cordoned => "cordoned",
            Self::Draining => "draining",
        })
    }
}

/// Why a function was placed on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PlacementReason {
    /// It has fewer replicas than its owner asked for.
    MissingReplica,
    /// A node with a replica was lost.
    NodeLost,
    /// A node with a replica is draining.
    Drain,
    /// It is better off here.
    Rebalance,
}

/// A function's model that a node is to hold in its host tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Which function.
    pub function: FunctionKey,
    /// Where.
    pub node: NodeName,
    /// Why there.
    pub reason: PlacementReason,
    /// The state's version when it was placed.
    pub resource_version: u64,
    /// When it was placed.
    pub placed_at: UnixMillis,
}

/// A worker machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its name.
    pub name: NodeName,
    /// The number of its latest registration.
    pub epoch: Epoch,
    /// Whether that still holds.
    pub status: NodeStatus,
    /// What is wished of it. Outlives its registrations.
    #[serde(default)]
    pub scheduling: Scheduling,
    /// Which process registered.
    pub instance: String,
    /// Where its own service listens.
    pub address: String,
    /// Its GPUs.
    pub gpus: Vec<NodeGpu>,
    /// Its topology's name.
    pub topology: String,
    /// Its host memory.
    pub host_memory: Bytes,
    /// The state's version at its last change.
    pub resource_version: u64,
    /// When it last registered or was lost.
    pub changed_at: UnixMillis,
}

impl Node {
    /// Whether it is registered and takes functions.
    #[must_use]
    pub fn takes_functions(&self) -> bool {
        self.state() == NodeState::Schedulable
    }

    /// What may be placed on it.
    #[must_use]
    pub fn state(&self) -> NodeState {
        match (self.status, self.scheduling) {
            (NodeStatus::Lost, _) => NodeState::Lost,
            (NodeStatus::Live, Scheduling::Schedulable) => NodeState::Schedulable,
            (NodeStatus::Live, Scheduling::Cordoned) => NodeState::Cordoned,
            (NodeStatus::Live, Scheduling::Draining) => NodeState::Draining,
        }
    }

    /// Memory of its largest GPU; nothing where it has none.
    #[must_use]
    pub fn largest_gpu(&self) -> Bytes {
        self.gpus.iter().map(|gpu| gpu.memory).max().unwrap_or(Bytes::ZERO)
    }
}

/// A tenant that has caps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tenant {
    /// Its name.
    pub name: TenantName,
    /// What it may use.
    pub quota: Quota,
    /// The state's version at the last change.
    pub resource_version: u64,
    /// When that was.
    pub changed_at: UnixMillis,
    /// Who made it.
    pub changed_by: Caller,
}

/// How nodes schedule, as somebody set it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// What is set; the rest is as each worker was started.
    pub spec: PolicySpec,
    /// Counts the changes, from 1.
    pub generation: u64,
    /// The state's version at the change.
    pub resource_version: u64,
    /// When that was.
    pub changed_at: UnixMillis,
    /// Who made it.
    pub changed_by: Caller,
}
