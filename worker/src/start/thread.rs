//! The thread of the actors: its start and its end.

use std::thread::JoinHandle;

use tokio::sync::{oneshot, watch};

use super::config::{StartError, WorkerConfig};
use crate::handle::NodeHandle;
use crate::node::{self, NodeConfig, NodeContext};
use crate::process_port::ProcessSpawner;
use crate::service::InjectedFaults;

/// The thread of the actors. This thread is also the parent of every executor process.
#[derive(Debug)]
pub(super) struct ActorThread {
    stop: Option<oneshot::Sender<()>>,
    ended: watch::Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl ActorThread {
    pub(super) async fn start(config: &WorkerConfig) -> Result<(Self, NodeHandle), StartError> {
        let isolation = config.isolation;
        let data = config.gpu_data;
        let base = NodeConfig::new(config.topology.clone()).with_policy(config.policy);
        let block = config.device.block();
        let shareable = matches!(config.device, crate::process_port::ExecutorDevice::Emulated);
        let node_config = NodeConfig { isolation, data, block, shareable, ..base };
        let allow_faults = config.faults == InjectedFaults::Obey;
        let spawner = ProcessSpawner::new(
            config.executor.clone(),
            &config.topology,
            config.executor_threads,
            allow_faults,
        )
        .with_isolation(isolation)
        .with_engine(config.engine)
        .with_device(config.device.clone());
        let context = NodeContext::new(config.seed, Box::new(spawner));
        let (started, handle) = oneshot::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let (alive, ended) = watch::channel(());
        let run = move || {
            let _alive = alive;
            actix_rt::System::new().block_on(async move {
                // The send fails only if the start itself was dropped, and `stop` with it.
                drop(started.send(node::start_here(node_config, context)));
                drop(stopped.await);
            });
        };
        let thread =
            std::thread::Builder::new().name("node-actors".into()).spawn(run).map_err(StartError::Thread)?;
        let actors = Self { stop: Some(stop), ended, thread: Some(thread) };
        let node = handle.await.map_err(|_| StartError::Actors)?;
        Ok((actors, node))
    }

    /// Returns when the thread has ended, after [`Self::stop`] or by itself.
    pub(super) async fn ended(&mut self) {
        // Nothing is ever sent: an error means that the sender was dropped.
        while self.ended.changed().await.is_ok() {}
    }

    pub(super) async fn stop(mut self) {
        self.stop = None;
        self.ended().await;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the actor thread panicked");
        }
    }
}
