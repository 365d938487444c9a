//! A cluster of real processes on loopback: controllers and workers with data folders of their own,
//! seen through the admin API as its operators see it.

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
#[derive(Debug, Clone, Copy)]
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
}

/// What a worker has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// One small GPU, so that a cluster of several workers starts in seconds.
    OneGpu,
    /// Four GPUs that hold less than host memory does: models are swapped all the time.
    FourGpus,
}

impl Machine {
    fn words(self) -> [&'static str; 6] {
        match self {
            Self::OneGpu => ["--gpus", "1", "--gpu-memory", "256MiB", "--host-memory", "512MiB"],
            Self::FourGpus => ["--gpus", "4", "--gpu-memory", "128MiB", "--host-memory", "3GiB"],
        }
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
            fronts: Vec::new(),
        }
    }

    /// Starts every process of a plan, and waits until all of it is up. Workers also get the words of
    /// their `policies`.
    ///
    /// # Errors
    /// When a process ends or the cluster is not up in time, with what its log says.
    pub async fn start(&mut self, plan: Plan, policies: &[String]) -> anyhow::Result<()> {
        self.injection = plan.injection;
        self.worker_words = plan.machine.words().map(str::to_owned).to_vec();
        self.worker_words.extend_from_slice(policies);
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
        self.workers.insert(name.to_owned(), Worker { recipe, running: Some(running) });
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

    fn worker_mut(&mut self, name: &str) -> anyhow::Result<&mut Worker> {
        self.workers.get_mut(name).with_context(|| format!("there is no worker {name}"))
    }

    /// kill -9 of a controller. `role` says what it was, for the timeline.
    ///
    /// # Errors
    /// When it does not end.
    pub async fn kill_controller(&mut self, id: u64, role: &str) -> anyhow::Result<()> {
        let Some(running) = self.controller_mut(id)?.running.take() else { return Ok(()) };
        let pid = running.pid;
        self.timeline.did(format!("kill -9 of controller {id} (pid {pid}), {role}"));
        running.kill().await?;
        self.network.forget(pid);
        Ok(())
    }

    /// kill -9 of all controllers, one right after the other.
    ///
    /// # Errors
    /// When one does not end.
    pub async fn kill_all_controllers(&mut self) -> anyhow::Result<()> {
        let running: Vec<_> = self.controllers.values_mut().filter_map(|it| it.running.take()).collect();
        let pids: Vec<_> = running.iter().map(|it| it.pid).collect();
        for &pid in &pids {
            signal(pid, rustix::process::Signal::KILL)?;
            self.network.forget(pid);
        }
        self.timeline.did(format!("kill -9 of every controller (pids {pids:?})"));
        for running in running {
            running.kill().await?;
        }
        Ok(())
    }

    /// Starts a controller again over its folder, or sees it refuse.
    ///
    /// # Errors
    /// When it neither serves nor ends.
    pub async fn try_restart_controller(&mut self, id: u64) -> anyhow::Result<Start> {
        self.timeline.did(format!("started controller {id} again"));
        let named = named(&self.network, &Party::Controller(id));
        let controller = self.controller_mut(id)?;
        let before = std::fs::metadata(&controller.recipe.log).map_or(0, |it| it.len());
        match controller.recipe.start(named).await? {
            Started::Ready(running) => {
                controller.running = Some(*running);
                Ok(Start::Serves)
            }
            Started::Ended(status) => {
                let log = std::fs::read(&controller.recipe.log).context("cannot read its log")?;
                let said = log.get(usize::try_from(before).unwrap_or(0)..).unwrap_or_default();
                Ok(Start::Refused(status, String::from_utf8_lossy(said).into_owned()))
            }
        }
    }

    /// Starts a controller again over its folder.
    ///
    /// # Errors
    /// When it does not serve.
    pub async fn restart_controller(&mut self, id: u64) -> anyhow::Result<()> {
        match self.try_restart_controller(id).await? {
            Start::Serves => Ok(()),
            Start::Refused(status, said) => bail!("controller {id} does not start ({status}): {said}"),
        }
    }

    /// Starts every controller again, all at once: none is ready before a majority is there.
    ///
    /// # Errors
    /// When one does not serve.
    pub async fn restart_all_controllers(&mut self) -> anyhow::Result<()> {
        self.timeline.did("started every controller again");
        let starts = self.controllers.iter().filter(|(_, it)| it.running.is_none());
        let starts = starts.map(|(&id, it)| {
            let (recipe, named) = (it.recipe.clone(), named(&self.network, &Party::Controller(id)));
            async move { anyhow::Ok((id, must_run(&recipe, recipe.start(named).await?)?)) }
        });
        for (id, running) in futures::future::try_join_all(starts).await? {
            self.controller_mut(id)?.running = Some(running);
        }
        Ok(())
    }

    /// How a controller ended by itself, if it did. It may be started again then.
    pub fn controller_ended(&mut self, id: u64) -> Option<ExitStatus> {
        let running = &mut self.controllers.get_mut(&id)?.running;
        let (pid, status) = running.as_mut().and_then(|it| Some((it.pid, it.ended()?)))?;
        *running = None;
        self.network.forget(pid);
        self.timeline.saw(format!("controller {id} ended by itself ({status})"));
        Some(status)
    }

    /// Lets a controller run inside another program from its next start on, such as one that enters
    /// other mounts. That program has to become it: its pid is the controller's.
    ///
    /// # Errors
    /// When there is no such controller.
    pub fn place_controller(&mut self, id: u64, prefix: Vec<String>) -> anyhow::Result<()> {
        self.controller_mut(id)?.recipe.prefix = prefix;
        Ok(())
    }

    /// kill -9 of a worker.
    ///
    /// # Errors
    /// When it does not end.
    pub async fn kill_worker(&mut self, name: &str) -> anyhow::Result<()> {
        let Some(running) = self.worker_mut(name)?.running.take() else { return Ok(()) };
        let pid = running.pid;
        self.timeline.did(format!("kill -9 of {name} (pid {pid})"));
        running.kill().await?;
        self.network.forget(pid);
        Ok(())
    }

    /// Starts a worker again over its folder.
    ///
    /// # Errors
    /// When it does not serve.
    pub async fn restart_worker(&mut self, name: &str) -> anyhow::Result<()> {
        self.timeline.did(format!("started {name} again"));
        let named = named(&self.network, &Party::Worker(name.to_owned()));
        let worker = self.worker_mut(name)?;
        worker.running = Some(must_run(&worker.recipe, worker.recipe.start(named).await?)?);
        Ok(())
    }

    /// The pid of a worker that runs.
    ///
    /// # Errors
    /// When it does not.
    pub fn worker_pid(&self, name: &str) -> anyhow::Result<u32> {
        let running = self.workers.get(name).and_then(|it| it.running.as_ref());
        Ok(running.with_context(|| format!("{name} does not run"))?.pid)
    }

    /// The pids of all processes that run, executors included.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        let controllers = self.controllers.values().filter_map(|it| it.running.as_ref());
        let workers = self.workers.values().filter_map(|it| it.running.as_ref());
        let parts: Vec<u32> = controllers.chain(workers).map(|it| it.pid).collect();
        parts.iter().flat_map(|&pid| [vec![pid], descendants(pid)].concat()).collect()
    }

    /// kill -9 of everybody but the executors, who have to end with their workers.
    ///
    /// # Errors
    /// When a process does not end.
    pub async fn kill_everybody(&mut self) -> anyhow::Result<()> {
        let controllers = self.controllers.values_mut().filter_map(|it| it.running.take());
        let workers = self.workers.values_mut().filter_map(|it| it.running.take());
        for running in controllers.chain(workers).collect::<Vec<_>>() {
            running.kill().await?;
        }
        Ok(())
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
