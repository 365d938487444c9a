//! What scenarios share: a cluster under load, waiting for its recovery, and the checks at the end.

use std::collections::BTreeMap;
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::Context as _;
use futures::TryStreamExt as _;
use millrace_client::{Admin, Endpoints, messages};
use rand::SeedableRng as _;
use rand::rngs::StdRng;
use tempfile::TempDir;

use super::{ALLOWANCE, Keep, Options, Promise, Scenario};
use crate::cluster::{Cluster, Wanted, is_alive, until, until_within};
use crate::history::{Operation, Seen};
use crate::load::{Load, Mix, Network, POKED, Target, Targets, read_all};
use crate::oracle::{acknowledged, linearizable, requests};
use crate::report::{Check, Report, Verdict};
use crate::timeline::{Timeline, seconds};

/// How long the load runs before the first fault, and after each recovery.
const CALM: Duration = Duration::from_millis(1500);
/// How long processes whose parent was killed may take to end.
const LEFTOVER_PATIENCE: Duration = Duration::from_secs(10);

/// A function on every worker.
pub(super) const EVERYWHERE: &str = "everywhere";
/// A function on one worker.
pub(super) const ALONE: &str = "alone";

/// The functions of a group: one model, on every worker and on one.
pub(super) fn two(_: &Options) -> Vec<Target> {
    let network = Network { kind: "mlp", seed: 1 };
    let target = |name: &str, replicas| Target { name: name.to_owned(), replicas, network };
    vec![target(EVERYWHERE, super::GROUP.workers), target(ALONE, 1)]
}

/// A cluster under load.
pub(crate) struct Stage {
    pub(super) rng: StdRng,
    pub(super) timeline: Timeline,
    pub(super) cluster: Cluster,
    pub(super) load: Load,
    pub(super) targets: Targets,
    pub(super) rounds: u32,
    pub(super) checks: Vec<Check>,
    mix: Mix,
    workers: usize,
    /// How long each thing that was promised took, in each round.
    took: BTreeMap<&'static str, (Promise, Vec<Duration>)>,
    folder: TempDir,
}

impl Stage {
    pub(super) async fn begin(scenario: &Scenario, options: &Options) -> anyhow::Result<Self> {
        let mut rng = StdRng::seed_from_u64(options.seed);
        let prefix = format!("millrace-chaos-{}-", scenario.name);
        let folder = tempfile::Builder::new().prefix(&prefix).tempdir().context("no temporary folder")?;
        let timeline = Timeline::begin(options.echo);
        let plan = scenario.plan;
        let mut cluster = Cluster::new(&options.program, folder.path(), plan.links, timeline.clone());
        let started = async {
            cluster.start(plan, &options.policies).await?;
            let functions = (scenario.functions)(options);
            let endpoints = Endpoints::new(cluster.addresses())?;
            Targets::publish(&options.program, folder.path(), endpoints, functions, &mut rng).await
        };
        let targets = match started.await {
            Ok(targets) => targets,
            Err(error) => {
                let kept = folder.keep();
                return Err(error.context(format!("logs are in {}", kept.display())));
            }
        };
        let mix = scenario.mix;
        let load = Load::start(&cluster.addresses(), &targets, mix, &timeline, &mut rng)?;
        let begun = match mix {
            Mix::Everything => "write, read and request",
            Mix::Requests => "request",
        };
        timeline.did(format!("published {} functions, and began to {begun}", targets.names().count()));
        let rounds = options.rounds.unwrap_or(scenario.rounds);
        let (checks, took) = (Vec::new(), BTreeMap::new());
        let workers = plan.workers as usize;
        let stage =
            Self { rng, timeline, cluster, load, targets, rounds, checks, mix, workers, took, folder };
        stage.calm().await;
        Ok(stage)
    }

    /// Lets the load run undisturbed.
    pub(super) async fn calm(&self) {
        tokio::time::sleep(CALM).await;
    }

