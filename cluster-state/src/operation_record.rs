//! The stored form of a long-running operation.

use millrace_types::{Digest, FunctionKey, NodeName};
use serde::{Deserialize, Serialize};

use crate::caller::CallerName;
use crate::record::ControllerId;
use crate::time::UnixMillis;

/// The kind of a long-running operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperationKind {
    /// The functions of a node move to other nodes.
    DrainNode { node: NodeName },
    /// A learner becomes a voter.
    PromoteController { id: ControllerId },
    /// A controller leaves the group.
    RemoveController { id: ControllerId },
    /// Trials measure the speed of a function's model on parts of a GPU.
    ProfileFunction {
        function: FunctionKey,
        /// The model of the function's latest revision at the begin.
        digest: Digest,
        /// Whether every width is measured with every quota.
        grid: bool,
    },
}

/// The result of an operation that has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum OperationResult {
    /// The operation did its job.
    Succeeded,
    /// The operation failed.
    Failed {
        /// The reason for the failure.
        why: String,
    },
    /// A caller ended the operation early.
    Cancelled,
}

/// A long-running operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationRecord {
    /// The state's version at the begin of the operation, which is never assigned twice.
    pub id: u64,
    pub kind: OperationKind,
    /// Number of steps at the begin: functions to move; 0 if the operation has no steps to count.
    pub total: u64,
    /// Number of steps done when the operation was ended early.
    #[serde(default)]
    pub done: u64,
    pub started_at: UnixMillis,
    /// The caller that began the operation.
    pub started_by: CallerName,
    /// Time and result of the end; `None` while the operation runs.
    #[serde(default)]
    pub ended: Option<(UnixMillis, OperationResult)>,
}

impl OperationRecord {
    /// Whether the operation has not ended.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.ended.is_none()
    }

    /// Whether a caller may end the operation early.
    #[must_use]
    pub fn is_cancellable(&self) -> bool {
        let ends =
            matches!(self.kind, OperationKind::DrainNode { .. } | OperationKind::ProfileFunction { .. });
        self.is_running() && ends
    }
}
