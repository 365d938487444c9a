//! Tests of shared GPUs: several requests run at once in one executor, on disjoint SMs.

use std::path::Path;

use millrace_model::synth::{self, Seeded};
use millrace_proto::policy::PolicySpec;
use millrace_proto::worker as wire;
use millrace_types::policy::GpuSharingName;
use millrace_worker::start::{ExecutorIsolation, RunningWorker, WorkerConfig, start};
use tokio::task::JoinHandle;

use crate::controller::Controller;
use crate::support::{Client, all_up, client, config, invoke, kill_9, row, texts, values, within};

pub(crate) const SLOW: [&str; 2] = ["slow-a", "slow-b"];

/// Returns a model with long runs for a batch of many texts.
pub(crate) fn slow(hidden: usize) -> Vec<u8> {
    let encoder =
        synth::Encoder { layers: 2, hidden, heads: 4, inner: 1024, vocabulary: 1_000, positions: 64 };
    synth::bert_like(encoder)
}

/// Serves two slow models and a quick one on one GPU.
async fn serving(dir: &Path, change: impl FnOnce(&mut WorkerConfig)) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(dir, &[controller.addr], 1);
    change(&mut config);
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    desire(&controller, None);
    for name in [SLOW[0], SLOW[1], "quick"] {
        controller.ready(name).await;
    }
    (worker, controller)
}

/// Desires the models, and a policy with a number if there is one.
fn desire(controller: &Controller, policy: Option<(u64, &str)>) {
    let functions = [
        (SLOW[0], controller.publish(&slow(256))),
        (SLOW[1], controller.publish(&slow(128))),
        ("quick", controller.publish(&Seeded(3).mlp())),
    ];
    controller.desire_with(&functions, |state| {
        state.policy = policy.map(|(generation, sharing)| wire::Policy {
            generation,
            spec: Some(PolicySpec { gpu_sharing: sharing.into(), ..Default::default() }),
        });
    });
}

pub(crate) fn ask(client: &Client, name: &str, id: u64, count: usize) -> JoinHandle<wire::InvokeResponse> {
    let request = texts(name, id, [3, 999, 12, 200], count);
    let mut client = client.clone();
    tokio::spawn(async move { within("an answer", client.invoke(request)).await.unwrap().into_inner() })
}

/// Returns the units of the running requests if both slow models run, each on a part of the SMs.
fn parts(telemetry: &wire::Telemetry) -> Option<[(u32, u32); 2]> {
    let gpu = &telemetry.gpus[0];
    let part = |name: &str| {
        let running = gpu.running.iter().find(|it| it.function.contains(name))?;
        (1..16).contains(&running.units).then_some((running.first_unit, running.units))
    };
    Some([part(SLOW[0])?, part(SLOW[1])?])
}

pub(crate) async fn violations(worker: &RunningWorker) -> u64 {
    worker.node().snapshot().await.gpus[0].sm_violations
}

#[tokio::test(flavor = "multi_thread")]
async fn two_models_run_at_once_on_disjoint_sms_and_answer_as_they_do_alone() {
    let dir = tempfile::tempdir().unwrap();
    let shares = |config: &mut WorkerConfig| config.policy.gpu_sharing = GpuSharingName::Slices;
    let (worker, controller) = serving(dir.path(), shares).await;
    let client = client(&worker);
    let mut alone = Vec::new();
    for (id, name) in (1..).zip(SLOW) {
        alone.push(values(&ask(&client, name, id, 500).await.unwrap()));
    }
    let together = [ask(&client, SLOW[0], 3, 2_000), ask(&client, SLOW[1], 4, 2_000)];
    let telemetry = controller.telemetry("both models at work", |telemetry| parts(telemetry).is_some()).await;
    let [(a, wide_a), (b, wide_b)] = parts(&telemetry).unwrap();
    assert!(a + wide_a <= b || b + wide_b <= a, "{:?}", telemetry.gpus[0].running);
    for (answer, alone) in together.into_iter().zip(alone) {
        let answer = values(&answer.await.unwrap());
        assert_eq!(answer[..alone.len()], alone[..], "a run in pieces has the same outputs");
    }
    assert_eq!(violations(&worker).await, 0);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_death_of_an_executor_with_two_runs_blames_neither() {
    let dir = tempfile::tempdir().unwrap();
    let shares = |config: &mut WorkerConfig| config.policy.gpu_sharing = GpuSharingName::Slices;
    let (worker, controller) = serving(dir.path(), shares).await;
    let client = client(&worker);
    let mut asked = Vec::new();
    for (round, id) in [(1, 10), (2, 20)] {
        asked = [ask(&client, SLOW[0], id, 2_000), ask(&client, SLOW[1], id + 1, 2_000)].into();
        let together = |telemetry: &wire::Telemetry| {
            parts(telemetry).is_some() && telemetry.gpus[0].incarnation == round
        };
        let telemetry = controller.telemetry("both models at work", together).await;
        kill_9(telemetry.gpus[0].executor_pid);
        for answer in &mut asked {
            assert_eq!(answer.await.unwrap().attempts, 2, "each suspect runs alone and is answered");
        }
    }
    drop(asked);
    assert_eq!(violations(&worker).await, 0);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sharing_starts_and_ends_under_load_without_a_lost_request() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), |_| {}).await;
    let client = client(&worker);
    let expected = values(&invoke(&mut client.clone(), "quick", 1, &row(1)).await.unwrap());
    for (change, sharing) in (1..).zip(["slices", "off", "slices", "off"]) {
        let slow = [ask(&client, SLOW[0], 100 * change, 300), ask(&client, SLOW[1], 100 * change + 1, 300)];
        let quick = |id| {
            let mut client = client.clone();
            tokio::spawn(async move { invoke(&mut client, "quick", id, &row(1)).await.unwrap() })
        };
        let before: Vec<_> = (2..12).map(|id| quick(100 * change + id)).collect();
        desire(&controller, Some((change, sharing)));
        let after: Vec<_> = (12..22).map(|id| quick(100 * change + id)).collect();
        for answer in before.into_iter().chain(after) {
            assert_eq!(values(&answer.await.unwrap()), expected);
        }
        for answer in slow {
            assert_eq!(answer.await.unwrap().attempts, 1);
        }
        let obeys = |telemetry: &wire::Telemetry| {
            let spec = telemetry.policy.as_ref().and_then(|policy| policy.spec.as_ref());
            spec.is_some_and(|spec| spec.gpu_sharing == sharing)
        };
        controller.telemetry("the policy in force", obeys).await;
    }
    assert_eq!(violations(&worker).await, 0);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gpu_with_a_process_for_each_model_is_not_shared() {
    let dir = tempfile::tempdir().unwrap();
    let isolates = |config: &mut WorkerConfig| {
        config.policy.gpu_sharing = GpuSharingName::Slices;
        config.isolation = ExecutorIsolation::Model;
    };
    let (worker, controller) = serving(dir.path(), isolates).await;
    desire(&controller, Some((1, "slices")));
    let reported = |telemetry: &wire::Telemetry| {
        let policy = telemetry.policy.as_ref().filter(|policy| policy.generation == 1);
        policy.and_then(|policy| policy.spec.as_ref()).is_some_and(|spec| spec.gpu_sharing == "off")
    };
    controller.telemetry("the policy that the node can obey", reported).await;
    let client = client(&worker);
    let both = [ask(&client, SLOW[0], 1, 100), ask(&client, SLOW[1], 2, 100)];
    for answer in both {
        assert_eq!(answer.await.unwrap().attempts, 1);
    }
    assert_eq!(violations(&worker).await, 0);
    worker.shutdown().await;
}
