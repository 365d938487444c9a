//! What a command answers: what it did, or why it did nothing.

use std::time::Duration;

use millrace_types::limits::REFUSAL_BYTES_MAX;
use millrace_types::{Bytes, ClusterId, Digest, Epoch, FunctionKey, FunctionName, NodeName, Reason};
use serde::{Deserialize, Serialize};

use crate::command::UnixMillis;
use crate::record::{ControllerId, ModelKind, Scheduling};

/// Ends a text that was cut.
const ELLIPSIS: &str = "…";

/// What [`crate::State::apply`] returns.
pub type Outcome = Result<Applied, Refusal>;

/// What a command did. `version` is the state's version after it, which is the resource version of
/// what it changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Applied {
    /// Something new is there.
    Created {
        /// Its resource version.
        version: u64,
    },
    /// Something is different.
    Changed {
        /// Its resource version.
        version: u64,
    },
    /// Everything was so already.
    Unchanged,
    /// Something is gone.
    Deleted {
        /// The state's version.
        version: u64,
    },
    /// A node is in.
    Registered {
        /// Its epoch, never given before.
        epoch: Epoch,
    },
    /// A node was in already: the same process came to another controller.
    AlreadyRegistered {
        /// The epoch it has.
        epoch: Epoch,
    },
    /// A checkpoint is in.
    Synced {
        /// Its number: what the worker is told.
        seq: u64,
    },
    /// A checkpoint was in already, and is acknowledged again.
    SyncRepeated {
        /// The last that was taken.
        last: u64,
    },
    /// A checkpoint does not follow the last: a full sync is wanted, under higher numbers.
    ResyncWanted {
        /// The last that was taken.
        last: u64,
    },
}

