//! How the node schedules now, whichever actors carry it out.

use millrace_policy::batching;
use millrace_policy::dispatch::Objective;
use millrace_policy::ids::FunctionIndex;
use millrace_policy::preset::SchedulingPolicy;
use millrace_types::SloCounts;
use millrace_types::policy::Batches;

use super::Supervisor;
use super::functions::limits;
use crate::actors::function::{ScoresTold, counts};
use crate::install::FunctionConfig;
use crate::policy::{InForce, Wanted};

/// Whether functions tell their scores.
pub(super) fn told(in_force: &InForce) -> ScoresTold {
    if in_force.policy.dispatch.scores() { ScoresTold::Yes } else { ScoresTold::No }
}

impl Supervisor {
    /// The policy in force, with the number of the last change.
    pub(crate) fn in_force(&self) -> InForce {
        self.in_force.get()
    }

    /// The policy in force.
    pub(crate) fn policy(&self) -> SchedulingPolicy {
        self.in_force.get().policy
    }

    /// Notes the policy that an operator set. Returns the one before, and the new one.
    pub(crate) fn set_policy(&self, wanted: &Wanted) -> (InForce, InForce) {
        let after = InForce::of(&self.config, wanted);
        self.told.set(told(&after));
        (self.in_force.replace(after), after)
    }

    /// How a function's requests are batched, where they are.
    pub(super) fn limits(&self, function: FunctionIndex, config: &FunctionConfig) -> Option<batching::Event> {
        limits(function, config).filter(|_| self.policy().batching == Batches::On)
    }

    /// What a function is held to.
    pub(super) fn objective(&self, config: &FunctionConfig) -> Option<Objective> {
        let together = config.serving.batching.is_some() && self.policy().batching == Batches::On;
        config.slo.as_ref().map(|slo| Objective::of(slo).together(together))
    }

    /// The same of every function that wants it, now that it is allowed or is not.
    pub(crate) fn all_limits(&self) -> Vec<batching::Event> {
        let registry = self.registry.borrow();
        let alone = |function| batching::Event::Limits { function, batching: None, deadline: None };
        let wants = registry.indexed().filter(|(_, hosted)| hosted.config.serving.batching.is_some());
        let event = |(function, config): (_, &FunctionConfig)| {
            self.limits(function, config).unwrap_or_else(|| alone(function))
        };
        wants.map(|(function, hosted)| event((function, &hosted.config))).collect()
    }

    /// What every function is held to, and what it scored since it is here.
    pub(crate) fn objectives(&self) -> Vec<(FunctionIndex, Option<Objective>, SloCounts)> {
        let registry = self.registry.borrow();
        let objectives = registry.indexed().map(|(function, hosted)| {
            let objective = self.objective(&hosted.config);
            (function, objective, counts(&hosted.score.get()))
        });
        objectives.collect()
    }
}
