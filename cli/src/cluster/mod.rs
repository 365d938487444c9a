//! A cluster inside this process: one controller, and workers whose service the controller's
//! gateway calls without a socket. Executors are processes of their own all the same.

mod near;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt as _};
use millrace_client::{Address, Admin, Endpoints, messages as wire};
use millrace_controller::{Controller, ControllerConfig};
use millrace_types::topology::Topology;
use millrace_types::{Bytes, NodeName};
use millrace_worker::process_port::ExecutorCommand;
use millrace_worker::service::{Faults, Limits};
use millrace_worker::start::{Worker, WorkerConfig};

use crate::clock;
use crate::cluster::near::{Neighbours, Places};
use crate::failure::Failure;

/// How long a cluster may take until every GPU is up.
const READY_TIMEOUT: Duration = Duration::from_secs(30);
/// How often that is looked at.
const READY_PAUSE: Duration = Duration::from_millis(10);
/// The most workers of one process.
pub(crate) const WORKERS_MAX: u32 = 64;

/// What to start.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// Where everything is kept; each part has a folder in it.
    pub(crate) data_dir: PathBuf,
    /// Where clients connect.
    pub(crate) client: SocketAddr,
    /// Where workers and controllers connect.
    pub(crate) internal: SocketAddr,
    /// Where the first worker's service listens; the others take the ports after it, or free ones
    /// where this is port 0.
    pub(crate) worker: SocketAddr,
    /// How many workers.
    pub(crate) workers: NonZeroU32,
    /// Each worker's GPUs.
    pub(crate) topology: Topology,
    /// The most host memory that one worker's models may take.
    pub(crate) host_memory: Bytes,
    /// Whether faults may be injected.
    pub(crate) faults: Faults,
    /// Serves anyone who can connect.
    pub(crate) insecure: bool,
}

/// A running cluster. Dropped, it ends at once, executors included.
pub(crate) struct Cluster {
    controller: Controller,
    workers: Vec<Worker>,
    admin: Admin,
}

impl Cluster {
    /// Starts everything and returns once every GPU is up.
    pub(crate) async fn start(plan: Plan) -> Result<Self, Failure> {
        let names = names(plan.workers)?;
        let (neighbours, places) = Neighbours::of(&names);
        let config = ControllerConfig {
            client_listen: plan.client,
            internal_listen: plan.internal,
            allow_faults: plan.faults == Faults::Obey,
            insecure: plan.insecure,
            ..ControllerConfig::new(plan.data_dir.join("controller"), seed()?)
        };
        let controller = millrace_controller::start(config, std::sync::Arc::new(neighbours))
            .await
            .map_err(|error| Failure::failed(format!("controller: {error}")))?;
        let workers = start_workers(&plan, names, places, controller.internal_addr()).await?;
        let address: Address = reachable(controller.client_addr())
            .to_string()
            .parse()
            .map_err(|error| Failure::failed(format!("{error}")))?;
        let admin = Admin::new(Endpoints::new(vec![address])?);
        let cluster = Self { controller, workers, admin };
        cluster.wait_until_up().await?;
        Ok(cluster)
    }

    /// Where clients connect.
    pub(crate) fn client_addr(&self) -> SocketAddr {
        self.controller.client_addr()
    }

    /// Where workers and controllers connect.
    pub(crate) fn internal_addr(&self) -> SocketAddr {
        self.controller.internal_addr()
    }

    /// Where each worker's service listens.
    pub(crate) fn worker_addrs(&self) -> Vec<SocketAddr> {
        self.workers.iter().map(Worker::addr).collect()
    }

    /// The cluster's name.
    pub(crate) fn id(&self) -> String {
        self.controller.cluster_id().to_string()
    }

    async fn wait_until_up(&self) -> Result<(), Failure> {
        let deadline = clock::now() + READY_TIMEOUT;
        loop {
            let nodes = self.admin.nodes().await?;
            match missing(&nodes, self.workers.len()) {
                None => return Ok(()),
                Some(what) if clock::now() >= deadline => {
                    return Err(Failure::timed_out(format!("the cluster is not up: {what}"))
                        .hint("the log says why: add --log info"));
                }
                Some(_) => tokio::time::sleep(READY_PAUSE).await,
            }
        }
    }

    /// Waits for something after which the cluster cannot go on, and says what.
    pub(crate) async fn failed(&mut self) -> Failure {
        let mut failures: FuturesUnordered<_> = self.workers.iter_mut().map(Worker::failed).collect();
        match failures.next().await {
            Some(error) => Failure::failed(format!("worker: {error}")),
            // There is at least one worker.
            None => std::future::pending().await,
        }
    }

    /// Takes no more requests, gives those under way up to `grace`, and stops everything. Returns
    /// when no executor is left.
    pub(crate) async fn shutdown(mut self, grace: Duration) {
        let cut = self.controller.drain(grace).await;
        if cut > 0 {
            tracing::warn!(connections = cut, "connections were cut short: --grace gives them longer");
        }
        // Workers before their controller: none is left looking for one.
        for worker in self.workers {
            worker.shutdown().await;
        }
        self.controller.shutdown(Duration::ZERO).await;
    }
}

