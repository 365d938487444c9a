//! The answer to a command: its effect, or the reason for a refusal.

use millrace_types::limits::REFUSAL_BYTES_MAX;
use millrace_types::{Bytes, ClusterId, Digest, Epoch, FunctionKey, FunctionName, NodeName, Reason};
use serde::{Deserialize, Serialize};

use crate::record::{ControllerId, ModelKind, SchedulingState};

/// The end of a shortened text.
const ELLIPSIS: &str = "…";

/// The answer of [`crate::State::apply`].
pub type CommandOutcome = Result<CommandEffect, CommandRefusal>;

/// The effect of a command. `version` is the state's version after the command, and the resource
/// version of the changed resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandEffect {
    /// The command created a resource.
    Created {
        /// The resource version.
        version: u64,
    },
    /// The command changed a resource.
    Changed {
        /// The resource version.
        version: u64,
    },
    /// The resource already had the requested contents.
    Unchanged,
    /// The command deleted a resource.
    Deleted {
        /// The state's version.
        version: u64,
    },
    /// The node is registered.
    Registered {
        /// The new epoch, never assigned before.
        epoch: Epoch,
    },
    /// The node was registered already: the same process asked a second controller.
    AlreadyRegistered {
        /// The node's present epoch.
        epoch: Epoch,
    },
    /// The checkpoint is merged.
    Synced {
        /// The number of the batch, which acknowledges the batch to the worker.
        seq: u64,
    },
    /// The checkpoint was merged before, and is acknowledged again.
    SyncRepeated {
        /// The number of the last merged batch.
        last: u64,
    },
    /// The checkpoint does not follow its predecessor: the worker has to send a full sync, with higher
    /// numbers.
    ResyncWanted {
        /// The number of the last merged batch.
        last: u64,
    },
}

impl CommandEffect {
    /// Whether the command changed the state.
    #[must_use]
    pub fn changed(self) -> bool {
        !matches!(
            self,
            Self::Unchanged
                | Self::AlreadyRegistered { .. }
                | Self::SyncRepeated { .. }
                | Self::ResyncWanted { .. }
        )
    }
}

