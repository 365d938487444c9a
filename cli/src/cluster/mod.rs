//! A cluster inside this process: one controller, and workers whose service the controller's
//! gateway calls without a socket. Executors still run as separate processes.

mod connector;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt as _};
use millrace_client::{Address, Admin, Endpoints};
use millrace_controller::{ControllerConfig, RaftRuntime, RunningController};
use millrace_types::NodeName;
use millrace_worker::start::{RunningWorker, WorkerConfig};

use crate::cluster::connector::{InProcessConnector, ServiceSlots};
use crate::failure::CommandFailure;
use crate::private;
use crate::process::controller::{halted, raft_runtime};
use crate::readiness::{self, ExpectedCluster};

/// The largest number of workers of an `up`.
pub(crate) const WORKERS_MAX: u32 = 64;

/// The servers to start.
#[derive(Debug)]
pub(crate) struct LocalClusterPlan {
    /// The configuration of the controller. The cluster sets the runtime of Raft.
    pub(crate) controller: ControllerConfig,
    /// The configuration of each worker. The cluster sets the address of the controller.
    pub(crate) workers: Vec<WorkerConfig>,
}

/// A running cluster. Dropping the cluster ends all parts at once, executors included.
pub(crate) struct InProcessCluster {
    controller: RunningController,
    workers: Vec<RunningWorker>,
    /// The runtime of Raft. The field comes after `controller`, so the runtime is dropped later.
    _raft: RaftRuntime,
}

impl InProcessCluster {
    /// Starts the cluster and returns once every GPU is up.
    pub(crate) async fn start(plan: LocalClusterPlan) -> Result<Self, CommandFailure> {
        let names: Vec<_> = plan.workers.iter().map(|worker| worker.node.clone()).collect();
        let (neighbours, places) = InProcessConnector::of(&names);
        let raft = raft_runtime()?;
        let config = ControllerConfig { raft_runtime: Some(raft.handle()), ..plan.controller };
        private::tighten(&config.data_dir)?;
        let controller = millrace_controller::start(config, Arc::new(neighbours))
            .await
            .map_err(|error| CommandFailure::failed(format!("controller: {error}")))?;
        let expected = ExpectedCluster::nodes(plan.workers.len());
        let workers = start_workers(plan.workers, places, controller.internal_addr()).await?;
        let address: Address = reachable(controller.client_addr())
            .to_string()
            .parse()
            .map_err(|error| CommandFailure::failed(format!("{error}")))?;
        let admin = Admin::new(Endpoints::new(vec![address])?);
        let cluster = Self { controller, workers, _raft: raft };
        readiness::reached(&[admin], expected, readiness::TIMEOUT).await?;
        Ok(cluster)
    }

    /// Returns the address for clients.
    pub(crate) fn client_addr(&self) -> SocketAddr {
        self.controller.client_addr()
    }

    /// Returns the address for workers and controllers.
    pub(crate) fn internal_addr(&self) -> SocketAddr {
        self.controller.internal_addr()
    }

    /// Returns the address of each worker's service.
    pub(crate) fn worker_addrs(&self) -> Vec<SocketAddr> {
        self.workers.iter().map(RunningWorker::addr).collect()
    }

    /// Returns the id of the cluster.
    pub(crate) fn id(&self) -> String {
        self.controller.cluster_id().to_string()
    }

    /// Waits for a fatal failure of the controller or a worker, and returns it.
    pub(crate) async fn failed(&mut self) -> CommandFailure {
        let mut failures: FuturesUnordered<_> = self.workers.iter_mut().map(RunningWorker::failed).collect();
        tokio::select! {
            error = self.controller.failed() => halted(&error),
            // `next` is never `None`, because the cluster has at least one worker.
            Some(error) = failures.next() => CommandFailure::failed(format!("worker: {error}")),
        }
    }

    /// Refuses new requests, allows running requests up to `grace`, and stops everything. Returns
    /// when no executor is left.
    pub(crate) async fn shutdown(mut self, grace: Duration) {
        let cut = self.controller.close_client_port(grace).await;
        if cut > 0 {
            tracing::warn!(
                connections = cut,
                "cut connections at the end of the grace period: set a longer --grace"
            );
        }
        // Stop the workers before the controller, so that no worker searches for a controller.
        for worker in self.workers {
            worker.shutdown().await;
        }
        self.controller.shutdown(Duration::ZERO).await;
    }
}

async fn start_workers(
    configs: Vec<WorkerConfig>,
    places: ServiceSlots,
    controller: SocketAddr,
) -> Result<Vec<RunningWorker>, CommandFailure> {
    let mut workers = Vec::with_capacity(configs.len());
    for config in configs {
        private::tighten(&config.data_dir)?;
        let name = config.node.clone();
        let config = WorkerConfig { controllers: vec![reachable(controller).to_string()], ..config };
        let worker = millrace_worker::start::start(config)
            .await
            .map_err(|error| CommandFailure::failed(format!("{name}: {error}")))?;
        places.settle(&name, worker.service());
        workers.push(worker);
    }
    Ok(workers)
}

pub(crate) fn names(workers: NonZeroU32) -> Result<Vec<NodeName>, CommandFailure> {
    let name = |number| {
        NodeName::new(&format!("worker-{number}")).map_err(|error| CommandFailure::usage(error.to_string()))
    };
    (1..=workers.get()).map(name).collect()
}

/// Returns the address `index` ports further, or the same address if the port is 0.
pub(crate) fn nth(first: SocketAddr, index: u16) -> Result<SocketAddr, CommandFailure> {
    let port = match first.port() {
        0 => Some(0),
        port => port.checked_add(index),
    };
    let port = port.ok_or_else(|| {
        CommandFailure::usage(format!("there are too few ports after {first}"))
            .hint("use a lower port, or port 0")
    })?;
    Ok(SocketAddr::new(first.ip(), port))
}

/// Returns an address to connect to: a listener on all addresses of the machine is reached through
/// loopback.
pub(crate) fn reachable(listens: SocketAddr) -> SocketAddr {
    let ip = match listens {
        SocketAddr::V4(at) if at.ip().is_unspecified() => std::net::Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(at) if at.ip().is_unspecified() => std::net::Ipv6Addr::LOCALHOST.into(),
        other => other.ip(),
    };
    SocketAddr::new(ip, listens.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_listen_on_consecutive_ports() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(nth(at("127.0.0.1:7080"), 2), Ok(at("127.0.0.1:7082")));
        assert_eq!(nth(at("127.0.0.1:0"), 2), Ok(at("127.0.0.1:0")));
        assert!(nth(at("127.0.0.1:65535"), 1).is_err());
    }

    #[test]
    fn a_listener_on_all_addresses_is_reached_through_loopback() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(reachable(at("0.0.0.0:1")), at("127.0.0.1:1"));
        assert_eq!(reachable(at("[::]:1")), at("[::1]:1"));
        assert_eq!(reachable(at("10.0.0.1:1")), at("10.0.0.1:1"));
    }
}