async fn start_workers(
    plan: &Plan,
    names: Vec<NodeName>,
    places: Places,
    controller: SocketAddr,
) -> Result<Vec<Worker>, Failure> {
    let mut workers = Vec::with_capacity(names.len());
    for (index, name) in (0u16..).zip(names) {
        let config = WorkerConfig {
            data_dir: plan.data_dir.join(name.as_str()),
            listen: nth(plan.worker, index)?,
            advertise: None,
            controllers: vec![reachable(controller).to_string()],
            topology: plan.topology.clone(),
            host_memory: plan.host_memory,
            executor: ExecutorCommand::this_program()
                .map_err(|error| Failure::failed(format!("cannot find this program: {error}")))?,
            executor_threads: threads(plan)?,
            faults: plan.faults,
            seed: seed()?,
            limits: Limits::default(),
            node: name.clone(),
        };
        let worker = millrace_worker::start::start(config)
            .await
            .map_err(|error| Failure::failed(format!("{name}: {error}")))?;
        places.settle(&name, worker.service());
        workers.push(worker);
    }
    Ok(workers)
}

fn names(workers: NonZeroU32) -> Result<Vec<NodeName>, Failure> {
    let name = |number| {
        NodeName::new(&format!("worker-{number}")).map_err(|error| Failure::usage(error.to_string()))
    };
    (1..=workers.get()).map(name).collect()
}

/// The address `index` ports further, or the same where the port is 0.
fn nth(first: SocketAddr, index: u16) -> Result<SocketAddr, Failure> {
    let port = match first.port() {
        0 => Some(0),
        port => port.checked_add(index),
    };
    let port = port.ok_or_else(|| {
        Failure::usage(format!("there are not enough ports after {first} for every worker"))
            .hint("give a lower port with --worker-listen, or port 0")
    })?;
    Ok(SocketAddr::new(first.ip(), port))
}

/// An address to connect to: a listener at every address of a machine is reached through loopback.
fn reachable(listens: SocketAddr) -> SocketAddr {
    let ip = match listens {
        SocketAddr::V4(at) if at.ip().is_unspecified() => std::net::Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(at) if at.ip().is_unspecified() => std::net::Ipv6Addr::LOCALHOST.into(),
        other => other.ip(),
    };
    SocketAddr::new(ip, listens.port())
}

/// Threads for each executor's launches: the machine's cores shared out, at least one each.
fn threads(plan: &Plan) -> Result<u32, Failure> {
    let cores = std::thread::available_parallelism()
        .map_err(|error| Failure::failed(format!("cannot count this machine's cores: {error}")))?;
    let executors = plan.topology.gpus.len().max(1) * plan.workers.get() as usize;
    Ok(u32::try_from(cores.get() / executors).unwrap_or(u32::MAX).max(1))
}

fn seed() -> Result<u64, Failure> {
    getrandom::u64().map_err(|error| Failure::failed(format!("no randomness from the system: {error}")))
}

/// What is still missing before the cluster is up.
fn missing(nodes: &[wire::Node], expected: usize) -> Option<String> {
    let connected = nodes.iter().filter(|node| node.connected).count();
    if connected < expected {
        return Some(format!("{connected} of {expected} workers are connected"));
    }
    let gpus = || nodes.iter().flat_map(|node| &node.gpus);
    let up = gpus().filter(|gpu| gpu.health == "Up").count();
    let all = gpus().count();
    (all == 0 || up < all).then(|| format!("{up} of {all} GPUs are up"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_listen_side_by_side() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(nth(at("127.0.0.1:7080"), 2), Ok(at("127.0.0.1:7082")));
        assert_eq!(nth(at("127.0.0.1:0"), 2), Ok(at("127.0.0.1:0")));
        assert!(nth(at("127.0.0.1:65535"), 1).is_err());
    }

    #[test]
    fn a_listener_everywhere_is_reached_through_loopback() {
        let at = |text: &str| text.parse::<SocketAddr>().unwrap();
        assert_eq!(reachable(at("0.0.0.0:1")), at("127.0.0.1:1"));
        assert_eq!(reachable(at("[::]:1")), at("[::1]:1"));
        assert_eq!(reachable(at("10.0.0.1:1")), at("10.0.0.1:1"));
    }

    #[test]
    fn a_cluster_is_up_when_every_gpu_is() {
        let gpu = |health: &str| wire::Gpu { health: health.into(), ..Default::default() };
        let node = |gpus: Vec<wire::Gpu>| wire::Node { connected: true, gpus, ..Default::default() };
        assert_eq!(missing(&[], 1).unwrap(), "0 of 1 workers are connected");
        assert_eq!(missing(&[node(vec![])], 1).unwrap(), "0 of 0 GPUs are up");
        let starting = [node(vec![gpu("Up"), gpu("Starting")])];
        assert_eq!(missing(&starting, 1).unwrap(), "1 of 2 GPUs are up");
        assert_eq!(missing(&[node(vec![gpu("Up")])], 1), None);
    }
}
