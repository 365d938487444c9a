//! Tests of workflows that are applied, listed and shown.

use millrace_proto::admin::{self as api, workflow_step::Run};
use millrace_proto::status::from_status;
use millrace_types::{Failure, Reason};

use super::{apply_workflow, chain, function, two_in_a_row};
use crate::routing::{answer_of, infer};
use crate::support::{Cluster, apply, cnn, mlp, reason, until, upload};

#[tokio::test]
async fn a_workflow_is_listed_shown_changed_and_deleted() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    cluster.deploy("f", &mlp()).await;
    let made = apply_workflow(&cluster, chain("w", &[function("f")])).await.unwrap();
    assert_eq!((made.generation, made.inputs[0].shape.clone()), (1, vec![-1, 64]));
    let ready = &made.conditions[0];
    assert_eq!((ready.r#type.as_str(), ready.status()), ("Ready", api::ConditionStatus::False));
    assert!(ready.message.starts_with("function f: "), "{}", ready.message);
    let changed = apply_workflow(&cluster, chain("w", &[function("f"), function("f")])).await.unwrap();
    assert_eq!(changed.generation, 2);
    for name in ["v", "x"] {
        apply_workflow(&cluster, chain(name, &[Run::Workflow("w".into())])).await.unwrap();
    }
    let page =
        |token: String| api::ListWorkflowsRequest { page_size: 2, page_token: token, ..Default::default() };
    let first = admin.list_workflows(page(String::new())).await.unwrap().into_inner();
    let second = admin.list_workflows(page(first.next_page_token)).await.unwrap().into_inner();
    let names: Vec<_> =
        first.workflows.iter().chain(&second.workflows).map(|it| it.spec.clone().unwrap().name).collect();
    assert_eq!((names, second.next_page_token), (["v", "w", "x"].map(str::to_owned).to_vec(), String::new()));

    let delete = |name: &str| api::DeleteWorkflowRequest { name: name.into(), ..Default::default() };
    assert_eq!(reason(&admin.delete_workflow(delete("w")).await.unwrap_err()), Reason::InUse);
    for name in ["x", "v", "w"] {
        admin.delete_workflow(delete(name)).await.unwrap();
    }
    assert_eq!(reason(&admin.delete_workflow(delete("w")).await.unwrap_err()), Reason::WorkflowNotFound);
    let get = api::GetWorkflowRequest { name: "w".into(), ..Default::default() };
    assert_eq!(reason(&admin.get_workflow(get).await.unwrap_err()), Reason::WorkflowNotFound);
}

#[tokio::test]
async fn an_invalid_workflow_is_refused_with_the_names_of_its_faulty_parts() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    cluster.deploy("f", &mlp()).await;
    cluster.deploy("pictures", &cnn()).await;
    let refused = async |spec: api::WorkflowSpec| -> Failure {
        from_status(&apply_workflow(&cluster, spec).await.unwrap_err())
    };
    let missing = refused(chain("w", &[function("f"), function("g")])).await;
    assert_eq!(missing.reason, Reason::InvalidSpec);
    assert!(missing.message.contains("runs function \"g\", which does not exist"), "{}", missing.message);
    let unfit = refused(chain("w", &[function("f"), function("pictures")])).await;
    assert!(unfit.message.contains("step \"s1\""), "{}", unfit.message);
    let taken = refused(chain("f", &[function("pictures")])).await;
    assert_eq!(taken.reason, Reason::NameTaken, "{taken:?}");

    apply_workflow(&cluster, chain("w", &[function("f"), function("f")])).await.unwrap();
    let model = mlp();
    upload(&mut admin, &model).await.unwrap();
    assert_eq!(reason(&apply(&mut admin, "w", &model).await.unwrap_err()), Reason::NameTaken);
    let delete = api::DeleteFunctionRequest { name: "f".into(), ..Default::default() };
    assert_eq!(reason(&admin.delete_function(delete).await.unwrap_err()), Reason::InUse);
    let other = cnn();
    let broken = from_status(&apply(&mut admin, "f", &other).await.unwrap_err());
    assert_eq!(broken.reason, Reason::InvalidSpec);
    assert!(broken.message.starts_with("workflow default/w runs default/f"), "{}", broken.message);
}

#[tokio::test]
async fn the_protocol_shows_a_workflow_as_a_model() {
    use millrace_proto::inference as oip;
    let (cluster, _worker) = two_in_a_row().await;
    let mut client = cluster.inference();
    let about =
        |name: &str, version: &str| oip::ModelMetadataRequest { name: name.into(), version: version.into() };
    let metadata = client.model_metadata(about("w", "")).await.unwrap().into_inner();
    assert_eq!(
        (metadata.platform.as_str(), metadata.versions.as_slice()),
        ("millrace_workflow", &["1".to_owned()][..])
    );
    assert_eq!(metadata.inputs[0].shape, [-1, 64]);
    let other = client.model_metadata(about("w", "2")).await.unwrap_err();
    assert_eq!(reason(&other), Reason::RevisionNotFound);
    let index = client.repository_index(oip::RepositoryIndexRequest::default()).await.unwrap().into_inner();
    let names: Vec<_> =
        index.models.iter().map(|model| (model.name.as_str(), model.state.as_str())).collect();
    assert_eq!(names, [("f", "READY"), ("w", "READY")]);
    let unload = oip::RepositoryModelUnloadRequest { model_name: "w".into(), ..Default::default() };
    assert_eq!(reason(&client.repository_model_unload(unload).await.unwrap_err()), Reason::Unimplemented);
    // The workflow's function can be unloaded, which makes the workflow unready.
    let unload = oip::RepositoryModelUnloadRequest { model_name: "f".into(), ..Default::default() };
    client.repository_model_unload(unload).await.unwrap();
    until("the workflow to be unready", async || {
        let asked = oip::ModelReadyRequest { name: "w".into(), version: String::new() };
        (!client.model_ready(asked).await.unwrap().into_inner().ready).then_some(())
    })
    .await;
    let failure = answer_of(infer(&cluster, "w")).await.unwrap_err();
    assert_eq!(failure.reason, Reason::FunctionNotReady);
    assert!(failure.message.contains("function f: it is unloaded"), "{}", failure.message);
}
