//! Tests of failures of executors and devices, and of their costs.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use millrace_proto::executor::Fault;
use millrace_proto::worker as wire;
use millrace_types::Reason;
use tokio::task::JoinSet;

use crate::controller::Controller;
use crate::support::{Client, all_up, client, inject, invoke, kill_9, refusal, row, serving_mlp, values};

#[tokio::test(flavor = "multi_thread")]
async fn killing_executors_under_load_costs_latency_only() {
    const CLIENTS: u64 = 8;
    const KILLS: u64 = 4;
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 2, &["mlp"]).await;
    let expected = values(&invoke(&mut client(&worker), "mlp", 0, &row(1)).await.unwrap());
    let answered: Arc<[AtomicU64]> = (0..CLIENTS).map(|_| AtomicU64::new(0)).collect();
    let stop = Arc::new(tokio::sync::Notify::new());
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let mut client = client(&worker);
        let expected = expected.clone();
        let answered = answered.clone();
        let stop = stop.clone();
        clients.spawn(async move {
            let stopped = stop.notified();
            tokio::pin!(stopped);
            for id in 1.. {
                if futures::poll!(&mut stopped).is_ready() {
                    return;
                }
                let response = invoke(&mut client, "mlp", number << 32 | id, &row(1)).await;
                assert_eq!(values(&response.expect("every request is answered")), expected);
                answered[number as usize].fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let counts = || answered.iter().map(|it| it.load(Ordering::Relaxed)).collect::<Vec<_>>();
    for kill in 0..KILLS {
        // Wait until every client got an answer: a request that is caught by two kills would be
        // quarantined, and rightly.
        let before = counts();
        while counts().iter().zip(&before).any(|(now, before)| now == before) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        let telemetry = all_up(&controller).await;
        let gpu = telemetry.gpus[kill as usize % 2].clone();
        kill_9(gpu.executor_pid);
        let noticed = |telemetry: &wire::Telemetry| {
            let now = &telemetry.gpus[gpu.index as usize];
            now.incarnation > gpu.incarnation && now.health() == wire::GpuHealth::Up
        };
        controller.telemetry("the executor again", noticed).await;
    }
    stop.notify_waiters();
    while let Some(client) = clients.join_next().await {
        client.unwrap();
    }
    assert!(counts().iter().all(|&count| count >= KILLS), "load throughout");
    worker.shutdown().await;
}

/// Calls the MLP concurrently until every GPU holds the model. No call is in progress when this
/// returns.
pub(crate) async fn resident_everywhere(client: &Client, controller: &Controller) {
    let loaded = |gpu: &wire::GpuTelemetry| gpu.models.iter().any(|model| model.loaded_bytes > 0);
    for round in 0u64.. {
        let call = |n: u64| {
            let mut client = client.clone();
            async move { invoke(&mut client, "mlp", round * 16 + n, &row(1)).await.unwrap() }
        };
        futures::future::join_all((0..16).map(call)).await;
        if controller.latest_telemetry().gpus.iter().all(loaded) {
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_kills_executors_is_quarantined_after_two() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 2, &["mlp"]).await;
    let mut client = client(&worker);
    resident_everywhere(&client, &controller).await;
    for gpu in 0..2 {
        inject(&mut client, gpu, Fault::AbortOnRun, "").await;
    }
    let failure = refusal(invoke(&mut client, "mlp", 1, &row(1)).await);
    assert_eq!((failure.reason, failure.may_have_executed), (Reason::Quarantined, true), "{failure:?}");
    all_up(&controller).await;
    invoke(&mut client, "mlp", 2, &row(1)).await.expect("others are served");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_finds_a_gpu_off_the_bus_is_answered_by_the_next_executor() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let mut client = client(&worker);
    let expected = values(&invoke(&mut client, "mlp", 1, &row(1)).await.unwrap());
    inject(&mut client, 0, Fault::OffTheBus, "").await;
    let unhealthy = |telemetry: &wire::Telemetry| {
        telemetry.gpus[0].health() == wire::GpuHealth::Unhealthy || telemetry.gpus[0].incarnation > 1
    };
    let mut second = client.clone();
    let answer = tokio::spawn(async move { invoke(&mut second, "mlp", 2, &row(1)).await });
    controller.telemetry("a GPU that is unhealthy", unhealthy).await;
    assert_eq!(values(&answer.await.unwrap().unwrap()), expected);
    assert_eq!(all_up(&controller).await.gpus[0].restarts, 1);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_finds_a_lost_context_is_answered_by_the_next_executor_and_the_gpu_stays_healthy() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let mut client = client(&worker);
    let expected = values(&invoke(&mut client, "mlp", 1, &row(1)).await.unwrap());
    inject(&mut client, 0, Fault::LoseContext, "").await;
    let mut second = client.clone();
    let answer = tokio::spawn(async move { invoke(&mut second, "mlp", 2, &row(1)).await });
    let replaced = |telemetry: &wire::Telemetry| {
        assert_ne!(telemetry.gpus[0].health(), wire::GpuHealth::Unhealthy);
        telemetry.gpus[0].incarnation > 1
    };
    controller.telemetry("another executor", replaced).await;
    assert_eq!(values(&answer.await.unwrap().unwrap()), expected);
    assert_eq!(all_up(&controller).await.gpus[0].restarts, 1);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn runs_copies_and_mappings_that_fail_once_cost_their_requests_time_only() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let mut client = client(&worker);
    // These faults hit the first request, which loads the model.
    inject(&mut client, 0, Fault::FailNextMap, "").await;
    inject(&mut client, 0, Fault::FailNextCopy, "").await;
    let expected = values(&invoke(&mut client, "mlp", 1, &row(1)).await.unwrap());
    inject(&mut client, 0, Fault::OutOfMemory, "").await;
    assert_eq!(values(&invoke(&mut client, "mlp", 2, &row(1)).await.unwrap()), expected);
    assert_eq!(controller.latest_telemetry().gpus[0].restarts, 0);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_device_is_replaced_and_its_requests_are_answered() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let mut client = client(&worker);
    let expected = values(&invoke(&mut client, "mlp", 1, &row(1)).await.unwrap());
    inject(&mut client, 0, Fault::Xid, "").await;
    let again = |telemetry: &wire::Telemetry| {
        telemetry.gpus[0].incarnation > 1 && telemetry.gpus[0].health() == wire::GpuHealth::Up
    };
    controller.telemetry("another executor", again).await;
    assert_eq!(values(&invoke(&mut client, "mlp", 2, &row(1)).await.unwrap()), expected);
    worker.shutdown().await;
}

/// Encodes a length-delimited field of a protobuf message.
fn field(tag: u8, contents: &[u8]) -> Vec<u8> {
    let mut bytes = vec![tag << 3 | 2];
    // The length is a varint.
    let mut length = contents.len();
    while length >= 0x80 {
        bytes.push(length as u8 | 0x80);
        length >>= 7;
    }
    bytes.push(length as u8);
    bytes.extend_from_slice(contents);
    bytes
}

fn onnx_node(op_type: &str, inputs: &[&str], output: &str, attribute: &[u8]) -> Vec<u8> {
    let inputs = inputs.iter().flat_map(|input| field(1, input.as_bytes()));
    let rest = [field(2, output.as_bytes()), field(4, op_type.as_bytes()), attribute.to_vec()].concat();
    field(1, &inputs.chain(rest).collect::<Vec<_>>())
}

fn onnx_value(tag: u8, name: &str, dims: &[&str]) -> Vec<u8> {
    let dims: Vec<u8> = dims.iter().flat_map(|dim| field(1, &field(2, dim.as_bytes()))).collect();
    let float = vec![0x08, 1];
    let tensor_type = field(1, &[float, field(2, &dims)].concat());
    field(tag, &[field(1, name.as_bytes()), field(2, &tensor_type)].concat())
}

/// Returns a model with the input `x` of shape [1, n], which sums n^4 numbers.
fn fourth_power() -> Vec<u8> {
    let axis_0 = field(5, &[field(1, b"axis"), vec![0x18, 0, 0xa0, 1, 2]].concat());
    let graph = [
        onnx_node("Shape", &["x"], "shape", &[]),
        onnx_node("Concat", &["shape"; 4], "dims", &axis_0),
        onnx_node("ConstantOfShape", &["dims"], "zeros", &[]),
        onnx_node("ReduceSum", &["zeros"], "y", &[]),
        onnx_value(11, "x", &["r", "n"]),
        onnx_value(12, "y", &["a", "b", "c", "d", "e", "f", "g", "h"]),
    ];
    [vec![0x08, 8], field(7, &graph.concat()), field(8, &[0x10, 17])].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_allocates_too_much_memory_ends_only_its_executor() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 2, &["mlp"]).await;
    let mlp = controller.publish(&millrace_model::synth::mlp());
    let power = controller.publish(&fourth_power());
    controller.desire(&[("mlp", mlp), ("power", power)]);
    controller.ready("power").await;
    let mut client = client(&worker);
    assert_eq!(values(&invoke(&mut client, "power", 1, &[0.0; 2]).await.unwrap()), [0.0]);
    // 6 GB, which the machine may have, and 2^46 bytes, which no machine has.
    for (id, row) in [(2, vec![0.0; 200]), (3, vec![0.0; 2048])] {
        let failure = refusal(invoke(&mut client, "power", id, &row).await);
        assert_eq!(failure.reason, Reason::Quarantined, "{failure:?}");
    }
    all_up(&controller).await;
    invoke(&mut client, "mlp", 4, &row(1)).await.unwrap();
    worker.shutdown().await;
}
