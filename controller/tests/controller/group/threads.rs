//! The threads of a controller's process.

use std::sync::Arc;

use millrace_controller::{ControllerConfig, RaftRuntime, RunningController, StartError, Tcp};
use tokio::runtime::{Builder, Runtime};

/// One thread for requests, and the threads of Raft.
pub(crate) struct Threads {
    pub(crate) requests: Runtime,
    raft: RaftRuntime,
}

impl Threads {
    pub(crate) fn new() -> Self {
        let requests = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Self { requests, raft: RaftRuntime::start().unwrap() }
    }

    /// Starts a controller on these threads.
    pub(crate) async fn start(&self, config: &ControllerConfig) -> Result<RunningController, StartError> {
        let config = ControllerConfig { raft_runtime: Some(self.raft.handle()), ..config.clone() };
        self.requests.spawn(millrace_controller::start(config, Arc::new(Tcp))).await.unwrap()
    }

    /// Ends all tasks on these threads at any point.
    pub(crate) fn end(self) {
        self.requests.shutdown_background();
        drop(self.raft);
    }
}
