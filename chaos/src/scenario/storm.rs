//! Runs the storm of a file: faults of several kinds, each at its own rate. The times of all faults
//! are drawn before the first one ([`schedule`]).

use std::collections::BTreeMap;
use std::time::Duration;

use rand::rngs::StdRng;

use super::spec::{AwaitCondition, FaultSpec, FaultStream, FaultTarget, Invariant};
use super::stage::ScenarioStage;
use super::watch::StormWatch;
use crate::cluster::{shared_memory, until_within};
use crate::oracle::{leaks, shared_memory};
use crate::timeline::seconds;

/// Maximum time until the shared memory of ended processes and requests is freed.
const RETURN_PATIENCE: Duration = Duration::from_secs(60);

/// A scheduled fault or repair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct ScheduledFault {
    /// Time since the start of the storm.
    at: Duration,
    /// The number of the fault's occurrence, counted over the whole storm.
    number: usize,
    what: FaultPhase,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum FaultPhase {
    /// The fault of the stream with this index begins.
    Begin(usize),
    /// The fault with the same number is repaired.
    End,
}

/// Returns the times of all faults and repairs, in order. No fault begins after the end of the
/// storm. A repair that would be later is made at the end.
fn schedule(streams: &[FaultStream], lasts: Duration, rng: &mut StdRng) -> Vec<ScheduledFault> {
    let mut due = Vec::new();
    let mut number = 0;
    for (index, stream) in streams.iter().enumerate() {
        let mut at = stream.every.draw(rng);
        while at < lasts {
            due.push(ScheduledFault { at, number, what: FaultPhase::Begin(index) });
            if let Some(span) = stream.r#for {
                due.push(ScheduledFault { at: at + span.draw(rng), number, what: FaultPhase::End });
            }
            number += 1;
            at += stream.every.draw(rng);
        }
    }
    due.sort_unstable();
    due.retain(|it| it.at <= lasts);
    due
}

pub(super) async fn play(
    stage: &mut ScenarioStage,
    streams: &[FaultStream],
    lasts: Duration,
) -> anyhow::Result<()> {
    let kills_executors = streams.iter().any(|it| matches!(it.fault, FaultSpec::Kill(FaultTarget::Executor)));
    let worker = match stage.holds(Invariant::Flat) {
        true => {
            stage.cluster.worker_names().first().map(|name| stage.cluster.worker_pid(name)).transpose()?
        }
        false => None,
    };
    let held = shared_memory(&stage.cluster.pids());
    let watch = StormWatch::begin(stage.cluster.admin()?, worker, stage.timeline.clone());
    stage.fault();
    let raged = stage.rage(streams, lasts, &watch).await;
    let gap = stage.load.answers.gap_max();
    stage.timeline.did("the storm is over");
    // Repair after a failure too: stopped and cut processes would otherwise stay so.
    stage.repair().await?;
    raged?;
    stage.fault();
    stage.resumed().await?;
    stage.wait_for(AwaitCondition::Whole).await?;
    let samples = watch.end().await?;
    if kills_executors {
        stage.checks.push(watch_check(&samples.returns, gap));
    }
    if stage.holds(Invariant::Flat) {
        stage.checks.extend(leaks::check(&samples.usage));
    }
    if stage.holds(Invariant::Returned) {
        // Stop the load first, because running requests use shared memory too.
        stage.load.stop().await?;
        stage.shared_memory_returns(&held).await;
    }
    Ok(())
}

fn watch_check(returns: &[Duration], gap: Duration) -> crate::report::PromiseCheck {
    let slowest = returns.iter().max().copied().unwrap_or_default();
    crate::report::PromiseCheck::pass(
        "executors come back",
        format!(
            "all {} killed executors, the slowest after {}; longest time without an answer {}",
            returns.len(),
            seconds(slowest),
            seconds(gap)
        ),
    )
}

impl ScenarioStage {
    /// Injects and repairs faults on schedule.
    async fn rage(
        &mut self,
        streams: &[FaultStream],
        lasts: Duration,
        watch: &StormWatch,
    ) -> anyhow::Result<()> {
        let due = schedule(streams, lasts, &mut self.rng);
        let begun = self.timeline.now();
        let mut open = BTreeMap::new();
        for ScheduledFault { at, number, what } in due {
            self.rest_until(begun + at).await;
            self.cluster.finish_ready_starts().await?;
            match what {
                FaultPhase::Begin(index) => match self.inflict(&streams[index].fault).await {
                    Ok(undos) => {
                        open.insert(number, undos);
                        for victim in std::mem::take(&mut self.latest.victims) {
                            watch.killed(victim);
                        }
                    }
                    // The target may be down because of another fault.
                    Err(error) => self.timeline.saw(format!("a fault finds no target: {error:#}")),
                },
                FaultPhase::End => {
                    let undos = open.remove(&number).unwrap_or_default();
                    // The target may hang or be cut off because of another fault, which the repair
                    // at the end undoes first.
                    if let Err(error) = self.undo(undos.clone()).await {
                        self.timeline.saw(format!("a repair waits for the end: {error:#}"));
                        self.open.extend(undos);
                    }
                }
            }
        }
        self.rest_until(begun + lasts).await;
        self.open.extend(open.into_values().flatten());
        Ok(())
    }

    async fn rest_until(&self, at: Duration) {
        tokio::time::sleep(at.saturating_sub(self.timeline.now())).await;
    }

    async fn shared_memory_returns(&mut self, before: &shared_memory::Files) {
        let mut after = shared_memory::Files::new();
        let back = until_within(RETURN_PATIENCE, "shared memory is as it was", async || {
            after = shared_memory(&self.cluster.pids());
            shared_memory::left_behind(before, &after).into_iter().next()
        });
        // The check reports the files that are left.
        back.await.unwrap_or_default();
        self.checks.push(shared_memory::check(before, &after));
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;
    use crate::scenario::spec::DurationRange;

    fn streams() -> Vec<FaultStream> {
        let ms = Duration::from_millis;
        let exactly = |at| DurationRange::exactly(ms(at));
        vec![
            FaultStream { every: exactly(2_000), fault: FaultSpec::Kill(FaultTarget::Executor), r#for: None },
            FaultStream {
                every: DurationRange { least: ms(3_000), most: ms(4_000) },
                fault: FaultSpec::Kill(FaultTarget::AnyWorker),
                r#for: Some(exactly(1_500)),
            },
        ]
    }

    #[test]
    fn faults_begin_at_their_rates_and_are_repaired_on_time() {
        let lasts = Duration::from_secs(60);
        let due = schedule(&streams(), lasts, &mut StdRng::seed_from_u64(1));
        assert!(due.windows(2).all(|pair| pair[0].at <= pair[1].at));
        let begins = |index| due.iter().filter(move |it| it.what == FaultPhase::Begin(index));
        let at: Vec<_> = begins(0).map(|it| it.at.as_secs()).collect();
        assert_eq!(at, (1..30).map(|n| n * 2).collect::<Vec<_>>());
        assert!((14..=20).contains(&begins(1).count()), "{due:?}");
        for begin in begins(1).filter(|it| it.at + Duration::from_millis(1_500) <= lasts) {
            let end = due.iter().find(|it| it.number == begin.number && it.what == FaultPhase::End).unwrap();
            assert_eq!(end.at - begin.at, Duration::from_millis(1_500));
        }
    }

    #[test]
    fn the_storm_depends_on_the_seed_alone() {
        let of = |seed| schedule(&streams(), Duration::from_secs(60), &mut StdRng::seed_from_u64(seed));
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }
}
