//! To come.

use super::stage::Stage;

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    stage.calm().await;
    Ok(())
}
