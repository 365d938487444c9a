//! Prewarming hints: tells a call's worker which functions probably read the outputs next (D29).
//! Nothing depends on a hint.

use std::sync::Arc;

use millrace_gateway::backend::{Availability, Backend as _, Kind};
use millrace_policy::workflow::{Ahead, Nearness, Plan, StepIndex};
use millrace_proto::worker as wire;
use millrace_types::{FunctionKey, FunctionName, TenantName};

use crate::serving::Serving;

impl Serving {
    /// Returns the functions behind a step. `after` has the functions behind the whole workflow.
    pub(super) fn ahead(
        &self,
        tenant: &TenantName,
        plan: &Plan,
        step: StepIndex,
        after: &[Ahead],
    ) -> Vec<Ahead> {
        let inner = |name: &FunctionName| -> Option<Arc<Plan>> {
            let key = FunctionKey { tenant: tenant.clone(), name: name.clone() };
            self.workflow(&key).ok().map(|(way, _)| way.plan)
        };
        plan.ahead(step, after, inner)
    }

    /// Converts the functions that can be called now into hints for a worker.
    pub(super) fn likely(&self, tenant: &TenantName, ahead: &[Ahead]) -> Vec<wire::Likely> {
        let likely = |it: &Ahead| {
            let key = FunctionKey { tenant: tenant.clone(), name: it.function.clone() };
            let model = self.resolve(&key, None).ok()?;
            let callable = model.availability == Availability::Ready && model.kind != Kind::Workflow;
            let to = match it.nearness {
                Nearness::Gpu => wire::WarmTo::Gpu,
                Nearness::Host => wire::WarmTo::Host,
            };
            callable.then(|| wire::Likely {
                function: key.name.to_string(),
                revision: model.revision.get(),
                to: to.into(),
            })
        };
        ahead.iter().filter_map(likely).collect()
    }
}
