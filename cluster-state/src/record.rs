//! The stored form of functions, workflows, artifacts, nodes and tenants.

use std::fmt;
use std::sync::{Arc, OnceLock};

use imbl::OrdSet;
use millrace_types::profile::GpuProfile;
use millrace_types::workflow::{Signature, SignatureRef};
use millrace_types::{
    Alphas, Bytes, ClusterId, Digest, Dim, Epoch, FunctionKey, FunctionSpec, GpuIndex, NodeName, NodeState,
    PolicySpec, Quota, Revision, Runtime, SliceId, TenantName, TensorSpec, Terms, WorkflowSpec,
};
use serde::{Deserialize, Serialize};

use crate::caller::CallerName;
use crate::table::encoded_len;
use crate::time::UnixMillis;

/// Number of a function's newest revisions that workers prepare: see [`FunctionRecord::served`].
pub const REVISIONS_SERVED: usize = 2;

/// A member of the controller group: its Raft node id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ControllerId(pub u64);

impl ControllerId {
    /// Stands for the object store that the controllers share, among an artifact's holders. No
    /// controller has this number, because controllers are numbered from 1.
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

/// The identity of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterRecord {
    /// A name that never changes.
    pub id: ClusterId,
    pub created_at: UnixMillis,
}

/// The properties of a model file that listings show and that admission reads, so that neither needs the
/// file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSummary {
    /// Bytes of the weights in device memory.
    pub weights: Bytes,
    /// Number of weights.
    pub parameters: u64,
    /// Launches into which the model is cut; 0 for a program.
    pub launches: u32,
    pub inputs: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
}

impl ModelSummary {
    /// Returns a copy of the inputs and outputs.
    #[must_use]
    pub fn signature(&self) -> Signature {
        Signature { inputs: self.inputs.clone(), outputs: self.outputs.clone() }
    }

    /// Returns the inputs and outputs by reference.
    #[must_use]
    pub fn ports(&self) -> SignatureRef<'_> {
        SignatureRef { inputs: &self.inputs, outputs: &self.outputs }
    }

    /// Returns the runtime of the model's functions: only an ONNX model has launches.
    #[must_use]
    pub fn runtime(&self) -> Runtime {
        if self.launches == 0 { Runtime::Process } else { Runtime::Onnx }
    }

    /// Returns an input or output whose first dimension is fixed. Requests for a model with such a
    /// tensor cannot share a batch.
    #[must_use]
    pub fn unbatchable(&self) -> Option<&TensorSpec> {
        let free = |tensor: &TensorSpec| matches!(tensor.shape.first(), Some(Dim::Symbol(_)));
        self.inputs.iter().chain(&self.outputs).find(|tensor| !free(tensor))
    }
}

/// A stored model file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Artifact {
    /// The content address.
    pub digest: Digest,
    pub bytes: Bytes,
    pub model: ModelSummary,
    /// Controllers that hold the file durably, and [`ControllerId::OBJECT_STORE`] if the object
    /// store holds it.
    #[serde(deserialize_with = "crate::packed::set")]
    pub holders: OrdSet<ControllerId>,
    /// Number of revisions that refer to the artifact.
    pub uses: u64,
    /// Time of the last upload, reference or release.
    pub touched_at: UnixMillis,
    /// The caller that uploaded the file first.
    pub created_by: CallerName,
    /// The measured speed by type of GPU, each type once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub profiles: Vec<GpuProfile>,
}

impl Artifact {
    /// Whether the controllers' object store holds the file. Such a file survives the loss of any
    /// controllers.
    #[must_use]
    pub fn in_store(&self) -> bool {
        self.holders.contains(&ControllerId::OBJECT_STORE)
    }
}

