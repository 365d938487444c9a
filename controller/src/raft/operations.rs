//! Records a membership change as an operation that clients can observe. The operation begins when the
//! change is known to be allowed, and ends with the outcome.

use millrace_cluster_state::operations::{End, Kind};
use millrace_cluster_state::{Applied, Caller, Command, ControllerId};
use millrace_types::limits::{REFUSAL_BYTES_MAX, beginning};
use millrace_types::{Failure, Reason};

use super::replica::Replica;
use super::rules::Change;

impl Change {
    /// Returns the kind of operation of this change.
    pub(crate) fn kind(self) -> Kind {
        match self {
            Self::Promote(id) => Kind::PromoteController { id: ControllerId(id) },
            Self::Remove(id) => Kind::RemoveController { id: ControllerId(id) },
        }
    }
}

impl Replica {
    pub(super) async fn begin_change(&self, change: Change, caller: Caller) -> Result<u64, Failure> {
        let begun = self.propose(caller, None, Command::BeginOperation { kind: change.kind() }).await?;
        match begun {
            Applied::Created { version } => Ok(version),
            other => {
                let message = format!("beginning an operation gave {other:?} instead of a new operation");
                Err(Failure::new(Reason::Internal, message))
            }
        }
    }

    /// Records the outcome of an operation. An operation without a recorded outcome ends by itself
    /// after a timeout.
    pub(super) async fn end_change<T>(&self, id: u64, caller: Caller, changed: &Result<T, Failure>) {
        let end = match changed {
            Ok(_) => End::Succeeded,
            Err(failure) => End::Failed { why: beginning(&failure.message, REFUSAL_BYTES_MAX).to_owned() },
        };
        if let Err(failure) = self.propose(caller, None, Command::EndOperation { id, end }).await {
            tracing::warn!(
                operation = id,
                error = failure.message,
                "cannot record the outcome of an operation"
            );
        }
    }
}
