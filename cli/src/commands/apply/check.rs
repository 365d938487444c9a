//! Workflows beside what they run, before anything is stored: names, types and shapes along every
//! edge. What the same apply brings counts as it will be, the rest as the server has it.

use std::collections::{BTreeMap, BTreeSet};

use futures::TryStreamExt as _;
use millrace_client::{Admin, messages as wire};
use millrace_proto::convert::workflow_spec;
use millrace_types::workflow::{Fit, Run, Signature};
use millrace_types::{Dim, FunctionKey, Reason, TensorSpec};

use super::manifests::WorkflowItem;
use super::plan::{Known, Step, World, plan};
use super::{Callee, Wanted};
use crate::failure::Failure;

/// Checks every workflow, and finds the order to store everything in. A failure names its manifest.
pub(super) async fn check(wanted: &Wanted, admin: &Admin) -> Result<Vec<Step>, Failure> {
    let functions = wanted.functions.iter();
    let mut known: BTreeMap<Callee, Fit> =
        functions.map(|it| (Callee::function(&it.item.spec.key), it.fit())).collect();
    // In their order: what a workflow runs of the same apply is known before it.
    for item in &wanted.workflows {
        for run in item.spec.runs() {
            let callee = Callee::of(item, run);
            if !known.contains_key(&callee)
                && let Some(fit) = ask(&callee, admin).await?
            {
                known.insert(callee, fit);
            }
        }
        let fit = beside(item, &known)?;
        known.insert(Callee::workflow(&item.spec.key), fit);
    }
    plan(wanted, world(wanted, admin).await?)
}

/// What the server has of what this apply touches.
async fn world(wanted: &Wanted, admin: &Admin) -> Result<World, Failure> {
    let functions = wanted.functions.iter().map(|it| &it.item.spec.key.tenant);
    let workflows = wanted.workflows.iter().map(|it| &it.spec.key.tenant);
    let tenants: BTreeSet<_> = functions.chain(workflows).collect();
    let mut world = World::default();
    for tenant in tenants {
        let mut found = admin.workflows(Some(tenant));
        while let Some(workflow) = found.try_next().await? {
            let spec = workflow_spec(workflow.spec.unwrap_or_default());
            let spec = spec.map_err(|failure| unusable(&failure.message))?;
            world.insert(Callee::workflow(&spec.key), Known::Workflow(spec));
        }
    }
    for callee in world.functions_of(wanted) {
        if let Some(fit) = ask(&callee, admin).await? {
            world.insert(callee, Known::Function(fit));
        }
    }
    Ok(world)
}

/// What a workflow is to others, if it goes with what it runs.
fn beside(item: &WorkflowItem, known: &BTreeMap<Callee, Fit>) -> Result<Fit, Failure> {
    item.spec.fit(|run| known.get(&Callee::of(item, run)).map(Fit::by_ref)).map_err(|error| {
        let subject = format!("{}: workflow {}", item.source.display(), item.spec.key.name);
        Failure::usage(error.to_string()).about(subject)
    })
}

