//! Tests of requests of functions that keep state: requests go only to the worker with the state.

use millrace_model::synth::counter;
use millrace_proto::admin as api;
use millrace_proto::inference as oip;
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message::Message;
use millrace_types::Reason;

use crate::placement::schedule;
use crate::routing::{answer_of, infer_with, request, until_ready};
use crate::stub::{Prepares, Stub, ready};
use crate::support::{Cluster, apply_request, get, mlp, reason, until, upload};

fn keeping(name: &str, input: &str) -> api::ApplyFunctionRequest {
    let mut request = apply_request(name, &counter(64));
    let state = vec![api::SequenceState { input: input.into(), output: "h_out".into() }];
    let spec = request.spec.as_mut().unwrap();
    spec.sequences = Some(api::Sequences { state, ..api::Sequences::default() });
    request
}

/// Returns a request that begins sequence 9.
fn beginning() -> oip::ModelInferRequest {
    let mut request = request("f");
    for (name, choice) in [
        ("sequence_id", ParameterChoice::Int64Param(9)),
        ("sequence_start", ParameterChoice::BoolParam(true)),
    ] {
        request.parameters.insert(name.into(), oip::InferParameter { parameter_choice: Some(choice) });
    }
    request
}

#[tokio::test]
async fn a_request_of_a_sequence_goes_only_to_the_worker_with_the_sequence() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &counter(64)).await.unwrap();
    let refused = admin.apply_function(keeping("f", "h")).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::InvalidSpec);
    assert!(refused.message().contains("\"h\", which the model does not have"), "{refused:?}");
    admin.apply_function(keeping("f", "h_in")).await.unwrap();
    let mut a = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let told = a.desired.borrow().functions[0].sequences.clone().unwrap();
    assert_eq!((told.state[0].input.as_str(), told.max), ("h_in", 64));

    let metadata = oip::ModelMetadataRequest { name: "f".into(), ..Default::default() };
    let metadata = cluster.inference().model_metadata(metadata).await.unwrap().into_inner();
    let names = |tensors: &[oip::model_metadata_response::TensorMetadata]| {
        tensors.iter().map(|tensor| tensor.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!((names(&metadata.inputs), names(&metadata.outputs)), (vec!["x".into()], vec!["y".into()]));

    let answering = infer_with(&cluster, beginning());
    let call = a.call().await;
    let id = Some(wire::in_sequence::Id::Number(9));
    assert_eq!(call.request.sequence, Some(wire::InSequence { id, start: true, end: false }));
    call.answer();
    answer_of(answering).await.unwrap();

    // The request may have run, and no other worker has the sequence, so the controller does not wait
    // for another worker.
    let answering = infer_with(&cluster, beginning());
    let _held = a.call().await;
    a.kill();
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::NoWorker, true), "{failure:?}");
}

/// Returns the worker with the placement of `f`, and another worker that reports `f` ready too.
async fn placed_and_another(cluster: &Cluster) -> (Stub, Stub) {
    let mut admin = cluster.admin();
    upload(&mut admin, &counter(64)).await.unwrap();
    admin.apply_function(keeping("f", "h_in")).await.unwrap();
    let mut placed = Stub::start_as(cluster, "n1", "first", Prepares::Never).await.unwrap();
    placed.told(&["f@1"]).await;
    let f = ready(&placed.desired.borrow().functions[0]);
    let says =
        |functions| Message::FunctionStatuses(wire::FunctionStatuses { functions, ..Default::default() });
    placed.send(says(vec![f.clone()])).await;
    until_ready(cluster, "f").await;
    let other = Stub::start_as(cluster, "n2", "first", Prepares::Never).await.unwrap();
    cluster.deploy("g", &mlp()).await;
    let g = wire::FunctionStatus { name: "g".into(), ..f.clone() };
    other.send(says(vec![f, g])).await;
    // The controller has received the other worker's report.
    until_ready(cluster, "g").await;
    (placed, other)
}

/// The other worker has yet to unload the function, or is lost to all but this controller. The other
/// copy has other sequences under the same names.
#[tokio::test]
async fn a_request_of_a_sequence_goes_to_the_placed_worker_of_two_that_serve_the_function() {
    let cluster = Cluster::start().await;
    let (mut placed, _other) = placed_and_another(&cluster).await;
    let first = infer_with(&cluster, beginning());
    let held = placed.call().await;
    // The other worker is less loaded.
    let second = infer_with(&cluster, beginning());
    placed.call().await.answer();
    held.answer();
    answer_of(first).await.unwrap();
    answer_of(second).await.unwrap();
}

/// Only the placement is new: the worker reported ready before.
#[tokio::test]
async fn a_waiting_request_of_a_sequence_goes_to_the_node_of_its_functions_new_placement() {
    let cluster = Cluster::start().await;
    let (mut placed, mut other) = placed_and_another(&cluster).await;
    let answering = infer_with(&cluster, beginning());
    placed.call().await.refuse(Reason::ShuttingDown);
    schedule(&cluster, "n1", api::NodeScheduling::Draining).await;
    other.call().await.answer();
    answer_of(answering).await.unwrap();
}

/// The newest version keeps no state and has more copies. The newer copies have none of the sequences.
#[tokio::test]
async fn sequences_of_the_version_before_stay_at_the_oldest_copy() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &counter(64)).await.unwrap();
    admin.apply_function(keeping("f", "h_in")).await.unwrap();
    let mut first = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let mut stateless = apply_request("f", &counter(64));
    stateless.spec.as_mut().unwrap().replicas = 2;
    admin.apply_function(stateless).await.unwrap();
    let mut second = Stub::start(&cluster, "n2").await;
    second.told(&["f@1", "f@2"]).await;
    // Each worker reports both versions in one message.
    until("both to be ready", async || {
        let function = get(&mut admin, "f").await.unwrap();
        let both = |it: &api::Condition| it.r#type == "Ready" && it.message == "ready on 2 workers";
        function.conditions.iter().any(both).then_some(())
    })
    .await;

    let of_the_first = || oip::ModelInferRequest { model_version: "1".into(), ..beginning() };
    // The load of the workers does not matter.
    for _ in 0..2 {
        let answering = infer_with(&cluster, of_the_first());
        let held = first.call().await;
        assert!(held.request.sequence.is_some());
        let beside = infer_with(&cluster, of_the_first());
        first.call().await.answer();
        held.answer();
        answer_of(answering).await.unwrap();
        answer_of(beside).await.unwrap();
    }
    assert!(second.calls.try_recv().is_err());

    // After the first copy has gone, the remaining copy takes the sequences over, and all sequences
    // begin again.
    schedule(&cluster, "n1", api::NodeScheduling::Draining).await;
    first.told(&[]).await;
    let answering = infer_with(&cluster, of_the_first());
    second.call().await.answer();
    answer_of(answering).await.unwrap();
}
