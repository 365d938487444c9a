//! Executor processes, for each GPU or for each model: choosing a victim, killing it, and waiting for its
//! replacement.

use anyhow::Context as _;
use rand::seq::IndexedRandom as _;
use rustix::process::Signal;

use super::stage::ScenarioStage;
use super::victim::{ExecutorVictim, found, not_back};
use crate::cluster::{descendants, is_alive, own_pid, signal, until};
use crate::timeline::seconds;

impl ScenarioStage {
    /// Chooses a running executor, by the seed. In isolation executors come and go with
    /// their models, and a reported pid may already belong to another process. Therefore only
    /// children of a worker count.
    pub(super) async fn an_executor(&mut self) -> anyhow::Result<ExecutorVictim> {
        let mut running = Vec::new();
        until("an executor runs", async || {
            let workers = self.cluster.worker_names().into_iter();
            let workers = workers.filter_map(|name| Some((self.cluster.worker_pid(&name).ok()?, name)));
            let each = workers
                .flat_map(|(pid, name)| descendants(pid).into_iter().map(move |it| (it, name.clone())));
            running = each.filter(|&(pid, _)| is_alive(pid)).collect();
            running.is_empty().then(|| "no worker has an executor".to_owned())
        })
        .await?;
        let (pid, node) = running.choose(&mut self.rng).cloned().context("an executor runs")?;
        let told = own_pid(pid);
        let role = "of a model".to_owned();
        let unknown = ExecutorVictim { pid, told, node, gpu: None, role, functions: Vec::new() };
        Ok(found(&self.cluster.admin()?.nodes().await?, unknown))
    }

    /// Kills an executor with SIGKILL.
    pub(super) fn kill_executor(&mut self, victim: &ExecutorVictim) -> anyhow::Result<()> {
        let ExecutorVictim { pid, role, .. } = victim;
        self.timeline.fault(format!("kill -9 of the executor {role} (pid {pid})"));
        let now = self.timeline.now();
        self.killed.push(now..=now);
        signal(*pid, Signal::KILL)
    }

    /// Waits until every GPU is up without the killed executor, and the executor's own functions
    /// are served again. In isolation the process of a model starts when a request needs it.
    pub(super) async fn executor_back(&self, victim: &ExecutorVictim) -> anyhow::Result<()> {
        let begun = self.timeline.now();
        let admin = self.cluster.admin()?;
        until(&format!("the executor {} is back", victim.role), async || match admin.nodes().await {
            Ok(nodes) => not_back(&nodes, victim),
            Err(error) => Some(error.to_string()),
        })
        .await?;
        for function in self.targets.names().filter(|&it| victim.functions.iter().any(|own| own == it)) {
            self.served_again(function).await?;
        }
        let took = seconds(self.timeline.now() - begun);
        self.timeline.saw(format!("the executor {} is back, {took} after the fault", victim.role));
        Ok(())
    }
}
