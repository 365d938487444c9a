//! A worker dies: gateways send its requests elsewhere, its lease ends, the function that it alone
//! had is placed on another, and it is taken in again when it is back.

use anyhow::Context as _;
use millrace_client::{Endpoints, messages::NodeStatus};
use rand::seq::IndexedRandom as _;

use super::PLACED_AGAIN;
use super::stage::{ALONE, EVERYWHERE, Stage};
use crate::cluster::until;
use crate::timeline::seconds;

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    for _ in 0..stage.rounds {
        let names = stage.cluster.worker_names();
        let worker = names.choose(&mut stage.rng).context("there is a worker")?.clone();
        stage.fault();
        let begun = stage.timeline.now();
        stage.cluster.kill_worker(&worker).await?;
        stage.resumed().await?;
        stage.lost(&worker).await?;
        for name in [EVERYWHERE, ALONE] {
            stage.served_again(name).await?;
        }
        let took = stage.timeline.now() - begun;
        stage.timeline.saw(format!("every function is served again {} after the fault", seconds(took)));
        stage.note("functions are placed again", PLACED_AGAIN, took);
        stage.calm().await;
        stage.cluster.restart_worker(&worker).await?;
        stage.whole().await?;
        stage.calm().await;
    }
    Ok(())
}

impl Stage {
    /// Waits until the cluster counts a worker as lost.
    pub(super) async fn lost(&self, worker: &str) -> anyhow::Result<()> {
        let admin = self.cluster.admin()?;
        until(&format!("{worker} counts as lost"), async || match admin.nodes().await {
            Ok(nodes) => {
                let status = nodes.iter().find(|node| node.name == worker).map(|node| node.status());
                (status != Some(NodeStatus::Lost)).then(|| format!("it is {status:?}"))
            }
            Err(error) => Some(error.to_string()),
        })
        .await?;
        self.timeline.saw(format!("{worker} counts as lost"));
        Ok(())
    }

    /// Waits until a function answers.
    pub(super) async fn served_again(&self, name: &str) -> anyhow::Result<()> {
        let endpoints = Endpoints::new(self.cluster.addresses())?;
        until(&format!("{name} is served"), async || {
            self.targets.ask(name, endpoints.clone()).await.err().map(|error| format!("{error:#}"))
        })
        .await
    }
}
