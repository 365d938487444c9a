//! Tests of models that are copied from another GPU's executor (T22, T25).

use std::path::Path;
use std::time::Duration;

use millrace_model::synth;
use millrace_proto::executor::Fault;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_types::topology::{LinkKind, TopologyLink};
use millrace_types::{BytesPerSec, Failure, GpuIndex};
use millrace_worker::start::{ExecutorIsolation, RunningWorker, start};
use tokio::task::JoinHandle;

use crate::controller::Controller;
use crate::support::{Client, all_up, client, config, inject, kill_9, texts, values, within};

pub(crate) type Answer = JoinHandle<Result<wire::InvokeResponse, Failure>>;

const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Bytes that are loaded only if every chunk of the model's 45,560,832 bytes is, the short last one
/// included: a GPU lends only whole models.
const ALMOST_ALL: u64 = 45_500_000;

/// Returns a model that takes long to copy and not to run, because embeddings make up most of its
/// 46 MB.
pub(crate) fn model() -> Vec<u8> {
    synth::bert_like(synth::Encoder {
        layers: 2,
        hidden: 256,
        heads: 4,
        inner: 1024,
        vocabulary: 38_000,
        positions: 64,
    })
}

/// A worker with two GPUs joined by an NVLink, and the whole model on GPU 0.
struct Joined {
    worker: RunningWorker,
    controller: Controller,
    /// Answer of the model when it was copied from the host.
    answer: Vec<f32>,
}

async fn joined(dir: &Path) -> Joined {
    joined_with(dir, ExecutorIsolation::Gpu).await
}

async fn joined_with(dir: &Path, isolation: ExecutorIsolation) -> Joined {
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(dir, &[controller.addr], 2);
    config.policy.dispatch = "torpor".parse().unwrap();
    config.isolation = isolation;
    let topology = &mut config.topology;
    topology.links.iter_mut().for_each(|link| link.rate = BytesPerSec(30_000_000));
    let kind = LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(1) };
    topology.links.push(TopologyLink { kind, rate: BytesPerSec(40_000_000) });
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    let digest = controller.publish(&model());
    controller.desire(&[("bert", digest)]);
    controller.ready("bert").await;
    let answer = values(&ask(&client(&worker), 0, 1).await.unwrap().unwrap());
    let loaded = |telemetry: &wire::Telemetry| {
        telemetry.gpus[0].models.iter().any(|model| model.loaded_bytes > ALMOST_ALL)
    };
    controller.telemetry("the model on GPU 0", loaded).await;
    Joined { worker, controller, answer }
}

/// Sends a request of `count` texts, all with the same four tokens.
pub(crate) fn ask(client: &Client, id: u64, count: usize) -> Answer {
    let request = texts("bert", id, [3, 37_999, 12, 20_000], count);
    let mut client = client.clone();
    tokio::spawn(async move {
        let response = within("an answer", client.invoke(request)).await;
        response.map(tonic::Response::into_inner).map_err(|status| from_status(&status))
    })
}

impl Joined {
    /// Keeps GPU 0 busy and sends a second request, for which GPU 1 loads the model. Returns both
    /// answers.
    async fn second(&self) -> [Answer; 2] {
        let client = client(&self.worker);
        for id in 1.. {
            let first = ask(&client, 2 * id, 4_000);
            within("GPU 0 at work", self.busy()).await;
            let mut second = ask(&client, 2 * id + 1, 1);
            let coming = |telemetry: &wire::Telemetry| !telemetry.gpus[1].models.is_empty();
            tokio::select! {
                biased;
                () = async { drop(self.controller.telemetry("the model on its way", coming).await) } => {
                    return [first, second];
                }
                // GPU 0 became idle before the second request arrived, and ran it: try again.
                answer = &mut second => {
                    answer.unwrap().unwrap();
                    first.await.unwrap().unwrap();
                    let snapshot = self.worker.node().snapshot().await;
                    assert!(snapshot.gpus[1].models.is_empty(), "no copy started: {snapshot:?}");
                }
            }
        }
        unreachable!("the loop ends only with a success")
    }

