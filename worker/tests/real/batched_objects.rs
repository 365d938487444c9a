//! Tests of the outputs of batched runs: the rows of each request stay on the GPU as an object of
//! their own.

use std::time::Duration;

use bytes::Bytes as Buffer;
use futures::future::join_all;
use millrace_proto::worker as wire;
use millrace_proto::worker::FetchMethod;
use millrace_worker::start::RunningWorker;

use crate::objects::{ask, close, methods, object};
use crate::support::{Client, client, request, within, worker};

const LONG: Duration = Duration::from_secs(60);
/// Tokens of a text. An encoder layer's output is smaller than an object for one text, and larger
/// for two.
const TOKENS: usize = 24;
const WIDTH: usize = 384;
const ROW_BYTES: u64 = (TOKENS * WIDTH * 4) as u64;
/// Rows of the two requests that run as a batch.
const ROWS: [u64; 2] = [2, 1];

/// Returns rows that differ from the rows of another `first`.
fn rows(first: u64, rows: u64, data: Option<Buffer>, parts: Vec<wire::TensorPart>) -> wire::InferTensor {
    let number = |at: u64| ((first * 131 + at * 7) % 199) as f32 / 199.0 - 0.5;
    let made = || (0..rows * ROW_BYTES / 4).map(number).flat_map(f32::to_le_bytes).collect::<Vec<u8>>();
    let data = data.unwrap_or_else(|| if parts.is_empty() { made().into() } else { Buffer::new() });
    let shape = vec![rows as i64, TOKENS as i64, WIDTH as i64];
    wire::InferTensor { name: "x".into(), datatype: "FP32".into(), shape, data, parts }
}

fn asking(function: &str, id: u64, input: wire::InferTensor, keep: bool) -> wire::InvokeRequest {
    let hold = wire::Hold { time: Some(LONG.try_into().unwrap()), answered: Vec::new() };
    let hold = keep.then_some(hold);
    wire::InvokeRequest { inputs: vec![input], hold, ..request(function, id, &[]) }
}

/// Runs two requests as a batch and returns their answers. The first request stores its output, and
/// the second too if `both`.
async fn pair(
    worker: &RunningWorker,
    ids: &mut impl Iterator<Item = u64>,
    both: bool,
) -> Vec<wire::InvokeResponse> {
    loop {
        let before = worker.node().snapshot().await.batches;
        // The first request has as many rows as a batch may have, so the request runs alone.
        // Meanwhile the other two are held back until both fill a batch together.
        let asked = [(9, 3, false), (1, ROWS[0], true), (2, ROWS[1], both)].map(|(first, count, keep)| {
            let mut client = client(worker);
            let id = ids.next().unwrap();
            let asked = asking("batched", id, rows(first, count, None, Vec::new()), keep);
            async move { ask(&mut client, asked).await }
        });
        let answers = join_all(asked).await;
        let after = worker.node().snapshot().await.batches;
        if (after.batches, after.requests) == (before.batches + 1, before.requests + 2) {
            return answers[1..].to_vec();
        }
        for answer in answers.iter().filter(|answer| !answer.outputs[0].parts.is_empty()) {
            release(&mut client(worker), &object(answer, worker)).await;
        }
    }
}

async fn release(client: &mut Client, object: &wire::Object) {
    let released = wire::ReleaseObjectsRequest { ids: vec![object.id.clone().unwrap()] };
    client.release_objects(released).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_step_reads_the_rows_of_one_request_of_a_batch_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = worker(dir.path(), 1).await;
    let block = controller.publish(&millrace_model::synth::transformer_block());
    controller.desire_with(&[("block", block), ("batched", block)], |state| {
        let batched = &mut state.functions[1];
        batched.batch_max_size = ROWS.iter().sum::<u64>() as u32;
        batched.batch_max_wait = Some(Duration::from_secs(1).try_into().unwrap());
    });
    controller.ready("block").await;
    controller.ready("batched").await;
    let mut ids = 1..;
    let mut own = client(&worker);
    let mut alone = Vec::new();
    for (first, count) in [(1, ROWS[0]), (2, ROWS[1])] {
        let input = rows(first, count, None, Vec::new());
        let once = ask(&mut own, asking("block", ids.next().unwrap(), input, false)).await;
        let once = once.outputs[0].data.clone();
        let again = rows(first, count, Some(once.clone()), Vec::new());
        let again = ask(&mut own, asking("block", ids.next().unwrap(), again, false)).await;
        alone.push((once, again.outputs[0].data.clone()));
    }

    for both in [true, false] {
        let answers = within("a pair that ran as one", pair(&worker, &mut ids, both)).await;
        let [large, little] = &answers[..] else { panic!("{answers:?}") };
        // A small output is answered even if the request asks for an object.
        assert!(close(&little.outputs[0].data, &alone[1].0));
        let kept = object(large, &worker);
        assert_eq!(kept.bytes, ROWS[0] * ROW_BYTES);
        let held = wire::HeldPart { object: Some(kept.clone()), offset: 0, bytes: kept.bytes };
        let whole = vec![wire::TensorPart { part: Some(wire::tensor_part::Part::Held(held)) }];
        let input = rows(1, ROWS[0], None, whole);
        let next = ask(&mut own, asking("block", ids.next().unwrap(), input, false)).await;
        assert!(close(&next.outputs[0].data, &alone[0].1));
        // If any output of the batch is to be answered in any case, all are cut on the host.
        let method = if both { FetchMethod::IntraGpu } else { FetchMethod::Host };
        assert_eq!(methods(&next), [(method, ROWS[0] * ROW_BYTES)]);
        release(&mut own, &kept).await;
    }
    let left = controller.telemetry("nothing left on the GPU", |now| now.gpus[0].object_bytes == 0).await;
    assert_eq!(left.gpus[0].restarts, 0);
    worker.shutdown().await;
}
