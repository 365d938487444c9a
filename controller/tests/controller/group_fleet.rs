//! Tests of workers of a group of controllers: one registration over a stream to each controller, and a
//! leader that may change at any moment.

use std::net::SocketAddr;

use futures::future::select_all;
use millrace_cluster_state::NodeStatus;
use millrace_controller::{ClusterStart, JoinAs};
use millrace_proto::admin as api;
use millrace_proto::inference::{self as oip, grpc_inference_service_client::GrpcInferenceServiceClient};
use millrace_proto::worker as wire;
use millrace_types::{NodeName, Reason};

use crate::group::{Member, three};
use crate::stub::{Prepares, Stub};
use crate::support::{apply, channel, mlp, nodes, reason, short_lease, soon, until, upload};

fn internal(member: &Member) -> SocketAddr {
    member.config.internal_listen
}

/// Attaches a worker to each controller.
async fn attach(members: &[Member], name: &str) -> Vec<Stub> {
    let mut streams = Vec::new();
    for member in members {
        let stream = Stub::start_at(internal(member), name, name, Prepares::AtOnce).await;
        streams.push(stream.unwrap());
    }
    streams
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_has_one_registration_and_obeys_the_current_leader() {
    let mut members = three().await;
    // The first controller to get the worker's hello does not lead and forwards the registration.
    members.reverse();
    let mut worker = attach(&members, "n1").await;
    assert!(worker.iter().all(|stream| stream.hello.epoch == worker[0].hello.epoch));
    let other = Stub::start_at(internal(&members[1]), "n1", "second", Prepares::AtOnce).await;
    assert_eq!(reason(&other.err().unwrap()), Reason::NodeNameTaken);

    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[0].admin(), "f", &mlp()).await.unwrap();
    let mut leader = worker.pop().unwrap();
    leader.told(&["f@1"]).await;
    let term = leader.leadership.borrow().term;
    assert!(
        worker.iter().all(|stream| stream.desired.borrow().functions.is_empty()),
        "only the leader sends a desired state"
    );

    members.pop().unwrap().kill();
    let elected = {
        let led = worker.iter_mut().map(|it| Box::pin(it.leadership.wait_for(|it| it.leads)));
        soon("a new leader", select_all(led)).await.1
    };
    assert!(worker[elected].leadership.borrow().term > term);
    worker[elected].told(&["f@1"]).await;
    assert_eq!(worker[elected].desired.borrow().term, worker[elected].leadership.borrow().term);
    apply(&mut members[0].admin(), "g", &mlp()).await.unwrap();
    worker[elected].told(&["f@1", "g@1"]).await;
    let node = nodes(&mut members[0].admin()).await.remove(0);
    assert_eq!((node.epoch, node.status()), (worker[0].hello.epoch, api::NodeStatus::Live));
}

async fn until_ready(client: SocketAddr) {
    until_readiness(client, true).await;
}

async fn until_readiness(client: SocketAddr, wanted: bool) {
    until("readiness", async || {
        let mut client = GrpcInferenceServiceClient::new(channel(client.to_string()));
        let asked = oip::ModelReadyRequest { name: "f".into(), version: String::new() };
        (client.model_ready(asked).await.unwrap().into_inner().ready == wanted).then_some(())
    })
    .await;
}

/// Reports the functions that `told` was told to serve as ready on these streams, because a worker
/// reports on all streams.
async fn report_ready(streams: &[Stub], told: &Stub) -> wire::worker_message::Message {
    let functions: Vec<_> = told.desired.borrow().functions.iter().map(crate::stub::ready).collect();
    let ready = wire::worker_message::Message::FunctionStatuses(wire::FunctionStatuses {
        functions,
        ..Default::default()
    });
    for stream in streams {
        stream.send(ready.clone()).await;
    }
    ready
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_keep_serving_without_a_majority_and_accept_a_returning_worker() {
    let mut members = three().await;
    let mut worker = attach(&members, "n1").await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[0].admin(), "f", &mlp()).await.unwrap();
    worker[0].told(&["f@1"]).await;
    let ready = report_ready(&worker[2..], &worker[0]).await;
    let client = members[2].config.client_listen;
    let infer = || {
        let mut client = GrpcInferenceServiceClient::new(channel(client.to_string()));
        let input = oip::model_infer_request::InferInputTensor {
            name: "x".into(),
            datatype: "FP32".into(),
            shape: vec![1, 64],
            ..Default::default()
        };
        let request = oip::ModelInferRequest {
            model_name: "f".into(),
            inputs: vec![input],
            raw_input_contents: vec![vec![0; 256].into()],
            ..Default::default()
        };
        async move { client.model_infer(request).await }
    };
    until_ready(client).await;
    members[0].kill();
    members[1].kill();
    let mut last = worker.pop().unwrap();
    for _ in 0..3 {
        let answering = tokio::spawn(infer());
        last.call().await.answer();
        soon("an answer", answering).await.unwrap().unwrap();
    }
    // The worker's stream breaks. The worker attaches again under the old registration, although no
    // write is possible.
    drop(last);
    let mut back = Stub::start_at(internal(&members[2]), "n1", "n1", Prepares::AtOnce).await.unwrap();
    assert_eq!(back.hello.epoch, worker[0].hello.epoch);
    back.send(ready).await;
    until_ready(client).await;
    let answering = tokio::spawn(infer());
    back.call().await.answer();
    soon("an answer", answering).await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_node_gets_no_requests_from_a_gateway_once_the_gateway_does_not_hear_it_either() {
    let first = Member::try_start(1, ClusterStart::Bootstrap, short_lease).await.unwrap();
    let second = Member::try_start(2, first.joining(JoinAs::Voter), short_lease).await.unwrap();
    let members = [first, second];
    let mut worker = attach(&members, "n1").await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[0].admin(), "f", &mlp()).await.unwrap();
    worker[0].told(&["f@1"]).await;
    report_ready(&worker[1..], &worker[0]).await;
    let gateway = members[1].config.client_listen;
    until_ready(gateway).await;
    worker[0].alive.send_replace(false);
    let name = NodeName::new("n1").unwrap();
    let lost = || members[1].state().node(&name).is_some_and(|node| node.status == NodeStatus::Lost);
    until("its loss", async || lost().then_some(())).await;
    // The state does not change from here on. The worker's streams stay open.
    worker[1].alive.send_replace(false);
    until_readiness(gateway, false).await;
}
