//! What an apply would do, every check made and nothing stored: the server's word where it has all
//! that is needed, else what it says of what is there.

use std::collections::{BTreeMap, BTreeSet};

use millrace_client::{ApplyOptions, Error, ModelFile, Outcome};
use millrace_proto::convert::workflow_spec;
use millrace_types::{Digest, FunctionKey, Reason, WorkflowSpec};

use super::manifests::WorkflowItem;
use super::plan::Step;
use super::{Callee, Function, Wanted, apply, apply_workflow};
use crate::commands::target::ModelKind;
use crate::failure::Failure;
use crate::session::Session;

const DRY: ApplyOptions = ApplyOptions { dry_run: true, resource_version: None };

/// Tries everything, and says what would become of each, in that order. `missing`: the models that
/// the server does not have.
pub(super) async fn run(
    wanted: &Wanted,
    order: &[Step],
    missing: &BTreeMap<Digest, ModelFile>,
    session: &Session,
) -> Result<Vec<Outcome>, Failure> {
    let (mut changed, mut outcomes) = (BTreeSet::new(), Vec::with_capacity(order.len()));
    let mut after_a_workflow = false;
    for step in order {
        // The server would check each beside what it has, which is not always what will be.
        let (callee, outcome) = match *step {
            Step::Function(at) => {
                let function = &wanted.functions[at];
                let without = missing.contains_key(&function.model.digest) || after_a_workflow;
                let outcome = match without {
                    true => without_its_model(function, session).await?,
                    false => apply(function, session, DRY).await?.outcome,
                };
                (Callee::function(&function.item.spec.key), outcome)
            }
            Step::Workflow(at) => {
                after_a_workflow = true;
                let item = &wanted.workflows[at];
                let outcome = match runs_any(item, &changed) {
                    true => beside_what_is_there(item, session).await?,
                    false => apply_workflow(item, session, DRY).await?.outcome,
                };
                (Callee::workflow(&item.spec.key), outcome)
            }
        };
        if outcome != Outcome::Unchanged {
            changed.insert(callee);
        }
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

fn runs_any(item: &WorkflowItem, changed: &BTreeSet<Callee>) -> bool {
    item.spec.steps.iter().any(|step| changed.contains(&Callee::of(item, &step.run)))
}

/// A function that the server cannot try: its model is not there, or a workflow of this apply has to
/// go before it. It differs from whatever is there.
async fn without_its_model(function: &Function, session: &Session) -> Result<Outcome, Failure> {
    let key = &function.item.spec.key;
    match session.admin.function(key).await {
        Ok(_) => return Ok(Outcome::Configured),
        Err(error) if error.reason() == Some(Reason::FunctionNotFound) => {}
        Err(error) => return Err(error.into()),
    }
    let other = session.admin.workflow(key).await.map(drop);
    created(key, [ModelKind::Function, ModelKind::Workflow], other)
}

/// A workflow that runs what this apply changes. It was checked here; what is left is its name.
async fn beside_what_is_there(item: &WorkflowItem, session: &Session) -> Result<Outcome, Failure> {
    let key = &item.spec.key;
    match session.admin.workflow(key).await {
        Ok(found) => return Ok(change(found.spec.unwrap_or_default(), &item.spec)),
        Err(error) if error.reason() == Some(Reason::WorkflowNotFound) => {}
        Err(error) => return Err(error.into()),
    }
    let other = session.admin.function(key).await.map(drop);
    created(key, [ModelKind::Workflow, ModelKind::Function], other)
}

/// What is not there becomes of its kind, unless one of the other kind has its name: they share them.
fn created(
    key: &FunctionKey,
    [kind, other]: [ModelKind; 2],
    found: Result<(), Error>,
) -> Result<Outcome, Failure> {
    match found {
        Ok(()) => Err(Failure::failed(format!("a {other} has this name ({})", Reason::NameTaken))
            .about(format_args!("{kind}/{}", key.name))
            .hint(format!("rename the {kind}, or delete the {other}"))),
        Err(error) if error.reason() == Some(other.not_found()) => Ok(Outcome::Created),
        Err(error) => Err(error.into()),
    }
}

fn change(found: millrace_client::messages::WorkflowSpec, wanted: &WorkflowSpec) -> Outcome {
    match workflow_spec(found).is_ok_and(|found| found == *wanted) {
        true => Outcome::Unchanged,
        false => Outcome::Configured,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_proto::convert::workflow_spec_wire;
    use millrace_types::manifest::{self, Manifest};

    const WORKFLOW: &str = "apiVersion: millrace/v1\nkind: Workflow\nmetadata: {name: w}\nspec:\n  inputs: [x]\n  steps: [{name: a, workflow: inner, inputs: {x: input.x}}]\n  outputs: {y: a.y}\n";

    fn item() -> WorkflowItem {
        let Manifest::Workflow(spec) = manifest::parse(WORKFLOW).unwrap().remove(0) else {
            panic!("not a workflow")
        };
        WorkflowItem { spec, source: "w.yaml".into() }
    }

    #[test]
    fn a_function_of_the_same_name_is_not_the_workflow_that_is_run() {
        let item = item();
        let mut inner = item.spec.key.clone();
        inner.name = millrace_types::FunctionName::new("inner").unwrap();
        assert!(!runs_any(&item, &[Callee::function(&inner)].into()));
        assert!(runs_any(&item, &[Callee::workflow(&inner)].into()));
    }

    #[test]
    fn what_is_there_already_is_unchanged() {
        let spec = item().spec;
        let mut there = workflow_spec_wire(&spec);
        assert_eq!(change(there.clone(), &spec), Outcome::Unchanged);
        there.labels.insert("team".into(), "vision".into());
        assert_eq!(change(there, &spec), Outcome::Configured);
        assert_eq!(change(Default::default(), &spec), Outcome::Configured);
    }
}