    /// Says that a fault comes now: recovery is measured from here.
    pub(super) fn fault(&self) {
        self.load.writes.mark();
        self.load.answers.mark();
    }

    /// Waits until writes are taken and requests are answered that were made after the fault.
    pub(super) async fn resumed(&mut self) -> anyhow::Result<()> {
        until("writes are taken and requests answered", async || {
            let (writes, answers) = (self.load.writes.resumed_after(), self.load.answers.resumed_after());
            (writes.is_none() || answers.is_none()).then(|| format!("writes {writes:?}, answers {answers:?}"))
        })
        .await?;
        let writes = self.load.writes.resumed_after().unwrap_or_default();
        let answers = self.load.answers.resumed_after().unwrap_or_default();
        self.timeline.saw(format!(
            "first write {} and first answer {} after the fault",
            seconds(writes),
            seconds(answers)
        ));
        Ok(())
    }

    /// Notes how long writes took to resume since the fault, for the check at the end.
    pub(super) fn note_writes_resumed(&mut self) {
        let took = self.load.writes.resumed_after().unwrap_or(Duration::MAX);
        self.note("writes resume", super::WRITES_RESUME, took);
    }

    /// Notes how long something took that was promised, for the check at the end.
    pub(super) fn note(&mut self, what: &'static str, promise: Promise, took: Duration) {
        self.took.entry(what).or_insert((promise, Vec::new())).1.push(took);
    }

    /// Waits until every process is back and has caught up with the load.
    pub(super) async fn whole(&self) -> anyhow::Result<()> {
        self.cluster.reached(self.wanted(Wanted::LAG_UNDER_LOAD)).await?;
        self.timeline.saw("every controller and worker is back");
        Ok(())
    }

    /// The same, unless a controller ends by itself first: then how it did.
    pub(super) async fn whole_unless_ended(&mut self, id: u64) -> anyhow::Result<Option<ExitStatus>> {
        let wanted = self.wanted(Wanted::LAG_UNDER_LOAD);
        let mut ended = None;
        until(&format!("everybody is back, or controller {id} ended"), async || {
            ended = self.cluster.controller_ended(id);
            if ended.is_some() { None } else { self.cluster.lacks(wanted).await }
        })
        .await?;
        Ok(ended)
    }

    fn wanted(&self, lag_max: u64) -> Wanted {
        Wanted { voters: self.cluster.controller_ids().len(), nodes: self.workers, lag_max }
    }

    /// Ends the load, waits for the cluster to settle, judges everything, ends the cluster.
    pub(super) async fn finish(mut self, played: anyhow::Result<()>, keep: Keep, report: &mut Report) {
        if let Err(error) = played {
            self.failed("the cluster recovers", &error);
        }
        if let Err(error) = self.load.stop().await {
            self.failed("clients end", &error);
        }
        self.timeline.did("ended the load");
        self.check_took();
        match self.settle().await {
            Ok(check) => self.checks.push(check),
            Err(error) => self.failed("nobody is left behind", &error),
        }
        self.judge().await;
        match self.end().await {
            Ok(check) => self.checks.push(check),
            Err(error) => self.failed("no process outlives its parent", &error),
        }
        let failed = self.checks.iter().any(|check| check.verdict == Verdict::Fail);
        report.verdict = if failed { Verdict::Fail } else { Verdict::Pass };
        report.checks = self.checks;
        report.timeline = self.timeline.events();
        if failed || keep == Keep::Always {
            report.kept = Some(self.folder.keep().display().to_string());
        }
    }

    fn failed(&mut self, name: &str, error: &anyhow::Error) {
        let lines = format!("{error:#}").lines().map(str::to_owned).collect();
        self.checks.push(Check::fail(name, "it did not", lines));
    }

