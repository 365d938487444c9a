//! Functions that are programs: real processes of this test program, under a real worker.

use std::path::Path;
use std::time::Duration;

use millrace_function::{Call, DataType, Error};
use millrace_model::program::Program;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::tensor_part::Part;
use millrace_types::workflow::Signature;
use millrace_types::{Dim, Failure, Reason, TensorSpec};
use millrace_worker::start::{Isolation, Launcher, Worker, WorkerConfig, start};

use crate::controller::Controller;
use crate::metrics::scraped;
use crate::processes::{End, WorkerProcess};
use crate::support::{Client, all_up, client, config, launcher, request, script, within};

/// More than what travels inside messages.
const LARGE: usize = 3 << 20;

/// What the processes of these tests do: the input `what` says it, and where a test needs one, `x` is
/// data.
pub(crate) fn be_a_function() {
    millrace_function::serve(obey).unwrap();
}

fn obey(call: &Call) -> Result<(), Error> {
    let what = call.fetch(&call.input("what")?.id)?;
    let what = String::from_utf8_lossy(what.bytes()?).into_owned();
    let x = call.fetch(&call.input("x")?.id)?;
    let mut words = what.split_whitespace();
    let word = words.next().unwrap_or_default();
    match word {
        "die" => std::process::abort(),
        // Dies once: the file says that it has.
        "die-once" => {
            let marker = Path::new(words.next().unwrap());
            if !marker.exists() {
                std::fs::write(marker, "").unwrap();
                std::process::abort();
            }
        }
        "hang" => loop {
            std::thread::park();
        },
        // What it starts writes its pid and lives on.
        "start" => {
            let script =
                format!("echo $$ > {0}.tmp && mv {0}.tmp {0}; exec sleep 1000", words.next().unwrap());
            #[allow(clippy::zombie_processes, reason = "it is to be killed with this one")]
            let _child = std::process::Command::new("/bin/sh").args(["-c", &script]).spawn().unwrap();
            loop {
                std::thread::park();
            }
        }
        // What the kernel has no memory for: nothing of it is written.
        "sparse" => {
            let id = call.unique_id()?;
            call.store(&id, call.create(1 << 40)?)?;
            return call.output("y", &id, DataType::Uint8, &[1 << 40]);
        }
        "refuse" => return Err(Error::Function("not today".into())),
        "forget" => return Ok(()),
        "unsealed" => {
            // What is answered is an input as it came, which this process could still change.
            let id = call.input("x")?.id.clone();
            return call.output("y", &id, DataType::Uint8, &[x.len() as i64]);
        }
        _ => {}
    }
    let mut y = call.create(if word == "pid" { 4 } else { x.len() })?;
    if word == "pid" {
        y.copy_from_slice(&std::process::id().to_le_bytes());
    } else {
        y.iter_mut().zip(x.bytes()?).for_each(|(to, from)| *to = from.wrapping_add(1));
    }
    let (id, shape) = (call.unique_id()?, [y.len() as i64]);
    call.store(&id, y)?;
    // What was stored is found again, where it lies.
    assert_eq!(call.fetch(&id)?.len() as i64, shape[0]);
    if word == "respond" {
        return call.response("y", &id, DataType::Uint8, &shape);
    }
    call.output("y", &id, DataType::Uint8, &shape)
}

fn declared() -> Signature {
    let tensor = |name: &str| TensorSpec {
        name: name.into(),
        datatype: DataType::Uint8,
        shape: vec![Dim::Symbol(format!("{name}.0"))],
    };
    Signature { inputs: vec![tensor("what"), tensor("x")], outputs: vec![tensor("y")] }
}

pub(crate) fn packed(file: &[u8]) -> Vec<u8> {
    let program = Program { declared: declared(), file: bytes::Bytes::copy_from_slice(file) };
    program.pack().unwrap().to_vec()
}

