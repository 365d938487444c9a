//! The slices that functions ask for, and the commands that bring the nodes to them.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_cluster_state::{NodeSlice, NodeStatus, SliceRecord, State, StateCommand};
use millrace_slices::pack::FitCheck;
use millrace_slices::placing::{self, NodeSharing, PlacedSlice, SharedNode, SlicePlacement, SliceWish};
use millrace_slices::tokens::Config;
use millrace_types::NodeName;

use super::slice_scaling::SliceScalers;
use crate::fleet::Workers;
use crate::leadership::MissingSlices;

/// Plans the slices of the cluster.
#[derive(Debug)]
pub(super) struct SlicePlanner {
    fit: FitCheck,
    pub(super) scalers: SliceScalers,
}

impl SlicePlanner {
    pub(super) fn new() -> Self {
        Self { fit: FitCheck::new(Config::SLICES), scalers: SliceScalers::default() }
    }

    /// Returns the slices that the cluster should have.
    pub(super) fn plan(&mut self, state: &State, workers: &Workers) -> SlicePlacement {
        let wishes = wishes(state, &self.scalers);
        let present = present(state);
        if wishes.is_empty() && present.is_empty() {
            return SlicePlacement::default();
        }
        placing::place(&wishes, &nodes(state, workers), &present, state.slices_given(), &mut self.fit)
    }
}

fn wishes(state: &State, scalers: &SliceScalers) -> Vec<SliceWish> {
    let wishes = state.functions().filter(|function| function.enabled).filter_map(|function| {
        let revision = function.latest();
        let asked = revision.spec.slices?;
        let artifact = state.artifact(&revision.digest)?;
        Some(SliceWish {
            function: function.key.clone(),
            terms: asked.terms,
            count: scalers.count(&function.key, &asked),
            memory: revision.gpu_memory(&artifact.model),
            nodes: state.placements_of(&function.key).map(|placement| placement.node.clone()).collect(),
        })
    });
    wishes.collect()
}

fn present(state: &State) -> Vec<PlacedSlice> {
    let of_placement = |placement: &Arc<millrace_cluster_state::PlacementRecord>| {
        let slice = |slice: &SliceRecord| PlacedSlice {
            id: slice.id,
            function: placement.function.clone(),
            node: placement.node.clone(),
            gpu: slice.gpu,
            terms: slice.terms,
        };
        placement.slices.iter().map(slice).collect::<Vec<_>>()
    };
    state.placements().flat_map(of_placement).collect()
}

fn nodes(state: &State, workers: &Workers) -> Vec<SharedNode> {
    let live = state.nodes().filter(|node| node.status == NodeStatus::Live);
    let node = |node: &Arc<millrace_cluster_state::NodeRecord>| {
        // The stream of an ended registration says nothing about the present one.
        let worker = workers.get(&node.name).filter(|worker| worker.epoch() == node.epoch);
        let shares = worker.and_then(|worker| worker.shares_gpus());
        let sharing = match shares {
            Some(true) => NodeSharing::Shares,
            Some(false) => NodeSharing::SharesNot,
            None => NodeSharing::Unknown,
        };
        let lost = worker.map(|worker| worker.lost_gpus()).unwrap_or_default();
        let gpus = node.gpus.iter().filter(|gpu| !lost.contains(&gpu.index));
        let gpus = gpus.map(|gpu| (gpu.index, gpu.memory)).collect();
        SharedNode { name: node.name.clone(), sharing, gpus }
    };
    live.map(node).collect()
}

