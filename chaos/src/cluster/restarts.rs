//! Stops and restarts of a cluster's processes, and processes that end by themselves.

use std::process::ExitStatus;

use anyhow::{Context as _, bail};
use futures::future::join_all;

use super::caps::ConnectionCaps;
use super::cluster_process::ClusterProcess;
use super::process::{LaunchMethod, LaunchResult, LaunchSpec, RunningProcess, descendants, must_run};
use super::status::StatusGoal;
use super::test_cluster::{TestCluster, named};
use crate::proxy::LinkParty;

/// The result of a start that may be refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartResult {
    /// The process serves.
    Serves,
    /// The process ended by itself, with this status and this log.
    Refused(ExitStatus, String),
}

impl TestCluster {
    /// Kills a running process with SIGKILL. `role` describes the process in the timeline.
    ///
    /// # Errors
    /// If the process does not end.
    pub async fn kill(&mut self, process: &ClusterProcess, role: &str) -> anyhow::Result<()> {
        let Some(running) = self.take(process)? else { return Ok(()) };
        let pid = running.pid;
        self.timeline.fault(format!("kill -9 of {process} (pid {pid}){role}"));
        running.kill().await?;
        self.network.forget(pid);
        Ok(())
    }

    /// Sends SIGTERM to a running process, and waits for its orderly end.
    ///
    /// # Errors
    /// If the process does not end, or ends with an error.
    pub async fn end(&mut self, process: &ClusterProcess, role: &str) -> anyhow::Result<()> {
        let Some(running) = self.take(process)? else { return Ok(()) };
        let pid = running.pid;
        self.timeline.fault(format!("SIGTERM to {process} (pid {pid}){role}"));
        let status = running.end().await?;
        self.network.forget(pid);
        if !status.success() {
            bail!("{process} was asked to end, and ended with {status}");
        }
        self.timeline.saw(format!("{process} ended"));
        Ok(())
    }

