//! The state of a cluster: controllers and workers, with addresses and folders.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use millrace_client::{Address, Admin, Endpoints};
use tokio::task::JoinHandle;

use super::caps::ConnectionCaps;
use super::cluster_process::ClusterProcess;
use super::ground::placement::ProcessPlacement;
use super::ground::{GroundConfig, RunningGround};
use super::plan::{FaultInjection, LinkMode};
use super::process::{LaunchSpec, RunningProcess};
use crate::hostile::{PortKind, ServerPort};
use crate::proxy::{LinkParty, ProxyListener, ProxyNetwork};
use crate::timeline::Timeline;

/// A cluster. The processes end when the value is dropped.
pub struct TestCluster {
    pub(super) program: PathBuf,
    pub(super) root: PathBuf,
    pub(super) timeline: Timeline,
    /// The cuts between parties, which proxies or the ground apply.
    pub(super) network: ProxyNetwork,
    pub(super) links: LinkMode,
    pub(super) injection: FaultInjection,
    /// The arguments of every worker.
    pub(super) worker_words: Vec<String>,
    pub(super) preset: Option<String>,
    pub(super) caps: Option<ConnectionCaps>,
    /// The soft limit of descriptors of each process.
    pub(super) descriptors: Option<u64>,
    pub(super) controllers: BTreeMap<u64, Controller>,
    pub(super) workers: BTreeMap<String, Worker>,
    /// Processes that were restarted and do not serve yet.
    pub(super) starting: Vec<(ClusterProcess, JoinHandle<anyhow::Result<RunningProcess>>)>,
    /// Fields below the processes, because fields are dropped in order: fronts outlive the
    /// processes that connect to the fronts, and the ground outlives everything on the ground.
    pub(super) fronts: Vec<ProxyListener>,
    pub(super) ground: RunningGround,
}

pub(super) struct Controller {
    pub(super) recipe: LaunchSpec,
    pub(super) running: Option<RunningProcess>,
    pub(super) dir: PathBuf,
    pub(super) house: ProcessPlacement,
    /// The address to which other processes connect.
    pub(super) advertised: SocketAddr,
}

pub(super) struct Worker {
    pub(super) recipe: LaunchSpec,
    pub(super) running: Option<RunningProcess>,
    pub(super) listen: SocketAddr,
}

impl TestCluster {
    /// Creates a cluster without processes, in an empty folder.
    ///
    /// # Errors
    /// If the ground is not available on this machine.
    pub fn new(
        program: &Path,
        root: &Path,
        on: &GroundConfig,
        links: LinkMode,
        timeline: Timeline,
    ) -> anyhow::Result<Self> {
        let ground = RunningGround::begin(on, program, root)?;
        Ok(Self {
            program: program.to_owned(),
            root: root.to_owned(),
            timeline,
            network: ProxyNetwork::on(on.kind.proxies()),
            ground,
            links,
            injection: FaultInjection::Off,
            worker_words: Vec::new(),
            preset: None,
            caps: None,
            descriptors: None,
            controllers: BTreeMap::new(),
            workers: BTreeMap::new(),
            starting: Vec::new(),
            fronts: Vec::new(),
        })
    }

    /// Returns the cluster's links, with the party of each process.
    #[must_use]
    pub fn network(&self) -> ProxyNetwork {
        self.network.clone()
    }

    /// Returns the binary of every process.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Returns the ids of all controllers.
    #[must_use]
    pub fn controller_ids(&self) -> Vec<u64> {
        self.controllers.keys().copied().collect()
    }

    /// Returns the names of all workers.
    #[must_use]
    pub fn worker_names(&self) -> Vec<String> {
        self.workers.keys().cloned().collect()
    }

    /// Returns the folder of a controller.
    ///
    /// # Errors
    /// If there is no such controller.
    pub fn dir(&self, id: u64) -> anyhow::Result<&Path> {
        Ok(&self.controller(id)?.dir)
    }

    /// Returns the whole log of a controller.
    ///
    /// # Errors
    /// If the log cannot be read.
    pub fn log(&self, id: u64) -> anyhow::Result<String> {
        let log = &self.controller(id)?.recipe.log;
        std::fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))
    }

    /// Returns every controller's address for clients, in the order of the ids.
    #[must_use]
    pub fn addresses(&self) -> Vec<Address> {
        self.controllers.values().map(|it| address(it.house.client)).collect()
    }

    /// Returns the connection limits of the servers' first start.
    #[must_use]
    pub fn caps(&self) -> Option<ConnectionCaps> {
        self.caps
    }

    /// Returns every port of every process, with the process's own address rather than a proxy's.
    #[must_use]
    pub fn ports(&self) -> Vec<ServerPort> {
        let port = |kind, address| ServerPort { kind, address };
        let controllers = self.controllers.values().map(|it| &it.house);
        let controllers = controllers
            .flat_map(|it| [port(PortKind::Client, it.client), port(PortKind::Internal, it.internal)]);
        controllers.chain(self.workers.values().map(|it| port(PortKind::Worker, it.listen))).collect()
    }

    /// Returns a client of all controllers.
    ///
    /// # Errors
    /// If the client cannot be made.
    pub fn admin(&self) -> anyhow::Result<Admin> {
        Ok(Admin::new(Endpoints::new(self.addresses())?))
    }

    /// Returns a client of a controller.
    ///
    /// # Errors
    /// If there is no such controller.
    pub fn admin_of(&self, id: u64) -> anyhow::Result<Admin> {
        Ok(Admin::new(self.endpoint_of(id)?))
    }

    /// Returns the endpoint of a controller.
    ///
    /// # Errors
    /// If there is no such controller.
    pub fn endpoint_of(&self, id: u64) -> anyhow::Result<Endpoints> {
        Ok(Endpoints::new(vec![address(self.controller(id)?.house.client)])?)
    }

    /// Returns a client of some controllers.
    ///
    /// # Errors
    /// If there is no such controller.
    pub fn admin_of_all(&self, ids: &[u64]) -> anyhow::Result<Admin> {
        let addresses = ids.iter().map(|&id| Ok(address(self.controller(id)?.house.client)));
        Ok(Admin::new(Endpoints::new(addresses.collect::<anyhow::Result<_>>()?)?))
    }

    pub(super) fn controller(&self, id: u64) -> anyhow::Result<&Controller> {
        self.controllers.get(&id).with_context(|| format!("there is no controller {id}"))
    }

    pub(super) fn controller_mut(&mut self, id: u64) -> anyhow::Result<&mut Controller> {
        self.controllers.get_mut(&id).with_context(|| format!("there is no controller {id}"))
    }
}

/// Returns a function that registers a process with the proxies as this party.
pub(super) fn named(network: &ProxyNetwork, party: &LinkParty) -> impl FnOnce(u32) + use<> {
    let network = network.clone();
    let party = party.clone();
    move |pid| network.register_process(pid, party)
}

fn address(at: SocketAddr) -> Address {
    at.to_string().parse().expect("a socket's address is host:port")
}
