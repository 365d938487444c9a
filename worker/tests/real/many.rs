//! Tests of more functions than fit one message of the control stream.

use millrace_proto::worker as wire;
use millrace_proto::worker::FunctionPhase;
use millrace_types::node::FUNCTIONS_PER_NODE_MAX;
use millrace_worker::start::start;
use prost::Message as _;

use crate::controller::Controller;
use crate::support::{client, config, invoke, row, worker};

/// Largest message that tonic accepts by default, in bytes.
const MESSAGE_BYTES_DEFAULT: usize = 4 << 20;

fn names(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("function-{number:05}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_obeys_a_desired_state_of_more_than_one_message() {
    const FUNCTIONS: usize = 600;
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    let digest = controller.publish(&millrace_model::synth::mlp());
    let names = names(FUNCTIONS);
    let functions: Vec<_> = names.iter().map(|name| (name.as_str(), digest)).collect();
    let name = |kind: &str, number: u32| format!("{kind}{number:02}{}", "n".repeat(240));
    controller.desire_with(&functions, |state| {
        // All functions but one keep state under long names that their model lacks.
        for function in &mut state.functions[1..] {
            let pair = |number| wire::SequenceState { input: name("i", number), output: name("o", number) };
            let state = (0..16).map(pair).collect();
            function.sequences = Some(wire::Sequences { state, max: 1, ..wire::Sequences::default() });
        }
        assert!(state.encoded_len() > MESSAGE_BYTES_DEFAULT, "{}", state.encoded_len());
    });
    let all = controller.statuses(|statuses| {
        let pending = statuses.iter().filter(|status| status.phase() == FunctionPhase::Preparing);
        statuses.len() == FUNCTIONS && pending.count() == 0
    });
    let all = all.await;
    assert_eq!((all[0].name.as_str(), all[0].phase()), (names[0].as_str(), FunctionPhase::Ready));
    invoke(&mut client(&worker), &names[0], 1, &row(1)).await.unwrap();
    // Later changes are obeyed too.
    controller.desire(&functions[..1]);
    controller.statuses(|statuses| statuses.len() == 1).await;
    invoke(&mut client(&worker), &names[0], 2, &row(1)).await.unwrap();
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_greeting_reports_the_number_and_reason_of_broken_streams() {
    let dir = tempfile::tempdir().unwrap();
    let first = Controller::start("test-cluster", 1).await;
    let addr = first.addr;
    let worker = start(config(dir.path(), &[addr], 1)).await.unwrap();
    assert_eq!(first.hello().await.stream_break, None);
    first.greeted().await;
    drop(first);
    let second = Controller::start_at(addr, "test-cluster", 1).await;
    let told = second.hello().await.stream_break.unwrap();
    assert_eq!(told.times, 1);
    assert!(!told.why.is_empty());
    second.greeted().await;
    drop(second);
    let third = Controller::start_at(addr, "test-cluster", 1).await;
    assert_eq!(third.hello().await.stream_break.map(|it| it.times), Some(2));
    worker.shutdown().await;
}

fn resident_mib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() >> 10
}

/// Serves the maximum number of functions of a node, all of one artifact, on one worker. Takes
/// minutes in a debug build: `cargo test --release -p millrace-worker --test real -- --ignored
/// --nocapture the_most_functions`
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: scripts/nightly"]
async fn a_worker_serves_the_most_functions_of_a_node() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    let digest = controller.publish(&millrace_model::synth::mlp());
    let names = names(FUNCTIONS_PER_NODE_MAX);
    let functions: Vec<_> = names.iter().map(|name| (name.as_str(), digest)).collect();
    let before = resident_mib();
    let began = tokio::time::Instant::now();
    controller.desire_with(&functions, |state| {
        for function in &mut state.functions {
            function.created_at_ms = 1_700_000_000_000;
            function.slo_deadline = Some(prost_types::Duration { seconds: 1, nanos: 500_000_000 });
            function.slo_percentile = 99.5;
        }
        assert!(state.encoded_len() > MESSAGE_BYTES_DEFAULT, "{}", state.encoded_len());
    });
    let ready = |statuses: &[wire::FunctionStatus]| {
        let ready = statuses.iter().filter(|status| status.phase() == FunctionPhase::Ready);
        ready.count() == FUNCTIONS_PER_NODE_MAX
    };
    controller.statuses_however_long(ready).await;
    println!(
        "{FUNCTIONS_PER_NODE_MAX} functions are ready after {:?}; the process of the worker and of its test \
         controller took {before} MiB and takes {} MiB",
        began.elapsed(),
        resident_mib()
    );
    invoke(&mut client(&worker), names.first().unwrap(), 1, &row(1)).await.unwrap();
    invoke(&mut client(&worker), names.last().unwrap(), 2, &row(1)).await.unwrap();
    let began = tokio::time::Instant::now();
    controller.desire(&functions[1..]);
    controller.statuses_however_long(|statuses| statuses.len() == FUNCTIONS_PER_NODE_MAX - 1).await;
    println!("one function less is reported after {:?}", began.elapsed());
    worker.shutdown().await;
}
