//! Runs the rounds of a file, step by step.

use anyhow::Context as _;

use super::Promise;
use super::spec::{self, Await, Step};
use super::stage::Stage;

pub(super) async fn play(stage: &mut Stage, round: &[Step]) -> anyhow::Result<()> {
    let played = stage.all_rounds(round).await;
    // Repair after a failure too, so that open faults do not affect the judgement.
    let repaired = stage.repair().await;
    played.and(repaired)
}

impl Stage {
    async fn all_rounds(&mut self, round: &[Step]) -> anyhow::Result<()> {
        for _ in 0..self.rounds {
            for step in round {
                self.carry_out(step).await?;
            }
        }
        Ok(())
    }

    async fn carry_out(&mut self, step: &Step) -> anyhow::Result<()> {
        match step {
            Step::Fault(fault) => {
                self.fault();
                let undos = self.inflict(fault).await?;
                self.open.extend(undos);
                Ok(())
            }
            Step::Await(awaited) => self.wait_for(*awaited).await,
            Step::Promise(spec::Promise { r#await, within, source }) => {
                self.wait_for(*r#await).await?;
                let took = match r#await {
                    // Use the clients' measurement, because the harness looks only now and then.
                    Await::Service => self.load.writes.resumed_after().or(self.load.answers.resumed_after()),
                    _ => Some(self.timeline.now() - self.latest.at),
                };
                let promise = Promise { within: within.most, source: source.clone() };
                self.note(name(*r#await), promise, took.context("the service is back")?);
                Ok(())
            }
            Step::Pause(span) => {
                let span = span.draw(&mut self.rng);
                tokio::time::sleep(span).await;
                Ok(())
            }
            Step::Repair => self.repair().await,
        }
    }

    /// Undoes every open fault.
    pub(super) async fn repair(&mut self) -> anyhow::Result<()> {
        let mut open = std::mem::take(&mut self.open);
        open.sort();
        self.undo(open).await?;
        self.cluster.join_starts().await
    }

    pub(super) async fn wait_for(&mut self, awaited: Await) -> anyhow::Result<()> {
        match awaited {
            Await::AnotherLeader => {
                // The old leader may be cut off, and still report itself as the leader.
                let old = self.latest.leader;
                let ids = self.cluster.controller_ids();
                let others: Vec<u64> = ids.into_iter().filter(|&id| Some(id) != old).collect();
                let (leader, term) = self.cluster.leader_among(&others, old).await?;
                self.timeline.saw(format!("controller {leader} leads, term {term}"));
                Ok(())
            }
            Await::Service => self.resumed().await,
            Await::Lost => {
                let worker = self.latest.worker.clone().context("no fault concerned a worker")?;
                self.lost(&worker).await
            }
            Await::Served => self.served().await,
            Await::Executors => {
                for victim in std::mem::take(&mut self.latest.victims) {
                    self.executor_back(&victim).await?;
                }
                Ok(())
            }
            Await::Whole => self.whole().await,
        }
    }
}

/// Returns the name of the check for a promise.
fn name(awaited: Await) -> &'static str {
    match awaited {
        Await::AnotherLeader => "another controller leads",
        Await::Service => "writes resume",
        Await::Lost => "a lost worker counts as lost",
        Await::Served => "functions are placed again",
        Await::Executors => "executors come back",
        Await::Whole => "everybody is back",
    }
}
