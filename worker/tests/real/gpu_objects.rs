//! Tests of intermediate data in the memory of the GPU that made it.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes as Buffer;
use futures::future::{join_all, select_all};
use millrace_proto::worker as wire;
use millrace_proto::worker::FetchMethod;
use millrace_types::Bytes;
use millrace_worker::start::{
    DataConfig, ExecutorIsolation, PolicyConfig, RunningWorker, SchedulingPolicy, WorkerConfig, start,
};
use rustix::process::{Signal, kill_process};

use crate::controller::Controller;
use crate::objects::{ROW_BYTES, ROWS, ask, close, keeping, methods, object, part, rows, tensor, twice};
use crate::programs;
use crate::support::{
    Client, all_up, client, config, kill_9, launcher, pid, request, script, serving_mlp, within,
};

const LONG: Duration = Duration::from_secs(60);
const WHOLE: u64 = ROWS * ROW_BYTES;

/// Starts a worker with one GPU that serves the MLP, with this configuration of objects.
async fn serving(
    dir: &Path,
    gpu_data: DataConfig,
    isolation: ExecutorIsolation,
) -> (RunningWorker, Controller) {
    serving_as(dir, 1, |config| WorkerConfig { gpu_data, isolation, ..config }).await
}

async fn serving_as(
    dir: &Path,
    gpus: u32,
    changed: impl FnOnce(WorkerConfig) -> WorkerConfig,
) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let worker = start(changed(config(dir, &[controller.addr], gpus))).await.unwrap();
    all_up(&controller).await;
    let digest = controller.publish(&millrace_model::synth::mlp());
    controller.desire(&[("mlp", digest)]);
    controller.ready("mlp").await;
    (worker, controller)
}

/// Runs the MLP on rows of an object.
async fn take(
    client: &mut Client,
    id: u64,
    object: &wire::Object,
    first: u64,
    rows: u64,
) -> wire::InvokeResponse {
    take_by("mlp", client, id, object, first, rows).await
}

/// Runs a function on rows of an object.
async fn take_by(
    function: &str,
    client: &mut Client,
    id: u64,
    object: &wire::Object,
    first: u64,
    rows: u64,
) -> wire::InvokeResponse {
    let input = tensor(rows, Buffer::new(), vec![part(object, first, rows)]);
    ask(client, wire::InvokeRequest { inputs: vec![input], ..request(function, id, &[]) }).await
}

async fn release(client: &mut Client, object: &wire::Object) {
    let released = wire::ReleaseObjectsRequest { ids: vec![object.id.clone().unwrap()] };
    client.release_objects(released).await.unwrap();
}

/// Waits until the memory of objects on all GPUs satisfies `wanted`.
async fn used(controller: &Controller, what: &str, wanted: impl Fn(u64) -> bool) {
    controller.telemetry(what, |now| wanted(now.gpus.iter().map(|gpu| gpu.object_bytes).sum())).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_run_on_the_gpu_reads_an_object_in_place() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let mut client = client(&worker);
    let expected = twice(&mut client, ROWS).await;
    let kept = ask(&mut client, keeping(1, rows(ROWS), LONG)).await;
    let object = object(&kept, &worker);
    used(&controller, "the object on the GPU", |bytes| bytes >= WHOLE).await;

    let whole = take(&mut client, 2, &object, 0, ROWS).await;
    assert_eq!((&whole.outputs[0].data, methods(&whole)), (&expected, vec![(FetchMethod::IntraGpu, WHOLE)]));
    let some = take(&mut client, 3, &object, 100, 20).await;
    assert_eq!(methods(&some), [(FetchMethod::IntraGpu, 20 * ROW_BYTES)]);
    let row = expected.len() / ROWS as usize;
    assert!(close(&some.outputs[0].data, &expected[100 * row..120 * row]));

    release(&mut client, &object).await;
    used(&controller, "nothing left on the GPU", |bytes| bytes == 0).await;
    worker.shutdown().await;
}

