//! The common part of all scenarios: a cluster under load, and waiting for its recovery. The
//! judgement at the end is in `judge`.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::Context as _;
use millrace_client::{Endpoints, PolicyChange, messages::NodeStatus};
use millrace_types::PolicySpec;
use millrace_types::policy::GpuSharingName;
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom as _;
use tempfile::TempDir;

use super::census::UsageCensus;
use super::options::ScenarioOptions;
use super::plan;
use super::promise::TimedPromise;
use super::repair::FaultRepair;
use super::spec::{Invariant, ScenarioSpec};
use super::victim::ExecutorVictim;
use crate::cluster::{ClusterProcess, StatusGoal, TestCluster, until};
use crate::load::{ClientLoad, LoadMix, Targets};
use crate::oracle::billed::BillingRecord;
use crate::report::PromiseCheck;
use crate::timeline::{Timeline, seconds};

/// Time for which the load runs before the first fault, and after each recovery.
const CALM: Duration = Duration::from_millis(1500);

pub(crate) struct ScenarioStage {
    pub(super) rng: StdRng,
    pub(super) timeline: Timeline,
    pub(super) cluster: TestCluster,
    pub(super) load: ClientLoad,
    pub(super) census: UsageCensus,
    pub(super) targets: Targets,
    pub(super) rounds: u32,
    pub(super) checks: Vec<PromiseCheck>,
    pub(super) workers: usize,
    pub(super) healthy_within: Duration,
    /// The measured times of each promise, in each round.
    pub(super) took: BTreeMap<&'static str, (TimedPromise, Vec<Duration>)>,
    pub(super) folder: TempDir,
    /// The repairs of the open faults.
    pub(super) open: Vec<FaultRepair>,
    /// The targets of the latest fault.
    pub(super) latest: LatestFault,
    /// The data by which bills are judged.
    pub(super) account: BillingRecord,
    /// Times at which executors died, one range per fault.
    pub(super) killed: Vec<RangeInclusive<Duration>>,
    /// Time from which on requests of clients may be lost.
    pub(super) excused_from: Option<Duration>,
    spec: ScenarioSpec,
}

/// The time and the targets of the latest fault.
#[derive(Debug, Default)]
pub(super) struct LatestFault {
    pub(super) at: Duration,
    /// The leader at the fault.
    pub(super) leader: Option<u64>,
    /// The worker that the fault concerned.
    pub(super) worker: Option<String>,
    /// Killed executors whose replacement was not awaited yet.
    pub(super) victims: Vec<ExecutorVictim>,
}

/// Sets the sharing of GPUs.
async fn share_gpus(cluster: &TestCluster, sharing: GpuSharingName) -> anyhow::Result<()> {
    let spec = PolicySpec { gpu_sharing: Some(sharing), ..PolicySpec::NONE };
    let fields = Some(vec!["gpu_sharing".to_owned()]);
    let change = PolicyChange { spec, fields, ..PolicyChange::default() };
    cluster.admin()?.update_policy(&change).await.context("the sharing of GPUs cannot be set")?;
    Ok(())
}

impl ScenarioStage {
    pub(super) async fn begin(spec: &ScenarioSpec, options: &ScenarioOptions) -> anyhow::Result<Self> {
        let mut rng = StdRng::seed_from_u64(options.seed);
        let prefix = format!("millrace-chaos-{}-", spec.name);
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir().context("no temporary folder")?;
        let timeline = Timeline::begin(options.echo);
        let plan = plan::cluster(spec, options).await;
        let mut cluster =
            TestCluster::new(&options.program, folder.path(), &options.ground, plan.links, timeline.clone())?;
        let started = async {
            cluster.start(&plan).await?;
            let endpoints = Endpoints::new(cluster.addresses())?;
            let functions = plan::targets(&spec.functions, options.functions);
            let chains = plan::chains(&spec.workflows);
            let counters = plan::counters(&spec.sequences);
            let root = folder.path();
            if let Some(sharing) = options.gpu_sharing {
                share_gpus(&cluster, sharing).await?;
            }
            Targets::publish(&options.program, root, endpoints, functions, chains, counters, &mut rng).await
        };
        let targets = match started.await {
            Ok(targets) => targets,
            Err(error) => {
                let kept = folder.keep();
                return Err(error.context(format!("logs are in {}", kept.display())));
            }
        };
        let load = ClientLoad::start(&cluster.addresses(), &targets, spec.load, &timeline, &mut rng)?;
        let begun = match spec.load {
            LoadMix::Everything => "write, read and request",
            LoadMix::Requests => "request",
        };
        timeline.did(format!("published {} functions, and began to {begun}", targets.names().count()));
        let census = UsageCensus::begin(cluster.network(), timeline.clone());
        let rounds = options.rounds.or(spec.rounds.map(u32::from)).unwrap_or(1);
        let stage = Self {
            rng,
            timeline,
            cluster,
            load,
            census,
            targets,
            rounds,
            checks: Vec::new(),
            workers: spec.cluster.workers as usize,
            healthy_within: spec.healthy_within.most,
            took: BTreeMap::new(),
            folder,
            open: Vec::new(),
            latest: LatestFault::default(),
            account: BillingRecord::default(),
            killed: Vec::new(),
            excused_from: None,
            spec: spec.clone(),
        };
        stage.calm().await;
        Ok(stage)
    }

