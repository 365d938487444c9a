//! A small fake server of the admin and inference APIs. Functions lie in a map, two to a page. A
//! function is ready at the third read, except `never` and `broken`, which never become ready. A
//! workflow is ready at once.
//!
//! | model | behaviour |
//! |---|---|
//! | `echo`, `image` | returns its inputs, with a latency breakdown |
//! | `typed` | returns typed contents |
//! | `silent` | never answers |
//! | `full` | refuses every request |
//! | `stalls` | echoes one request at a time, and sleeps [`STALL`] in request number [`STALLED`] |
//! | `once` | behaves like `echo`, but is not idempotent |
//! | `counts` | echoes requests of sequences that have begun, and refuses others |
//! | `forgets` | behaves like `counts`, but loses every sequence before each [`FORGOTTEN`]th request |
//!
//! A server can be broken on purpose ([`FakeFault`]). It records the calls all the same.
#![allow(clippy::unwrap_used)]
#![allow(dead_code, reason = "each test binary uses its part")]

mod admin_api;
mod dry_run;
mod functions;
mod inference_api;
mod operations;
mod workflows;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use millrace_client::Address;
use millrace_cluster_state::ModelSummary;
use millrace_proto::admin::{self, admin_server};
use millrace_proto::inference::grpc_inference_service_server as inference_server;
use millrace_proto::status::to_status;
use millrace_types::{Digest, Failure, Reason};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::Status;

/// The time that model `stalls` sleeps.
pub(crate) const STALL: Duration = Duration::from_millis(300);
/// The request at which model `stalls` sleeps.
pub(crate) const STALLED: usize = 20;
/// The interval in requests at which `forgets` loses its sequences.
pub(crate) const FORGOTTEN: usize = 7;
/// The number of reads of a function until it is ready.
const LOOKS_UNTIL_READY: u64 = 3;

/// The way in which a server fails its calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FakeFault {
    /// The server dies under the next call, with every connection.
    Dies,
    /// The server answers this many calls with NO_LEADER.
    Unled(u32),
    /// The server refuses every call because it shuts down.
    GoesDown,
}

#[derive(Default)]
struct State {
    artifacts: Mutex<BTreeMap<String, u64>>,
    /// Models that dry runs described, by digest.
    models: Mutex<BTreeMap<Digest, ModelSummary>>,
    functions: Mutex<BTreeMap<String, admin::Function>>,
    workflows: Mutex<BTreeMap<String, admin::Workflow>>,
    quotas: Mutex<BTreeMap<String, admin::Quota>>,
    policy: Mutex<admin::Policy>,
    /// The cluster's events, returned two at a time.
    pub events: Mutex<Vec<admin::Event>>,
    /// The only trace that the server knows.
    pub trace: Mutex<Option<admin::Trace>>,
    pages: AtomicUsize,
    uploads: AtomicUsize,
    looks: Mutex<BTreeMap<String, u64>>,
    traceparents: Mutex<Vec<String>>,
    stalls_served: tokio::sync::Mutex<usize>,
    broken: Mutex<Option<FakeFault>>,
    ids: Mutex<Vec<String>>,
    sequences: Mutex<Sequences>,
    death: CancellationToken,
    status: Mutex<admin::ClusterStatus>,
    /// The node's desired scheduling, and the number of reads since it was set.
    scheduling: Mutex<(admin::NodeScheduling, u32)>,
}

/// The sequences of `counts` and `forgets`.
#[derive(Default)]
struct Sequences {
    begun: BTreeSet<i64>,
    /// The sequence of each request, and whether the request began and ended the sequence.
    asked: Vec<(i64, bool, bool)>,
}

impl State {
    /// Returns the node. A drain ends at the third read, unless a function `never` exists.
    fn node(&self) -> admin::Node {
        let (scheduling, looks) = *self.scheduling.lock().unwrap();
        let draining = scheduling == admin::NodeScheduling::Draining;
        let stays = self.functions.lock().unwrap().contains_key("never");
        let left = if draining && !stays { 3u32.saturating_sub(looks) } else { 2 };
        admin::Node { scheduling: scheduling.into(), placements: left, ..node() }
    }

    /// Records a call under its id, and fails the call if the server is broken.
    async fn enter(&self, id: &str) -> Result<(), Status> {
        self.ids.lock().unwrap().push(id.to_owned());
        let broken = *self.broken.lock().unwrap();
        match broken {
            None | Some(FakeFault::Unled(0)) => Ok(()),
            Some(FakeFault::Dies) => {
                self.death.cancel();
                std::future::pending().await
            }
            Some(FakeFault::Unled(times)) => {
                *self.broken.lock().unwrap() = Some(FakeFault::Unled(times - 1));
                refused(Reason::NoLeader, "no controller leads")
            }
            Some(FakeFault::GoesDown) => refused(Reason::ShuttingDown, "this server goes down"),
        }
    }
}

