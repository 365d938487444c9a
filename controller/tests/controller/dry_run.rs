//! Tests of the dry run of several applies.

use millrace_proto::admin::{self as api, apply_item::Item, workflow_step::Run};
use millrace_proto::convert::tensor_spec_wire;
use millrace_types::Digest;

use crate::support::{Cluster, cnn, list, mlp, spec};
use crate::workflows::{apply_workflow, chain};

fn function(name: &str, model: &[u8]) -> api::ApplyItem {
    let item = api::FunctionItem { spec: Some(spec(name)), digest: Digest::of(model).to_string() };
    api::ApplyItem { item: Some(Item::Function(item)) }
}

/// Returns a workflow of two steps that run the same function.
fn twice(name: &str, runs: &str) -> api::WorkflowSpec {
    let run = Run::Function(runs.into());
    chain(name, &[run.clone(), run])
}

fn workflow(name: &str, runs: &str) -> api::ApplyItem {
    api::ApplyItem { item: Some(Item::Workflow(twice(name, runs))) }
}

fn pending(model: &[u8]) -> api::PendingModel {
    let compiled = millrace_model::compile(&model.to_vec().into()).unwrap();
    let summary = api::ModelSummary {
        weights_bytes: compiled.summary.weights_bytes,
        parameters: compiled.summary.parameters,
        launches: u32::try_from(compiled.launches.len()).unwrap(),
        inputs: compiled.summary.inputs.iter().map(tensor_spec_wire).collect(),
        outputs: compiled.summary.outputs.iter().map(tensor_spec_wire).collect(),
    };
    api::PendingModel { digest: Digest::of(model).to_string(), model: Some(summary) }
}

async fn dry_run(
    cluster: &Cluster,
    items: Vec<api::ApplyItem>,
    models: &[Vec<u8>],
) -> Result<Vec<(u32, api::ApplyOutcome)>, api::ItemRefusal> {
    let models = models.iter().map(|model| pending(model)).collect();
    let request = api::DryRunApplyRequest { items, models };
    let answer = cluster.admin().dry_run_apply(request).await.unwrap().into_inner();
    match answer.refusal {
        Some(refusal) => Err(refusal),
        None => Ok(answer.steps.iter().map(|step| (step.item, step.outcome())).collect()),
    }
}

#[tokio::test]
async fn a_dry_run_of_a_set_accepts_pending_models_and_stores_nothing() {
    use api::ApplyOutcome::{Configured, Created, Unchanged};
    let cluster = Cluster::start().await;
    let items = || vec![workflow("w", "f"), function("f", &mlp())];
    let missing = dry_run(&cluster, items(), &[]).await.unwrap_err();
    assert_eq!((missing.item, missing.reason.as_str()), (1, "ARTIFACT_NOT_FOUND"));
    assert_eq!(dry_run(&cluster, items(), &[mlp()]).await, Ok(vec![(1, Created), (0, Created)]));
    assert_eq!(list(&mut cluster.admin()).await, vec![]);

    cluster.deploy("f", &mlp()).await;
    apply_workflow(&cluster, twice("w", "f")).await.unwrap();
    assert_eq!(dry_run(&cluster, items(), &[]).await, Ok(vec![(0, Unchanged), (1, Unchanged)]));
    let leaves = vec![function("f", &cnn()), function("g", &mlp()), workflow("w", "g")];
    let order = vec![(1, Created), (2, Configured), (0, Configured)];
    assert_eq!(dry_run(&cluster, leaves, &[cnn()]).await, Ok(order));
}

#[tokio::test]
async fn a_refusal_names_its_item_and_the_workflow_that_it_would_break() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    apply_workflow(&cluster, twice("w", "f")).await.unwrap();
    let items = vec![function("g", &mlp()), function("f", &cnn())];
    let refused = dry_run(&cluster, items, &[cnn()]).await.unwrap_err();
    assert_eq!((refused.item, refused.reason.as_str()), (1, "INVALID_SPEC"));
    let broken = refused.broken.unwrap();
    assert_eq!(broken.workflow, "w");
    assert!(
        refused.message.contains(&broken.problem) && broken.problem.contains("step \"s1\""),
        "{broken:?}"
    );

    let invalid = api::FunctionSpec { name: "Upper".into(), ..spec("f") };
    let item = api::FunctionItem { spec: Some(invalid), digest: Digest::of(&mlp()).to_string() };
    let items = vec![function("f", &mlp()), api::ApplyItem { item: Some(Item::Function(item)) }];
    let refused = dry_run(&cluster, items, &[]).await.unwrap_err();
    assert_eq!((refused.item, refused.reason.as_str()), (1, "INVALID_SPEC"));
}
