//! A cluster inside this process: one controller, and workers whose service the controller's
//! gateway calls without a socket. Executors still run as separate processes.

mod connector;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt as _};
use millrace_client::{Address, Admin, Endpoints};
use millrace_controller::{ControllerConfig, ObjectStoreUrl, RaftRuntime, RunningController};
use millrace_proto::trace::SpanRing;
use millrace_transport::PortLimits;
use millrace_types::policy::PresetName;
use millrace_types::topology::Topology;
use millrace_types::{Bytes, NodeName};
use millrace_worker::process_port::ExecutorCommand;
use millrace_worker::service::{InjectedFaults, ServiceLimits};
use millrace_worker::start::{
    DataConfig, ExecutorDevice, ExecutorEngine, ExecutorIsolation, LookupOrder, ProgramLauncher,
    RunningWorker, SchedulingPolicy, WorkerConfig,
};

use crate::cluster::connector::{InProcessConnector, ServiceSlots};
use crate::failure::CommandFailure;
use crate::private;
use crate::process::controller::{halted, inspection, raft_runtime};
use crate::process::{executor_threads, seed};
use crate::readiness::{self, ExpectedCluster};

/// The largest number of workers of an `up`.
pub(crate) const WORKERS_MAX: u32 = 64;

/// The configuration of the cluster to start.
#[derive(Debug, Clone)]
pub(crate) struct LocalClusterPlan {
    /// The data directory. Each part has a folder in it.
    pub(crate) data_dir: PathBuf,
    /// The listen address for clients.
    pub(crate) client: SocketAddr,
    /// The listen address for workers and controllers.
    pub(crate) internal: SocketAddr,
    /// The listen address of the first worker's service. The other workers use the next ports, or
    /// free ports if this is port 0.
    pub(crate) worker: SocketAddr,
    /// The number of workers.
    pub(crate) workers: NonZeroU32,
    /// The GPUs and links of each worker.
    pub(crate) topology: Topology,
    /// The host memory limit of a worker's models.
    pub(crate) host_memory: Bytes,
    /// The host memory limit of a worker's objects.
    pub(crate) object_memory: Bytes,
    /// The storage of objects on each worker's GPUs.
    pub(crate) gpu_data: DataConfig,
    /// The disk limit of the models that a worker accepts.
    pub(crate) model_storage: Bytes,
    /// The scheduling preset until an operator sets a policy.
    pub(crate) preset: Option<PresetName>,
    /// The models that share an executor process.
    pub(crate) isolation: ExecutorIsolation,
    pub(crate) engine: ExecutorEngine,
    pub(crate) device: ExecutorDevice,
    /// The launcher of users' programs, if workers may run programs.
    pub(crate) programs: Option<ProgramLauncher>,
    /// Whether tests may inject faults.
    pub(crate) faults: InjectedFaults,
    /// Whether the cluster serves every client that can connect.
    pub(crate) insecure: bool,
    /// The connection limits of the client port, the internal port and each worker's port.
    pub(crate) ports: [PortLimits; 3],
    /// The names by which clients may address the cluster, besides localhost and its address.
    pub(crate) host_names: Vec<String>,
    /// The storage for model files. `None` is the controller's own disk.
    pub(crate) artifacts: Option<ObjectStoreUrl>,
    /// The store of kept spans, if the process keeps spans.
    pub(crate) kept: Option<SpanRing>,
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
        let names = names(plan.workers)?;
        let (neighbours, places) = InProcessConnector::of(&names);
        let [client, internal, _worker] = plan.ports;
        let raft = raft_runtime()?;
        let defaults = ControllerConfig::new(plan.data_dir.join("controller"), seed()?);
        let config = ControllerConfig {
            limits: millrace_controller::config::ControllerLimits { client, internal, ..defaults.limits },
            client_listen: plan.client,
            internal_listen: plan.internal,
            allow_faults: plan.faults == InjectedFaults::Obey,
            insecure: plan.insecure,
            preset: plan.preset,
            host_names: plan.host_names.clone(),
            artifacts: plan.artifacts.clone(),
            inspection: inspection()?,
            kept: plan.kept.clone(),
            raft_runtime: Some(raft.handle()),
            ..defaults
        };
        private::tighten(&config.data_dir)?;
        let controller = millrace_controller::start(config, std::sync::Arc::new(neighbours))
            .await
            .map_err(|error| CommandFailure::failed(format!("controller: {error}")))?;
        let workers = start_workers(&plan, names, places, controller.internal_addr()).await?;
        let address: Address = reachable(controller.client_addr())
            .to_string()
            .parse()
            .map_err(|error| CommandFailure::failed(format!("{error}")))?;
        let admin = Admin::new(Endpoints::new(vec![address])?);
        let cluster = Self { controller, workers, _raft: raft };
        readiness::reached(&[admin], ExpectedCluster::nodes(plan.workers), readiness::TIMEOUT).await?;
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
    plan: &LocalClusterPlan,
    names: Vec<NodeName>,
    places: ServiceSlots,
    controller: SocketAddr,
) -> Result<Vec<RunningWorker>, CommandFailure> {
    let [_client, _internal, port] = plan.ports;
    let mut workers = Vec::with_capacity(names.len());
    for (index, name) in (0u16..).zip(names) {
        private::tighten(&plan.data_dir.join(name.as_str()))?;
        let config = WorkerConfig {
            data_dir: plan.data_dir.join(name.as_str()),
            listen: nth(plan.worker, index)?,
            advertise: None,
            controllers: vec![reachable(controller).to_string()],
            topology: plan.topology.clone(),
            host_memory: plan.host_memory,
            object_memory: plan.object_memory,
            gpu_data: plan.gpu_data,
            model_storage: plan.model_storage,
            policy: SchedulingPolicy::default(),
            isolation: plan.isolation,
            engine: plan.engine,
            device: plan.device.clone(),
            lookup: LookupOrder::default(),
            executor: ExecutorCommand::this_program()
                .map_err(|error| CommandFailure::failed(format!("cannot find this program: {error}")))?,
            executor_threads: executor_threads(plan.topology.gpus.len() * plan.workers.get() as usize)?,
            programs: plan.programs.clone(),
            faults: plan.faults,
            seed: seed()?,
            limits: ServiceLimits { port, ..ServiceLimits::default() },
            kept: plan.kept.clone(),
            node: name.clone(),
        };
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
