//! Tests of objects that cross NVLinks between GPUs, and of objects that return from the host (D05,
//! D07, D27, D28).

use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use bytes::Bytes as Buffer;
use futures::future::join_all;
use millrace_proto::worker as wire;
use millrace_proto::worker::FetchMethod;
use millrace_types::topology::{LinkKind, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};
use millrace_worker::snapshot::NodeSnapshot;
use millrace_worker::start::{DataConfig, PolicyConfig, RunningWorker, start};

use crate::controller::Controller;
use crate::objects::{ROW_BYTES, ROWS, ask, close, keeping, methods, object, part, tensor};
use crate::support::{all_up, client, config, kill_9, request, row, within};

/// Lifetime of objects, longer than any test on a busy machine.
const LONG: Duration = Duration::from_secs(3600);
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Number of concurrent requests, more than one GPU is assigned.
const TAKERS: u64 = 20;

/// Starts a worker that serves the MLP on `gpus` GPUs, with NVLinks of this rate between the
/// `joined` pairs.
async fn serving(
    dir: &Path,
    gpus: u32,
    joined: &[(u32, u32)],
    rate: u64,
    memory: Bytes,
) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let mut config = config(dir, &[controller.addr], gpus);
    let nvlink = |&(a, b): &(u32, u32)| TopologyLink {
        kind: LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) },
        rate: BytesPerSec(rate),
    };
    config.topology.links.extend(joined.iter().map(nvlink));
    let gpu_data = DataConfig { memory, ..DataConfig::default() };
    // The `lb` policy alternates between the GPUs wherever the data is, so that copies cross the
    // links.
    config.gpu_data = gpu_data;
    config.policy.dispatch = PolicyConfig::Lb;
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    let digest = controller.publish(&millrace_model::synth::mlp());
    controller.desire(&[("mlp", digest)]);
    controller.ready("mlp").await;
    (worker, controller)
}

/// An object of rows, with its GPU and the MLP's answer for it.
struct Made {
    object: wire::Object,
    gpu: u32,
    answer: Buffer,
}

fn rows_from(first: u64, rows: u64) -> wire::InferTensor {
    let data: Vec<u8> = (first..first + rows).flat_map(row).flat_map(f32::to_le_bytes).collect();
    tensor(rows, data.into(), Vec::new())
}

async fn make(worker: &RunningWorker, first: u64, rows: u64) -> Made {
    let mut client = client(worker);
    let plain = |id, input| wire::InvokeRequest { inputs: vec![input], ..request("mlp", id, &[]) };
    let once = ask(&mut client, plain(90 + first, rows_from(first, rows))).await;
    let again = tensor(rows, once.outputs[0].data.clone(), Vec::new());
    let answer = ask(&mut client, plain(91 + first, again)).await.outputs[0].data.clone();
    let kept = ask(&mut client, keeping(first, rows_from(first, rows), LONG)).await;
    Made { object: object(&kept, worker), gpu: kept.gpu, answer }
}

/// Runs the MLP on rows of an object.
async fn take(worker: &RunningWorker, id: u64, made: &Made, first: u64, rows: u64) -> wire::InvokeResponse {
    let input = tensor(rows, Buffer::new(), vec![part(&made.object, first, rows)]);
    ask(&mut client(worker), wire::InvokeRequest { inputs: vec![input], ..request("mlp", id, &[]) }).await
}

/// Runs many requests concurrently, each on half of an object at its own offset. Returns the GPU of
/// each run, and the method of the object's transfer.
async fn take_often(worker: &RunningWorker, made: &Made) -> Vec<(u32, FetchMethod)> {
    let takers = (0..TAKERS).map(async |id| {
        let first = id;
        let rows = ROWS / 2;
        let taken = take(worker, 1000 + id, made, first, rows).await;
        let bytes = made.answer.len() / ROWS as usize;
        let answer = &made.answer[first as usize * bytes..(first + rows) as usize * bytes];
        assert!(close(&taken.outputs[0].data, answer), "{:?}", methods(&taken));
        let [(method, fetched)] = methods(&taken)[..] else { panic!("{taken:?}") };
        assert_eq!(fetched, rows * ROW_BYTES);
        (taken.gpu, method)
    });
    within("all answers", join_all(takers)).await
}

