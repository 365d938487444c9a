//! What the worker adds to a model's own run. Prints and asserts nothing:
//! `cargo test --release -p millrace-worker --test real -- --ignored --nocapture measure`.

use std::time::{Duration, Instant};

use millrace_device::monotonic_now;
use millrace_proto::executor::{Tensor, tensor::Contents};
use millrace_types::{FunctionKey, FunctionName, RequestId, Revision, RevisionKey, TenantName};
use millrace_worker::request::Invocation;

use crate::processes::kill_9;
use crate::support::{client, invoke, row, serving_mlp};

const WARM_UP: usize = 500;
const ROUNDS: usize = 5000;

fn percentiles(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{what:>34}: p50 {:>9.1?}  p90 {:>9.1?}  p99 {:>9.1?}", at(0.5), at(0.9), at(0.99));
}

fn invocation(id: usize) -> Invocation {
    let function = FunctionKey { tenant: TenantName::default(), name: FunctionName::new("mlp").unwrap() };
    let data: Vec<u8> = row(1).iter().flat_map(|value| value.to_le_bytes()).collect();
    Invocation {
        request_id: RequestId::new(&format!("r{id}")).unwrap(),
        attempt: 1,
        attempts_left: 3,
        revision: RevisionKey { function, revision: Revision::FIRST },
        timeout: Duration::from_secs(60),
        inputs: vec![Tensor {
            name: "x".into(),
            datatype: "FP32".into(),
            shape: vec![1, 64],
            contents: Some(Contents::Inline(data.into())),
        }],
        descriptors: Vec::new(),
        outputs: Vec::new(),
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
#[allow(clippy::disallowed_methods, reason = "it measures wall-clock time")]
async fn measure_what_the_worker_adds() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, _controller) = serving_mlp(dir.path(), 1, &["mlp"]).await;
    let mut split = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for id in 0..WARM_UP + ROUNDS {
        let began = Instant::now();
        let completion = worker.node().invoke(invocation(id)).await.unwrap();
        if id >= WARM_UP {
            split.0.push(began.elapsed());
            split.1.push(completion.split.run);
            split.2.push(completion.split.total);
            split.3.push(completion.split.queue);
        }
    }
    percentiles("NodeHandle::invoke", split.0);
    percentiles("of it the model's own run", split.1);
    percentiles("of it on the worker's clock", split.2);
    percentiles("of that the queue", split.3);
    let mut through_service = Vec::new();
    let mut client = client(&worker);
    for id in 0..WARM_UP + ROUNDS {
        let began = Instant::now();
        invoke(&mut client, "mlp", id as u64, &row(1)).await.unwrap();
        if id >= WARM_UP {
            through_service.push(began.elapsed());
        }
    }
    percentiles("Worker service in process", through_service);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn measure_a_kill_until_it_is_reported() {
    let mut times = Vec::new();
    let mut port = crate::ports::Port::start();
    for _ in 0..30 {
        let pid = port.until_ready().await;
        let killed = monotonic_now();
        kill_9(pid);
        times.push(port.until_exited().await.since(killed));
    }
    percentiles("SIGKILL until PortEvent::Exited", times);
}
