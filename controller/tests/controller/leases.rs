//! Tests that only silence ends a registration, and neither a broken stream nor a new leader.

use std::time::Duration;

use millrace_proto::admin as api;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message::Message;
use millrace_types::Reason;

use crate::stub::{Prepares, Stub};
use crate::support::{Cluster, mlp, nodes, reason, short_lease, soon, until};

async fn until_lost(cluster: &Cluster, name: &str) -> api::Node {
    let mut admin = cluster.admin();
    until("the loss", async || {
        let lost = |node: &api::Node| node.name == name && node.status() == api::NodeStatus::Lost;
        nodes(&mut admin).await.into_iter().find(lost)
    })
    .await
}

#[tokio::test]
async fn a_silent_node_is_lost_and_its_functions_are_placed_elsewhere() {
    let cluster = Cluster::start_with(short_lease).await;
    cluster.deploy("f", &mlp()).await;
    let mut silent = Stub::start(&cluster, "n1").await;
    silent.told(&["f@1"]).await;
    let mut other = Stub::start(&cluster, "n2").await;
    other.told(&[]).await;
    // The node's stream stays open, but carries no messages.
    silent.alive.send_replace(false);
    other.told(&["f@1"]).await;
    let lost = until_lost(&cluster, "n1").await;
    assert_eq!((lost.placements, lost.lease()), (0, api::NodeLease::Unspecified));
    let mut admin = cluster.admin();
    let live = nodes(&mut admin).await.remove(1);
    assert_eq!((live.status(), live.placements), (api::NodeStatus::Live, 1));
    assert_eq!(live.lease(), api::NodeLease::Believed);
}

#[tokio::test]
async fn a_lost_node_that_is_heard_again_is_registered_again_and_gets_its_desired_state() {
    let cluster = Cluster::start_with(short_lease).await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    worker.told(&["f@1"]).await;
    let before = worker.desired.borrow().index;
    worker.alive.send_replace(false);
    until_lost(&cluster, "n1").await;
    assert_eq!(worker.desired.borrow().index, before, "a lost node gets no desired state");
    worker.alive.send_replace(true);
    soon("the new epoch", worker.epoch.wait_for(|epoch| *epoch == 2)).await.unwrap();
    soon("its functions", worker.desired.wait_for(|desired| desired.index > before)).await.unwrap();
    worker.told(&["f@1"]).await;
    let node = nodes(&mut cluster.admin()).await.remove(0);
    assert_eq!((node.status(), node.epoch, node.connected), (api::NodeStatus::Live, 2, true));
}

#[tokio::test]
async fn a_node_that_only_lost_its_stream_keeps_its_registration_and_placements() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut first = Stub::start(&cluster, "n1").await;
    first.told(&["f@1"]).await;
    let stamp = |stub: &Stub| stub.desired.borrow().index;
    let before = stamp(&first);
    first.kill();
    let mut again = Stub::start(&cluster, "n1").await;
    assert_eq!(again.hello.epoch, 1);
    again.told(&["f@1"]).await;
    assert_eq!(stamp(&again), before, "no placement changed");
}

#[tokio::test]
async fn a_worker_that_says_goodbye_is_replaced_at_once_and_its_name_is_free() {
    let forever = |config: &mut millrace_controller::ControllerConfig| {
        config.limits.lease.lease = Duration::from_secs(3600);
    };
    let cluster = Cluster::start_with(forever).await;
    cluster.deploy("f", &mlp()).await;
    let mut leaving = Stub::start(&cluster, "n1").await;
    leaving.told(&["f@1"]).await;
    let mut other = Stub::start(&cluster, "n2").await;
    let refused = Stub::start_as(&cluster, "n1", "second", Prepares::AtOnce).await.err().unwrap();
    assert_eq!(reason(&refused), Reason::NodeNameTaken);
    leaving.send(Message::Goodbye(wire::Goodbye {})).await;
    other.told(&["f@1"]).await;
    until_lost(&cluster, "n1").await;
    let second = Stub::start_as(&cluster, "n1", "second", Prepares::AtOnce).await.unwrap();
    assert_eq!(second.hello.epoch, 3);
}

#[tokio::test]
async fn a_restarted_leader_keeps_its_nodes_and_announces_its_leadership() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    worker.told(&["f@1"]).await;
    let led = soon("its leadership", worker.leadership.wait_for(|it| it.leads)).await.unwrap().term;
    let cluster = cluster.restart().await;
    let mut again = Stub::start(&cluster, "n1").await;
    assert_eq!(again.hello.epoch, worker.hello.epoch, "the worker was never declared lost");
    again.told(&["f@1"]).await;
    let leads = again.leadership.wait_for(|it| it.leads);
    assert!(soon("its leadership", leads).await.unwrap().term >= led);
}