/// D06, D19: no byte crosses a link, whether both GPUs hold the second step's model or neither
/// does.
#[tokio::test(flavor = "multi_thread")]
async fn the_next_step_of_a_workflow_runs_on_the_gpu_that_has_its_data() {
    let dir = tempfile::tempdir().unwrap();
    // The `fifo` policy gives an idle GPU the next request; `unified` would enqueue it on the
    // busy GPU that holds the model.
    let fifo = |config: WorkerConfig| {
        let policy = SchedulingPolicy { dispatch: PolicyConfig::Fifo, ..config.policy };
        WorkerConfig { policy, ..config }
    };
    let (worker, controller) = serving_as(dir.path(), 2, fifo).await;
    let mlp = controller.publish(&millrace_model::synth::mlp());
    let other = controller.publish(&millrace_model::synth::Seeded(7).mlp());
    controller.desire(&[("mlp", mlp), ("other", other)]);
    controller.ready("mlp").await;
    controller.ready("other").await;
    // While one GPU's executor is stopped during a run, the other GPU gets the next request.
    let keeps = |id| {
        let mut client = client(&worker);
        async move { ask(&mut client, keeping(id, rows(ROWS), LONG)).await }
    };
    let first = keeps(1).await;
    let held = worker.node().snapshot().await.gpus[first.gpu as usize].executor_pid;
    let held = pid(held.unwrap());
    kill_process(held, Signal::STOP).unwrap();
    let asked = [2, 3].map(|id| tokio::spawn(keeps(id)));
    let (second, _, stood) = within("an object of the other GPU", select_all(asked)).await;
    kill_process(held, Signal::CONT).unwrap();
    join_all(stood).await;
    let made = BTreeMap::from([first, second.unwrap()].map(|kept| (kept.gpu, object(&kept, &worker))));
    assert_eq!(made.len(), 2, "an object of each");
    let mut client = client(&worker);
    for (id, (function, gpu)) in (1000..).zip([("other", 1), ("mlp", 1), ("mlp", 0), ("mlp", 1)]) {
        let taken = take_by(function, &mut client, id, &made[&gpu], 0, ROWS).await;
        assert_eq!((taken.gpu, methods(&taken)), (gpu, vec![(FetchMethod::IntraGpu, WHOLE)]), "{function}");
    }
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_reaches_another_gpu_over_the_host() {
    let dir = tempfile::tempdir().unwrap();
    // Requests that are sent one after the other alternate between the GPUs.
    let by_turns = |config: WorkerConfig| {
        let policy = SchedulingPolicy { dispatch: PolicyConfig::Lb, ..config.policy };
        WorkerConfig { policy, ..config }
    };
    let (worker, _controller) = serving_as(dir.path(), 2, by_turns).await;
    let mut client = client(&worker);
    let expected = twice(&mut client, ROWS).await;
    let kept = ask(&mut client, keeping(1, rows(ROWS), LONG)).await;
    let object = object(&kept, &worker);
    for (id, method) in [(2, FetchMethod::Host), (3, FetchMethod::IntraGpu), (4, FetchMethod::Host)] {
        let answer = take(&mut client, id, &object, 0, ROWS).await;
        assert_eq!(answer.gpu == kept.gpu, method == FetchMethod::IntraGpu, "request {id}");
        assert_eq!(methods(&answer), [(method, WHOLE)], "on GPU {}, made on {}", answer.gpu, kept.gpu);
        assert!(close(&answer.outputs[0].data, &expected));
    }
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_that_do_not_fit_on_the_gpu_are_stored_on_the_host() {
    let dir = tempfile::tempdir().unwrap();
    // The GPU has one block for objects.
    let gpu_data = DataConfig { memory: Bytes::mib(2), ..DataConfig::default() };
    let (worker, _controller) = serving(dir.path(), gpu_data, ExecutorIsolation::Gpu).await;
    let mut client = client(&worker);
    let expected = twice(&mut client, ROWS).await;
    let mut objects = Vec::new();
    for id in 1..4 {
        objects.push(object(&ask(&mut client, keeping(id, rows(ROWS), LONG)).await, &worker));
    }
    let mut came = Vec::new();
    for (id, object) in (4..).zip(&objects) {
        let taken = take(&mut client, id, object, 0, ROWS).await;
        assert!(close(&taken.outputs[0].data, &expected));
        came.push(methods(&taken)[0].0);
    }
    assert_eq!(came, [FetchMethod::IntraGpu, FetchMethod::Host, FetchMethod::Host]);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_lost_with_their_executor_and_named_in_the_response() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let mut client = client(&worker);
    let kept = ask(&mut client, keeping(1, rows(ROWS), LONG)).await;
    let object = object(&kept, &worker);
    let now = all_up(&controller).await;
    kill_9(now.gpus[0].executor_pid);
    let again =
        |now: &wire::Telemetry| now.gpus[0].restarts == 1 && now.gpus[0].health() == wire::GpuHealth::Up;
    controller.telemetry("another executor", again).await;
    let gone = take(&mut client, 2, &object, 0, ROWS).await;
    assert_eq!(gone.lost, [object.id.clone().unwrap()]);
    // An object that is computed again is on the GPU.
    let kept = ask(&mut client, keeping(3, rows(ROWS), LONG)).await;
    let object = self::object(&kept, &worker);
    assert_eq!(methods(&take(&mut client, 4, &object, 0, ROWS).await), [(FetchMethod::IntraGpu, WHOLE)]);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_reads_an_object_of_a_gpu_on_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let controller = Controller::start("test-cluster", 1).await;
    let config = config(dir.path(), &[controller.addr], 1);
    let config = WorkerConfig { programs: Some(launcher()), ..config };
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    let mlp = controller.publish(&millrace_model::synth::mlp());
    let program = controller.publish(&programs::packed(&script()));
    controller.desire_with(&[("mlp", mlp), ("f", program)], |state| {
        state.functions.iter_mut().for_each(|function| function.processes = 1);
    });
    controller.ready("mlp").await;
    controller.ready("f").await;
    let mut client = client(&worker);
    let plain = wire::InvokeRequest { inputs: vec![rows(ROWS)], ..request("mlp", 1, &[]) };
    let plain = ask(&mut client, plain).await.outputs[0].data.clone();
    let object = object(&ask(&mut client, keeping(2, rows(ROWS), LONG)).await, &worker);

    // The program reads the whole object, and a part.
    for (id, (first, rows)) in (3..).zip([(0, ROWS), (7, 3)]) {
        let bytes = (first * ROW_BYTES) as usize..((first + rows) * ROW_BYTES) as usize;
        let shape = vec![bytes.len() as i64];
        let parts = vec![part(&object, first, rows)];
        let x = wire::InferTensor {
            name: "x".into(),
            datatype: "UINT8".into(),
            shape,
            data: Buffer::new(),
            parts,
        };
        let inputs = vec![programs::tensor("what", b"add"), x];
        let answer = ask(&mut client, wire::InvokeRequest { inputs, ..request("f", id, &[]) }).await;
        assert_eq!(answer.outputs[0].data, programs::plus_one(&plain[bytes]));
        assert_eq!(methods(&answer), [(FetchMethod::Host, rows * ROW_BYTES)]);
    }
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_are_stored_on_the_host_without_gpu_memory_for_them_or_in_isolation() {
    let none = DataConfig { memory: Bytes::ZERO, ..DataConfig::default() };
    for (gpu_data, isolation) in
        [(none, ExecutorIsolation::Gpu), (DataConfig::default(), ExecutorIsolation::Model)]
    {
        let dir = tempfile::tempdir().unwrap();
        let (worker, _controller) = serving(dir.path(), gpu_data, isolation).await;
        let mut client = client(&worker);
        let expected = twice(&mut client, ROWS).await;
        let object = object(&ask(&mut client, keeping(1, rows(ROWS), LONG)).await, &worker);
        let taken = take(&mut client, 2, &object, 0, ROWS).await;
        assert_eq!(methods(&taken), [(FetchMethod::Host, WHOLE)], "{isolation}");
        assert_eq!(taken.outputs[0].data, expected);
        worker.shutdown().await;
    }
}