    fn check_took(&mut self) {
        for (name, (promise, took)) in &self.took {
            let slowest = took.iter().max().copied().unwrap_or_default();
            let limit = promise.within * ALLOWANCE;
            let each: Vec<_> = took.iter().map(|it| seconds(*it)).collect();
            let detail = format!(
                "slowest of {}: {} (each: {}); promised {}, fails beyond {}",
                took.len(),
                seconds(slowest),
                each.join(", "),
                seconds(promise.within),
                seconds(limit)
            );
            let late = (slowest > limit).then(|| promise.source.to_owned());
            self.checks.push(Check::of(*name, detail, late.into_iter().collect()));
        }
    }

    /// Everybody is back, agrees, and serves.
    async fn settle(&self) -> anyhow::Result<Check> {
        let begun = self.timeline.now();
        self.cluster.reached(self.wanted(0)).await?;
        self.functions_are_ready().await?;
        let functions = self.controllers_agree().await?;
        for id in self.cluster.controller_ids() {
            for name in self.targets.names() {
                let endpoint = self.cluster.endpoint_of(id)?;
                let asked = self.targets.ask(name, endpoint).await;
                asked.with_context(|| format!("the gateway of controller {id} does not serve {name}"))?;
            }
        }
        let took = self.timeline.now() - begun;
        let (controllers, workers) = (self.cluster.controller_ids().len(), self.workers);
        Ok(Check::pass(
            "nobody is left behind",
            format!(
                "{} and serve, {workers} workers are up, every function is ready; settled in {}",
                agreement(controllers, functions),
                seconds(took)
            ),
        ))
    }

    async fn functions_are_ready(&self) -> anyhow::Result<()> {
        let admin = self.cluster.admin()?;
        until("every enabled function is ready, on as many nodes as it asks for", async || {
            let listed = async {
                let functions: Vec<_> = admin.functions(None).try_collect().await?;
                anyhow::Ok((functions, admin.nodes().await?))
            };
            match listed.await {
                Ok((functions, nodes)) => {
                    functions.iter().find_map(not_ready).or_else(|| misplaced(&functions, &nodes))
                }
                Err(error) => Some(error.to_string()),
            }
        })
        .await
    }

    /// Each controller's own state has every function as all have it. Says how many there are.
    async fn controllers_agree(&self) -> anyhow::Result<usize> {
        let admin = self.cluster.admin()?;
        for id in self.cluster.controller_ids() {
            let stale = self.cluster.admin_of(id)?.stale();
            until(&format!("controller {id} has what all have"), async || {
                match (known(&stale).await, known(&admin).await) {
                    (Ok(own), Ok(all)) => (own != all).then(|| difference(&own, &all)),
                    (Err(error), _) | (_, Err(error)) => Some(error.to_string()),
                }
            })
            .await?;
        }
        Ok(known(&admin).await?.len())
    }

    async fn judge(&mut self) {
        if self.mix == Mix::Everything {
            self.judge_writes().await;
        }
        self.checks.extend(requests::check(&self.load.requests()));
    }

    async fn judge_writes(&mut self) {
        let histories = self.load.history.by_key();
        match self.last().await {
            Ok((last, reads)) => {
                self.checks.push(acknowledged::check(&histories, &last));
                let mut histories = histories;
                for read in reads {
                    histories.entry(read.key.clone()).or_default().push(read);
                }
                // The search may take long, and nothing else has to go on meanwhile.
                self.checks.push(linearizable::check(&histories));
            }
            Err(error) => {
                self.failed("no acknowledged write is lost", &error.context("the end cannot be read"));
                self.checks.push(linearizable::check(&histories));
            }
        }
    }

    /// What every function is at the end, and the same as reads of each: the last of its history.
    async fn last(&self) -> anyhow::Result<(BTreeMap<String, Seen>, Vec<Operation>)> {
        let invoked = self.timeline.now();
        let last = read_all(&self.cluster.admin()?).await?;
        let returned = self.timeline.now();
        let keys = self.load.history.by_key().into_keys();
        let reads = keys.map(|key| Operation::last_read(&key, last.get(&key).copied(), invoked, returned));
        let reads = reads.collect();
        Ok((last, reads))
    }

