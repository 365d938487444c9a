//! Prewarming hints: tells a call's worker which functions probably read the outputs next (D29).
//! Nothing depends on a hint.

use std::sync::Arc;

use millrace_gateway::backend::{Backend as _, Kind, ModelAvailability};
use millrace_proto::worker as wire;
use millrace_types::{FunctionKey, FunctionName, TenantName};
use millrace_workflow::{PrewarmHint, PrewarmTarget, StepIndex, WorkflowGraph};

use crate::serving::backend::ServingBackend;

impl ServingBackend {
    /// Returns the functions that probably run after a step. `after` has those that probably run after the whole
    /// workflow.
    pub(super) fn ahead(
        &self,
        tenant: &TenantName,
        plan: &WorkflowGraph,
        step: StepIndex,
        after: &[PrewarmHint],
    ) -> Vec<PrewarmHint> {
        let inner = |name: &FunctionName| -> Option<Arc<WorkflowGraph>> {
            let key = FunctionKey { tenant: tenant.clone(), name: name.clone() };
            self.workflow(&key).ok().map(|(way, _)| way.plan)
        };
        plan.prewarm_hints(step, after, inner)
    }

    /// Converts the functions that can be called now into hints for a worker.
    pub(super) fn likely(&self, tenant: &TenantName, ahead: &[PrewarmHint]) -> Vec<wire::Likely> {
        let likely = |it: &PrewarmHint| {
            let key = FunctionKey { tenant: tenant.clone(), name: it.function.clone() };
            let model = self.resolve(&key, None).ok()?;
            let callable = model.availability == ModelAvailability::Ready && model.kind != Kind::Workflow;
            let to = match it.nearness {
                PrewarmTarget::Gpu => wire::WarmTo::Gpu,
                PrewarmTarget::Host => wire::WarmTo::Host,
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
