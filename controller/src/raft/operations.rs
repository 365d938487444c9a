//! Records a membership change as an operation that clients can observe. The operation begins when the
//! change is known to be allowed, and ends with the outcome.

use millrace_cluster_state::operations::{OperationKind, OperationResult};
use millrace_cluster_state::{CallerName, CommandEffect, ControllerId, StateCommand};
use millrace_types::limits::{REFUSAL_BYTES_MAX, text_prefix};
use millrace_types::{Failure, Reason};

use super::replica::Replica;
use super::rules::MembershipRequest;

impl MembershipRequest {
    /// Returns the kind of operation of this change.
    pub(crate) fn kind(self) -> OperationKind {
        match self {
            Self::Promote(id) => OperationKind::PromoteController { id: ControllerId(id) },
            Self::Remove(id) => OperationKind::RemoveController { id: ControllerId(id) },
        }
    }
}

impl Replica {
    pub(super) async fn begin_change(
        &self,
        change: MembershipRequest,
        caller: CallerName,
    ) -> Result<u64, Failure> {
        let begun = self.propose(caller, None, StateCommand::BeginOperation { kind: change.kind() }).await?;
        match begun {
            CommandEffect::Created { version } => Ok(version),
            other => {
                let message = format!("beginning an operation gave {other:?} instead of a new operation");
                Err(Failure::new(Reason::Internal, message))
            }
        }
    }

    /// Records the outcome of an operation. An operation without a recorded outcome ends by itself
    /// after a timeout.
    pub(super) async fn end_change<T>(&self, id: u64, caller: CallerName, changed: &Result<T, Failure>) {
        let end = match changed {
            Ok(_) => OperationResult::Succeeded,
            Err(failure) => {
                OperationResult::Failed { why: text_prefix(&failure.message, REFUSAL_BYTES_MAX).to_owned() }
            }
        };
        if let Err(failure) = self.propose(caller, None, StateCommand::EndOperation { id, end }).await {
            tracing::warn!(
                operation = id,
                error = failure.message,
                "cannot record the outcome of an operation"
            );
        }
    }
}
