//! Tests of objects that a GPU's executor copies to host memory under grants (D11 to D16).

use std::path::Path;
use std::time::Duration;

use futures::StreamExt as _;
use millrace_proto::executor::Fault;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_objects_client::WorkerObjectsClient;
use millrace_transfers::fabric::GuaranteeCounts;
use millrace_transfers::rates::TransferSharing;
use millrace_types::{Bytes, BytesPerSec, Failure, NodeName, Reason};
use millrace_worker::snapshot::{LinkSnapshot, NodeSnapshot};
use millrace_worker::start::{DataConfig, RunningWorker, SchedulingPolicy, WorkerConfig, start};

use crate::controller::Controller;
use crate::objects::{ROW_BYTES, ask, keeping, methods, object, part, rows, tensor};
use crate::support::{all_up, client, config, inject, kill_9, request, within};

const LONG: Duration = Duration::from_secs(3600);
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Rows of an object with six chunks, which make two batches.
const MANY: u64 = 49_152;
const WHOLE: u64 = MANY * ROW_BYTES;
const FAST: BytesPerSec = BytesPerSec::gb(1);
/// Rate at which the second batch is copied two seconds after the first.
const SLOW: BytesPerSec = BytesPerSec(5_000_000);

/// Starts a worker that serves the MLP on a GPU behind a link of this rate, with this memory for
/// objects.
async fn serving(dir: &Path, rate: BytesPerSec, room: Bytes) -> (RunningWorker, Controller) {
    let gpu_data = DataConfig { memory: room, ..DataConfig::default() };
    serving_as(dir, rate, |config| WorkerConfig { gpu_data, ..config }).await
}

/// Starts a worker that serves the MLP, with a changed configuration.
async fn serving_as(
    dir: &Path,
    rate: BytesPerSec,
    changed: impl FnOnce(WorkerConfig) -> WorkerConfig,
) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(dir, &[controller.addr], 1);
    config.topology.links[0].rate = rate;
    let worker = start(changed(config)).await.unwrap();
    all_up(&controller).await;
    let digest = controller.publish(&millrace_model::synth::mlp());
    controller.desire(&[("mlp", digest)]);
    controller.ready("mlp").await;
    (worker, controller)
}

/// Stores the MLP's output as an object.
async fn make(worker: &RunningWorker, id: u64) -> wire::Object {
    object(&ask(&mut client(worker), keeping(id, rows(MANY), LONG)).await, worker)
}

/// Returns the MLP's output.
async fn answer(worker: &RunningWorker) -> bytes::Bytes {
    let plain = wire::InvokeRequest { inputs: vec![rows(MANY)], ..request("mlp", 90, &[]) };
    ask(&mut client(worker), plain).await.outputs[0].data.clone()
}

/// Fetches a whole object as another worker does.
async fn fetch(worker: &RunningWorker, object: &wire::Object) -> Result<Vec<u8>, Failure> {
    let request = wire::FetchObjectRequest { id: object.id.clone(), whole: true, ..<_>::default() };
    let all = async {
        let address = format!("http://{}", worker.addr());
        let mut client = WorkerObjectsClient::connect(address).await.unwrap();
        let mut chunks = client.fetch_object(request).await?.into_inner();
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk?;
            assert_eq!(chunk.crc32, crc32fast::hash(&chunk.data));
            bytes.extend_from_slice(&chunk.data);
        }
        Ok(bytes)
    };
    within("an object", all).await.map_err(|status| from_status(&status))
}

