//! Tests of intermediate data: stored on the node that made it, read by name there and on another
//! node.

use std::time::Duration;

use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::tensor_part::Part;
use millrace_types::{Bytes, NodeName, Reason};
use millrace_worker::start::{RunningWorker, start};

use crate::controller::Controller;
use crate::support::{Client, all_up, client, config, invoke, request, row, serving_mlp, within};

/// Number of rows that make an output too large to be answered.
pub(crate) const ROWS: u64 = 512;
/// Size of one row, in bytes.
pub(crate) const ROW_BYTES: u64 = 64 * 4;

pub(crate) fn rows(rows: u64) -> wire::InferTensor {
    let data: Vec<u8> = (0..rows).flat_map(row).flat_map(f32::to_le_bytes).collect();
    tensor(rows, data.into(), Vec::new())
}

pub(crate) fn tensor(rows: u64, data: bytes::Bytes, parts: Vec<wire::TensorPart>) -> wire::InferTensor {
    wire::InferTensor { name: "x".into(), datatype: "FP32".into(), shape: vec![rows as i64, 64], data, parts }
}

/// Returns a request that wants its output stored for `time`.
pub(crate) fn keeping(id: u64, input: wire::InferTensor, time: Duration) -> wire::InvokeRequest {
    let hold = wire::Hold { time: Some(time.try_into().unwrap()), answered: Vec::new() };
    wire::InvokeRequest { inputs: vec![input], hold: Some(hold), ..request("mlp", id, &[]) }
}

pub(crate) async fn ask(client: &mut Client, request: wire::InvokeRequest) -> wire::InvokeResponse {
    within("an answer", client.invoke(request)).await.unwrap().into_inner()
}

/// Returns the object of a stored output, with the address that other workers need.
pub(crate) fn object(response: &wire::InvokeResponse, home: &RunningWorker) -> wire::Object {
    let [output] = &response.outputs[..] else { panic!("{response:?}") };
    assert!(output.data.is_empty());
    let [wire::TensorPart { part: Some(Part::Held(held)) }] = &output.parts[..] else { panic!("{output:?}") };
    wire::Object { address: home.addr().to_string(), ..held.object.clone().unwrap() }
}

pub(crate) fn part(object: &wire::Object, first: u64, rows: u64) -> wire::TensorPart {
    let held =
        wire::HeldPart { object: Some(object.clone()), offset: first * ROW_BYTES, bytes: rows * ROW_BYTES };
    wire::TensorPart { part: Some(Part::Held(held)) }
}

pub(crate) fn methods(response: &wire::InvokeResponse) -> Vec<(wire::FetchMethod, u64)> {
    response.fetched.iter().map(|it| (it.method(), it.bytes)).collect()
}

/// Returns the output of two MLPs in a row, without an object in between.
pub(crate) async fn twice(client: &mut Client, rows_: u64) -> bytes::Bytes {
    let once =
        ask(client, wire::InvokeRequest { inputs: vec![rows(rows_)], ..request("mlp", 90, &[]) }).await;
    let input = tensor(rows_, once.outputs[0].data.clone(), Vec::new());
    let again = ask(client, wire::InvokeRequest { inputs: vec![input], ..request("mlp", 91, &[]) }).await;
    again.outputs[0].data.clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_read_by_name_until_it_is_released() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    controller.lead(1);
    let mut client = client(&worker);
    let expected = twice(&mut client, ROWS).await;

    let kept = ask(&mut client, keeping(1, rows(ROWS), Duration::from_secs(60))).await;
    let object = object(&kept, &worker);
    assert_eq!(object.bytes, ROWS * ROW_BYTES);
    let id = object.id.clone().unwrap();
    assert_eq!((id.home.as_str(), id.epoch), ("w1", 1));
    // The object outlives a sync period, so the cluster learns of the object.
    controller
        .committed("the object in tier 2", |ledger| {
            ledger.kept.entries.iter().any(|entry| entry.counter == id.counter)
        })
        .await;

    let whole = tensor(ROWS, bytes::Bytes::new(), vec![part(&object, 0, ROWS)]);
    let taken =
        ask(&mut client, wire::InvokeRequest { inputs: vec![whole.clone()], ..request("mlp", 2, &[]) }).await;
    assert_eq!(taken.outputs[0].data, expected);
    assert_eq!(methods(&taken), [(wire::FetchMethod::IntraGpu, ROWS * ROW_BYTES)]);

    // Rows of the object in another order, with bytes between them.
    let middle = expected.len() / ROWS as usize;
    let own = row(7).into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
    let parts = vec![
        part(&object, 5, 1),
        wire::TensorPart { part: Some(Part::Data(own.into())) },
        part(&object, 3, 1),
    ];
    let mixed = tensor(3, bytes::Bytes::new(), parts);
    let taken = ask(&mut client, wire::InvokeRequest { inputs: vec![mixed], ..request("mlp", 3, &[]) }).await;
    let of = |row: usize| expected.slice(row * middle..(row + 1) * middle);
    let once = invoke(&mut client, "mlp", 4, &row(7)).await.unwrap().outputs[0].data.clone();
    assert!(close(&taken.outputs[0].data, &[of(5), once, of(3)].concat()));

    let released = wire::ReleaseObjectsRequest { ids: vec![id.clone(), id.clone()] };
    client.release_objects(released).await.unwrap();
    let gone = ask(&mut client, wire::InvokeRequest { inputs: vec![whole], ..request("mlp", 5, &[]) }).await;
    assert_eq!((gone.lost, gone.outputs), (vec![id], Vec::new()));
    worker.shutdown().await;
}

