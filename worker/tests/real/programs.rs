//! Tests of functions that are programs: real processes (`program_child`) under a real worker.

use std::path::Path;
use std::time::Duration;

use millrace_device::monotonic_now;
use millrace_function::DataType;
use millrace_model::program::PackedProgram;
use millrace_proto::status::from_status;
use millrace_proto::worker::tensor_part::Part;
use millrace_proto::{OOM_SCORE_ADJ, worker as wire};
use millrace_types::workflow::Signature;
use millrace_types::{Dim, Failure, Reason, TensorSpec};
use millrace_worker::service::tensors::INLINE_BYTES_MAX;
use millrace_worker::start::{ProgramLauncher, RunningWorker, WorkerConfig, start};

use crate::controller::Controller;
use crate::metrics::scraped;
use crate::processes::proc_file;
use crate::program_child::LARGE;
use crate::support::{Client, all_up, client, config, launcher, request, script, within};

fn declared(outputs: &[&str]) -> Signature {
    let tensor = |name: &str| TensorSpec {
        name: name.into(),
        datatype: DataType::Uint8,
        shape: vec![Dim::Symbol(format!("{name}.0"))],
    };
    let outputs = outputs.iter().map(|&name| tensor(name)).collect();
    Signature { inputs: vec![tensor("what"), tensor("x")], outputs }
}

pub(crate) fn packed(file: &[u8]) -> Vec<u8> {
    packed_with(&["y"], file)
}

/// Packs a program that declares these outputs.
fn packed_with(outputs: &[&str], file: &[u8]) -> Vec<u8> {
    let program = PackedProgram { signature: declared(outputs), file: bytes::Bytes::copy_from_slice(file) };
    program.pack().unwrap().to_vec()
}

pub(crate) async fn worker_with(
    dir: &Path,
    programs: Option<ProgramLauncher>,
) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let config = WorkerConfig { programs, ..config(dir, &[controller.addr], 1) };
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    (worker, controller)
}

pub(crate) fn desire(controller: &Controller, name: &str, file: &[u8], processes: u32, idempotent: bool) {
    let digest = controller.publish(&packed(file));
    controller.desire_with(&[(name, digest)], |state| {
        for function in &mut state.functions {
            function.processes = processes;
            function.idempotent = idempotent;
        }
    });
}

/// Starts a worker that serves the script of `program_child`.
pub(crate) async fn serving(dir: &Path, processes: u32, idempotent: bool) -> (RunningWorker, Controller) {
    let (worker, controller) = worker_with(dir, Some(launcher())).await;
    desire(&controller, "f", &script(), processes, idempotent);
    controller.ready("f").await;
    (worker, controller)
}

pub(crate) fn tensor(name: &str, data: &[u8]) -> wire::InferTensor {
    wire::InferTensor {
        name: name.into(),
        datatype: "UINT8".into(),
        shape: vec![data.len() as i64],
        data: bytes::Bytes::copy_from_slice(data),
        parts: Vec::new(),
    }
}

pub(crate) fn asking(id: u64, what: &str, x: &[u8]) -> wire::InvokeRequest {
    wire::InvokeRequest {
        inputs: vec![tensor("what", what.as_bytes()), tensor("x", x)],
        ..request("f", id, &[])
    }
}

pub(crate) async fn ask(
    client: &mut Client,
    request: wire::InvokeRequest,
) -> Result<wire::InvokeResponse, Failure> {
    let response = within("an answer", client.invoke(request)).await;
    response.map(tonic::Response::into_inner).map_err(|status| from_status(&status))
}

pub(crate) fn large() -> Vec<u8> {
    (0..LARGE).map(|at| (at % 251) as u8).collect()
}

pub(crate) fn plus_one(x: &[u8]) -> Vec<u8> {
    x.iter().map(|byte| byte.wrapping_add(1)).collect()
}