/// A function with its stored revisions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionRecord {
    /// The tenant and the name.
    pub key: FunctionKey,
    /// The state's version at the last change of the function.
    pub resource_version: u64,
    /// Whether the function serves requests.
    pub enabled: bool,
    /// The newest revisions, oldest first; never empty.
    pub revisions: Vec<Arc<RevisionRecord>>,
    pub created_at: UnixMillis,
    pub updated_at: UnixMillis,
    /// The caller that made the last change.
    pub updated_by: CallerName,
    /// Requests billed to this name before the function was created, by deleted functions of the
    /// same name.
    #[serde(default)]
    pub requests_before: u64,
}

/// The bytes of an encoded record, once they are counted. Equal to every other count, because the
/// count follows from the record. A clone counts again, because the clone may be changed.
#[derive(Debug, Default)]
pub(crate) struct CountedLen(OnceLock<u64>);

impl Clone for CountedLen {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for CountedLen {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// An immutable version of a function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RevisionRecord {
    /// The revision number, counted from 1 and never reused for other content.
    pub number: Revision,
    /// The spec that the owner applied.
    pub spec: FunctionSpec,
    /// The content address of the model.
    pub digest: Digest,
    pub created_at: UnixMillis,
    pub created_by: CallerName,
    /// Not part of the record: see [`Self::encoded_len`].
    #[serde(skip)]
    pub(crate) encoded_len: CountedLen,
}

impl FunctionRecord {
    /// Returns the newest revision.
    #[must_use]
    pub fn latest(&self) -> &Arc<RevisionRecord> {
        self.revisions.last().expect("a function is made with its first revision and keeps the newest")
    }

    /// Returns the newest revision's number, which grows with each accepted spec.
    #[must_use]
    pub fn generation(&self) -> Revision {
        self.latest().number
    }

    /// Returns the revisions that workers prepare, oldest first: the newest and its predecessor. The
    /// predecessor serves while a change rolls out, and for clients that name that revision.
    #[must_use]
    pub fn served(&self) -> &[Arc<RevisionRecord>] {
        let from = self.revisions.len().saturating_sub(REVISIONS_SERVED);
        &self.revisions[from..]
    }
}

impl RevisionRecord {
    /// Returns the bytes of the encoded record. They are counted once, because each change of a
    /// function counts all revisions of the function.
    pub(crate) fn encoded_len(&self) -> u64 {
        *self.encoded_len.0.get_or_init(|| encoded_len(self))
    }

    /// Returns the GPU memory of a run: the requested amount, and at least the weights.
    #[must_use]
    pub fn gpu_memory(&self, model: &ModelSummary) -> Bytes {
        self.spec.resources.gpu_memory.unwrap_or(Bytes::ZERO).max(model.weights)
    }
}

/// The kind of resource that a model's name refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ModelKind {
    /// A published model.
    Function,
    /// A graph of functions.
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

/// A workflow (D01). The state keeps only the newest spec.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WorkflowRecord {
    /// The tenant and the name.
    pub key: FunctionKey,
    /// The state's version when the owner last changed the workflow.
    pub resource_version: u64,
    /// Number of accepted specs, counted from 1. The count continues if a deleted name returns.
    pub generation: Revision,
    /// The spec that the owner applied.
    pub spec: WorkflowSpec,
    /// Inputs and outputs, checked against the models that the workflow runs. Inputs and outputs change with
    /// those models, while the workflow's own version and dates stay.
    pub signature: Signature,
    /// Depth of nested workflows; 0 if the workflow runs functions alone.
    pub nesting: u32,
    pub created_at: UnixMillis,
    /// Time of the owner's last change.
    pub updated_at: UnixMillis,
    /// The caller that made the last change.
    pub updated_by: CallerName,
}

/// A GPU of a node, as admission sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeGpu {
    /// The GPU's position on the node.
    pub index: GpuIndex,
    /// The product name.
    pub gpu_type: String,
    /// Bytes of GPU memory.
    pub memory: Bytes,
}

/// Whether the cluster believes a node alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum NodeStatus {
    /// The node is registered, and not known to be gone.
    Live,
    /// The node is gone: its epoch has ended.
    Lost,
}

