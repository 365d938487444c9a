//! Tests of workflow runs with failures.

use millrace_proto::admin::{self as api, workflow_step::Run};
use millrace_proto::worker as wire;
use millrace_proto::worker::tensor_part::Part;
use millrace_types::Reason;

use super::{
    apply_workflow, chain, function, held, id, keep, released, respond, rows_of, taken, two_in_a_row,
};
use crate::routing::{answer_of, infer, infer_with, request, until_ready};
use crate::stub::Stub;
use crate::support::{Cluster, apply_request, mlp, soon, upload};

#[tokio::test]
async fn a_lost_object_is_produced_again() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 1);
    let second = worker.call().await;
    respond(second, wire::InvokeResponse { lost: vec![id(1)], ..Default::default() });

    let again = worker.call().await;
    assert_eq!(again.request.inputs[0].data.len(), 256, "the input of the request is still available");
    keep(again, 2);
    let second = worker.call().await;
    assert_eq!(taken(&second), [2]);
    second.answer();
    answer_of(answering).await.unwrap();
    // The first object was out of reach for the second call's worker, but may still exist, and is
    // released too.
    assert_eq!(released(&mut worker).await, [1]);
    assert_eq!(released(&mut worker).await, [2]);
}

#[tokio::test]
async fn a_run_ends_after_repeated_losses_of_the_same_object() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    for counter in 1..=3 {
        keep(worker.call().await, counter);
        let second = worker.call().await;
        respond(second, wire::InvokeResponse { lost: vec![id(counter)], ..Default::default() });
    }
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!(failure.reason, Reason::DataLost, "{failure:?}");
    assert!(failure.message.contains("of workflow default/w: "), "{}", failure.message);
}

/// Starts a workflow with a step over rows, and a last step that reads all rows at once.
async fn rows_then_all() -> (Cluster, Stub) {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut spec = chain("w", &[function("f"), function("f"), function("f")]);
    spec.steps[1].each = "x".into();
    apply_workflow(&cluster, spec).await.unwrap();
    let worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "w").await;
    (cluster, worker)
}

/// Keeps the outputs of four rows, which arrive in any order, under the number in each row.
async fn keep_rows(worker: &mut Stub, beyond: u64) {
    for _ in 0..4 {
        let call = worker.call().await;
        let number = f32::from_le_bytes(call.request.inputs[0].data[..4].try_into().unwrap());
        keep(call, beyond + number as u64);
    }
}

#[tokio::test]
async fn all_lost_objects_are_produced_again_at_once() {
    let (cluster, mut worker) = rows_then_all().await;
    let answering = infer(&cluster, "w");
    respond(worker.call().await, rows_of(&[1.0, 2.0, 3.0, 4.0]));
    keep_rows(&mut worker, 0).await;
    let last = worker.call().await;
    assert_eq!((taken(&last), last.request.inputs[0].shape.clone()), (vec![1, 2, 3, 4], vec![4, 64]));
    // More objects are lost than a step may be called again for, if each loss caused a separate call.
    respond(last, wire::InvokeResponse { lost: (1..=4).map(id).collect(), ..Default::default() });
    // The objects with the rows' inputs were released after use, so the rows are produced again first.
    respond(worker.call().await, rows_of(&[1.0, 2.0, 3.0, 4.0]));
    keep_rows(&mut worker, 10).await;
    let last = worker.call().await;
    assert_eq!(taken(&last), [11, 12, 13, 14]);
    respond(last, rows_of(&[1.0, 2.0, 3.0, 4.0]));
    assert_eq!(answer_of(answering).await.unwrap().outputs[0].shape, [4, 64]);
}

/// Starts a cluster with the MLP as `once`, which is not idempotent, and as `f`.
async fn once_and_again() -> (Cluster, Stub) {
    let cluster = Cluster::start().await;
    let mut once = apply_request("once", &mlp());
    once.spec.as_mut().unwrap().idempotent = false;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    admin.apply_function(once).await.unwrap();
    cluster.deploy("f", &mlp()).await;
    let worker = Stub::start(&cluster, "n1").await;
    (cluster, worker)
}

#[tokio::test]
async fn a_lost_object_of_a_step_that_is_not_idempotent_is_not_produced_again() {
    let (cluster, mut worker) = once_and_again().await;
    apply_workflow(&cluster, chain("inner", &[function("once")])).await.unwrap();
    for (name, first) in [("w", function("once")), ("nested", Run::Workflow("inner".into()))] {
        apply_workflow(&cluster, chain(name, &[first, function("f")])).await.unwrap();
        until_ready(&cluster, name).await;
        let answering = infer(&cluster, name);
        keep(worker.call().await, 1);
        respond(worker.call().await, wire::InvokeResponse { lost: vec![id(1)], ..Default::default() });
        let failure = answer_of(answering).await.unwrap_err();
        assert_eq!((failure.reason, failure.may_have_executed), (Reason::DataLost, true), "{name}");
    }
}

