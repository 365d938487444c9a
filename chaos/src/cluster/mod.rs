//! A cluster of real processes on loopback: controllers and workers with data folders of their own,
//! seen through the admin API as its operators see it.

mod ends;
mod faults;
mod part;
mod ports;
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

pub use self::ends::Process;
pub use self::faults::Injection;
use self::part::{Recipe, Running, Started};
pub(crate) use self::part::{descendants, is_alive, signal};
use self::ports::Ports;
pub use self::status::Wanted;
pub(crate) use self::status::{until, until_within};
pub use self::usage::Usage;
pub(crate) use self::usage::shared_memory;
use crate::proxy::{Front, Network, Party};
use crate::timeline::Timeline;

/// Each controller: so few entries between two snapshots that a short run has some, gives up the log
/// before them and sends them to who was away.
const SNAPSHOTS: [&str; 2] = ["--snapshot-every", "200"];

/// What to start.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Voters.
    pub controllers: u64,
    /// Workers.
    pub workers: u32,
    /// Whether processes reach each other through proxies.
    pub links: Links,
    /// Whether controllers serve the fault service.
    pub injection: Injection,
    /// What each worker has.
    pub machine: Machine,
    /// What workers are started with besides.
    pub worker_words: Vec<String>,
}

/// What a worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Machine {
    /// Emulated GPUs.
    pub gpus: u32,
    /// Bytes of each.
    pub gpu_memory: u64,
    /// Bytes for models beside them.
    pub host_memory: u64,
}

impl Machine {
    fn words(self) -> Vec<String> {
        let Self { gpus, gpu_memory, host_memory } = self;
        let sizes =
            [("--gpus", u64::from(gpus)), ("--gpu-memory", gpu_memory), ("--host-memory", host_memory)];
        sizes.into_iter().flat_map(|(flag, size)| [flag.to_owned(), size.to_string()]).collect()
    }
}

/// How processes reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Links {
    /// Directly.
    Direct,
    /// Through proxies, which cut and delay.
    Proxied,
}

/// A cluster. Its processes end when it is dropped.
pub struct Cluster {
    program: PathBuf,
    root: PathBuf,
    timeline: Timeline,
    ports: Ports,
    /// The links between processes, where they are proxied.
    pub network: Network,
    links: Links,
    injection: Injection,
    /// The words that every worker is started with.
    worker_words: Vec<String>,
    controllers: BTreeMap<u64, Controller>,
    workers: BTreeMap<String, Worker>,
    /// Those that were started again and do not serve yet.
    starting: Vec<(Process, JoinHandle<anyhow::Result<Running>>)>,
    /// Below them: fronts outlive the processes that connect to them.
    fronts: Vec<Front>,
}

struct Controller {
    recipe: Recipe,
    running: Option<Running>,
    dir: PathBuf,
    client: SocketAddr,
    internal: SocketAddr,
    /// What others connect to.
    advertised: SocketAddr,
}

struct Worker {
    recipe: Recipe,
    running: Option<Running>,
    listen: SocketAddr,
}

/// How a start that may be refused went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Start {
    /// It serves.
    Serves,
    /// It ended by itself, and said this.
    Refused(ExitStatus, String),
}

impl Cluster {
    /// A cluster of nothing yet, in an empty folder.
    #[must_use]
    pub fn new(program: &Path, root: &Path, links: Links, timeline: Timeline) -> Self {
        Self {
            program: program.to_owned(),
            root: root.to_owned(),
            timeline,
            ports: Ports::new(),
            network: Network::default(),
            links,
            injection: Injection::Off,
            worker_words: Vec::new(),
            controllers: BTreeMap::new(),
            workers: BTreeMap::new(),
            starting: Vec::new(),
            fronts: Vec::new(),
        }
    }

    /// Starts every process of a plan, and waits until all of it is up.
    ///
    /// # Errors
    /// When a process ends or the cluster is not up in time, with what its log says.
    pub async fn start(&mut self, plan: &Plan) -> anyhow::Result<()> {
        self.injection = plan.injection;
        self.worker_words = plan.machine.words();
        self.worker_words.extend_from_slice(&plan.worker_words);
        for id in 1..=plan.controllers {
            self.add_controller(id, None).await?;
        }
        for number in 1..=plan.workers {
            self.add_worker(&format!("worker-{number}")).await?;
        }
        let voters = self.controllers.len();
        self.reached(Wanted { voters, nodes: plan.workers as usize, lag_max: 0 }).await?;
        self.timeline.did(format!("started {voters} controllers and {} workers", plan.workers));
        Ok(())
    }

    /// Starts a controller of a new id: the first begins the cluster, the others join. Where it
    /// takes the place of another, at that one's addresses.
    ///
    /// # Errors
    /// When it does not become a voter, with what its log says.
    pub async fn add_controller(&mut self, id: u64, instead_of: Option<u64>) -> anyhow::Result<()> {
        let old = instead_of.and_then(|old| self.controllers.remove(&old));
        let prefix = old.as_ref().map(|old| old.recipe.prefix.clone()).unwrap_or_default();
        let (client, internal, advertised) = match old {
            Some(old) => (old.client, old.internal, old.advertised),
            None => {
                let internal = self.ports.free()?;
                let advertised = self.fronted(Party::Controller(id), internal).await?;
                (self.ports.free()?, internal, advertised)
            }
        };
        let dir = self.root.join(format!("controller-{id}"));
        let mut words = vec!["controller".to_owned(), "--id".to_owned(), id.to_string()];
        words.extend(["--data-dir".to_owned(), dir.display().to_string()]);
        words.extend(["--listen".to_owned(), client.to_string()]);
        words.extend(["--internal-listen".to_owned(), internal.to_string()]);
        words.extend(["--internal-advertise".to_owned(), advertised.to_string()]);
        words.extend(SNAPSHOTS.map(str::to_owned));
        words.extend(self.injection.words());
        let recipe = self.recipe(format!("controller-{id}"), prefix, words);
        let others: Vec<_> = self.controllers.values().map(|it| it.advertised.to_string()).collect();
        let first = match others.as_slice() {
            [] => vec!["--bootstrap".to_owned()],
            others => vec!["--join".to_owned(), others.join(",")],
        };
        // Only an empty folder is begun so: it is started again without.
        let begin = Recipe { words: [recipe.words.clone(), first].concat(), ..recipe.clone() };
        let running = must_run(&begin, begin.start(named(&self.network, &Party::Controller(id))).await?)?;
        self.controllers
            .insert(id, Controller { recipe, running: Some(running), dir, client, internal, advertised });
        Ok(())
    }

