//! The start of a cluster's processes by a plan, and further controllers.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::bail;

use super::caps::ConnectionCaps;
use super::ground::RunningGround;
use super::ground::placement::ProcessPlacement;
use super::plan::{ClusterPlan, LinkMode, WorkerMachine};
use super::process::{LaunchMethod, LaunchSpec, must_run};
use super::status::StatusGoal;
use super::test_cluster::{Controller, TestCluster, Worker, named};
use crate::proxy::LinkParty;

/// Arguments of each controller. There are few entries between two snapshots, so that a short run
/// takes some snapshots, drops the log before them, and sends snapshots to controllers that were away.
const SNAPSHOTS: [&str; 2] = ["--snapshot-every", "200"];

impl TestCluster {
    /// Starts every process of a plan, and waits until all of them serve.
    ///
    /// # Errors
    /// If a process ends or the cluster is not up in time, with the end of the log.
    pub async fn start(&mut self, plan: &ClusterPlan) -> anyhow::Result<()> {
        self.injection = plan.injection;
        self.worker_words = plan.machine.words();
        self.worker_words.extend_from_slice(&plan.worker_words);
        self.preset = plan.preset.clone();
        self.caps = plan.caps;
        self.descriptors = plan.descriptors;
        let workers: Vec<_> = (1..=plan.workers).map(|number| format!("worker-{number}")).collect();
        if let RunningGround::Compose(_) = self.ground {
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
    /// join. A controller that replaces another controller uses the addresses of the other.
    ///
    /// # Errors
    /// If the controller does not become a voter, with the end of the log.
    pub async fn add_controller(&mut self, id: u64, instead_of: Option<u64>) -> anyhow::Result<()> {
        let old = instead_of.and_then(|old| self.controllers.remove(&old));
        let (prefix, house, advertised) = match old {
            Some(Controller { recipe, house, advertised, .. }) => (recipe.prefix(), house, advertised),
            None => {
                let house = self.ground.house(&format!("controller-{id}"))?;
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
        let house = self.ground.house(name)?;
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

    /// Starts the compose project: the services of the compose file, with the given workers.
    async fn start_containers(&mut self, workers: &[String], machine: WorkerMachine) -> anyhow::Result<()> {
        let RunningGround::Compose(compose) = &self.ground else { bail!("this ground has no containers") };
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
            // A worker's port is not reachable from outside the project's network.
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
}
