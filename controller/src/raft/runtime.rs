//! The runtime of Raft: separate threads, so that requests cannot delay Raft. A request that blocks a
//! thread for half a second would otherwise delay heartbeats for so long that another controller is
//! elected.
//!
//! These threads run openraft with all timers, the proposer, elections, the connections to the other
//! controllers, and the internal port, a single server for Raft and the workers' streams. Client
//! requests, the admin API and the leader's duties stay in the caller's runtime.
//!
//! Simulations use one runtime for everything, because a paused clock must pause Raft too.

use std::io;

use tokio::runtime::{Builder, EnterGuard, Handle, Runtime};
use tokio::task::JoinHandle;
use tokio_util::context::TokioContext;

/// Raft's threads: while a thread decodes a long message, the other sends heartbeats.
const THREADS: usize = 2;

/// A runtime that runs only Raft. Dropping the runtime cancels the tasks at any point, so shut the
/// controller down first.
#[derive(Debug)]
pub struct RaftRuntime {
    handle: Handle,
    /// The runtime; `None` after the drop.
    runtime: Option<Runtime>,
}

impl RaftRuntime {
    /// Starts the threads.
    ///
    /// # Errors
    /// The operating system cannot start the threads.
    pub fn start() -> io::Result<Self> {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(THREADS).thread_name("raft").enable_all().build()?;
        Ok(Self { handle: runtime.handle().clone(), runtime: Some(runtime) })
    }

    /// Returns the handle for
    /// [`ControllerConfig::raft_runtime`](crate::ControllerConfig::raft_runtime).
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for RaftRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Shut down without waiting: the drop may happen within another runtime, where blocking
            // panics.
            runtime.shutdown_background();
        }
    }
}

/// A handle that spawns tasks in Raft's runtime.
#[derive(Debug, Clone)]
pub(crate) struct RaftSpawner(Handle);

impl RaftSpawner {
    /// Returns a spawner for this runtime, or for the caller's runtime if there is none.
    pub(crate) fn new(runtime: Option<Handle>) -> Self {
        Self(runtime.unwrap_or_else(Handle::current))
    }

    /// Returns a spawner for the caller's runtime.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn current() -> Self {
        Self::new(None)
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.0
    }

    pub(crate) fn spawn<F>(&self, task: F) -> JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        self.0.spawn(task)
    }

    /// Makes Raft's runtime current while the guard is held: tasks, sockets and timers belong to that
    /// runtime.
    pub(crate) fn enter(&self) -> EnterGuard<'_> {
        self.0.enter()
    }

    /// Runs a future in the caller's task, with spawned tasks and sockets in Raft's runtime.
    pub(crate) fn within<F: Future>(&self, work: F) -> TokioContext<F> {
        TokioContext::new(work, self.0.clone())
    }
}
