//! A controller that does not lead dies: its clients go elsewhere, and it catches up when it is back.

use rand::seq::IndexedRandom as _;

use super::stage::Stage;

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    for _ in 0..stage.rounds {
        let follower = stage.a_follower().await?;
        stage.fault();
        stage.cluster.kill_controller(follower, "which followed").await?;
        stage.resumed().await?;
        stage.note_writes_resumed();
        stage.calm().await;
        stage.cluster.restart_controller(follower).await?;
        stage.whole().await?;
        stage.calm().await;
    }
    Ok(())
}

impl Stage {
    /// A controller that does not lead now.
    pub(super) async fn a_follower(&mut self) -> anyhow::Result<u64> {
        let leader = self.cluster.leader().await?;
        let ids = self.cluster.controller_ids();
        let followers: Vec<_> = ids.into_iter().filter(|&id| id != leader).collect();
        let chosen = followers.choose(&mut self.rng).copied();
        chosen.ok_or_else(|| anyhow::anyhow!("there is no other controller than the leader"))
    }
}