pub(crate) async fn process(client: &mut Client, id: u64) -> u32 {
    let answer = ask(client, asking(id, "pid", b"x")).await.unwrap();
    u32::from_le_bytes(answer.outputs[0].data[..].try_into().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_answers_small_and_large_data_and_no_gpu_is_charged() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let mut client = client(&worker);
    for (id, x) in [(1, b"abc".to_vec()), (2, large())] {
        let answer = ask(&mut client, asking(id, "go", &x)).await.unwrap();
        assert!(answer.outputs[0].data == plus_one(&x), "{} bytes", x.len());
        assert_eq!((answer.outputs[0].shape[0] as usize, answer.attempts), (x.len(), 1));
        let split = answer.split.unwrap();
        assert!(split.run_ns > 0 && split.swap_ns == 0 && split.swapped_bytes == 0);
    }
    let snapshot = worker.node().snapshot().await;
    let [function] = &snapshot.functions[..] else { panic!("{snapshot:?}") };
    assert_eq!((function.score.completed, function.score.billed_ms), (2, 0));
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_kernel_kills_a_program_before_its_worker_when_memory_is_short() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let pid = process(&mut client(&worker), 1).await;
    assert_eq!(proc_file(pid, "oom_score_adj"), OOM_SCORE_ADJ.to_string());
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stored_outputs_of_a_program_are_objects_and_its_responses_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 1, true).await;
    controller.lead(1);
    let mut client = client(&worker);
    let hold = || {
        let time = Some(Duration::from_secs(60).try_into().unwrap());
        Some(wire::Hold { time, answered: Vec::new() })
    };
    let x = large();
    let kept = wire::InvokeRequest { hold: hold(), ..asking(1, "go", &x) };
    let kept = ask(&mut client, kept).await.unwrap().outputs.remove(0);
    let [wire::TensorPart { part: Some(Part::Held(held)) }] = &kept.parts[..] else { panic!("{kept:?}") };
    assert_eq!((kept.data.len(), held.bytes), (0, LARGE as u64));
    let id = held.object.clone().unwrap().id.unwrap();
    assert_eq!((id.home.as_str(), id.epoch), ("w1", 1));
    // The next call reads the object in place.
    let next = wire::InferTensor { name: "x".into(), ..kept.clone() };
    let next = wire::InvokeRequest { inputs: vec![tensor("what", b"go"), next], ..request("f", 2, &[]) };
    let answer = ask(&mut client, next).await.unwrap();
    assert!(answer.outputs[0].data == plus_one(&plus_one(&x)));
    assert_eq!(answer.fetched[0].method(), wire::FetchMethod::Host);
    // A response is for the workflow's caller: its bytes are answered though other outputs are
    // stored.
    let respond = wire::InvokeRequest { hold: hold(), ..asking(3, "respond", &x) };
    assert!(ask(&mut client, respond).await.unwrap().outputs[0].data == plus_one(&x));
    let released = wire::ReleaseObjectsRequest { ids: vec![id] };
    client.release_objects(released).await.unwrap();
    // No other object is stored.
    let shown = within("the metrics", scraped(worker.addr())).await;
    assert!(shown.lines().any(|it| it == "millrace_objects 0.0"), "{shown}");
    worker.shutdown().await;
}

