//! The scheduling policy in force, and the resulting settings of functions.

use millrace_core::ids::FunctionIndex;
use millrace_scheduling::batching;
use millrace_scheduling::dispatch::LatencyObjective;
use millrace_scheduling::preset::SchedulingPolicy;
use millrace_types::SloCounts;
use millrace_types::policy::Batches;

use super::functions::limits;
use super::slo_counts::{slo_counts, slo_reports};
use super::state::NodeState;
use crate::install::FunctionConfig;
use crate::policy::{DesiredPolicy, EffectivePolicy};

impl NodeState {
    /// Returns the policy in force, with the number of the last change.
    pub(crate) fn in_force(&self) -> EffectivePolicy {
        self.in_force.get()
    }

    /// Returns the policy in force.
    pub(crate) fn policy(&self) -> SchedulingPolicy {
        self.in_force.get().policy
    }

    /// Sets the policy that an operator chose. Returns the previous policy and the new policy.
    pub(crate) fn set_policy(&self, wanted: &DesiredPolicy) -> (EffectivePolicy, EffectivePolicy) {
        let mut after = EffectivePolicy::of(&self.config.policy(), wanted);
        after.policy = self.config.possible(after.policy);
        self.slo_reports.set(slo_reports(&after));
        (self.in_force.replace(after), after)
    }

    /// Returns the batching limits of a function, if the function and the policy batch requests.
    pub(crate) fn limits(&self, function: FunctionIndex, config: &FunctionConfig) -> Option<batching::Event> {
        limits(function, config).filter(|_| self.policy().batching == Batches::On)
    }

    /// Returns the objective of a function with an SLO.
    pub(crate) fn objective(&self, config: &FunctionConfig) -> Option<LatencyObjective> {
        let together = config.serving.batching.is_some() && self.policy().batching == Batches::On;
        config.slo.as_ref().map(|slo| LatencyObjective::of(slo).together(together))
    }

    /// Returns the batching limits of every function that asks for batching. After a policy has turned
    /// batching off, the limits make requests run alone.
    pub(crate) fn all_limits(&self) -> Vec<batching::Event> {
        let registry = self.registry.borrow();
        let alone = |function| batching::Event::Limits { function, batching: None, deadline: None };
        let wants = registry.indexed().filter(|(_, hosted)| hosted.config.serving.batching.is_some());
        let event = |(function, config): (_, &FunctionConfig)| {
            self.limits(function, config).unwrap_or_else(|| alone(function))
        };
        wants.map(|(function, hosted)| event((function, &hosted.config))).collect()
    }

    /// Returns the objective of every function, and its SLO counts since the installation on this node.
    pub(crate) fn objectives(&self) -> Vec<(FunctionIndex, Option<LatencyObjective>, SloCounts)> {
        let registry = self.registry.borrow();
        let objectives = registry.indexed().map(|(function, hosted)| {
            let objective = self.objective(&hosted.config);
            (function, objective, slo_counts(&hosted.score.get()))
        });
        objectives.collect()
    }
}
