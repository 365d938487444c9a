//! The scenarios: each is a cluster under load, faults, and what has to hold afterwards. A file says
//! it ([`spec`]); what a file cannot say is in code, under the name that it `plays`.
//!
//! Every run is judged at its end by the invariants of its file (`judge`); what is in code adds its own
//! checks.

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
use self::spec::{Code, Spec};
use self::stage::Stage;
use crate::cluster::{Ground, Terrain};
use crate::report::{Report, Verdict};
use crate::timeline::Echo;

/// A scenario a person can run.
#[derive(Debug, Clone)]
pub struct Scenario {
    spec: Spec,
}

/// How to run a scenario.
#[derive(Debug, Clone)]
pub struct Options {
    /// Where its random choices begin.
    pub seed: u64,
    /// The `millrace` binary.
    pub program: PathBuf,
    /// Where its processes run.
    pub terrain: Terrain,
    /// How many rounds; `None` for the scenario's own number.
    pub rounds: Option<u32>,
    /// The duration of a storm, or of a run of hostile clients; `None` for the scenario's own.
    pub lasts: Option<Duration>,
    /// How many functions there are of those that are several; `None` for the scenario's own number.
    pub functions: Option<u32>,
    /// The preset that the cluster begins with; `None` for the default one.
    pub preset: Option<String>,
    /// The isolation of the workers; `None` for the scenario's own.
    pub isolation: Option<String>,
    /// Where events go as they happen.
    pub echo: Echo,
    /// What becomes of the processes' folders and logs.
    pub keep: Keep,
}

impl Options {
    /// The options that processes are started with, as they are typed.
    fn words(&self) -> Vec<String> {
        let named = [("--preset", &self.preset), ("--isolation", &self.isolation)];
        let words = named.into_iter().flat_map(|(flag, name)| Some([flag.to_owned(), name.clone()?]));
        words.flatten().collect()
    }

    /// The command that makes the same choices in a scenario again.
    fn again(&self, scenario: &Spec) -> String {
        let mut words = vec!["millrace-chaos run".to_owned(), scenario.name.clone()];
        words.push(format!("--seed {}", self.seed));
        match scenario.lasts.is_none() {
            true => words.extend(self.rounds.map(|rounds| format!("--rounds {rounds}"))),
            false => words.extend(self.lasts.map(|it| format!("--lasts {}s", it.as_secs_f64()))),
        }
        words.extend(self.functions.map(|functions| format!("--functions {functions}")));
        words.extend(self.words());
        let ground = self.terrain.ground;
        words.extend((ground != Ground::default()).then(|| format!("--ground {}", ground.word())));
        words.join(" ")
    }
}

/// What becomes of the processes' folders and logs at the end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// They stay.
    Always,
    /// They stay when the run failed.
    Failed,
}

/// What a promise in seconds is, and where it is made. This machine is shared and the binary may be
/// a debug build: a run fails only beyond [`ALLOWANCE`](crate::oracle::healthy::ALLOWANCE) times the
/// promise, and prints what it took.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Promise {
    pub(crate) within: Duration,
    pub(crate) source: String,
}

impl Promise {
    /// Writes after the loss of a leader, and after that of any other controller.
    fn writes_resume() -> Self {
        let source = "DESIGN §7, leader: writes resume < 2 s".to_owned();
        Self { within: Duration::from_secs(2), source }
    }

    /// A function whose only worker was lost: its lease of 2 s and a second.
    fn placed_again() -> Self {
        let source = "DESIGN §7, worker: new placement < lease + 1 s".to_owned();
        Self { within: Duration::from_secs(3), source }
    }
}

impl Scenario {
    /// Reads a user's own.
    ///
    /// # Errors
    /// When there is no such file, or what is wrong with it, and where.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Ok(Self { spec: Spec::parse(&path.display().to_string(), &text)? })
    }

    /// What it is called.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// What it does, in a line.
    #[must_use]
    pub fn about(&self) -> &str {
        &self.spec.about
    }

    /// How long it is unless said otherwise: so many rounds, or so much time.
    #[must_use]
    pub fn length(&self) -> String {
        match (self.spec.rounds, self.spec.lasts) {
            (_, Some(lasts)) => humantime::format_duration(lasts.most).to_string(),
            (Some(rounds), None) if rounds.get() > 1 => format!("{rounds} rounds"),
            _ => "1 round".to_owned(),
        }
    }

    /// What its ground cannot do of it, and what to do about that.
    #[must_use]
    pub fn refusal(&self, options: &Options) -> Option<String> {
        ground::refusal(&self.spec, options.terrain.ground, &options.words())
    }

    /// Where it can run.
    pub fn grounds(&self) -> impl Iterator<Item = Ground> {
        Ground::ALL.into_iter().filter(|&it| ground::refusal(&self.spec, it, &[]).is_none())
    }

    /// The report of a run that this machine, or its ground, does not allow.
    #[must_use]
    pub fn skipped(&self, options: &Options, reason: String) -> Report {
        Report { reason: Some(reason), ..self.report(options) }
    }

    fn report(&self, options: &Options) -> Report {
        let Spec { name, about, .. } = &self.spec;
        Report::begin(name, about, options.seed, options.again(&self.spec))
    }

    /// Plays it, and judges what was recorded. What goes wrong on the way is in the report: a
    /// cluster that does not come back is what is looked for.
    pub async fn run(&self, options: &Options) -> Report {
        let spec = &self.spec;
        let small_disk = || (spec.plays == Some(Code::FullDisk)).then(small_disk::not_allowed).flatten();
        if let Some(reason) = self.refusal(options).or_else(small_disk) {
            return self.skipped(options, reason);
        }
        let mut report = self.report(options);
        let mut stage = match Stage::begin(spec, options).await {
            Ok(stage) => stage,
            Err(error) => {
                let reason = Some(format!("the cluster did not start: {error:#}"));
                return Report { verdict: Verdict::Fail, reason, ..report };
            }
        };
        let played = play(&mut stage, spec, options).await;
        stage.finish(played, options.keep, &mut report).await;
        report
    }
}

async fn play(stage: &mut Stage, spec: &Spec, options: &Options) -> anyhow::Result<()> {
    match (spec.plays, spec.lasts) {
        (Some(Code::ClockJump), _) => clock_jump::play(stage).await,
        (Some(Code::FullDisk), _) => full_disk::play(stage).await,
        (Some(Code::HostileClients), lasts) => {
            let lasts = options.lasts.or(lasts.map(|it| it.most));
            hostile::play(stage, lasts.context("hostile clients last for some time")?).await
        }
        (Some(Code::Partition), _) => partition::play(stage).await,
        (Some(Code::PoisonRequest), _) => poison::play(stage).await,
        (Some(Code::TornStore), _) => torn_store::play(stage).await,
        (None, Some(lasts)) => storm::play(stage, &spec.storm, options.lasts.unwrap_or(lasts.most)).await,
        (None, None) => rounds::play(stage, &spec.round).await,
    }
}
