//! Tests of routing: requests reach a ready worker, and another worker after a loss.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use millrace_nodes::retries::{REQUESTS_PER_RETRY, RETRY_BURST_MAX};
use millrace_proto::admin as api;
use millrace_proto::convert::duration;
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_proto::inference::{self as oip, model_infer_request::InferInputTensor};
use millrace_proto::status::from_status;
use millrace_proto::worker::{GpuHealth, GpuTelemetry, ResidentModel, Telemetry};
use millrace_types::{Digest, Failure, Reason};
use tonic::{Request, Status};

use crate::stub::{Call, Stub, StubService};
use crate::support::{Cluster, apply_request, mlp, short_lease, soon, until, upload};

pub(crate) fn request(name: &str) -> oip::ModelInferRequest {
    oip::ModelInferRequest {
        model_name: name.into(),
        inputs: vec![InferInputTensor {
            name: "x".into(),
            datatype: "FP32".into(),
            shape: vec![1, 64],
            ..Default::default()
        }],
        raw_input_contents: vec![vec![0; 256].into()],
        ..Default::default()
    }
}

/// Sends a request in a separate task.
pub(crate) fn infer(
    cluster: &Cluster,
    name: &str,
) -> tokio::task::JoinHandle<Result<oip::ModelInferResponse, Status>> {
    infer_with(cluster, request(name))
}

pub(crate) fn infer_within(
    cluster: &Cluster,
    name: &str,
    timeout: Duration,
) -> tokio::task::JoinHandle<Result<oip::ModelInferResponse, Status>> {
    let micros = ParameterChoice::Int64Param(i64::try_from(timeout.as_micros()).unwrap());
    let mut request = request(name);
    let timeout = oip::InferParameter { parameter_choice: Some(micros) };
    request.parameters.insert("timeout".into(), timeout);
    infer_with(cluster, request)
}

pub(crate) fn infer_with(
    cluster: &Cluster,
    request: oip::ModelInferRequest,
) -> tokio::task::JoinHandle<Result<oip::ModelInferResponse, Status>> {
    let mut client = cluster.inference();
    tokio::spawn(async move { Ok(client.model_infer(request).await?.into_inner()) })
}

pub(crate) async fn answer_of(
    request: tokio::task::JoinHandle<Result<oip::ModelInferResponse, Status>>,
) -> Result<oip::ModelInferResponse, Failure> {
    soon("an answer", request).await.unwrap().map_err(|status| from_status(&status))
}

pub(crate) async fn until_ready(cluster: &Cluster, name: &str) {
    let mut client = cluster.inference();
    until("readiness", async || {
        let asked = oip::ModelReadyRequest { name: name.into(), version: String::new() };
        client.model_ready(asked).await.unwrap().into_inner().ready.then_some(())
    })
    .await;
}

/// Waits for a request at either stub. Returns whether stub `a` got the call, and the call.
async fn first_called<'a>(a: &'a mut Stub, b: &'a mut Stub) -> (bool, crate::stub::Call) {
    soon("a call", async {
        tokio::select! {
            call = a.calls.recv() => (true, call.unwrap()),
            call = b.calls.recv() => (false, call.unwrap()),
        }
    })
    .await
}

#[tokio::test]
async fn a_request_goes_to_a_ready_worker_with_its_remaining_timeout() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let mut client = cluster.inference();
    let mut asked = Request::new(request("f"));
    asked.set_timeout(Duration::from_secs(30));
    let answering = tokio::spawn(async move { client.model_infer(asked).await });
    let call = worker.call().await;
    assert_eq!((call.request.function.as_str(), call.request.revision), ("f", 1));
    assert_eq!((call.request.attempt, call.request.attempts_left), (1, 3));
    assert_eq!(call.request.inputs[0].data.len(), 256);
    let left = duration(&call.request.timeout.unwrap()).unwrap();
    assert!(left > Duration::from_secs(20) && left <= Duration::from_secs(30), "{left:?}");
    call.answer();
    let answer = answering.await.unwrap().unwrap().into_inner();
    assert_eq!(answer.outputs[0].shape, vec![1, 64]);
    assert_eq!(answer.model_version, "1");
}