/// The reason why a command changed nothing. Each message contains a next step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum CommandRefusal {
    /// No [`crate::StateCommand::InitCluster`] has been applied yet.
    #[error("the cluster is not initialized yet: try again")]
    NotInitialized,
    /// The cluster already has another name.
    #[error("this is cluster {actual}, not {asked}: connect to the right one, or use another data directory")]
    OtherCluster {
        /// The cluster's name.
        actual: ClusterId,
        /// The name in the command.
        asked: ClusterId,
    },
    /// The spec is out of range.
    #[error("{problem}")]
    InvalidSpec {
        /// The fault in the spec, and the correction.
        problem: String,
    },
    /// The function does not exist.
    #[error("no function {key}: list them with 'millrace get functions'")]
    FunctionNotFound {
        /// The requested name.
        key: FunctionKey,
    },
    /// The workflow does not exist.
    #[error("no workflow {key}: list them with 'millrace get workflows'")]
    WorkflowNotFound {
        /// The requested name.
        key: FunctionKey,
    },
    /// The name is in use: functions and workflows share a set of names.
    #[error("{key} is a {by} already: choose another name, or delete the {by} first")]
    NameTaken {
        key: FunctionKey,
        /// The kind of model that has the name.
        by: ModelKind,
    },
    /// Workflows run the function or workflow that the command would delete.
    #[error("{key} is run by {}: change or delete these workflows first", users(by, *more))]
    InUse {
        key: FunctionKey,
        /// Workflows of the same tenant that run the model, at most
        /// [`USERS_NAMED_MAX`](crate::USERS_NAMED_MAX).
        by: Vec<FunctionName>,
        /// Number of further workflows that run the model.
        more: u64,
    },
    /// A workflow could not run the function or workflow after the change.
    #[error(
        "workflow {workflow} runs {key}, directly or through other workflows, and could not run the changed {key}: {problem}; apply the change under another name, and let the workflow run that name"
    )]
    BreaksWorkflow {
        /// The function or workflow that the command changes.
        key: FunctionKey,
        /// The workflow that could no longer run.
        workflow: FunctionKey,
        /// The edge of the workflow that would no longer fit, and the reason.
        problem: String,
    },
    /// The resource has changed since the caller's read.
    #[error(
        "{key} is at resource version {actual}, not {expected} (0: absent): read it again and redo the change"
    )]
    Conflict {
        key: FunctionKey,
        /// The version that the caller read.
        expected: u64,
        /// The present version; 0 if the resource does not exist.
        actual: u64,
    },
    /// The policy has changed since the caller's read.
    #[error(
        "the policy is at resource version {actual}, not {expected} (0: never set): read it again and redo the change"
    )]
    PolicyConflict {
        /// The version that the caller read.
        expected: u64,
        /// The present version.
        actual: u64,
    },
    /// The operation does not exist, or was already forgotten.
    #[error("no operation {id}: list them with 'millrace get operations'")]
    OperationNotFound { id: u64 },
    /// The operation ends by itself, and cannot be ended by a command.
    #[error("operation {id} ends by itself: wait for it with 'millrace operation wait {id}'")]
    OperationGoesOn { id: u64 },
    /// The model was never uploaded, or was collected since.
    #[error("no artifact {digest}: upload the model first")]
    ArtifactNotFound { digest: Digest },
    /// A revision refers to the artifact, or its owner may be about to.
    #[error("artifact {digest} is in use")]
    ArtifactInUse { digest: Digest },
    /// Two files with the same digest have different sizes.
    #[error("artifact {digest} has {actual} bytes, not {claimed}: one of the two files is damaged")]
    ArtifactDiffers {
        digest: Digest,
        /// Bytes of the stored file.
        actual: u64,
        /// Bytes of the file in the command.
        claimed: u64,
    },
    /// No GPU of the cluster has enough memory for the model.
    #[error(
        "{key} needs {needed} of GPU memory and the largest GPU here has {largest}: use a smaller model, or add a worker with larger GPUs"
    )]
    ModelTooLarge {
        key: FunctionKey,
        /// GPU memory that the function needs.
        needed: Bytes,
        /// Memory of the largest GPU.
        largest: Bytes,
    },
    /// The name belongs to another live process.
    #[error("a live worker is named {name} already: give this one another name, or stop the other")]
    NodeNameTaken { name: NodeName },
    /// The node does not exist.
    #[error("no node {name}: list them with 'millrace get nodes'")]
    NodeNotFound {
        /// The requested name.
        name: NodeName,
    },
    /// The node is lost.
    #[error("node {name} is lost: wait until it is back, or choose another")]
    NodeIsLost { name: NodeName },
    /// The node is live, and only a lost node can be removed.
    #[error("node {name} is live: stop its worker and wait until it is lost, then remove it")]
    NodeIsLive { name: NodeName },
    /// The node accepts no functions.
    #[error("node {name} is {scheduling}: uncordon it first, or choose another")]
    NodeUnschedulable {
        name: NodeName,
        /// The operator's scheduling state.
        scheduling: SchedulingState,
    },
    /// A node cannot have these slices.
    #[error("the slices of node {node} are refused: {problem}")]
    SlicesRefused {
        node: NodeName,
        /// The fault, and the correction.
        problem: String,
    },
    /// The checkpoint belongs to a registration that has ended.
    #[error("epoch {epoch} of node {name} is over: register again, then send everything")]
    Fenced {
        name: NodeName,
        /// The epoch in the checkpoint.
        epoch: Epoch,
        /// The present epoch; `None` while the node is lost or unknown.
        current: Option<Epoch>,
    },
    /// The checkpoint is out of range.
    #[error("the checkpoint of node {name} is out of range: {problem}")]
    InvalidCheckpoint {
        name: NodeName,
        /// The fault in the checkpoint.
        problem: String,
    },
    /// Too few controllers hold the model's file.
    #[error(
        "artifact {digest} is held by {held} controllers and needs {needed}: the file is being copied to {}, try again",
        list(missing)
    )]
    ArtifactNotHeld {
        digest: Digest,
        /// Number of voters that hold the file.
        held: u32,
        /// Number of voters that form a majority.
        needed: u32,
        /// The voters that do not hold the file.
        missing: Vec<ControllerId>,
    },
    /// No other controller holds the file.
    #[error(
        "{holder} is the last to hold artifact {digest}: copy it to another first, or remove the artifact"
    )]
    LastHolder { digest: Digest, holder: ControllerId },
    /// A named bound of the state is reached.
    #[error("the cluster is at its limit of {limit} {what}: {}", next_step(what))]
    Full {
        /// The kind of records that reached the bound.
        what: String,
        /// The bound.
        limit: u64,
    },
    /// A bound on the bytes of the state is reached.
    #[error(
        "the replicated state of {of} would take {bytes} bytes, over the limit of {limit}: delete functions or workflows first"
    )]
    OutOfBytes {
        /// The owner of the full part of the state: the cluster, a tenant or all tenants.
        of: String,
        /// Bytes that this part would take.
        bytes: u64,
        /// The bound.
        limit: u64,
    },
    /// The maximum number of changes of the controller group is under way.
    #[error(
        "{limit} changes of the group are under way: wait for some to end, see 'millrace get operations'"
    )]
    ChangesUnderWay {
        /// The bound.
        limit: u64,
    },
    /// The client has already sent a write with a higher number.
    #[error("idempotency key {seq} is older than the client's last, {last}: number writes upward")]
    KeyTooOld {
        /// The number in this write.
        seq: u64,
        /// The last number seen.
        last: u64,
    },
    /// The idempotency key was used for another command.
    #[error("idempotency key {seq} was used for another write: use a new one for each")]
    KeyReused {
        /// The number in this write.
        seq: u64,
    },
}

