//! Tests of models with a process each (L05, L06): the costs of the end of a process.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::time::Duration;

use millrace_model::synth::{self, Seeded};
use millrace_proto::executor::Fault;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Digest, Reason};
use millrace_worker::start::{Eviction, ExecutorIsolation, ISOLATIONS, RunningWorker, WorkerConfig, start};
use tokio::task::JoinHandle;

use crate::controller::Controller;
use crate::failures::resident_everywhere;
use crate::processes::{End, WorkerProcess};
use crate::support::{
    Client, all_up, client, config, inject, invoke, kill_9, refusal, request, row, texts, values, within,
};

/// Starts a worker with a process per model. The worker serves MLPs that differ in weights.
async fn serving(
    dir: &Path,
    isolation: ExecutorIsolation,
    names: &[&str],
    change: impl FnOnce(&mut WorkerConfig),
) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(dir, &[controller.addr], 1);
    config.isolation = isolation;
    change(&mut config);
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    desire(&controller, names, true).await;
    (worker, controller)
}

async fn desire(controller: &Controller, names: &[&str], idempotent: bool) {
    let publish = |(name, seed)| (name, controller.publish(&Seeded(seed).mlp()));
    let functions: Vec<(&str, Digest)> = names.iter().copied().zip(1..).map(publish).collect();
    controller.desire_with(&functions, |state| {
        state.functions.iter_mut().for_each(|function| function.idempotent = idempotent);
    });
    for name in names {
        controller.ready(name).await;
    }
}

fn holds(model: &wire::ResidentModel, name: &str) -> bool {
    model.functions.iter().any(|function| function.contains(&format!("/{name}@")))
}

fn pid_of(gpu: &wire::GpuTelemetry, name: &str) -> Option<u32> {
    gpu.models.iter().find(|model| holds(model, name)).map(|model| model.executor_pid).filter(|&pid| pid != 0)
}

/// Waits until a model is wholly on GPU 0, and returns its process.
async fn resident(controller: &Controller, name: &str) -> u32 {
    let whole = |telemetry: &wire::Telemetry| {
        let gpu = &telemetry.gpus[0];
        let loaded = |model: &wire::ResidentModel| holds(model, name) && model.loaded_bytes > 0;
        gpu.models.iter().any(loaded) && pid_of(gpu, name).is_some()
    };
    pid_of(&controller.telemetry(&format!("{name} on GPU 0"), whole).await.gpus[0], name).unwrap()
}

async fn answer(client: &Client, name: &str, id: u64) -> Vec<f32> {
    values(&invoke(&mut client.clone(), name, id, &row(1)).await.unwrap())
}

/// Returns a model with long runs for a batch of many texts.
fn slow() -> Vec<u8> {
    synth::bert_like(synth::Encoder {
        layers: 2,
        hidden: 256,
        heads: 4,
        inner: 1024,
        vocabulary: 1_000,
        positions: 64,
    })
}

fn ask_slow(client: &Client, id: u64) -> JoinHandle<wire::InvokeResponse> {
    let request = texts("slow", id, [3, 999, 12, 200], 4_000);
    let mut client = client.clone();
    tokio::spawn(async move {
        let response = within("an answer", client.invoke(request)).await;
        response.map_err(|status| from_status(&status)).unwrap().into_inner()
    })
}

/// Serves a slow model, and a quick model that is on the GPU. Also returns the quick model's
/// answer.
async fn slow_and_quick(dir: &Path) -> (RunningWorker, Controller, Vec<f32>) {
    let (worker, controller) = serving(dir, ExecutorIsolation::Model, &[], |_| {}).await;
    let functions = [("slow", controller.publish(&slow())), ("quick", controller.publish(&synth::mlp()))];
    controller.desire(&functions);
    controller.ready("slow").await;
    controller.ready("quick").await;
    let expected = answer(&client(&worker), "quick", 1).await;
    resident(&controller, "quick").await;
    (worker, controller, expected)
}