async fn worker_with(dir: &Path, programs: Option<Launcher>) -> (Worker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let config = WorkerConfig { programs, ..config(dir, &[controller.addr], 1) };
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    (worker, controller)
}

fn desire(controller: &Controller, name: &str, file: &[u8], processes: u32, idempotent: bool) {
    let digest = controller.publish(&packed(file));
    controller.desire_with(&[(name, digest)], |state| {
        for function in &mut state.functions {
            (function.processes, function.idempotent) = (processes, idempotent);
        }
    });
}

/// A worker that serves the script above.
async fn serving(dir: &Path, processes: u32, idempotent: bool) -> (Worker, Controller) {
    let (worker, controller) = worker_with(dir, Some(launcher())).await;
    desire(&controller, "f", &script(), processes, idempotent);
    controller.ready("f").await;
    (worker, controller)
}

pub(crate) fn tensor(name: &str, data: &[u8]) -> wire::InferTensor {
    let (name, datatype, shape) = (name.into(), "UINT8".into(), vec![data.len() as i64]);
    wire::InferTensor { name, datatype, shape, data: bytes::Bytes::copy_from_slice(data), parts: Vec::new() }
}

fn asking(id: u64, what: &str, x: &[u8]) -> wire::InvokeRequest {
    wire::InvokeRequest {
        inputs: vec![tensor("what", what.as_bytes()), tensor("x", x)],
        ..request("f", id, &[])
    }
}

async fn ask(client: &mut Client, request: wire::InvokeRequest) -> Result<wire::InvokeResponse, Failure> {
    let response = within("an answer", client.invoke(request)).await;
    response.map(tonic::Response::into_inner).map_err(|status| from_status(&status))
}

fn large() -> Vec<u8> {
    (0..LARGE).map(|at| (at % 251) as u8).collect()
}

pub(crate) fn plus_one(x: &[u8]) -> Vec<u8> {
    x.iter().map(|byte| byte.wrapping_add(1)).collect()
}

