//! What is in the log: a [`Command`] and the envelope every command travels in.
//!
//! Encode these with field names (MessagePack maps, not arrays): a later version may then add a
//! field with a default and still read an older log. A variant or field is never renamed or given
//! another meaning.

use std::fmt;
use std::sync::Arc;

use millrace_types::{
    Bytes, ClusterId, Digest, Epoch, FunctionKey, FunctionSpec, NodeName, PolicySpec, Quota, SyncBatch,
    TenantName, WorkflowSpec, policy::Setting,
};
use serde::{Deserialize, Serialize};

use crate::operations::{End, Kind};
use crate::record::{ControllerId, ModelSummary, NodeGpu, PlacementReason, Scheduling};
use crate::rules::RulesVersion;

/// Wall-clock time as the leader saw it, in milliseconds since the Unix epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct UnixMillis(pub u64);

/// Who asked for a write.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Caller(pub Arc<str>);

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

/// Makes a repeated write harmless: the second time, the first answer is given again.
///
/// A client numbers its writes upward and has one in flight at a time; one that needs several in
/// flight uses several client ids.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct IdempotencyKey {
    /// The client's own name for itself, unique per [`Caller`].
    pub client: Arc<str>,
    /// The number of this write.
    pub seq: u64,
}

/// One command with all that applying it may depend on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Proposal {
    /// The leader's clock when it proposed this. Time never runs backwards in the state: what
    /// counts is the later of this and every stamp before it.
    pub stamp: UnixMillis,
    /// Who asked.
    pub caller: Caller,
    /// Set when the caller may repeat itself.
    #[serde(default)]
    pub idempotency: Option<IdempotencyKey>,
    /// What is asked.
    pub command: Command,
}

/// Every change there is. Each is carried out in its own file under `commands/`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Names the cluster, once.
    InitCluster {
        /// Its name for ever.
        cluster_id: ClusterId,
    },
    /// Creates a function, or makes its next revision when something differs.
    ApplyFunction {
        /// What its owner wants.
        spec: FunctionSpec,
        /// Its model, an artifact known already.
        digest: Digest,
        /// Refuses unless the function is at this resource version; `None` takes any.
        #[serde(default)]
        expected: Option<u64>,
        /// Refuses unless a majority of these hold the model's file: the voters, as the leader
        /// stamps them. Empty asks for nothing. A file that is in the object store needs no majority.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        voters: Vec<ControllerId>,
    },
    /// Removes a function with all its revisions.
    DeleteFunction {
        /// Which.
        key: FunctionKey,
        /// As in [`Command::ApplyFunction`].
        #[serde(default)]
        expected: Option<u64>,
    },
    /// Starts or stops serving a function: the repository API's load and unload.
    SetFunctionEnabled {
        /// Which.
        key: FunctionKey,
        /// Whether requests are served from now on.
        enabled: bool,
    },
    /// Records that a controller, or the object store, holds a model file durably.
    AddArtifact {
        /// The file's content address.
        digest: Digest,
        /// Its size.
        bytes: Bytes,
        /// What it turned out to be.
        model: ModelSummary,
        /// Who holds it.
        holder: ControllerId,
    },
    /// Forgets a model file that no revision uses.
    RemoveArtifact {
        /// Which.
        digest: Digest,
        /// Refuses when the artifact was uploaded or used after this: its owner may be about to
        /// refer to it.
        unused_since: UnixMillis,
    },
    /// Takes a worker in and gives it an epoch.
    RegisterNode {
        /// Its name, unique in the cluster.
        name: NodeName,
        /// Distinguishes two processes that claim one name.
        instance: String,
        /// Where its own service listens.
        address: String,
        /// Its GPUs.
        gpus: Vec<NodeGpu>,
        /// Its topology's name.
        topology: String,
        /// Its host memory.
        host_memory: Bytes,
        /// The highest epoch it knows of: its own before, or one in the name of data it holds. A
        /// controller group that was rebuilt from nothing goes on counting above it, so that no
        /// [`DataId`](millrace_types::DataId) comes to mean two things.
        #[serde(default)]
        seen: Epoch,
    },
    /// Fences a worker that is gone: what still carries its epoch is ignored.
    NodeLost {
        /// Which.
        name: NodeName,
        /// The registration that ended. Another is left alone.
        epoch: Epoch,
    },
    /// Takes a worker's checkpoint of its soft state.
    SyncNode {
        /// Whose.
        node: NodeName,
        /// What it says.
        batch: SyncBatch,
    },
    /// Wants a function's model in a node's host tier.
    Place {
        /// Which function.
        function: FunctionKey,
        /// Where.
        node: NodeName,
        /// Why there.
        reason: PlacementReason,
    },
    /// No longer wants it there.
    Unplace {
        /// Which function.
        function: FunctionKey,
        /// Where.
        node: NodeName,
    },
    /// Says whether a node takes functions.
    SetNodeScheduling {
        /// Which.
        name: NodeName,
        /// What is wished of it. Outlives its registration.
        scheduling: Scheduling,
    },
    /// Forgets a node that is lost.
    RemoveNode {
        /// Which.
        name: NodeName,
    },
    /// Records that a controller, or the object store, no longer holds a model file.
    RemoveArtifactHolder {
        /// Which file.
        digest: Digest,
        /// Who.
        holder: ControllerId,
    },
    /// Sets what a tenant's functions may use.
    SetQuota {
        /// Whose.
        tenant: TenantName,
        /// All of the caps; none takes those away that there are.
        quota: Quota,
    },
    /// Creates a workflow, or changes it when something differs.
    ApplyWorkflow {
        /// What its owner wants.
        spec: WorkflowSpec,
        /// As in [`Command::ApplyFunction`].
        #[serde(default)]
        expected: Option<u64>,
    },
    /// Removes a workflow.
    DeleteWorkflow {
        /// Which.
        key: FunctionKey,
        /// As in [`Command::ApplyFunction`].
        #[serde(default)]
        expected: Option<u64>,
    },
    /// Sets how nodes schedule.
    SetPolicy {
        /// All of it; what is not set is as each worker was started.
        spec: PolicySpec,
        /// Sets these alone, and leaves the rest as it is by then. Empty sets all.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        settings: Vec<Setting>,
        /// As in [`Command::ApplyFunction`]; 0 expects that nobody set any.
        #[serde(default)]
        expected: Option<u64>,
    },
    /// Notes that something has begun that takes its time.
    BeginOperation {
        /// What.
        kind: Kind,
    },
    /// Says how it ended.
    EndOperation {
        /// Which.
        id: u64,
        /// How.
        end: End,
    },
    /// Switches the rules by which the commands after this one are applied: see [`crate::rules`].
    SetClusterVersion {
        /// The version after the one in force.
        version: RulesVersion,
    },
}

impl Command {
    /// What it is called, without what it says.
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
            Self::SetNodeScheduling { .. } => "SetNodeScheduling",
            Self::RemoveNode { .. } => "RemoveNode",
            Self::RemoveArtifactHolder { .. } => "RemoveArtifactHolder",
            Self::SetQuota { .. } => "SetQuota",
            Self::ApplyWorkflow { .. } => "ApplyWorkflow",
            Self::DeleteWorkflow { .. } => "DeleteWorkflow",
            Self::SetPolicy { .. } => "SetPolicy",
            Self::BeginOperation { .. } => "BeginOperation",
            Self::EndOperation { .. } => "EndOperation",
            Self::SetClusterVersion { .. } => "SetClusterVersion",
        }
    }
}
