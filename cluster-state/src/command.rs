//! The contents of the log: a [`StateCommand`], and the envelope in which every command travels.
//!
//! Encode these types with field names (MessagePack maps, not arrays). A later version may then add
//! a field with a default and still read an older log. Never rename a variant or field, and never
//! give one another meaning.

use millrace_types::profile::ProfilePoint;
use millrace_types::{
    Bytes, ClusterId, Digest, Epoch, FunctionKey, FunctionSpec, NodeName, PolicySpec, Quota, SyncBatch,
    TenantName, WorkflowSpec, policy::Setting,
};
use serde::{Deserialize, Serialize};

pub use crate::caller::{CallerName, IdempotencyKey};
use crate::operation_record::{OperationKind, OperationResult};
use crate::record::{ControllerId, ModelSummary, NodeGpu, PlacementReason, SchedulingState, SliceRecord};
use crate::rules::RulesVersion;
use crate::table::encoded_len;
pub use crate::time::UnixMillis;

/// A command with everything else on which its effect may depend.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// The leader's clock at the proposal of the command. Time never runs backwards in the state: the
    /// state's clock is the latest stamp so far.
    pub stamp: UnixMillis,
    /// The client that asked for the command.
    pub caller: CallerName,
    /// The idempotency key; set if the caller may repeat the command.
    #[serde(default)]
    pub idempotency: Option<IdempotencyKey>,
    pub command: StateCommand,
}

/// A change of the state. Each variant is implemented in its own file under `commands/`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum StateCommand {
    /// Names the cluster, once.
    InitCluster {
        /// The cluster's permanent name.
        cluster_id: ClusterId,
    },
    /// Creates a function, or creates its next revision if the spec or the model differs.
    ApplyFunction {
        /// The spec that the owner applies.
        spec: FunctionSpec,
        /// The model: an artifact that the state already knows.
        digest: Digest,
        /// The resource version at which the function has to be; otherwise the command is refused.
        /// `None` accepts any version.
        #[serde(default)]
        expected: Option<u64>,
        /// Controllers of which a majority has to hold the model's file; otherwise the command is
        /// refused. The leader stamps the voters here. An empty list requires no holders. A file in
        /// the object store needs no majority.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        voters: Vec<ControllerId>,
    },
    /// Removes a function with all its revisions.
    DeleteFunction {
        key: FunctionKey,
        /// The expected resource version, as in [`StateCommand::ApplyFunction`].
        #[serde(default)]
        expected: Option<u64>,
    },
    /// Starts or stops serving a function: the repository API's load and unload.
    SetFunctionEnabled {
        key: FunctionKey,
        /// Whether the function serves requests from now on.
        enabled: bool,
    },
    /// Records that a controller, or the object store, holds a model file durably.
    AddArtifact {
        /// The file's content address.
        digest: Digest,
        /// The size of the file.
        bytes: Bytes,
        /// The properties of the model in the file.
        model: ModelSummary,
        /// The controller or object store that holds the file.
        holder: ControllerId,
    },
    /// Forgets a model file that no revision uses.
    RemoveArtifact {
        digest: Digest,
        /// The time since which the artifact has to be unused; otherwise the command is refused.
        /// The owner of a file that was uploaded or used later may be about to refer to it.
        unused_since: UnixMillis,
    },
    /// Registers a worker and assigns an epoch.
    RegisterNode {
        /// The node's name, unique in the cluster.
        name: NodeName,
        /// A value that distinguishes two processes that claim the same name.
        instance: String,
        /// The address of the node's own service.
        address: String,
        gpus: Vec<NodeGpu>,
        /// The name of the topology.
        topology: String,
        /// Bytes of host memory.
        host_memory: Bytes,
        /// The highest epoch that the worker knows: its own earlier epoch, or an epoch in the name
        /// of data that it holds. A controller group that was rebuilt from nothing continues above
        /// this epoch, so that no [`DataId`](millrace_types::DataId) gets a second meaning.
        #[serde(default)]
        seen: Epoch,
    },
    /// Fences a lost worker: every later message with its epoch is ignored.
    NodeLost {
        name: NodeName,
        /// The registration that ended. The command leaves a newer registration alone.
        epoch: Epoch,
    },
    /// Merges a worker's checkpoint of its soft state.
    SyncNode { node: NodeName, batch: SyncBatch },
    /// Assigns a function's model to a node's host tier.
    Place { function: FunctionKey, node: NodeName, reason: PlacementReason },
    /// Removes the assignment of a function's model to a node's host tier.
    Unplace { function: FunctionKey, node: NodeName },
    /// Sets all slices of a node's GPUs.
    SetSlices {
        node: NodeName,
        /// The slices, in any order. Slices of the node that are not among them end.
        slices: Vec<NodeSlice>,
    },
    /// Sets whether a node accepts functions.
    SetNodeScheduling {
        name: NodeName,
        /// The new scheduling state, which outlives the node's registration.
        scheduling: SchedulingState,
    },
    /// Removes the record of a lost node.
    RemoveNode { name: NodeName },
    /// Records that a controller, or the object store, no longer holds a model file.
    RemoveArtifactHolder { digest: Digest, holder: ControllerId },
    /// Sets the caps on a tenant's functions.
    SetQuota {
        tenant: TenantName,
        /// All of the caps. A quota without caps removes the present caps.
        quota: Quota,
    },
    /// Creates a workflow, or changes the workflow if the spec differs.
    ApplyWorkflow {
        /// The spec that the owner applies.
        spec: WorkflowSpec,
        /// The expected resource version, as in [`StateCommand::ApplyFunction`].
        #[serde(default)]
        expected: Option<u64>,
    },
    /// Removes a workflow.
    DeleteWorkflow {
        key: FunctionKey,
        /// The expected resource version, as in [`StateCommand::ApplyFunction`].
        #[serde(default)]
        expected: Option<u64>,
    },
    /// Sets the scheduling policy of the nodes.
    SetPolicy {
        /// The whole policy. Each worker keeps its start options for the parts that are not set.
        spec: PolicySpec,
        /// The settings to change; the other parts keep their values at the time of the command. An
        /// empty list sets the whole policy.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        settings: Vec<Setting>,
        /// The expected resource version, as in [`StateCommand::ApplyFunction`]; 0 expects that no
        /// policy was ever set.
        #[serde(default)]
        expected: Option<u64>,
    },
    /// Records the begin of a long-running operation.
    BeginOperation { kind: OperationKind },
    /// Adds the result of a trial to the profile of an operation's model.
    RecordTrial {
        /// The id of the operation.
        operation: u64,
        /// The type of the GPU on which the trial ran.
        gpu_type: String,
        point: ProfilePoint,
    },
    /// Records the end of an operation.
    EndOperation { id: u64, end: OperationResult },
    /// Switches the rules by which the commands after this one are applied: see [`crate::rules`].
    SetClusterVersion {
        /// The version that follows the version in force.
        version: RulesVersion,
    },
}

