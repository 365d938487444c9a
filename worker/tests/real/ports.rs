//! Tests of a process port's reports of good and bad executors.

use millrace_worker::port::PortEventKind;
use millrace_worker::process_port::ExecutorCommand;

use crate::port::Port;

#[tokio::test]
async fn a_kill_is_reported_with_its_signal_and_another_can_be_started() {
    let mut port = Port::start();
    for _ in 0..2 {
        port.until_ready().await;
        port.kill();
        port.until_exited().await;
    }
    port.until_ready().await;
    port.kill();
    let (_, status) = port.exit().await;
    assert!(status.contains("signal: 9"), "{status}");
}

#[tokio::test]
async fn an_exit_is_reported_with_its_status() {
    let (_, status) = Port::to_script("exit 3").exit().await;
    assert_eq!(status, "exit status: 3");
}

#[tokio::test]
async fn an_executor_that_closes_its_socket_and_stays_is_killed() {
    let (_, status) = Port::to_script("exec sleep 1000 <&-").exit().await;
    assert!(status.contains("signal: 9"), "{status}");
}

#[tokio::test]
async fn bytes_that_are_no_frame_kill_the_incarnation() {
    let (_, status) = Port::to_script("echo this is not a frame >&0; exec sleep 1000").exit().await;
    assert!(status.starts_with("killed: "), "{status}");
}

#[tokio::test]
async fn an_event_before_ready_kills_the_incarnation() {
    // Four bytes of length, then an empty `Unmapped`.
    let (_, status) = Port::to_script(r"printf '\002\000\000\000\132\000' >&0; exec sleep 1000").exit().await;
    assert!(status.contains("before it was ready"), "{status}");
}

#[tokio::test]
async fn a_missing_executor_program_is_reported() {
    let command = ExecutorCommand { program: "/no/such/program".into(), args: Vec::new(), envs: Vec::new() };
    match Port::to(command).next().await.1 {
        PortEventKind::SpawnFailed { message } => assert!(message.contains("/no/such/program"), "{message}"),
        other => panic!("{other:?}"),
    }
}