pub(crate) struct Fake {
    pub(crate) address: Address,
    state: Arc<State>,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.state.death.cancel();
    }
}

impl Fake {
    pub(crate) async fn start() -> Self {
        let state = Arc::new(State::default());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = address_of(&listener);
        let listener = listener.into_std().unwrap();
        let limit = 64 << 20;
        let router = tonic::transport::Server::builder()
            .add_service(admin_server::AdminServer::new(Service(state.clone())))
            .add_service(
                inference_server::GrpcInferenceServiceServer::new(Service(state.clone()))
                    .max_decoding_message_size(limit),
            );
        let death = state.death.clone();
        // Connections have tasks of their own, which end only with their runtime.
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = TcpListener::from_std(listener).unwrap();
                let served = router.serve_with_incoming(TcpListenerStream::new(listener));
                death.run_until_cancelled(served).await
            });
            runtime.shutdown_background();
        });
        Self { address, state }
    }

    /// Starts a server that fails its calls.
    pub(crate) async fn broken(how: FakeFault) -> Self {
        let fake = Self::start().await;
        *fake.state.broken.lock().unwrap() = Some(how);
        fake
    }

    /// Returns the ids and idempotency keys of the calls, in order.
    pub(crate) fn ids(&self) -> Vec<String> {
        self.state.ids.lock().unwrap().clone()
    }

    /// Returns the requests of `counts` and `forgets`: the sequence, and whether the request began
    /// and ended it.
    pub(crate) fn sequences_asked(&self) -> Vec<(i64, bool, bool)> {
        self.state.sequences.lock().unwrap().asked.clone()
    }

    /// Returns the number of sequences of `counts` and `forgets` that have begun.
    pub(crate) fn sequences(&self) -> usize {
        self.state.sequences.lock().unwrap().begun.len()
    }

    /// Sets the status of the controller group.
    pub(crate) fn set_status(&self, status: admin::ClusterStatus) {
        *self.state.status.lock().unwrap() = status;
    }

    pub(crate) fn pages_asked(&self) -> usize {
        self.state.pages.load(Ordering::Relaxed)
    }

    pub(crate) fn uploads(&self) -> usize {
        self.state.uploads.load(Ordering::Relaxed)
    }

    /// Returns the trace context of every inference that had one.
    pub(crate) fn traceparents(&self) -> Vec<String> {
        self.state.traceparents.lock().unwrap().clone()
    }

    pub(crate) fn function_names(&self) -> Vec<String> {
        self.state.functions.lock().unwrap().keys().cloned().collect()
    }
}

/// Returns an address on which nothing listens.
pub(crate) async fn dead_address() -> Address {
    address_of(&TcpListener::bind("127.0.0.1:0").await.unwrap())
}

/// Starts a server that reads a little of each connection and hangs up.
pub(crate) async fn hangs_up_in_the_middle() -> Address {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = address_of(&listener);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            // The preface and the settings, then at least the head of a request.
            let mut seen = 0;
            let mut buffer = [0; 4096];
            while seen < 100 {
                seen += socket.read(&mut buffer).await.unwrap();
            }
        }
    });
    address
}

fn address_of(listener: &TcpListener) -> Address {
    listener.local_addr().unwrap().to_string().parse().unwrap()
}

#[derive(Clone)]
struct Service(Arc<State>);

fn refused<T>(reason: Reason, message: &str) -> Result<T, Status> {
    Err(to_status(&Failure::new(reason, message)))
}

fn node() -> admin::Node {
    let model = admin::ResidentModel {
        functions: vec!["default/echo@1".into()],
        digest: format!("sha256:{}", "ab".repeat(32)),
        bytes: 64 << 20,
        loaded_bytes: 64 << 20,
        idle: Some(Duration::from_secs(5).try_into().unwrap()),
        executor_pid: 42,
    };
    let gpu = admin::Gpu {
        gpu_type: "emulated".into(),
        health: "Up".into(),
        memory_bytes: 1 << 30,
        used_bytes: 64 << 20,
        models: vec![model],
        executor_pid: 42,
        ..Default::default()
    };
    admin::Node {
        name: "node-0".into(),
        epoch: 1,
        address: "127.0.0.1:7080".into(),
        connected: true,
        topology: "a10x4".into(),
        gpus: vec![gpu],
        host_memory_bytes: 4 << 30,
        host_tier_bytes: 64 << 20,
        ..Default::default()
    }
}
