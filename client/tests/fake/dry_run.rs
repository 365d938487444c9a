//! The dry run of the fake: a replicated state with the functions and workflows of the fake
//! answers.

use std::collections::BTreeMap;

use millrace_cluster_state::{
    ApplySet, CallerName, CommandEffect, CommandRefusal, ControllerId, ModelSummary, Proposal, SetItem,
    StateCommand, UnixMillis,
};
use millrace_proto::admin::{self, apply_item::Item};
use millrace_proto::convert;
use millrace_types::{Bytes, ClusterId, Digest, Reason};

use super::State;
use super::workflows::model;

/// A cluster's state with the functions and workflows of the fake.
#[derive(Default)]
struct Replicated {
    state: millrace_cluster_state::State,
}

impl Replicated {
    fn apply(&mut self, command: StateCommand) {
        let caller = CallerName("fake".into());
        let proposal = Proposal { stamp: UnixMillis(1), caller, idempotency: None, command };
        self.state.apply(1, &proposal).unwrap();
    }

    fn add_model(&mut self, digest: Digest, model: ModelSummary) {
        let holder = ControllerId::OBJECT_STORE;
        self.apply(StateCommand::AddArtifact { digest, bytes: Bytes(1), model, holder });
    }
}

impl State {
    pub(super) fn dry_run_apply(&self, request: admin::DryRunApplyRequest) -> admin::DryRunApplyResponse {
        for (position, item) in request.items.iter().enumerate() {
            if let Some(Item::Function(function)) = &item.item
                && function.spec.as_ref().unwrap().name == "refused"
            {
                return refusal(position, Reason::InvalidSpec, "this name is refused".into(), None);
            }
        }
        let pending = request.models.into_iter();
        let models: BTreeMap<_, _> =
            pending.map(|it| (it.digest.parse().unwrap(), summary(it.model.unwrap()))).collect();
        let items = request.items.into_iter().map(|item| match item.item.unwrap() {
            Item::Function(it) => SetItem::Function {
                spec: convert::function_spec(it.spec.unwrap()).unwrap(),
                digest: it.digest.parse().unwrap(),
            },
            Item::Workflow(spec) => SetItem::Workflow { spec: convert::workflow_spec(spec).unwrap() },
        });
        let set = set(items.collect(), models.clone());
        let tried = self.replicated().state.dry_run_set(&set);
        // The fake never reads an uploaded file, so it keeps the models that a dry run describes.
        self.models.lock().unwrap().extend(models);
        match tried {
            Ok(steps) => {
                let steps = steps.into_iter().map(|step| {
                    let outcome = match step.applied {
                        CommandEffect::Created { .. } => admin::ApplyOutcome::Created,
                        CommandEffect::Unchanged => admin::ApplyOutcome::Unchanged,
                        _ => admin::ApplyOutcome::Configured,
                    };
                    admin::DryRunStep { item: u32::try_from(step.item).unwrap(), outcome: outcome.into() }
                });
                admin::DryRunApplyResponse { steps: steps.collect(), refusal: None }
            }
            Err(refused) => {
                let why = &refused.refusal;
                let broken = match why {
                    CommandRefusal::BreaksWorkflow { workflow, problem, .. } => Some(admin::BrokenWorkflow {
                        workflow: workflow.name.to_string(),
                        problem: problem.clone(),
                    }),
                    _ => None,
                };
                refusal(refused.item, why.reason(), why.to_string(), broken)
            }
        }
    }

    fn replicated(&self) -> Replicated {
        let mut replicated = Replicated::default();
        replicated.apply(StateCommand::InitCluster { cluster_id: ClusterId("fake".into()) });
        let models = self.models.lock().unwrap();
        let known = |digest: &Digest| models.get(digest).cloned().unwrap_or_else(|| summary(model()));
        for digest in self.artifacts.lock().unwrap().keys() {
            let digest = digest.parse().unwrap();
            replicated.add_model(digest, known(&digest));
        }
        for function in self.functions.lock().unwrap().values() {
            let digest = function.revisions[0].artifact.as_ref().unwrap().digest.parse().unwrap();
            replicated.add_model(digest, known(&digest));
            let spec = convert::function_spec(function.spec.clone().unwrap()).unwrap();
            replicated.apply(StateCommand::ApplyFunction {
                spec,
                digest,
                expected: None,
                voters: Vec::new(),
            });
        }
        let specs: Vec<_> =
            self.workflows.lock().unwrap().values().map(|it| it.spec.clone().unwrap()).collect();
        let items = specs.into_iter().map(|spec| convert::workflow_spec(spec).unwrap());
        let workflows = set(items.map(|spec| SetItem::Workflow { spec }).collect(), BTreeMap::new());
        for step in replicated.state.dry_run_set(&workflows).unwrap() {
            let SetItem::Workflow { spec } = workflows.items[step.item].clone() else { unreachable!() };
            replicated.apply(StateCommand::ApplyWorkflow { spec, expected: None });
        }
        replicated
    }
}

fn set(items: Vec<SetItem>, models: BTreeMap<Digest, ModelSummary>) -> ApplySet {
    ApplySet { items, models, voters: Vec::new(), caller: CallerName("fake".into()), stamp: UnixMillis(1) }
}

fn summary(wire: admin::ModelSummary) -> ModelSummary {
    let tensors =
        |wire: Vec<admin::TensorSpec>| wire.into_iter().map(|it| convert::tensor_spec(it).unwrap()).collect();
    ModelSummary {
        weights: Bytes(wire.weights_bytes),
        parameters: wire.parameters,
        launches: wire.launches,
        inputs: tensors(wire.inputs),
        outputs: tensors(wire.outputs),
    }
}

fn refusal(
    item: usize,
    reason: Reason,
    message: String,
    broken: Option<admin::BrokenWorkflow>,
) -> admin::DryRunApplyResponse {
    let item = u32::try_from(item).unwrap();
    let refusal = admin::ItemRefusal { item, reason: reason.to_string(), message, broken };
    admin::DryRunApplyResponse { steps: Vec::new(), refusal: Some(refusal) }
}
