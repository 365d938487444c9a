//! Tests of the worker's streams to its controllers.

use millrace_proto::worker as wire;
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::Digest;
use millrace_worker::data_dir;
use millrace_worker::start::{StartError, WorkerError, start};

use crate::controller::Controller;
use crate::support::{all_up, client, config, invoke, kill_9, row, serving_mlp, within, worker};

#[tokio::test(flavor = "multi_thread")]
async fn the_greeting_describes_the_worker_and_after_a_restart_its_cluster() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 2).await;
    let hello = controller.hello().await;
    let expected = wire::WorkerHello {
        runs_programs: false,
        cluster_id: String::new(),
        protocol_version: PROTOCOL_VERSION,
        build: BUILD.into(),
        node: "w1".into(),
        instance: hello.instance.clone(),
        address: worker.addr().to_string(),
        gpus: (0..2)
            .map(|index| wire::GpuCapacity { index, gpu_type: "test".into(), memory_bytes: 64 << 20 })
            .collect(),
        host_memory_bytes: 256 << 20,
        topology: "test".into(),
        seen_epoch: 0,
        stream_break: None,
    };
    assert_eq!(hello, expected);
    assert!(!hello.instance.is_empty());
    worker.shutdown().await;
    let again = Controller::start("test-cluster", 2).await;
    let worker = start(config(dir.path(), &[again.addr], 2)).await.unwrap();
    let hello_again = again.hello().await;
    assert_eq!(hello_again.cluster_id, "test-cluster");
    assert_ne!(hello_again.instance, hello.instance);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_controller_of_another_cluster_ends_the_worker_with_a_next_step() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _mine) = worker(dir.path(), 1).await;
    worker.shutdown().await;
    let other = Controller::start("other-cluster", 1).await;
    let mut worker = start(config(dir.path(), &[other.addr], 1)).await.unwrap();
    let error = within("a fatal error", worker.failed()).await;
    assert!(matches!(error, WorkerError::Refused(_)), "{error:?}");
    assert!(error.to_string().contains("data directory of its own"), "{error}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_without_its_first_controller_serves_on_and_obeys_the_next() {
    let dir = tempfile::tempdir().unwrap();
    let second = Controller::start("test-cluster", 2).await;
    let first = Controller::start("test-cluster", 1).await;
    let worker = start(config(dir.path(), &[first.addr, second.addr], 1)).await.unwrap();
    let digest = first.publish(&millrace_model::synth::mlp());
    first.desire(&[("mlp", digest)]);
    // The statuses reach both controllers.
    second.ready("mlp").await;
    drop(first);
    invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap();
    // Index 1 of term 1 was obeyed already, so the second controller's first state is ignored.
    second.desire(&[]);
    second.desire(&[("mlp", digest), ("again", digest)]);
    second.ready("again").await;
    invoke(&mut client(&worker), "again", 2, &row(1)).await.unwrap();
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn telemetry_carries_the_epoch_and_counts_up() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap();
    let swapped = |telemetry: &wire::Telemetry| telemetry.gpus[0].models.iter().any(|m| m.loaded_bytes > 0);
    let telemetry = controller.telemetry("a resident model", swapped).await;
    assert_eq!(telemetry.epoch, 1);
    assert_eq!(telemetry.gpus[0].models[0].functions, ["default/mlp@1"]);
    controller.telemetry("the next one", |later| later.seq > telemetry.seq).await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn telemetry_shows_a_dead_executor_before_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    // The first restart happens at once and may fall between two telemetry messages. Later restarts
    // wait longer than the gap between messages.
    loop {
        let gpu = all_up(&controller).await.gpus.remove(0);
        kill_9(gpu.executor_pid);
        let noticed = |telemetry: &wire::Telemetry| {
            let now = &telemetry.gpus[0];
            now.health() == wire::GpuHealth::Restarting || now.incarnation > gpu.incarnation
        };
        let seen = controller.telemetry("the death", noticed).await;
        if seen.gpus[0].health() == wire::GpuHealth::Restarting {
            assert_eq!(seen.gpus[0].executor_pid, 0);
            break;
        }
    }
    all_up(&controller).await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_worker_on_the_same_data_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    let second = start(config(dir.path(), &[controller.addr], 1)).await;
    assert!(matches!(second.err(), Some(StartError::DataDir(data_dir::Error::Locked { .. }))));
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_artifact_is_reported_and_requested_again() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    let model = millrace_model::synth::mlp();
    controller.desire(&[("mlp", Digest::of(&model))]);
    let message = controller.phase("mlp", wire::FunctionPhase::Failed).await;
    assert!(message.contains("no such artifact"), "{message}");
    controller.publish(&model);
    controller.ready("mlp").await;
    worker.shutdown().await;
}