/// Waits until the worker's snapshot satisfies the condition.
async fn until(worker: &RunningWorker, what: &str, wanted: impl Fn(&NodeSnapshot) -> bool) {
    let seen = async {
        while !wanted(&worker.node().snapshot().await) {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    };
    within(what, seen).await;
}

fn over_nvlinks(snapshot: &NodeSnapshot, gpus: u32) -> Bytes {
    snapshot.links.iter().filter(|link| link.link.0 >= gpus).map(|link| link.carried).sum()
}

/// Returns the memory of objects and their copies on all GPUs.
fn own(snapshot: &NodeSnapshot) -> Bytes {
    snapshot.gpus.iter().map(|gpu| gpu.data.used).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_copied_over_nvlinks_if_they_connect_and_else_over_the_host() {
    let dir = tempfile::tempdir().unwrap();
    // The path from GPU 0 to GPU 2 has two NVLinks; GPU 3 has none.
    let gpus = 4;
    let (worker, _controller) =
        serving(dir.path(), gpus, &[(0, 1), (1, 2)], 1_000_000_000, Bytes::gib(1)).await;
    let made = make(&worker, 1, ROWS).await;
    let mut used = std::collections::BTreeSet::new();
    let mut copied = 0;
    let all = async {
        while used.len() < gpus as usize {
            for (gpu, method) in take_often(&worker, &made).await {
                let wanted = match (gpu, made.gpu) {
                    (gpu, home) if gpu == home => FetchMethod::IntraGpu,
                    (3, _) | (_, 3) => FetchMethod::Host,
                    _ => FetchMethod::InterGpu,
                };
                assert_eq!(method, wanted, "on GPU {gpu}, made on {}", made.gpu);
                used.insert(gpu);
                copied += u64::from(method == FetchMethod::InterGpu);
            }
        }
    };
    within("every GPU to be used", all).await;
    until(&worker, "the runs' own copies gone", |now| own(now) == Bytes::mib(2)).await;
    let crossed = over_nvlinks(&worker.node().snapshot().await, gpus);
    assert!(crossed >= Bytes(copied * ROWS / 2 * ROW_BYTES), "{crossed:?} for {copied}");
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_copied_over_the_host_if_it_does_not_fit_on_the_gpu() {
    let dir = tempfile::tempdir().unwrap();
    // Each GPU has one block for objects and their copies.
    let (worker, _controller) = serving(dir.path(), 2, &[(0, 1)], 1_000_000_000, Bytes::mib(2)).await;
    let made = make(&worker, 1, ROWS).await;
    let all = async {
        let mut ways = std::collections::BTreeSet::new();
        while !ways.contains(&FetchMethod::InterGpu) {
            ways.extend(take_often(&worker, &made).await.into_iter().map(|(_, method)| method));
        }
    };
    within("a copy that had room", all).await;
    until(&worker, "the runs' own copies gone", |now| own(now) <= Bytes::mib(2)).await;
    worker.shutdown().await;
}

/// The object has six chunks, which make two batches: the second is copied two seconds after the
/// first.
#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_reported_lost_if_its_source_is_killed_during_a_copy() {
    const MANY: u64 = 49_152;
    for _ in 0..10 {
        let dir = tempfile::tempdir().unwrap();
        let (worker, controller) = serving(dir.path(), 2, &[(0, 1)], 5_000_000, Bytes::gib(1)).await;
        let made = make(&worker, 1, MANY).await;
        let begun = async {
            until(&worker, "a batch over the NVLink", |now| over_nvlinks(now, 2) > Bytes::ZERO).await;
            let now = all_up(&controller).await;
            kill_9(now.gpus[made.gpu as usize].executor_pid);
        };
        let answers = {
            let takes = join_all((0..4).map(|id| take(&worker, 1000 + id, &made, 0, MANY)));
            let mut takers = pin!(within("all answers", takes));
            let early = tokio::select! {
                () = begun => None,
                // No request was assigned to the other GPU.
                answers = &mut takers => Some(answers),
            };
            match early {
                Some(answers) => answers,
                None => takers.await,
            }
        };
        let mut lost = 0;
        for answer in &answers {
            if answer.lost.is_empty() {
                assert!(close(&answer.outputs[0].data, &made.answer));
            } else {
                assert_eq!(answer.lost, [made.object.id.clone().unwrap()]);
                lost += 1;
            }
        }
        if lost > 0 {
            // The copy for the waiting run is dropped with its source.
            until(&worker, "nothing left of it", |now| own(now) == Bytes::ZERO).await;
            return worker.shutdown().await;
        }
        worker.shutdown().await;
    }
    panic!("the copy always ended before its source was killed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migrated_object_returns_to_its_gpu_and_is_read_there() {
    let dir = tempfile::tempdir().unwrap();
    // Each GPU has one block, so a copy for a run evicts the object there.
    let (worker, _controller) = serving(dir.path(), 2, &[(0, 1)], 1_000_000_000, Bytes::mib(2)).await;
    let both = |now: &NodeSnapshot| now.gpus.iter().all(|gpu| gpu.data.used == Bytes::mib(2));
    let mut all = Vec::new();
    let filled = async {
        while !both(&worker.node().snapshot().await) {
            let first = 100 * (all.len() as u64 + 1);
            all.extend(join_all((0..4).map(|id| make(&worker, first + id, ROWS))).await);
        }
    };
    within("an object on each GPU", filled).await;
    let back = async {
        loop {
            for made in &all {
                take_often(&worker, made).await;
            }
            let gpus = worker.node().snapshot().await.gpus;
            if gpus.iter().any(|gpu| gpu.data.reloaded > 0) {
                return;
            }
        }
    };
    within("an object that came back", back).await;
    // The objects on GPUs are read in place, and have their contents.
    let mut in_place = 0;
    for made in &all {
        let taken = take_often(&worker, made).await;
        in_place += taken.iter().filter(|(_, method)| *method == FetchMethod::IntraGpu).count();
    }
    assert!(in_place > 0);
    worker.shutdown().await;
}
