//! Clocks jump, far ahead and far back: the leader's, and a follower's that leads next. Nobody
//! notices but the times that are written down, and those keep the pace that is promised.

use std::time::Duration;

use anyhow::Context as _;
use futures::TryStreamExt as _;
use rand::Rng as _;

use super::stage::Stage;
use crate::report::Check;
use crate::timeline::seconds;

/// How far a clock jumps, in milliseconds: from a minute to two days.
const JUMP_MS: std::ops::Range<i64> = 60_000..172_800_000;
/// How many times as fast as time itself the cluster's time runs at most, and as slowly:
/// docs/operating.md.
const FASTEST: u32 = 10;
const SLOWEST: u32 = 2;
/// What the newest time that was written down may be late or early: writes may have paused.
const SLACK: Duration = Duration::from_secs(10);

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    let (before, begun) = (stage.latest_stamp().await?, stage.timeline.now());
    for round in 0..stage.rounds {
        let leader = stage.cluster.leader().await?;
        let victim = if round % 2 == 0 { leader } else { stage.a_follower().await? };
        stage.jump(victim, 1).await?;
        if victim != leader {
            // What its clock says matters from now on.
            stage.lead(victim).await?;
            stage.calm().await;
        }
        stage.jump(victim, -1).await?;
        stage.cluster.clear_faults(victim).await?;
        stage.fault();
        stage.resumed().await?;
        stage.whole().await?;
        stage.calm().await;
    }
    let passed = stage.timeline.now() - begun;
    let stamped = stage.latest_stamp().await?.saturating_sub(before);
    stage.checks.push(pace(passed, stamped));
    Ok(())
}

/// Whether stamped time kept its pace.
fn pace(passed: Duration, stamped: Duration) -> Check {
    let (least, most) = ((passed / SLOWEST).saturating_sub(SLACK), passed * FASTEST + SLACK);
    let detail = format!("{} in {}", seconds(stamped), seconds(passed));
    let bounds = format!("between {} and {} were to pass", seconds(least), seconds(most));
    let out_of_pace = !(least..=most).contains(&stamped);
    Check::of(
        "the cluster's time keeps its pace",
        detail,
        out_of_pace.then_some(bounds).into_iter().collect(),
    )
}

impl Stage {
    /// Lets a clock jump in a direction, and looks on for a while.
    async fn jump(&mut self, id: u64, direction: i64) -> anyhow::Result<()> {
        let by = self.rng.random_range(JUMP_MS);
        self.fault();
        self.cluster.move_clock(id, direction * by).await?;
        self.resumed().await?;
        self.note_writes_resumed();
        self.calm().await;
        Ok(())
    }

    /// Has a controller lead.
    async fn lead(&self, id: u64) -> anyhow::Result<()> {
        self.timeline.did(format!("asked for controller {id} to lead"));
        // It may have failed for a moment, or been done under another's lead: who leads then counts.
        let asked = self.cluster.admin()?.transfer_leadership(Some(id)).await;
        let (leader, term) = self.cluster.leader_and_term().await?;
        self.timeline.saw(match asked {
            Ok(_) => format!("controller {leader} leads, term {term}"),
            Err(error) => format!("controller {leader} leads, term {term}; it was not handed over: {error}"),
        });
        Ok(())
    }

    /// The latest time that a function says it was changed at.
    async fn latest_stamp(&self) -> anyhow::Result<Duration> {
        let functions: Vec<_> = self.cluster.admin()?.functions(None).try_collect().await?;
        let stamps = functions.iter().filter_map(|function| function.updated_at);
        // Both are from 0 on: it is of this century.
        let since_1970 = stamps.map(|it| Duration::new(it.seconds.cast_unsigned(), it.nanos.cast_unsigned()));
        since_1970.max().context("no function says when it was changed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Verdict;

    #[test]
    fn time_that_stood_still_or_leapt_fails() {
        let minutes = |n: u64| Duration::from_secs(60 * n);
        let verdict = |stamped| pace(minutes(2), stamped).verdict;
        assert_eq!(verdict(minutes(2)), Verdict::Pass);
        assert_eq!(verdict(minutes(15)), Verdict::Pass);
        assert_eq!(verdict(Duration::ZERO), Verdict::Fail);
        assert_eq!(verdict(minutes(24 * 60)), Verdict::Fail);
    }
}
