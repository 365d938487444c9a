//! Workflows: kept with what they run, and run over stub workers, whose data they leave where it is.

use millrace_proto::admin::{self as api, workflow_step::Run};
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::tensor_part::Part;
use millrace_types::{Failure, Reason};
use tonic::Status;

use crate::routing::{answer_of, infer, until_ready};
use crate::stub::{Call, Stub};
use crate::support::{Cluster, apply, apply_request, cnn, mlp, reason, soon, until, upload};

fn step(name: &str, run: Run, from: &str) -> api::WorkflowStep {
    let inputs = [("x".to_owned(), from.to_owned())].into();
    api::WorkflowStep { name: name.into(), run: Some(run), inputs, ..Default::default() }
}

fn function(name: &str) -> Run {
    Run::Function(name.into())
}

/// Steps one after the other, each on what the one before gives.
fn chain(name: &str, runs: &[Run]) -> api::WorkflowSpec {
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

async fn apply_workflow(cluster: &Cluster, spec: api::WorkflowSpec) -> Result<api::Workflow, Status> {
    let request = api::ApplyWorkflowRequest { spec: Some(spec), ..Default::default() };
    let answer = cluster.admin().apply_workflow(request).await?.into_inner();
    Ok(answer.workflow.unwrap())
}

/// A cluster that serves the MLP as `f`, a chain of two of them as `w`, and one worker for it.
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

/// Answers that the worker keeps what came out.
fn keep(call: Call, counter: u64) {
    let object = wire::Object { id: Some(id(counter)), address: String::new(), bytes: 256 };
    let part = wire::HeldPart { object: Some(object), offset: 0, bytes: 256 };
    let output = wire::InferTensor {
        name: "y".into(),
        datatype: "FP32".into(),
        shape: vec![1, 64],
        parts: vec![wire::TensorPart { part: Some(Part::Held(part)) }],
        ..Default::default()
    };
    respond(call, wire::InvokeResponse { outputs: vec![output], attempts: 1, ..Default::default() });
}

fn respond(call: Call, response: wire::InvokeResponse) {
    call.answer.send(Ok(response)).unwrap();
}

/// The objects that a call takes.
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

#[tokio::test]
async fn what_a_step_gives_stays_with_its_worker_until_the_next_has_it() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    let first = worker.call().await;
    assert_eq!((first.request.function.as_str(), first.request.inputs[0].data.len()), ("f", 256));
    let hold = first.request.hold.clone().unwrap();
    assert_eq!((hold.answered, first.request.outputs.clone()), (Vec::<String>::new(), vec!["y".to_owned()]));
    keep(first, 7);

    let second = worker.call().await;
    assert_eq!((taken(&second), second.request.inputs[0].data.len()), (vec![7], 0));
    let Some(Part::Held(part)) = &second.request.inputs[0].parts[0].part else { panic!("an object") };
    let object = part.object.clone().unwrap();
    assert!(!object.address.is_empty(), "whoever takes it knows whom to ask");
    assert_eq!(second.request.hold.clone().unwrap().answered, ["y"], "the workflow answers it");
    second.answer();

    let answer = answer_of(answering).await.unwrap();
    assert_eq!((answer.outputs[0].name.as_str(), &answer.outputs[0].shape[..]), ("y", &[1, 64][..]));
    assert_eq!(released(&mut worker).await, [7]);
}

#[tokio::test]
async fn what_was_lost_is_made_again() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 1);
    let second = worker.call().await;
    respond(second, wire::InvokeResponse { lost: vec![id(1)], ..Default::default() });

    let again = worker.call().await;
    assert_eq!(again.request.inputs[0].data.len(), 256, "the request's own input, which is kept");
    keep(again, 2);
    let second = worker.call().await;
    assert_eq!(taken(&second), [2]);
    second.answer();
    answer_of(answering).await.unwrap();
    // The first was out of reach for whoever asked, and may be there all the same.
    assert_eq!(released(&mut worker).await, [1]);
    assert_eq!(released(&mut worker).await, [2]);
}

#[tokio::test]
async fn what_is_lost_again_and_again_ends_the_run() {
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

/// A step over rows, whose outputs another takes as one.
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

/// Keeps what comes of each of four rows, which come in any order, under the number that is in it.
async fn keep_rows(worker: &mut Stub, beyond: u64) {
    for _ in 0..4 {
        let call = worker.call().await;
        let number = f32::from_le_bytes(call.request.inputs[0].data[..4].try_into().unwrap());
        keep(call, beyond + number as u64);
    }
}

#[tokio::test]
async fn all_that_was_lost_is_made_again_at_once() {
    let (cluster, mut worker) = rows_then_all().await;
    let answering = infer(&cluster, "w");
    respond(worker.call().await, rows_of(&[1.0, 2.0, 3.0, 4.0]));
    keep_rows(&mut worker, 0).await;
    let last = worker.call().await;
    assert_eq!((taken(&last), last.request.inputs[0].shape.clone()), (vec![1, 2, 3, 4], vec![4, 64]));
    // More than a step may be called for the loss of one after the other.
    respond(last, wire::InvokeResponse { lost: (1..=4).map(id).collect(), ..Default::default() });
    // What the rows are of was let go of when they were made: it comes first.
    respond(worker.call().await, rows_of(&[1.0, 2.0, 3.0, 4.0]));
    keep_rows(&mut worker, 10).await;
    let last = worker.call().await;
    assert_eq!(taken(&last), [11, 12, 13, 14]);
    respond(last, rows_of(&[1.0, 2.0, 3.0, 4.0]));
    assert_eq!(answer_of(answering).await.unwrap().outputs[0].shape, [4, 64]);
}

#[tokio::test]
async fn what_may_not_run_twice_is_not_made_again() {
    let cluster = Cluster::start().await;
    let mut once = apply_request("once", &mlp());
    once.spec.as_mut().unwrap().idempotent = false;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    admin.apply_function(once).await.unwrap();
    cluster.deploy("f", &mlp()).await;
    apply_workflow(&cluster, chain("inner", &[function("once")])).await.unwrap();
    let mut worker = Stub::start(&cluster, "n1").await;
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
async fn a_run_that_ends_after_a_step_says_that_some_of_it_ran() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 1);
    // It did not begin there, and there is no other worker.
    worker.call().await.refuse(Reason::QueueFull);
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::QueueFull, true));
    assert!(failure.message.starts_with("step \"s1\" of workflow default/w: "), "{}", failure.message);
    let answering = infer(&cluster, "w");
    worker.call().await.refuse(Reason::QueueFull);
    assert!(!answer_of(answering).await.unwrap_err().may_have_executed, "none of it did");
}

