//! Runs the rounds of a file, step by step.

use anyhow::Context as _;

use super::promise::TimedPromise;
use super::spec::{self, AwaitCondition, RoundStep};
use super::stage::ScenarioStage;

pub(super) async fn play(stage: &mut ScenarioStage, round: &[RoundStep]) -> anyhow::Result<()> {
    let played = stage.all_rounds(round).await;
    // Repair after a failure too, so that open faults do not affect the judgement.
    let repaired = stage.repair().await;
    played.and(repaired)
}

impl ScenarioStage {
    async fn all_rounds(&mut self, round: &[RoundStep]) -> anyhow::Result<()> {
        for _ in 0..self.rounds {
            for step in round {
                self.carry_out(step).await?;
            }
        }
        Ok(())
    }

    async fn carry_out(&mut self, step: &RoundStep) -> anyhow::Result<()> {
        match step {
            RoundStep::Fault(fault) => {
                self.fault();
                let undos = self.inflict(fault).await?;
                self.open.extend(undos);
                Ok(())
            }
            RoundStep::Await(awaited) => self.wait_for(*awaited).await,
            RoundStep::Promise(spec::PromiseSpec { r#await, within, source }) => {
                self.wait_for(*r#await).await?;
                let took = match r#await {
                    // Use the clients' measurement, because the harness looks only now and then.
                    AwaitCondition::Service => {
                        self.load.writes.resumed_after().or(self.load.answers.resumed_after())
                    }
                    _ => Some(self.timeline.now() - self.latest.at),
                };
                let promise = TimedPromise { within: within.most, source: source.clone() };
                self.note(
                    name(*r#await),
                    promise,
                    took.context("no write and no answer was recorded after the fault")?,
                );
                Ok(())
            }
            RoundStep::Pause(span) => {
                let span = span.draw(&mut self.rng);
                tokio::time::sleep(span).await;
                Ok(())
            }
            RoundStep::Repair => self.repair().await,
        }
    }

    /// Undoes every open fault.
    pub(super) async fn repair(&mut self) -> anyhow::Result<()> {
        let mut open = std::mem::take(&mut self.open);
        open.sort();
        self.undo(open).await?;
        self.cluster.join_starts().await
    }

    pub(super) async fn wait_for(&mut self, awaited: AwaitCondition) -> anyhow::Result<()> {
        match awaited {
            AwaitCondition::AnotherLeader => {
                // The old leader may be cut off, and still report itself as the leader.
                let old = self.latest.leader;
                let ids = self.cluster.controller_ids();
                let others: Vec<u64> = ids.into_iter().filter(|&id| Some(id) != old).collect();
                let (leader, term) = self.cluster.leader_among(&others, old).await?;
                self.timeline.saw(format!("controller {leader} leads, term {term}"));
                Ok(())
            }
            AwaitCondition::Service => self.resumed().await,
            AwaitCondition::Lost => {
                let worker = self.latest.worker.clone().context("no fault concerned a worker")?;
                self.lost(&worker).await
            }
            AwaitCondition::Served => self.served().await,
            AwaitCondition::Executors => {
                for victim in std::mem::take(&mut self.latest.victims) {
                    self.executor_back(&victim).await?;
                }
                Ok(())
            }
            AwaitCondition::Whole => self.whole().await,
        }
    }
}

/// Returns the name of the check for a promise.
fn name(awaited: AwaitCondition) -> &'static str {
    match awaited {
        AwaitCondition::AnotherLeader => "another controller leads",
        AwaitCondition::Service => "service resumes",
        AwaitCondition::Lost => "a lost worker counts as lost",
        AwaitCondition::Served => "functions are placed again",
        AwaitCondition::Executors => "executors come back",
        AwaitCondition::Whole => "everybody is back",
    }
}
