//! Tests of artifacts, from a controller into host memory.

use millrace_proto::worker::FunctionPhase;
use millrace_types::Digest;
use millrace_worker::start::{RunningWorker, start};

use crate::controller::Controller;
use crate::support::{client, config, invoke, row, serving_mlp, values, worker};

fn files(dir: &tempfile::TempDir) -> Vec<String> {
    let folder = dir.path().join("artifacts");
    let folders = [folder.clone(), folder.join("incoming")];
    let entries = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap());
    let entries = entries.map(Result::unwrap).filter(|entry| entry.metadata().unwrap().is_file());
    entries.map(|entry| entry.file_name().into_string().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_with_wrong_bytes_fails_leaves_no_file_and_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    let model = millrace_model::synth::mlp();
    let digest = Digest::of(&model);
    controller.publish_as(digest, b"something else");
    controller.desire(&[("mlp", digest)]);
    let message = controller.phase("mlp", FunctionPhase::Failed).await;
    assert!(message.contains(&digest.to_string()), "{message}");
    // The next attempt may be in progress, so a temporary file may exist.
    assert!(files(&dir).iter().all(|name| name.contains(".tmp-")), "{:?}", files(&dir));
    controller.publish_as(digest, &model);
    controller.ready("mlp").await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_is_not_a_model_fails_with_a_next_step() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    let digest = controller.publish(b"not a model at all");
    controller.desire(&[("bad", digest)]);
    let message = controller.phase("bad", FunctionPhase::Failed).await;
    assert!(message.contains("ONNX"), "{message}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_from_the_same_data_directory_needs_no_fetch() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let before = values(&invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap());
    let predicted = async |worker: &RunningWorker| {
        let errors = worker.node().snapshot().await.dispatch.errors;
        errors.iter().map(|error| error.predictions).sum::<u64>()
    };
    assert_eq!(predicted(&worker).await, 0, "the model had no profile");
    worker.shutdown().await;
    let fresh = Controller::start("test-cluster", 2).await;
    let worker = start(config(dir.path(), &[fresh.addr], 1)).await.unwrap();
    fresh.desire(&[("mlp", Digest::of(&millrace_model::synth::mlp()))]);
    fresh.ready("mlp").await;
    assert_eq!(values(&invoke(&mut client(&worker), "mlp", 2, &row(1)).await.unwrap()), before);
    assert_eq!((controller.fetches(), fresh.fetches()), (1, 0));
    assert_eq!(predicted(&worker).await, 1, "the profile survived the restart");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_without_functions_is_removed_from_memory_and_disk() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap();
    assert_eq!(files(&dir).len(), 1);
    let held = |telemetry: &millrace_proto::worker::Telemetry| {
        telemetry.host_models.len() == 1 && telemetry.gpus[0].models.len() == 1
    };
    controller.telemetry("the model held", held).await;
    controller.desire(&[]);
    let empty = |telemetry: &millrace_proto::worker::Telemetry| {
        telemetry.host_models.is_empty() && telemetry.gpus[0].models.is_empty()
    };
    controller.telemetry("nothing held", empty).await;
    assert_eq!(files(&dir), [""; 0]);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_is_fetched_from_the_controller_that_has_it() {
    let dir = tempfile::tempdir().unwrap();
    let leader = Controller::start("test-cluster", 1).await;
    let holder = Controller::start("test-cluster", 1).await;
    // The address is bound without a listener: connections are refused, and no other process can
    // take the port.
    let held = tokio::net::TcpSocket::new_v4().unwrap();
    held.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let gone = held.local_addr().unwrap();
    let worker = start(config(dir.path(), &[leader.addr, gone, holder.addr], 1)).await.unwrap();
    let digest = holder.publish(&millrace_model::synth::mlp());
    leader.desire(&[("mlp", digest)]);
    leader.ready("mlp").await;
    assert_eq!(holder.fetches(), 1);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_that_breaks_off_continues_at_another_controller() {
    let dir = tempfile::tempdir().unwrap();
    let first = Controller::start("test-cluster", 1).await;
    let second = Controller::start("test-cluster", 1).await;
    let worker = start(config(dir.path(), &[first.addr, second.addr], 1)).await.unwrap();
    let model = millrace_model::synth::mlp();
    // One controller serves only the beginning and the other only the rest: both are needed.
    first.break_off_after(1000);
    let digest = first.publish(&model);
    let mut rest = model.clone();
    rest[..1000].fill(0);
    second.publish_as(digest, &rest);
    first.desire(&[("mlp", digest)]);
    first.ready("mlp").await;
    assert!(first.fetches() > 0 && second.fetches() > 0);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_artifact_is_reported_with_the_answer_of_each_controller() {
    let dir = tempfile::tempdir().unwrap();
    let first = Controller::start("test-cluster", 1).await;
    let second = Controller::start("test-cluster", 1).await;
    let worker = start(config(dir.path(), &[first.addr, second.addr], 1)).await.unwrap();
    first.desire(&[("mlp", Digest::of(b"nobody's"))]);
    let message = first.phase("mlp", FunctionPhase::Failed).await;
    for controller in [&first, &second] {
        let said = format!("controller {}: no such artifact", controller.addr);
        assert!(message.contains(&said), "{message}");
    }
    worker.shutdown().await;
}