#[tokio::test]
async fn a_request_at_a_lost_worker_goes_to_another_although_its_stream_stays_open() {
    let cluster = Cluster::start_with(short_lease).await;
    cluster.deploy_on("f", &mlp(), 2).await;
    let mut silent = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let answering = infer(&cluster, "f");
    let held = silent.call().await;
    let mut other = Stub::start(&cluster, "n2").await;
    other.told(&["f@1"]).await;
    // The worker sends no further messages, but the connection is intact.
    silent.alive.send_replace(false);
    let again = other.call().await;
    assert_eq!(again.request.request_id, held.request.request_id);
    assert_eq!(again.request.attempt, 2);
    again.answer();
    answer_of(answering).await.unwrap();
    for _ in 0..3 {
        let answering = infer(&cluster, "f");
        other.call().await.answer();
        answer_of(answering).await.unwrap();
    }
    // After the next message, the worker is registered again, and is the only worker left.
    silent.alive.send_replace(true);
    soon("the new epoch", silent.epoch.wait_for(|epoch| *epoch > 1)).await.unwrap();
    other.kill();
    let answering = infer(&cluster, "f");
    silent.call().await.answer();
    answer_of(answering).await.unwrap();
}

#[tokio::test]
async fn a_request_at_a_killed_worker_is_answered_by_another() {
    let cluster = Cluster::start().await;
    cluster.deploy_on("f", &mlp(), 3).await;
    let mut a = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let answering = infer(&cluster, "f");
    let held = a.call().await;
    let mut b = Stub::start(&cluster, "n2").await;
    b.told(&["f@1"]).await;
    a.kill();
    let second = b.call().await;
    assert_eq!(second.request.request_id, held.request.request_id);
    assert_eq!((second.request.attempt, second.request.attempts_left), (2, 2));
    second.answer();
    assert!(answer_of(answering).await.is_ok());
}

#[tokio::test]
async fn a_request_waits_for_its_restarted_worker() {
    let cluster = Cluster::start_with(short_lease).await;
    cluster.deploy("f", &mlp()).await;
    let mut first = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let answering = infer(&cluster, "f");
    let _held = first.call().await;
    first.kill();
    let mut admin = cluster.admin();
    until("the loss", async || (!crate::support::nodes(&mut admin).await[0].connected).then_some(())).await;
    let mut second = Stub::start_when_free(&cluster, "n1", "second").await;
    second.call().await.answer();
    assert!(answer_of(answering).await.is_ok());
}

#[tokio::test]
async fn a_request_without_any_worker_waits_for_the_next_one() {
    let cluster = Cluster::start_with(short_lease).await;
    cluster.deploy("f", &mlp()).await;
    let first = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let mut second = Stub::start(&cluster, "n2").await;
    first.kill();
    let mut client = cluster.inference();
    until("the loss", async || {
        let asked = oip::ModelReadyRequest { name: "f".into(), version: String::new() };
        (!client.model_ready(asked).await.unwrap().into_inner().ready).then_some(())
    })
    .await;
    let answering = infer(&cluster, "f");
    second.call().await.answer();
    assert!(answer_of(answering).await.is_ok());
}

#[tokio::test]
async fn a_request_at_a_worker_without_a_stream_moves_to_another_that_can_take_it() {
    let cluster = Cluster::start().await;
    cluster.deploy_on("f", &mlp(), 3).await;
    let mut a = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let answering = infer(&cluster, "f");
    let mut held = a.call().await;
    // The stream ends, but the worker's service and the request there continue.
    a.out = None;
    let mut b = Stub::start(&cluster, "n2").await;
    let second = b.call().await;
    soon("the first attempt's end", held.answer.closed()).await;
    second.answer();
    assert!(answer_of(answering).await.is_ok());
}

#[tokio::test]
async fn a_request_at_the_only_worker_is_still_answered_after_its_stream_ended() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut a = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let answering = infer(&cluster, "f");
    let held = a.call().await;
    a.out = None;
    let mut admin = cluster.admin();
    until("the loss", async || (!crate::support::nodes(&mut admin).await[0].connected).then_some(())).await;
    held.answer();
    assert!(answer_of(answering).await.is_ok());
}

#[tokio::test]
async fn a_lost_request_that_is_not_idempotent_is_not_retried_and_may_have_executed() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    let mut once = apply_request("f", &mlp());
    once.spec.as_mut().unwrap().idempotent = false;
    once.spec.as_mut().unwrap().replicas = 2;
    admin.apply_function(once).await.unwrap();
    let mut a = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let answering = infer(&cluster, "f");
    let _held = a.call().await;
    let mut b = Stub::start(&cluster, "n2").await;
    b.told(&["f@1"]).await;
    a.kill();
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!(failure.reason, Reason::NoWorker);
    assert!(failure.may_have_executed);
    assert!(b.calls.try_recv().is_err());
}

