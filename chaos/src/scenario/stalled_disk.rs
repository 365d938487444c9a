//! Disks stall: a follower's, which nobody waits for; the leader's, hanging or only slow, and another
//! leads. When it is well again it follows.

use std::time::Duration;

use rand::Rng as _;

use super::stage::Stage;

/// How much longer each sync of a follower takes, in milliseconds: it is slow, or hangs.
const FOLLOWER_SLOW_MS: std::ops::Range<u64> = 50..150;
const FOLLOWER_HANGS_MS: std::ops::Range<u64> = 1_000..10_000;
/// A leader's disk that hangs: well beyond the followers' patience.
const HANGS_MS: std::ops::Range<u64> = 2_000..10_000;
/// A leader's disk that is slow, and not slow enough for the others to stand: it hands over itself.
const SLOW_MS: std::ops::Range<u64> = 220..350;
/// Longer than a round takes: a stall ends when it is cleared.
const LASTS: Duration = Duration::from_secs(300);

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    for round in 0..stage.rounds {
        stage.stalled_follower().await?;
        match round % 2 {
            0 => stage.hanging_leader().await?,
            _ => stage.slow_leader().await?,
        }
    }
    Ok(())
}

impl Stage {
    async fn stalled_follower(&mut self) -> anyhow::Result<()> {
        let follower = self.a_follower().await?;
        let range = if self.rng.random() { FOLLOWER_SLOW_MS } else { FOLLOWER_HANGS_MS };
        let each_sync = Duration::from_millis(self.rng.random_range(range));
        self.fault();
        self.cluster.stall_disk(follower, each_sync, LASTS).await?;
        self.resumed().await?;
        self.note_writes_resumed();
        self.calm().await;
        self.calm().await;
        self.well_again(follower).await
    }

    async fn hanging_leader(&mut self) -> anyhow::Result<()> {
        let leader = self.cluster.leader().await?;
        let each_sync = Duration::from_millis(self.rng.random_range(HANGS_MS));
        self.fault();
        self.cluster.stall_disk(leader, each_sync, LASTS).await?;
        self.another_leads(leader).await?;
        self.resumed().await?;
        self.note_writes_resumed();
        self.calm().await;
        self.well_again(leader).await
    }

    /// Writes go on meanwhile. How fast, the probe cannot tell: it may ask the slow controller, which
    /// answers once it has the change itself, and not wait for that.
    async fn slow_leader(&mut self) -> anyhow::Result<()> {
        let leader = self.cluster.leader().await?;
        let each_sync = Duration::from_millis(self.rng.random_range(SLOW_MS));
        self.cluster.stall_disk(leader, each_sync, LASTS).await?;
        self.another_leads(leader).await?;
        self.calm().await;
        self.fault();
        self.well_again(leader).await?;
        self.resumed().await
    }

    async fn another_leads(&self, than: u64) -> anyhow::Result<()> {
        let begun = self.timeline.now();
        let (next, term) = self.cluster.leader_but(Some(than)).await?;
        let took = crate::timeline::seconds(self.timeline.now() - begun);
        self.timeline.saw(format!("controller {next} leads, term {term}, {took} after the stall began"));
        Ok(())
    }

    async fn well_again(&self, id: u64) -> anyhow::Result<()> {
        self.cluster.clear_faults(id).await?;
        self.whole().await?;
        self.calm().await;
        Ok(())
    }
}
