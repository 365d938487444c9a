//! Tests of requests while nothing fails.

use millrace_proto::executor::Fault;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_client::WorkerClient;
use millrace_types::Reason;
use millrace_worker::service::InjectedFaults;
use millrace_worker::start::start;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

use crate::controller::Controller;
use crate::support::{client, config, inject, invoke, refusal, request, row, serving_mlp, values, within};

/// Size of the MLP's weights in their region, in bytes.
const WEIGHTS_BYTES: u64 = 33_280;

/// Returns the answer of the model itself, without any of Millrace.
fn reference(row: &[f32]) -> Vec<f32> {
    use rten_tensor::prelude::*;
    let model = rten::Model::load(millrace_model::synth::mlp()).unwrap();
    let input = rten_tensor::NdTensor::from_data([1, 64], row.to_vec());
    let outputs =
        model.run(vec![(model.node_id("x").unwrap(), input.into())], &[model.node_id("y").unwrap()], None);
    let output: rten_tensor::NdTensor<f32, 2> = outputs.unwrap().remove(0).try_into().unwrap();
    output.to_vec()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_equal_the_models_own_in_process_and_over_tcp() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    for seed in 0..4 {
        let response = invoke(&mut client(&worker), "mlp", seed, &row(seed)).await.unwrap();
        assert_eq!(values(&response), reference(&row(seed)), "row {seed}");
    }
    let mut remote = WorkerClient::connect(format!("http://{}", worker.addr())).await.unwrap();
    let response = remote.invoke(request("mlp", 9, &row(9))).await.unwrap().into_inner();
    assert_eq!(values(&response), reference(&row(9)));
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn health_checks_report_a_serving_worker_until_it_drains() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let channel = tonic::transport::Endpoint::from_shared(format!("http://{}", worker.addr())).unwrap();
    let mut prober = HealthClient::new(channel.connect().await.unwrap());
    let mut status =
        async || prober.check(HealthCheckRequest::default()).await.unwrap().into_inner().status();
    assert_eq!(status().await, ServingStatus::Serving);
    worker.drain(std::time::Duration::ZERO).await;
    assert_eq!(status().await, ServingStatus::NotServing);
    worker.shutdown().await;
}

/// Real batched runs: each request gets its own rows of the batch.
#[tokio::test(flavor = "multi_thread")]
async fn batched_requests_get_the_answers_of_requests_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving_mlp(dir.path(), 1, &["batched-mlp"]).await;
    let mut asked = tokio::task::JoinSet::new();
    for seed in 0..400 {
        let mut client = client(&worker);
        asked.spawn(async move { (seed, invoke(&mut client, "batched-mlp", seed, &row(seed)).await) });
    }
    while let Some(answer) = asked.join_next().await {
        let (seed, response) = answer.unwrap();
        let got = values(&response.unwrap());
        let due = reference(&row(seed));
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * (1.0 + b.abs());
        assert!(got.len() == due.len() && got.iter().zip(&due).all(close), "row {seed}: {got:?} for {due:?}");
    }
    let batches = worker.node().snapshot().await.batches;
    assert!(batches.batches > 0 && batches.requests > 2 * batches.batches, "{batches:?}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_latency_breakdown_shows_that_only_the_first_request_swapped() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let first = invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap().split.unwrap();
    let resident = |telemetry: &wire::Telemetry| {
        telemetry.gpus[0].models.iter().any(|model| model.loaded_bytes == WEIGHTS_BYTES)
    };
    controller.telemetry("the whole model on the GPU", resident).await;
    let second = invoke(&mut client(&worker), "mlp", 2, &row(2)).await.unwrap().split.unwrap();
    assert!(first.swap_ns > 0, "{first:?}");
    // The bytes are complete even if the end of the run was reported before the end of the copy.
    assert_eq!(first.swapped_bytes, WEIGHTS_BYTES, "{first:?}");
    assert_eq!((second.swapped_bytes, second.swap_ns), (0, 0), "{second:?}");
    for split in [first, second] {
        assert!(split.run_ns > 0, "{split:?}");
        assert!(split.queue_ns + split.swap_ns + split.run_ns <= split.total_ns, "{split:?}");
    }
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_functions_of_one_digest_share_one_resident_model() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["a", "b"]).await;
    for (id, name) in ["a", "b"].into_iter().enumerate() {
        invoke(&mut client(&worker), name, id as u64, &row(1)).await.unwrap();
    }
    let shared =
        |telemetry: &wire::Telemetry| telemetry.gpus[0].models.iter().any(|model| model.functions.len() == 2);
    let telemetry = controller.telemetry("one model for both", shared).await;
    let gpu = &telemetry.gpus[0];
    assert_eq!((gpu.models.len(), gpu.swaps, telemetry.host_models.len()), (1, 1, 1), "{telemetry:?}");
    assert_eq!(controller.fetches(), 1);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_corrupt_device_copy_changes_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let mut client = client(&worker);
    let before = values(&invoke(&mut client, "mlp", 1, &row(1)).await.unwrap());
    inject(&mut client, 0, Fault::CorruptDevice, "default/mlp@1").await;
    let after = values(&invoke(&mut client, "mlp", 2, &row(1)).await.unwrap());
    assert_ne!(before, after);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_cannot_be_served_are_refused_with_their_reason() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let good = request("mlp", 1, &row(1));
    let with = |change: fn(&mut wire::InvokeRequest)| {
        let mut request = good.clone();
        change(&mut request);
        request
    };
    for (request, reason) in [
        (with(|r| r.function = "other".into()), Reason::FunctionNotReady),
        (with(|r| r.revision = 2), Reason::FunctionNotReady),
        (with(|r| r.revision = 0), Reason::MalformedRequest),
        (with(|r| r.request_id = "two words".into()), Reason::MalformedRequest),
        (with(|r| r.inputs[0].shape = vec![1, 63]), Reason::InvalidInput),
        (with(|r| r.inputs[0].name = "z".into()), Reason::InvalidInput),
        (with(|r| r.outputs = vec!["z".into()]), Reason::InvalidOutput),
        (with(|r| r.timeout = Some(prost_types::Duration::default())), Reason::TimedOut),
    ] {
        let status = within("a refusal", client(&worker).invoke(request)).await.unwrap_err();
        assert_eq!(from_status(&status).reason, reason, "{status:?}");
    }
    invoke(&mut client(&worker), "mlp", 2, &row(1)).await.unwrap();
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_are_refused_without_the_flag() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(dir.path(), &[controller.addr], 1);
    config.faults = InjectedFaults::Refuse;
    let worker = start(config).await.unwrap();
    let request = wire::InjectFaultRequest { gpu: 0, fault: Fault::Xid as u32, function: String::new() };
    let status = client(&worker).inject_fault(request).await.unwrap_err();
    assert_eq!(status.code(), tonic::Code::PermissionDenied);
    assert!(status.message().contains("--allow faults"), "{status:?}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_worker_answers_admitted_requests_and_refuses_new_ones() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let pid = controller.telemetry("a pid", |telemetry| telemetry.gpus[0].executor_pid != 0).await.gpus[0]
        .executor_pid;
    let end = crate::processes::End::of(pid);
    let mut first = client(&worker);
    let row = row(1);
    let (answer, ()) = tokio::join!(
        biased;
        invoke(&mut first, "mlp", 1, &row),
        worker.drain(std::time::Duration::from_secs(10)),
    );
    answer.unwrap();
    let refused = refusal(invoke(&mut client(&worker), "mlp", 2, &row).await);
    assert_eq!(refused.reason, Reason::ShuttingDown);
    end.wait().await;
    worker.shutdown().await;
}