/// What the server says that one is to a workflow that runs it, but for how deep workflows lie in it: that
/// is for the [`plan`] to see. `None` where there is none.
async fn ask(callee: &Callee, admin: &Admin) -> Result<Option<Fit>, Failure> {
    let name = callee.run.name().clone();
    let key = FunctionKey { tenant: callee.tenant.clone(), name };
    let (found, none) = match callee.run {
        Run::Function(_) => {
            let found = admin.function(&key).await.map(|it| {
                let keeps_state = it.spec.as_ref().is_some_and(|spec| spec.sequences.is_some());
                (ports_of_function(it), keeps_state)
            });
            (found, Reason::FunctionNotFound)
        }
        Run::Workflow(_) => {
            let found = admin.workflow(&key).await;
            (found.map(|it| (Some((it.inputs, it.outputs)), false)), Reason::WorkflowNotFound)
        }
    };
    match found {
        Ok((Some((inputs, outputs)), keeps_state)) => {
            let signature = signature(inputs, outputs)?;
            Ok(Some(Fit { keeps_state, ..Fit::of_function(signature) }))
        }
        Ok((None, _)) => Err(unusable(&format!("{} has no model", callee.run))),
        Err(error) if error.reason() == Some(none) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The inputs and outputs of the newest model.
fn ports_of_function(function: wire::Function) -> Option<(Vec<wire::TensorSpec>, Vec<wire::TensorSpec>)> {
    let newest = function.revisions.into_iter().max_by_key(|revision| revision.number)?;
    newest.model.map(|model| (model.inputs, model.outputs))
}

/// What the server says that something takes and gives.
pub(super) fn signature(
    inputs: Vec<wire::TensorSpec>,
    outputs: Vec<wire::TensorSpec>,
) -> Result<Signature, Failure> {
    let tensors = |wire: Vec<wire::TensorSpec>| wire.into_iter().map(tensor).collect::<Result<_, Failure>>();
    Ok(Signature { inputs: tensors(inputs)?, outputs: tensors(outputs)? })
}

/// An answer says which dimensions are free, not which of them are equal. They are taken for equal, so
/// that nothing is refused here that the server, which knows, would take.
fn tensor(wire: wire::TensorSpec) -> Result<TensorSpec, Failure> {
    let wire::TensorSpec { name, datatype, shape, .. } = wire;
    let datatype = datatype.parse().map_err(|error| unusable(&format!("{error}")))?;
    let dim = |&size: &i64| match u64::try_from(size) {
        Ok(size) => Dim::Fixed(size),
        Err(_) => Dim::Symbol("N".to_owned()),
    };
    let shape = shape.iter().map(dim).collect();
    Ok(TensorSpec { shape, name, datatype })
}

fn unusable(why: &str) -> Failure {
    Failure::failed(format!("the server's answer cannot be used: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_types::manifest::{self, Manifest};
    use millrace_types::{DataType, FunctionName, TenantName};

    fn spec(name: &str, datatype: &str, shape: &[i64]) -> wire::TensorSpec {
        wire::TensorSpec {
            name: name.into(),
            datatype: datatype.into(),
            shape: shape.to_vec(),
            ..Default::default()
        }
    }

    fn item(second: &str) -> WorkflowItem {
        let text = format!(
            "apiVersion: millrace/v1\nkind: Workflow\nmetadata: {{name: chain, tenant: team}}\nspec:\n  inputs: [x]\n  steps:\n    - {{name: a, function: first, inputs: {{x: input.x}}}}\n    - {{name: b, function: {second}, inputs: {{x: a.y}}}}\n  outputs: {{y: b.y}}\n"
        );
        let Manifest::Workflow(spec) = manifest::parse(&text).unwrap().remove(0) else {
            panic!("not a workflow")
        };
        WorkflowItem { spec, source: "chain.yaml".into() }
    }

    fn known() -> BTreeMap<Callee, Fit> {
        let tensors =
            |specs: &[wire::TensorSpec]| specs.iter().cloned().map(|it| tensor(it).unwrap()).collect();
        let of = |name: &str, x: &[i64], y: &[i64]| {
            let name = FunctionName::new(name).unwrap();
            let signature = Signature {
                inputs: tensors(&[spec("x", "FP32", x)]),
                outputs: tensors(&[spec("y", "FP32", y)]),
            };
            let callee = Callee { tenant: TenantName::new("team").unwrap(), run: Run::Function(name) };
            (callee, Fit::of_function(signature))
        };
        let (callee, fit) = of("counter", &[1, 10], &[1]);
        let counter = (callee, Fit { keeps_state: true, ..fit });
        let (first, second) = (of("first", &[-1, 64], &[-1, 10]), of("second", &[1, 10], &[1]));
        [first, second, of("wide", &[1, 20], &[1]), counter].into()
    }

    #[test]
    fn what_fits_says_what_the_whole_takes_and_gives() {
        let signature = beside(&item("second"), &known()).unwrap().signature;
        assert_eq!(signature.inputs[0].shape[1], Dim::Fixed(64));
        assert_eq!(signature.outputs[0].shape, [Dim::Fixed(1)]);
    }

    #[test]
    fn what_does_not_fit_is_refused_with_its_manifest_and_edge() {
        for (second, says) in [
            ("wide", "chain.yaml: workflow chain: a.y has shape [a.N, 10]"),
            ("counter", "chain.yaml: workflow chain: function \"counter\" has sequences"),
            ("none", "chain.yaml: workflow chain: step \"b\" runs function \"none\", which does not exist"),
        ] {
            let message = beside(&item(second), &known()).unwrap_err().message.unwrap();
            assert!(message.starts_with(says), "{message}");
        }
    }

    #[test]
    fn a_servers_tensor_is_read_with_its_free_dimensions() {
        let read = tensor(spec("x", "INT64", &[-1, 3])).unwrap();
        assert_eq!((read.datatype, read.shape[1].clone()), (DataType::Int64, Dim::Fixed(3)));
        assert!(matches!(read.shape[0], Dim::Symbol(_)));
        assert!(tensor(spec("x", "COMPLEX", &[])).is_err());
    }

    #[test]
    fn a_function_takes_what_its_newest_model_takes() {
        let revision = |number, name: &str| wire::Revision {
            number,
            model: Some(wire::ModelSummary { inputs: vec![spec(name, "FP32", &[1])], ..Default::default() }),
            ..Default::default()
        };
        let function =
            wire::Function { revisions: vec![revision(2, "new"), revision(1, "old")], ..Default::default() };
        assert_eq!(ports_of_function(function).unwrap().0[0].name, "new");
        assert_eq!(ports_of_function(wire::Function::default()), None);
    }
}