    /// Restarts a process over its folder, unless it runs. Does not wait until the process serves.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn begin_start(&mut self, process: &ClusterProcess) -> anyhow::Result<()> {
        if self.running(process)?.is_some() || self.starting.iter().any(|(it, _)| it == process) {
            return Ok(());
        }
        self.timeline.did(format!("started {process} again"));
        let named = named(&self.network, &process.party());
        let recipe = self.recipe_of(process)?;
        // Start the process on the runtime's own threads, because a child is tied to the thread
        // that starts it: these threads end with the runtime, after the cluster.
        let start = tokio::spawn(async move { must_run(&recipe, recipe.start(named).await?) });
        self.starting.push((process.clone(), start));
        Ok(())
    }

    /// Waits until every starting process serves.
    ///
    /// # Errors
    /// If a process does not start.
    pub async fn join_starts(&mut self) -> anyhow::Result<()> {
        for (process, start) in std::mem::take(&mut self.starting) {
            let running = start.await.with_context(|| format!("the start of {process} failed"))?;
            *self.running_mut(&process)? = Some(running?);
        }
        Ok(())
    }

    /// Finishes the starts whose processes already serve.
    ///
    /// # Errors
    /// If a process does not start.
    pub async fn finish_ready_starts(&mut self) -> anyhow::Result<()> {
        let (done, left) =
            std::mem::take(&mut self.starting).into_iter().partition(|(_, it)| it.is_finished());
        self.starting = done;
        let joined = self.join_starts().await;
        self.starting = left;
        joined
    }

    /// Returns the pid of a running process.
    ///
    /// # Errors
    /// If the process does not run.
    pub fn pid(&self, process: &ClusterProcess) -> anyhow::Result<u32> {
        let running = self.running(process)?.as_ref();
        Ok(running.with_context(|| format!("{process} does not run"))?.pid)
    }

    /// Returns the ids of the running controllers.
    #[must_use]
    pub fn running_controllers(&self) -> Vec<u64> {
        self.controllers.iter().filter(|(_, it)| it.running.is_some()).map(|(&id, _)| id).collect()
    }

    /// Returns the names of the running workers.
    #[must_use]
    pub fn running_workers(&self) -> Vec<String> {
        self.workers.iter().filter(|(_, it)| it.running.is_some()).map(|(name, _)| name.clone()).collect()
    }

    fn running(&self, process: &ClusterProcess) -> anyhow::Result<&Option<RunningProcess>> {
        let found = match process {
            ClusterProcess::Controller(id) => self.controllers.get(id).map(|it| &it.running),
            ClusterProcess::Worker(name) => self.workers.get(name).map(|it| &it.running),
        };
        found.with_context(|| format!("there is no {process}"))
    }

    fn running_mut(&mut self, process: &ClusterProcess) -> anyhow::Result<&mut Option<RunningProcess>> {
        let found = match process {
            ClusterProcess::Controller(id) => self.controllers.get_mut(id).map(|it| &mut it.running),
            ClusterProcess::Worker(name) => self.workers.get_mut(name).map(|it| &mut it.running),
        };
        found.with_context(|| format!("there is no {process}"))
    }

    fn take(&mut self, process: &ClusterProcess) -> anyhow::Result<Option<RunningProcess>> {
        Ok(self.running_mut(process)?.take())
    }

    fn recipe_of(&self, process: &ClusterProcess) -> anyhow::Result<LaunchSpec> {
        let found = match process {
            ClusterProcess::Controller(id) => self.controllers.get(id).map(|it| it.recipe.clone()),
            ClusterProcess::Worker(name) => self.workers.get(name).map(|it| it.recipe.clone()),
        };
        found.with_context(|| format!("there is no {process}"))
    }

    fn recipe_mut(&mut self, process: &ClusterProcess) -> anyhow::Result<&mut LaunchSpec> {
        let found = match process {
            ClusterProcess::Controller(id) => self.controllers.get_mut(id).map(|it| &mut it.recipe),
            ClusterProcess::Worker(name) => self.workers.get_mut(name).map(|it| &mut it.recipe),
        };
        found.with_context(|| format!("there is no {process}"))
    }

    /// Kills all controllers with SIGKILL at once.
    ///
    /// # Errors
    /// If a controller does not end.
    pub async fn kill_all_controllers(&mut self) -> anyhow::Result<()> {
        let running: Vec<_> = self.controllers.values_mut().filter_map(|it| it.running.take()).collect();
        let pids: Vec<_> = running.iter().map(|it| it.pid).collect();
        self.timeline.fault(format!("kill -9 of every controller (pids {pids:?})"));
        // Send every signal before waiting for the first end.
        let killed = join_all(running.into_iter().map(RunningProcess::kill)).await;
        for pid in pids {
            self.network.forget(pid);
        }
        killed.into_iter().collect()
    }

    /// Restarts a controller over its folder. The controller may refuse to start.
    ///
    /// # Errors
    /// If the controller neither serves nor ends.
    pub async fn try_restart_controller(&mut self, id: u64) -> anyhow::Result<StartResult> {
        self.timeline.did(format!("started controller {id} again"));
        let named = named(&self.network, &LinkParty::Controller(id));
        let controller = self.controller_mut(id)?;
        let before = std::fs::metadata(&controller.recipe.log).map_or(0, |it| it.len());
        match controller.recipe.start(named).await? {
            LaunchResult::Ready(running) => {
                controller.running = Some(*running);
                Ok(StartResult::Serves)
            }
            LaunchResult::Ended(status) => {
                let log = std::fs::read(&controller.recipe.log).context("cannot read its log")?;
                let said = log.get(usize::try_from(before).unwrap_or(0)..).unwrap_or_default();
                Ok(StartResult::Refused(status, String::from_utf8_lossy(said).into_owned()))
            }
        }
    }

    /// Restarts a controller over its folder.
    ///
    /// # Errors
    /// If the controller does not serve.
    pub async fn restart_controller(&mut self, id: u64) -> anyhow::Result<()> {
        match self.try_restart_controller(id).await? {
            StartResult::Serves => Ok(()),
            StartResult::Refused(status, said) => bail!("controller {id} does not start ({status}): {said}"),
        }
    }

    /// Returns the exit status of a process that ended by itself; `None` if the process still runs. Such a
    /// process may be restarted.
    pub fn ended(&mut self, process: &ClusterProcess) -> Option<ExitStatus> {
        let running = self.running_mut(process).ok()?;
        let (pid, status) = running.as_mut().and_then(|it| Some((it.pid, it.ended()?)))?;
        *running = None;
        self.network.forget(pid);
        self.timeline.saw(format!("{process} ended by itself ({status})"));
        Some(status)
    }

    /// Runs a controller inside another program from its next start on, such as a program that
    /// enters other mounts. That program has to execute the controller in its own process, because
    /// its pid is taken for the controller's.
    ///
    /// # Errors
    /// If there is no such controller.
    pub fn place_controller(&mut self, id: u64, prefix: Vec<String>) -> anyhow::Result<()> {
        let controller = self.controller_mut(id)?;
        let LaunchMethod::Child { prefix: before, .. } = &mut controller.recipe.how else {
            bail!("controller {id} is a container");
        };
        *before = [controller.house.prefix.clone(), prefix].concat();
        Ok(())
    }

    /// Restarts every process without a limit by address, in sequence. Each process ends in
    /// order, and the next process follows once the cluster has reached `wanted` again.
    ///
    /// # Errors
    /// If a process does not end in order, or the cluster does not reach `wanted` again.
    pub async fn drop_address_caps(&mut self, wanted: StatusGoal) -> anyhow::Result<()> {
        let controllers = self.controllers.keys().map(|&id| ClusterProcess::Controller(id));
        let workers = self.workers.keys().map(|name| ClusterProcess::Worker(name.clone()));
        for process in controllers.chain(workers).collect::<Vec<_>>() {
            self.end(&process, ", to start it without a cap by address").await?;
            if let LaunchMethod::Child { words, .. } = &mut self.recipe_mut(&process)?.how {
                ConnectionCaps::without_address_cap(words);
            }
            self.begin_start(&process)?;
            self.join_starts().await?;
            self.wait_for_status(wanted).await?;
        }
        Ok(())
    }

    /// Returns the pid of a running worker.
    ///
    /// # Errors
    /// If the worker does not run.
    pub fn worker_pid(&self, name: &str) -> anyhow::Result<u32> {
        self.pid(&ClusterProcess::Worker(name.to_owned()))
    }

    /// Returns the pids of all running processes, executors included.
    #[must_use]
    pub fn pids(&self) -> Vec<u32> {
        let controllers = self.controllers.values().filter_map(|it| it.running.as_ref());
        let workers = self.workers.values().filter_map(|it| it.running.as_ref());
        let parts: Vec<u32> = controllers.chain(workers).map(|it| it.pid).collect();
        parts.iter().flat_map(|&pid| [vec![pid], descendants(pid)].concat()).collect()
    }

    /// Kills every process with SIGKILL, except for the executors, which have to end with their
    /// workers.
    ///
    /// # Errors
    /// If a process does not end.
    pub async fn kill_all_servers(&mut self) -> anyhow::Result<()> {
        for (_, start) in self.starting.drain(..) {
            start.abort();
        }
        let controllers = self.controllers.values_mut().map(|it| (&it.recipe, it.running.take()));
        let workers = self.workers.values_mut().map(|it| (&it.recipe, it.running.take()));
        for (recipe, running) in controllers.chain(workers) {
            if let Some(running) = running {
                running.kill().await?;
            }
            recipe.keep_log().await?;
        }
        Ok(())
    }
}