/// Whether two answers agree within rounding: a run with other rows may round in another order.
pub(crate) fn close(a: &[u8], b: &[u8]) -> bool {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|it| f32::from_le_bytes(it.try_into().unwrap())).collect()
    };
    let a = floats(a);
    let b = floats(b);
    a.len() == b.len() && a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs()))
}

/// Starts two workers that serve the MLP.
async fn pair(dir: &std::path::Path) -> (RunningWorker, RunningWorker, [Controller; 2]) {
    let (first, controller) = serving_mlp(&dir.join("w1"), 1, &["mlp"]).await;
    let other = Controller::start("test-cluster", 1).await;
    let second = config(&dir.join("w2"), &[other.addr], 1);
    let second = start(millrace_worker::start::WorkerConfig { node: NodeName::new("w2").unwrap(), ..second });
    let second = second.await.unwrap();
    all_up(&other).await;
    let digest = other.publish(&millrace_model::synth::mlp());
    other.desire(&[("mlp", digest)]);
    other.ready("mlp").await;
    (first, second, [controller, other])
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_of_another_worker_is_fetched_from_it_and_lost_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second, _controllers) = pair(dir.path()).await;
    let expected = twice(&mut client(&first), ROWS).await;
    let kept = ask(&mut client(&first), keeping(1, rows(ROWS), Duration::from_secs(60))).await;
    let object = object(&kept, &first);
    let whole = || tensor(ROWS, bytes::Bytes::new(), vec![part(&object, 0, ROWS)]);
    let request = |id| wire::InvokeRequest { inputs: vec![whole()], ..request("mlp", id, &[]) };

    let taken = ask(&mut client(&second), request(2)).await;
    assert!(close(&taken.outputs[0].data, &expected));
    assert_eq!(methods(&taken), [(wire::FetchMethod::InterNode, ROWS * ROW_BYTES)]);
    // A range beyond the object is refused on its owner node.
    let beyond = tensor(1, bytes::Bytes::new(), vec![part(&object, ROWS, 1)]);
    let beyond = wire::InvokeRequest { inputs: vec![beyond], ..self::request("mlp", 3, &[]) };
    let refused = from_status(&client(&first).invoke(beyond.clone()).await.unwrap_err());
    assert_eq!(refused.reason, Reason::MalformedRequest, "on the owner node");
    let refused = from_status(&client(&second).invoke(beyond).await.unwrap_err());
    assert_eq!(refused.reason, Reason::MalformedRequest, "from another node");
    let both = wire::InferTensor { parts: vec![part(&object, 0, 1)], ..rows(1) };
    let both = wire::InvokeRequest { inputs: vec![both], ..self::request("mlp", 6, &[]) };
    let refused = from_status(&client(&first).invoke(both).await.unwrap_err());
    assert_eq!(refused.reason, Reason::InvalidInput, "bytes and parts");

    let other = ask(&mut client(&first), keeping(4, rows(ROWS), Duration::from_secs(60))).await;
    let other = self::object(&other, &first);
    first.shutdown().await;
    let two = tensor(2 * ROWS, bytes::Bytes::new(), vec![part(&object, 0, ROWS), part(&other, 0, ROWS)]);
    let two = wire::InvokeRequest { inputs: vec![two], ..self::request("mlp", 5, &[]) };
    let lost = ask(&mut client(&second), two).await;
    // Both objects are named, so that they are computed again at once.
    assert_eq!(lost.lost, [object.id.unwrap(), other.id.unwrap()]);
    second.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unread_object_is_dropped_when_it_expires() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let kept = ask(&mut client(&worker), keeping(1, rows(ROWS), Duration::from_millis(1))).await;
    let object = object(&kept, &worker);
    let gone = async {
        for id in 2.. {
            let whole = tensor(ROWS, bytes::Bytes::new(), vec![part(&object, 0, ROWS)]);
            let request = wire::InvokeRequest { inputs: vec![whole], ..request("mlp", id, &[]) };
            if !ask(&mut client(&worker), request).await.lost.is_empty() {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    within("the object to go", gone).await;
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_output_that_does_not_fit_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(dir.path(), &[controller.addr], 1);
    config.object_memory = Bytes(ROWS * ROW_BYTES);
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    let digest = controller.publish(&millrace_model::synth::mlp());
    controller.desire(&[("mlp", digest)]);
    controller.ready("mlp").await;

    let mut client = client(&worker);
    let first = ask(&mut client, keeping(1, rows(ROWS), Duration::from_secs(60))).await;
    object(&first, &worker);
    let second = ask(&mut client, keeping(2, rows(ROWS), Duration::from_secs(60))).await;
    assert_eq!(second.outputs[0].data.len() as u64, ROWS * ROW_BYTES);
    // A small output is answered in any case.
    let small = ask(&mut client, keeping(3, rows(1), Duration::from_secs(60))).await;
    assert_eq!(small.outputs[0].data.len() as u64, ROW_BYTES);
    worker.shutdown().await;
}
