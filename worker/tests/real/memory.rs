//! Tests of the places of models when the GPU or host memory cannot hold all models.

use std::path::Path;

use millrace_proto::worker::{FunctionPhase, InvokeRequest, Likely, Telemetry, WarmTo};
use millrace_types::{Bytes, Digest, Reason};
use millrace_worker::start::{RunningWorker, start};

use crate::controller::Controller;
use crate::support::{all_up, client, config, invoke, refusal, request, row, values};

/// Returns the MLP under another digest: a field with a producer's name is appended.
fn mlp(name: u8) -> Vec<u8> {
    const PRODUCER_NAME: u8 = 2 << 3 | 2;
    [&millrace_model::synth::mlp()[..], &[PRODUCER_NAME, 1, name]].concat()
}

/// Publishes a model for each name. Returns the functions to desire.
fn published<'a>(controller: &Controller, names: &[&'a str]) -> Vec<(&'a str, Digest)> {
    let publish = |name: &&'a str| (*name, controller.publish(&mlp(name.as_bytes()[0])));
    names.iter().map(publish).collect()
}

async fn answer(worker: &RunningWorker, function: &str) -> Vec<f32> {
    values(&invoke(&mut client(worker), function, 1, &row(1)).await.unwrap())
}

/// Starts a worker that had "a" in host memory and has "b" there now. Also returns the answer of
/// "a".
async fn a_left_for_b(dir: &Path) -> (RunningWorker, Controller, Vec<f32>) {
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(dir, &[controller.addr], 1);
    // Every announced size is 64 MiB, so one model fits at a time while it is prepared.
    config.host_memory = Bytes::mib(64);
    let worker = start(config).await.unwrap();
    let models = published(&controller, &["a", "b"]);
    controller.desire(&models[..1]);
    controller.ready("a").await;
    let expected = answer(&worker, "a").await;
    controller.desire(&models);
    controller.ready("b").await;
    let telemetry = controller.telemetry("a left for b", one_left(1)).await;
    assert_eq!(telemetry.cold_starts, 0);
    (worker, controller, expected)
}

/// Whether one model was evicted from host memory so far, and `there` models are in it.
fn one_left(there: usize) -> impl Fn(&Telemetry) -> bool {
    move |telemetry: &Telemetry| (telemetry.host_evictions, telemetry.host_models.len()) == (1, there)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_evicted_from_host_memory_is_loaded_from_the_disk_on_request() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller, expected) = a_left_for_b(dir.path()).await;
    // The function stays ready, and the request reports the cold start.
    let cold = invoke(&mut client(&worker), "a", 2, &row(1)).await.unwrap();
    assert_eq!(values(&cold), expected);
    let split = cold.split.unwrap();
    assert!(split.cold_ns > 0 && split.swap_ns > 0, "{split:?}");
    assert!(split.cold_ns + split.queue_ns + split.swap_ns + split.run_ns <= split.total_ns, "{split:?}");
    let again = invoke(&mut client(&worker), "a", 3, &row(1)).await.unwrap().split.unwrap();
    assert_eq!(again.cold_ns, 0, "{again:?}");
    let came = |telemetry: &Telemetry| telemetry.cold_starts == 1;
    controller.telemetry("one cold start", came).await;
    assert_eq!(controller.fetches(), 2, "the second load was from the disk");
    worker.shutdown().await;
}

/// D29: a hint spares the next function of a workflow the cold start. The hint may be for a GPU, or
/// for host memory alone if the step is not certain.
#[tokio::test(flavor = "multi_thread")]
async fn a_hinted_model_is_back_in_host_memory_before_its_request() {
    for to in [WarmTo::Host, WarmTo::Gpu] {
        let dir = tempfile::tempdir().unwrap();
        let (worker, controller, expected) = a_left_for_b(dir.path()).await;
        let next = vec![Likely { function: "a".into(), revision: 1, to: to.into() }];
        let step = InvokeRequest { next, ..request("b", 2, &row(1)) };
        client(&worker).invoke(step).await.unwrap();
        controller.telemetry("a is back", one_left(2)).await;
        let warm = invoke(&mut client(&worker), "a", 3, &row(1)).await.unwrap();
        assert_eq!((values(&warm), warm.split.unwrap().cold_ns), (expected, 0), "{to:?}");
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_larger_than_host_memory_is_refused_with_a_next_step() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(dir.path(), &[controller.addr], 1);
    config.host_memory = Bytes::mib(32);
    let worker = start(config).await.unwrap();
    controller.desire(&published(&controller, &["a"]));
    let message = controller.phase("a", FunctionPhase::Failed).await;
    assert!(message.contains("32.0 MiB in all") && message.contains("--host-memory"), "{message}");
    let refused = refusal(invoke(&mut client(&worker), "a", 1, &row(1)).await);
    assert_eq!(refused.reason, Reason::FunctionNotReady);
    worker.shutdown().await;
}

/// T09: the first executor of a GPU measures the size before reporting ready.
#[tokio::test(flavor = "multi_thread")]
async fn the_size_of_a_weight_group_is_measured_on_the_device() {
    use millrace_worker::groups::{GROUP_MAX, GROUP_MIN};
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let worker = start(config(dir.path(), &[controller.addr], 1)).await.unwrap();
    all_up(&controller).await;
    let group = worker.node().weight_group_bytes().unwrap();
    assert!((GROUP_MIN..=GROUP_MAX).contains(&group), "{group}");
    let told = |telemetry: &Telemetry| telemetry.group_bytes == group.get();
    controller.telemetry("the group size in telemetry", told).await;
    worker.shutdown().await;
}