/// Waits until the slow model runs, and returns its process.
async fn running_slow(controller: &Controller) -> u32 {
    let runs =
        |telemetry: &wire::Telemetry| telemetry.gpus[0].running.iter().any(|it| it.function.contains("slow"));
    controller.telemetry("the slow model at work", runs).await;
    resident(controller, "slow").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_in_its_run_costs_only_its_own_request_another_attempt() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller, expected) = slow_and_quick(dir.path()).await;
    let client = client(&worker);
    let slow = ask_slow(&client, 2);
    let victim = running_slow(&controller).await;
    let quick = resident(&controller, "quick").await;
    // This request waits behind the slow request, in another process.
    let behind = tokio::spawn({
        let mut client = client.clone();
        async move { invoke(&mut client, "quick", 3, &row(1)).await.unwrap() }
    });
    kill_9(victim);
    assert_eq!(slow.await.unwrap().attempts, 2);
    let behind = behind.await.unwrap();
    assert_eq!((values(&behind), behind.attempts), (expected, 1));
    let another = resident(&controller, "slow").await;
    assert_ne!(another, victim);
    let after = |telemetry: &wire::Telemetry| telemetry.gpus[0].running.is_empty();
    let gpu = controller.telemetry("rest", after).await.gpus[0].clone();
    assert_eq!(pid_of(&gpu, "quick"), Some(quick), "the same process");
    assert_eq!((gpu.swaps, gpu.restarts, gpu.incarnation), (3, 0, 1), "only the slow model was loaded again");
    assert_eq!(gpu.health(), wire::GpuHealth::Up);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_while_another_runs_does_not_disturb_that_run() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller, expected) = slow_and_quick(dir.path()).await;
    let client = client(&worker);
    let slow = ask_slow(&client, 2);
    let runs_in = running_slow(&controller).await;
    let victim = resident(&controller, "quick").await;
    kill_9(victim);
    let gone = |telemetry: &wire::Telemetry| pid_of(&telemetry.gpus[0], "quick").is_none();
    let gpu = controller.telemetry("the quick one gone", gone).await.gpus[0].clone();
    assert_eq!(gpu.executor_pids, [runs_in]);
    assert_eq!(slow.await.unwrap().attempts, 1);
    assert_eq!(answer(&client, "quick", 3).await, expected, "in another process");
    worker.shutdown().await;
}