    /// Waits until GPU 0 runs a request. Telemetry may still show its earlier state, so snapshots
    /// are read.
    async fn busy(&self) {
        let look = async || self.worker.node().snapshot().await.gpus[0].running.len() == 1;
        while !look().await {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Waits until a part of the model is on GPU 1.
    async fn begun(&self) -> wire::Telemetry {
        let some =
            |telemetry: &wire::Telemetry| telemetry.gpus[1].models.iter().any(|model| model.loaded_bytes > 0);
        self.controller.telemetry("part of the model on GPU 1", some).await
    }

    async fn check(&self, [first, second]: [Answer; 2]) {
        assert_eq!(values(&second.await.unwrap().unwrap()), self.answer, "bit by bit");
        let rows = values(&first.await.unwrap().unwrap());
        for row in rows.chunks(self.answer.len()) {
            // A batch sums in another order.
            assert!(row.iter().zip(&self.answer).all(|(a, b)| (a - b).abs() < 1e-3), "{row:?}");
        }
    }

    async fn one_swap_from_each_source(&self) {
        let swaps = |telemetry: &wire::Telemetry| {
            let swaps: Vec<_> = telemetry.gpus.iter().map(|gpu| (gpu.swaps, gpu.peer_swaps)).collect();
            swaps == [(1, 0), (1, 1)]
        };
        self.controller.telemetry("one swap from each source", swaps).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_from_a_peer_answers_as_one_from_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let joined = joined(dir.path()).await;
    joined.check(joined.second().await).await;
    joined.one_swap_from_each_source().await;
    joined.worker.shutdown().await;
}

/// Breaks a copy between the GPUs while it is in progress, which must cost no answer. Then runs the
/// checks `then`. On a busy machine the copy may end before it is broken: the test then tries
/// again.
async fn broken(
    isolation: ExecutorIsolation,
    breaks: impl AsyncFn(&Joined, &wire::Telemetry),
    then: impl AsyncFn(&Joined),
) {
    for _ in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let joined = joined_with(dir.path(), isolation).await;
        let answers = joined.second().await;
        let telemetry = joined.begun().await;
        breaks(&joined, &telemetry).await;
        joined.check(answers).await;
        let whole_from_there = joined.worker.node().snapshot().await.gpus[1].peer_swaps > 0;
        then(&joined).await;
        joined.worker.shutdown().await;
        if !whole_from_there {
            return;
        }
    }
    panic!("the copy always ended before it was broken");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_killed_in_the_middle_of_a_copy_leaves_the_rest_to_the_host() {
    let kill = async |_: &Joined, now: &wire::Telemetry| kill_9(now.gpus[0].executor_pid);
    broken(ExecutorIsolation::Gpu, kill, async |_| {}).await;
}

/// With a process per model, the GPU's memory outlives the process. The model that is being copied
/// stays until the copy has stopped, and the rest is copied from the host.
#[tokio::test(flavor = "multi_thread")]
async fn a_models_process_killed_in_the_middle_of_a_copy_leaves_the_rest_to_the_host() {
    let kill = async |_: &Joined, now: &wire::Telemetry| kill_9(now.gpus[0].models[0].executor_pid);
    broken(ExecutorIsolation::Model, kill, async |joined| {
        let gpus = joined.worker.node().snapshot().await.gpus;
        assert!(gpus.iter().all(|gpu| gpu.restarts == 0), "{gpus:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_process_per_model_a_model_from_a_peer_answers_as_one_from_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let joined = joined_with(dir.path(), ExecutorIsolation::Resident).await;
    joined.check(joined.second().await).await;
    joined.one_swap_from_each_source().await;
    joined.worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_goes_down_in_the_middle_of_a_copy_costs_time_only() {
    let cut = async |joined: &Joined, _: &wire::Telemetry| {
        inject(&mut client(&joined.worker), 1, Fault::LosePeers, "").await;
    };
    broken(ExecutorIsolation::Gpu, cut, async |_| {}).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_falls_off_the_bus_is_replaced_and_costs_time_only() {
    let fall = async |joined: &Joined, before: &wire::Telemetry| {
        inject(&mut client(&joined.worker), 0, Fault::Xid, "").await;
        let unhealthy = |now: &wire::Telemetry| {
            let gpu = &now.gpus[0];
            gpu.health() == wire::GpuHealth::Unhealthy || gpu.incarnation > before.gpus[0].incarnation
        };
        joined.controller.telemetry("a GPU that is unhealthy", unhealthy).await;
    };
    broken(ExecutorIsolation::Gpu, fall, async |joined| drop(all_up(&joined.controller).await)).await;
}