async fn until(worker: &RunningWorker, what: &str, wanted: impl Fn(&NodeSnapshot) -> bool) {
    let seen = async {
        while !wanted(&worker.node().snapshot().await) {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    within(what, seen).await;
}

async fn link(worker: &RunningWorker) -> LinkSnapshot {
    worker.node().snapshot().await.links.remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_fetched_by_another_worker_crosses_its_gpus_link_under_grants() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), FAST, Bytes::gib(1)).await;
    let expected = answer(&worker).await;
    let made = make(&worker, 1).await;
    let before = link(&worker).await;
    assert_eq!((before.carried_to_host, before.measured_to_host), (Bytes::ZERO, None));
    assert_eq!(fetch(&worker, &made).await.unwrap(), expected);
    let after = link(&worker).await;
    assert_eq!((after.carried_to_host, after.carried), (Bytes(WHOLE), before.carried));
    assert!(after.measured_to_host.is_some());
    let transfers = worker.node().snapshot().await.transfers;
    assert_eq!(transfers.ended.from_gpu.unpromised, 1, "{transfers:?}");
    // A batch that fails is copied again.
    inject(&mut client(&worker), 0, Fault::FailNextCopy, "").await;
    assert_eq!(fetch(&worker, &made).await.unwrap(), expected);
    assert_eq!(link(&worker).await.carried_to_host, Bytes(2 * WHOLE));
    worker.shutdown().await;
}

/// D14: the deadline of a request travels to the worker from which it fetches.
#[tokio::test(flavor = "multi_thread")]
async fn a_fetch_of_another_worker_has_the_deadline_of_its_request() {
    let dir = tempfile::tempdir().unwrap();
    let sharing = |config: WorkerConfig| {
        let policy = SchedulingPolicy { sharing: TransferSharing::FaasTube, ..config.policy };
        WorkerConfig { policy, ..config }
    };
    let (home, _controller) = serving_as(&dir.path().join("w1"), FAST, sharing).await;
    let named = |config: WorkerConfig| WorkerConfig { node: NodeName::new("w2").unwrap(), ..config };
    let (other, _elsewhere) = serving_as(&dir.path().join("w2"), FAST, named).await;
    let made = make(&home, 1).await;
    let ended = async || home.node().snapshot().await.transfers.ended.from_gpu;
    let take = async |id: u64, objective: Option<Duration>| {
        let input = tensor(MANY, bytes::Bytes::new(), vec![part(&made, 0, MANY)]);
        let objective_micros = objective.map(|objective| objective.as_micros() as u64);
        let asked = wire::InvokeRequest { inputs: vec![input], objective_micros, ..request("mlp", id, &[]) };
        let taken = ask(&mut client(&other), asked).await;
        assert_eq!(methods(&taken), [(wire::FetchMethod::InterNode, WHOLE)]);
    };
    take(2, None).await;
    assert_eq!(ended().await, GuaranteeCounts { unpromised: 1, ..GuaranteeCounts::default() });
    take(3, Some(Duration::from_secs(600))).await;
    assert_eq!(ended().await, GuaranteeCounts { unpromised: 1, admitted: 1, ..GuaranteeCounts::default() });
    home.shutdown().await;
    other.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_does_not_fit_on_its_gpu_crosses_the_link_under_grants() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), FAST, Bytes::mib(2)).await;
    let expected = answer(&worker).await;
    let made = make(&worker, 1).await;
    assert_eq!(link(&worker).await.carried_to_host, Bytes(WHOLE));
    assert_eq!(fetch(&worker, &made).await.unwrap(), expected);
    assert_eq!(link(&worker).await.carried_to_host, Bytes(WHOLE), "the object is on the host already");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_in_transit_is_lost_with_its_killed_executor_and_leaves_nothing() {
    for _ in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let (worker, _controller) = serving(dir.path(), SLOW, Bytes::gib(1)).await;
        let made = make(&worker, 1).await;
        let begun = async {
            until(&worker, "a batch to the host", |now| now.links[0].carried_to_host > Bytes::ZERO).await;
            kill_9(worker.node().snapshot().await.gpus[0].executor_pid.unwrap());
        };
        let (fetched, ()) = tokio::join!(fetch(&worker, &made), begun);
        if let Err(lost) = fetched {
            assert_eq!(lost.reason, Reason::DataLost, "{lost:?}");
            let at_rest = |now: &NodeSnapshot| {
                let gpu = &now.gpus[0];
                let link = &now.links[0];
                (gpu.restarts, gpu.data.used, link.outstanding) == (1, Bytes::ZERO, 0)
            };
            until(&worker, "another executor, and nothing left", at_rest).await;
            assert!(link(&worker).await.carried_to_host < Bytes(WHOLE));
            return worker.shutdown().await;
        }
        worker.shutdown().await;
    }
    panic!("the copy always ended before its executor was killed");
}
