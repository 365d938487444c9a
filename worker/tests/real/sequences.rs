//! Tests of functions that keep state from one request of a sequence to the next (T10, T11).

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::join_all;
use millrace_model::synth::{GAIN, KEPT, counter, mlp};
use millrace_proto::worker as wire;
use millrace_proto::worker::FetchMethod;
use millrace_proto::worker::in_sequence::Id;
use millrace_types::{Bytes, Reason};
use millrace_worker::start::{DataConfig, MigrationPolicy, RunningWorker, WorkerConfig, start};

use crate::controller::Controller;
use crate::metrics::scraped;
use crate::objects::methods;
use crate::programs::ask;
use crate::support::{Client, all_up, client, config, invoke, kill_9, request, row, values, within, worker};

/// Width of a counter with state that travels in messages.
const NARROW: usize = 4;
/// Width of a counter with state that is an object of 128 KiB.
const WIDE: usize = 32_768;
const WIDE_BYTES: u64 = WIDE as u64 * 4;

/// Starts a worker that serves a counter of this width, and the MLP.
async fn serving(
    dir: &Path,
    gpus: u32,
    width: usize,
    changed: impl FnOnce(WorkerConfig) -> WorkerConfig,
    desired: impl Fn(&mut wire::DesiredFunction),
) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let worker = start(changed(config(dir, &[controller.addr], gpus))).await.unwrap();
    all_up(&controller).await;
    let functions = [("counter", controller.publish(&counter(width))), ("mlp", controller.publish(&mlp()))];
    controller.desire_with(&functions, |state| {
        state.functions.iter_mut().for_each(desired);
        state.functions[0].sequences = Some(sequences(16));
    });
    controller.ready("counter").await;
    controller.ready("mlp").await;
    (worker, controller)
}

fn sequences(max: u32) -> wire::Sequences {
    let state = vec![wire::SequenceState { input: "h_in".into(), output: "h_out".into() }];
    wire::Sequences { state, idle: None, max }
}

/// Returns a request of a sequence: `b` starts it, `e` ends it, `-` does neither.
fn asking(id: u64, sequence: u64, how: &str, x: &[f32]) -> wire::InvokeRequest {
    let sequence_id = Some(Id::Number(sequence));
    let place = wire::InSequence { id: sequence_id, start: how.contains('b'), end: how.contains('e') };
    wire::InvokeRequest { sequence: Some(place), ..request("counter", id, x) }
}

fn given(sequence: u64, n: u64, width: usize) -> Vec<f32> {
    (0..width as u64).map(|at| ((sequence * 31 + n * 7 + at) % 97) as f32 / 97.0 - 0.5).collect()
}

/// Advances the state of a counter with a single client, and returns its expected answer.
fn next(state: &mut [f32], x: &[f32]) -> Vec<f32> {
    state.iter_mut().zip(x).for_each(|(state, x)| *state = *state * KEPT + x);
    state.iter().map(|state| state * GAIN).collect()
}

