//! A cluster of real processes on a ground: controllers and workers with their own data folders,
//! observed through the admin API as operators do.

mod caps;
mod faults;
mod ground;
mod links;
mod ports;
mod process;
mod restarts;
mod status;
mod usage;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context as _, bail};
use millrace_client::{Address, Admin, Endpoints};
use tokio::task::JoinHandle;

pub use self::caps::ConnectionCaps;
pub use self::faults::FaultInjection;
use self::ground::{ClusterEnvironment, ProcessPlacement};
pub use self::ground::{EnvironmentConfig, HarnessNamespace, TestEnvironment};
pub use self::links::LinkMode;
use self::process::{LaunchMethod, LaunchResult, LaunchSpec, RunningProcess};
pub(crate) use self::process::{descendants, is_alive, own_pid, signal};
pub use self::restarts::ClusterProcess;
pub use self::status::StatusGoal;
pub(crate) use self::status::{until, until_within};
pub use self::usage::{ProcessUsage, ResidentMemory};
pub(crate) use self::usage::{descriptors_max, processor_time, reset_peak, shared_memory};
use crate::hostile::{PortKind, ServerPort};
use crate::proxy::{LinkParty, ProxyListener, ProxyNetwork};
use crate::timeline::Timeline;

/// Arguments of each controller. There are few entries between two snapshots, so that a short run
/// takes some, drops the log before them, and sends them to controllers that were away.
const SNAPSHOTS: [&str; 2] = ["--snapshot-every", "200"];

/// The cluster to start.
#[derive(Debug, Clone)]
pub struct ClusterPlan {
    /// Number of voters.
    pub controllers: u64,
    /// Number of workers.
    pub workers: u32,
    /// Whether processes reach each other through proxies.
    pub links: LinkMode,
    /// Whether controllers serve the fault service.
    pub injection: FaultInjection,
    pub machine: WorkerMachine,
    /// Further arguments of the workers.
    pub worker_words: Vec<String>,
    /// The preset with which the cluster starts; `None` for the default.
    pub preset: Option<String>,
    /// Connection limits of the servers; `None` leaves the servers' defaults.
    pub caps: Option<ConnectionCaps>,
    /// The soft limit of descriptors of each process; `None` for the harness's own limit.
    pub descriptors: Option<u64>,
}

/// The resources of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkerMachine {
    /// Number of emulated GPUs.
    pub gpus: u32,
    /// Bytes of memory of each GPU.
    pub gpu_memory: u64,
    /// Bytes of host memory for models.
    pub host_memory: u64,
}

impl WorkerMachine {
    fn words(self) -> Vec<String> {
        let Self { gpus, gpu_memory, host_memory } = self;
        let sizes =
            [("--gpus", u64::from(gpus)), ("--gpu-memory", gpu_memory), ("--host-memory", host_memory)];
        sizes.into_iter().flat_map(|(flag, size)| [flag.to_owned(), size.to_string()]).collect()
    }
}

/// A cluster, whose processes end when the value is dropped.
pub struct TestCluster {
    program: PathBuf,
    root: PathBuf,
    timeline: Timeline,
    /// The cuts between parties, which proxies or the ground apply.
    network: ProxyNetwork,
    links: LinkMode,
    injection: FaultInjection,
    /// The arguments of every worker.
    worker_words: Vec<String>,
    preset: Option<String>,
    caps: Option<ConnectionCaps>,
    /// The soft limit of descriptors of each process.
    descriptors: Option<u64>,
    controllers: BTreeMap<u64, Controller>,
    workers: BTreeMap<String, Worker>,
    /// Processes that were restarted and do not serve yet.
    starting: Vec<(ClusterProcess, JoinHandle<anyhow::Result<RunningProcess>>)>,
    /// Fields below the processes, because fields are dropped in order: fronts outlive the
    /// processes that connect to them, and the ground outlives everything on it.
    fronts: Vec<ProxyListener>,
    site: ClusterEnvironment,
}

struct Controller {
    recipe: LaunchSpec,
    running: Option<RunningProcess>,
    dir: PathBuf,
    house: ProcessPlacement,
    /// The address to which other processes connect.
    advertised: SocketAddr,
}

struct Worker {
    recipe: LaunchSpec,
    running: Option<RunningProcess>,
    listen: SocketAddr,
}

/// The result of a start that may be refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartResult {
    /// The process serves.
    Serves,
    /// The process ended by itself, with this status and this log.
    Refused(ExitStatus, String),
}