    async fn add_worker(&mut self, name: &str) -> anyhow::Result<()> {
        let listen = self.ports.free()?;
        let party = Party::Worker(name.to_owned());
        let advertised = self.fronted(party.clone(), listen).await?;
        let controllers: Vec<_> = self.controllers.values().map(|it| it.advertised.to_string()).collect();
        let mut words = vec!["worker".to_owned(), "--name".to_owned(), name.to_owned()];
        words.extend(["--data-dir".to_owned(), self.root.join(name).display().to_string()]);
        words.extend(["--controllers".to_owned(), controllers.join(",")]);
        words.extend(["--listen".to_owned(), listen.to_string()]);
        words.extend(["--advertise".to_owned(), advertised.to_string()]);
        words.extend_from_slice(&self.worker_words);
        let recipe = self.recipe(name.to_owned(), Vec::new(), words);
        let running = must_run(&recipe, recipe.start(named(&self.network, &party)).await?)?;
        self.workers.insert(name.to_owned(), Worker { recipe, running: Some(running), listen });
        Ok(())
    }

    fn recipe(&self, name: String, prefix: Vec<String>, words: Vec<String>) -> Recipe {
        let log = self.root.join(format!("{name}.log"));
        Recipe { name, prefix, program: self.program.clone(), words, log }
    }

    /// The address at which others reach what listens at `listen`.
    async fn fronted(&mut self, party: Party, listen: SocketAddr) -> anyhow::Result<SocketAddr> {
        if self.links == Links::Direct {
            return Ok(listen);
        }
        let front = self.network.front(party, listen).await?;
        let address = front.address;
        self.fronts.push(front);
        Ok(address)
    }

    /// The binary of every process.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The ids of all controllers.
    #[must_use]
    pub fn controller_ids(&self) -> Vec<u64> {
        self.controllers.keys().copied().collect()
    }

    /// The names of all workers.
    #[must_use]
    pub fn worker_names(&self) -> Vec<String> {
        self.workers.keys().cloned().collect()
    }

    /// The folder of a controller.
    ///
    /// # Errors
    /// When there is no such controller.
    pub fn dir(&self, id: u64) -> anyhow::Result<&Path> {
        Ok(&self.controller(id)?.dir)
    }

    /// All that a controller logged.
    ///
    /// # Errors
    /// When its log cannot be read.
    pub fn log(&self, id: u64) -> anyhow::Result<String> {
        let log = &self.controller(id)?.recipe.log;
        std::fs::read_to_string(log).with_context(|| format!("cannot read {}", log.display()))
    }

    /// Every controller's address for clients, in the order of their ids.
    #[must_use]
    pub fn addresses(&self) -> Vec<Address> {
        self.controllers.values().map(|it| address(it.client)).collect()
    }

    /// A client of all controllers.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn admin(&self) -> anyhow::Result<Admin> {
        Ok(Admin::new(Endpoints::new(self.addresses())?))
    }

    /// A client of one controller alone.
    ///
    /// # Errors
    /// When there is no such controller.
    pub fn admin_of(&self, id: u64) -> anyhow::Result<Admin> {
        Ok(Admin::new(self.endpoint_of(id)?))
    }

    /// One controller alone.
    ///
    /// # Errors
    /// When there is no such controller.
    pub fn endpoint_of(&self, id: u64) -> anyhow::Result<Endpoints> {
        Ok(Endpoints::new(vec![address(self.controller(id)?.client)])?)
    }

    /// A client of some controllers.
    ///
    /// # Errors
    /// When there is no such controller.
    pub fn admin_of_all(&self, ids: &[u64]) -> anyhow::Result<Admin> {
        let addresses = ids.iter().map(|&id| Ok(address(self.controller(id)?.client)));
        Ok(Admin::new(Endpoints::new(addresses.collect::<anyhow::Result<_>>()?)?))
    }

    fn controller(&self, id: u64) -> anyhow::Result<&Controller> {
        self.controllers.get(&id).with_context(|| format!("there is no controller {id}"))
    }

    fn controller_mut(&mut self, id: u64) -> anyhow::Result<&mut Controller> {
        self.controllers.get_mut(&id).with_context(|| format!("there is no controller {id}"))
    }
}

/// Tells the proxies whose process this is.
fn named(network: &Network, party: &Party) -> impl FnOnce(u32) + use<> {
    let (network, party) = (network.clone(), party.clone());
    move |pid| network.name(pid, party)
}

fn must_run(recipe: &Recipe, started: Started) -> anyhow::Result<Running> {
    match started {
        Started::Ready(running) => Ok(*running),
        Started::Ended(status) => bail!("{} ended ({status}); {}", recipe.name, recipe.said()),
    }
}

fn address(at: SocketAddr) -> Address {
    at.to_string().parse().expect("a socket's address is host:port")
}

/// How long a cluster may take to be as it is wanted, after whatever was done to it.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(25);
