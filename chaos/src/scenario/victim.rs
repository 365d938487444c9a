//! An executor that a fault kills or stops, as the cluster describes the executor, and the check that the
//! executor was replaced.

use millrace_client::messages::{Gpu, Node};

/// An executor that the harness chose to kill or stop.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ExecutorVictim {
    pub(super) pid: u32,
    /// The pid by which the worker knows the executor, which differs from `pid` in a container.
    pub(super) told: u32,
    /// The name of the executor's worker.
    pub(super) node: String,
    /// The index of the executor's GPU, if the cluster reported it.
    pub(super) gpu: Option<u32>,
    /// The executor's job, as the cluster reports the job.
    pub(super) role: String,
    /// The functions of the executor's own model; empty if the executor belongs to a GPU.
    pub(super) functions: Vec<String>,
}

impl ExecutorVictim {
    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn role(&self) -> &str {
        &self.role
    }
}

/// Returns the executor with the cluster's description.
pub(super) fn found(nodes: &[Node], victim: ExecutorVictim) -> ExecutorVictim {
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

/// Returns the reason why an executor does not count as replaced: the executor's GPU is not up, or a GPU
/// of the same worker still names the executor.
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

    /// Returns a process of `w` with the cluster's description.
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
