//! The first policy of a cluster: the preset given by `--preset`.

use millrace_cluster_state::{CallerName, StateCommand};
use millrace_types::policy::PresetName;
use millrace_types::{PolicySpec, Reason};

use crate::raft::Replica;

/// Sets the preset as the cluster's policy, unless the cluster already has a policy.
pub(crate) async fn set_first(replica: &Replica, preset: PresetName) {
    if let Some(policy) = replica.state().policy() {
        if policy.spec.preset != Some(preset) {
            tracing::info!(
                policy = %policy.spec,
                %preset,
                "the cluster already has a policy: ignoring --preset; change the policy with 'millrace policy set --preset'"
            );
        }
        return;
    }
    let spec = PolicySpec { preset: Some(preset), ..PolicySpec::NONE };
    // Another controller may set another preset at the same time. Expecting generation 0 lets only the
    // first succeed.
    let command = StateCommand::SetPolicy { spec, settings: Vec::new(), expected: Some(0) };
    match replica.propose(CallerName("controller".into()), None, command).await {
        Ok(_) => {}
        Err(failure) if failure.reason == Reason::Conflict => {}
        Err(failure) => tracing::warn!(
            error = failure.message,
            %preset,
            "cannot set the first policy: set it with 'millrace policy set --preset'"
        ),
    }
}
