//! Where Raft runs: threads of its own, so that requests cannot delay it. A request that keeps a thread for half
//! a second would otherwise hold heartbeats up for so long that another controller is elected.
//!
//! Raft's threads carry out openraft and its timers, the proposer, elections, the connections to the other
//! controllers, and the internal port, which is one server for Raft and for the workers' streams. Requests of
//! clients, the admin API and the leader's duties stay in the caller's runtime.
//!
//! In simulations all of it is one runtime: time that is paused there is paused for Raft too.

use std::io;

use tokio::runtime::{Builder, EnterGuard, Handle, Runtime};
use tokio::task::JoinHandle;
use tokio_util::context::TokioContext;

/// Raft's threads: while one decodes a long message, heartbeats go on in the other.
const THREADS: usize = 2;

/// A runtime that carries out Raft and nothing else. Dropping it ends what runs there wherever that is: shut
/// the controller down first.
#[derive(Debug)]
pub struct RaftRuntime {
    handle: Handle,
    /// Until it is dropped.
    runtime: Option<Runtime>,
}

impl RaftRuntime {
    /// Starts the threads.
    ///
    /// # Errors
    /// When the operating system gives no threads.
    pub fn start() -> io::Result<Self> {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(THREADS).thread_name("raft").enable_all().build()?;
        Ok(Self { handle: runtime.handle().clone(), runtime: Some(runtime) })
    }

    /// What a controller is given.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }
}

impl Drop for RaftRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waits for nothing: it may be dropped within a runtime, where nothing may be waited for.
            runtime.shutdown_background();
        }
    }
}

/// The way into the runtime in which Raft runs.
#[derive(Debug, Clone)]
pub(crate) struct RaftSpawner(Handle);

impl RaftSpawner {
    /// Of this runtime, or of the caller's where there is none.
    pub(crate) fn new(runtime: Option<Handle>) -> Self {
        Self(runtime.unwrap_or_else(Handle::current))
    }

    /// Of the caller's runtime.
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

    /// What is spawned, and what sockets and timers are made, while the guard is held, are the runtime's.
    pub(crate) fn enter(&self) -> EnterGuard<'_> {
        self.0.enter()
    }

    /// Carries something out here; what it spawns and the sockets it opens are the runtime's.
    pub(crate) fn within<F: Future>(&self, work: F) -> TokioContext<F> {
        TokioContext::new(work, self.0.clone())
    }
}
