//! The parts of every process with a controller: the threads of Raft, the check of uploaded models,
//! and the failure of a halted controller.

use millrace_controller::{HaltError, Inspection, InspectorCommand, RaftRuntime};

use crate::failure::CommandFailure;

/// Starts the threads that keep heartbeats apart from requests. The runtime must outlive the
/// controller.
pub(crate) fn raft_runtime() -> Result<RaftRuntime, CommandFailure> {
    RaftRuntime::start()
        .map_err(|error| CommandFailure::failed(format!("cannot start the threads of Raft: {error}")))
}

/// Returns the way in which a controller checks uploaded models: in a child process of this
/// program.
pub(crate) fn inspection() -> Result<Inspection, CommandFailure> {
    let command = InspectorCommand::this_program();
    let command =
        command.map_err(|error| CommandFailure::failed(format!("cannot find this program: {error}")))?;
    Ok(Inspection::Child(command))
}

/// Returns the failure of a halted controller. The process exits instead of staying, because a
/// service manager restarts an ended process, and the restart shows whether the cause is gone. A
/// process that stayed would look alive without taking part.
pub(crate) fn halted(error: &HaltError) -> CommandFailure {
    let failed = CommandFailure::failed(format!("controller: {error}"));
    if matches!(error, HaltError::Diverged { .. }) {
        return failed.hint("do not restart it over the same data directory: its state has diverged");
    }
    failed
        .hint("no acknowledged write is lost: remove the cause, and restart it over the same data directory")
}
