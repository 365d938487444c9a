//! Tests of programs that do not start, hang, or misbehave.

use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_client::WorkerClient;
use millrace_types::Reason;
use millrace_worker::start::ExecutorIsolation;

use crate::controller::Controller;
use crate::processes::{End, WorkerProcess};
use crate::programs::{ask, asking, desire, large, process, serving, worker_with, written_pid};
use crate::support::{FUNCTION_VARIABLE, all_up, client, launcher, script, within};

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_a_program_that_does_not_start_are_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker_with(dir.path(), Some(launcher())).await;
    // The program starts once the file exists.
    let file = dir.path().join("there");
    let program = script();
    let args = file.display().to_string();
    let text = String::from_utf8(program).unwrap();
    let guarded = text.replacen('\n', &format!("\n[ -e {args} ] || {{ echo no library; exit 7; }}\n"), 1);
    desire(&controller, "f", guarded.as_bytes(), 1, true);
    let why = controller.phase("f", wire::FunctionPhase::Failed).await;
    assert!(why.contains("exit status: 7") && why.contains("no library"), "{why}");
    let failure = ask(&mut client(&worker), asking(1, "go", b"x")).await.unwrap_err();
    assert_eq!(failure.reason, Reason::FunctionNotReady);
    std::fs::write(&file, "").unwrap();
    controller.ready("f").await;
    let answer = ask(&mut client(&worker), asking(2, "go", b"abc")).await.unwrap();
    assert_eq!(answer.outputs[0].data.as_ref(), b"bcd");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_for_another_machine_fails_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker_with(dir.path(), Some(launcher())).await;
    desire(&controller, "f", b"\x7fELF no program of this machine", 1, true);
    let why = controller.phase("f", wire::FunctionPhase::Failed).await;
    assert!(why.contains("does not start"), "{why}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_is_replaced_after_its_client_left_and_the_next_request_runs() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving(dir.path(), 1, true).await;
    let end = End::of(process(&mut client(&worker), 1).await);
    let said = dir.path().join("started");
    let what = format!("start {}", said.display());
    let mut other = client(&worker);
    // The call has a timeout of a minute, which the test does not wait for.
    let asked = tokio::spawn(async move { ask(&mut other, asking(2, &what, b"x")).await });
    written_pid(&said).await;
    asked.abort();
    let answer = ask(&mut client(&worker), asking(3, "go", b"abc")).await.unwrap();
    assert_eq!((answer.outputs[0].data.as_ref(), answer.attempts), (&b"bcd"[..], 1));
    end.wait().await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_sends_requests_and_never_reads_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker_with(dir.path(), Some(launcher())).await;
    let one = format!("{FUNCTION_VARIABLE}=1");
    let script = String::from_utf8(script()).unwrap().replace(&one, &format!("{FUNCTION_VARIABLE}=flood"));
    desire(&controller, "f", script.as_bytes(), 1, true);
    controller.ready("f").await;
    let failure = ask(&mut client(&worker), asking(1, "go", b"x")).await.unwrap_err();
    assert_eq!(failure.reason, Reason::Quarantined);
    assert!(failure.message.contains("does not read"), "{}", failure.message);
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
async fn a_worker_killed_with_9_leaves_no_program() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let mut worker = WorkerProcess::start(dir.path(), &controller, ExecutorIsolation::Gpu);
    all_up(&controller).await;
    // A program that never greets: only the kernel ends it.
    let said = dir.path().join("pid");
    let silent = format!("#!/bin/sh\necho $$ > {0}.tmp && mv {0}.tmp {0}\nexec sleep 1000\n", said.display());
    desire(&controller, "f", silent.as_bytes(), 1, true);
    let end = End::of(written_pid(&said).await);
    crate::support::kill_9(worker.pid());
    worker.child.wait().await.unwrap();
    end.wait().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_without_descriptors_for_it_is_refused_and_its_process_serves_on() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let worker = WorkerProcess::start(dir.path(), &controller, ExecutorIsolation::Gpu);
    all_up(&controller).await;
    desire(&controller, "f", &script(), 1, false);
    controller.ready("f").await;
    let address = controller.hello().await.address;
    let mut remote = WorkerClient::connect(format!("http://{address}")).await.unwrap();
    let first = remote.invoke(asking(1, "pid", b"x")).await.unwrap().into_inner();
    // One descriptor for the input's memory, and none to send it with.
    let limit = worker.spare_descriptors(1);
    let refused = remote.invoke(asking(2, "go", &large())).await.unwrap_err();
    worker.limit_descriptors(limit);
    let failure = from_status(&refused);
    let expected = (Reason::QueueFull, false);
    assert_eq!((failure.reason, failure.may_have_executed), expected, "{}", failure.message);
    let again = remote.invoke(asking(3, "pid", b"x")).await.unwrap().into_inner();
    assert_eq!(again.outputs[0].data, first.outputs[0].data, "the same process");
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
async fn a_removed_program_is_started_again_for_its_remaining_requests() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path(), 1, true).await;
    let begun = dir.path().join("begun");
    let told = dir.path().join("told");
    let what = format!("die-when-told {} {}", begun.display(), told.display());
    let mut other = client(&worker);
    let asked = tokio::spawn(async move { ask(&mut other, asking(1, &what, b"abc")).await });
    let there = async {
        while !begun.exists() {
            tokio::task::yield_now().await;
        }
    };
    within("the call", there).await;
    controller.desire(&[]);
    // The function is removed before the statuses show that.
    let mut statuses = worker.view().statuses.clone();
    within("the function to go", statuses.wait_for(|shown| shown.is_empty())).await.unwrap();
    std::fs::write(&told, "").unwrap();
    let answer = asked.await.unwrap().unwrap();
    assert_eq!((answer.outputs[0].data.as_ref(), answer.attempts), (&b"bcd"[..], 2));
    let files = || std::fs::read_dir(dir.path().join("programs")).unwrap().count();
    let gone = async {
        while files() > 0 {
            tokio::task::yield_now().await;
        }
    };
    within("its file to go with it", gone).await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_started_by_a_program_are_killed_with_it() {
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