#[tokio::test]
async fn a_run_that_ends_after_a_step_may_have_executed() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 1);
    // The worker declines the step, and there is no other worker.
    worker.call().await.refuse(Reason::QueueFull);
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::QueueFull, true));
    assert!(failure.message.starts_with("step \"s1\" of workflow default/w: "), "{}", failure.message);
    let answering = infer(&cluster, "w");
    worker.call().await.refuse(Reason::QueueFull);
    assert!(!answer_of(answering).await.unwrap_err().may_have_executed, "no step ran");
}

#[tokio::test]
async fn a_failing_step_ends_the_run_with_its_name_and_reason() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 4);
    worker.call().await.refuse(Reason::ModelFailed);
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelFailed);
    assert_eq!(failure.message, "step \"s1\" of workflow default/w: as requested by the test");
    assert_eq!(released(&mut worker).await, [4]);
}

#[tokio::test]
async fn a_run_that_ends_during_a_step_may_have_executed() {
    let (cluster, mut worker) = two_in_a_row().await;
    let mut beside = chain("beside", &[function("f"), function("f")]);
    beside.steps[1].inputs.insert("x".into(), "input.x".into());
    beside.outputs.push(api::WorkflowOutput { name: "z".into(), from: "s0.y".into() });
    apply_workflow(&cluster, beside).await.unwrap();
    until_ready(&cluster, "beside").await;
    let answering = infer(&cluster, "beside");
    let mut under_way = worker.call().await;
    worker.call().await.refuse(Reason::QueueFull);
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::QueueFull, true));
    soon("the cancellation", under_way.answer.closed()).await;
}

#[tokio::test]
async fn a_workflow_that_is_not_idempotent_runs_again_if_no_step_of_it_ran() {
    let (cluster, mut worker) = once_and_again().await;
    apply_workflow(&cluster, chain("inner", &[function("once")])).await.unwrap();
    apply_workflow(&cluster, chain("w", &[function("f"), Run::Workflow("inner".into())])).await.unwrap();
    until_ready(&cluster, "w").await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 1);
    respond(worker.call().await, wire::InvokeResponse { lost: vec![id(1)], ..Default::default() });
    let again = worker.call().await;
    assert_eq!(again.request.function, "f");
    keep(again, 2);
    let second = worker.call().await;
    assert_eq!((second.request.function.as_str(), taken(&second)), ("once", vec![2]));
    second.answer();
    answer_of(answering).await.unwrap();
}

#[tokio::test]
async fn a_workflow_that_is_not_idempotent_does_not_run_again_after_a_step_of_it_ran() {
    let (cluster, mut worker) = once_and_again().await;
    let mut inner = chain("inner", &[function("once"), function("f")]);
    inner.steps[1].inputs.insert("x".into(), "input.x".into());
    inner.outputs.push(api::WorkflowOutput { name: "z".into(), from: "s0.y".into() });
    apply_workflow(&cluster, inner).await.unwrap();
    apply_workflow(&cluster, chain("w", &[function("f"), Run::Workflow("inner".into())])).await.unwrap();
    until_ready(&cluster, "w").await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 1);
    let calls = [worker.call().await, worker.call().await];
    // The two calls arrive in any order.
    let (once, other): (Vec<_>, Vec<_>) = calls.into_iter().partition(|call| call.request.function == "once");
    for call in once {
        call.answer();
    }
    // Both answers are in flight at the same time. In either order, the step has run.
    for call in other {
        respond(call, wire::InvokeResponse { lost: vec![id(1)], ..Default::default() });
    }
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::DataLost, true));
}

/// Returns an output that is held at a worker, without the location.
fn nowhere(name: &str) -> wire::InferTensor {
    let part = Part::Held(wire::HeldPart::default());
    let parts = vec![wire::TensorPart { part: Some(part) }];
    wire::InferTensor { name: name.into(), datatype: "FP32".into(), parts, ..Default::default() }
}

#[tokio::test]
async fn objects_of_an_unusable_answer_are_released() {
    let (cluster, mut worker) = two_in_a_row().await;
    for (outputs, says) in [
        (
            vec![held("y", 1), nowhere("z"), held("last", 2)],
            "returned output \"z\" without data or a location",
        ),
        (vec![held("x", 1), held("z", 2)], "output \"y\" is missing from the answer"),
    ] {
        let answering = infer(&cluster, "w");
        respond(worker.call().await, wire::InvokeResponse { outputs, ..Default::default() });
        let failure = answer_of(answering).await.unwrap_err();
        assert_eq!((failure.reason, failure.may_have_executed), (Reason::Internal, true));
        assert!(failure.message.contains(says), "{}", failure.message);
        let mut ids = released(&mut worker).await;
        ids.sort_unstable();
        assert_eq!(ids, [1, 2]);
    }
}

#[tokio::test]
async fn a_run_refused_before_its_first_call_has_not_executed() {
    let (cluster, _worker) = two_in_a_row().await;
    let mut spec = chain("rows", &[function("f")]);
    spec.steps[0].each = "x".into();
    apply_workflow(&cluster, spec).await.unwrap();
    until_ready(&cluster, "rows").await;
    let mut many = request("rows");
    many.inputs[0].shape = vec![2000, 64];
    many.raw_input_contents = vec![vec![0; 2000 * 256].into()];
    let failure = answer_of(infer_with(&cluster, many)).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::InvalidInput, false), "{failure:?}");
}
