//! The failures of writes and linearizable reads, as callers get them.

use millrace_cluster_state::CommandRefusal;
use millrace_types::{Failure, Reason};

use super::timing::WRITE_TIMEOUT;

/// Converts a refusal as every interface reports it.
pub(crate) fn refused(refusal: &CommandRefusal) -> Failure {
    Failure::new(refusal.reason(), refusal.clone().shortened().to_string())
}

/// Returns the failure of a request for the leader while no leader is known.
pub(super) fn nobody_leads() -> Failure {
    let message = "no controller is known to lead: a majority of the controllers must be up; try again soon, or read stale";
    Failure::new(Reason::NoLeader, message)
}

/// Returns the failure of a proposed write that no majority is known to have.
pub(super) fn unconfirmed() -> Failure {
    let message = format!(
        "no majority of controllers confirmed the change within {WRITE_TIMEOUT:?}: the change may still take effect: read it back before you try again"
    );
    Failure::new(Reason::NoLeader, message).after_execution()
}

pub(super) fn stopped(error: &openraft::error::Fatal<u64>) -> Failure {
    match error {
        openraft::error::Fatal::Stopped => shutting_down(),
        other => Failure::new(Reason::NoLeader, format!("this controller's log has halted: {other}")),
    }
}

pub(super) fn shutting_down() -> Failure {
    Failure::new(Reason::ShuttingDown, "this controller is shutting down")
}