/// Sends the next request of a sequence, and compares its answer.
async fn count(
    client: &mut Client,
    id: u64,
    sequence: u64,
    how: &str,
    state: &mut [f32],
) -> wire::InvokeResponse {
    let x = given(sequence, id, state.len());
    if how.contains('b') {
        state.fill(0.0);
    }
    let answer = ask(client, asking(id, sequence, how, &x)).await.unwrap();
    assert!(values(&answer) == next(state, &x), "request {id} of sequence {sequence}");
    answer
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_sequences_give_the_answers_of_sequences_alone() {
    for (width, requests) in [(NARROW, 60), (WIDE, 20)] {
        let dir = tempfile::tempdir().unwrap();
        let (worker, _controller) = serving(dir.path(), 2, width, |it| it, |_| {}).await;
        let sequence = |sequence: u64| {
            let mut client = client(&worker);
            tokio::spawn(async move {
                let mut state = vec![0.0; width];
                for n in 0..requests {
                    // The client starts the sequence again now and then, without an end before.
                    let how = if n % 17 == 0 { "b" } else { "-" };
                    count(&mut client, sequence * 1000 + n, sequence, how, &mut state).await;
                }
                count(&mut client, sequence * 1000 + requests, sequence, "e", &mut state).await;
            })
        };
        join_all((1..=8).map(sequence)).await.into_iter().for_each(|ended| ended.unwrap());
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_request_reads_the_state_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 1, WIDE, |it| it, |_| {}).await;
    let mut client = client(&worker);
    let mut state = vec![0.0; WIDE];
    let objects = |now: &wire::Telemetry| now.gpus[0].object_bytes;
    for (id, how) in [(1, "b"), (2, "-"), (3, "-")] {
        let answer = count(&mut client, id, 7, how, &mut state).await;
        let came = if id == 1 { vec![] } else { vec![(FetchMethod::IntraGpu, WIDE_BYTES)] };
        assert_eq!(methods(&answer), came);
    }
    controller.telemetry("the state on the GPU", |now| objects(now) >= WIDE_BYTES).await;
    count(&mut client, 4, 7, "e", &mut state).await;
    controller.telemetry("nothing left of it", |now| objects(now) == 0).await;
    worker.shutdown().await;
}

/// The two models alternate on the GPU: neither is copied back, and the state stays.
#[tokio::test(flavor = "multi_thread")]
async fn an_evicted_model_is_dropped_and_its_state_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let large = |function: &mut wire::DesiredFunction| function.gpu_memory_bytes = 40 << 20;
    let (worker, _controller) = serving(dir.path(), 1, WIDE, |it| it, large).await;
    let mut client = client(&worker);
    let mut state = vec![0.0; WIDE];
    count(&mut client, 1, 7, "b", &mut state).await;
    for id in 2..6 {
        invoke(&mut client, "mlp", 100 + id, &row(id)).await.unwrap();
        let answer = count(&mut client, id, 7, "-", &mut state).await;
        assert_eq!(methods(&answer), [(FetchMethod::IntraGpu, WIDE_BYTES)]);
    }
    let now = worker.node().snapshot().await;
    assert!(now.gpus[0].evictions >= 8, "{}", now.gpus[0].evictions);
    assert_eq!(now.links[0].carried_to_host, Bytes::ZERO);
    worker.shutdown().await;
}

/// The GPU has room for two states and not for a third, so waiting states are written back to the
/// host. Models are never written back.
#[tokio::test(flavor = "multi_thread")]
async fn state_is_written_back_if_its_memory_is_needed() {
    let dir = tempfile::tempdir().unwrap();
    let large = |function: &mut wire::DesiredFunction| function.gpu_memory_bytes = 40 << 20;
    let small = |config| {
        let migration = MigrationPolicy::Lru;
        let gpu_data = DataConfig { memory: Bytes::mib(4), migration, ..DataConfig::default() };
        WorkerConfig { gpu_data, ..config }
    };
    let (worker, _controller) = serving(dir.path(), 1, WIDE, small, large).await;
    let mut client = client(&worker);
    let mut states = vec![vec![0.0; WIDE]; 3];
    let mut id = 0;
    for round in 0..6 {
        for (sequence, state) in (1..).zip(&mut states) {
            id += 1;
            count(&mut client, id, sequence, if round == 0 { "b" } else { "-" }, state).await;
        }
        invoke(&mut client, "mlp", 100 + round, &row(round)).await.unwrap();
    }
    let now = worker.node().snapshot().await;
    let gpu = &now.gpus[0];
    let written = now.links[0].carried_to_host.get();
    assert!(gpu.data.migrated > 0 && gpu.evictions > 0, "{:?}, {} evicted", gpu.data, gpu.evictions);
    assert!(written > 0 && written.is_multiple_of(WIDE_BYTES), "{written} bytes, and only of states");
    worker.shutdown().await;
}