/// Returns a command for each node with slices other than planned.
pub(super) fn commands(state: &State, plan: &SlicePlacement) -> Vec<StateCommand> {
    let mut wanted: BTreeMap<&NodeName, Vec<NodeSlice>> = BTreeMap::new();
    for slice in &plan.slices {
        let PlacedSlice { id, ref function, ref node, gpu, terms } = *slice;
        let slice = SliceRecord { id, gpu, terms };
        wanted.entry(node).or_default().push(NodeSlice { function: function.clone(), slice });
    }
    let changed = state.nodes().filter_map(|node| {
        let mut slices = wanted.remove(&node.name).unwrap_or_default();
        slices.sort_by(|a, b| (&a.function, a.slice.id).cmp(&(&b.function, b.slice.id)));
        let has = state.slices_on(&node.name);
        let same = has.eq(slices.iter().map(|wanted| (&wanted.function, wanted.slice)));
        (!same).then(|| StateCommand::SetSlices { node: node.name.clone(), slices })
    });
    changed.collect()
}

/// Returns the slices without a GPU, by function.
pub(super) fn missing(plan: &SlicePlacement) -> MissingSlices {
    let missing = plan.missing.iter().map(|missing| (missing.function.clone(), missing.clone()));
    Arc::new(missing.collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_cluster_state::{NodeGpu, PlacementReason, RulesVersion};
    use millrace_proto::worker as wire;
    use millrace_types::policy::GpuSharingName;
    use millrace_types::{AskedSlices, Bytes, Epoch, GpuIndex, Permille, SliceId, Terms, Timestamp};

    use super::*;
    use crate::connector::{Connector as _, Tcp};
    use crate::fixtures::{apply, key, state};
    use crate::fleet::AttachedWorker;

    fn terms(sms: u16) -> Terms {
        let share = |thousandths| Permille::new(thousandths).unwrap();
        Terms::new(share(sms), share(sms), share(300), share(800)).unwrap()
    }

    fn register(state: &mut State, gpus: u32) {
        apply(
            state,
            StateCommand::RegisterNode {
                name: NodeName::new("n1").unwrap(),
                instance: "first".into(),
                address: "127.0.0.1:1".into(),
                gpus: (0..gpus)
                    .map(|index| NodeGpu {
                        index: GpuIndex(index),
                        gpu_type: "emulated".into(),
                        memory: Bytes::gib(1),
                    })
                    .collect(),
                topology: String::new(),
                host_memory: Bytes::gib(1),
                seen: Epoch::default(),
            },
        );
    }

    fn ask(state: &mut State, function: &str, slices: Option<AskedSlices>) {
        let record = state.function(&key(function)).unwrap().clone();
        let revision = record.latest();
        let spec = millrace_types::FunctionSpec { slices, ..revision.spec.clone() };
        let digest = revision.digest;
        apply(state, StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() });
    }

    #[test]
    fn a_plan_is_carried_out_by_one_command_for_each_node_that_differs() {
        let mut state = state(&["f", "g"]);
        apply(&mut state, StateCommand::SetClusterVersion { version: RulesVersion::NEWEST });
        register(&mut state, 1);
        let place = |function: &str| StateCommand::Place {
            function: key(function),
            node: NodeName::new("n1").unwrap(),
            reason: PlacementReason::MissingReplica,
        };
        apply(&mut state, place("f"));
        apply(&mut state, place("g"));
        let mut planner = SlicePlanner::new();
        let nobody = Workers::default();
        assert_eq!(planner.plan(&state, &nobody), SlicePlacement::default());
        ask(&mut state, "f", Some(AskedSlices::fixed(terms(120), 2)));
        let plan = planner.plan(&state, &nobody);
        assert_eq!((plan.slices.len(), plan.missing[0].count), (0, 2), "no node has reported");
        assert_eq!(commands(&state, &plan), []);
        assert_eq!(missing(&plan).len(), 1);

        let slice = |id| PlacedSlice {
            id: SliceId(id),
            function: key("f"),
            node: NodeName::new("n1").unwrap(),
            gpu: GpuIndex(0),
            terms: terms(120),
        };
        let wanted = SlicePlacement { slices: vec![slice(1), slice(2)], missing: Vec::new() };
        let [command] = &commands(&state, &wanted)[..] else { panic!("one node differs") };
        apply(&mut state, command.clone());
        assert_eq!(commands(&state, &wanted), []);
        // A node without a report keeps its slices, also under a new leader.
        assert_eq!(SlicePlanner::new().plan(&state, &nobody).slices, wanted.slices);
        // A function that asks for none loses its slices.
        ask(&mut state, "f", None);
        let plan = planner.plan(&state, &nobody);
        let [command] = &commands(&state, &plan)[..] else { panic!("one node differs") };
        apply(&mut state, command.clone());
        assert_eq!(state.slices_on(&NodeName::new("n1").unwrap()).count(), 0);
    }

    /// Returns a worker that shares its GPUs, and a report of the worker with these GPUs.
    fn worker(
        state: &State,
    ) -> (Arc<AttachedWorker>, impl Fn(u64, [wire::GpuHealth; 2]) -> wire::Telemetry + use<>) {
        let name = NodeName::new("n1").unwrap();
        let epoch = state.node(&name).unwrap().epoch;
        let transport = Tcp.connect(&name, "127.0.0.1:1").unwrap();
        let worker = AttachedWorker::new(name, Default::default(), epoch, transport, Timestamp::ZERO);
        let spec = millrace_proto::policy::PolicySpec {
            gpu_sharing: GpuSharingName::Slices.to_string(),
            ..Default::default()
        };
        let report = move |seq: u64, gpus: [wire::GpuHealth; 2]| wire::Telemetry {
            epoch: epoch.0,
            seq,
            policy: Some(wire::Policy { spec: Some(spec.clone()), ..Default::default() }),
            gpus: (0..)
                .zip(gpus)
                .map(|(index, health)| wire::GpuTelemetry {
                    index,
                    health: health.into(),
                    ..Default::default()
                })
                .collect(),
            ..Default::default()
        };
        (Arc::new(worker), report)
    }

    #[tokio::test]
    async fn slices_leave_a_gpu_that_has_been_without_an_executor() {
        let mut state = state(&["f"]);
        apply(&mut state, StateCommand::SetClusterVersion { version: RulesVersion::NEWEST });
        register(&mut state, 2);
        let node = NodeName::new("n1").unwrap();
        let reason = PlacementReason::MissingReplica;
        apply(&mut state, StateCommand::Place { function: key("f"), node: node.clone(), reason });
        ask(&mut state, "f", Some(AskedSlices::fixed(terms(120), 1)));
        let (worker, report) = worker(&state);
        let workers: Workers = Arc::new([(node, worker.clone())].into());
        let up = wire::GpuHealth::Up;
        let mut planner = SlicePlanner::new();
        let plan = |state: &mut State, planner: &mut SlicePlanner| {
            let plan = planner.plan(state, &workers);
            commands(state, &plan).into_iter().for_each(|command| apply(state, command));
            plan.slices.iter().map(|slice| slice.gpu).collect::<Vec<_>>()
        };
        worker.report(report(1, [up, up]));
        assert_eq!(plan(&mut state, &mut planner), [GpuIndex(0)]);

        worker.report(report(2, [wire::GpuHealth::Restarting, up]));
        assert!(!worker.note_absent_gpus(Timestamp::ZERO));
        assert_eq!(plan(&mut state, &mut planner), [GpuIndex(0)], "the executor may come back");
        worker.report(report(3, [wire::GpuHealth::Restarting, up]));
        assert!(worker.note_absent_gpus(Timestamp::ZERO + Duration::from_secs(60)));
        assert_eq!(plan(&mut state, &mut planner), [GpuIndex(1)]);
        worker.report(report(4, [up, up]));
        assert!(worker.note_absent_gpus(Timestamp::ZERO + Duration::from_secs(61)));
        assert_eq!(plan(&mut state, &mut planner), [GpuIndex(1)], "a slice moves only if it has to");
    }
}