    /// Whether an invariant has to hold in this scenario.
    pub(super) fn holds(&self, invariant: Invariant) -> bool {
        self.spec.invariants.contains(&invariant)
    }

    /// Lets the load run without a fault for a while.
    pub(super) async fn calm(&self) {
        tokio::time::sleep(CALM).await;
    }

    /// Marks the time of a fault, from which recovery is measured.
    pub(super) fn fault(&mut self) {
        self.latest.at = self.timeline.now();
        self.load.writes.mark();
        self.load.answers.mark();
    }

    /// Waits until a write, if there are writes, and a request succeed that were made after the
    /// fault.
    pub(super) async fn resumed(&mut self) -> anyhow::Result<()> {
        let writes_too = self.spec.load == LoadMix::Everything;
        until("writes are accepted and requests answered", async || {
            let writes = self.load.writes.resumed_after();
            let answers = self.load.answers.resumed_after();
            (writes_too && writes.is_none() || answers.is_none())
                .then(|| format!("writes {writes:?}, answers {answers:?}"))
        })
        .await?;
        let answers = self.load.answers.resumed_after().unwrap_or_default();
        self.timeline.saw(match self.load.writes.resumed_after() {
            Some(writes) => format!(
                "first write {} and first answer {} after the fault",
                seconds(writes),
                seconds(answers)
            ),
            None => format!("first answer {} after the fault", seconds(answers)),
        });
        Ok(())
    }

    /// Records the time until writes resumed after the fault, for the check at the end.
    pub(super) fn note_writes_resumed(&mut self) {
        let took = self.load.writes.resumed_after().unwrap_or(Duration::MAX);
        self.note("writes resume", TimedPromise::writes_resume(), took);
    }

    /// Records a measured time of a promise, for the check at the end.
    pub(super) fn note(&mut self, what: &'static str, promise: TimedPromise, took: Duration) {
        self.took.entry(what).or_insert((promise, Vec::new())).1.push(took);
    }

    /// Waits until every process is back and has caught up with the load.
    pub(super) async fn whole(&mut self) -> anyhow::Result<()> {
        self.cluster.join_starts().await?;
        self.cluster.wait_for_status(self.wanted(StatusGoal::LAG_UNDER_LOAD)).await?;
        self.timeline.saw("every controller and worker is back");
        Ok(())
    }

    /// Waits until every process is back, or a controller has ended by itself. Returns the exit
    /// status of that controller.
    pub(super) async fn whole_unless_ended(&mut self, id: u64) -> anyhow::Result<Option<ExitStatus>> {
        let wanted = self.wanted(StatusGoal::LAG_UNDER_LOAD);
        let mut ended = None;
        until(&format!("every process is back, or controller {id} ended"), async || {
            ended = self.cluster.ended(&ClusterProcess::Controller(id));
            if ended.is_some() { None } else { self.cluster.status_difference(wanted).await }
        })
        .await?;
        Ok(ended)
    }

    pub(super) fn wanted(&self, lag_max: u64) -> StatusGoal {
        StatusGoal { voters: self.cluster.controller_ids().len(), nodes: self.workers, lag_max }
    }

    /// Chooses a controller that does not lead now.
    pub(super) async fn a_follower(&mut self) -> anyhow::Result<u64> {
        let leader = self.cluster.leader().await?;
        let ids = self.cluster.controller_ids();
        let followers: Vec<_> = ids.into_iter().filter(|&id| id != leader).collect();
        let chosen = followers.choose(&mut self.rng).copied();
        chosen.ok_or_else(|| anyhow::anyhow!("there is no other controller than the leader"))
    }

    /// Waits until a worker counts as lost.
    pub(super) async fn lost(&self, worker: &str) -> anyhow::Result<()> {
        let admin = self.cluster.admin()?;
        until(&format!("{worker} counts as lost"), async || match admin.nodes().await {
            Ok(nodes) => {
                let status = nodes.iter().find(|node| node.name == worker).map(|node| node.status());
                (status != Some(NodeStatus::Lost)).then(|| format!("its status is {status:?}"))
            }
            Err(error) => Some(error.to_string()),
        })
        .await?;
        self.timeline.saw(format!("{worker} counts as lost"));
        Ok(())
    }

    /// Waits until every function answers.
    pub(super) async fn served(&mut self) -> anyhow::Result<()> {
        for name in self.targets.names() {
            self.served_again(name).await?;
        }
        let took = self.timeline.now() - self.latest.at;
        self.timeline.saw(format!("every function is served again {} after the fault", seconds(took)));
        Ok(())
    }

    /// Waits until a function answers.
    pub(super) async fn served_again(&self, name: &str) -> anyhow::Result<()> {
        let endpoints = Endpoints::new(self.cluster.addresses())?;
        until(&format!("{name} is served"), async || {
            self.targets.ask(name, endpoints.clone()).await.err().map(|error| format!("{error:#}"))
        })
        .await
    }
}
