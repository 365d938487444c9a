//! Measures the time that the worker adds to a model's own run, the delay until a kill is reported,
//! and the time until the leader has an index of real size. The bench prints and asserts nothing:
//! `cargo bench -p millrace-worker --bench worker`.
//!
//! Executors are this program started again, as in the tests, which share their controller.

#![allow(clippy::unwrap_used, reason = "a measurement that meets the unexpected ends")]
#![allow(dead_code, reason = "the tests use more of what they share")]

use std::time::Duration;

use millrace_device::monotonic_now;
use millrace_proto::executor::{Tensor, tensor::Contents};
use millrace_types::{FunctionKey, FunctionName, RequestId, Revision, RevisionKey, TenantName};
use millrace_worker::request::{Attempt, OnGpus};

#[path = "../tests/real/controller.rs"]
mod controller;
#[path = "../tests/real/ledger.rs"]
mod ledger;
#[path = "../tests/real/port.rs"]
mod port;
#[path = "../tests/real/support.rs"]
mod support;

use support::{client, index_data, invoke, kill_9, row, serving_mlp, worker};

const WARM_UP: usize = 500;
const ROUNDS: usize = 5000;
const KILLS: usize = 30;
const INDEX_ENTRIES: usize = 100_000;
const INDEX_ROUNDS: usize = 9;

fn main() {
    if std::env::var_os(support::EXECUTOR_VARIABLE).is_some() {
        return support::be_an_executor();
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        worker_overhead().await;
        a_kill_until_it_is_reported().await;
        an_index_until_it_is_committed().await;
    });
}

fn percentiles(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!(
        "{what:>40}: p50 {:>9.1?}  p90 {:>9.1?}  p99 {:>9.1?}  max {:>9.1?}",
        at(0.5),
        at(0.9),
        at(0.99),
        at(1.0)
    );
}

fn invocation(id: usize) -> Attempt {
    let function = FunctionKey { tenant: TenantName::default(), name: FunctionName::new("mlp").unwrap() };
    let data: Vec<u8> = row(1).iter().flat_map(|value| value.to_le_bytes()).collect();
    Attempt {
        cold: Duration::ZERO,
        behind: Duration::ZERO,
        counted: false,
        trial: None,
        request_id: RequestId::new(&format!("r{id}")).unwrap(),
        attempts_left: 3,
        revision: RevisionKey { function, revision: Revision::FIRST },
        timeout: Duration::from_secs(60),
        objective: None,
        priority: 0,
        inputs: vec![Tensor {
            name: "x".into(),
            datatype: "FP32".into(),
            shape: vec![1, 64],
            contents: Some(Contents::Inline(data.into())),
        }],
        descriptors: Vec::new(),
        on_gpus: OnGpus::default(),
        outputs: Vec::new(),
        next: Vec::new(),
    }
}

async fn worker_overhead() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let mut asked = Vec::new();
    let mut run = Vec::new();
    let mut total = Vec::new();
    let mut queue = Vec::new();
    for id in 0..WARM_UP + ROUNDS {
        let began = monotonic_now();
        let completion = worker.node().invoke(invocation(id)).await.unwrap();
        if id >= WARM_UP {
            asked.push(monotonic_now().since(began));
            run.push(completion.split.run);
            total.push(completion.split.total);
            queue.push(completion.split.queue);
        }
    }
    percentiles("NodeHandle::invoke", asked);
    percentiles("of it the model's own run", run);
    percentiles("of it on the worker's clock", total);
    percentiles("of that the queue", queue);
    let mut through_service = Vec::new();
    let mut client = client(&worker);
    for id in 0..WARM_UP + ROUNDS {
        let began = monotonic_now();
        invoke(&mut client, "mlp", id as u64, &row(1)).await.unwrap();
        if id >= WARM_UP {
            through_service.push(monotonic_now().since(began));
        }
    }
    percentiles("Worker service in process", through_service);
    worker.shutdown().await;
}

async fn a_kill_until_it_is_reported() {
    let mut times = Vec::new();
    let mut port = port::Port::start();
    for _ in 0..KILLS {
        let pid = port.until_ready().await;
        let killed = monotonic_now();
        kill_9(pid);
        times.push(port.until_exited().await.since(killed));
    }
    percentiles("SIGKILL until PortEvent::Exited", times);
}

/// Measures the time from the appearance of a leader without any entry, while the worker has
/// reported all entries before, until the leader has the last entry. The leader's commits cost
/// nothing here: only the worker and the wire are measured.
async fn an_index_until_it_is_committed() {
    let mut times = Vec::new();
    for _ in 0..INDEX_ROUNDS {
        let dir = tempfile::tempdir().unwrap();
        let (worker, controller) = worker(dir.path(), 1).await;
        controller.lead(1);
        index_data(&worker, INDEX_ENTRIES as u64).await;
        let whole = |ledger: &ledger::Ledger| ledger.kept.entries.len() == INDEX_ENTRIES;
        controller.committed("the index", whole).await;
        controller.ledger().send_modify(ledger::Ledger::lose);
        let began = monotonic_now();
        // A new registration causes a full checkpoint at once.
        controller.register_again(2);
        controller.committed("the index again", whole).await;
        times.push(monotonic_now().since(began));
        worker.shutdown().await;
    }
    percentiles("100,000 index entries until committed", times);
}
