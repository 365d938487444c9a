//! The scheduling policy in force on the node: an operator's policy, or the default preset.

use millrace_proto::convert::policy_spec_wire;
use millrace_proto::worker;
use millrace_scheduling::preset::SchedulingPolicy;
use millrace_types::PolicySpec;

/// The policy settings that an operator made, with the number of the change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DesiredPolicy {
    /// Number of the change; 0 before the first.
    pub generation: u64,
    pub spec: PolicySpec,
}

/// The policy in force on the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EffectivePolicy {
    /// Number of the last change that the node received.
    pub generation: u64,
    pub policy: SchedulingPolicy,
}

impl EffectivePolicy {
    /// Returns the policy that results from an operator's settings on a node that started with the
    /// policy `started`.
    pub(crate) fn of(started: &SchedulingPolicy, wanted: &DesiredPolicy) -> Self {
        Self { generation: wanted.generation, policy: started.with(&wanted.spec) }
    }

    /// Returns the policy as a message to controllers.
    pub(crate) fn wire(&self) -> worker::Policy {
        worker::Policy { generation: self.generation, spec: Some(policy_spec_wire(&self.policy.spec())) }
    }
}

#[cfg(test)]
mod tests {
    use millrace_proto::policy as wire;
    use millrace_types::policy::{AlphaReading, PresetName};

    use super::*;
    use crate::node::NodeConfig;

    #[test]
    fn the_node_reports_every_setting_in_force() {
        let topology =
            millrace_types::topology::Topology { name: "t".into(), gpus: Vec::new(), links: Vec::new() };
        let started = NodeConfig::new(topology);
        let spec = PolicySpec {
            preset: Some(PresetName::Torpor),
            alpha: Some(AlphaReading::Artifact),
            ..PolicySpec::NONE
        };
        let expected = wire::PolicySpec {
            dispatch: "torpor".into(),
            eviction: "torpor".into(),
            alpha: "artifact".into(),
            batching: "on".into(),
            transfer_sharing: "fair".into(),
            host_links: "own".into(),
            gpu_sharing: "off".into(),
            ..Default::default()
        };
        let reported = EffectivePolicy::of(&started.policy(), &DesiredPolicy { generation: 3, spec }).wire();
        assert_eq!(reported, worker::Policy { generation: 3, spec: Some(expected) });
    }
}