impl TestCluster {
    /// Creates a cluster without processes, in an empty folder.
    ///
    /// # Errors
    /// If the ground is not available on this machine.
    pub fn new(
        program: &Path,
        root: &Path,
        terrain: &EnvironmentConfig,
        links: LinkMode,
        timeline: Timeline,
    ) -> anyhow::Result<Self> {
        let site = ClusterEnvironment::begin(terrain, program, root)?;
        Ok(Self {
            program: program.to_owned(),
            root: root.to_owned(),
            timeline,
            network: ProxyNetwork::on(terrain.ground.proxies()),
            site,
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

    /// Starts every process of a plan, and waits until all of them serve.
    ///
    /// # Errors
    /// If a process ends or the cluster is not up in time, with the end of its log.
    pub async fn start(&mut self, plan: &ClusterPlan) -> anyhow::Result<()> {
        self.injection = plan.injection;
        self.worker_words = plan.machine.words();
        self.worker_words.extend_from_slice(&plan.worker_words);
        self.preset = plan.preset.clone();
        self.caps = plan.caps;
        self.descriptors = plan.descriptors;
        let workers: Vec<_> = (1..=plan.workers).map(|number| format!("worker-{number}")).collect();
        if let ClusterEnvironment::Compose(_) = self.site {
            self.start_containers(&workers, plan.machine).await?;
        } else {
            for id in 1..=plan.controllers {
                self.add_controller(id, None).await?;
            }
            for name in &workers {
                self.add_worker(name).await?;
            }
        }
        let voters = self.controllers.len();
        self.wait_for_status(StatusGoal { voters, nodes: plan.workers as usize, lag_max: 0 }).await?;
        self.timeline.did(format!("started {voters} controllers and {} workers", plan.workers));
        Ok(())
    }

    /// Starts a controller with a new id. The first controller bootstraps the cluster; the others
    /// join. A controller that replaces another one uses its addresses.
    ///
    /// # Errors
    /// If the controller does not become a voter, with the end of its log.
    pub async fn add_controller(&mut self, id: u64, instead_of: Option<u64>) -> anyhow::Result<()> {
        let old = instead_of.and_then(|old| self.controllers.remove(&old));
        let (prefix, house, advertised) = match old {
            Some(Controller { recipe, house, advertised, .. }) => (recipe.prefix(), house, advertised),
            None => {
                let house = self.site.house(&format!("controller-{id}"))?;
                let advertised = self.fronted(LinkParty::Controller(id), house.internal).await?;
                (house.prefix.clone(), house, advertised)
            }
        };
        let dir = self.root.join(format!("controller-{id}"));
        let mut words = vec!["controller".to_owned(), "--id".to_owned(), id.to_string()];
        words.extend(["--data-dir".to_owned(), dir.display().to_string()]);
        words.extend(["--listen".to_owned(), house.client.to_string()]);
        words.extend(["--internal-listen".to_owned(), house.internal.to_string()]);
        words.extend(["--internal-advertise".to_owned(), advertised.to_string()]);
        words.extend(SNAPSHOTS.map(str::to_owned));
        words.extend(self.injection.words());
        words.extend(self.caps.iter().flat_map(ConnectionCaps::controller_words));
        words.extend_from_slice(&house.words);
        let others: Vec<_> = self.controllers.values().map(|it| it.advertised.to_string()).collect();
        let first = match others.as_slice() {
            [] => {
                let preset = self.preset.iter().flat_map(|it| ["--preset".to_owned(), it.clone()]);
                ["--bootstrap".to_owned()].into_iter().chain(preset).collect()
            }
            others => vec!["--join".to_owned(), others.join(",")],
        };
        // Only a start over an empty folder has the arguments of a first start; later starts omit
        // them.
        let name = format!("controller-{id}");
        let begin = self.recipe(name.clone(), prefix.clone(), [words.clone(), first].concat());
        let recipe = self.recipe(name, prefix, words);
        let running = must_run(&begin, begin.start(named(&self.network, &LinkParty::Controller(id))).await?)?;
        self.controllers.insert(id, Controller { recipe, running: Some(running), dir, house, advertised });
        Ok(())
    }

    async fn add_worker(&mut self, name: &str) -> anyhow::Result<()> {
        let house = self.site.house(name)?;
        let listen = house.internal;
        let party = LinkParty::Worker(name.to_owned());
        let advertised = self.fronted(party.clone(), listen).await?;
        let controllers: Vec<_> = self.controllers.values().map(|it| it.advertised.to_string()).collect();
        let mut words = vec!["worker".to_owned(), "--name".to_owned(), name.to_owned()];
        words.extend(["--data-dir".to_owned(), self.root.join(name).display().to_string()]);
        words.extend(["--controllers".to_owned(), controllers.join(",")]);
        words.extend(["--listen".to_owned(), listen.to_string()]);
        words.extend(["--advertise".to_owned(), advertised.to_string()]);
        words.extend_from_slice(&self.worker_words);
        words.extend(self.caps.iter().flat_map(ConnectionCaps::worker_words));
        words.extend(house.words);
        let recipe = self.recipe(name.to_owned(), house.prefix, words);
        let running = must_run(&recipe, recipe.start(named(&self.network, &party)).await?)?;
        self.workers.insert(name.to_owned(), Worker { recipe, running: Some(running), listen });
        Ok(())
    }

    /// Starts the compose project: the services of its file, with these workers.
    async fn start_containers(&mut self, workers: &[String], machine: WorkerMachine) -> anyhow::Result<()> {
        let ClusterEnvironment::Compose(compose) = &self.site else { bail!("this ground has no containers") };
        compose.up(u32::try_from(workers.len())?, machine)?;
        let run = async |name: &str, party: LinkParty| {
            let how = LaunchMethod::Container(compose.container(name)?);
            let log = self.root.join(format!("{name}.log"));
            let recipe = LaunchSpec { name: name.to_owned(), how, log, descriptors: None };
            let running = must_run(&recipe, recipe.start(named(&self.network, &party)).await?)?;
            anyhow::Ok((recipe, Some(running)))
        };
        for (id, client) in (1..).zip(compose.clients()) {
            let (recipe, running) = run(&format!("controller-{id}"), LinkParty::Controller(id)).await?;
            let house = ProcessPlacement { prefix: Vec::new(), words: Vec::new(), client, internal: client };
            let controller = Controller { recipe, running, dir: PathBuf::new(), house, advertised: client };
            self.controllers.insert(id, controller);
        }
        for name in workers {
            let (recipe, running) = run(name, LinkParty::Worker(name.clone())).await?;
            // A worker's port is not reachable from outside its network.
            let listen = SocketAddr::from(([0, 0, 0, 0], 0));
            self.workers.insert(name.clone(), Worker { recipe, running, listen });
        }
        Ok(())
    }

    fn recipe(&self, name: String, prefix: Vec<String>, words: Vec<String>) -> LaunchSpec {
        let log = self.root.join(format!("{name}.log"));
        let how = LaunchMethod::Child { prefix, program: self.program.clone(), words };
        LaunchSpec { name, how, log, descriptors: self.descriptors }
    }

    /// Returns the address at which other processes reach the port at `listen`.
    async fn fronted(&mut self, party: LinkParty, listen: SocketAddr) -> anyhow::Result<SocketAddr> {
        if self.links == LinkMode::Direct {
            self.network.register_address(listen.ip(), party);
            return Ok(listen);
        }
        self.network.register_address(listen.ip(), party.clone());
        let front = self.network.front(party, listen).await?;
        let address = front.address;
        self.fronts.push(front);
        Ok(address)
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

    fn controller(&self, id: u64) -> anyhow::Result<&Controller> {
        self.controllers.get(&id).with_context(|| format!("there is no controller {id}"))
    }

    fn controller_mut(&mut self, id: u64) -> anyhow::Result<&mut Controller> {
        self.controllers.get_mut(&id).with_context(|| format!("there is no controller {id}"))
    }
}

/// Returns a function that registers a process with the proxies as this party.
fn named(network: &ProxyNetwork, party: &LinkParty) -> impl FnOnce(u32) + use<> {
    let network = network.clone();
    let party = party.clone();
    move |pid| network.register_process(pid, party)
}

fn must_run(recipe: &LaunchSpec, started: LaunchResult) -> anyhow::Result<RunningProcess> {
    match started {
        LaunchResult::Ready(running) => Ok(*running),
        LaunchResult::Ended(status) => bail!("{} ended ({status}); {}", recipe.name, recipe.log_tail()),
    }
}

fn address(at: SocketAddr) -> Address {
    at.to_string().parse().expect("a socket's address is host:port")
}

/// Maximum time for a cluster to reach a wanted state, after any fault.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// Interval between two looks at the cluster's state.
const LOOK_EVERY: Duration = Duration::from_millis(25);
