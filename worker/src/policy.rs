//! How the node schedules now: as it was started, changed by what the operator set since.

use millrace_policy::dispatch::PolicyConfig;
use millrace_policy::gpu::Eviction;
use millrace_proto::policy as wire;
use millrace_proto::worker;
use millrace_types::PolicySpec;
use millrace_types::policy::Batches;

use crate::node::NodeConfig;

/// What an operator set, and which of the changes that is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wanted {
    /// 0 before the first.
    pub generation: u64,
    /// What is set; the rest is as the node was started.
    pub spec: PolicySpec,
}

/// What is in force.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InForce {
    /// The last change that the node heard of.
    pub generation: u64,
    /// Which request goes to which GPU.
    pub dispatch: PolicyConfig,
    /// Which models make room first.
    pub eviction: Eviction,
    /// Whether requests run as one.
    pub batching: Batches,
}

impl InForce {
    /// What is wanted of a node that was started so.
    pub(crate) fn of(started: &NodeConfig, wanted: &Wanted) -> Self {
        Self {
            generation: wanted.generation,
            dispatch: started.dispatch.with(&wanted.spec),
            eviction: wanted.spec.eviction.map_or(started.eviction, Eviction::named),
            batching: wanted.spec.batching.unwrap_or(Batches::On),
        }
    }

    /// The same for controllers.
    pub(crate) fn wire(&self) -> worker::Policy {
        let spec = wire::PolicySpec {
            dispatch: self.dispatch.to_string(),
            eviction: self.eviction.to_string(),
            overtakes_max: self.dispatch.overtakes_max(),
            alpha: self.dispatch.alpha().map(|alpha| alpha.to_string()).unwrap_or_default(),
            batching: self.batching.to_string(),
            slo_window: self.dispatch.slo_window(),
        };
        worker::Policy { generation: self.generation, spec: Some(spec) }
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::policy::{AlphaReading, DispatchName};

    use super::*;

    fn started(dispatch: &str) -> NodeConfig {
        let topology =
            millrace_types::topology::Topology { name: "t".into(), gpus: Vec::new(), links: Vec::new() };
        NodeConfig { dispatch: dispatch.parse().unwrap(), ..NodeConfig::new(topology) }
    }

    #[test]
    fn what_is_not_set_is_as_the_node_was_started() {
        let spec = PolicySpec {
            dispatch: Some(DispatchName::Torpor),
            alpha: Some(AlphaReading::Artifact),
            ..PolicySpec::NONE
        };
        let told =
            |dispatch: &str, spec| InForce::of(&started(dispatch), &Wanted { generation: 3, spec }).wire();
        let shown = |dispatch: &str, overtakes_max, alpha: &str| worker::Policy {
            generation: 3,
            spec: Some(wire::PolicySpec {
                dispatch: dispatch.into(),
                eviction: "torpor".into(),
                overtakes_max,
                alpha: alpha.into(),
                batching: "on".into(),
                slo_window: None,
            }),
        };
        assert_eq!(told("lalb-o3", PolicySpec::NONE), shown("lalb-o3", Some(25), ""));
        assert_eq!(told("lalb-o3", spec), shown("torpor", None, "artifact"));
        assert_eq!(told("native", spec), shown("native", None, ""), "who binds early stays so");
    }
}