#[tokio::test]
async fn a_request_declined_by_a_worker_in_shutdown_waits_for_the_next_worker() {
    let cluster = Cluster::start().await;
    cluster.deploy_on("f", &mlp(), 2).await;
    let mut a = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let mut answering = infer(&cluster, "f");
    a.call().await.refuse(Reason::ShuttingDown);
    // The request waits: only the worker that starts now can answer.
    let mut b = Stub::start(&cluster, "n2").await;
    let second = soon("the other worker's call", async {
        tokio::select! {
            call = b.calls.recv() => call.unwrap(),
            ended = &mut answering => panic!("ended without another worker: {ended:?}"),
        }
    })
    .await;
    assert_eq!(second.request.attempt, 1, "the first worker never began it");
    second.answer();
    assert!(answer_of(answering).await.is_ok());
}

#[tokio::test]
async fn a_declining_worker_is_skipped_and_a_failure_is_final() {
    let cluster = Cluster::start().await;
    cluster.deploy_on("f", &mlp(), 3).await;
    let mut a = Stub::start(&cluster, "n1").await;
    let mut b = Stub::start(&cluster, "n2").await;
    a.told(&["f@1"]).await;
    b.told(&["f@1"]).await;
    // Wait until both workers reported ready on separate streams. With a single ready worker, the
    // router could not skip that worker.
    let mut admin = cluster.admin();
    until("both to be ready", async || {
        let function = crate::support::get(&mut admin, "f").await.unwrap();
        let both = |it: &api::Condition| it.r#type == "Ready" && it.message == "ready on 2 workers";
        function.conditions.iter().any(both).then_some(())
    })
    .await;

    let answering = infer(&cluster, "f");
    let (was_a, call) = first_called(&mut a, &mut b).await;
    call.refuse(Reason::QueueFull);
    let call = if was_a { b.call().await } else { a.call().await };
    assert_eq!(call.request.attempt, 1, "a declined request is no attempt");
    call.refuse(Reason::QueueFull);
    assert_eq!(answer_of(answering).await.unwrap_err().reason, Reason::QueueFull, "both are full");

    let answering = infer(&cluster, "f");
    let (_, call) = first_called(&mut a, &mut b).await;
    call.refuse(Reason::ModelFailed);
    assert_eq!(answer_of(answering).await.unwrap_err().reason, Reason::ModelFailed);
}

/// Starts workers that refuse every request because the queues are full. Returns the counter of
/// received requests.
async fn start_full_workers(cluster: &Cluster, count: u32) -> Arc<AtomicU32> {
    let asked = Arc::new(AtomicU32::new(0));
    for n in 0..count {
        let mut worker = Stub::start(cluster, &format!("n{n}")).await;
        let asked = Arc::clone(&asked);
        tokio::spawn(async move {
            while let Some(call) = worker.calls.recv().await {
                asked.fetch_add(1, Ordering::Relaxed);
                call.refuse(Reason::QueueFull);
            }
        });
    }
    let mut admin = cluster.admin();
    let ready = format!("ready on {count} workers");
    until("all to be ready", async || {
        let function = crate::support::get(&mut admin, "f").await.unwrap();
        function.conditions.iter().any(|it| it.r#type == "Ready" && it.message == ready).then_some(())
    })
    .await;
    asked
}

#[tokio::test]
async fn a_request_refused_by_full_workers_is_sent_to_three_of_ten() {
    let cluster = Cluster::start().await;
    cluster.deploy_on("f", &mlp(), 10).await;
    let asked = start_full_workers(&cluster, 10).await;
    assert_eq!(answer_of(infer(&cluster, "f")).await.unwrap_err().reason, Reason::QueueFull);
    assert_eq!(asked.load(Ordering::Relaxed), 3);
}

#[tokio::test]
async fn requests_refused_by_full_workers_are_retried_at_most_one_time_in_ten() {
    let cluster = Cluster::start().await;
    cluster.deploy_on("f", &mlp(), 3).await;
    let asked = start_full_workers(&cluster, 3).await;
    // The first request finds full credits, and earns none.
    let requests = 101;
    for _ in 0..requests {
        assert_eq!(answer_of(infer(&cluster, "f")).await.unwrap_err().reason, Reason::QueueFull);
    }
    let retries = asked.load(Ordering::Relaxed) - requests;
    assert_eq!(retries, RETRY_BURST_MAX + requests / REQUESTS_PER_RETRY);
}

#[tokio::test]
async fn a_request_that_loses_every_worker_ends_after_three_attempts() {
    let cluster = Cluster::start().await;
    cluster.deploy_on("f", &mlp(), 3).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let answering = infer(&cluster, "f");
    for next in ["n2", "n3"] {
        let _held = worker.call().await;
        let mut other = Stub::start(&cluster, next).await;
        other.told(&["f@1"]).await;
        worker.kill();
        worker = other;
    }
    let _held = worker.call().await;
    worker.kill();
    let failure = answer_of(answering).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::AttemptsExhausted, true));
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_the_call_at_the_worker() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let answering = infer(&cluster, "f");
    let mut held = worker.call().await;
    answering.abort();
    soon("the cancellation", held.answer.closed()).await;
}