/// The memory holds two states, and no new state beside them.
#[tokio::test(flavor = "multi_thread")]
async fn a_sequence_can_be_ended_while_state_fills_object_memory() {
    let dir = tempfile::tempdir().unwrap();
    let small = |config| WorkerConfig { object_memory: Bytes(2 * WIDE_BYTES), ..config };
    let (worker, _controller) = serving(dir.path(), 1, WIDE, small, |_| {}).await;
    let mut client = client(&worker);
    let mut states = vec![vec![0.0; WIDE]; 2];
    for (sequence, state) in (1..).zip(&mut states) {
        count(&mut client, sequence, sequence, "b", state).await;
    }
    let full = ask(&mut client, asking(3, 1, "-", &given(1, 3, WIDE))).await.unwrap_err();
    assert_eq!((full.reason, full.may_have_executed), (Reason::QueueFull, false), "{full:?}");
    assert!(full.message.contains("end sequences"), "{full:?}");
    let answer = count(&mut client, 4, 1, "e", &mut states[0]).await;
    assert_eq!((answer.outputs.len(), methods(&answer)), (1, vec![(FetchMethod::IntraGpu, WIDE_BYTES)]));
    count(&mut client, 5, 2, "-", &mut states[1]).await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn state_is_lost_with_its_executor_and_its_client_is_told_to_start_again() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 1, WIDE, |it| it, |_| {}).await;
    let mut client = client(&worker);
    let mut state = vec![0.0; WIDE];
    count(&mut client, 1, 7, "b", &mut state).await;
    kill_9(all_up(&controller).await.gpus[0].executor_pid);
    let again =
        |now: &wire::Telemetry| now.gpus[0].restarts == 1 && now.gpus[0].health() == wire::GpuHealth::Up;
    controller.telemetry("another executor", again).await;
    for id in [2, 3] {
        let lost = ask(&mut client, asking(id, 7, "-", &given(7, id, WIDE))).await.unwrap_err();
        assert_eq!((lost.reason, lost.retryable), (Reason::SequenceNotFound, false), "{lost:?}");
        assert!(lost.message.contains("was lost with its executor"), "{lost:?}");
    }
    count(&mut client, 4, 7, "b", &mut state).await;
    count(&mut client, 5, 7, "-", &mut state).await;
    let shown = within("the metrics", scraped(worker.addr())).await;
    for line in [
        r#"millrace_function_sequences{tenant="default",function="counter"} 1.0"#,
        r#"millrace_function_sequences_ended_total{tenant="default",function="counter",reason="lost"} 1.0"#,
    ] {
        assert!(shown.lines().any(|it| it == line), "{line} in {shown}");
    }
    worker.shutdown().await;
}

/// State that travels in messages is on the host between requests.
#[tokio::test(flavor = "multi_thread")]
async fn small_state_outlives_an_executor() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 1, NARROW, |it| it, |_| {}).await;
    let mut client = client(&worker);
    let mut state = vec![0.0; NARROW];
    count(&mut client, 1, 7, "b", &mut state).await;
    kill_9(all_up(&controller).await.gpus[0].executor_pid);
    count(&mut client, 2, 7, "-", &mut state).await;
    worker.shutdown().await;
}