/// A slice of a GPU, with its function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSlice {
    pub function: FunctionKey,
    pub slice: SliceRecord,
}

impl StateCommand {
    /// Returns the size of the encoded command, in bytes.
    #[must_use]
    pub fn encoded_len(&self) -> u64 {
        encoded_len(self)
    }

    /// Returns the name of the variant, without its fields.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::InitCluster { .. } => "InitCluster",
            Self::ApplyFunction { .. } => "ApplyFunction",
            Self::DeleteFunction { .. } => "DeleteFunction",
            Self::SetFunctionEnabled { .. } => "SetFunctionEnabled",
            Self::AddArtifact { .. } => "AddArtifact",
            Self::RemoveArtifact { .. } => "RemoveArtifact",
            Self::RegisterNode { .. } => "RegisterNode",
            Self::NodeLost { .. } => "NodeLost",
            Self::SyncNode { .. } => "SyncNode",
            Self::Place { .. } => "Place",
            Self::Unplace { .. } => "Unplace",
            Self::SetSlices { .. } => "SetSlices",
            Self::SetNodeScheduling { .. } => "SetNodeScheduling",
            Self::RemoveNode { .. } => "RemoveNode",
            Self::RemoveArtifactHolder { .. } => "RemoveArtifactHolder",
            Self::SetQuota { .. } => "SetQuota",
            Self::ApplyWorkflow { .. } => "ApplyWorkflow",
            Self::DeleteWorkflow { .. } => "DeleteWorkflow",
            Self::SetPolicy { .. } => "SetPolicy",
            Self::BeginOperation { .. } => "BeginOperation",
            Self::RecordTrial { .. } => "RecordTrial",
            Self::EndOperation { .. } => "EndOperation",
            Self::SetClusterVersion { .. } => "SetClusterVersion",
        }
    }

    /// Returns the digest of the command's canonical encoding, without the parts that the leader
    /// stamps: a repeated command may arrive through another leader.
    pub(crate) fn digest(&self) -> Digest {
        let mut asked = self.clone();
        if let Self::ApplyFunction { voters, .. } = &mut asked {
            voters.clear();
        }
        let bytes = rmp_serde::to_vec(&asked).expect("plain data with string or integer keys encodes");
        Digest::of(&bytes)
    }
}
