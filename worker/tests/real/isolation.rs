//! Models with a process each (L05, L06): what the end of one costs, and whom.

use std::collections::BTreeSet;
use std::future::Future;
use std::path::Path;
use std::time::Duration;

use millrace_model::synth::{self, Seeded};
use millrace_proto::executor::Fault;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Digest, Reason};
use millrace_worker::start::{Eviction, ISOLATIONS, Isolation, Worker, WorkerConfig, start};
use tokio::task::JoinHandle;

use crate::controller::Controller;
use crate::failures::resident_everywhere;
use crate::processes::{End, WorkerProcess};
use crate::support::{
    Client, all_up, client, config, inject, invoke, kill_9, request, row, texts, values, within,
};

/// A worker whose models have processes of their own, serving MLPs that differ in their weights.
async fn serving(
    dir: &Path,
    isolation: Isolation,
    names: &[&str],
    change: impl FnOnce(&mut WorkerConfig),
) -> (Worker, Controller) {
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

/// The process of a model that is wholly on GPU 0.
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

/// A model whose runs take long for a batch of many texts.
fn slow() -> Vec<u8> {
    let (layers, hidden, heads, inner) = (2, 256, 4, 1024);
    synth::bert_like(synth::Encoder { layers, hidden, heads, inner, vocabulary: 1_000, positions: 64 })
}

fn ask_slow(client: &Client, id: u64) -> JoinHandle<wire::InvokeResponse> {
    let request = texts("slow", id, [3, 999, 12, 200], 4_000);
    let mut client = client.clone();
    tokio::spawn(async move {
        let response = within("an answer", client.invoke(request)).await;
        response.map_err(|status| from_status(&status)).unwrap().into_inner()
    })
}

/// Serves a slow model and a quick one, which is on the GPU. Gives what the quick one says.
async fn slow_and_quick(dir: &Path) -> (Worker, Controller, Vec<f32>) {
    let (worker, controller) = serving(dir, Isolation::Model, &[], |_| {}).await;
    let functions = [("slow", controller.publish(&slow())), ("quick", controller.publish(&synth::mlp()))];
    controller.desire(&functions);
    controller.ready("slow").await;
    controller.ready("quick").await;
    let expected = answer(&client(&worker), "quick", 1).await;
    resident(&controller, "quick").await;
    (worker, controller, expected)
}

/// The process in which the slow model's request runs.
async fn running_slow(controller: &Controller) -> u32 {
    let runs = |telemetry: &wire::Telemetry| telemetry.gpus[0].running.contains("slow");
    controller.telemetry("the slow model at work", runs).await;
    resident(controller, "slow").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_in_mid_run_costs_its_own_request_another_try_and_nobody_else_anything() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller, expected) = slow_and_quick(dir.path()).await;
    let client = client(&worker);
    let slow = ask_slow(&client, 2);
    let victim = running_slow(&controller).await;
    let quick = resident(&controller, "quick").await;
    // Behind the slow one, in another process.
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
    assert_eq!((gpu.swaps, gpu.restarts, gpu.incarnation), (3, 0, 1), "only the slow one came again");
    assert_eq!(gpu.health(), wire::GpuHealth::Up);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_killed_while_another_runs_leaves_that_run_alone() {
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

/// The memory of a GPU outlives the processes over it.
#[tokio::test(flavor = "multi_thread")]
async fn what_a_dead_process_left_in_memory_is_nobody_elses_model() {
    let dir = tempfile::tempdir().unwrap();
    // One block: each model lies where the one before it lay.
    let one_block = |config: &mut WorkerConfig| config.topology.gpus[0].memory = Bytes::mib(2);
    let names = ["a", "b"];
    let (worker, controller) = serving(dir.path(), Isolation::Model, &names, one_block).await;
    let client = client(&worker);
    let expected = [answer(&client, "a", 1).await, answer(&client, "b", 2).await];
    assert_ne!(expected[0], expected[1]);
    for round in 0..6 {
        let (dies, next) = (names[round % 2], (round + 1) % 2);
        answer(&client, dies, 10 + round as u64).await;
        let victim = resident(&controller, dies).await;
        kill_9(victim);
        let gone = |telemetry: &wire::Telemetry| !telemetry.gpus[0].executor_pids.contains(&victim);
        controller.telemetry("it gone", gone).await;
        let response = invoke(&mut client.clone(), names[next], 20 + round as u64, &row(1)).await.unwrap();
        assert_eq!(values(&response), expected[next], "round {round}");
        assert!(response.split.unwrap().swapped_bytes > 0, "it was copied, whatever lay there");
    }
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn evicted_models_lose_their_process_where_the_processes_are_the_cached_models() {
    let dir = tempfile::tempdir().unwrap();
    let two_blocks = |config: &mut WorkerConfig| {
        config.topology.gpus[0].memory = Bytes::mib(4);
        config.policy.eviction = Eviction::Lru;
    };
    let names = ["a", "b", "c"];
    let (worker, controller) = serving(dir.path(), Isolation::Resident, &names, two_blocks).await;
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
    let (worker, controller) = serving(dir.path(), Isolation::Model, &["mlp", "other"], |config| {
        config.topology = crate::support::topology(2);
    })
    .await;
    let mut client = client(&worker);
    resident_everywhere(&client, &controller).await;
    let expected = answer(&client, "other", 1).await;
    for gpu in 0..2 {
        inject(&mut client, gpu, Fault::AbortOnRun, "default/mlp@1").await;
    }
    let failure = invoke(&mut client, "mlp", 1, &row(1)).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::Quarantined, true), "{failure:?}");
    assert_eq!(answer(&client, "other", 2).await, expected);
    invoke(&mut client, "mlp", 3, &row(1)).await.expect("others are served");
    let gpus = controller.latest_telemetry().gpus;
    assert!(gpus.iter().all(|gpu| (gpu.restarts, gpu.health()) == (0, wire::GpuHealth::Up)), "{gpus:?}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_must_not_run_twice_is_not_run_again_after_its_process_died_in_its_run() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), Isolation::Resident, &[], |_| {}).await;
    desire(&controller, &["once"], false).await;
    let mut client = client(&worker);
    let expected = answer(&client, "once", 1).await;
    inject(&mut client, 0, Fault::AbortOnRun, "default/once@1").await;
    let failure = invoke(&mut client, "once", 2, &row(1)).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::ExecutorLost, true), "{failure:?}");
    assert_eq!(answer(&client, "once", 3).await, expected);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_no_process_can_be_started_requests_are_told_and_the_gpu_stays_up() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), Isolation::Model, &["mlp"], |config| {
        config.executor.program = "/nonexistent/executor".into();
    })
    .await;
    let failure = invoke(&mut client(&worker), "mlp", 1, &row(1)).await.unwrap_err();
    assert_eq!(
        (failure.reason, failure.may_have_executed),
        (Reason::AttemptsExhausted, false),
        "{failure:?}"
    );
    let gpu = controller.latest_telemetry().gpus[0].clone();
    assert_eq!((gpu.health(), gpu.restarts), (wire::GpuHealth::Up, 0));
    worker.shutdown().await;
}

