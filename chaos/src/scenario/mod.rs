//! The scenarios. Each consists of a cluster under load, faults, and invariants that have to hold
//! afterwards. A file defines a scenario ([`spec`]). The parts that a file cannot express are in
//! code, under the name that the file `plays`.
//!
//! Every run is judged at its end by the invariants of its file (`judge`). Scenarios in code add
//! their own checks.

mod census;
mod clock_jump;
mod damage;
mod executors;
mod faults;
mod full_disk;
mod ground;
mod hostile;
mod judge;
mod library;
mod partition;
mod poison;
mod rounds;
mod small_disk;
mod spec;
mod stage;
mod storm;
mod torn_store;
mod watch;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;

pub use self::library::{all, find};
use self::spec::{CodedScenario, ScenarioSpec};
use self::stage::ScenarioStage;
use crate::cluster::{EnvironmentConfig, TestEnvironment};
use crate::report::{CheckVerdict, RunReport};
use crate::timeline::EventOutput;

/// A scenario that can be run.
#[derive(Debug, Clone)]
pub struct ChaosScenario {
    spec: ScenarioSpec,
}

/// The options of a run.
#[derive(Debug, Clone)]
pub struct ScenarioOptions {
    /// The seed of the random choices.
    pub seed: u64,
    /// The `millrace` binary under test.
    pub program: PathBuf,
    /// The ground of the processes.
    pub terrain: EnvironmentConfig,
    /// Number of rounds; `None` for the scenario's own.
    pub rounds: Option<u32>,
    /// Duration of a storm, or of a run of hostile clients; `None` for the scenario's own.
    pub lasts: Option<Duration>,
    /// Number of functions of each numbered kind; `None` for the scenario's own.
    pub functions: Option<u32>,
    /// The preset with which the cluster starts; `None` for the default.
    pub preset: Option<String>,
    /// The isolation of the workers; `None` for the scenario's own.
    pub isolation: Option<String>,
    /// The destination of new events.
    pub echo: EventOutput,
    /// Whether the processes' folders and logs are kept.
    pub keep: KeepFolders,
}

impl ScenarioOptions {
    /// Returns the arguments for the processes, as on the command line.
    fn words(&self) -> Vec<String> {
        let named = [("--preset", &self.preset), ("--isolation", &self.isolation)];
        let words = named.into_iter().flat_map(|(flag, name)| Some([flag.to_owned(), name.clone()?]));
        words.flatten().collect()
    }

    /// Returns the command that runs a scenario again with the same choices.
    fn again(&self, scenario: &ScenarioSpec) -> String {
        let mut words = vec!["millrace-chaos run".to_owned(), scenario.name.clone()];
        words.push(format!("--seed {}", self.seed));
        match scenario.lasts.is_none() {
            true => words.extend(self.rounds.map(|rounds| format!("--rounds {rounds}"))),
            false => words.extend(self.lasts.map(|it| format!("--lasts {}s", it.as_secs_f64()))),
        }
        words.extend(self.functions.map(|functions| format!("--functions {functions}")));
        words.extend(self.words());
        let ground = self.terrain.ground;
        words.extend((ground != TestEnvironment::default()).then(|| format!("--ground {}", ground.word())));
        words.join(" ")
    }
}

/// Whether the processes' folders and logs are kept at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepFolders {
    /// Folders and logs are always kept.
    Always,
    /// Folders and logs are kept if the run failed.
    Failed,
}

/// A promised time, with the document that contains the promise. This machine is shared, and the
/// binary may be a debug build. A run therefore fails only beyond
/// [`ALLOWANCE`](crate::oracle::healthy::ALLOWANCE) times the promise, and reports the measured
/// time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TimedPromise {
    pub(crate) within: Duration,
    pub(crate) source: String,
}

impl TimedPromise {
    /// Returns the promise for writes after the loss of a leader, or of any other controller.
    fn writes_resume() -> Self {
        let source = "docs/operate/promises.md, the leader is lost: writes resume within 2 s".to_owned();
        Self { within: Duration::from_secs(2), source }
    }

