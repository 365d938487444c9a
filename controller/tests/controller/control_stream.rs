//! Tests of the stream between a controller and a worker: updates larger than one message, and a stream
//! that breaks repeatedly.

use std::time::Duration;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use millrace_proto::admin as api;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_message;
use millrace_types::Digest;
use prost::Message as _;

use crate::stub::{Prepares, Stub, hello};
use crate::support::{Cluster, apply_request, nodes, until, upload};

/// State tensors per function, the maximum. Each name has [`NAME_BYTES`] bytes, the maximum too.
const STATES: usize = 16;
const NAME_BYTES: usize = 250;
/// Functions with a desired state above 9 MiB in total.
const FUNCTIONS: usize = 1_200;
const DESIRED_BYTES_MIN: usize = 9 << 20;
/// Concurrent applies.
const APPLIES: usize = 32;
/// A timeout that a busy machine does not reach, so that a hang fails the test.
const PATIENCE: Duration = Duration::from_secs(300);

fn name(kind: &str, number: usize) -> String {
    format!("{kind}{number:02}{}", "n".repeat(NAME_BYTES - kind.len() - 2))
}

/// Encodes a number as a field of a protobuf message; [`bytes`] encodes bytes.
fn number(field: u32, value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::uint64::encode(field, &value, &mut bytes);
    bytes
}

fn bytes(field: u32, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    prost::encoding::bytes::encode(field, &value.to_vec(), &mut bytes);
    bytes
}

/// Returns an ONNX model that adds `x` to each state.
fn model() -> Vec<u8> {
    let tensor = |name: &str| {
        let dims = [1, 4].map(|size| bytes(1, &number(1, size))).concat();
        let tensor = [number(1, 1), bytes(2, &dims)].concat();
        [bytes(1, name.as_bytes()), bytes(2, &bytes(1, &tensor))].concat()
    };
    let add = |input: &str, output: &str| {
        let ends = [bytes(1, input.as_bytes()), bytes(1, b"x"), bytes(2, output.as_bytes())].concat();
        bytes(1, &[ends, bytes(4, b"Add")].concat())
    };
    let mut graph = [bytes(2, b"g"), bytes(11, &tensor("x")), bytes(12, &tensor("y"))].concat();
    for state in 0..STATES {
        let before = name("i", state);
        let after = name("o", state);
        graph.extend(add(&before, &after));
        graph.extend([bytes(11, &tensor(&before)), bytes(12, &tensor(&after))].concat());
    }
    graph.extend(add("x", "y"));
    let opset = [bytes(1, b""), number(2, 17)].concat();
    [number(1, 8), bytes(7, &graph), bytes(8, &opset)].concat()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_desired_state_of_nine_mebibytes_reaches_a_worker() {
    let cluster = Cluster::start().await;
    let model = model();
    upload(&mut cluster.admin(), &model).await.unwrap();
    let state =
        (0..STATES).map(|it| api::SequenceState { input: name("i", it), output: name("o", it) }).collect();
    let sequences = api::Sequences { state, ..api::Sequences::default() };
    let applied = stream::iter(0..FUNCTIONS).map(|number| {
        let mut request = apply_request(&format!("f{number:04}"), &model);
        request.spec.as_mut().unwrap().sequences = Some(sequences.clone());
        let mut admin = cluster.admin();
        async move { admin.apply_function(request).await }
    });
    applied.buffer_unordered(APPLIES).try_for_each(async |_| Ok(())).await.unwrap();

    let mut worker = Stub::start_as(&cluster, "n1", "first", Prepares::AtOnce).await.unwrap();
    let all = async |worker: &mut Stub| {
        let told = |state: &wire::DesiredState| state.functions.len() == FUNCTIONS;
        let state = tokio::time::timeout(PATIENCE, worker.desired.wait_for(told)).await;
        let state = state.expect("the whole state arrives").unwrap().clone();
        assert!(state.encoded_len() > DESIRED_BYTES_MIN, "{}", state.encoded_len());
        assert!(state.functions.iter().all(|it| it.digest == Digest::of(&model).to_string()));
    };
    all(&mut worker).await;
    // The same process gets the whole state again on another stream.
    let mut again = Stub::start_as(&cluster, "n1", "first", Prepares::AtOnce).await.unwrap();
    all(&mut again).await;
    let mut admin = cluster.admin();
    let request = api::DeleteFunctionRequest { name: "f0000".into(), ..Default::default() };
    admin.delete_function(request).await.unwrap();
    let gone = |state: &wire::DesiredState| state.functions.len() == FUNCTIONS - 1;
    tokio::time::timeout(PATIENCE, again.desired.wait_for(gone))
        .await
        .expect("one function is removed")
        .unwrap();
}

#[tokio::test]
async fn repeated_breaks_of_a_stream_are_a_condition_of_the_node() {
    let cluster = Cluster::start().await;
    let attach = async |times| {
        let why = "decoded message length too large".to_owned();
        let stream_break = (times > 0).then_some(wire::StreamBreak { times, why });
        let hello = wire::WorkerHello { stream_break, ..hello("n1", "a", "127.0.0.1:1") };
        let message = wire::WorkerMessage { message: Some(worker_message::Message::Hello(hello)) };
        let outgoing = stream::iter([message]).chain(stream::pending());
        cluster.control().attach(outgoing).await.unwrap().into_inner()
    };
    let seen = async |wanted: &str| {
        until("the condition", async || {
            let [node] = nodes(&mut cluster.admin()).await.try_into().ok()?;
            let condition = node.conditions[0].clone();
            (condition.reason == wanted).then_some((node.connected, condition.status(), condition.message))
        })
        .await
    };
    let first = attach(0).await;
    let (connected, status, _) = seen("Attached").await;
    assert_eq!((connected, status), (true, api::ConditionStatus::True));
    drop(first);
    let _broken = attach(3).await;
    let (connected, status, message) = seen("StreamBreaks").await;
    assert_eq!((connected, status), (false, api::ConditionStatus::False));
    assert!(message.contains("3 times") && message.contains("decoded message length"), "{message}");
    let event = until("the event", async || {
        let request = api::ListEventsRequest::default();
        let events = cluster.admin().list_events(request).await.unwrap().into_inner().events;
        events.into_iter().find(|event| event.reason == "StreamBreaks")
    })
    .await;
    assert_eq!((event.object.as_str(), event.severity()), ("node/n1", api::EventSeverity::Warning));
}
