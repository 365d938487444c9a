//! The leader dies: another is elected, writes resume, and it comes back as a follower.

use super::stage::Stage;

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    for _ in 0..stage.rounds {
        let leader = stage.cluster.leader().await?;
        stage.fault();
        stage.cluster.kill_controller(leader, "which led").await?;
        let (next, term) = stage.cluster.leader_but(Some(leader)).await?;
        stage.timeline.saw(format!("controller {next} leads, term {term}"));
        stage.resumed().await?;
        stage.note_writes_resumed();
        stage.calm().await;
        stage.cluster.restart_controller(leader).await?;
        stage.whole().await?;
        stage.calm().await;
    }
    Ok(())
}