/// Sends requests until `stop` is set, and starts the sequence again whenever its state was lost.
/// Returns the number of losses.
async fn count_on(mut client: Client, sequence: u64, stop: Arc<AtomicBool>) -> u32 {
    let mut state = vec![0.0; WIDE];
    let mut how = "b";
    let mut losses = 0;
    for id in sequence * 100_000.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let x = given(sequence, id, WIDE);
        match ask(&mut client, asking(id, sequence, how, &x)).await {
            Ok(answer) => {
                if how == "b" {
                    state.fill(0.0);
                }
                assert!(values(&answer) == next(&mut state, &x), "request {id} of sequence {sequence}");
                how = "-";
            }
            Err(failure) if failure.reason == Reason::SequenceNotFound => {
                losses += 1;
                how = "b";
            }
            // The failed request had no effect, so the next request continues from the same state.
            Err(failure) => assert!(
                matches!(
                    failure.reason,
                    Reason::ExecutorLost | Reason::AttemptsExhausted | Reason::Quarantined
                ),
                "{failure:?}"
            ),
        }
    }
    losses
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_stay_correct_while_executors_are_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 2, WIDE, |it| it, |_| {}).await;
    let stop = Arc::new(AtomicBool::new(false));
    let counting: Vec<_> = (1..=6)
        .map(|sequence| tokio::spawn(count_on(client(&worker), sequence, Arc::clone(&stop))))
        .collect();
    for kill in 1..=4_u64 {
        let there = |now: &wire::Telemetry| now.gpus.iter().all(|gpu| gpu.object_bytes > 0);
        let now = controller.telemetry("state on both GPUs", there).await;
        kill_9(now.gpus[kill as usize % 2].executor_pid);
        let again = |now: &wire::Telemetry| now.gpus.iter().map(|gpu| gpu.restarts).sum::<u64>() == kill;
        controller.telemetry("another executor", again).await;
    }
    stop.store(true, Ordering::Relaxed);
    let losses: u32 = join_all(counting).await.into_iter().map(|ended| ended.unwrap()).sum();
    assert!(losses > 0, "no sequence lost its state");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_refusal_names_the_next_step() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, NARROW, |it| it, |_| {}).await;
    let mut client = client(&worker);
    let x = given(1, 1, NARROW);
    let number = |id| Some(wire::InSequence { id: Some(Id::Number(id)), start: true, end: false });
    let none = wire::InvokeRequest { sequence: None, ..asking(1, 1, "b", &x) };
    let zero = wire::InvokeRequest { sequence: number(0), ..asking(2, 1, "b", &x) };
    let mut its_state = asking(3, 1, "b", &x);
    its_state.inputs.push(wire::InferTensor { name: "h_in".into(), ..its_state.inputs[0].clone() });
    let part = wire::HeldPart { object: None, offset: 0, bytes: NARROW as u64 * 4 };
    let held = wire::tensor_part::Part::Held(part);
    let mut of_a_workflow = asking(7, 1, "b", &x);
    of_a_workflow.inputs[0].data.clear();
    of_a_workflow.inputs[0].parts = vec![wire::TensorPart { part: Some(held) }];
    let its_output = wire::InvokeRequest { outputs: vec!["h_out".into()], ..asking(4, 1, "b", &x) };
    for (request, reason, says) in [
        (none, Reason::MalformedRequest, "sequence_start"),
        (zero, Reason::MalformedRequest, "0"),
        (of_a_workflow, Reason::MalformedRequest, "cannot be a step of a workflow"),
        (its_state, Reason::InvalidInput, "\"h_in\" is unknown"),
        (its_output, Reason::InvalidOutput, "\"h_out\" is unknown"),
        (asking(5, 1, "-", &x), Reason::SequenceNotFound, "start it again with sequence_start"),
    ] {
        let refused = ask(&mut client, request).await.unwrap_err();
        assert_eq!((refused.reason, refused.may_have_executed), (reason, false), "{refused:?}");
        assert!(refused.message.contains(says), "{says}: {refused:?}");
    }
    // A request that names outputs gets only these.
    let named = wire::InvokeRequest { outputs: vec!["y".into()], ..asking(6, 1, "be", &x) };
    assert_eq!(values(&ask(&mut client, named).await.unwrap()).len(), NARROW);
    for sequence in 1..=16 {
        ask(&mut client, asking(10 + sequence, sequence, "b", &x)).await.unwrap();
    }
    let full = ask(&mut client, asking(30, 17, "b", &x)).await.unwrap_err();
    assert_eq!(full.reason, Reason::QueueFull);
    assert!(full.message.contains("its limit of 16 sequences"), "{full:?}");
    ask(&mut client, asking(31, 16, "e", &x)).await.unwrap();
    ask(&mut client, asking(32, 17, "b", &x)).await.unwrap();
    worker.shutdown().await;
}

/// The controller refuses such a function earlier; a worker that gets one anyway does not serve it.
#[tokio::test(flavor = "multi_thread")]
async fn a_function_is_not_served_if_its_model_lacks_the_declared_state() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    let digest = controller.publish(&mlp());
    controller.desire_with(&[("counter", digest)], |state| state.functions[0].sequences = Some(sequences(1)));
    let message = controller.phase("counter", wire::FunctionPhase::Failed).await;
    assert!(message.contains("\"h_in\", which the model does not have"), "{message}");
    worker.shutdown().await;
}
