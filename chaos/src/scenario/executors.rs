//! Executor processes, for each GPU or for each model: choosing a victim, killing it, and waiting for its
//! replacement.

use anyhow::Context as _;
use millrace_client::messages::{Gpu, Node};
use rand::seq::IndexedRandom as _;
use rustix::process::Signal;

use super::stage::ScenarioStage;
use crate::cluster::{descendants, is_alive, own_pid, signal, until};
use crate::timeline::seconds;

/// An executor that the harness chose to kill or stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExecutorVictim {
    pid: u32,
    /// The pid by which its worker knows it, which differs from `pid` in a container.
    told: u32,
    /// The name of its worker.
    node: String,
    /// The index of its GPU, if the cluster reported it.
    gpu: Option<u32>,
    /// The executor's job, as the cluster reports it.
    role: String,
    /// The functions of its own model; empty if the executor belongs to a GPU.
    functions: Vec<String>,
}

impl ExecutorVictim {
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn role(&self) -> &str {
        &self.role
    }
}

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

/// Returns the executor with the cluster's description of it.
fn found(nodes: &[Node], victim: ExecutorVictim) -> ExecutorVictim {
    let pid = victim.told;
    for node in nodes.iter().filter(|node| node.name == victim.node) {
        for gpu in &node.gpus {
            let role = format!("of GPU {} of {}", gpu.index, node.name);
            let place = Some(gpu.index);
            if gpu.executor_pid == pid {
                return ExecutorVictim { gpu: place, role, ..victim };
            }
            let own = gpu.models.iter().find(|model| model.executor_pid == pid);
            let functions: Vec<_> =
                own.iter().flat_map(|model| &model.functions).map(|it| name(it).to_owned()).collect();
            if !functions.is_empty() {
                let role = format!("of {} {role}", functions.join(", "));
                return ExecutorVictim { gpu: place, role, functions, ..victim };
            }
            if gpu.executor_pids.contains(&pid) {
                return ExecutorVictim { gpu: place, role: format!("of a model {role}"), ..victim };
            }
        }
    }
    victim
}

/// Returns the name in `tenant/name@revision`.
fn name(revision: &str) -> &str {
    let key = revision.split_once('@').map_or(revision, |(key, _)| key);
    key.rsplit_once('/').map_or(key, |(_, name)| name)
}

/// Returns the reason why an executor does not count as replaced: its GPU is not up, or a GPU of
/// its worker still names it.
pub(super) fn not_back(nodes: &[Node], victim: &ExecutorVictim) -> Option<String> {
    let not_back = |node: &Node, gpu: &Gpu| {
        let is_its = victim.gpu.is_none_or(|index| node.name == victim.node && index == gpu.index);
        let named = node.name == victim.node
            && (gpu.executor_pid == victim.told || gpu.executor_pids.contains(&victim.told));
        (is_its && gpu.health != "Up" || named)
            .then(|| format!("GPU {} of {}: {}, {:?}", gpu.index, node.name, gpu.health, gpu.executor_pids))
    };
    nodes.iter().find_map(|node| node.gpus.iter().find_map(|gpu| not_back(node, gpu)))
}

#[cfg(test)]
mod tests {
    use millrace_client::messages::ResidentModel;

    use super::*;

    fn node(gpu: Gpu) -> [Node; 1] {
        [Node { name: "w".into(), gpus: vec![gpu], ..Default::default() }]
    }

    /// Returns a process of `w` with the cluster's description of it.
    fn victim(nodes: &[Node], told: u32) -> ExecutorVictim {
        let pid = told + 1000;
        let node = "w".to_owned();
        let role = "of a model".to_owned();
        found(nodes, ExecutorVictim { pid, told, node, gpu: None, role, functions: Vec::new() })
    }

    #[test]
    fn an_executor_is_described_by_its_gpu_or_its_model() {
        let shared = node(Gpu { executor_pid: 7, executor_pids: vec![7], ..Default::default() });
        assert_eq!(victim(&shared, 7).role, "of GPU 0 of w");
        let model =
            ResidentModel { functions: vec!["default/f@2".into()], executor_pid: 8, ..Default::default() };
        let own = node(Gpu { executor_pids: vec![8, 9], models: vec![model], ..Default::default() });
        let found = victim(&own, 8);
        assert_eq!((found.role.as_str(), found.functions), ("of f of GPU 0 of w", vec!["f".to_owned()]));
        assert_eq!(victim(&own, 9).role, "of a model of GPU 0 of w");
        assert_eq!(victim(&own, 10).role, "of a model");
    }

    #[test]
    fn a_gpu_is_back_once_it_is_up_without_the_dead_process() {
        let gpu = |index, health: &str, pids: &[u32]| Gpu {
            index,
            health: health.into(),
            executor_pids: pids.to_vec(),
            ..Default::default()
        };
        let killed = victim(&node(gpu(0, "Up", &[7])), 7);
        assert!(not_back(&node(gpu(0, "Up", &[7])), &killed).is_some());
        assert!(not_back(&node(gpu(0, "Restarting", &[])), &killed).is_some());
        assert_eq!(not_back(&node(gpu(0, "Up", &[8])), &killed), None);
        assert_eq!(not_back(&node(gpu(0, "Up", &[])), &killed), None);
        assert_eq!(not_back(&node(gpu(1, "Restarting", &[8])), &killed), None, "another GPU");
        let elsewhere = [Node { name: "v".into(), ..node(gpu(0, "Up", &[7]))[0].clone() }];
        assert_eq!(
            not_back(&elsewhere, &killed),
            None,
            "an executor of another worker, with the same number"
        );
    }
}