fn list(controllers: &[ControllerId]) -> String {
    let names: Vec<_> = controllers.iter().map(|controller| controller.to_string()).collect();
    names.join(", ")
}

fn users(named: &[FunctionName], more: u64) -> String {
    let mut text = if named.len() == 1 { "workflow ".to_owned() } else { "workflows ".to_owned() };
    text += &named.iter().map(FunctionName::as_str).collect::<Vec<_>>().join(", ");
    if more > 0 {
        text += &format!(" and {more} more");
    }
    text
}

/// The kind of records of the bound on running profiles.
pub(crate) const RUNNING_PROFILES: &str = "running profiles";

/// Returns the way to room for another record of a kind.
fn next_step(what: &str) -> &'static str {
    if what == RUNNING_PROFILES { "wait until one ends, or cancel one" } else { "delete some first" }
}

impl CommandRefusal {
    /// Refuses a command because a named bound is reached.
    pub(crate) fn full(what: &str, limit: usize) -> Self {
        Self::Full { what: what.to_owned(), limit: limit as u64 }
    }

    /// Refuses a command because a bound on bytes is reached.
    pub(crate) fn out_of_bytes(of: &str, bytes: u64, limit: usize) -> Self {
        Self::OutOfBytes { of: of.to_owned(), bytes, limit: limit as u64 }
    }

    /// Returns the refusal with at most [`REFUSAL_BYTES_MAX`] of its reason: sessions keep
    /// refusals, and a reason may name every tensor of a model.
    #[must_use]
    pub fn shortened(mut self) -> Self {
        if let Self::InvalidSpec { problem }
        | Self::BreaksWorkflow { problem, .. }
        | Self::SlicesRefused { problem, .. }
        | Self::InvalidCheckpoint { problem, .. } = &mut self
            && problem.len() > REFUSAL_BYTES_MAX
        {
            problem.truncate(problem.floor_char_boundary(REFUSAL_BYTES_MAX - ELLIPSIS.len()));
            problem.push_str(ELLIPSIS);
        }
        self
    }

    /// Returns the stable reason that interfaces report.
    #[must_use]
    pub const fn reason(&self) -> Reason {
        match self {
            Self::NotInitialized => Reason::NoLeader,
            Self::OtherCluster { .. } => Reason::PeerMismatch,
            Self::InvalidSpec { .. } | Self::BreaksWorkflow { .. } => Reason::InvalidSpec,
            Self::FunctionNotFound { .. } => Reason::FunctionNotFound,
            Self::WorkflowNotFound { .. } => Reason::WorkflowNotFound,
            Self::NameTaken { .. } => Reason::NameTaken,
            Self::InUse { .. } => Reason::InUse,
            Self::Conflict { .. }
            | Self::PolicyConflict { .. }
            | Self::ArtifactInUse { .. }
            | Self::LastHolder { .. } => Reason::Conflict,
            Self::OperationNotFound { .. } => Reason::OperationNotFound,
            Self::OperationGoesOn { .. } => Reason::OperationState,
            Self::ArtifactNotFound { .. } => Reason::ArtifactNotFound,
            Self::SlicesRefused { .. } => Reason::Conflict,
            Self::ArtifactDiffers { .. } => Reason::DigestMismatch,
            Self::ModelTooLarge { .. } => Reason::ModelTooLarge,
            Self::NodeNameTaken { .. } => Reason::NodeNameTaken,
            Self::NodeNotFound { .. } => Reason::NodeNotFound,
            Self::NodeIsLost { .. } | Self::NodeIsLive { .. } | Self::NodeUnschedulable { .. } => {
                Reason::NodeState
            }
            Self::Fenced { .. } => Reason::Fenced,
            Self::ArtifactNotHeld { .. } => Reason::ArtifactNotHeld,
            Self::Full { .. } | Self::OutOfBytes { .. } => Reason::StateFull,
            Self::ChangesUnderWay { .. } => Reason::QueueFull,
            Self::KeyTooOld { .. } | Self::KeyReused { .. } | Self::InvalidCheckpoint { .. } => {
                Reason::MalformedRequest
            }
        }
    }
}