/// Each of them, when the worker is told to stop and when it is killed.
#[tokio::test(flavor = "multi_thread")]
async fn no_process_of_a_model_outlives_its_worker() {
    let dir = tempfile::tempdir().unwrap();
    let names = ["a", "b", "c"];
    let (worker, controller) = serving(dir.path(), Isolation::Model, &names, |_| {}).await;
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
    let mut worker = WorkerProcess::start(dir.path(), &controller, Isolation::Model);
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

/// What the rounds of [`cost_of_a_miss`] took in one mode.
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

/// The quartiles of some times.
fn quartiles(times: &mut [Duration]) -> String {
    times.sort_unstable();
    let ms = |part: usize| times[(times.len() - 1) * part / 4].as_secs_f64() * 1e3;
    format!("{:.2} ({:.2} to {:.2})", ms(2), ms(1), ms(3))
}

/// Models that take turns are all answered in every mode. With `MISS_ROUNDS=100`, and `--nocapture`,
/// it prints, mode beside mode, what these take from request to answer: a miss and a hit of a model of
/// 33 kB, and four requests at once of one resident model and of two by turns.
#[tokio::test(flavor = "multi_thread")]
async fn cost_of_a_miss() {
    let rounds: usize = std::env::var("MISS_ROUNDS").map_or(2, |rounds| rounds.parse().expect("a number"));
    let names = ["a", "b", "c"];
    let mut modes = Vec::new();
    for (name, isolation) in ISOLATIONS {
        let dir = tempfile::tempdir().unwrap();
        // Room for two, so that each of three that take turns is a miss.
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
