//! The first policy of a cluster: the preset that `--preset` names.

use millrace_cluster_state::{Caller, Command};
use millrace_types::policy::PresetName;
use millrace_types::{PolicySpec, Reason};

use crate::raft::replica::Replica;

/// Sets the preset, unless the cluster has a policy already.
pub(crate) async fn set_first(replica: &Replica, preset: PresetName) {
    if let Some(policy) = replica.state().policy() {
        if policy.spec.preset != Some(preset) {
            tracing::info!(
                policy = %policy.spec,
                %preset,
                "the cluster has a policy, so --preset changes nothing: 'millrace policy set --preset' does"
            );
        }
        return;
    }
    let spec = PolicySpec { preset: Some(preset), ..PolicySpec::NONE };
    // Another controller may set its own at the same time: the first one wins.
    let command = Command::SetPolicy { spec, settings: Vec::new(), expected: Some(0) };
    match replica.propose(Caller("controller".into()), None, command).await {
        Ok(_) => {}
        Err(failure) if failure.reason == Reason::Conflict => {}
        Err(failure) => tracing::warn!(
            error = failure.message,
            %preset,
            "the first policy was not set: set it with 'millrace policy set --preset'"
        ),
    }
}
