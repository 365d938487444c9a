//! Every controller dies at once: workers go on, nothing that was acknowledged is forgotten, and the
//! group goes on from its disks.

use std::time::Duration;

use rand::Rng as _;

use super::stage::Stage;

/// How long nobody is there, in milliseconds.
const OUTAGE_MS: std::ops::Range<u64> = 100..2000;

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    for _ in 0..stage.rounds {
        stage.cluster.kill_all_controllers().await?;
        let outage = Duration::from_millis(stage.rng.random_range(OUTAGE_MS));
        tokio::time::sleep(outage).await;
        // How soon they are back is for whoever starts them: measured from there.
        stage.fault();
        stage.cluster.restart_all_controllers().await?;
        let (leader, term) = stage.cluster.leader_but(None).await?;
        stage.timeline.saw(format!("controller {leader} leads, term {term}"));
        stage.resumed().await?;
        stage.whole().await?;
        stage.calm().await;
    }
    Ok(())
}