/// Returns the name of a stored output's object.
fn held(output: &wire::InferTensor) -> wire::DataId {
    let [wire::TensorPart { part: Some(Part::Held(held)) }] = &output.parts[..] else { panic!("{output:?}") };
    held.object.clone().unwrap().id.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_of_two_outputs_stays_until_both_are_released() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker_with(dir.path(), Some(launcher())).await;
    let digest = controller.publish(&packed_with(&["y", "z"], &script()));
    controller.desire(&[("f", digest)]);
    controller.ready("f").await;
    controller.lead(1);
    let mut client = client(&worker);
    let x = large();
    // Both outputs are stored, or one is stored and the other answered.
    for (id, answered) in [(1, None), (3, Some("y")), (5, Some("z"))] {
        let time = Some(Duration::from_secs(60).try_into().unwrap());
        let hold = wire::Hold { time, answered: answered.map(str::to_owned).into_iter().collect() };
        let twice = wire::InvokeRequest { hold: Some(hold), ..asking(id, "twice", &x) };
        let outputs = ask(&mut client, twice).await.unwrap().outputs;
        let (mut kept, told): (Vec<_>, Vec<_>) =
            outputs.into_iter().partition(|output| !output.parts.is_empty());
        assert_eq!((kept.len(), told.len()), if answered.is_some() { (1, 1) } else { (2, 0) });
        assert!(told.iter().all(|output| output.data == plus_one(&x)));
        let last = kept.pop().unwrap();
        let ids: Vec<_> = kept.iter().map(held).collect();
        client.release_objects(wire::ReleaseObjectsRequest { ids }).await.unwrap();
        let ids = vec![held(&last)];
        let next = wire::InvokeRequest {
            inputs: vec![tensor("what", b"go"), wire::InferTensor { name: "x".into(), ..last }],
            outputs: vec!["y".into()],
            ..request("f", id + 1, &[])
        };
        let answer = ask(&mut client, next).await.unwrap();
        assert!(answer.lost.is_empty(), "{answered:?} was answered, and the other output was lost");
        assert!(answer.outputs[0].data == plus_one(&plus_one(&x)));
        client.release_objects(wire::ReleaseObjectsRequest { ids }).await.unwrap();
    }
    let shown = within("the metrics", scraped(worker.addr())).await;
    assert!(shown.lines().any(|it| it == "millrace_objects 0.0"), "{shown}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_is_not_used_again_after_its_object_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 1, true).await;
    controller.lead(1);
    let mut client = client(&worker);
    let name = ask(&mut client, asking(1, "name", b"abc")).await.unwrap().outputs[0].data.clone();
    let text = std::str::from_utf8(&name).unwrap();
    let counter = text.rsplit('/').next().unwrap().parse().unwrap();
    let id = wire::DataId { home: "w1".into(), epoch: 1, counter };
    for request in [2, 3] {
        let failure = ask(&mut client, asking(request, "take", &name)).await.unwrap_err();
        assert_eq!(failure.reason, Reason::ModelFailed);
        assert!(failure.message.contains("TAKEN"), "{}", failure.message);
        client.release_objects(wire::ReleaseObjectsRequest { ids: vec![id.clone()] }).await.unwrap();
    }
    // The same process can use its next name.
    let next = format!("w1/1/{}", counter + 3);
    let stored = ask(&mut client, asking(4, "take", next.as_bytes())).await.unwrap();
    assert_eq!(stored.outputs[0].data.as_ref(), b"stored");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_of_a_failed_request_are_released_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 1, true).await;
    controller.lead(1);
    // The output names an object of another type than declared, so the request fails and no caller
    // reads the object.
    let failure = ask(&mut client(&worker), asking(1, "mistype", &large())).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelFailed);
    // A drain waits for objects.
    let began = monotonic_now();
    worker.drain(Duration::from_secs(50)).await;
    assert!(monotonic_now().since(began) < Duration::from_secs(40), "the drain waited for objects");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_fails_or_repeats_its_request_and_the_process_is_restarted() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 1, true).await;
    let mut client = client(&worker);
    let first = process(&mut client, 1).await;
    let marker = dir.path().join("died");
    let once = format!("die-once {}", marker.display());
    let answer = ask(&mut client, asking(2, &once, b"abc")).await.unwrap();
    assert_eq!((answer.outputs[0].data.as_ref(), answer.attempts), (&b"bcd"[..], 2));
    let failure = ask(&mut client, asking(3, "die", b"x")).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::Quarantined, true));
    assert!(failure.message.contains("two processes"), "{}", failure.message);
    assert_ne!(process(&mut client, 4).await, first);
    let shown = within("the metrics", scraped(worker.addr())).await;
    // One restart for the first request, two for the second.
    let restarts = r#"millrace_function_process_restarts_total{tenant="default",function="f"} 3.0"#;
    assert!(shown.lines().any(|it| it == restarts), "{shown}");

    desire(&controller, "g", &script(), 1, false);
    controller.ready("g").await;
    let die = wire::InvokeRequest { function: "g".into(), ..asking(5, "die", b"x") };
    let failure = ask(&mut client, die).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::ExecutorLost, true));
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_of_the_function_is_the_callers_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let mut client = client(&worker);
    for (id, what, says) in [(1, "refuse", "not today"), (2, "forget", "returned no output \"y\"")] {
        let failure = ask(&mut client, asking(id, what, &large())).await.unwrap_err();
        assert_eq!(failure.reason, Reason::ModelFailed, "{what}");
        assert!(failure.message.contains(says), "{}", failure.message);
    }
    // All calls ran in the same process.
    assert_eq!(process(&mut client, 4).await, process(&mut client, 5).await);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_input_of_any_size_can_be_passed_on_as_an_output() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 1, true).await;
    controller.lead(1);
    let mut client = client(&worker);
    for (id, bytes) in [(1, 1), (3, INLINE_BYTES_MAX), (5, INLINE_BYTES_MAX + 1), (7, LARGE)] {
        let x = large()[..bytes].to_vec();
        let answer = ask(&mut client, asking(id, "hand-on", &x)).await.unwrap();
        assert!(answer.outputs[0].data == x, "{bytes} bytes");
        // The same with an object as input, which is passed on as another object.
        let hold =
            Some(wire::Hold { time: Some(Duration::from_secs(60).try_into().unwrap()), answered: vec![] });
        let kept = wire::InvokeRequest { hold, ..asking(id, "hand-on", &x) };
        let kept = ask(&mut client, kept).await.unwrap().outputs.remove(0);
        assert_eq!(kept.parts.is_empty(), bytes <= INLINE_BYTES_MAX);
        let next = wire::InferTensor { name: "x".into(), ..kept };
        let inputs = vec![tensor("what", b"hand-on"), next];
        let next = wire::InvokeRequest { inputs, ..request("f", id + 1, &[]) };
        assert!(ask(&mut client, next).await.unwrap().outputs[0].data == x, "{bytes} bytes");
    }
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_cannot_change_its_inputs() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let answer = ask(&mut client(&worker), asking(1, "scribble", &large())).await.unwrap();
    assert_eq!(std::str::from_utf8(&answer.outputs[0].data), Ok("true []"));
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_runs_as_many_requests_at_a_time_as_it_has_processes() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 2, true).await;
    let mut hangs = client(&worker);
    let hang = tokio::spawn(async move { ask(&mut hangs, asking(1, "hang", b"x")).await });
    // With one process this call would wait for the first.
    let answer = ask(&mut client(&worker), asking(2, "go", b"abc")).await.unwrap();
    assert_eq!(answer.outputs[0].data.as_ref(), b"bcd");
    hang.abort();
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_are_refused_unless_the_operator_allows_them() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker_with(dir.path(), None).await;
    desire(&controller, "f", &script(), 1, true);
    let message = controller.phase("f", wire::FunctionPhase::Failed).await;
    assert!(message.contains("--allow processes"), "{message}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_larger_than_an_answer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let failure = ask(&mut client(&worker), asking(1, "sparse", b"x")).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelFailed, "{failure:?}");
    assert!(failure.message.contains("of an answer"), "{failure:?}");
}

/// Waits for the pid that a script writes to a file.
pub(crate) async fn written_pid(said: &Path) -> u32 {
    within("the program to start", async {
        loop {
            match std::fs::read_to_string(said) {
                Ok(text) => return text.trim().parse().unwrap(),
                Err(_not_yet) => tokio::task::yield_now().await,
            }
        }
    })
    .await
}
