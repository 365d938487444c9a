//! One file per command. Each checks everything first and changes only then, so that a refusal
//! leaves the state as it was. A new command is a new file, a variant of
//! [`Command`](crate::Command) and an arm in `State::carry_out`.

mod add_artifact;
mod apply_function;
mod delete_function;
mod init_cluster;
mod node_lost;
mod place;
mod register_node;
mod remove_artifact;
mod remove_artifact_holder;
mod remove_node;
mod set_function_enabled;
mod set_node_scheduling;
mod set_quota;
mod sync_node;
#[cfg(test)]
pub(crate) mod testing;
mod unplace;

use std::sync::Arc;

use millrace_types::{Digest, FunctionKey};

pub(crate) use add_artifact::add_artifact;
pub(crate) use apply_function::apply_function;
pub(crate) use delete_function::delete_function;
pub(crate) use init_cluster::init_cluster;
pub(crate) use node_lost::node_lost;
pub(crate) use place::place;
pub(crate) use register_node::{Registration, register_node};
pub(crate) use remove_artifact::remove_artifact;
pub(crate) use remove_artifact_holder::remove_artifact_holder;
pub(crate) use remove_node::remove_node;
pub(crate) use set_function_enabled::set_function_enabled;
pub(crate) use set_node_scheduling::set_node_scheduling;
pub(crate) use set_quota::set_quota;
pub(crate) use sync_node::sync_node;
pub(crate) use unplace::unplace;

use crate::command::UnixMillis;
use crate::outcome::Refusal;
use crate::state::State;

/// Refuses a writer that has not seen the latest version. 0 expects absence.
fn check_expected(state: &State, key: &FunctionKey, expected: Option<u64>) -> Result<(), Refusal> {
    let Some(expected) = expected else { return Ok(()) };
    let actual = state.functions.get(key).map_or(0, |function| function.resource_version);
    if expected == actual { Ok(()) } else { Err(Refusal::Conflict { key: key.clone(), expected, actual }) }
}

/// One more or one less revision uses the artifact. Either way it was touched now: the grace
/// period of an artifact begins when its last use ends.
fn count_use(state: &mut State, digest: Digest, now: UnixMillis, count: impl FnOnce(u64) -> u64) {
    if let Some(artifact) = state.artifacts.get_mut(&digest) {
        let artifact = Arc::make_mut(artifact);
        artifact.uses = count(artifact.uses);
        artifact.touched_at = now;
    }
}
