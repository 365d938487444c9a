//! Inputs of the placement planner. The state gives desired and existing placements; the workers
//! attached to this controller give the phase of placements and the load of nodes.

use std::collections::BTreeMap;

use millrace_cluster_state::{FunctionRecord, NodeRecord, State, WorkflowRecord};
use millrace_nodes::placement::{self, ClusterSnapshot, DataFlow, MeasuredTraffic};
use millrace_types::{Bytes, FunctionKey, FunctionName, NodeName};

use super::load::Loads;
use crate::fleet::readiness::revision_key;
use crate::fleet::{RevisionPhase, Workers};

/// Returns the planner's snapshot of the cluster.
pub(super) fn view(
    state: &State,
    workers: &Workers,
    loads: &Loads,
    flows: &mut WorkflowFlows,
    measured: &MeasuredTraffic,
) -> ClusterSnapshot {
    let functions = state.functions().map(|it| function(state, it, loads)).collect();
    let nodes = state.nodes().map(|it| node(it, loads)).collect();
    let placements = state.placements().map(|placement| {
        let function = state.function(&placement.function);
        let phase =
            function.map_or(placement::PlacementPhase::Preparing, |it| phase(it, &placement.node, workers));
        placement::FunctionPlacement {
            function: placement.function.clone(),
            node: placement.node.clone(),
            phase,
        }
    });
    ClusterSnapshot {
        functions,
        nodes,
        placements: placements.collect(),
        flows: flows.of(state, measured).to_vec(),
    }
}

/// The traffic of all workflows, cached by the versions of the state and of the measurements. Most
/// plans follow reports of nodes, and going through many workflows takes long.
#[derive(Debug, Default)]
pub(super) struct WorkflowFlows {
    /// The versions of the state and of the measurements from which `flows` was computed.
    version: Option<(u64, u64)>,
    flows: Vec<DataFlow>,
}

impl WorkflowFlows {
    fn of(&mut self, state: &State, measured: &MeasuredTraffic) -> &[DataFlow] {
        let version = Some((state.version(), measured.version()));
        if self.version != version {
            self.flows = state.workflows().flat_map(|workflow| flows(state, workflow, measured)).collect();
            self.version = version;
        }
        &self.flows
    }
}

/// Returns the traffic between the functions of a workflow.
fn flows(state: &State, workflow: &WorkflowRecord, measured: &MeasuredTraffic) -> Vec<DataFlow> {
    let key = |name: &FunctionName| FunctionKey { tenant: workflow.key.tenant.clone(), name: name.clone() };
    let ports = |name: &FunctionName| {
        let artifact = state.artifact(&state.function(&key(name))?.latest().digest)?;
        Some(artifact.model.ports())
    };
    let inner = |name: &FunctionName| state.workflow(&key(name)).map(|inner| &inner.spec);
    let passed = |from: &FunctionName, to: &FunctionName| {
        measured.passed(&workflow.key, workflow.generation, &(from.clone(), to.clone()))
    };
    let edges = workflow.spec.edges(ports, inner, passed).into_iter().map(|edge| DataFlow {
        from: key(edge.from),
        to: key(edge.to),
        bytes: edge.bytes,
        is_critical: edge.is_critical,
    });
    edges.collect()
}

fn function(state: &State, function: &FunctionRecord, loads: &Loads) -> placement::DesiredReplicas {
    let models = || {
        let served = function.served().iter();
        served.filter_map(|revision| Some((revision, state.artifact(&revision.digest)?)))
    };
    // Collect by digest, because two revisions with the same file need one copy.
    let needed: BTreeMap<_, _> = models().map(|(it, artifact)| (it.digest, artifact.model.weights)).collect();
    placement::DesiredReplicas {
        key: function.key.clone(),
        enabled: function.enabled,
        replicas: function.latest().spec.replicas,
        models: needed.into_iter().map(|(digest, host)| placement::PlacedModel { digest, host }).collect(),
        gpu: models().map(|(it, artifact)| it.gpu_memory(&artifact.model)).max().unwrap_or(Bytes::ZERO),
        load: loads.of_function(&function.key),
        ran: state.has_answered_requests(function),
        // Only the newest version counts. If only the version before keeps state, `readiness::serving`
        // finds the copy with the sequences. Counting that version here would limit the newest version
        // to a single copy forever.
        keeps_state: function.latest().spec.sequences.is_some(),
    }
}