#[tokio::test]
async fn a_step_that_fails_ends_the_run_with_its_name_and_reason() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 4);
    worker.call().await.refuse(Reason::ModelFailed);
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelFailed);
    assert_eq!(failure.message, "step \"s1\" of workflow default/w: as the test wants it");
    assert_eq!(released(&mut worker).await, [4]);
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_nothing() {
    let (cluster, mut worker) = two_in_a_row().await;
    let answering = infer(&cluster, "w");
    keep(worker.call().await, 5);
    let mut second = worker.call().await;
    answering.abort();
    soon("the cancellation", second.answer.closed()).await;
    assert_eq!(released(&mut worker).await, [5]);
}

/// `outer` is `w` and then `f`: what `w` gives is not asked for before `f` takes it.
#[tokio::test]
async fn a_workflow_in_a_workflow_hands_on_what_it_does_not_look_at() {
    let (cluster, mut worker) = two_in_a_row().await;
    let runs = [Run::Workflow("w".into()), function("f")];
    apply_workflow(&cluster, chain("outer", &runs)).await.unwrap();
    let answering = infer(&cluster, "outer");
    keep(worker.call().await, 1);
    keep(worker.call().await, 2);
    assert_eq!(released(&mut worker).await, [1]);
    let third = worker.call().await;
    assert_eq!(taken(&third), [2]);
    // Lost between the two: the inner workflow runs again.
    respond(third, wire::InvokeResponse { lost: vec![id(2)], ..Default::default() });
    assert_eq!(released(&mut worker).await, [2]);
    keep(worker.call().await, 3);
    keep(worker.call().await, 4);
    assert_eq!(released(&mut worker).await, [3]);
    let third = worker.call().await;
    assert_eq!(taken(&third), [4]);
    third.answer();
    answer_of(answering).await.unwrap();
    assert_eq!(released(&mut worker).await, [4]);
}

#[tokio::test]
async fn each_row_is_a_call_of_its_own_and_the_answers_are_joined() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut spec = chain("w", &[function("f"), function("f")]);
    spec.steps[1].each = "x".into();
    apply_workflow(&cluster, spec).await.unwrap();
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "w").await;
    // The same in a workflow of its own: all its rows are what its call made.
    apply_workflow(&cluster, chain("outer", &[Run::Workflow("w".into())])).await.unwrap();
    until_ready(&cluster, "outer").await;
    for name in ["w", "outer"] {
        each_row(&cluster, &mut worker, name).await;
    }
}

fn row(value: f32) -> Vec<u8> {
    [value; 64].into_iter().flat_map(f32::to_le_bytes).collect()
}

/// An answer of rows that are all the same number.
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

async fn each_row(cluster: &Cluster, worker: &mut Stub, name: &str) {
    let answering = infer(cluster, name);
    respond(worker.call().await, rows_of(&[1.0, 2.0, 3.0]));
    let mut calls = vec![worker.call().await, worker.call().await, worker.call().await];
    // In whichever order they are answered.
    calls.reverse();
    for call in calls {
        let input = &call.request.inputs[0];
        assert_eq!((input.shape.clone(), input.data.len()), (vec![1, 64], 256));
        let first = f32::from_le_bytes(input.data[..4].try_into().unwrap());
        respond(call, rows_of(&[first * 10.0]));
    }
    let answered = answer_of(answering).await.unwrap();
    assert_eq!(answered.outputs[0].shape, [3, 64]);
    let got = &answered.raw_output_contents[0];
    assert_eq!(got.to_vec(), [row(10.0), row(20.0), row(30.0)].concat());
}

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
async fn what_does_not_fit_is_refused_by_name() {
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
    // What it runs can be, and takes it along.
    let unload = oip::RepositoryModelUnloadRequest { model_name: "f".into(), ..Default::default() };
    client.repository_model_unload(unload).await.unwrap();
    until("the workflow to be unready", async || {
        let asked = oip::ModelReadyRequest { name: "w".into(), version: String::new() };
        (!client.model_ready(asked).await.unwrap().into_inner().ready).then_some(())
    })
    .await;
    let failure = answer_of(infer(&cluster, "w")).await.unwrap_err();
    assert_eq!(failure.reason, Reason::FunctionNotReady);
    assert!(failure.message.contains("function f is unloaded"), "{}", failure.message);
}
