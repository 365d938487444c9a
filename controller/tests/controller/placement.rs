//! Tests of placements: spreading, moving before removal, and the reasons of shortages.

use millrace_proto::admin::{self as api, workflow_step::Run};
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message::Message;
use millrace_types::Reason;

use crate::stub::{Prepares, Stub, ready};
use crate::support::{
    Cluster, apply, apply_request, cnn, get, mlp, nodes, reason, short_lease, until, upload,
};
use crate::workflows::{apply_workflow, chain};

pub(crate) async fn schedule(cluster: &Cluster, name: &str, scheduling: api::NodeScheduling) -> api::Node {
    let request = api::SetNodeSchedulingRequest {
        name: name.into(),
        scheduling: scheduling.into(),
        ..Default::default()
    };
    cluster.admin().set_node_scheduling(request).await.unwrap().into_inner()
}

/// Reports every function of the desired state as ready.
async fn report_ready(stub: &Stub) {
    let functions = stub.desired.borrow().functions.iter().map(ready).collect();
    stub.send(Message::FunctionStatuses(wire::FunctionStatuses { functions, ..Default::default() })).await;
}

async fn placed(cluster: &Cluster, name: &str) -> api::Condition {
    let conditions = get(&mut cluster.admin(), name).await.unwrap().conditions;
    conditions.into_iter().find(|condition| condition.r#type == "Placed").unwrap()
}

#[tokio::test]
async fn a_function_is_placed_on_the_requested_number_of_nodes_or_reports_the_shortage() {
    let cluster = Cluster::start().await;
    cluster.deploy_on("f", &mlp(), 2).await;
    let condition =
        until("the reason", async || Some(placed(&cluster, "f").await).filter(|it| it.reason == "NoNode"))
            .await;
    assert!(condition.message.contains("start a worker"), "{}", condition.message);
    let mut first = Stub::start(&cluster, "n1").await;
    first.told(&["f@1"]).await;
    let condition = until("the reason", async || {
        Some(placed(&cluster, "f").await).filter(|it| it.reason == "TooFewNodes")
    })
    .await;
    assert!(condition.message.contains("1 of 2 copies (on n1)"), "{}", condition.message);
    let mut second = Stub::start(&cluster, "n2").await;
    second.told(&["f@1"]).await;
    let condition = until("both copies", async || {
        Some(placed(&cluster, "f").await).filter(|it| it.status() == api::ConditionStatus::True)
    })
    .await;
    assert_eq!(condition.message, "2 of 2 copies (on n1, n2)");

    cluster.deploy("g", &cnn()).await;
    cluster.deploy("h", &cnn()).await;
    until("one more on each", async || {
        let placements: Vec<_> = nodes(&mut cluster.admin()).await.iter().map(|it| it.placements).collect();
        (placements.iter().sum::<u32>() == 4).then_some(())
    })
    .await;
    let request = api::DeleteFunctionRequest { name: "f".into(), ..Default::default() };
    cluster.admin().delete_function(request).await.unwrap();
    let gone = |desired: &wire::DesiredState| desired.functions.iter().all(|it| it.name != "f");
    for stub in [&mut first, &mut second] {
        crate::support::soon("its end", stub.desired.wait_for(gone)).await.unwrap();
    }
}

#[tokio::test]
async fn a_drained_node_keeps_its_functions_until_another_node_is_ready() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut draining = Stub::start(&cluster, "n1").await;
    draining.told(&["f@1"]).await;
    let mut other = Stub::start_as(&cluster, "n2", "a", Prepares::Never).await.unwrap();
    let node = schedule(&cluster, "n1", api::NodeScheduling::Draining).await;
    assert_eq!((node.scheduling(), node.placements), (api::NodeScheduling::Draining, 1));
    other.told(&["f@1"]).await;
    // The node knows of the drain, and still has to serve.
    let told = |it: &wire::DesiredState| it.scheduling() == wire::NodeScheduling::Draining;
    let desired = crate::support::soon("the drain", draining.desired.wait_for(told)).await.unwrap().clone();
    assert_eq!(desired.functions.len(), 1);
    assert_eq!(nodes(&mut cluster.admin()).await[0].placements, 1, "not before the other is ready");
    report_ready(&other).await;
    draining.told(&[]).await;
    assert_eq!(nodes(&mut cluster.admin()).await[0].placements, 0, "it may be stopped now");
}