fn node(node: &NodeRecord, loads: &Loads) -> placement::PlacementNode {
    placement::PlacementNode {
        name: node.name.clone(),
        state: node.state(),
        host: node.host_memory,
        gpu: node.largest_gpu(),
        gpus: u32::try_from(node.gpus.len()).unwrap_or(u32::MAX),
        busy: loads.of_node(&node.name),
    }
}

/// Returns the phase of a function on a node: the phase of its newest revision. The node is not ready
/// while the revision before is still being prepared, because clients may name that revision.
fn phase(function: &FunctionRecord, node: &NodeName, workers: &Workers) -> placement::PlacementPhase {
    let worker = workers.get(node);
    let of = |revision| worker.and_then(|worker| worker.phase(&revision_key(&function.key, revision)));
    phase_of(of(function.latest()), function.served().iter().map(|revision| of(revision)))
}

fn phase_of(
    newest: Option<RevisionPhase>,
    mut served: impl Iterator<Item = Option<RevisionPhase>>,
) -> placement::PlacementPhase {
    let settled = |phase| matches!(phase, Some(RevisionPhase::Ready | RevisionPhase::Failed(_)));
    match newest {
        Some(RevisionPhase::Failed(_)) => placement::PlacementPhase::Failed,
        Some(RevisionPhase::Ready) if served.all(settled) => placement::PlacementPhase::Ready,
        Some(RevisionPhase::Ready | RevisionPhase::Preparing) | None => placement::PlacementPhase::Preparing,
    }
}

#[cfg(test)]
mod tests {
    use millrace_cluster_state::StateCommand;
    use millrace_nodes::placement::{RUNS_MIN, TrafficCounts};

    use super::*;
    use crate::fixtures::{apply, chain, key, state};

    #[test]
    fn flows_are_computed_again_when_the_state_changes() {
        let mut state = state(&["f", "g", "h"]);
        let mut flows = WorkflowFlows::default();
        let passed = |flows: &mut WorkflowFlows, state: &State| -> Vec<_> {
            flows
                .of(state, &MeasuredTraffic::default())
                .iter()
                .map(|flow| (flow.from.clone(), flow.to.clone()))
                .collect()
        };
        assert_eq!(passed(&mut flows, &state), []);
        for last in ["g", "h"] {
            let spec = chain(&[("a", "f"), ("b", last)]);
            apply(&mut state, StateCommand::ApplyWorkflow { spec, expected: None });
            for _ in 0..2 {
                assert_eq!(passed(&mut flows, &state), [(key("f"), key(last))]);
            }
        }
    }

    #[test]
    fn measured_traffic_replaces_declared_traffic_after_enough_runs() {
        let mut state = state(&["f", "g"]);
        let mut flows = WorkflowFlows::default();
        let mut measured = MeasuredTraffic::default();
        let spec = chain(&[("a", "f"), ("b", "g")]);
        apply(&mut state, StateCommand::ApplyWorkflow { spec, expected: None });
        let from = key("f");
        let to = key("g");
        let generation = state.workflow(&key("w")).unwrap().generation;
        for (runs, bytes) in [(RUNS_MIN - 1, 256), (RUNS_MIN, 1 << 20)] {
            let pairs = Some([((from.name.clone(), to.name.clone()), runs << 20)].into());
            measured.take(1, vec![TrafficCounts { workflow: key("w"), generation, runs, pairs }]);
            let flow =
                DataFlow { from: from.clone(), to: to.clone(), bytes: Bytes(bytes), is_critical: true };
            assert_eq!(flows.of(&state, &measured), [flow], "{runs}");
        }
    }

    #[test]
    fn a_placement_has_the_phase_of_its_newest_revision_and_waits_for_the_one_before() {
        let failed = || RevisionPhase::Failed("why".into());
        let check = |older, newest: Option<RevisionPhase>, expected| {
            let served = [older, newest.clone()];
            assert_eq!(phase_of(newest, served.clone().into_iter()), expected, "{served:?}");
        };
        use placement::PlacementPhase as Placed;
        check(Some(RevisionPhase::Ready), Some(RevisionPhase::Ready), Placed::Ready);
        check(Some(failed()), Some(RevisionPhase::Ready), Placed::Ready);
        check(Some(RevisionPhase::Preparing), Some(RevisionPhase::Ready), Placed::Preparing);
        check(None, Some(RevisionPhase::Ready), Placed::Preparing);
        check(Some(RevisionPhase::Ready), Some(RevisionPhase::Preparing), Placed::Preparing);
        check(Some(RevisionPhase::Ready), None, Placed::Preparing);
        check(Some(RevisionPhase::Ready), Some(failed()), Placed::Failed);
    }
}