    /// kill -9 of all but the executors; those have to end by themselves.
    async fn end(&mut self) -> anyhow::Result<Check> {
        let pids = self.cluster.pids();
        self.cluster.kill_everybody().await?;
        until_within(LEFTOVER_PATIENCE, "every process is gone", async || {
            let left: Vec<_> = pids.iter().filter(|&&pid| is_alive(pid)).collect();
            (!left.is_empty()).then(|| format!("pids {left:?}"))
        })
        .await?;
        Ok(Check::pass(
            "no process outlives its parent",
            format!("{} processes, executors included", pids.len()),
        ))
    }
}

fn not_ready(function: &messages::Function) -> Option<String> {
    let ready = |it: &&messages::Condition| it.r#type == "Ready";
    let condition = function.conditions.iter().find(ready)?;
    let name = || function.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    (function.enabled && condition.status() != messages::ConditionStatus::True)
        .then(|| format!("{}: {} ({})", name(), condition.reason, condition.message))
}

/// Whether the nodes together have the placements that the functions ask for.
fn misplaced(functions: &[messages::Function], nodes: &[messages::Node]) -> Option<String> {
    let replicas = |it: &messages::Function| it.spec.as_ref().map_or(0, |spec| spec.replicas.max(1));
    let wanted: u32 = functions.iter().filter(|it| it.enabled).map(replicas).sum();
    let placed: u32 = nodes.iter().map(|node| node.placements).sum();
    (placed != wanted).then(|| format!("{placed} placements instead of {wanted}"))
}

/// What controllers have to agree on of a function.
#[derive(Debug, PartialEq, Eq)]
struct Known {
    generation: u64,
    resource_version: u64,
    enabled: bool,
    /// The model file of the latest revision.
    digest: String,
}

impl Known {
    fn of(function: &messages::Function) -> Self {
        let latest = function.revisions.iter().find(|it| it.number == function.generation);
        let artifact = latest.and_then(|it| it.artifact.as_ref());
        Self {
            generation: function.generation,
            resource_version: function.resource_version,
            enabled: function.enabled,
            digest: artifact.map(|it| it.digest.clone()).unwrap_or_default(),
        }
    }
}

/// Every function but the one that is poked: such a write may come into force late.
async fn known(admin: &Admin) -> Result<BTreeMap<String, Known>, millrace_client::Error> {
    let functions: Vec<_> = admin.functions(None).try_collect().await?;
    let name = |it: &messages::Function| it.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
    let judged = functions.iter().filter(|it| name(it) != POKED);
    Ok(judged.map(|it| (name(it), Known::of(it))).collect())
}

fn agreement(controllers: usize, functions: usize) -> String {
    match (controllers, functions) {
        (1, 1) => "1 controller has its 1 function".to_owned(),
        (1, functions) => format!("1 controller has all {functions} functions"),
        (controllers, 1) => format!("{controllers} controllers agree on 1 function"),
        (controllers, functions) => format!("{controllers} controllers agree on {functions} functions"),
    }
}

fn difference(own: &BTreeMap<String, Known>, all: &BTreeMap<String, Known>) -> String {
    let keys = own.keys().chain(all.keys()).find(|&key| own.get(key) != all.get(key));
    keys.map(|key| format!("{key} is {:?} here and {:?} for all", own.get(key), all.get(key)))
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::agreement;

    #[test]
    fn what_controllers_agree_on_is_said_of_one_and_of_many() {
        assert_eq!(agreement(1, 1), "1 controller has its 1 function");
        assert_eq!(agreement(1, 2), "1 controller has all 2 functions");
        assert_eq!(agreement(3, 1), "3 controllers agree on 1 function");
        assert_eq!(agreement(3, 12), "3 controllers agree on 12 functions");
    }
}