#[tokio::test]
async fn a_cordoned_node_keeps_its_functions_and_gets_no_new_ones() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    worker.told(&["f@1"]).await;
    schedule(&cluster, "n1", api::NodeScheduling::Cordoned).await;
    apply(&mut cluster.admin(), "g", &mlp()).await.unwrap();
    until("the reason", async || Some(placed(&cluster, "g").await).filter(|it| it.reason == "NoNode")).await;
    worker.told(&["f@1"]).await;
    schedule(&cluster, "n1", api::NodeScheduling::Schedulable).await;
    worker.told(&["f@1", "g@1"]).await;
}

#[tokio::test]
async fn a_node_can_be_removed_once_it_is_lost() {
    let cluster = Cluster::start_with(short_lease).await;
    let worker = Stub::start(&cluster, "n1").await;
    let mut admin = cluster.admin();
    let request = api::RemoveNodeRequest { name: "n1".into(), ..Default::default() };
    assert_eq!(reason(&admin.remove_node(request.clone()).await.unwrap_err()), Reason::NodeState);
    worker.kill();
    until("the removal", async || admin.remove_node(request.clone()).await.ok()).await;
    assert_eq!(nodes(&mut admin).await, vec![]);
    assert_eq!(reason(&admin.remove_node(request).await.unwrap_err()), Reason::NodeNotFound);
}

#[tokio::test]
async fn a_function_that_fails_on_one_node_is_tried_on_another() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    admin.apply_function(apply_request("f", &mlp())).await.unwrap();
    let mut first = Stub::start_as(&cluster, "n1", "a", Prepares::Never).await.unwrap();
    first.told(&["f@1"]).await;
    let mut failed = ready(&first.desired.borrow().functions[0]);
    failed.phase = wire::FunctionPhase::Failed.into();
    first
        .send(Message::FunctionStatuses(wire::FunctionStatuses {
            functions: vec![failed],
            ..Default::default()
        }))
        .await;
    let mut second = Stub::start(&cluster, "n2").await;
    second.told(&["f@1"]).await;
    until("the other to be ready", async || {
        let shown = get(&mut admin, "f").await.unwrap();
        (shown.conditions[0].status() == api::ConditionStatus::True).then_some(())
    })
    .await;
    assert_eq!(first.desired.borrow().functions.len(), 1, "the failed placement is kept");
}

/// D19: like an `apply` of a folder, the functions come first, and have not run when the workflow is
/// applied. Then the node of these functions is drained.
#[tokio::test]
async fn functions_of_a_workflow_share_one_of_three_nodes_and_leave_it_together() {
    let cluster = Cluster::start().await;
    let mut stubs = Vec::new();
    for name in ["n1", "n2", "n3"] {
        stubs.push(Stub::start(&cluster, name).await);
    }
    let served = || stubs.iter().map(|stub| stub.desired.borrow().functions.len()).collect::<Vec<_>>();
    let functions = ["f", "g", "h"];
    for name in functions {
        cluster.deploy(name, &mlp()).await;
    }
    until("each to be on a node of its own", async || (served() == [1, 1, 1]).then_some(())).await;
    let runs = functions.map(|name| Run::Function(name.into()));
    apply_workflow(&cluster, chain("w", &runs)).await.unwrap();
    let together = async || {
        let served = served();
        (served.iter().sum::<usize>() == 3).then(|| served.iter().position(|count| *count == 3))?
    };
    let first = until("all to be on one", together).await;
    schedule(&cluster, &format!("n{}", first + 1), api::NodeScheduling::Draining).await;
    let second = until("all to be on another", async || together().await.filter(|node| *node != first)).await;
    assert_ne!(first, second);
}