    /// Returns the promise for a function that lost its only worker: the lease of 2 s and one
    /// second.
    fn placed_again() -> Self {
        let source =
            "docs/operate/promises.md, a worker is lost: its functions are served within 3 s".to_owned();
        Self { within: Duration::from_secs(3), source }
    }
}

impl ChaosScenario {
    /// Reads a scenario from a user's file.
    ///
    /// # Errors
    /// If the file cannot be read, or is invalid, with the fault and its position.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self { spec: ScenarioSpec::parse(&path.display().to_string(), &text)? })
    }

    #[must_use]
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the description of the scenario, in a line.
    #[must_use]
    pub fn about(&self) -> &str {
        &self.spec.about
    }

    /// Returns the default length of the scenario: a number of rounds, or a duration.
    #[must_use]
    pub fn length(&self) -> String {
        match (self.spec.rounds, self.spec.lasts) {
            (_, Some(lasts)) => humantime::format_duration(lasts.most).to_string(),
            (Some(rounds), None) if rounds.get() > 1 => format!("{rounds} rounds"),
            _ => "1 round".to_owned(),
        }
    }

    /// Returns the reason why the scenario cannot run on the ground, with the next step.
    #[must_use]
    pub fn refusal(&self, options: &ScenarioOptions) -> Option<String> {
        ground::refusal(&self.spec, options.terrain.ground, &options.words())
    }

    /// Returns the grounds on which the scenario can run.
    pub fn grounds(&self) -> impl Iterator<Item = TestEnvironment> {
        TestEnvironment::ALL.into_iter().filter(|&it| ground::refusal(&self.spec, it, &[]).is_none())
    }

    /// Returns the report of a run that this machine, or the ground, does not allow.
    #[must_use]
    pub fn skipped(&self, options: &ScenarioOptions, reason: String) -> RunReport {
        RunReport { reason: Some(reason), ..self.report(options) }
    }

    fn report(&self, options: &ScenarioOptions) -> RunReport {
        let ScenarioSpec { name, about, .. } = &self.spec;
        RunReport::begin(name, about, options.seed, options.again(&self.spec))
    }

    /// Runs the scenario, and judges the records. Errors of the run are in the report, because a
    /// cluster that does not recover is a result.
    pub async fn run(&self, options: &ScenarioOptions) -> RunReport {
        let spec = &self.spec;
        let small_disk =
            || (spec.plays == Some(CodedScenario::FullDisk)).then(small_disk::not_allowed).flatten();
        if let Some(reason) = self.refusal(options).or_else(small_disk) {
            return self.skipped(options, reason);
        }
        let mut report = self.report(options);
        let mut stage = match ScenarioStage::begin(spec, options).await {
            Ok(stage) => stage,
            Err(error) => {
                let reason = Some(format!("the cluster did not start: {error:#}"));
                return RunReport { verdict: CheckVerdict::Fail, reason, ..report };
            }
        };
        let played = play(&mut stage, spec, options).await;
        stage.finish(played, options.keep, &mut report).await;
        report
    }
}

async fn play(
    stage: &mut ScenarioStage,
    spec: &ScenarioSpec,
    options: &ScenarioOptions,
) -> anyhow::Result<()> {
    match (spec.plays, spec.lasts) {
        (Some(CodedScenario::ClockJump), _) => clock_jump::play(stage).await,
        (Some(CodedScenario::FullDisk), _) => full_disk::play(stage).await,
        (Some(CodedScenario::HostileClients), lasts) => {
            let lasts = options.lasts.or(lasts.map(|it| it.most));
            hostile::play(stage, lasts.context("hostile clients last for some time")?).await
        }
        (Some(CodedScenario::Partition), _) => partition::play(stage).await,
        (Some(CodedScenario::PoisonRequest), _) => poison::play(stage).await,
        (Some(CodedScenario::TornStore), _) => torn_store::play(stage).await,
        (None, Some(lasts)) => storm::play(stage, &spec.storm, options.lasts.unwrap_or(lasts.most)).await,
        (None, None) => rounds::play(stage, &spec.round).await,
    }
}