/// Why a command did nothing. Each message says what to do about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// Before [`crate::Command::InitCluster`].
    #[error("the cluster is not initialized yet: try again")]
    NotInitialized,
    /// A second name for the cluster.
    #[error("this is cluster {actual}, not {asked}: connect to the right one, or use another data directory")]
    OtherCluster {
        /// Its name.
        actual: ClusterId,
        /// The name given.
        asked: ClusterId,
    },
    /// A spec out of range.
    #[error("{problem}")]
    InvalidSpec {
        /// What is wrong and what to write.
        problem: String,
    },
    /// No such function.
    #[error("no function {key}: list them with 'millrace get functions'")]
    FunctionNotFound {
        /// The name asked for.
        key: FunctionKey,
    },
    /// No such workflow.
    #[error("no workflow {key}: list them with 'millrace get workflows'")]
    WorkflowNotFound {
        /// The name asked for.
        key: FunctionKey,
    },
    /// Functions and workflows are models alike, under one set of names.
    #[error("{key} is a {by} already: choose another name, or delete the {by} first")]
    NameTaken {
        /// The name.
        key: FunctionKey,
        /// What has it.
        by: ModelKind,
    },
    /// Workflows run it.
    #[error("{key} is run by {}: change or delete what runs it first", users(by, *more))]
    InUse {
        /// Which function or workflow.
        key: FunctionKey,
        /// Workflows of the same tenant that run it, at most
        /// [`USERS_NAMED_MAX`](crate::USERS_NAMED_MAX).
        by: Vec<FunctionName>,
        /// How many more do.
        more: u64,
    },
    /// A change that a workflow could not run.
    #[error(
        "workflow {workflow} runs {key}, itself or through others, and could not run it so: {problem}; apply this under another name, and let the workflow run that"
    )]
    BreaksWorkflow {
        /// The function or workflow to be changed.
        key: FunctionKey,
        /// What would no longer run.
        workflow: FunctionKey,
        /// Which of its edges would no longer fit, and why.
        problem: String,
    },
    /// The resource changed since it was read.
    #[error(
        "{key} is at resource version {actual}, not {expected} (0: absent): read it again and redo the change"
    )]
    Conflict {
        /// Which function or workflow.
        key: FunctionKey,
        /// What the caller had seen.
        expected: u64,
        /// What it is now; 0 when it is absent.
        actual: u64,
    },
    /// The policy changed since it was read.
    #[error(
        "the policy is at resource version {actual}, not {expected} (0: nobody set any): read it again and redo the change"
    )]
    PolicyConflict {
        /// What the caller had seen.
        expected: u64,
        /// What it is now.
        actual: u64,
    },
    /// No such operation, or not any more.
    #[error("no operation {id}: list them with 'millrace get operations'")]
    OperationNotFound {
        /// Which.
        id: u64,
    },
    /// An operation that ends by itself.
    #[error("operation {id} ends by itself: wait for it with 'millrace operation wait {id}'")]
    OperationGoesOn {
        /// Which.
        id: u64,
    },
    /// The model was never uploaded, or was collected since.
    #[error("no artifact {digest}: upload the model first")]
    ArtifactNotFound {
        /// Which.
        digest: Digest,
    },
    /// A revision refers to it, or its owner may be about to.
    #[error("artifact {digest} is in use")]
    ArtifactInUse {
        /// Which.
        digest: Digest,
    },
    /// Two sizes for one digest.
    #[error("artifact {digest} has {actual} bytes, not {claimed}: one of the two files is damaged")]
    ArtifactDiffers {
        /// Which.
        digest: Digest,
        /// The size known.
        actual: u64,
        /// The size given.
        claimed: u64,
    },
    /// No GPU of the cluster could ever hold it.
    #[error(
        "{key} needs {needed} of GPU memory and the largest GPU here has {largest}: use a smaller model, or add a worker with larger GPUs"
    )]
    ModelTooLarge {
        /// Which function.
        key: FunctionKey,
        /// What it needs.
        needed: Bytes,
        /// What there is.
        largest: Bytes,
    },
    /// The name belongs to another process that lives.
    #[error("a live worker is named {name} already: give this one another name, or stop the other")]
    NodeNameTaken {
        /// The name.
        name: NodeName,
    },
    /// No such node.
    #[error("no node {name}: list them with 'millrace get nodes'")]
    NodeNotFound {
        /// The name asked for.
        name: NodeName,
    },
    /// The node is gone.
    #[error("node {name} is lost: wait until it is back, or choose another")]
    NodeIsLost {
        /// Which.
        name: NodeName,
    },
    /// The node is there.
    #[error("node {name} is live: stop its worker and wait until it is lost, then remove it")]
    NodeIsLive {
        /// Which.
        name: NodeName,
    },
    /// The node takes no functions.
    #[error("node {name} is {scheduling}: uncordon it first, or choose another")]
    NodeUnschedulable {
        /// Which.
        name: NodeName,
        /// What is wished of it.
        scheduling: Scheduling,
    },
    /// A checkpoint of a registration that is over.
    #[error("epoch {epoch} of node {name} is over: register again, then send everything")]
    Fenced {
        /// Which node.
        name: NodeName,
        /// The epoch given.
        epoch: Epoch,
        /// The one that holds; `None` while the node is lost or unknown.
        current: Option<Epoch>,
    },
    /// A checkpoint out of range.
    #[error("the checkpoint of node {name} is out of range: {problem}")]
    InvalidCheckpoint {
        /// Which node.
        name: NodeName,
        /// What is wrong.
        problem: String,
    },
    /// Too few controllers hold the model's file.
    #[error(
        "artifact {digest} is held by {held} controllers and {needed} have to: it is being copied to {}, try again",
        list(missing)
    )]
    ArtifactNotHeld {
        /// Which.
        digest: Digest,
        /// The voters that hold it.
        held: u32,
        /// How many are a majority.
        needed: u32,
        /// The voters that do not.
        missing: Vec<ControllerId>,
    },
    /// Nobody else holds the file.
    #[error(
        "{holder} is the last to hold artifact {digest}: copy it to another first, or remove the artifact"
    )]
    LastHolder {
        /// Which.
        digest: Digest,
        /// Who.
        holder: ControllerId,
    },
    /// A named bound of the state is reached.
    #[error("the cluster holds its limit of {limit} {what}: delete some first")]
    Full {
        /// What there are too many of.
        what: String,
        /// The bound.
        limit: u64,
    },
    /// A bound on the bytes of the state is reached.
    #[error(
        "the replicated state of {of} would take {bytes} bytes, over the limit of {limit}: delete functions or workflows first"
    )]
    OutOfBytes {
        /// Whose part of the state is full.
        of: String,
        /// The bytes that it would take.
        bytes: u64,
        /// The bound.
        limit: u64,
    },
    /// As many changes of the group are under way as may be.
    #[error(
        "{limit} changes of the group are under way: wait for some to end, see 'millrace get operations'"
    )]
    ChangesUnderWay {
        /// The bound.
        limit: u64,
    },
    /// The client has moved on from this number.
    #[error("idempotency key {seq} is older than the client's last, {last}: number writes upward")]
    KeyTooOld {
        /// The number given.
        seq: u64,
        /// The last one seen.
        last: u64,
    },
    /// The same key came with another command.
    #[error("idempotency key {seq} was used for another write: use a new one for each")]
    KeyReused {
        /// The number given.
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

impl Refusal {
    /// Too many of something.
    pub(crate) fn full(what: &str, limit: usize) -> Self {
        Self::Full { what: what.to_owned(), limit: limit as u64 }
    }

    /// Too many bytes of something.
    pub(crate) fn out_of_bytes(of: &str, bytes: u64, limit: usize) -> Self {
        Self::OutOfBytes { of: of.to_owned(), bytes, limit: limit as u64 }
    }

    /// The same with at most [`REFUSAL_BYTES_MAX`] of its reason: sessions keep refusals, and a reason
    /// may name every tensor of a model.
    #[must_use]
    pub fn shortened(mut self) -> Self {
        if let Self::InvalidSpec { problem }
        | Self::BreaksWorkflow { problem, .. }
        | Self::InvalidCheckpoint { problem, .. } = &mut self
            && problem.len() > REFUSAL_BYTES_MAX
        {
            problem.truncate(problem.floor_char_boundary(REFUSAL_BYTES_MAX - ELLIPSIS.len()));
            problem.push_str(ELLIPSIS);
        }
        self
    }

    /// The stable reason that interfaces report.
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

impl UnixMillis {
    /// The time since `earlier`, or zero when that is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}
