//! Tests of when a function can be invoked, and of the refusals until then.

use std::time::Duration;

use millrace_proto::admin as api;
use millrace_proto::inference as oip;
use millrace_proto::worker::worker_message::Message;
use millrace_proto::worker::{FunctionPhase, FunctionStatuses};
use millrace_types::Reason;

use crate::routing::{answer_of, infer, infer_within, until_ready};
use crate::stub::{Prepares, Stub, ready};
use crate::support::{Cluster, apply_request, mlp, soon, until};

#[tokio::test]
async fn a_function_that_is_ready_nowhere_reports_the_reason() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let refused = answer_of(infer(&cluster, "f")).await.unwrap_err();
    assert_eq!(refused.reason, Reason::FunctionNotReady);
    assert!(refused.message.contains("no worker is attached"), "{}", refused.message);
    let mut worker = Stub::start_as(&cluster, "n1", "a", Prepares::Never).await.unwrap();
    worker.told(&["f@1"]).await;
    let refused = answer_of(infer_within(&cluster, "f", Duration::from_millis(50))).await.unwrap_err();
    assert_eq!(refused.reason, Reason::FunctionNotReady);
    assert!(refused.retryable && refused.message.contains("being prepared"), "{}", refused.message);
    let refused = answer_of(infer(&cluster, "g")).await.unwrap_err();
    assert_eq!(refused.reason, Reason::FunctionNotFound);
}

#[tokio::test]
async fn an_unloaded_function_is_refused_until_it_is_loaded_and_ready() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let mut client = cluster.inference();
    let unload = oip::RepositoryModelUnloadRequest { model_name: "f".into(), ..Default::default() };
    client.repository_model_unload(unload).await.unwrap();
    assert_eq!(answer_of(infer(&cluster, "f")).await.unwrap_err().reason, Reason::FunctionDisabled);
    worker.told(&[]).await;
    let load = oip::RepositoryModelLoadRequest { model_name: "f".into(), ..Default::default() };
    client.repository_model_load(load).await.unwrap();
    let answering = infer(&cluster, "f");
    worker.call().await.answer();
    assert!(answer_of(answering).await.is_ok());
}

#[tokio::test]
async fn an_unload_ends_when_no_worker_reports_the_function_ready() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start_as(&cluster, "n1", "a", Prepares::Never).await.unwrap();
    worker.told(&["f@1"]).await;
    let functions = worker.desired.borrow().functions.iter().map(ready).collect();
    worker.send(Message::FunctionStatuses(FunctionStatuses { functions, ..Default::default() })).await;
    until_ready(&cluster, "f").await;
    let mut client = cluster.inference();
    let unload = oip::RepositoryModelUnloadRequest { model_name: "f".into(), ..Default::default() };
    let unloading = tokio::spawn(async move { client.repository_model_unload(unload).await });
    worker.told(&[]).await;
    assert!(!unloading.is_finished(), "the worker still reports the function ready");
    worker.send(Message::FunctionStatuses(FunctionStatuses::default())).await;
    soon("the unload", unloading).await.unwrap().unwrap();
}

#[tokio::test]
async fn the_old_revision_serves_until_the_new_one_is_ready() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start_as(&cluster, "n1", "a", Prepares::Never).await.unwrap();
    worker.told(&["f@1"]).await;
    let report = async |worker: &Stub, revisions: &[u64]| {
        let functions = worker.desired.borrow().functions.clone();
        let functions = functions.iter().filter(|it| revisions.contains(&it.revision)).map(ready).collect();
        worker.send(Message::FunctionStatuses(FunctionStatuses { functions, ..Default::default() })).await;
    };
    report(&worker, &[1]).await;
    until_ready(&cluster, "f").await;
    let mut admin = cluster.admin();
    let mut next = apply_request("f", &mlp());
    next.spec.as_mut().unwrap().labels.insert("a".into(), "b".into());
    admin.apply_function(next).await.unwrap();
    worker.told(&["f@1", "f@2"]).await;
    let answering = infer(&cluster, "f");
    let call = worker.call().await;
    assert_eq!(call.request.revision, 1);
    call.answer();
    answer_of(answering).await.unwrap();
    let shown = crate::support::get(&mut admin, "f").await.unwrap();
    assert_eq!(shown.conditions[0].status(), api::ConditionStatus::False, "the newest is not ready yet");

    report(&worker, &[1, 2]).await;
    until("the new revision", async || {
        let shown = crate::support::get(&mut admin, "f").await.unwrap();
        (shown.conditions[0].reason == "Prepared").then_some(())
    })
    .await;
    let answering = infer(&cluster, "f");
    let call = worker.call().await;
    assert_eq!(call.request.revision, 2);
    call.answer();
    answer_of(answering).await.unwrap();
}

#[tokio::test]
async fn a_function_that_cannot_be_prepared_reports_its_workers_error() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start_as(&cluster, "n1", "a", Prepares::Never).await.unwrap();
    worker.told(&["f@1"]).await;
    let mut failed = ready(&worker.desired.borrow().functions[0]);
    failed.phase = FunctionPhase::Failed.into();
    failed.message = "the host tier is full".into();
    worker
        .send(Message::FunctionStatuses(FunctionStatuses { functions: vec![failed], ..Default::default() }))
        .await;
    let mut admin = cluster.admin();
    let condition = until("the condition", async || {
        let shown = crate::support::get(&mut admin, "f").await.unwrap().conditions.remove(0);
        (shown.reason == "PrepareFailed").then_some(shown)
    })
    .await;
    assert_eq!(condition.status(), api::ConditionStatus::False);
    assert_eq!(condition.message, "worker n1: the host tier is full");
    let refused = answer_of(infer(&cluster, "f")).await.unwrap_err();
    assert_eq!(refused.reason, Reason::FunctionNotReady);
    assert!(refused.message.contains("the host tier is full"), "{}", refused.message);
    let load = oip::RepositoryModelLoadRequest { model_name: "f".into(), ..Default::default() };
    let refused = cluster.inference().repository_model_load(load).await.unwrap_err();
    assert!(refused.message().contains("the host tier is full"), "{refused}");

    let unload = oip::RepositoryModelUnloadRequest { model_name: "f".into(), ..Default::default() };
    cluster.inference().repository_model_unload(unload).await.unwrap();
    let shown = crate::support::get(&mut admin, "f").await.unwrap();
    assert_eq!((shown.conditions[0].reason.as_str(), shown.enabled), ("Disabled", false));
}
