//! The scenario in which clocks jump far ahead and far back: the leader's clock, and the clock of a
//! follower that leads next. Only recorded times may show the jumps, and these times keep the
//! promised pace.

use std::time::Duration;

use anyhow::Context as _;
use futures::TryStreamExt as _;
use rand::Rng as _;

use super::stage::ScenarioStage;
use crate::report::PromiseCheck;
use crate::timeline::seconds;

/// Range of a clock's jump, in milliseconds: from a minute to two days.
const JUMP_MS: std::ops::Range<i64> = 60_000..172_800_000;
/// Maximum ratio of the cluster's time to elapsed time: docs/operate/controllers.md.
const FASTEST: u32 = 10;
/// Maximum ratio of elapsed time to the cluster's time.
const SLOWEST: u32 = 2;
/// Allowed error of the newest recorded time, because writes may have paused.
const SLACK: Duration = Duration::from_secs(10);

pub(super) async fn play(stage: &mut ScenarioStage) -> anyhow::Result<()> {
    let before = stage.latest_stamp().await?;
    let begun = stage.timeline.now();
    for round in 0..stage.rounds {
        let leader = stage.cluster.leader().await?;
        let victim = if round % 2 == 0 { leader } else { stage.a_follower().await? };
        stage.jump(victim, 1).await?;
        if victim != leader {
            // The clock of the new leader determines the cluster's time from now on.
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

/// Checks whether stamped time kept its pace.
fn pace(passed: Duration, stamped: Duration) -> PromiseCheck {
    let least = (passed / SLOWEST).saturating_sub(SLACK);
    let most = passed * FASTEST + SLACK;
    let detail = format!("{} in {}", seconds(stamped), seconds(passed));
    let bounds = format!("expected between {} and {}", seconds(least), seconds(most));
    let out_of_pace = !(least..=most).contains(&stamped);
    PromiseCheck::of(
        "the cluster's time keeps its pace",
        detail,
        out_of_pace.then_some(bounds).into_iter().collect(),
    )
}

impl ScenarioStage {
    /// Makes a clock jump in a direction, and observes the cluster for a while.
    async fn jump(&mut self, id: u64, direction: i64) -> anyhow::Result<()> {
        let by = self.rng.random_range(JUMP_MS);
        self.fault();
        self.cluster.move_clock(id, direction * by).await?;
        self.resumed().await?;
        self.note_writes_resumed();
        self.calm().await;
        Ok(())
    }

    /// Transfers the leadership to a controller.
    async fn lead(&self, id: u64) -> anyhow::Result<()> {
        self.timeline.did(format!("asked for controller {id} to lead"));
        // The transfer may have failed, or another controller may have been elected meanwhile. The
        // report therefore names the present leader.
        let asked = self.cluster.admin()?.transfer_leadership(Some(id)).await;
        let (leader, term) = self.cluster.leader_and_term().await?;
        self.timeline.saw(match asked {
            Ok(_) => format!("controller {leader} leads, term {term}"),
            Err(error) => format!("controller {leader} leads, term {term}; the transfer failed: {error}"),
        });
        Ok(())
    }

    /// Returns the latest time of change of any function.
    async fn latest_stamp(&self) -> anyhow::Result<Duration> {
        let functions: Vec<_> = self.cluster.admin()?.functions(None).try_collect().await?;
        let stamps = functions.iter().filter_map(|function| function.updated_at);
        // Seconds and nanoseconds are not negative, because the times are of this century.
        let since_1970 = stamps.map(|it| Duration::new(it.seconds.cast_unsigned(), it.nanos.cast_unsigned()));
        since_1970.max().context("no function has a time of change")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::CheckVerdict;

    #[test]
    fn stamped_time_outside_its_pace_fails() {
        let minutes = |n: u64| Duration::from_secs(60 * n);
        let verdict = |stamped| pace(minutes(2), stamped).verdict;
        assert_eq!(verdict(minutes(2)), CheckVerdict::Pass);
        assert_eq!(verdict(minutes(15)), CheckVerdict::Pass);
        assert_eq!(verdict(Duration::ZERO), CheckVerdict::Fail);
        assert_eq!(verdict(minutes(24 * 60)), CheckVerdict::Fail);
    }
}
