//! The failure of a run of a workflow.

use millrace_proto::worker as wire;
use millrace_types::Failure;

/// The failure of a run.
#[derive(Debug)]
pub(super) struct WorkflowRunFailure {
    pub(super) failure: Failure,
    /// Lost objects among the run's inputs.
    pub(super) lost: Vec<wire::DataId>,
    /// Whether any call of the run may have run.
    pub(super) ran: bool,
}

impl From<Failure> for WorkflowRunFailure {
    fn from(failure: Failure) -> Self {
        Self { ran: failure.may_have_executed, failure, lost: Vec::new() }
    }
}
