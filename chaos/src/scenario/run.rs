//! A scenario that can be run, from the file to the report of a run.

use std::path::Path;

use anyhow::Context as _;

use super::options::ScenarioOptions;
use super::spec::{CodedScenario, ScenarioSpec};
use super::stage::ScenarioStage;
use super::{
    clock_jump, full_disk, ground, hostile, partition, poison, rounds, small_disk, storm, torn_store,
};
use crate::cluster::Ground;
use crate::report::{CheckVerdict, RunReport};

/// A scenario that can be run.
#[derive(Debug, Clone)]
pub struct ChaosScenario {
    pub(super) spec: ScenarioSpec,
}

impl ChaosScenario {
    /// Reads a scenario from a user's file.
    ///
    /// # Errors
    /// If the file cannot be read, or is invalid, with the fault and the position in the file.
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
        ground::refusal(&self.spec, options.ground.kind, &options.words())
    }

    /// Returns the grounds on which the scenario can run.
    pub fn grounds(&self) -> impl Iterator<Item = Ground> {
        Ground::ALL.into_iter().filter(|&it| ground::refusal(&self.spec, it, &[]).is_none())
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