async fn process(client: &mut Client, id: u64) -> u32 {
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
async fn what_it_stores_is_an_object_under_its_own_name_and_what_it_responds_is_answered() {
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
    // The next call takes it as it lies.
    let next = wire::InferTensor { name: "x".into(), ..kept.clone() };
    let next = wire::InvokeRequest { inputs: vec![tensor("what", b"go"), next], ..request("f", 2, &[]) };
    let answer = ask(&mut client, next).await.unwrap();
    assert!(answer.outputs[0].data == plus_one(&plus_one(&x)));
    assert_eq!(answer.fetched[0].method(), wire::FetchMethod::Host);
    // For the workflow's caller: bytes, though others are kept.
    let respond = wire::InvokeRequest { hold: hold(), ..asking(3, "respond", &x) };
    assert!(ask(&mut client, respond).await.unwrap().outputs[0].data == plus_one(&x));
    let released = wire::ReleaseObjectsRequest { ids: vec![id] };
    client.release_objects(released).await.unwrap();
    // Nothing else is held.
    let shown = within("the metrics", scraped(worker.addr())).await;
    assert!(shown.lines().any(|it| it == "millrace_objects 0.0"), "{shown}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_is_answered_by_the_rules_and_the_process_comes_back() {
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

    desire(&controller, "g", &script(), 1, false);
    controller.ready("g").await;
    let die = wire::InvokeRequest { function: "g".into(), ..asking(5, "die", b"x") };
    let failure = ask(&mut client, die).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::ExecutorLost, true));
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_hangs_is_killed_at_the_deadline_of_its_request() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let mut client = client(&worker);
    let end = End::of(process(&mut client, 1).await);
    let timeout = Some(prost_types::Duration { seconds: 0, nanos: 300_000_000 });
    let hang = wire::InvokeRequest { timeout, ..asking(2, "hang", b"x") };
    let failure = ask(&mut client, hang).await.unwrap_err();
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::TimedOut, true));
    end.wait().await;
    let answer = ask(&mut client, asking(3, "go", b"abc")).await.unwrap();
    assert_eq!(answer.outputs[0].data.as_ref(), b"bcd");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_function_says_of_itself_is_the_callers_answer() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let mut client = client(&worker);
    for (id, what, says) in
        [(1, "refuse", "not today"), (2, "forget", "it gave no output \"y\""), (3, "unsealed", "not sealed")]
    {
        let failure = ask(&mut client, asking(id, what, &large())).await.unwrap_err();
        assert_eq!(failure.reason, Reason::ModelFailed, "{what}");
        assert!(failure.message.contains(says), "{}", failure.message);
    }
    // It is the same process all the time.
    assert_eq!(process(&mut client, 4).await, process(&mut client, 5).await);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_run_at_one_time_as_there_are_processes() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 2, true).await;
    let mut hangs = client(&worker);
    let hang = tokio::spawn(async move { ask(&mut hangs, asking(1, "hang", b"x")).await });
    // With one process this would wait for the first.
    let answer = ask(&mut client(&worker), asking(2, "go", b"abc")).await.unwrap();
    assert_eq!(answer.outputs[0].data.as_ref(), b"bcd");
    hang.abort();
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn programs_are_refused_where_the_operator_did_not_allow_them() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker_with(dir.path(), None).await;
    desire(&controller, "f", &script(), 1, true);
    let message = controller.phase("f", wire::FunctionPhase::Failed).await;
    assert!(message.contains("--allow-processes"), "{message}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_that_does_not_start_has_its_requests_refused_and_not_kept_waiting() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker_with(dir.path(), Some(launcher())).await;
    desire(&controller, "f", b"#!/bin/sh\nexit 7\n", 1, true);
    controller.ready("f").await;
    let failure = ask(&mut client(&worker), asking(1, "go", b"x")).await.unwrap_err();
    assert_eq!(failure.reason, Reason::FunctionNotReady);
    assert!(failure.message.contains("exit status: 7"), "{}", failure.message);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_a_program_outlives_its_function_or_its_worker() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 2, true).await;
    let end = End::of(process(&mut client(&worker), 1).await);
    controller.desire(&[]);
    end.wait().await;
    desire(&controller, "g", &script(), 1, true);
    controller.ready("g").await;
    let again = wire::InvokeRequest { function: "g".into(), ..asking(2, "pid", b"x") };
    let answer = ask(&mut client(&worker), again).await.unwrap();
    let end = End::of(u32::from_le_bytes(answer.outputs[0].data[..].try_into().unwrap()));
    worker.shutdown().await;
    end.wait().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_program_started_is_killed_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let said = dir.path().join("started");
    let what = format!("start {}", said.display());
    let mut other = client(&worker);
    let asked = tokio::spawn(async move { ask(&mut other, asking(1, &what, b"x")).await });
    let end = End::of(written_pid(&said).await);
    worker.shutdown().await;
    end.wait().await;
    asked.await.unwrap().unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_larger_than_an_answer_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let failure = ask(&mut client(&worker), asking(1, "sparse", b"x")).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelFailed, "{failure:?}");
    assert!(failure.message.contains("of an answer"), "{failure:?}");
}

/// The pid that a script writes to a file.
async fn written_pid(said: &Path) -> u32 {
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

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_with_9_leaves_no_program() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let mut worker = WorkerProcess::start(dir.path(), &controller, Isolation::Gpu);
    all_up(&controller).await;
    // A program that never says anything: only the kernel ends it.
    let said = dir.path().join("pid");
    let silent = format!("#!/bin/sh\necho $$ > {0}.tmp && mv {0}.tmp {0}\nexec sleep 1000\n", said.display());
    desire(&controller, "f", silent.as_bytes(), 1, true);
    controller.ready("f").await;
    let end = End::of(written_pid(&said).await);
    crate::support::kill_9(worker.pid());
    worker.child.wait().await.unwrap();
    end.wait().await;
}
