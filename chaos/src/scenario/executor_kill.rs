//! An executor dies: its requests run again on another GPU or on its next incarnation, and the
//! worker starts it again.

use anyhow::Context as _;
use rand::seq::IndexedRandom as _;
use rustix::process::Signal;

use super::stage::Stage;
use crate::cluster::{signal, until};
use crate::timeline::seconds;

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    for _ in 0..stage.rounds {
        let nodes = stage.cluster.admin()?.nodes().await?;
        let node = nodes.choose(&mut stage.rng).context("there is a node")?;
        let gpu = node.gpus.choose(&mut stage.rng).context("a node has a GPU")?;
        let (name, index, pid) = (node.name.clone(), gpu.index, gpu.executor_pid);
        stage.fault();
        let begun = stage.timeline.now();
        stage.timeline.did(format!("kill -9 of the executor of GPU {index} of {name} (pid {pid})"));
        signal(pid, Signal::KILL)?;
        stage.resumed().await?;
        stage.executor_back(&name, index, pid).await?;
        let took = stage.timeline.now() - begun;
        stage.timeline.saw(format!("GPU {index} of {name} is up again, {} after the fault", seconds(took)));
        stage.calm().await;
    }
    Ok(())
}

impl Stage {
    /// Waits until a GPU has another executor than the one of this pid.
    pub(super) async fn executor_back(&self, node: &str, gpu: u32, than: u32) -> anyhow::Result<()> {
        let admin = self.cluster.admin()?;
        until(&format!("GPU {gpu} of {node} has an executor"), async || {
            let nodes = match admin.nodes().await {
                Ok(nodes) => nodes,
                Err(error) => return Some(error.to_string()),
            };
            let gpus = nodes.iter().filter(|it| it.name == node).flat_map(|it| &it.gpus);
            let found = gpus.into_iter().find(|it| it.index == gpu);
            let back = found.is_some_and(|it| it.health == "Up" && it.executor_pid != than);
            (!back).then(|| format!("{found:?}"))
        })
        .await
    }
}
