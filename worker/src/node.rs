//! What a node is made of, and how its actors are started.

use std::io;
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use millrace_policy::dispatch::PolicyConfig;
use millrace_policy::gpu::{Eviction, Isolation};
use millrace_policy::memory;
use millrace_types::topology::Topology;

pub use crate::actors::driven::SharedTrace;
use crate::clock::{Clock, MonotonicClock};
use crate::handle::NodeHandle;
use crate::port::Spawner;
use crate::supervisor::Supervisor;

/// Requests the worker holds at one time, counting those on GPUs: the permits of
/// [`crate::handle::NodeHandle`].
pub const REQUESTS_MAX: u32 = 4096;
/// Requests that one function may have in flight.
pub const IN_FLIGHT_MAX: u32 = 2048;

/// What a node is.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Its GPUs and links.
    pub topology: Topology,
    /// Requests it holds at one time, waiting and running.
    pub requests_max: u32,
    /// Requests that one function may have in flight.
    pub in_flight_max: u32,
    /// Which request goes to which GPU.
    pub dispatch: PolicyConfig,
    /// Which models make room first.
    pub eviction: Eviction,
    /// Which models share an executor.
    pub isolation: Isolation,
    /// How its GPUs' memory is cut up.
    pub memory: memory::Grid,
}

impl NodeConfig {
    /// A node with these GPUs and the default limits.
    #[must_use]
    pub fn new(topology: Topology) -> Self {
        let (dispatch, eviction) = (PolicyConfig::default(), Eviction::default());
        let isolation = Isolation::default();
        let (requests_max, in_flight_max) = (REQUESTS_MAX, IN_FLIGHT_MAX);
        let memory = memory::Grid::default();
        Self { topology, requests_max, in_flight_max, dispatch, eviction, isolation, memory }
    }
}

/// The world a node lives in: everything that differs between production and simulation.
pub struct NodeContext {
    /// Time.
    pub(crate) clock: Arc<dyn Clock>,
    /// Spreads restarts.
    pub(crate) seed: u64,
    /// Makes executors.
    pub(crate) spawner: Box<dyn Spawner>,
    /// Where what the cores do is folded, if anywhere.
    pub(crate) trace: Option<SharedTrace>,
}

impl NodeContext {
    /// A node on the machine's own clock.
    #[must_use]
    pub fn new(seed: u64, spawner: Box<dyn Spawner>) -> Self {
        Self { clock: Arc::new(MonotonicClock), seed, spawner, trace: None }
    }

    /// The same on another clock.
    #[must_use]
    pub fn with_clock(self, clock: Arc<dyn Clock>) -> Self {
        Self { clock, ..self }
    }

    /// The same, with what the cores do folded into `trace`.
    #[must_use]
    pub fn with_trace(self, trace: SharedTrace) -> Self {
        Self { trace: Some(trace), ..self }
    }
}

/// Starts a node's actors on a thread of their own, `node-actors`. The thread ends after
/// [`NodeHandle::drain`].
///
/// # Errors
/// When the thread cannot be started.
pub fn start(config: NodeConfig, context: NodeContext) -> io::Result<(NodeHandle, JoinHandle<()>)> {
    let (started, handle) = mpsc::channel();
    let actors = move || {
        actix::System::new().block_on(async move {
            let (handle, ended) = Supervisor::start(config, context);
            // Whoever started the node waits for this, and it ends with the actors either way.
            started.send(handle).unwrap_or_default();
            ended.await.unwrap_or_default();
        });
    };
    let thread = thread::Builder::new().name("node-actors".to_owned()).spawn(actors)?;
    let handle = handle.recv().map_err(io::Error::other)?;
    Ok((handle, thread))
}

/// Starts a node's actors on this thread, which must be running an actix system: how a simulation
/// has them in its own time.
#[must_use]
pub fn start_here(config: NodeConfig, context: NodeContext) -> NodeHandle {
    Supervisor::start(config, context).0
}