/// Whether an operator lets a node accept functions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SchedulingState {
    /// The node accepts functions.
    #[default]
    Schedulable,
    /// The node accepts no more functions.
    Cordoned,
    /// The node accepts no more functions, and its functions move to other nodes.
    Draining,
}

impl fmt::Display for SchedulingState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Schedulable => "schedulable",
            Self::Cordoned => "cordoned",
            Self::Draining => "draining",
        })
    }
}

/// The reason for placing a function on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum PlacementReason {
    /// The function has fewer replicas than its owner asked for.
    MissingReplica,
    /// A node with a replica was lost.
    NodeLost,
    /// A node with a replica is draining.
    Drain,
    /// The function is better off on this node.
    Rebalance,
}

/// The assignment of a function's model to a node, whose host tier has to hold the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementRecord {
    pub function: FunctionKey,
    pub node: NodeName,
    pub reason: PlacementReason,
    /// The state's version at the placement, or at the last change of its slices.
    pub resource_version: u64,
    pub placed_at: UnixMillis,
    /// The function's slices of the node's GPUs, by id.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub slices: Vec<SliceRecord>,
}

/// A slice of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SliceRecord {
    /// A number that no other slice of the cluster ever has.
    pub id: SliceId,
    pub gpu: GpuIndex,
    pub terms: Terms,
}

/// A worker machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeRecord {
    pub name: NodeName,
    /// The number of the latest registration.
    pub epoch: Epoch,
    /// Whether the latest registration still holds.
    pub status: NodeStatus,
    /// The operator's scheduling state, which outlives registrations.
    #[serde(default)]
    pub scheduling: SchedulingState,
    /// The name of the process that registered, to tell it from another process of the same node
    /// name.
    pub instance: String,
    /// The address of the node's own service.
    pub address: String,
    pub gpus: Vec<NodeGpu>,
    /// The name of the topology.
    pub topology: String,
    /// Bytes of host memory.
    pub host_memory: Bytes,
    /// The alphas with which the node begins: the alphas of its last registration or, without any,
    /// those of the node that was lost last when this node took over a function of a lost node.
    #[serde(default, skip_serializing_if = "Alphas::is_empty")]
    pub alphas: Alphas,
    /// The state's version at the last change of the node.
    pub resource_version: u64,
    /// Time of the last registration or loss.
    pub changed_at: UnixMillis,
}

impl NodeRecord {
    /// Whether the node is registered and accepts functions.
    #[must_use]
    pub fn takes_functions(&self) -> bool {
        self.state() == NodeState::Schedulable
    }

    /// Returns the node's state for placement.
    #[must_use]
    pub fn state(&self) -> NodeState {
        match (self.status, self.scheduling) {
            (NodeStatus::Lost, _) => NodeState::Lost,
            (NodeStatus::Live, SchedulingState::Schedulable) => NodeState::Schedulable,
            (NodeStatus::Live, SchedulingState::Cordoned) => NodeState::Cordoned,
            (NodeStatus::Live, SchedulingState::Draining) => NodeState::Draining,
        }
    }

    /// Returns the memory of the largest GPU; zero if the node has no GPU.
    #[must_use]
    pub fn largest_gpu(&self) -> Bytes {
        self.gpus.iter().map(|gpu| gpu.memory).max().unwrap_or(Bytes::ZERO)
    }
}

/// A tenant that has caps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantRecord {
    pub name: TenantName,
    /// The caps on the tenant's resources.
    pub quota: Quota,
    /// The state's version at the last change.
    pub resource_version: u64,
    /// Time of the last change.
    pub changed_at: UnixMillis,
    /// The caller that made the last change.
    pub changed_by: CallerName,
}

/// A policy for scheduling on nodes, set by an operator.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyRecord {
    /// The parts that are set. Each worker keeps its start options for the other parts.
    pub spec: PolicySpec,
    /// Number of changes, counted from 1.
    pub generation: u64,
    /// The state's version at the change.
    pub resource_version: u64,
    /// Time of the change.
    pub changed_at: UnixMillis,
    /// The caller that made the change.
    pub changed_by: CallerName,
}