/// A connector that passes calls directly to the test.
#[derive(Debug, Clone)]
struct InThisProcess(tokio::sync::mpsc::UnboundedSender<Call>);

impl millrace_controller::Connector for InThisProcess {
    fn connect(
        &self,
        _name: &millrace_types::NodeName,
        _address: &str,
    ) -> Result<millrace_controller::Transport, millrace_controller::ConnectError> {
        let (released, _) = tokio::sync::mpsc::unbounded_channel();
        Ok(std::sync::Arc::new(StubService { calls: self.0.clone(), released }))
    }
}

#[tokio::test]
async fn a_worker_in_the_same_process_is_called_without_a_socket() {
    let (give_call, mut calls) = tokio::sync::mpsc::unbounded_channel();
    let dir = tempfile::tempdir().unwrap();
    let cluster = Cluster::start_in(dir, |_| {}, std::sync::Arc::new(InThisProcess(give_call))).await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    let answering = infer(&cluster, "f");
    let call = soon("a call", calls.recv()).await.unwrap();
    assert_eq!(call.request.attempt, 1);
    call.answer();
    answer_of(answering).await.unwrap();
    assert!(worker.calls.try_recv().is_err());

    let answering = infer(&cluster, "f");
    let mut held = soon("a call", calls.recv()).await.unwrap();
    answering.abort();
    soon("the cancellation", held.answer.closed()).await;
}

/// Reports one GPU with this health, with or without the MLP on the GPU, and waits until the controller
/// shows this health.
async fn report_gpu(cluster: &Cluster, worker: &Stub, seq: u64, health: GpuHealth, holds: bool) {
    let resident = ResidentModel { digest: Digest::of(&mlp()).to_string(), ..Default::default() };
    let gpu = GpuTelemetry {
        health: health.into(),
        models: holds.then_some(resident).into_iter().collect(),
        swaps: seq,
        ..Default::default()
    };
    worker.report(Telemetry { epoch: worker.hello.epoch, seq, gpus: vec![gpu], ..Default::default() }).await;
    let mut admin = cluster.admin();
    until("telemetry", async || {
        let nodes = crate::support::nodes(&mut admin).await;
        nodes.iter().find(|it| it.epoch == worker.hello.epoch && it.gpus[0].swaps == seq).map(|_| ())
    })
    .await;
}

#[tokio::test]
async fn a_request_goes_to_the_gpu_with_its_model_unless_too_many_wait_there() {
    let cluster = Cluster::start().await;
    cluster.deploy_on("f", &mlp(), 3).await;
    let mut without = Stub::start(&cluster, "n1").await;
    let mut holder = Stub::start(&cluster, "n2").await;
    without.told(&["f@1"]).await;
    holder.told(&["f@1"]).await;
    until_ready(&cluster, "f").await;
    report_gpu(&cluster, &without, 1, GpuHealth::Up, false).await;
    report_gpu(&cluster, &holder, 1, GpuHealth::Up, true).await;
    let first = infer(&cluster, "f");
    let held = holder.call().await;
    // The report does not include the first request yet, but the router does, so the second request
    // goes to the idle GPU.
    let second = infer(&cluster, "f");
    without.call().await.answer();
    held.answer();
    answer_of(first).await.unwrap();
    answer_of(second).await.unwrap();
}

#[tokio::test]
async fn a_worker_with_restarting_executors_gets_requests_and_an_unhealthy_one_does_not() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    until_ready(&cluster, "f").await;
    report_gpu(&cluster, &worker, 1, GpuHealth::Restarting, false).await;
    let answering = infer(&cluster, "f");
    worker.call().await.answer();
    answer_of(answering).await.unwrap();
    report_gpu(&cluster, &worker, 2, GpuHealth::Unhealthy, false).await;
    let refused = answer_of(infer(&cluster, "f")).await.unwrap_err();
    assert_eq!((refused.reason, refused.retryable), (Reason::NoWorker, true));
}
