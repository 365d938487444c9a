//! What a call's worker is told of the calls that are likely to come after it, with what it makes (D29).
//! A hint: nothing depends on it.

use millrace_gateway::backend::{Availability, Backend as _, Kind};
use millrace_policy::workflow::{AHEAD_MAX, Ahead, Nearness, Plan, StepIndex};
use millrace_proto::worker as wire;
use millrace_types::workflow::Run;
use millrace_types::{FunctionKey, TenantName};

use crate::serving::Serving;

impl Serving {
    /// The functions behind a step that can be called now, each once, at most [`AHEAD_MAX`].
    pub(super) fn next(&self, tenant: &TenantName, plan: &Plan, step: StepIndex) -> Vec<wire::Likely> {
        let mut next: Vec<wire::Likely> = Vec::new();
        for Ahead { step: ahead, nearness } in plan.ahead(step) {
            for (function, nearness) in self.functions_of(tenant, &plan.step(ahead).run, nearness) {
                let known = next.iter().any(|it| it.function == function.name.as_str());
                // The step's own model is there.
                if known || plan.step(step).run == Run::Function(function.name.clone()) {
                    continue;
                }
                next.extend(self.likely(&function, nearness));
                if next.len() >= AHEAD_MAX {
                    return next;
                }
            }
        }
        next
    }

    /// What a step runs. Of a workflow inside, nobody looks which of its functions comes first.
    fn functions_of(
        &self,
        tenant: &TenantName,
        run: &Run,
        nearness: Nearness,
    ) -> Vec<(FunctionKey, Nearness)> {
        match run {
            Run::Function(name) => {
                vec![(FunctionKey { tenant: tenant.clone(), name: name.clone() }, nearness)]
            }
            Run::Workflow(_) => {
                let functions = self.replica.state().functions_in(tenant, [run]);
                functions.into_iter().map(|function| (function, Nearness::Host)).collect()
            }
        }
    }

    fn likely(&self, function: &FunctionKey, nearness: Nearness) -> Option<wire::Likely> {
        let model = self.resolve(function, None).ok()?;
        let callable = model.availability == Availability::Ready && model.kind != Kind::Workflow;
        let to = match nearness {
            Nearness::Gpu => wire::WarmTo::Gpu,
            Nearness::Host => wire::WarmTo::Host,
        };
        callable.then(|| wire::Likely {
            function: function.name.to_string(),
            revision: model.revision.get(),
            to: to.into(),
        })
    }
}