/// The memory of a GPU outlives its processes.
#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_copied_again_over_the_memory_of_a_dead_process() {
    let dir = tempfile::tempdir().unwrap();
    // The GPU has one block, so each model uses the memory of the model before.
    let one_block = |config: &mut WorkerConfig| config.topology.gpus[0].memory = Bytes::mib(2);
    let names = ["a", "b"];
    let (worker, controller) = serving(dir.path(), ExecutorIsolation::Model, &names, one_block).await;
    let client = client(&worker);
    let expected = [answer(&client, "a", 1).await, answer(&client, "b", 2).await];
    assert_ne!(expected[0], expected[1]);
    for round in 0..6 {
        let dies = names[round % 2];
        let next = (round + 1) % 2;
        answer(&client, dies, 10 + round as u64).await;
        let victim = resident(&controller, dies).await;
        kill_9(victim);
        let gone = |telemetry: &wire::Telemetry| !telemetry.gpus[0].executor_pids.contains(&victim);
        controller.telemetry("the process gone", gone).await;
        let response = invoke(&mut client.clone(), names[next], 20 + round as u64, &row(1)).await.unwrap();
        assert_eq!(values(&response), expected[next], "round {round}");
        assert!(response.split.unwrap().swapped_bytes > 0, "the model was copied");
    }
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_evicted_model_loses_its_process_if_only_resident_models_have_one() {
    let dir = tempfile::tempdir().unwrap();
    let two_blocks = |config: &mut WorkerConfig| {
        config.topology.gpus[0].memory = Bytes::mib(4);
        config.policy.eviction = Eviction::Lru;
    };
    let names = ["a", "b", "c"];
    let (worker, controller) = serving(dir.path(), ExecutorIsolation::Resident, &names, two_blocks).await;
    let client = client(&worker);
    let mut expected = Vec::new();
    for (id, name) in (0..).zip(names.iter().cycle().take(9)) {
        let before = controller.latest_telemetry().gpus[0].clone();
        let evicted = if before.models.len() == 2 {
            let oldest = before.models.iter().find(|model| holds(model, names[(id + 1) % 3])).unwrap();
            Some(End::of(oldest.executor_pid))
        } else {
            None
        };
        expected.push(answer(&client, name, id as u64).await);
        resident(&controller, name).await;
        if let Some(evicted) = evicted {
            evicted.wait().await;
        }
        let gpu = controller.latest_telemetry().gpus[0].clone();
        let cached: BTreeSet<u32> = gpu.models.iter().map(|model| model.executor_pid).collect();
        assert_eq!(gpu.executor_pids.iter().copied().collect::<BTreeSet<_>>(), cached, "{gpu:?}");
        assert_eq!(gpu.models.len(), (id + 1).min(2));
    }
    assert_eq!((&expected[..3], &expected[..3]), (&expected[3..6], &expected[6..]));
    assert_eq!(controller.latest_telemetry().gpus[0].restarts, 0);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_kills_its_models_processes_is_quarantined_after_two() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), ExecutorIsolation::Model, &["mlp", "other"], |config| {
        config.topology = crate::support::topology(2);
    })
    .await;
    let mut client = client(&worker);
    resident_everywhere(&client, &controller).await;
    let expected = answer(&client, "other", 1).await;
    for gpu in 0..2 {
        inject(&mut client, gpu, Fault::AbortOnRun, "default/mlp@1").await;
    }
    let failure = refusal(invoke(&mut client, "mlp", 1, &row(1)).await);
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::Quarantined, true), "{failure:?}");
    assert_eq!(answer(&client, "other", 2).await, expected);
    invoke(&mut client, "mlp", 3, &row(1)).await.expect("others are served");
    let gpus = controller.latest_telemetry().gpus;
    assert!(gpus.iter().all(|gpu| (gpu.restarts, gpu.health()) == (0, wire::GpuHealth::Up)), "{gpus:?}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_non_idempotent_request_is_not_repeated_after_its_process_died_in_its_run() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), ExecutorIsolation::Resident, &[], |_| {}).await;
    desire(&controller, &["once"], false).await;
    let mut client = client(&worker);
    let expected = answer(&client, "once", 1).await;
    inject(&mut client, 0, Fault::AbortOnRun, "default/once@1").await;
    let failure = refusal(invoke(&mut client, "once", 2, &row(1)).await);
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::ExecutorLost, true), "{failure:?}");
    assert_eq!(answer(&client, "once", 3).await, expected);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_fail_and_the_gpu_stays_up_if_no_process_can_be_started() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), ExecutorIsolation::Model, &["mlp"], |config| {
        config.executor.program = "/nonexistent/executor".into();
    })
    .await;
    let failure = refusal(invoke(&mut client(&worker), "mlp", 1, &row(1)).await);
    assert_eq!(
        (failure.reason, failure.may_have_executed),
        (Reason::AttemptsExhausted, false),
        "{failure:?}"
    );
    let gpu = controller.latest_telemetry().gpus[0].clone();
    assert_eq!((gpu.health(), gpu.restarts), (wire::GpuHealth::Up, 0));
    worker.shutdown().await;
}

