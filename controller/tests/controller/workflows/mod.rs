//! Tests of workflows: stored with functions, and run on stub workers that keep the data.

mod failures;
mod kept;
mod runs;

use millrace_proto::admin::{self as api, workflow_step::Run};
use millrace_proto::worker as wire;
use millrace_proto::worker::tensor_part::Part;
use tonic::Status;

use crate::routing::until_ready;
use crate::stub::{Call, Stub};
use crate::support::{Cluster, mlp, soon};

fn step(name: &str, run: Run, from: &str) -> api::WorkflowStep {
    let inputs = [("x".to_owned(), from.to_owned())].into();
    api::WorkflowStep { name: name.into(), run: Some(run), inputs, ..Default::default() }
}

fn function(name: &str) -> Run {
    Run::Function(name.into())
}

/// Returns a chain of steps, each with the previous step's output as the input.
pub(crate) fn chain(name: &str, runs: &[Run]) -> api::WorkflowSpec {
    let from = |at: usize| if at == 0 { "input.x".to_owned() } else { format!("s{}.y", at - 1) };
    let steps = runs.iter().enumerate().map(|(at, run)| step(&format!("s{at}"), run.clone(), &from(at)));
    api::WorkflowSpec {
        name: name.into(),
        inputs: vec!["x".into()],
        steps: steps.collect(),
        outputs: vec![api::WorkflowOutput { name: "y".into(), from: from(runs.len()) }],
        ..Default::default()
    }
}

pub(crate) async fn apply_workflow(
    cluster: &Cluster,
    spec: api::WorkflowSpec,
) -> Result<api::Workflow, Status> {
    let request = api::ApplyWorkflowRequest { spec: Some(spec), ..Default::default() };
    let answer = cluster.admin().apply_workflow(request).await?.into_inner();
    Ok(answer.workflow.unwrap())
}

/// Starts a cluster with the MLP as `f`, a chain of two such steps as `w`, and one worker.
async fn two_in_a_row() -> (Cluster, Stub) {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    apply_workflow(&cluster, chain("w", &[function("f"), function("f")])).await.unwrap();
    let worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "w").await;
    (cluster, worker)
}

fn id(counter: u64) -> wire::DataId {
    wire::DataId { home: "n1".into(), epoch: 1, counter }
}

/// Returns an output that the worker keeps as an object.
fn held(name: &str, counter: u64) -> wire::InferTensor {
    let object = wire::Object { id: Some(id(counter)), address: String::new(), bytes: 256 };
    let part = wire::HeldPart { object: Some(object), offset: 0, bytes: 256 };
    wire::InferTensor {
        name: name.into(),
        datatype: "FP32".into(),
        shape: vec![1, 64],
        parts: vec![wire::TensorPart { part: Some(Part::Held(part)) }],
        ..Default::default()
    }
}

/// Answers that the worker keeps the output as an object.
fn keep(call: Call, counter: u64) {
    let outputs = vec![held("y", counter)];
    respond(call, wire::InvokeResponse { outputs, attempts: 1, ..Default::default() });
}

fn respond(call: Call, response: wire::InvokeResponse) {
    call.answer.send(Ok(response)).unwrap();
}

/// Returns the objects that a call reads.
fn taken(call: &Call) -> Vec<u64> {
    let parts = call.request.inputs.iter().flat_map(|input| &input.parts);
    let held = parts.filter_map(|part| match &part.part {
        Some(Part::Held(held)) => Some(held.object.clone().unwrap().id.unwrap().counter),
        _ => None,
    });
    held.collect()
}

async fn released(worker: &mut Stub) -> Vec<u64> {
    let ids = soon("a release", worker.released.recv()).await.unwrap();
    ids.into_iter().map(|id| id.counter).collect()
}

fn row(value: f32) -> Vec<u8> {
    [value; 64].into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Returns an answer with rows, each filled with a number.
fn rows_of(values: &[f32]) -> wire::InvokeResponse {
    let data = values.iter().flat_map(|value| row(*value)).collect::<Vec<u8>>();
    let output = wire::InferTensor {
        name: "y".into(),
        datatype: "FP32".into(),
        shape: vec![values.len() as i64, 64],
        data: data.into(),
        ..Default::default()
    };
    wire::InvokeResponse { outputs: vec![output], ..Default::default() }
}
