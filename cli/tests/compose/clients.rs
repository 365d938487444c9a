//! SDK clients that send requests continuously, and check every response.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use bytes::Bytes;
use millrace_client::{Endpoints, InferRequest, Inference, Tensor};
use millrace_types::DataType;
use tokio::task::JoinSet;

use crate::engine::eventually;

/// The number of requests in flight at any time.
const CLIENTS: usize = 4;
/// The number of failures kept per client. The first failure has the cause.
const FAILURES_MAX: usize = 5;
const TIMEOUT: Duration = Duration::from_secs(30);

/// Running clients, until [`Clients::stop`].
pub(crate) struct Clients {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    done: AtomicBool,
    answered: AtomicUsize,
    failures: Mutex<Vec<String>>,
}

impl Clients {
    pub(crate) fn start(endpoints: &str) -> Self {
        let shared = Arc::new(Shared::default());
        let addresses = endpoints.split(',').map(|it| it.parse().unwrap()).collect();
        let sends = shared.clone();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let inference = Inference::new(Endpoints::new(addresses).unwrap());
                let clients = (0..CLIENTS).map(|number| send(inference.clone(), sends.clone(), number));
                clients.collect::<JoinSet<()>>().join_all().await;
            });
        });
        Self { shared, thread }
    }

    /// Waits for a number of further responses.
    pub(crate) fn answered_more(&self, wanted: usize) {
        let before = self.shared.answered.load(Ordering::Relaxed);
        eventually("requests are answered again", || {
            self.shared.answered.load(Ordering::Relaxed) >= before + wanted
        });
    }

    /// Stops the clients. Returns the number of responses, and the failures.
    pub(crate) fn stop(self) -> (usize, Vec<String>) {
        self.shared.done.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        let failures = std::mem::take(&mut *self.shared.failures.lock().unwrap());
        (self.shared.answered.load(Ordering::Relaxed), failures)
    }
}

/// Runs a client, which sends the same picture repeatedly and expects equal responses.
async fn send(inference: Inference, shared: Arc<Shared>, number: usize) {
    let ink: Vec<u8> = (0..64_u8).flat_map(|pixel| (f32::from(pixel % 16) / 16.0).to_le_bytes()).collect();
    let image = Tensor::new("image", DataType::Fp32, vec![1, 1, 8, 8], Bytes::from(ink)).unwrap();
    let mut first = None;
    let mut failed = 0;
    while !shared.done.load(Ordering::Relaxed) && failed < FAILURES_MAX {
        let request = InferRequest { timeout: TIMEOUT, ..InferRequest::new("digits", vec![image.clone()]) };
        let failure = match inference.infer(request).await {
            Ok(answer) if *first.get_or_insert(answer.outputs.clone()) == answer.outputs => {
                shared.answered.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            Ok(answer) => format!("client {number}: a different answer than before: {:?}", answer.outputs),
            Err(error) => format!("client {number}: {error} ({:?})", error.reason()),
        };
        failed += 1;
        shared.failures.lock().unwrap().push(failure);
    }
}