/// No process survives a worker that stops in order, or a worker that is killed.
#[tokio::test(flavor = "multi_thread")]
async fn no_process_of_a_model_outlives_its_worker() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["a", "b", "c"];
    let (worker, controller) = serving(dir.path(), ExecutorIsolation::Model, &names, |_| {}).await;
    let mut ends = Vec::new();
    for (id, name) in (0..).zip(names) {
        answer(&client(&worker), name, id).await;
        ends.push(End::of(resident(&controller, name).await));
    }
    worker.shutdown().await;
    for end in ends {
        end.wait().await;
    }

    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let mut worker = WorkerProcess::start(dir.path(), &controller, ExecutorIsolation::Model);
    all_up(&controller).await;
    desire(&controller, &names, true).await;
    let remote = controller.hello().await.address;
    let mut client = millrace_proto::worker::worker_client::WorkerClient::connect(format!("http://{remote}"))
        .await
        .unwrap();
    for (id, name) in (0..).zip(names) {
        client.invoke(request(name, id, &row(1))).await.unwrap();
    }
    let three = |telemetry: &wire::Telemetry| {
        telemetry.gpus.iter().map(|gpu| gpu.executor_pids.len()).sum::<usize>() >= 3
    };
    let telemetry = controller.telemetry("three processes", three).await;
    let pids = telemetry.gpus.iter().flat_map(|gpu| gpu.executor_pids.iter().copied());
    let ends: Vec<End> = pids.map(End::of).collect();
    kill_9(worker.pid());
    worker.child.wait().await.unwrap();
    for end in ends {
        end.wait().await;
    }
}

/// Durations in one isolation mode, from the rounds of [`cost_of_a_miss`].
#[derive(Default)]
struct Times {
    miss: Vec<Duration>,
    hit: Vec<Duration>,
    alike: Vec<Duration>,
    by_turns: Vec<Duration>,
}

async fn timed(what: impl Future<Output = ()>) -> Duration {
    let begun = tokio::time::Instant::now();
    what.await;
    begun.elapsed()
}

async fn four(client: &Client, names: [&str; 4]) {
    futures::future::join_all(names.map(|name| answer(client, name, 1))).await;
}

/// Formats the median and the quartiles of durations.
fn quartiles(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let ms = |part: usize| times[(times.len() - 1) * part / 4].as_secs_f64() * 1e3;
    format!("{:.2} ({:.2} to {:.2})", ms(2), ms(1), ms(3))
}

/// Checks that models that take turns are all answered in every isolation mode. With
/// `MISS_ROUNDS=100` and `--nocapture`, the test prints for each mode the times from request to
/// answer. The test measures a miss and a hit of a model of 33 kB, and four concurrent requests, of
/// one resident model or of two in turn.
#[tokio::test(flavor = "multi_thread")]
async fn cost_of_a_miss() {
    let rounds: usize = std::env::var("MISS_ROUNDS").map_or(2, |rounds| rounds.parse().expect("a number"));
    let names = ["a", "b", "c"];
    let mut modes = Vec::new();
    for (name, isolation) in ISOLATIONS {
        let dir = tempfile::tempdir().unwrap();
        // The GPU has room for two models, so each of three models in turn is a miss.
        let two_blocks = |config: &mut WorkerConfig| config.topology.gpus[0].memory = Bytes::mib(4);
        let (worker, controller) = serving(dir.path(), isolation, &names, two_blocks).await;
        let client = client(&worker);
        for name in names {
            answer(&client, name, 1).await;
        }
        modes.push((name, client, Times::default(), (worker, controller, dir)));
    }
    for _ in 0..rounds {
        for (_, client, times, _) in &mut modes {
            for name in names {
                times.miss.push(timed(async { drop(answer(client, name, 1).await) }).await);
            }
            times.hit.push(timed(async { drop(answer(client, "c", 1).await) }).await);
            times.alike.push(timed(four(client, ["c"; 4])).await);
            times.by_turns.push(timed(four(client, ["b", "c", "b", "c"])).await);
        }
    }
    for (name, _, mut times, (worker, controller, _dir)) in modes {
        let gpu = controller.latest_telemetry().gpus[0].clone();
        println!(
            "{name}: ms, median (quartiles): miss {}, hit {}, four of one {}, four by turns {}; {} processes",
            quartiles(&mut times.miss),
            quartiles(&mut times.hit),
            quartiles(&mut times.alike),
            quartiles(&mut times.by_turns),
            gpu.executor_pids.len(),
        );
        worker.shutdown().await;
    }
}
