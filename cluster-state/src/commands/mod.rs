//! One file per command. Each command makes all its checks before its first change, so a refusal
//! leaves the state unchanged. A new command needs a new file, a variant of
//! [`StateCommand`](crate::StateCommand) and an arm in `State::carry_out_command`.

mod add_artifact;
mod apply_function;
mod apply_workflow;
mod begin_operation;
mod delete_function;
mod delete_workflow;
mod end_operation;
mod init_cluster;
mod node_lost;
mod place;
mod record_trial;
mod register_node;
mod remove_artifact;
mod remove_artifact_holder;
mod remove_node;
mod set_cluster_version;
mod set_function_enabled;
mod set_node_scheduling;
mod set_policy;
mod set_quota;
mod set_slices;
mod sync_node;
#[cfg(test)]
pub(crate) mod testing;
mod unplace;

use millrace_types::workflow::StepTarget;
use millrace_types::{Digest, FunctionKey, Revision};

pub(crate) use add_artifact::add_artifact;
pub(crate) use apply_function::apply_function;
pub(crate) use apply_workflow::apply_workflow;
pub(crate) use begin_operation::begin_operation;
pub(crate) use delete_function::delete_function;
pub(crate) use delete_workflow::delete_workflow;
pub(crate) use end_operation::end_operation;
pub(crate) use init_cluster::init_cluster;
pub(crate) use node_lost::node_lost;
pub(crate) use place::place;
pub(crate) use record_trial::record_trial;
pub(crate) use register_node::{RegistrationRequest, register_node};
pub(crate) use remove_artifact::remove_artifact;
pub(crate) use remove_artifact_holder::remove_artifact_holder;
pub(crate) use remove_node::remove_node;
pub(crate) use set_cluster_version::set_cluster_version;
pub(crate) use set_function_enabled::set_function_enabled;
pub(crate) use set_node_scheduling::set_node_scheduling;
pub(crate) use set_policy::set_policy;
pub(crate) use set_quota::set_quota;
pub(crate) use set_slices::{check_rules, set_slices};
pub(crate) use sync_node::sync_node;
pub(crate) use unplace::unplace;

use crate::outcome::CommandRefusal;
use crate::state::{RETIRED_MAX, RetiredName, State};
use crate::time::UnixMillis;
use crate::workflows::USERS_NAMED_MAX;

/// Refuses a writer that has not seen the latest version. An expected version of 0 expects that the
/// resource does not exist.
fn check_expected(
    key: &FunctionKey,
    expected: Option<u64>,
    actual: Option<u64>,
) -> Result<(), CommandRefusal> {
    let actual = actual.unwrap_or(0);
    match expected {
        Some(expected) if expected != actual => {
            Err(CommandRefusal::Conflict { key: key.clone(), expected, actual })
        }
        _ => Ok(()),
    }
}

/// Refuses to delete a function or workflow that workflows run.
fn check_unused(state: &State, key: &FunctionKey, run: &StepTarget) -> Result<(), CommandRefusal> {
    let mut users = state.users_of(&key.tenant, run);
    let by: Vec<_> = users.by_ref().take(USERS_NAMED_MAX).cloned().collect();
    if by.is_empty() {
        return Ok(());
    }
    Err(CommandRefusal::InUse { key: key.clone(), by, more: users.count() as u64 })
}

/// Returns the number of a model's next accepted spec: one more than the last known number of its
/// name.
fn next_number(state: &State, key: &FunctionKey) -> Revision {
    let function = state.functions.get(key).map(|function| function.generation());
    let workflow = || state.workflows.get(key).map(|workflow| workflow.generation);
    let retired = || state.retired.get(key).map(|retired| retired.last);
    function.or_else(workflow).or_else(retired).map_or(Revision::FIRST, Revision::next)
}

/// Remembers a deleted function or workflow. Beyond [`RETIRED_MAX`] names, the oldest name is
/// forgotten: every worker has dropped its data of that name long ago.
fn retire(state: &mut State, key: &FunctionKey, retired: RetiredName) {
    state.retired.insert(key.clone(), retired);
    if state.retired.len() > RETIRED_MAX {
        let oldest = state.retired.iter().min_by_key(|(_, it)| it.version).map(|(key, _)| key.clone());
        if let Some(oldest) = oldest {
            state.retired.remove(&oldest);
            state.forget_usage(&oldest);
        }
    }
}

/// Changes the number of revisions that use the artifact, and sets the time of its last use to now:
/// the grace period of an artifact begins when its last use ends.
fn count_use(state: &mut State, digest: Digest, now: UnixMillis, count: impl FnOnce(u64) -> u64) {
    state.artifacts.change_numbers(&digest, |artifact| {
        artifact.uses = count(artifact.uses);
        artifact.touched_at = now;
    });
}
